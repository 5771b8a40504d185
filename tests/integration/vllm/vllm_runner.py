"""A whole MoE layer as vLLM's runner runs it: router, shared experts, routed experts, combine.

Needs vLLM.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import get_current_vllm_config
from vllm.forward_context import ForwardContext, override_forward_context
from vllm.model_executor.layers.fused_moe.runner import moe_runner

from moe_nvlink_plugin.integration.vllm.moe import layers
from moe_nvlink_plugin.integration.vllm.moe.method import MoeNvlinkFusedMoEMethod
from tests.integration.vllm.moe.vllm_layer import NUM_EXPERTS, Layer


@contextlib.contextmanager
def forwards_of_vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What runners look for around a forward, in vLLM's current configuration; one TP rank."""
    for module in (layers, moe_runner):
        monkeypatch.setattr(
            module, "get_tensor_model_parallel_world_size", lambda: 1, raising=module is layers
        )
    monkeypatch.setattr(moe_runner, "tensor_model_parallel_all_reduce", lambda rows: rows)
    known = get_current_vllm_config().compilation_config.static_forward_context
    with override_forward_context(ForwardContext(known, {}, {}, None)):
        yield


class Router:
    """Gives every token the experts that the test has chosen."""

    chosen: tuple[torch.Tensor, torch.Tensor]

    def select_experts(self, **_given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return self.chosen


def make_runner(routed: Any, name: str, shared: Any = None, scale: float = 1.0) -> Any:
    """vLLM's runner of our class around a layer's routed experts."""
    return layers.MoeNvlinkMoERunner(
        layer_name=name,
        moe_config=routed.moe_config,
        router=Router(),
        routed_experts=routed,
        shared_experts=shared,
        routed_scaling_factor=scale,
    )


def forward(
    runner: Any, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """One round of the layer, as the model asks for it. Collective."""
    runner.router.chosen = weights, ids
    with torch.inference_mode():
        result: torch.Tensor = runner(hidden, hidden[:, :1])
    return result


class Routed(layers.MoeNvlinkRoutedExperts):
    """Routed experts around a `Layer`, which stands for what vLLM makes on CUDA ranks."""

    def __init__(self, layer: Layer) -> None:
        torch.nn.Module.__init__(self)
        config = layer.exchange.config
        self.layer_name, self.activation = "layer 3", None
        self.global_num_experts, self.apply_router_weight_on_input = NUM_EXPERTS, False
        self._expert_map = layer.expert_map
        local = NUM_EXPERTS if layer.expert_map is None else int((layer.expert_map >= 0).sum())
        # vLLM reads the shapes only.
        self.w13_weight = self.w2_weight = torch.empty(local, config.hidden_size, 1)
        self.moe_config: Any = SimpleNamespace(
            hidden_dim=config.hidden_size,
            hidden_dim_unpadded=config.hidden_size,
            in_dtype=config.dtype,
            is_sequence_parallel=False,
            skip_final_all_reduce=False,
            dp_size=config.ep_size,
            pcp_size=1,
            tp_size=1,
            ep_size=config.ep_size,
            moe_parallel_config=SimpleNamespace(enable_eplb=False, use_fi_nvl_two_sided_kernels=0),
        )
        layer.experts.consumes_expert_mask = False
        self.quant_method: Any = SimpleNamespace(
            moe_kernel=layer.kernel,
            moe_quant_config=layer.experts.quant_config,
            skip_forward_padding=False,
            has_unpadded_output=False,
            mk_can_overlap_shared_experts=False,
        )
        self._prepare_finalize = layer.subject

    def install(self) -> None:
        """What `method.install` does when the weights are loaded."""
        self._replace_quant_method(
            MoeNvlinkFusedMoEMethod(self.quant_method, self._prepare_finalize)
        )
