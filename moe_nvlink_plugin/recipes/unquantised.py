"""bf16, fp16, fp32: the activations travel as they are, without scales."""

from __future__ import annotations

import dataclasses

import torch

from .base import PayloadRow


@dataclasses.dataclass(frozen=True)
class UnquantisedRecipe:
    """Recipe whose row is the token's `hidden_size` activations, unchanged. Any hidden_size."""

    name: str
    dtype: torch.dtype

    @property
    def activation_dtypes(self) -> tuple[torch.dtype, ...]:
        return (self.dtype,)

    def hidden_row(self, hidden_size: int) -> PayloadRow:
        return PayloadRow(self.dtype, hidden_size)

    def scales_row(self, hidden_size: int) -> PayloadRow | None:
        return None


BF16 = UnquantisedRecipe("bf16", torch.bfloat16)
FP16 = UnquantisedRecipe("fp16", torch.float16)
FP32 = UnquantisedRecipe("fp32", torch.float32)


def unquantised_recipe_of(dtype: torch.dtype) -> UnquantisedRecipe:
    """Return the recipe that sends activations of `dtype` (bf16, fp16 or fp32) unchanged. Local."""
    return {recipe.dtype: recipe for recipe in (BF16, FP16, FP32)}[dtype]
