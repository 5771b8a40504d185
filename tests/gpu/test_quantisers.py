"""Dispatch that quantises on a GPU against vLLM's own CUDA quantisers, where vLLM is installed.

Both take the same approximate reciprocals for nvfp4, so that its bits too must be equal. Rows are
finite: what NaN becomes differs on purpose (moe_nvlink_plugin/recipes).
"""

from __future__ import annotations

import pytest
import torch

from moe_nvlink_plugin.verify import compare
from tests.support import real_path, vllm_quantisers

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(60)]


@pytest.mark.parametrize("recipe", vllm_quantisers.ASKED)
def test_as_vllm(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_DEEP_GEMM", "0")
    pytest.importorskip("vllm", reason="vLLM is not installed")
    if recipe == "nvfp4" and torch.cuda.get_device_capability() < (10, 0):
        pytest.skip("vLLM has no NVFP4 quantiser for this GPU")
    hidden = real_path.quantiser_rows("cuda")
    rows, scales, scale = real_path.quantised_rows(recipe, hidden)
    theirs, their_scales = vllm_quantisers.quantise(recipe, hidden, scale)
    compare.assert_same_bits(rows.cpu(), theirs.view(rows.dtype).cpu(), f"{recipe} rows")
    if scales is not None:
        assert their_scales is not None
        same_layout = their_scales.contiguous().view(scales.dtype).reshape(scales.shape)
        compare.assert_same_bits(scales.cpu(), same_layout.cpu(), f"{recipe} scales")
