"""The collective steps of start-up, over a torch ProcessGroup or an object with the same methods.

Only `create`, the growth and the renewal of a workspace use them. Nothing here runs between
dispatch and combine.
"""

from __future__ import annotations

import datetime
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch.distributed

from .errors import DisagreementError, ExchangeStateError, InputError, PeerError

T = TypeVar("T")


class Group(Protocol):
    """What start-up needs from a group of ranks: their number, this rank, and one collective."""

    rank: int
    size: int

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return every rank's value, in rank order. Collective; any value that pickle takes."""
        ...


class _TorchGroup:
    """Adapter from a torch.distributed.ProcessGroup to a Group."""

    def __init__(self, group: torch.distributed.ProcessGroup, timeout_s: float) -> None:
        self.rank = group.rank()
        self.size = group.size()
        self._group: Any = group
        self._timeout = datetime.timedelta(seconds=timeout_s)

    def all_gather_object(self, value: Any) -> list[Any]:
        self._wait_for_all_ranks()
        values: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(values, value, group=self._group)
        return values

    def _wait_for_all_ranks(self) -> None:
        # If a rank is missing, gloo's own collectives time out without naming it; this barrier
        # names it. Methods of the group, because torch's functions do not know groups that a
        # framework has made beside torch's world.
        if self._group.name() != "gloo" or self.size == 1:
            return
        try:
            self._group.monitored_barrier(self._timeout, True)
        except RuntimeError as error:
            raise PeerError(f"not all ranks of the group arrived: {error}") from error


class _ObjectGroup:
    """Adapter from an object with rank, size (values or methods) and all_gather_object."""

    def __init__(self, group: Any) -> None:
        self.rank = int(_value(group.rank))
        self.size = int(_value(group.size))
        self._gather: Callable[[Any], list[Any]] = group.all_gather_object

    def all_gather_object(self, value: Any) -> list[Any]:
        return list(self._gather(value))


class StoreGroup:
    """Group over a torch.distributed Store, for ranks that come and go.

    A process group cannot take a rank in. A store can serve one group after another: each has a
    name of its own, and exists when its ranks make it. To make one waits for nobody.

    Args:
        store: a torch.distributed.Store, such as a TCPStore. Its timeout bounds each step,
            in which the others may have to wait for a verb's own timeout.
        name: name of this group, which no other group on the store has or had. After an error make
            one of another name: ranks may stand at different steps.
        rank: this rank, 0..size-1.
        size: ranks of the group.

    Raises:
        InputError: rank is not one of the group, or the name has been used.
    """

    def __init__(self, store: Any, name: str, rank: int, size: int) -> None:
        if not 0 <= rank < size:
            raise InputError(f"rank={rank} is not from 0 to {size - 1} (size={size})")
        self.rank, self.size = rank, size
        self._store, self._prefix, self._steps = store, f"moe_nvlink/{name}", 0
        self._has_failed = False
        if store.add(f"{self._prefix}/made by {rank}", 1) > 1:
            raise InputError(
                f"rank {rank} has made a group {name!r} on this store before; a group has a name "
                "of its own, because the store keeps what the ranks of another one have said"
            )

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return every rank's value, in rank order. Collective; any value that pickle takes.

        Raises:
            PeerError: a rank did not come within the store's timeout; names it.
        """
        if self._has_failed:
            raise PeerError(
                f"group {self._prefix} has failed before, and its ranks may stand at different "
                "steps; make one of another name"
            )
        self._steps += 1
        step = f"{self._prefix}/{self._steps}"
        self._has_failed = True
        try:
            self._store.set(f"{step}/{self.rank}", pickle.dumps(value))
        except RuntimeError as error:
            raise PeerError(f"the store of group {self._prefix} is gone: {error}") from error
        values = [pickle.loads(self._value_of(rank, step)) for rank in range(self.size)]
        self._has_failed = False
        return values

    def _value_of(self, rank: int, step: str) -> bytes:
        try:
            value: bytes = self._store.get(f"{step}/{rank}")
        except RuntimeError as error:  # torch's DistStoreError
            raise PeerError(f"rank {rank} of group {self._prefix} did not come: {error}") from error
        return value


class Placed:
    """Group whose ranks have places in a larger exchange; the other places are empty.

    Attributes:
        rank: place of this rank.
        size: number of places.
        members: places of the ranks, in the order of `all_gather_object`.
    """

    def __init__(self, group: Group, places: Sequence[int], size: int) -> None:
        self.members = tuple(places)
        self.rank, self.size = self.members[group.rank], size
        self._group = group

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return every member's value, in the order of `members`. Collective."""
        return self._group.all_gather_object(value)


def members_of(group: Any) -> Sequence[int]:
    """Return the places that have a rank, in the order of the group's values. Local."""
    members: Sequence[int] = getattr(group, "members", range(group.size))
    return members


class Left:
    """Rank and size of a group that is not used any more, and is not kept alive.

    The threads of a gloo group live as long as the group does. If Python ends before they do, one
    that still lets go of a tensor ends the process by SIGABRT.
    """

    def __init__(self, group: Group) -> None:
        self.rank, self.size, self.members = group.rank, group.size, members_of(group)

    def all_gather_object(self, value: Any) -> list[Any]:
        """Raise ExchangeStateError."""
        raise ExchangeStateError("the workspace is closed; create a new MoeAllToAll or HeadGroup")


def _value(member: Any) -> Any:
    return member() if callable(member) else member


def as_group(group: Any, timeout_s: float) -> Group:
    """Adapt the caller's group. Local.

    Args:
        group: a torch ProcessGroup, or an object with rank, size and all_gather_object.
        timeout_s: seconds that a collective step on gloo waits for the other ranks.

    Raises:
        InputError: `group` is neither a ProcessGroup nor has rank, size and all_gather_object.
    """
    if isinstance(group, torch.distributed.ProcessGroup):
        return _TorchGroup(group, timeout_s)
    missing = [n for n in ("rank", "size", "all_gather_object") if not hasattr(group, n)]
    if missing:
        raise InputError(
            f"group {type(group).__name__} lacks {', '.join(missing)}; pass a torch ProcessGroup "
            "or an object with rank, size and all_gather_object"
        )
    return _ObjectGroup(group)


def all_or_none(group: Group, what: str, step: Callable[[], T]) -> T:
    """Run `step` on every rank; if it fails on one rank, raise on all ranks. Collective.

    No rank waits for a rank that has given up. The caller undoes its part on any exception.

    Args:
        group: the ranks.
        what: what the step does, for the message: "loading the kernels".
        step: this rank's part; it may not be collective in itself.

    Raises:
        Exception: the error of this rank's step.
        PeerError: another rank's step failed; names that rank and the cause.
    """
    result: T | None = None
    error: Exception | None = None
    try:
        result = step()
    except Exception as caught:
        error = caught
    cause = None if error is None else f"{type(error).__name__}: {error}"
    try:
        causes = group.all_gather_object(cause)
    except Exception as lost:
        if error is not None:  # this rank's own error is the likelier cause
            raise error from lost
        raise
    if error is not None:
        raise error
    everyones = zip(members_of(group), causes, strict=True)
    failed = [f"rank {rank}: {cause}" for rank, cause in everyones if cause is not None]
    if failed:
        raise PeerError(f"{what} failed on another rank; {'; '.join(failed)}")
    return result  # type: ignore[return-value]


def refuse_differences(
    everyones: Sequence[Mapping[str, str]],
    ranks: Sequence[int] | None = None,
    problem: str = "the ranks were given different configurations",
) -> None:
    """Check that all ranks have the same values. Local.

    Args:
        everyones: for each rank, in rank order: name of a field -> its value.
        ranks: the ranks; None: 0, 1, 2 and so on.
        problem: what the error begins with.

    Raises:
        DisagreementError: names each field that differs, and every rank's value of it.
    """
    numbered = list(zip(range(len(everyones)) if ranks is None else ranks, everyones, strict=True))
    differences = [
        f"{name}: " + ", ".join(f"rank {rank} has {v[name]}" for rank, v in numbered)
        for name in everyones[0]
        if len({values[name] for values in everyones}) > 1
    ]
    if differences:
        raise DisagreementError(f"{problem}; " + "; ".join(differences))


def tell(group: Group, called: str, values: dict[str, str], more: Any) -> list[Any]:
    """Return what every rank has told beside equal values. Collective.

    Args:
        group: the ranks.
        called: what this rank's caller has called; equal on all ranks.
        values: name -> value, equal on all ranks.
        more: what the others get to know of this rank.

    Raises:
        DisagreementError: the ranks have called different functions, or their values differ.
    """
    everyones = group.all_gather_object((called, values, more))
    members = members_of(group)
    calls = [{"the call": str(theirs[0])} for theirs in everyones]
    refuse_differences(calls, members, "the ranks make different calls; make the same on all")
    counts = [{"number of values": str(len(theirs[1]))} for theirs in everyones]
    refuse_differences(counts, members)
    refuse_differences([theirs[1] for theirs in everyones], members)
    return [theirs[2] for theirs in everyones]
