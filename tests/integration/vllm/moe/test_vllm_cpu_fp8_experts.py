"""FP8 weights on a CPU without vLLM experts for them; served end to end in tests/integration."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm.model_executor.layers.quantization.fp8 import Fp8MoEMethod

from moe_nvlink_plugin.errors import UnsupportedError
from moe_nvlink_plugin.integration.vllm.moe.cpu_fp8_experts import (
    dequantised_blocks,
    serve_without_amx,
)


def method(*, block_quant: bool, experts_cls: Any = None) -> Any:
    made = object.__new__(Fp8MoEMethod)
    made.block_quant, made.experts_cls = block_quant, experts_cls
    return made


def test_one_scale_per_tensor_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="one scale per tensor.*weight_block_size"):
        serve_without_amx(method(block_quant=False))


def test_experts_of_vllm_are_left_alone() -> None:
    chosen = method(block_quant=True, experts_cls=object)
    before = dict(vars(chosen))
    serve_without_amx(chosen)
    serve_without_amx(object())
    assert vars(chosen) == before


def test_every_element_gets_the_scale_of_its_block() -> None:
    weight = torch.ones(1, 6, 8).to(torch.float8_e4m3fn)
    scales = torch.tensor([[[1.0, 2.0], [3.0, 4.0]]])
    restored = dequantised_blocks(weight, scales, [4, 4])  # the last rows fill half a block
    assert restored.dtype == torch.float32
    assert restored[0, :4, :4].eq(1).all()
    assert restored[0, :4, 4:].eq(2).all()
    assert restored[0, 4:, :4].eq(3).all()
    assert restored[0, 4:, 4:].eq(4).all()
