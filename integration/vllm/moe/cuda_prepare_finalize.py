"""Prepare and finalize for experts on CUDA ranks: in place, and capturable.

The experts read all slots of the receive buffer, where the peers wrote, and write into the combine
region. Only `common.formats` copies rows, if experts take another format or layout than travels.
The host learns nothing of the data: shapes depend on the bound of the step only. A CUDA graph can
capture every call. No call waits for the device, except that dispatch reads a static scale at its
first call with it, outside of captures.

vLLM's CUDA experts take global ids, and an expert_map that turns ids of other ranks' experts into
-1; they do not take -1 itself. So dispatch writes the id of an expert on another rank, with weight
0, for every id of another rank's expert and in every empty slot (received_ids="elsewhere"). To the
experts this looks like the output of an all-gather with rows in another order, for which vLLM has
chosen them. Rows of empty slots hold old bytes, and nobody reads what experts make of them.

If the rows travel as the experts take them, prepare launches dispatch and nothing else; if the
experts weight and sum their rows themselves, finalize launches combine and nothing else.
If the experts have adapters (LoRA), prepare also launches some ten small kernels of torch, which
find the slots of the rows' adapters.
"""

from __future__ import annotations

from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import (
    TopKWeightAndReduceContiguous,
    TopKWeightAndReduceDelegate,
    TopKWeightAndReduceNoOP,
)
from vllm.v1.worker.ubatching import dbo_current_ubatch_id

from moe_nvlink_plugin import Dispatched, MoeAllToAll
from moe_nvlink_plugin.errors import InputError, UnsupportedError
from moe_nvlink_plugin.integration import overrides
from moe_nvlink_plugin.integration.common.formats import DispatchFormat

from .features import BASE
from .prepare_finalize import (
    UNQUANTISED,
    Arrived,
    ExpertsOutput,
    MoeNvlinkPrepareAndFinalize,
)

_SERVED = (TopKWeightAndReduceNoOP, TopKWeightAndReduceContiguous, TopKWeightAndReduceDelegate)


class CudaPrepareAndFinalize(MoeNvlinkPrepareAndFinalize):
    """Gives the experts views of the workspace, and takes their rows in it.

    A step has slots for the largest batch of any rank, so the experts of a small batch do not get
    the slots of the capacity.

    Args:
        exchange: the layer's exchange, with received_ids="elsewhere".
        expert_map: vLLM's map of global to local expert ids; None if one rank has all experts.
        dispatch_format: how rows travel.

    Raises:
        UnsupportedError: expert_map is missing, or experts are not placed in contiguous ranges.
    """

    def __init__(
        self,
        exchange: MoeAllToAll,
        expert_map: torch.Tensor | None,
        dispatch_format: DispatchFormat = UNQUANTISED,
    ) -> None:
        super().__init__(exchange, expert_map, dispatch_format)
        config = exchange.config
        if expert_map is None and config.ep_size > 1:
            raise UnsupportedError(
                f"vLLM gave this layer no expert_map although {config.ep_size} ranks share its "
                f"{config.num_experts} experts; its kernels would take global ids for local ones. "
                "Please report this with the command that started vLLM."
            )
        assert config.received_ids == "elsewhere", config.received_ids

    @overrides
    def post_init_setup(self, fused_experts: mk.FusedMoEExperts) -> None:
        """Raise UnsupportedError for experts whose output combine cannot take. Local."""
        super().post_init_setup(fused_experts)
        name = type(fused_experts).__name__
        left_open = fused_experts.finalize_weight_and_reduce_impl()
        if not isinstance(left_open, _SERVED):
            raise UnsupportedError(
                f"{name} leaves {type(left_open).__name__} to finalize; served are experts that "
                "weight and sum their rows themselves or leave it to "
                f"{TopKWeightAndReduceContiguous.__name__}. Choose others with --moe-backend."
            )
        config = self._exchange.config
        # Experts with an ep_rank (FlashInfer's) compute their first expert from it, without
        # expert_map.
        if config.num_experts % config.ep_size and hasattr(fused_experts, "ep_rank"):
            raise UnsupportedError(
                f"{name} assumes that all ranks own equally many experts, but there are "
                f"{config.num_experts} experts on {config.ep_size} ranks; vLLM would compute wrong "
                "results. Choose other experts with --moe-backend (triton is one)."
            )
        hidden_size = config.hidden_size
        # Experts may leave out the columns by which vLLM pads rows (GPT-OSS: 2880 of 3072).
        made = getattr(fused_experts, "output_hidden_dim", lambda size: size)(hidden_size)
        if made == hidden_size:
            return
        try:
            self._exchange.combine_input(hidden_size=made)
        except InputError as error:
            raise UnsupportedError(
                f"{name} makes rows of {made} out of rows of {hidden_size} elements, which combine "
                f"cannot fetch: {error}. Choose other experts with --moe-backend."
            ) from error

    @overrides
    def allocate_fused_expert_output(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        weight_and_reduce_impl: mk.TopKWeightAndReduce,
    ) -> torch.Tensor | None:
        """Return the combine region if experts weight and sum their rows themselves, else None.

        Local. vLLM calls it between prepare and finalize. Then finalize copies nothing.

        Args:
            shape: shape of the experts' output.
            dtype: type of the experts' output.
            device: device of the experts' output.
            weight_and_reduce_impl: what the experts leave to finalize.
        """
        no_op = isinstance(weight_and_reduce_impl, TopKWeightAndReduceNoOP)
        received = self._received.get(dbo_current_ubatch_id())
        if received is None or not no_op or dtype != self._exchange.config.dtype:
            return None
        width = self._width(shape[-1])
        if width is not None and width > self._exchange.config.hidden_size:
            return None
        region = self._exchange.combine_input(hidden_size=width, metadata=received.metadata)
        fits = tuple(region.shape) == tuple(shape) and region.device == device
        return region if fits else None

    def _padding(self, num_tokens: int) -> torch.Tensor | None:
        return _padding_mask(num_tokens)

    def _hand_out(self, received: Dispatched) -> Arrived:
        numbers = None
        if received.extra_payloads:
            ids = received.topk_ids
            is_local = ((ids >= self._first) & (ids < self._end)).any(1)
            numbers = torch.where(is_local, received.extra_payloads[0], BASE)  # else old bytes
        return Arrived(
            *(received.hidden_states, received.scales, received.topk_ids, received.topk_weights),
            numbers,
        )

    def _fill(self, region: torch.Tensor, received: Dispatched, done: ExpertsOutput) -> None:
        impl = done.impl
        if isinstance(impl, TopKWeightAndReduceDelegate):
            impl = TopKWeightAndReduceContiguous()
        impl.apply(
            output=region,
            fused_expert_output=done.rows,
            topk_weights=done.topk_weights,
            topk_ids=done.topk_ids,
            apply_router_weight_on_input=done.weights_on_input,
        )


def _padding_mask(num_tokens: int) -> torch.Tensor | None:
    """Return `[num_tokens]` bool: rows that a CUDA graph's size or a dummy batch added. Local.

    None if unknown. vLLM's mask is for the whole batch. In a sequence-parallel layer each
    tensor-parallel rank has a slice of it: vLLM adds zeros until the batch has equal slices
    (sequence_parallel_chunk), and a rank's slice is that of its number.
    """
    if not is_forward_context_available():
        return None
    context = get_forward_context()
    mask: torch.Tensor | None = context.is_padding
    if mask is None:
        return None
    slices = _num_slices(context.dp_metadata)
    if -(-mask.shape[0] // slices) != num_tokens:
        return None
    if slices == 1:
        return mask
    mask = mask[get_tensor_model_parallel_rank() * num_tokens :][:num_tokens]
    added = num_tokens - mask.shape[0]
    return torch.nn.functional.pad(mask, (0, added), value=True) if added else mask


def _num_slices(metadata: Any) -> int:
    """Return among how many ranks the layer that runs now shares a batch. Local.

    vLLM's runner has set the sizes of the slices of all data-parallel ranks.
    """
    if metadata is None or metadata.local_sizes is None:
        return 1
    return len(metadata.local_sizes) // len(metadata.num_tokens_across_dp_cpu)
