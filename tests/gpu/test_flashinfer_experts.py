"""FlashInfer's fused kernels between our dispatch and our combine, on one GPU and one rank.

They need an installed FlashInfer (extra `flashinfer`), and nvcc or its cached kernels. The expected
sums come from the torch references in FlashInfer's wheel. This file has not run yet.

No stage of benchmarks/on_gpu.sh has it, because a lent machine has neither the time nor a network.
An H200 can execute test_cutlass alone. FlashInfer compiles that kernel from dozens of CUDA files;
one file of its exchange takes four minutes of a core, and a stage has seven. The others are for
compute capability 10, and FlashInfer downloads them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_nvlink_plugin import AllToAllConfig, MoeAllToAll
from moe_nvlink_plugin.integration.flashinfer.experts import (
    CUTLASS,
    TRTLLM_FP4,
    TRTLLM_FP8,
    FusedExperts,
    settings_for,
)
from moe_nvlink_plugin.recipes import FP8_BLOCK, NVFP4
from moe_nvlink_plugin.testing import ThreadGroup

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]  # FlashInfer compiles at its first call

NUM_EXPERTS, TOP_K, HIDDEN_SIZE, INTERMEDIATE_SIZE, CAPACITY = 16, 4, 512, 256, 64
NUM_TOKENS = 37


def needs(capability: tuple[int, int]) -> Any:
    """FlashInfer's references; skips the test where the kernels cannot run."""
    reason = "FlashInfer is not installed; why no stage of on_gpu.sh brings it: see this file"
    pytest.importorskip("flashinfer", reason=reason)
    found = torch.cuda.get_device_capability()
    if found < capability or (capability[0] == 10 and found[0] != 10):
        pytest.skip(f"the kernel needs compute capability {capability}, this GPU has {found}")
    return pytest.importorskip("flashinfer.trace.templates.moe")


def drawn_weights() -> tuple[torch.Tensor, torch.Tensor]:
    """Both products of every expert: first the linear half of the rows, then the gate."""
    random = torch.Generator("cuda").manual_seed(3)

    def draw(rows: int, columns: int) -> torch.Tensor:
        shape = (NUM_EXPERTS, rows, columns)
        drawn = torch.randn(shape, generator=random, device="cuda") * columns**-0.5
        weights: torch.Tensor = drawn.bfloat16()
        return weights

    return draw(2 * INTERMEDIATE_SIZE, HIDDEN_SIZE), draw(HIDDEN_SIZE, INTERMEDIATE_SIZE)


def tokens() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    random = torch.Generator("cuda").manual_seed(4)
    scores = torch.rand(NUM_TOKENS, NUM_EXPERTS, generator=random, device="cuda")
    hidden = torch.randn(NUM_TOKENS, HIDDEN_SIZE, generator=random, device="cuda").bfloat16()
    weights = torch.rand(NUM_TOKENS, TOP_K, generator=random, device="cuda") + 0.1
    return hidden, scores.topk(TOP_K).indices.to(torch.int32), weights


def combined(function: str, recipe: str | None, **weights: Any) -> torch.Tensor:
    """The layer's output, through dispatch, the kernel and combine; two rounds, equal results."""
    config = AllToAllConfig(
        ep_size=1,
        ep_rank=0,
        num_experts=NUM_EXPERTS,
        top_k=TOP_K,
        hidden_size=HIDDEN_SIZE,
        max_tokens_per_rank=CAPACITY,
        **settings_for(function, recipe, num_experts=NUM_EXPERTS),
    )
    (group,) = ThreadGroup.ranks(1)
    scale = torch.ones(1, device="cuda") if recipe == "nvfp4" else None
    results = []
    with MoeAllToAll.create(config, group, "cuda") as exchange:
        fused = FusedExperts(exchange, function, **weights)
        for _ in range(2):
            received = exchange.dispatch(*tokens(), global_scale=scale)
            results.append(exchange.combine(fused(received), received.metadata))
        exchange.synchronize()
    torch.testing.assert_close(*results)
    return results[0]


def assert_near(got: torch.Tensor, expected: torch.Tensor, bound: float) -> None:
    largest = expected.float().abs().amax(1, keepdim=True)
    assert float(((got.float() - expected.float()).abs() / largest).max()) < bound


def test_cutlass() -> None:
    moe = needs((9, 0))
    first, second = drawn_weights()
    hidden, ids, weights = tokens()
    expected = moe._moe_bf16_run_experts(hidden, first, second, weights, ids.long(), 0, NUM_EXPERTS)
    got = combined(
        CUTLASS,
        None,
        fc1_expert_weights=first,
        fc2_expert_weights=second,
        quant_scales=[],
        use_fused_finalize=False,  # deterministic
    )
    assert_near(got, expected, 2**-5)


def in_blocks(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 weights, and one float32 scale per 128 x 128."""
    experts, rows, columns = weights.shape
    tiles = weights.float().view(experts, rows // 128, 128, columns // 128, 128)
    scales = tiles.abs().amax((2, 4)) / 448
    quantised = tiles / scales[:, :, None, :, None]
    return quantised.view(weights.shape).to(torch.float8_e4m3fn), scales


def test_trtllm_fp8() -> None:
    moe = needs((10, 0))
    (first, first_scale), (second, second_scale) = map(in_blocks, drawn_weights())
    given = {
        "gemm1_weights": first,
        "gemm1_weights_scale": first_scale,
        "gemm2_weights": second,
        "gemm2_weights_scale": second_scale,
    }
    hidden, ids, weights = tokens()
    rows, scales = FP8_BLOCK.quantise(hidden, None)
    assert scales is not None
    routed = {"weights": weights, "topk_idx": ids.long(), "local_expert_offset": 0}
    expected = moe._fp8_moe_run_experts(
        rows, scales.t().contiguous(), **given, **routed, E_global=NUM_EXPERTS
    )
    got = combined(TRTLLM_FP8, "fp8_block", **given, intermediate_size=INTERMEDIATE_SIZE)
    assert_near(got, expected, 2**-3)  # the kernel quantises between the products


def in_nvfp4(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    one = torch.ones(1, device="cuda")
    rows, scales = NVFP4.quantise(weights.flatten(0, 1), one)
    assert scales is not None
    shape = (*weights.shape[:2], -1)
    return rows.view(shape), scales.view(shape)


def packed(weights: torch.Tensor, scales: torch.Tensor, *, gated: bool) -> list[torch.Tensor]:
    """Weights and scales as FlashInfer's helpers lay them out for its kernel."""
    import flashinfer

    def in_order(rows: torch.Tensor) -> torch.Tensor:
        rows = rows.view(torch.uint8)
        return flashinfer.reorder_rows_for_gated_act_gemm(rows) if gated else rows

    shuffled = [flashinfer.shuffle_matrix_a(in_order(each), 128) for each in weights]
    of_scales = [flashinfer.shuffle_matrix_sf_a(in_order(each), 128) for each in scales]
    return [
        torch.stack(shuffled),
        torch.stack(of_scales).view(torch.float8_e4m3fn).view(scales.shape),
    ]


def test_trtllm_fp4() -> None:
    moe = needs((10, 0))
    (first, first_scale), (second, second_scale) = map(in_nvfp4, drawn_weights())
    hidden, ids, weights = tokens()
    rows, scales = NVFP4.quantise(hidden, torch.ones(1, device="cuda"))
    expected = moe._fp4_moe_run_experts(
        *(rows, scales, first, first_scale, second, second_scale, None, None),
        *(weights, ids.long(), 0, NUM_EXPERTS),
    )
    names = ("gemm1_weights", "gemm1_weights_scale", "gemm2_weights", "gemm2_weights_scale")
    laid_out = packed(first, first_scale, gated=True) + packed(second, second_scale, gated=False)
    ones = torch.ones(NUM_EXPERTS, device="cuda")
    unused = ("gemm1_bias", "gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit", "gemm2_bias")
    got = combined(
        TRTLLM_FP4,
        "nvfp4",
        **dict(zip(names, laid_out, strict=True)),
        **dict.fromkeys(unused),
        **dict.fromkeys(
            ("output1_scale_scalar", "output1_scale_gate_scalar", "output2_scale_scalar"), ones
        ),
        intermediate_size=INTERMEDIATE_SIZE,
    )
    assert_near(got, expected, 0.25)  # the kernel quantises between the products, to 4 bits
