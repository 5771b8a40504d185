"""The collective steps of start-up, over a torch ProcessGroup or an object with the same methods.

Only `create` and the growth of a workspace use them. Nothing here runs between dispatch and
combine.
"""

from __future__ import annotations

import datetime
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
        self._group = group
        self._timeout = datetime.timedelta(seconds=timeout_s)

    def all_gather_object(self, value: Any) -> list[Any]:
        self._wait_for_all_ranks()
        values: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(values, value, group=self._group)
        return values

    def _wait_for_all_ranks(self) -> None:
        # If a rank is missing, gloo's own collectives time out without naming it; this barrier
        # names it.
        if torch.distributed.get_backend(self._group) != "gloo" or self.size == 1:
            return
        try:
            torch.distributed.monitored_barrier(self._group, self._timeout, wait_all_ranks=True)
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


class Left:
    """Rank and size of a group that is not used any more, and is not kept alive.

    The threads of a gloo group live as long as the group does. If Python ends before they do, one
    that still lets go of a tensor ends the process by SIGABRT.
    """

    def __init__(self, group: Group) -> None:
        self.rank, self.size = group.rank, group.size

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
    failed = [f"rank {rank}: {cause}" for rank, cause in enumerate(causes) if cause is not None]
    if failed:
        raise PeerError(f"{what} failed on another rank; {'; '.join(failed)}")
    return result  # type: ignore[return-value]


def refuse_differences(everyones: Sequence[Mapping[str, str]]) -> None:
    """Check that all ranks have the same values. Local.

    Args:
        everyones: for each rank, in rank order: name of a field -> its value.

    Raises:
        DisagreementError: names each field that differs, and every rank's value of it.
    """
    differences = [
        f"{name}: " + ", ".join(f"rank {rank} has {v[name]}" for rank, v in enumerate(everyones))
        for name in everyones[0]
        if len({values[name] for values in everyones}) > 1
    ]
    if differences:
        raise DisagreementError(
            "the ranks were given different configurations; " + "; ".join(differences)
        )
