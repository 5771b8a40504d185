"""Our classes instead of vLLM's ``RoutedExperts`` and ``MoERunner``, and what they change.

Both use ``register_oot``, vLLM's hook to replace a layer class when a layer is created.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.platforms import current_platform

from moe_nvlink_plugin.errors import UnsupportedError
from moe_nvlink_plugin.integration.vllm import replacement
from moe_nvlink_plugin.integration.vllm.backend import BACKEND, selected_here

from .method import MoeNvlinkFusedMoEMethod, install_after_loading


def put_in_place() -> None:
    """Register both classes with vLLM. Local; idempotent.

    Raises:
        UnsupportedError: another plugin has replaced one of vLLM's classes.
    """
    replacement.put_in_place(RoutedExperts, MoeNvlinkRoutedExperts)
    replacement.put_in_place(MoERunner, MoeNvlinkMoERunner)


class MoeNvlinkRoutedExperts(RoutedExperts):
    """vLLM's routed experts, which get our fused MoE method when their weights are loaded."""

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
            install_after_loading(quant_method)
        return quant_method

    def weight_loader(
        self,
        param: torch.nn.Parameter,
        loaded_weight: torch.Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> Any:
        """Load a weight as vLLM does for the quant method that ours has replaced. Local.

        vLLM's loader decides by the class name and by fields of the layer's quant method. Weights
        that are loaded again need the same decisions as before.
        """
        load = functools.partial(
            super().weight_loader,
            *(param, loaded_weight, weight_name, shard_id, expert_id, return_success),
        )
        if not isinstance(self.quant_method, MoeNvlinkFusedMoEMethod):
            return load()
        # A module's __dict__ precedes its submodules, of which our method is one.
        self.__dict__["quant_method"] = self.quant_method.old_quant_method
        try:
            return load()
        finally:
            del self.__dict__["quant_method"]


# Models ask the loader for attributes that vLLM has set on its own, such as supports_moe_loading.
vars(MoeNvlinkRoutedExperts.weight_loader).update(vars(RoutedExperts.weight_loader))


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
