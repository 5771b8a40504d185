"""vLLM's experts of MXFP4 weights in Triton, behind our dispatch on CPU tensors: GPT-OSS.

The classes, the layouts of weights and scales for Hopper and for Blackwell, the routing and the
products are those of vLLM and of the `triton_kernels` in its wheel; Triton's interpreter executes
the kernels. `interpreted_kernels` names the stand-ins. Needs vLLM 0.33 and Triton, with
TRITON_INTERPRET=1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from triton.language import target_info
from vllm.model_executor.layers.fused_moe import config as vllm_config
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.experts import gpt_oss_triton_kernels_moe as oai
from vllm.model_executor.layers.quantization.utils import mxfp4_utils

from moe_nvlink_plugin.config import local_expert_range
from tests.integration.vllm.moe import vllm_triton
from tests.integration.vllm.moe.vllm_layer import NUM_EXPERTS, Layer, computed, work_of
from tests.integration.vllm.moe.vllm_triton import INTERMEDIATE, from_mxfp4, moe_config_of, mxfp4

#: The fewest for which vLLM's kernel for Hopper has scales: a block of 256 columns.
HIDDEN = 256
#: By which vLLM's kernel for GPT-OSS bounds and bends the gate; part of the model.
ALPHA, LIMIT = 1.702, 7.0


#: Compute capability -> how vLLM lays out codes and exponents for it.
LAYOUTS = {
    90: ("HOPPER_VALUE", "HOPPER_SCALE"),
    100: ("BLACKWELL_VALUE", "BLACKWELL_SCALE"),
}


def _draw(*shape: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(sum(shape))
    drawn: torch.Tensor = torch.randn(*shape, generator=random)
    return drawn


#: Of all experts: codes and exponents of gate and up projection, of down projection, and biases.
W1, E1 = mxfp4(_draw(NUM_EXPERTS, 2 * INTERMEDIATE, HIDDEN) * HIDDEN**-0.5)
W2, E2 = mxfp4(_draw(NUM_EXPERTS, HIDDEN, INTERMEDIATE) * INTERMEDIATE**-0.5)
B1, B2 = _draw(NUM_EXPERTS, 2 * INTERMEDIATE), _draw(NUM_EXPERTS, HIDDEN)


def rows_and_choices(num_tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """hidden states in BF16, ids, weights."""
    _narrow, ids, weights = work_of(num_tokens, seed)
    random = torch.Generator().manual_seed(seed)
    return torch.randn(num_tokens, HIDDEN, generator=random).bfloat16(), ids, weights


def _gated_gpt_oss(rows: torch.Tensor) -> torch.Tensor:
    gate, up = rows[:, 0::2].clamp(max=LIMIT), rows[:, 1::2].clamp(-LIMIT, LIMIT)
    return gate * torch.sigmoid(ALPHA * gate) * (up + 1)


def _gated_silu(rows: torch.Tensor) -> torch.Tensor:
    gate, up = rows.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


#: vLLM's class -> its activation, and that in torch.
KINDS: dict[type[Any], tuple[MoEActivation, Callable[[torch.Tensor], torch.Tensor]]] = {
    oai.OAITritonExperts: (MoEActivation.SWIGLUOAI, _gated_gpt_oss),
    oai.UnfusedOAITritonExperts: (MoEActivation.SILU, _gated_silu),
}


def dense(
    kind: type[Any], hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """The layer with dequantised weights, one expert after the other, in float32.

    Rounded to BF16 are only gated rows and the routers' weights, as vLLM rounds them.
    """
    w1, w2 = (from_mxfp4(*each, torch.float32) for each in ((W1, E1), (W2, E2)))
    summed, weights = torch.zeros(hidden.shape), weights.bfloat16().float()
    for expert in range(NUM_EXPERTS):
        gated = KINDS[kind][1](hidden.float() @ w1[expert].T + B1[expert])
        of_rows = gated.bfloat16().float() @ w2[expert].T + B2[expert]
        summed += torch.where(ids == expert, weights, 0.0).sum(1, keepdim=True) * of_rows
    return summed


def _laid_out(packed: torch.Tensor, exponents: torch.Tensor) -> tuple[Any, Any]:
    """As vLLM lays out a layer's weights for Triton when it has loaded them."""
    from triton_kernels.matmul_ogs import FlexCtx, PrecisionConfig

    weights, of_rows, scales = mxfp4_utils._swizzle_mxfp4(packed, exponents)
    layouts = weights.storage.layout.name, scales.storage.layout.name
    assert layouts == LAYOUTS[target_info.current_target().arch]
    return weights, PrecisionConfig(weight_scale=scales, flex_ctx=FlexCtx(rhs_data=of_rows))


class Mxfp4Layer(Layer):
    """A rank's layer with such experts."""

    def __init__(self, group: Any, kind: type[Any]) -> None:
        own = slice(*local_expert_range(NUM_EXPERTS, group.size, group.rank))
        self.w1, scales1 = _laid_out(W1[own], E1[own])
        self.w2, scales2 = _laid_out(W2[own], E2[own])
        self.activation = KINDS[kind][0]
        moe = moe_config_of(
            group.size,
            group.rank,
            "cpu",
            hidden_dim=HIDDEN,
            in_dtype=torch.bfloat16,
            activation=self.activation,
        )
        quant_config = vllm_config.mxfp4_w4a16_moe_quant_config(
            w1_scale=scales1, w2_scale=scales2, w1_bias=B1[own], w2_bias=B2[own]
        )
        super().__init__(
            group,
            experts=vllm_triton.recording(kind, moe, quant_config),
            dtype=torch.bfloat16,
            hidden_size=HIDDEN,
        )

    def __call__(
        self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        work = hidden, ids, weights
        return computed(self.kernel, self.w1, self.w2, work, self.expert_map, self.activation)
