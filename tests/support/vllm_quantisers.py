"""vLLM's own quantisers, asked for what each recipe makes. Its CUDA build; imported when used."""

from __future__ import annotations

from typing import Any

import torch

#: Arguments of moe_kernel_quantize_input beside the activations and their scale.
ASKED: dict[str, dict[str, Any]] = {
    "fp8_block": {
        "quant_dtype": torch.float8_e4m3fn,
        "per_act_token_quant": False,
        "block_shape": [128, 128],
    },
    "fp8_token": {"quant_dtype": torch.float8_e4m3fn, "per_act_token_quant": True},
    "fp8_tensor": {"quant_dtype": torch.float8_e4m3fn, "per_act_token_quant": False},
    "mxfp8": {"quant_dtype": "mxfp8", "per_act_token_quant": False},
    "nvfp4": {"quant_dtype": "nvfp4", "per_act_token_quant": False},
}


def quantise(
    recipe: str, hidden: torch.Tensor, scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rows and scales, the latter not swizzled. Needs VLLM_USE_DEEP_GEMM=0 in the environment:
    otherwise scales of fp8 blocks are powers of two on Blackwell.

    Raises:
        ImportError: vLLM is not installed.
    """
    from vllm.model_executor.layers.fused_moe import utils

    rows, scales = utils.moe_kernel_quantize_input(
        hidden, scale, is_scale_swizzled=False, **ASKED[recipe]
    )
    return rows, scales
