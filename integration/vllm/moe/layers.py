"""Our classes instead of vLLM's ``RoutedExperts`` and ``MoERunner``, and what they change.

Both use ``register_oot``, vLLM's hook to replace a layer class when a layer is created. The quant
methods remain vLLM's own objects, because weight loaders test their class names.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.distributed import get_ep_group
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.platforms import current_platform

from moe_nvlink_plugin import MoeAllToAll
from moe_nvlink_plugin.errors import UnsupportedError
from moe_nvlink_plugin.integration.common import input_scales
from moe_nvlink_plugin.integration.common.agreement import Geometry, Proposal
from moe_nvlink_plugin.integration.common.formats import DispatchFormat
from moe_nvlink_plugin.integration.common.pool import ExchangePool
from moe_nvlink_plugin.integration.vllm import replacement
from moe_nvlink_plugin.integration.vllm.all2all_manager import manager_of_ep_group
from moe_nvlink_plugin.integration.vllm.backend import BACKEND, selected_here

from .cpu_prepare_finalize import CpuPrepareAndFinalize
from .cuda_prepare_finalize import CudaPrepareAndFinalize
from .experts_input import VllmExpertsInput
from .prepare_finalize import MoeNvlinkPrepareAndFinalize

logger = logging.getLogger(__name__)

#: Parameters of vLLM's quant methods that hold static scales of the experts' input.
INPUT_SCALES = {
    "w13_input_scale": input_scales.DIVIDES,
    "w13_input_global_scale": input_scales.MULTIPLIES,
}


def put_in_place() -> None:
    """Register both classes with vLLM. Local; idempotent.

    Raises:
        UnsupportedError: another plugin has replaced one of vLLM's classes.
    """
    replacement.put_in_place(RoutedExperts, MoeNvlinkRoutedExperts)
    replacement.put_in_place(MoERunner, MoeNvlinkMoERunner)


class MoeNvlinkRoutedExperts(RoutedExperts):
    """vLLM's routed experts, with our prepare/finalize in their modular kernel."""

    def _get_quant_method(self, prefix: str, quant_config: Any, moe_config: Any) -> Any:
        ours = selected_here() and moe_config.moe_parallel_config.use_all2all_kernels
        if ours and hasattr(moe_config, "require_decomposed_backend"):
            # vLLM 0.33 and newer then chooses no experts that route inside their kernel.
            moe_config.require_decomposed_backend = True
        quant_method = super()._get_quant_method(prefix, quant_config, moe_config)
        if ours:
            if current_platform.is_cpu():
                from .cpu_fp8_experts import serve_without_amx

                serve_without_amx(quant_method)
            _rebuild_after_loading(quant_method)
        return quant_method


class MoeNvlinkMoERunner(MoERunner):
    """vLLM's runner, with the MoE layer as one opaque op on every platform."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if selected_here() and not isinstance(self.routed_experts, MoeNvlinkRoutedExperts):
            raise UnsupportedError(
                f"--all2all-backend {BACKEND}: layer {self.layer_name} brings its own experts "
                f"class {type(self.routed_experts).__name__}, which our exchange cannot enter. "
                "Use another backend for this model."
            )

    def _select_forward(self) -> Any:
        """Return the custom op, also on CPU, where vLLM would let Dynamo trace the exchange."""
        ops = torch.ops.vllm
        return ops.moe_forward if self._shared_experts is None else ops.moe_forward_shared


def _rebuild_after_loading(quant_method: Any) -> None:
    """Wrap process_weights_after_loading of this instance; the kernel exists only after it."""
    original = quant_method.process_weights_after_loading

    @functools.wraps(original)
    def process_weights_after_loading(layer: Any) -> None:
        input_scales.share(layer, INPUT_SCALES, lambda: get_ep_group().cpu_group)
        # When vLLM updates weights in place, ranks do not wait for each other.
        expected = not _is_ours(getattr(quant_method, "moe_kernel", None))
        with _pool().ranks.telling_all(layer.layer_name) if expected else contextlib.nullcontext():
            original(layer)
        if not _is_ours(quant_method.moe_kernel):
            _rebuild_kernel(quant_method, layer)

    quant_method.process_weights_after_loading = process_weights_after_loading


def _is_ours(kernel: Any) -> bool:
    """Return whether a modular kernel already has our prepare/finalize. Local."""
    if kernel is None or kernel.is_monolithic:
        return False
    return isinstance(kernel.prepare_finalize, MoeNvlinkPrepareAndFinalize)


def _pool() -> ExchangePool:
    """Return this worker's pool. Local."""
    return manager_of_ep_group(f"--all2all-backend {BACKEND}").pool


def _rebuild_kernel(quant_method: Any, layer: Any) -> None:
    """Put our prepare/finalize before the experts that vLLM chose. Collective over the EP group.

    Raises:
        UnsupportedError: the experts are outside of the modular kernel, or are not placed in
            contiguous ranges, or no recipe has the format that they take.
        ConfigError: the format does not support the hidden size.
        PeerError: another rank raised one of these.
    """
    kernel, pool = quant_method.moe_kernel, _pool()
    with pool.ranks.telling_all(layer.layer_name):
        _check_modular(quant_method, layer)
        taken = VllmExpertsInput.of(kernel.fused_experts)
    moe = layer.moe_config
    geometry = Geometry(
        num_experts=moe.num_experts,
        top_k=moe.experts_per_token,
        hidden_size=moe.hidden_dim,
        # A sequence-parallel slice is at most the batch divided by the slices, rounded up.
        max_tokens_per_rank=-(-moe.max_num_tokens // moe.sp_size),
        dtype=moe.in_dtype,
    )
    chosen = pool.agree_on_format(layer.layer_name, taken, geometry)
    if chosen.recipe is not None:
        geometry = geometry._replace(recipe=chosen.recipe.name, scales_layout=chosen.scales_layout)
    if pool.device.type == "cuda":  # the experts then read ids and weights where they arrive
        geometry = geometry._replace(received_ids="elsewhere")
    exchanges = pool.exchanges_of_layer(geometry)
    with pool.ranks.telling_all(layer.layer_name):
        prepare_finalize = _prepare_finalize(pool.device, exchanges, layer.expert_map, chosen)
        quant_method.moe_kernel = mk.FusedMoEKernel(prepare_finalize, kernel.fused_experts)
    pool.ranks.agree(Proposal(layer.layer_name))
    logger.debug("moe_nvlink serves %s: %s, %s", layer.layer_name, geometry, chosen)


def _check_modular(quant_method: Any, layer: Any) -> None:
    kernel = quant_method.moe_kernel
    if kernel is None or kernel.is_monolithic:
        raise UnsupportedError(
            f"--all2all-backend {BACKEND}: {layer.layer_name} is served by "
            f"{type(quant_method).__name__} without vLLM's modular kernel. If vLLM has chosen "
            "experts that route inside their kernel, choose others with --moe-backend (triton is "
            "one); or use weights in another format, or another backend."
        )


def _prepare_finalize(
    device: torch.device,
    exchanges: list[MoeAllToAll],
    expert_map: torch.Tensor | None,
    chosen: DispatchFormat,
) -> MoeNvlinkPrepareAndFinalize:
    """Make the prepare/finalize for this rank's device. Local."""
    if device.type == "cuda":
        return CudaPrepareAndFinalize(exchanges, expert_map, chosen)
    return CpuPrepareAndFinalize(exchanges[0], expert_map, chosen)
