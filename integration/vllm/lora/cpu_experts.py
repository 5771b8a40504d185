"""Experts with adapters (LoRA) for CPU ranks.

vLLM computes adapters of experts inside its Triton kernels, which a CPU does not have: with
--enable-lora its CPU build chooses these kernels for every MoE layer, and fails. Our experts
compute both products and both adapters in torch, for each expert and adapter of the rows. The
adapters' weights are those that vLLM's LoRA layer keeps.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from torch.nn import functional
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.experts.lora_experts_mixin import LoRAExpertsMixin
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)

from moe_nvlink_plugin.errors import UnsupportedError
from moe_nvlink_plugin.integration import overrides
from moe_nvlink_plugin.integration.vllm.backend import BACKEND

#: What the gate half of the first product goes through before it multiplies the other half.
_GATES: dict[Any, Callable[[torch.Tensor], torch.Tensor]] = {
    MoEActivation.SILU: functional.silu,
    MoEActivation.GELU: functional.gelu,
    MoEActivation.GELU_TANH: functools.partial(functional.gelu, approximate="tanh"),
}


def take_adapters(quant_method: Any) -> None:
    """Give a layer's quant method experts that compute adapters. Local.

    Args:
        quant_method: vLLM's method, which has chosen experts for the CPU.

    Raises:
        UnsupportedError: the layer's weights are quantised, or it has another activation or biases.
    """
    problem = ""
    if not isinstance(quant_method, UnquantizedFusedMoEMethod):
        problem = f"{type(quant_method).__name__} has quantised weights"
    elif quant_method.moe.activation not in _GATES:
        problem = f"the layer's activation is {quant_method.moe.activation.value}"
    elif quant_method.moe.has_bias:
        problem = "the layer's experts have biases"
    if problem:
        raise UnsupportedError(
            f"--all2all-backend {BACKEND}: on CPU ranks this model's experts take no adapters "
            f"(LoRA): {problem}. Name other layers, such as q_proj, with --lora-target-modules."
        )
    quant_method.experts_cls = _taking_adapters(quant_method.experts_cls)


class LoraRowsMixin(LoRAExpertsMixin):
    """Mixin for vLLM's CPU experts: computes products and adapters, on weights as loaded."""

    @overrides
    def process_weights_after_loading(self, layer: Any) -> None:
        """Leave the weights as they are; vLLM's CPU experts would pack them. Local."""

    @overrides
    def apply(
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: Any,
        global_num_experts: int,
        expert_map: torch.Tensor | None,
        a1q_scale: torch.Tensor | None,
        a2_scale: torch.Tensor | None,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
        expert_tokens_meta: Any,
        apply_router_weight_on_input: bool,
    ) -> None:
        """Compute `[rows, hidden_size]` output; each row has one choice, of a local expert. Local.

        Until vLLM's LoRA layer gives a context, no row has an adapter.
        """
        context, ids = self._lora_context, topk_ids.squeeze(1).long()
        slots = torch.full_like(ids, -1)
        if context is not None:
            slots = context.local_token_lora_mapping.long()
        gate = _GATES[activation]
        for expert, slot in sorted(set(zip(ids.tolist(), slots.tolist(), strict=True))):
            chosen = ((ids == expert) & (slots == slot)).nonzero().squeeze(1)
            rows = hidden_states[chosen]
            both = rows @ w1[expert].T
            if slot >= 0:
                a, b = context.w13_lora_a_stacked, context.w13_lora_b_stacked
                both += _adapted(rows, a, b, slot, expert)
            first, second = both.chunk(2, dim=-1)
            middle = gate(first) * second
            done = middle @ w2[expert].T
            if slot >= 0:
                a, b = context.w2_lora_a_stacked, context.w2_lora_b_stacked
                done += _adapted(middle, a, b, slot, expert)
            if not apply_router_weight_on_input:
                done = done * topk_weights[chosen].to(done.dtype)
            output[chosen] = done


def _adapted(
    rows: torch.Tensor,
    stacked_a: tuple[torch.Tensor, ...],
    stacked_b: tuple[torch.Tensor, ...],
    slot: int,
    expert: int,
) -> torch.Tensor:
    """Return what an adapter adds to a product, slice by slice.

    stacked_a: each `[slots, experts, rank, in]`. stacked_b: each `[slots, experts, out, rank]`. One
    expert stands for all if they share a factor (--enable-moe-shared-loras).
    """
    parts = [
        rows
        @ a[slot, min(expert, a.shape[1] - 1)].to(rows.dtype).T
        @ b[slot, min(expert, b.shape[1] - 1)].to(rows.dtype).T
        for a, b in zip(stacked_a, stacked_b, strict=True)
    ]
    return torch.cat(parts, dim=-1)


@functools.cache
def _taking_adapters(base: type[mk.FusedMoEExperts]) -> type[mk.FusedMoEExperts]:
    return type(f"LoraRows{base.__name__}", (LoraRowsMixin, base), {"__module__": __name__})
