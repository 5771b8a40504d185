"""HeadGroup and its two verbs: an LM head that several ranks hold and share the work of.

With attention data-parallel every rank multiplies its own few rows by the whole vocabulary, and
reads all of the head's weights for it. Here the ranks of a group put their rows together, each
multiplies all of them by its part of the vocabulary, and the results go back: a rank reads
1 / tp_size of the weights, for two small exchanges. head_cost.py says when that pays.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch

from moe_nvlink_plugin.errors import ConfigError, MoeNvlinkError
from moe_nvlink_plugin.groups import Group, all_or_none, as_group, refuse_differences
from moe_nvlink_plugin.launch.base import Executor
from moe_nvlink_plugin.launch.executors import executor_for, with_index
from moe_nvlink_plugin.memory.workspace import Workspace
from moe_nvlink_plugin.plugins import find_transport

from . import exchange as head_exchange
from . import ops as head_ops
from .config import HeadConfig
from .sizes import head_layout

#: Fields of HeadConfig that may differ from rank to rank.
_OWN_FIELDS = {"tp_rank", "num_threads", "max_sms"}


class HeadStats(NamedTuple):
    """Totals of one rank since its group was made; counted by the kernels. Bytes and counts.

    Attributes:
        rounds: calls, those without rows included.
        rows: of this rank.
        bytes_gathered_remote: of its rows, put to the other ranks.
        bytes_returned_remote: of words, sent to the other ranks, and of logits, fetched from them.
    """

    rounds: int
    rows: int
    bytes_gathered_remote: int
    bytes_returned_remote: int


class HeadGroup:
    """Ranks that share one vocabulary product.

    On a GPU its verbs and those of a MoeAllToAll belong on one stream: kernels of the two that run
    side by side could keep each other's from finding a place, on two ranks in different order.

    Attributes:
        config: as given to create, defaults filled in.
    """

    def __init__(self, head: head_exchange.HeadExchange) -> None:
        self._head = head
        self._handle = head.handle
        self.config = head.config

    @classmethod
    def create(
        cls, config: HeadConfig, group: Any, device: torch.device | str = "cpu"
    ) -> HeadGroup:
        """Makes the group's memory and loads its kernels. Collective; not capturable.

        Args:
            config: equal on every rank, `tp_rank`, `num_threads` and `max_sms` apart.
            group: a torch ProcessGroup (with a CPU backend), or an object with rank, size and
                all_gather_object.
            device: where the tensors live.

        Raises:
            ConfigError: the configuration does not fit the group, or names an unknown transport.
            DisagreementError: on every rank, when the ranks' configurations differ.
            UnsupportedError: no transport serves the device.
            TransportError, CompileError: this rank could not get its memory or its kernels.
            PeerError: another rank could not, or never came; nothing is left behind.
        """
        ranks = as_group(group, float(config.timeout_s or 0))
        workspace = all_or_none(
            ranks, "preparing the head group", lambda: _prepare(config, ranks, torch.device(device))
        )
        fields = [f.name for f in dataclasses.fields(config) if f.name not in _OWN_FIELDS]
        mine = {name: str(getattr(config, name)) for name in fields}
        refuse_differences(ranks.all_gather_object(mine))
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
        """Waits for this thread's stream, reports what went wrong in verbs. Local; not capturable.

        On CPU ranks a verb has run when it returns. On GPUs it runs later, and a failure is raised
        by the next verb, or here.

        Raises:
            ExchangeTimeoutError, DisagreementError, PeerError: as the verbs.
        """
        self._head.synchronize()

    def failure(self) -> MoeNvlinkError | None:
        """What went wrong in a verb so far, or None. Local; waits for nothing; for any thread.

        For programs that only replay CUDA graphs: no verb of theirs is there to raise it. After a
        failure the verbs of this rank exchange nothing; token ids are then 0, logits NaN.
        """
        return self._head.failure()

    def stats(self) -> HeadStats:
        """This rank's totals. Local; not capturable.

        Waits for this thread's stream: verbs launched on others may be missing.
        """
        totals = self._head.workspace.stats()
        return HeadStats(
            rounds=totals.rounds,
            rows=totals.tokens,
            bytes_gathered_remote=totals.bytes_dispatched_remote,
            bytes_returned_remote=totals.bytes_combined_remote,
        )

    @property
    def workspace_bytes(self) -> int:
        """Bytes of this rank's symmetric memory."""
        return self._head.workspace.layout.total_bytes

    def close(self) -> None:
        """Gives the memory up. Local.

        On a GPU it waits for the device, so no thread may be capturing a CUDA graph on it. Memory
        that was captured into a CUDA graph stays mapped until the process ends, with a warning.
        """
        self._head.close()

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
    """The token with the largest logit for each row of this rank. Collective; capturable.

    What torch's argmax over the whole head gives: NaN is larger than every number, of equal values
    the lowest id wins (a row of -inf gives 0), -0 equals +0. The product is rounded to the head's
    type by torch, as it would be unshared, but of other shapes, so torch may add up in another
    order: logits closer to each other than that rounding can change places. Soft cap and scale are
    applied in float32, so they make no ties that the type alone would make.

    Args:
        hidden: `[num_rows, hidden_size]` config.dtype. num_rows may be 0 and differ from rank to
            rank, up to row_bound.
        head_weight: `[vocab_size or more, hidden_size]` config.dtype, the same on all ranks; rows
            behind vocab_size are never read. Each rank reads config.shard(tp_rank) of it, in place.
        group: of HeadGroup.create.
        bias: `[vocab_size or more]` config.dtype, added to the logits.
        soft_cap: logits become `soft_cap * tanh(logit / soft_cap)`; None: they do not. A positive
            normal float32.
        scale: logits are then multiplied by it; any finite float32.
        row_bound: the most rows any rank brings in this call, equal on all ranks; None is
            max_rows_per_rank. On a GPU the product takes tp_size * row_bound rows, filled or not.

    Returns:
        `[num_rows] int64`.

    Raises:
        InputError: a tensor is not as above; nothing was sent.
        ExchangeStateError: the group is closed, or has failed before.
        ExchangeTimeoutError: a rank did not come within timeout_s.
        DisagreementError: a rank called with another row_bound. Two bounds are told from each other
            by 7 bits, so 1 pair in 128 is not, as 1 and 35; ids are then wrong, memory is not.
        PeerError: a rank went on after a failure of its own.
        RuntimeError: of torch, for an argument of another Python type.
    """
    result: torch.Tensor = head_ops.head_argmax(
        *_arguments(hidden, head_weight, group, bias, soft_cap, scale, row_bound)
    )
    return result


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
    """All logits of this rank's rows, for sampling that needs them. Collective; capturable.

    In one round some ranks may call this and others sharded_argmax.

    Args:
        As sharded_argmax. The group must have been created with full_logits. Soft cap and scale
        are applied in config.dtype.

    Returns:
        `[num_rows, vocab_size]` config.dtype, this rank's own memory.

    Raises:
        As sharded_argmax; InputError also for a group without full_logits.
    """
    result: torch.Tensor = head_ops.head_logits(
        *_arguments(hidden, head_weight, group, bias, soft_cap, scale, row_bound)
    )
    return result


def _arguments(
    hidden: torch.Tensor,
    head_weight: torch.Tensor,
    group: HeadGroup,
    bias: torch.Tensor | None,
    soft_cap: float | None,
    scale: float,
    row_bound: int | None,
) -> tuple[Any, ...]:
    bound = group.config.max_rows_per_rank if row_bound is None else row_bound
    pending = group._head.workspace.pending
    return pending, hidden, head_weight, bias, soft_cap, scale, bound, group._handle


def _prepare(config: HeadConfig, group: Group, device: torch.device) -> Workspace[Executor]:
    """All that can fail on this rank alone."""
    if (group.size, group.rank) != (config.tp_size, config.tp_rank):
        raise ConfigError(
            f"the group has {group.size} ranks and this is rank {group.rank}, but tp_size="
            f"{config.tp_size} and tp_rank={config.tp_rank}; pass the group that shares the head"
        )
    device = with_index(device)
    transport = find_transport(config.transport, device)
    return Workspace(group, transport, executor_for(transport.executor, device), device)
