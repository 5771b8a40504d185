"""Prepare and finalize for experts on CPU ranks, which get one row for each choice of this rank.

The receive buffer is rank-major. It has slots for the largest batch of the step from every rank,
and most of them are empty.
vLLM's CPU experts compute all choices of every row that they get, ignore expert_map and do not
check ids. A row arrives if one of its choices is an expert of this rank. For its other choices the
experts would need a local id with weight 0, and would compute them too: half of all choices with
two ranks and top_k 4.

So the experts get pairs of a row and a local choice, as rows with top_k 1 and local ids. Their
kernels take any top_k, and group rows by expert themselves. The outputs are summed by token in
float32, in the combine region.

numpy computes which pairs there are, in the memory of the receive buffer: a step has few rows, and
a call of numpy costs less than one of torch.

A rank without requests runs the model with a dummy token while other ranks work. Nobody reads what
becomes of dummy tokens, so they go to no expert. The rank takes part in the round without rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP

from moe_nvlink_plugin import Dispatched, MoeAllToAll
from moe_nvlink_plugin.errors import UnsupportedError
from moe_nvlink_plugin.integration import overrides
from moe_nvlink_plugin.integration.common.formats import DispatchFormat

from .prepare_finalize import (
    UNQUANTISED,
    Arrived,
    ExpertsOutput,
    MoeNvlinkPrepareAndFinalize,
)


class Pairs(NamedTuple):
    """Pairs of a filled row and one of its choices, of an expert of this rank.

    Attributes:
        filled: `[num_rows]` int64: slots that hold rows.
        slots: `[num_pairs]` int64: slot of each pair's row.
        rows: `[num_pairs]` int64: index of each pair's row in filled.
    """

    filled: torch.Tensor
    slots: torch.Tensor
    rows: torch.Tensor


class CpuPrepareAndFinalize(MoeNvlinkPrepareAndFinalize):
    """Copies pairs out of the workspace, and sums the experts' rows in the combine region.

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
        self._pairs: dict[int, Pairs] = {}  # by channel

    @overrides
    def post_init_setup(self, fused_experts: mk.FusedMoEExperts) -> None:
        """Raise UnsupportedError for experts that leave weighting or summing to finalize. Local."""
        super().post_init_setup(fused_experts)
        left_open = fused_experts.finalize_weight_and_reduce_impl()
        if not isinstance(left_open, TopKWeightAndReduceNoOP):
            raise UnsupportedError(
                f"{type(fused_experts).__name__} leaves {type(left_open).__name__} to finalize; on "
                "CPU ranks only experts that weight and sum their rows themselves are served."
            )

    def _padding(self, num_tokens: int) -> torch.Tensor | None:
        return torch.ones(num_tokens, dtype=torch.bool) if self._is_idle() else None

    def _hand_out(self, received: Dispatched) -> Arrived:
        filled = _filled(received.recv_counts.tolist(), received.metadata.max_tokens)
        # Indexing with filled copies: the peers' next dispatch would change a view.
        ids = received.topk_ids.numpy()[filled] - np.int32(self._first)
        rows, choices = ((ids >= 0) & (ids < self._end - self._first)).nonzero()
        weights = received.topk_weights.numpy()[filled][rows, choices]
        slots = torch.from_numpy(filled[rows])
        self._pairs[received.metadata.channel] = Pairs(
            torch.from_numpy(filled), slots, torch.from_numpy(rows)
        )
        scales = received.scales
        numbers = received.extra_payloads[0][slots] if received.extra_payloads else None
        return Arrived(
            _select(received.hidden_states, slots),
            None if scales is None else _select(scales, slots),
            torch.from_numpy(ids[rows, choices]).unsqueeze(1),
            torch.from_numpy(weights).unsqueeze(1),
            numbers,
        )

    def _fill(self, region: torch.Tensor, received: Dispatched, done: ExpertsOutput) -> None:
        filled, slots, rows = self._pairs.pop(received.metadata.channel)
        if region.dtype == torch.float32:
            region.index_fill_(0, filled, 0.0).index_add_(0, slots, done.rows)
            return
        sums = torch.zeros(len(filled), region.shape[1])
        sums.index_add_(0, rows, done.rows.float())
        region.index_copy_(0, filled, sums.to(region.dtype))


def _filled(recv_counts: list[int], max_tokens: int) -> Any:
    """Return `[num_rows]` slots of the rank-major buffers that hold rows."""
    of_ranks = [np.arange(count) + rank * max_tokens for rank, count in enumerate(recv_counts)]
    return np.concatenate(of_ranks)


def _select(buffer: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Return a copy of the rows in these slots. torch selects rows of every 8-bit type as bytes."""
    if buffer.dtype.itemsize == 1:
        return buffer.view(torch.uint8).index_select(0, slots).view(buffer.dtype)
    return buffer.index_select(0, slots)
