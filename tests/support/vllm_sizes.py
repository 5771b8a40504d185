"""Sizes of the MoE layers that run in vLLM's modular kernel. Importable without vLLM.

tests/gpu/day/carried.py compiles the kernels of `gpu_configs` for a machine that has no compiler's
time to spare.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from moe_nvlink_plugin import AllToAllConfig

NUM_EXPERTS, TOP_K, HIDDEN_SIZE, CAPACITY = 7, 3, 128, 6

#: Scheme of vllm_triton.py that the GPU tests run -> the recipe by which its rows travel.
GPU_SCHEMES: dict[str, str | None] = {
    "unquantised": None,
    "fp8 by blocks": "fp8_block",
    "fp8 by token": "fp8_token",
    "fp8 by tensor": "fp8_tensor",
    "int8 by token": None,
}
#: Seconds that a rank on a GPU waits for another, which may just compile Triton's kernels.
GPU_WAIT_S = 30.0


def config_of(ep_size: int, ep_rank: int, **values: Any) -> AllToAllConfig:
    usual: dict[str, Any] = {
        "num_experts": NUM_EXPERTS,
        "top_k": TOP_K,
        "hidden_size": HIDDEN_SIZE,
        "max_tokens_per_rank": CAPACITY,
        "dtype": torch.float32,
        "timeout_s": 60.0,
        "received_ids": "elsewhere",
    }
    return AllToAllConfig(ep_size=ep_size, ep_rank=ep_rank, **{**usual, **values})


def gpu_configs() -> Iterator[AllToAllConfig]:
    """What tests/gpu/test_vllm_experts.py creates, on two ranks and on three."""
    for ep_size in (2, 3):
        for recipe in dict.fromkeys(GPU_SCHEMES.values()):
            yield config_of(ep_size, 0, dtype=torch.bfloat16, recipe=recipe, timeout_s=GPU_WAIT_S)
