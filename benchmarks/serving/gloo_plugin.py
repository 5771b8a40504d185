"""The peer of bench_serve.py: gloo all-gather and reduce-scatter where our exchange would be.

A vLLM general plugin in one file, for `plugins.install`. In each worker it replaces the class from
which our all-to-all manager makes its exchanges, so that flag, manager, prepare/finalize and
experts stay the ones of our backend.

What the peer is spared: the ranks' token counts are those on which vLLM has agreed for the step;
rows, ids and weights travel packed, by one all-gather where vLLM's own backend has three (it has
none on CPU); the buffers are of the step's size, so that both collectives work in place.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from moe_nvlink_plugin import Dispatched, DispatchMetadata
from moe_nvlink_plugin.config import AllToAllConfig

NAME = "gloo_ag_rs"


class PeerStats(NamedTuple):
    """Counts and bytes of one rank's collectives, for the file that our manager writes."""

    exchange: str = NAME
    rounds: int = 0
    tokens: int = 0
    padded_tokens: int = 0
    bytes_allgather: int = 0
    bytes_reducescatter: int = 0


class GlooExchange:
    """All-gather for dispatch, reduce-scatter for combine: MoeAllToAll as vLLM's porch uses it.

    Every rank receives every token. Batches are padded to the largest one for the collectives, and
    the padding is left out of what the experts get, by recv_counts.
    """

    def __init__(
        self, config: AllToAllConfig, group: Any, counts: Callable[[], list[int]] | None = None
    ) -> None:
        """counts: tokens of each rank in this step, asked at every dispatch; None asks vLLM."""
        if config.recipe not in (None, "bf16"):
            raise ValueError(f"the peer sends rows as they are, not as recipe {config.recipe!r}")
        self._given = config
        self._group = group
        self._counts = counts or _tokens_of_step
        self._steps: dict[int, Buffers] = {}
        self._step = self._buffers(1)
        self._stats = PeerStats()

    @classmethod
    def create(
        cls,
        config: AllToAllConfig,
        group: Any,
        device: torch.device | str = "cpu",
        *,
        share_with: Any = None,
    ) -> GlooExchange:
        """Create as MoeAllToAll.create; no memory is shared, so share_with changes nothing."""
        if torch.device(device).type != "cpu":
            raise ValueError(f"the peer works on CPU ranks, not on {device}")
        return cls(config, group)

    @property
    def config(self) -> AllToAllConfig:
        """Return the configuration that `create` got."""
        return self._given

    def dispatch(
        self,
        hidden_states: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        extra_payloads: Sequence[torch.Tensor] = (),
        *,
        scales: torch.Tensor | None = None,
        global_scale: torch.Tensor | None = None,
        is_padding: torch.Tensor | None = None,
        max_tokens: int | None = None,
        channel: int = 0,
    ) -> Dispatched:
        """Dispatch as MoeAllToAll.dispatch; every rank gets all rows. Collective.

        The bound is the largest batch, whatever max_tokens is.
        """
        assert not extra_payloads
        assert channel == 0
        assert scales is None
        assert global_scale is None
        if is_padding is not None:  # the rows travel all the same, to no expert
            topk_ids = topk_ids.masked_fill(is_padding[:, None], -1)
        counts = self._counts()
        count = hidden_states.shape[0]
        if counts[self._given.ep_rank] != count:
            raise RuntimeError(f"vLLM agreed on {counts} tokens, and this rank has {count}")
        self._step = step = self._buffers(max(counts))
        given = (hidden_states, topk_ids, topk_weights)
        for mine, part in zip(self._columns(step.sent), given, strict=True):
            mine[:count].copy_(part)
        dist.all_gather_into_tensor(step.received, step.sent, group=self._group)
        hidden, ids, weights = self._columns(step.received)
        self._count(count, step)
        # Of our metadata, combine needs the number of tokens, and prepare the bound.
        metadata = DispatchMetadata(topk_ids, 0, 0, self._stats.rounds, max(counts))
        return Dispatched(hidden, None, ids, weights, (), torch.tensor(counts), metadata)

    def combine_input(
        self,
        dtype: torch.dtype | None = None,
        *,
        hidden_size: int | None = None,
        metadata: DispatchMetadata | None = None,
    ) -> torch.Tensor:
        """Return the region as MoeAllToAll.combine_input. Local."""
        assert dtype in (None, self._given.dtype)
        assert hidden_size is None
        return self._step.partial

    def combine(
        self,
        expert_output: torch.Tensor,
        metadata: DispatchMetadata,
        *,
        output: torch.Tensor,
        hidden_size: int | None = None,
        add: torch.Tensor | None = None,
        scale: float = 1,
    ) -> torch.Tensor:
        """Add up the ranks' rows of this rank's tokens, as MoeAllToAll.combine. Collective."""
        assert hidden_size is None
        count = metadata.send_slots.shape[0]
        in_place = count == self._step.reduced.shape[0] and output.is_contiguous()
        reduced = output if in_place else self._step.reduced
        dist.reduce_scatter_tensor(reduced, expert_output, group=self._group)
        if not in_place:
            output.copy_(reduced[:count])
        if scale != 1:
            output.mul_(scale)
        return output if add is None else output.add_(add)

    def stats(self, *, wait: bool = True) -> PeerStats:
        """Return totals of this rank. Local; it never waits."""
        return self._stats

    def waits(self) -> list[list[int]]:
        """Return what ranks have waited for ranks: gloo does not say. Local."""
        return [[0] * self._given.ep_size for _ in range(self._given.ep_size)]

    def failure(self) -> None:
        """Return no failure: gloo raises its own. Local."""

    def hold_startup(self) -> None:
        """Change nothing: gloo's waits have one limit."""

    def end_startup(self) -> None:
        """Change nothing, as hold_startup."""

    def close(self) -> None:
        """Give nothing back."""

    def _buffers(self, capacity: int) -> Buffers:
        if capacity not in self._steps:
            self._steps[capacity] = Buffers.of(self._given, capacity)
        return self._steps[capacity]

    def _columns(self, packed: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return rows, int32 ids and fp32 weights in packed bytes `[rows, bytes]`."""
        parts = torch.split(packed, _widths(self._given), dim=1)
        dtypes = (self._given.dtype, torch.int32, torch.float32)
        return tuple(part.view(dtype) for part, dtype in zip(parts, dtypes, strict=True))

    def _count(self, tokens: int, step: Buffers) -> None:
        before, peers = self._stats, self._given.ep_size - 1
        self._stats = before._replace(
            rounds=before.rounds + 1,
            tokens=before.tokens + tokens,
            padded_tokens=before.padded_tokens + len(step.reduced),
            bytes_allgather=before.bytes_allgather + peers * step.sent.nbytes,
            bytes_reducescatter=before.bytes_reducescatter + peers * step.reduced.nbytes,
        )


def _widths(config: AllToAllConfig) -> list[int]:
    """Return the bytes of one token's row, ids and weights."""
    return [config.hidden_size * config.dtype.itemsize, config.top_k * 4, config.top_k * 4]


@dataclasses.dataclass(frozen=True)
class Buffers:
    """Tensors in which batches of one padded size travel.

    sent `[capacity, bytes]`, received `[ep_size * capacity, bytes]`: rows, ids and weights, packed.
    partial `[ep_size * capacity, hidden]`, reduced `[capacity, hidden]`.
    """

    sent: torch.Tensor
    received: torch.Tensor
    partial: torch.Tensor
    reduced: torch.Tensor

    @staticmethod
    def of(config: AllToAllConfig, capacity: int) -> Buffers:
        rows, width = config.ep_size * capacity, sum(_widths(config))
        return Buffers(
            torch.zeros(capacity, width, dtype=torch.uint8),
            torch.zeros(rows, width, dtype=torch.uint8),
            torch.zeros(rows, config.hidden_size, dtype=config.dtype),
            torch.zeros(capacity, config.hidden_size, dtype=config.dtype),
        )


def _tokens_of_step() -> list[int]:
    """Return the tokens of each data-parallel rank, on which vLLM agrees for every step anyway."""
    from vllm.forward_context import get_forward_context

    metadata = get_forward_context().dp_metadata
    if metadata is None:
        raise RuntimeError("vLLM has not agreed on this step's tokens; serve data-parallel ranks")
    counts: list[int] = metadata.num_tokens_across_dp_cpu.tolist()
    return counts


def register() -> None:
    """Have our manager make the peer's exchange. vLLM calls this in each of its processes."""
    pool: Any = importlib.import_module("moe_nvlink_plugin.integration.common.pool")
    pool.MoeAllToAll = GlooExchange
