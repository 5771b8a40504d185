"""Experts in plain torch, for tests of vLLM whose own need Triton, on CPU ranks."""

from __future__ import annotations

from typing import Any

import torch
import vllm.model_executor.layers.fused_moe as fused_moe
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP
from vllm.platforms import current_platform


class TorchExperts(mk.FusedMoEExpertsModular):
    """SiLU and multiply on float rows; local ids, as `CpuPrepareAndFinalize` hands them out."""

    @staticmethod
    def activation_format() -> mk.FusedMoEActivationFormat:
        """Rows of tokens."""
        return mk.FusedMoEActivationFormat.Standard

    @staticmethod
    def _supports_current_device() -> bool:
        return bool(current_platform.is_cpu())

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return False

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return weight_key is None and activation_key is None

    @staticmethod
    def _supports_activation(activation: MoEActivation) -> bool:
        return bool(activation == MoEActivation.SILU)

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool:
        return True

    def workspace_shapes(
        self, num_rows: int, width: int, hidden_size: int, *_: Any
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """No scratch."""
        return (0,), (0,), (num_rows, hidden_size)

    def finalize_weight_and_reduce_impl(self) -> mk.TopKWeightAndReduce:
        """Weights and sums its rows itself."""
        return TopKWeightAndReduceNoOP()

    def apply(
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        *_: Any,
        a1q_scale: torch.Tensor | None = None,
        apply_router_weight_on_input: bool = False,
        **__: Any,
    ) -> None:
        """vLLM's apply."""
        rows = self._floats(hidden_states, a1q_scale)
        weights = torch.ones_like(topk_weights) if apply_router_weight_on_input else topk_weights
        summed = torch.zeros(output.shape)
        for expert in sorted(set(topk_ids.flatten().tolist())):
            row, choice = torch.nonzero(topk_ids == expert, as_tuple=True)
            done = self._expert(rows[row], w1[expert], w2[expert], expert)
            summed.index_add_(0, row, done.float() * weights[row, choice].unsqueeze(1))
        output.copy_(summed)

    def _floats(self, rows: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
        """Rows as they arrived, to multiply with."""
        assert scales is None, "rows must arrive unquantised"
        return rows

    def _expert(
        self, rows: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, _expert: int
    ) -> torch.Tensor:
        """One expert of its rows; w1 holds gate and up."""
        gate, up = (rows @ w1.T).chunk(2, dim=1)
        return (torch.nn.functional.silu(gate) * up) @ w2.T


def export_triton_experts() -> None:
    """`TritonExperts`, which test files import from where vLLM exports it only with Triton.

    It supports no CPU. Local, idempotent.
    """
    from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts

    fused_moe.TritonExperts = TritonExperts
