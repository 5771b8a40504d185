"""bf16, fp16, fp32: the activations travel as they are, without scales."""

from __future__ import annotations

import dataclasses

import torch

from .base import PayloadRow


@dataclasses.dataclass(frozen=True)
class UnquantisedRecipe:
    """hidden_size elements of the activation type."""

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
    """The recipe that carries activations of `dtype` unchanged."""
    return {recipe.dtype: recipe for recipe in (BF16, FP16, FP32)}[dtype]
