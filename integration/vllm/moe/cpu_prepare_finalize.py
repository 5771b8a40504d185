"""Prepare and finalize for experts on CPU ranks, which get only the filled rows, with local ids.

The receive buffer is rank-major. It has room for every rank's capacity, and most of it is empty.
vLLM's CPU experts compute every row that they get, ignore expert_map and do not check ids. So they
get only the filled rows, with local ids. The id of another rank's expert becomes local expert 0
with weight 0.

A rank without requests runs the model with a dummy token while other ranks work. Nobody reads what
becomes of dummy tokens, so they go to no expert. The rank takes part in the round without rows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP

from moe_nvlink_plugin import Dispatched, MoeAllToAll
from moe_nvlink_plugin.errors import UnsupportedError
from moe_nvlink_plugin.integration.common.formats import DispatchFormat

from .prepare_finalize import (
    UNQUANTISED,
    Arrived,
    ExpertsOutput,
    MoeNvlinkPrepareAndFinalize,
)


class CpuPrepareAndFinalize(MoeNvlinkPrepareAndFinalize):
    """Copies the filled rows out of the workspace, and the experts' rows back into their slots.

    Args:
        exchange: the layer's exchange.
        expert_map: vLLM's map of global to local expert ids, or None.
        dispatch_format: how rows travel.
        is_idle: returns whether the rank's tokens are dummies.
    """

    def __init__(
        self,
        exchange: MoeAllToAll,
        expert_map: torch.Tensor | None,
        dispatch_format: DispatchFormat = UNQUANTISED,
        is_idle: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__(exchange, expert_map, dispatch_format)
        self._is_idle = is_idle
        self._slices: list[slice] = []  # the filled rows, one slice per source rank

    def post_init_setup(self, fused_experts: mk.FusedMoEExperts) -> None:
        """Raise UnsupportedError for experts that leave weighting or summing to finalize. Local."""
        super().post_init_setup(fused_experts)
        left_open = fused_experts.finalize_weight_and_reduce_impl()
        if not isinstance(left_open, TopKWeightAndReduceNoOP):
            raise UnsupportedError(
                f"{type(fused_experts).__name__} leaves {type(left_open).__name__} to finalize; on "
                "CPU ranks only experts that weight and sum their rows themselves are served."
            )

    def _destinations(self, topk_ids: torch.Tensor) -> torch.Tensor:
        return torch.full_like(topk_ids, -1) if self._is_idle() else topk_ids

    def _hand_out(self, received: Dispatched) -> Arrived:
        slices = self._slices = _filled(
            received.recv_counts, self._exchange.config.max_tokens_per_rank
        )
        ids = _gather(received.topk_ids, slices)
        weights = _gather(received.topk_weights, slices)
        local = (ids >= self._first) & (ids < self._end)
        scales = received.scales
        return Arrived(
            _gather(received.hidden_states, slices),
            None if scales is None else _gather(scales, slices),
            torch.where(local, ids - self._first, 0),
            torch.where(local, weights, 0.0),
        )

    def _fill(self, region: torch.Tensor, received: Dispatched, done: ExpertsOutput) -> None:
        start = 0
        for filled in self._slices:
            count = filled.stop - filled.start
            region[filled].copy_(done.rows[start : start + count])
            start += count


def _filled(recv_counts: torch.Tensor, capacity: int) -> list[slice]:
    """Return the filled rows of each source rank in the rank-major buffers."""
    counts = recv_counts.tolist()
    return [slice(rank * capacity, rank * capacity + n) for rank, n in enumerate(counts) if n]


def _gather(buffer: torch.Tensor, slices: list[slice]) -> torch.Tensor:
    """Return a contiguous copy of the filled rows; the peers' next dispatch would change a view."""
    if not slices:
        return buffer[:0].clone()
    return torch.cat([buffer[filled] for filled in slices])
