"""The models that bench_serve.py serves, with random weights."""

from __future__ import annotations

import torch

from moe_nvlink_plugin.integration.demo.tiny_checkpoint import MODELS, TinyModel


def _olmoe(*, hidden_size: int, num_experts: int, intermediate: int) -> TinyModel:
    """Return four bf16 layers, of whose experts a token has 8; heads of 128."""
    return TinyModel(
        architecture="qwen3_moe",
        num_layers=4,
        num_experts=num_experts,
        top_k=8,
        hidden_size=hidden_size,
        num_heads=hidden_size // 128,
        num_kv_heads=hidden_size // 128,
        head_dim=128,
        moe_intermediate_size=intermediate,
        dtype=torch.bfloat16,
    )


#: The demonstration's default.
TINY = MODELS["qwen3_moe"]
DEMO = "demo"
#: Beside the demo's: layers as wide as OLMoE-1B-7B's, and half as wide. Their vocabulary is the
#: demo's, so that an LM head of 50 304 tokens does not hide what four layers cost.
SIZES = {
    DEMO: TINY,
    "0.2B": _olmoe(hidden_size=1024, num_experts=32, intermediate=512),
    "1.7B": _olmoe(hidden_size=2048, num_experts=64, intermediate=1024),
}
#: Options that change the demo's model, and the fields that they set.
SHAPE = {
    "hidden_size": "hidden_size",
    "layers": "num_layers",
    "top_k": "top_k",
    "num_experts": "num_experts",
}


def name_of(model: TinyModel) -> str:
    """Return the size whose model it is; "own" if options have changed the demo's."""
    return next((name for name, other in SIZES.items() if other == model), "own")


def dtype_of(model: TinyModel) -> str:
    """Return the type of the weights, in vLLM's words."""
    return str(model.dtype).removeprefix("torch.")
