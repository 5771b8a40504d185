"""Dispatch that quantises on a GPU against vLLM's own CUDA quantisers, where vLLM is installed.

Both take the same approximate reciprocals for nvfp4, so that its bits too must be equal. Rows are
finite: what NaN becomes differs on purpose (moe_nvlink_plugin/recipes).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.gpu import real_path
from tests.kernels import cases, compare

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

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


@pytest.mark.parametrize("recipe", cases.RECIPES)
def test_as_vllm(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Otherwise scales of fp8 blocks are powers of two on Blackwell.
    monkeypatch.setenv("VLLM_USE_DEEP_GEMM", "0")
    monkeypatch.setenv("MOE_NVLINK_ALLOW_SHARED_GPU", "1")
    utils = pytest.importorskip(
        "vllm.model_executor.layers.fused_moe.utils", reason="vLLM is not installed"
    )
    if recipe == "nvfp4" and torch.cuda.get_device_capability() < (10, 0):
        pytest.skip("vLLM has no NVFP4 quantiser for this GPU")
    hidden = real_path.quantiser_rows("cuda")
    rows, scales, scale = real_path.quantised_rows(recipe, hidden)
    theirs, their_scales = utils.moe_kernel_quantize_input(
        hidden, scale, is_scale_swizzled=False, **ASKED[recipe]
    )
    compare.assert_same_bits(rows.cpu(), theirs.view(rows.dtype).cpu(), f"{recipe} rows")
    if scales is not None:
        same_layout = their_scales.contiguous().view(scales.dtype).reshape(scales.shape)
        compare.assert_same_bits(scales.cpu(), same_layout.cpu(), f"{recipe} scales")
