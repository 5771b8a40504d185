"""Dispatch and combine as vLLM's prepare and finalize: what CPU and CUDA ranks have in common.

The experts apply the router weights and sum over their local experts (vLLM calls that
TopKWeightAndReduceNoOP). Our combine sums the partial rows of the ranks without weights.

`common.formats` decides in which format rows travel. The experts get different rows on different
devices: `cpu_prepare_finalize` collects the filled rows, and `cuda_prepare_finalize` leaves rows
where the peers put them.
"""

from __future__ import annotations

import abc
from typing import Any, NamedTuple

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.forward_context import get_forward_context, is_forward_context_available

from moe_nvlink_plugin import Dispatched, MoeAllToAll
from moe_nvlink_plugin.config import local_expert_range
from moe_nvlink_plugin.errors import ExchangeStateError, UnsupportedError
from moe_nvlink_plugin.integration.common.formats import DispatchFormat
from moe_nvlink_plugin.integration.common.pool import bound_of_step

from . import ending
from .experts_input import VllmExpertsInput

#: Activations as they are, for experts that take floats.
UNQUANTISED = DispatchFormat()


class Arrived(NamedTuple):
    """Rows that arrived, in the types that travel, with ids and weights for the experts.

    Attributes:
        rows: `[num_rows, elements]`.
        scales: `[num_rows, scales per row]` or None.
        ids: `[num_rows, top_k]` int32.
        weights: `[num_rows, top_k]` float32; 0 for ids of other ranks' experts.
    """

    rows: torch.Tensor
    scales: torch.Tensor | None
    ids: torch.Tensor
    weights: torch.Tensor


class MoeNvlinkPrepareAndFinalize(mk.FusedMoEPrepareAndFinalizeModular, abc.ABC):
    """Prepare and finalize of one MoE layer. Layers of one geometry share an exchange.

    Args:
        exchange: the layer's exchange.
        expert_map: vLLM's map of global to local expert ids, or None.
        dispatch_format: how rows travel.

    Raises:
        UnsupportedError: vLLM has not placed experts in contiguous ranges.
    """

    def __init__(
        self,
        exchange: MoeAllToAll,
        expert_map: torch.Tensor | None,
        dispatch_format: DispatchFormat = UNQUANTISED,
    ) -> None:
        super().__init__()
        config = exchange.config
        self._exchange = exchange
        self._format = dispatch_format
        self._first, self._end = local_expert_range(
            config.num_experts, config.ep_size, config.ep_rank
        )
        _check_placement(expert_map, self._first, self._end)
        #: Dispatch that has no combine yet.
        self._received: Dispatched | None = None

    @property
    def dispatch_format(self) -> DispatchFormat:
        """How rows travel."""
        return self._format

    # What vLLM asks a prepare/finalize.

    @property
    def activation_format(self) -> mk.FusedMoEActivationFormat:
        """Standard: rows of tokens, not rows per expert."""
        return mk.FusedMoEActivationFormat.Standard

    def topk_indices_dtype(self) -> torch.dtype | None:
        """Return int32, which both the exchange and the experts read."""
        return torch.int32

    def max_num_tokens_per_rank(self) -> int | None:
        """Return None: the value matters for the batched activation format only."""
        return None

    def num_dispatchers(self) -> int:
        """Return the number of ranks that put rows into the receive buffer."""
        return int(self._exchange.config.ep_size)

    def output_is_reduced(self) -> bool:
        """Return True: after finalize every token's row is complete on its own rank."""
        return True

    def post_init_setup(self, fused_experts: mk.FusedMoEExperts) -> None:
        """Raise UnsupportedError for experts whose output combine does not reduce. Local."""
        config = self._exchange.config
        made = fused_experts.workspace_dtype(config.dtype)
        if made != config.dtype:
            raise UnsupportedError(
                f"{type(fused_experts).__name__} reduces its rows into {made}; combine (format "
                f"{config.combine}) takes partial rows of {config.dtype} only. Choose other "
                "experts with --moe-backend, or another --dtype."
            )

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
        """Dispatch, and return the rows that arrived. Collective; capturable on CUDA ranks.

        Args:
            a1: `[num_tokens, hidden_size]` activations.
            topk_weights: `[num_tokens, top_k]`.
            topk_ids: `[num_tokens, top_k]`, global ids.
            num_experts: unused; the exchange knows the number.
            expert_map: unused; the constructor got it.
            apply_router_weight_on_input: whether to multiply a1 by the weights.
            quant_config: vLLM's FusedMoEQuantConfig of the experts.
            defer_input_quant: whether the experts quantise their input themselves.

        Returns:
            Rows and scales as the experts take them (integration/README.md has a table), None,
            `[num_rows, top_k]` int32 ids and `[num_rows, top_k]` float32 weights. The subclass
            decides which rows and ids the experts get.

        Raises:
            UnsupportedError: the experts take another format than the layer was set up for.
            ExchangeTimeoutError: a rank did not arrive.
        """
        experts = VllmExpertsInput(quant_config, takes_floats=defer_input_quant)
        if experts.quant_dtype != self._format.quant_dtype:
            raise UnsupportedError(
                f"the experts ask for rows of {experts.quant_dtype}, the exchange was set up for "
                f"{self._format.quant_dtype} when their weights were loaded. Please report this "
                "with the command that started vLLM."
            )
        if apply_router_weight_on_input:
            a1 = _weighted(a1, topk_weights)
        sent = self._format.send(a1.contiguous(), experts)
        received = self._exchange.dispatch(
            sent.rows,
            topk_ids.contiguous(),
            topk_weights.contiguous().to(torch.float32),
            scales=sent.scales,
            global_scale=sent.global_scale,
            is_padding=self._padding(topk_ids.shape[0]),
            max_tokens=bound_of_step(
                _most_tokens_of_a_rank(), self._exchange.config.max_tokens_per_rank
            ),
        )
        self._received = received
        arrived = self._hand_out(received)
        rows, scales = self._format.receive(arrived.rows, arrived.scales, arrived.weights, experts)
        return rows, scales, None, arrived.ids, arrived.weights

    def finalize(
        self,
        output: torch.Tensor,
        fused_expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: mk.TopKWeightAndReduce,
    ) -> None:
        """Take the experts' rows and combine into output. Collective; capturable on CUDA ranks.

        Combine ends the layer as `ending.current` says.

        Args:
            output: `[num_tokens, hidden_size]`. It may share memory with fused_expert_output, whose
                rows are in the workspace before combine writes output.
            fused_expert_output: the experts' rows.
            topk_weights: weights that prepare returned.
            topk_ids: ids that prepare returned.
            apply_router_weight_on_input: whether prepare applied the weights.
            weight_and_reduce_impl: what the experts leave to finalize.

        Raises:
            ExchangeStateError: there was no prepare.
            ExchangeTimeoutError: a rank did not arrive.
        """
        if self._received is None:
            raise ExchangeStateError("finalize without a prepare: call prepare first, once each.")
        received, self._received = self._received, None
        dtype, metadata = fused_expert_output.dtype, received.metadata
        region = self._exchange.combine_input(dtype, metadata=metadata)
        if fused_expert_output is not region:
            done = ExpertsOutput(
                fused_expert_output,
                topk_weights,
                topk_ids,
                apply_router_weight_on_input,
                weight_and_reduce_impl,
            )
            self._fill(region, received, done)
        end = ending.current()
        added = end.take_added()
        self._exchange.combine(
            region,
            metadata,
            output=output,
            add=None if added is None else added.contiguous(),
            scale=end.scale,
        )

    # Where the devices differ.

    def _padding(self, num_tokens: int) -> torch.Tensor | None:
        """Return `[num_tokens]` bool: tokens that dispatch shall not send; None: all travel.

        Local.
        """
        return None

    @abc.abstractmethod
    def _hand_out(self, received: Dispatched) -> Arrived:
        """Return the rows, ids and weights that this device's experts get. Local."""

    @abc.abstractmethod
    def _fill(self, region: torch.Tensor, received: Dispatched, done: ExpertsOutput) -> None:
        """Put the experts' rows, weighted and reduced, into the combine region. Local."""


class ExpertsOutput(NamedTuple):
    """Arguments of finalize about the experts' rows.

    Attributes:
        rows: rows as the experts left them.
        topk_weights: weights that prepare returned.
        topk_ids: ids that prepare returned.
        weights_on_input: whether prepare applied the router weights.
        impl: what the experts leave to finalize.
    """

    rows: torch.Tensor
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    weights_on_input: bool
    impl: mk.TopKWeightAndReduce


def _most_tokens_of_a_rank() -> int | None:
    """Return the most tokens of any rank in this step, equal on all ranks; None if unknown. Local.

    The data-parallel ranks all-reduce their sizes before each forward, drafts and dummy batches
    too (coordinate_batch_across_dp). vLLM asserts that the result has this rank's own size, and
    from there each rank computes with equal numbers. With CUDA graphs all sizes are that of the
    graph, so a graph keeps the bound that it was captured with. With sequence parallelism,
    local_sizes are those of the slices.
    """
    if not is_forward_context_available():
        return None
    metadata = get_forward_context().dp_metadata
    if metadata is None or metadata.local_sizes is None:
        return None
    return int(max(metadata.local_sizes))


def _weighted(a1: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
    """Multiply activations by router weights, for models with one expert per token."""
    if topk_weights.shape[1] != 1:
        raise UnsupportedError(
            f"router weights on the input need top_k 1, this layer has {topk_weights.shape[1]}."
        )
    return a1 * topk_weights.to(a1.dtype)


def _check_placement(expert_map: torch.Tensor | None, first: int, end: int) -> None:
    """Check that vLLM has placed experts in contiguous ranges, as the exchange does."""
    if expert_map is None:
        return
    placed = torch.nonzero(expert_map >= 0).flatten().tolist()
    if placed != list(range(first, end)):
        raise UnsupportedError(
            f"vLLM placed experts {placed} on this rank, the exchange expects {first}..{end - 1}. "
            "Remove --expert-placement-strategy."
        )
