"""Recipes without scales: bf16, fp16 and fp32 send activations, bytes_N what a caller has made."""

from __future__ import annotations

import dataclasses
import re

import torch

from .base import PayloadRow

#: No row is wider: a payload of one token.
_MOST_BYTES = 2**24
_NAME = re.compile(r"bytes_([1-9][0-9]{0,8})")


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


@dataclasses.dataclass(frozen=True)
class OpaqueRecipe:
    """Recipe bytes_N, whose row is N bytes, whatever hidden_size is; without scales.

    It carries formats that no other recipe has. AllToAllConfig.hidden_size and dtype describe the
    experts' rows alone, which combine adds.
    """

    row_bytes: int

    @property
    def name(self) -> str:
        return f"bytes_{self.row_bytes}"

    @property
    def activation_dtypes(self) -> tuple[torch.dtype, ...]:
        return tuple(recipe.dtype for recipe in (BF16, FP16, FP32))

    def hidden_row(self, hidden_size: int) -> PayloadRow:
        return PayloadRow(torch.uint8, self.row_bytes)

    def scales_row(self, hidden_size: int) -> PayloadRow | None:
        return None


def opaque_recipe(name: str) -> OpaqueRecipe | None:
    """Return the recipe of this name if the name is bytes_N with N from 1 to 2^24. Local."""
    found = _NAME.fullmatch(name)
    if found is None or int(found[1]) > _MOST_BYTES:
        return None
    return OpaqueRecipe(int(found[1]))
