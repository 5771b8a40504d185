"""What our adapter puts into vLLM's modular-kernel harness, and that its checks can fail."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed")


from tests.upstream.adapt import modular_kernels as adapter

#: e4m3 has 3 bits behind the leading one.
E4M3_STEP = 2.0**-4


def rows(count: int, width: int) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(count * width))


@pytest.mark.parametrize("wrong", [0.0, 2.0, float("nan")])
def test_one_wrong_row_is_found(wrong: float) -> None:
    expected = rows(5, 64)
    adapter.within(expected * 1.01, expected, 0.02)
    output = expected.clone()
    output[3] *= wrong
    with pytest.raises(AssertionError, match=r"1 of 5 rows .* rows \[3\]"):
        adapter.within(output, expected, 0.02)


def test_rows_asked_of_an_exchange_are_unique_ranks_of_tokens() -> None:
    ids = torch.tensor([[0, 1, 2], [0, 4, 5], [7, 6, 3]])
    # Four experts on each of two ranks: token 0 stays on rank 0, the others go to both.
    assert adapter.asked_of(ids, 4, 0) == (1, 3, 5, 2)
    assert adapter.asked_of(ids, 4, 1) == (1, 3, 5, 3)


@pytest.mark.parametrize("scales", ["tensor", "token", "block"])
def test_quantised_rows_times_their_scales_are_the_rows(scales: str) -> None:
    floats = rows(3, 256)
    floats[1] *= 100.0
    if scales == "block":
        quantised = adapter.per_token_group_quant_fp8(floats, 128)
        assert quantised[1].shape == (3, 2)
    else:
        quantised = adapter.scaled_fp8_quant(floats, use_per_token_if_dynamic=scales == "token")
        assert quantised[1].shape == ((3, 1) if scales == "token" else (1,))
    restored = adapter._times(*quantised)
    lost = (restored - floats).abs() / floats.abs().amax(1, keepdim=True)
    # By one scale for all, the small rows lose a hundredfold of what they lose by their own.
    assert float(lost[1].max()) < E4M3_STEP
    assert float(lost.max()) < E4M3_STEP


@pytest.mark.parametrize("weights_on_input", [False, True])
def test_experts_weight_and_sum_what_they_dequantise(weights_on_input: bool) -> None:
    experts: Any = object.__new__(adapter.Fp8TorchExperts)
    experts.moe_config = SimpleNamespace(in_dtype=torch.float32)
    w1, w1_scale = adapter.scaled_fp8_quant(rows(3 * 2 * 128, 128))
    w2, w2_scale = adapter.scaled_fp8_quant(rows(3 * 128, 128))
    experts.quant_config = SimpleNamespace(
        w1_scale=w1_scale.expand(3, 1, 1),
        w2_scale=w2_scale.expand(3, 1, 1),
        block_shape=None,
        per_act_token_quant=True,
    )
    w1, w2 = w1.view(3, 256, 128), w2.view(3, 128, 128)
    given, scales = adapter.scaled_fp8_quant(rows(4, 128), use_per_token_if_dynamic=True)
    ids = torch.tensor([[0], [2], [1], [2]], dtype=torch.int32)
    weights = torch.tensor([[0.5], [0.25], [0.0], [2.0]])
    output = torch.empty(4, 128)
    experts.apply(
        output,
        given,
        w1,
        w2,
        weights,
        ids,
        a1q_scale=scales,
        apply_router_weight_on_input=weights_on_input,
    )
    for row, expert in enumerate(ids.flatten().tolist()):
        gate, up = (given[row].float() * scales[row] @ (w1[expert].float() * w1_scale).T).chunk(2)
        dense = (torch.nn.functional.silu(gate) * up) @ (w2[expert].float() * w2_scale).T
        expected = dense if weights_on_input else dense * weights[row]
        error = (output[row] - expected).norm()
        assert float(error) <= 2 * E4M3_STEP * float(expected.norm())
