"""FlashInfer's fused CUTLASS kernel between our dispatch and our combine, on one GPU and one rank.

It needs an installed FlashInfer (extra `flashinfer`), and nvcc or its cached kernels. The expected
sums come from the torch references in FlashInfer's wheel. This file has not run yet.

No stage of benchmarks/on_gpu.sh has it, because a lent machine has neither the time nor a network.
FlashInfer compiles this kernel from dozens of CUDA files; one file of its exchange takes four
minutes of a core, and a stage has seven. Its other kernels are for compute capability 10, and
nothing here runs them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_nvlink_plugin import AllToAllConfig, MoeAllToAll
from moe_nvlink_plugin.integration.flashinfer.experts import (
    CUTLASS,
    FusedExperts,
    settings_for,
)
from moe_nvlink_plugin.testing import ThreadGroup

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]  # FlashInfer compiles at its first call

NUM_EXPERTS, TOP_K, HIDDEN_SIZE, INTERMEDIATE_SIZE, CAPACITY = 16, 4, 512, 256, 64
NUM_TOKENS = 37


def references() -> Any:
    """FlashInfer's; skips the test where the kernel cannot run."""
    reason = "FlashInfer is not installed; why no stage of on_gpu.sh brings it: see this file"
    pytest.importorskip("flashinfer", reason=reason)
    if (found := torch.cuda.get_device_capability()) < (9, 0):
        pytest.skip(f"the kernel needs compute capability (9, 0), this GPU has {found}")
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


def combined(**weights: Any) -> torch.Tensor:
    """The layer's output, through dispatch, the kernel and combine; two rounds, equal results."""
    config = AllToAllConfig(
        ep_size=1,
        ep_rank=0,
        num_experts=NUM_EXPERTS,
        top_k=TOP_K,
        hidden_size=HIDDEN_SIZE,
        max_tokens_per_rank=CAPACITY,
        **settings_for(CUTLASS, None, num_experts=NUM_EXPERTS),
    )
    (group,) = ThreadGroup.ranks(1)
    results = []
    with MoeAllToAll.create(config, group, "cuda") as exchange:
        fused = FusedExperts(exchange, CUTLASS, **weights)
        for _ in range(2):
            received = exchange.dispatch(*tokens())
            results.append(exchange.combine(fused(received), received.metadata))
        exchange.synchronize()
    torch.testing.assert_close(*results)
    return results[0]


def test_cutlass() -> None:
    moe = references()
    first, second = drawn_weights()
    hidden, ids, weights = tokens()
    expected = moe._moe_bf16_run_experts(hidden, first, second, weights, ids.long(), 0, NUM_EXPERTS)
    got = combined(
        fc1_expert_weights=first,
        fc2_expert_weights=second,
        quant_scales=[],
        use_fused_finalize=False,  # deterministic
    )
    largest = expected.float().abs().amax(1, keepdim=True)
    assert float(((got.float() - expected.float()).abs() / largest).max()) < 2**-5
