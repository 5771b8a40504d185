"""Recipes: formats of the rows that travel. Only a recipe knows what a row's bytes mean."""

from __future__ import annotations

from .base import PayloadRow, QuantisedRows, QuantisingRecipe, Recipe, check_global_scale
from .fp8 import FP8_BLOCK, FP8_BLOCK_POW2, FP8_TENSOR, FP8_TOKEN
from .mxfp8 import MXFP8
from .nvfp4 import NVFP4
from .plain import BF16, FP16, FP32, opaque_recipe, unquantised_recipe_of

#: Recipes of this package, in the same order on all ranks.
BUILT_IN: tuple[Recipe, ...] = (
    BF16,
    FP16,
    FP32,
    FP8_BLOCK,
    FP8_TOKEN,
    FP8_TENSOR,
    MXFP8,
    NVFP4,
    FP8_BLOCK_POW2,
)

__all__ = [
    "BF16",
    "BUILT_IN",
    "FP8_BLOCK",
    "FP8_BLOCK_POW2",
    "FP8_TENSOR",
    "FP8_TOKEN",
    "FP16",
    "FP32",
    "MXFP8",
    "NVFP4",
    "PayloadRow",
    "QuantisedRows",
    "QuantisingRecipe",
    "Recipe",
    "check_global_scale",
    "opaque_recipe",
    "unquantised_recipe_of",
]
