"""Dispatch and combine as vLLM's prepare and finalize, for experts on CPU ranks.

Who weights and who reduces: the experts apply the router weights and sum over their local experts
(vLLM calls that TopKWeightAndReduceNoOP, and all its CPU experts do it); our combine sums the
partial rows of the ranks, unweighted.

The receive buffer is rank-major with room for every rank's capacity, mostly empty. vLLM's CPU
experts compute every row they are given, ignore expert_map and do not check ids, so they get the
filled rows alone, with local ids; a choice that belongs to another rank becomes local expert 0 with
weight 0.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP

from moe_nvlink_plugin import DispatchMetadata, MoeAllToAll
from moe_nvlink_plugin.config import local_expert_range
from moe_nvlink_plugin.errors import ExchangeStateError, UnsupportedError


class _Round(NamedTuple):
    """What finalize needs of the prepare before it."""

    metadata: DispatchMetadata
    slices: list[slice]  # the filled rows of the workspace, one slice per source rank


class MoeNvlinkPrepareAndFinalize(mk.FusedMoEPrepareAndFinalizeModular):
    """One per MoE layer; layers of one geometry share the exchange behind it."""

    def __init__(self, exchange: MoeAllToAll, expert_map: torch.Tensor | None) -> None:
        super().__init__()
        config = exchange.config
        self._exchange = exchange
        self._first, self._end = local_expert_range(
            config.num_experts, config.ep_size, config.ep_rank
        )
        _check_placement(expert_map, self._first, self._end)
        self._round: _Round | None = None

    def post_init_setup(self, fused_experts: mk.FusedMoEExperts) -> None:
        """Refuses experts that would leave weighting or summing over their top_k to us."""
        left_open = fused_experts.finalize_weight_and_reduce_impl()
        if not isinstance(left_open, TopKWeightAndReduceNoOP):
            raise UnsupportedError(
                f"{type(fused_experts).__name__} leaves {type(left_open).__name__} to finalize; on "
                "CPU ranks only experts that weight and sum their rows themselves are served."
            )

    # What vLLM asks about us.

    @property
    def activation_format(self) -> mk.FusedMoEActivationFormat:
        """Rows of tokens, not rows per expert."""
        return mk.FusedMoEActivationFormat.Standard

    def topk_indices_dtype(self) -> torch.dtype | None:
        """int32, what both the exchange and the CPU experts read."""
        return torch.int32

    def max_num_tokens_per_rank(self) -> int | None:
        """None: it bounds the batched activation format only."""
        return None

    def num_dispatchers(self) -> int:
        """Ranks that put rows into our receive buffer."""
        return int(self._exchange.config.ep_size)

    def output_is_reduced(self) -> bool:
        """True: after finalize every token's row is complete on its own rank."""
        return True

    # The two verbs.

    def prepare(
        self,
        a1: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        num_experts: int,
        expert_map: torch.Tensor | None,
        apply_router_weight_on_input: bool,
        quant_config: Any,
        defer_input_quant: bool,
    ) -> mk.PrepareResultType:
        """Dispatches, and hands out the filled rows. Collective.

        a1 [num_tokens, hidden_size], topk_weights and topk_ids [num_tokens, top_k]; returns rows
        [num_rows, hidden_size], local ids int32 and weights fp32 [num_rows, top_k]. Raises
        UnsupportedError for a quantised input, ExchangeTimeoutError when a rank does not arrive.
        """
        if quant_config.quant_dtype is not None and not defer_input_quant:
            raise UnsupportedError(
                f"dispatch of activations quantised to {quant_config.quant_dtype} is not in this "
                "release. Use experts with bfloat16, float16 or float32 weights."
            )
        if apply_router_weight_on_input:
            if topk_ids.shape[1] != 1:
                raise UnsupportedError(
                    f"router weights on the input need top_k 1, this layer has {topk_ids.shape[1]}."
                )
            a1 = a1 * topk_weights.to(a1.dtype)
        received = self._exchange.dispatch(
            a1.contiguous(), topk_ids.contiguous(), topk_weights.contiguous().to(torch.float32)
        )
        slices = _filled(received.recv_counts, self._exchange.config.max_tokens_per_rank)
        self._round = _Round(received.metadata, slices)
        rows = _gather(received.hidden_states, slices)
        ids, weights = self._localise(
            _gather(received.topk_ids, slices), _gather(received.topk_weights, slices)
        )
        return rows, None, None, ids, weights

    def finalize(
        self,
        output: torch.Tensor,
        fused_expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: mk.TopKWeightAndReduce,
    ) -> None:
        """Puts the experts' rows into their slots and combines into output. Collective.

        output [num_tokens, hidden_size] may share memory with fused_expert_output: its rows are in
        the workspace before output is written. Raises ExchangeStateError without a prepare,
        ExchangeTimeoutError when a rank does not arrive.
        """
        if self._round is None:
            raise ExchangeStateError("finalize without a prepare: call prepare first, once each.")
        (metadata, slices), self._round = self._round, None
        region = self._exchange.combine_input(fused_expert_output.dtype)
        _scatter(fused_expert_output, region, slices)
        self._exchange.combine(region, metadata, output=output)

    def _localise(
        self, ids: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Global ids -> ids of this rank's experts; choices of other ranks weigh nothing."""
        local = (ids >= self._first) & (ids < self._end)
        return torch.where(local, ids - self._first, 0), torch.where(local, weights, 0.0)


def _check_placement(expert_map: torch.Tensor | None, first: int, end: int) -> None:
    """The exchange owns experts in contiguous ranges; vLLM must have placed them likewise."""
    if expert_map is None:
        return
    placed = torch.nonzero(expert_map >= 0).flatten().tolist()
    if placed != list(range(first, end)):
        raise UnsupportedError(
            f"vLLM placed experts {placed} on this rank, the exchange expects {first}..{end - 1}. "
            "Remove --expert-placement-strategy."
        )


def _filled(recv_counts: torch.Tensor, capacity: int) -> list[slice]:
    """Where the rows of each source rank lie in the rank-major buffers."""
    counts = recv_counts.tolist()
    return [slice(rank * capacity, rank * capacity + n) for rank, n in enumerate(counts) if n]


def _gather(buffer: torch.Tensor, slices: list[slice]) -> torch.Tensor:
    """The filled rows as a contiguous copy; a view would change at the peers' next dispatch."""
    if not slices:
        return buffer[:0].clone()
    return torch.cat([buffer[filled] for filled in slices])


def _scatter(rows: torch.Tensor, region: torch.Tensor, slices: list[slice]) -> None:
    start = 0
    for filled in slices:
        count = filled.stop - filled.start
        region[filled].copy_(rows[start : start + count])
        start += count
