"""The model that is served, and what is asked of it."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

from moe_nvlink_plugin.integration.demo.tiny_checkpoint import MODELS, TinyModel, write_checkpoint

#: Of a prompt. Short: the first token's step reads it, and decoding is what is measured.
PROMPT_TOKENS = 4
#: VllmServer's --max-model-len.
MOST_TOKENS = 512
#: The demonstration's default.
TINY = MODELS["qwen3_moe"]


def model_of(
    hidden_size: int = TINY.hidden_size,
    layers: int = TINY.num_layers,
    top_k: int = TINY.top_k,
    num_experts: int = TINY.num_experts,
) -> TinyModel:
    """The demonstration's tiny model in other sizes; experts and heads grow with hidden_size.

    Raises:
        ValueError: sizes that do not go together.
    """
    if hidden_size % TINY.hidden_size:
        raise ValueError(
            f"--hidden_size {hidden_size} is no multiple of {TINY.hidden_size}; choose one"
        )
    if num_experts % 2 or not 1 <= top_k <= num_experts:
        raise ValueError(
            f"--num_experts {num_experts} with --top_k {top_k}: experts must be even in number, "
            "for two ranks, and top_k between 1 and that number"
        )
    times = hidden_size // TINY.hidden_size
    return dataclasses.replace(
        TINY,
        hidden_size=hidden_size,
        num_layers=layers,
        top_k=top_k,
        num_experts=num_experts,
        num_heads=TINY.num_heads * times,
        num_kv_heads=TINY.num_kv_heads * times,
        intermediate_size=TINY.intermediate_size * times,
        moe_intermediate_size=TINY.moe_intermediate_size * times,
    )


def checkpoint_of(model: TinyModel, folder: Path) -> Path:
    """Random weights, the same for the same sizes."""
    name = f"{model.architecture}-{model.hidden_size}-{model.num_layers}-{model.num_experts}"
    return write_checkpoint(folder / f"{name}-{model.top_k}", model)


def prompts_of(model: TinyModel, count: int, seed: int) -> list[list[int]]:
    """`count` prompts of PROMPT_TOKENS random tokens."""
    draw = random.Random(seed)
    return [draw.choices(range(model.vocab_size), k=PROMPT_TOKENS) for _ in range(count)]
