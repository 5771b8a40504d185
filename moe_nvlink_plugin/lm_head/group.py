"""HeadGroup and its two verbs: ranks that hold the same LM head share its product.

If attention is data-parallel, every rank multiplies its own few rows by the whole vocabulary and
reads all weights of the head for that. In a group, each rank multiplies the rows of all ranks by
its part of the vocabulary, and each rank gets the results of its own rows. A rank then reads
1 / tp_size of the weights, at the price of two small exchanges. cost.py estimates when that pays.
"""

from __future__ import annotations

import dataclasses
import itertools
import reprlib
from typing import Any, NamedTuple, NoReturn, SupportsIndex

import torch

from moe_nvlink_plugin.config import check_kind
from moe_nvlink_plugin.errors import ConfigError, InputError, MoeNvlinkError
from moe_nvlink_plugin.groups import Group, all_or_none, as_group, tell
from moe_nvlink_plugin.launch.base import Executor
from moe_nvlink_plugin.launch.executors import executor_for, with_index
from moe_nvlink_plugin.memory.startup import Timeouts
from moe_nvlink_plugin.memory.tensors import check_dense, check_no_gradient
from moe_nvlink_plugin.memory.workspace import Workspace
from moe_nvlink_plugin.plugins import find_transport

from . import exchange as head_exchange
from . import ops as head_ops
from .config import HeadConfig
from .launches import head_layout

#: Fields of HeadConfig that may differ from rank to rank.
_OWN_FIELDS = {"tp_rank", "num_threads", "max_sms"}

#: Numbers of the head groups that this process creates, for the names that rank 0 gives them.
_numbers = itertools.count(1)


class HeadStats(NamedTuple):
    """Totals of one rank since its group was created. The kernels count them.

    Attributes:
        rounds: number of calls, including calls without rows.
        rows: number of this rank's rows.
        bytes_gathered_remote: bytes of this rank's rows that it put to the other ranks.
        bytes_returned_remote: bytes of words that this rank sent to the other ranks, and of logits
            that it fetched from them.
    """

    rounds: int
    rows: int
    bytes_gathered_remote: int
    bytes_returned_remote: int


class HeadGroup:
    """Group of ranks that share one vocabulary product.

    On a GPU, run its verbs and the verbs of a MoeAllToAll on one stream. If their kernels ran side
    by side, on two ranks in different order, each could occupy the place that the other needs.

    Attributes:
        config: configuration that `create` got, with defaults filled in.
    """

    def __init__(self, head: head_exchange.HeadExchange) -> None:
        self._head = head
        self._handle = head.handle
        self.config = head.config

    @classmethod
    def create(
        cls, config: HeadConfig, group: Any, device: torch.device | str = "cpu"
    ) -> HeadGroup:
        """Create the group's memory and load its kernels. Collective; not capturable.

        Args:
            config: equal on every rank, `tp_rank`, `num_threads` and `max_sms` apart.
            group: a torch ProcessGroup (with a CPU backend), or an object with rank, size and
                all_gather_object.
            device: where the tensors live.

        Raises:
            ConfigError: the configuration does not fit the group, or names an unknown transport.
            DisagreementError: the ranks' configurations differ, or another rank calls something
                else; raised on every rank.
            UnsupportedError: no transport supports the device.
            TransportError, CompileError: this rank could not get its memory or its kernels.
            PeerError: another rank failed, or did not arrive. Nothing of this call remains.
        """
        check_kind(config, HeadConfig)
        ranks = as_group(group, Timeouts.of(config).first)
        workspace = all_or_none(
            ranks, "preparing the head group", lambda: _prepare(config, ranks, torch.device(device))
        )
        fields = [f.name for f in dataclasses.fields(config) if f.name not in _OWN_FIELDS]
        mine = {name: str(getattr(config, name)) for name in fields}
        name = f"head group {next(_numbers)} of rank 0's process ({workspace.name})"
        workspace.name = tell(ranks, "create a head", mine, name)[0]
        workspace.ensure(lambda alignment: head_layout(config, alignment))
        try:
            head = all_or_none(
                ranks,
                "loading the kernels",
                lambda: head_exchange.HeadExchange(config, workspace),
            )
        except Exception:
            workspace.release()
            raise
        return cls(head)

    def synchronize(self) -> None:
        """Wait for this thread's stream and raise the error of a verb that failed. Local.

        Not capturable. On CPU ranks a verb has run when it returns. On GPUs a verb runs later; its
        error is raised by the next verb, or here.

        Raises:
            ExchangeTimeoutError, DisagreementError, PeerError: as the verbs.
        """
        self._head.synchronize()

    def failure(self) -> MoeNvlinkError | None:
        """Return the error of a verb that failed, or None. Local; any thread may call it.

        It waits for nothing. It serves programs that only replay CUDA graphs, because a replay
        raises no error. After a failure this rank's verbs exchange nothing; token ids are 0 and
        logits are NaN.
        """
        return self._head.failure()

    def stats(self, *, wait: bool = True) -> HeadStats:
        """Return this rank's totals. Local; not capturable.

        It waits for this thread's stream. Verbs on other streams may be missing in the totals.

        Args:
            wait: as for MoeAllToAll.stats.
        """
        totals = self._head.workspace.stats(wait=wait)
        return HeadStats(
            rounds=totals.rounds,
            rows=totals.tokens,
            bytes_gathered_remote=totals.bytes_dispatched_remote,
            bytes_returned_remote=totals.bytes_combined_remote,
        )

    def release(self) -> None:
        """Give the memory back until `renew`. Collective; not capturable.

        Ranks call it between two calls of the verbs. It waits for the device. Until `renew` the
        verbs raise ExchangeStateError, and on a GPU nobody replays a graph. Addresses and counters
        stay. A second call changes nothing.

        Raises:
            ExchangeStateError: the group is closed, or unusable, or the stream captures a graph.
                Raised as PeerError on the others. Nothing has changed.
            UnsupportedError: the memory of a third-party transport cannot be released.
            DisagreementError: another rank calls something else, or releases another head group;
                names both. Nothing has changed.
            TransportError, DriverError, PeerError: a rank could not unmap the memory, or did not
                come; call `release` again, or `renew`.
        """
        self._head.release()

    def renew(self, group: Any) -> None:
        """Map zeroed memory anew, at the same addresses. Collective over `group`; not capturable.

        Args:
            group: as for `create`, of the same ranks.

        Raises:
            ConfigError: it has other ranks. Raised as PeerError on the others.
            ExchangeStateError, UnsupportedError, DisagreementError: as `release`.
            TransportError, PeerError: a rank could not get memory, or did not come; call `renew`
                again on all ranks.
        """
        ranks = as_group(group, Timeouts.of(self.config).first)
        self._head.renew(ranks, lambda: _check_ranks(self.config, ranks))

    @property
    def workspace_bytes(self) -> int:
        """Bytes of this rank's symmetric memory; 0 if released or closed."""
        return self._head.workspace.mapped_bytes

    def close(self) -> None:
        """Give up the memory. Local.

        On a GPU it waits for the device, so no thread may capture a CUDA graph on it meanwhile. If
        a CUDA graph has captured the memory, it stays mapped until the process ends, and a warning
        says so.
        """
        self._head.close()

    def __reduce_ex__(self, _protocol: SupportsIndex) -> NoReturn:
        raise TypeError(
            "a HeadGroup cannot be copied or pickled; every rank calls HeadGroup.create"
        )

    def __enter__(self) -> HeadGroup:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()


def sharded_argmax(
    hidden: torch.Tensor,
    head_weight: torch.Tensor,
    *,
    group: HeadGroup,
    bias: torch.Tensor | None = None,
    soft_cap: float | None = None,
    scale: float = 1.0,
    row_bound: int | None = None,
) -> torch.Tensor:
    """Find the token with the largest logit for each row of this rank. Collective; capturable.

    The result is that of torch's argmax over the whole head: NaN is larger than every number, -0
    equals +0, and of equal values the lowest id wins (a row of -inf gives 0). torch computes the
    product and rounds it to the head's type, as without sharing. But it multiplies other shapes, so
    it may add in another order: if two logits are closer to each other than that rounding, they can
    change places. Soft cap and scale are applied in float32, so they create no additional ties.

    Args:
        hidden: `[num_rows, hidden_size]` config.dtype. num_rows may be 0, may differ between ranks,
            and is at most row_bound.
        head_weight: `[vocab_size or more, hidden_size]` config.dtype, equal on all ranks. Each rank
            reads its part, config.shard(tp_rank), in place; no rank reads rows from vocab_size on.
        group: the group that HeadGroup.create returned.
        bias: `[vocab_size or more]` config.dtype, added to the logits.
        soft_cap: positive normal float32; logits become `soft_cap * tanh(logit / soft_cap)`. None:
            no soft cap.
        scale: finite float32 by which logits are then multiplied.
        row_bound: the most rows of any rank in this call, equal on all ranks; None means
            max_rows_per_rank. On a GPU the product takes tp_size * row_bound rows, filled or not.

    Returns:
        `[num_rows]` int64, token ids.

    Raises:
        InputError: a tensor is not as above. Nothing was sent.
        ExchangeStateError: the group is closed, or has failed before.
        ExchangeTimeoutError: another rank did not arrive within timeout_s.
        DisagreementError: another rank called with another row_bound. The ranks compare 7 bits of
            it, so they do not notice 1 pair of bounds in 128, for example 1 and 35. Ids are then
            wrong; no other memory is overwritten.
        PeerError: another rank continued after a failure of its own.
        RuntimeError: torch rejects soft_cap, scale or row_bound of another Python type.
    """
    return _called(
        head_ops.head_argmax,
        _arguments(hidden, head_weight, group, bias, soft_cap, scale, row_bound),
    )


def sharded_logits(
    hidden: torch.Tensor,
    head_weight: torch.Tensor,
    *,
    group: HeadGroup,
    bias: torch.Tensor | None = None,
    soft_cap: float | None = None,
    scale: float = 1.0,
    row_bound: int | None = None,
) -> torch.Tensor:
    """Compute all logits of this rank's rows, for sampling. Collective; capturable.

    In the same round, some ranks may call this function and others sharded_argmax.

    Args:
        As sharded_argmax. The group must have been created with full_logits. Soft cap and scale
        are applied in config.dtype.

    Returns:
        `[num_rows, vocab_size]` config.dtype, this rank's own memory.

    Raises:
        As sharded_argmax; InputError also for a group without full_logits, and if hidden requires
        a gradient.
    """
    arguments = _arguments(hidden, head_weight, group, bias, soft_cap, scale, row_bound)
    check_no_gradient(["hidden"], hidden)
    return _called(head_ops.head_logits, arguments)


def _arguments(
    hidden: torch.Tensor,
    head_weight: torch.Tensor,
    group: HeadGroup,
    bias: torch.Tensor | None,
    soft_cap: float | None,
    scale: float,
    row_bound: int | None,
) -> tuple[Any, ...]:
    if not isinstance(group, HeadGroup):
        raise InputError(
            f"group={reprlib.repr(group)} is a {type(group).__name__}, not a HeadGroup; pass what "
            "HeadGroup.create returned"
        )
    for name, value in (("hidden", hidden), ("head_weight", head_weight), ("bias", bias)):
        if not isinstance(value, torch.Tensor) and (value is not None or name != "bias"):
            raise InputError(
                f"{name}={reprlib.repr(value)} is a {type(value).__name__}, not a tensor; pass one "
                f"of {group.config.dtype}"
            )
    bound = group.config.max_rows_per_rank if row_bound is None else row_bound
    pending = group._head.workspace.pending
    return pending, hidden, head_weight, bias, soft_cap, scale, bound, group._handle


def _called(op: Any, arguments: tuple[Any, ...]) -> torch.Tensor:
    """Call an op, and explain what torch refuses of its tensors."""
    if torch.compiler.is_compiling():
        traced: torch.Tensor = op(*arguments)
        return traced
    try:
        result: torch.Tensor = op(*arguments)
    except RuntimeError:
        _pending, *tensors = arguments[:4]
        for name, tensor in zip(("hidden", "head_weight", "bias"), tensors, strict=True):
            if tensor is not None:
                check_dense(name, tensor)
        raise
    return result


def _prepare(config: HeadConfig, group: Group, device: torch.device) -> Workspace[Executor]:
    """All that can fail on this rank alone."""
    _check_ranks(config, group)
    device = with_index(device)
    transport = find_transport(config.transport, device)
    return Workspace(group, transport, executor_for(transport.executor, device), device)


def _check_ranks(config: HeadConfig, group: Group) -> None:
    if (group.size, group.rank) != (config.tp_size, config.tp_rank):
        raise ConfigError(
            f"the group has {group.size} ranks and this is rank {group.rank}, but tp_size="
            f"{config.tp_size} and tp_rank={config.tp_rank}; pass the group that shares the head"
        )
