"""Recipes: what travels. A recipe says which rows a token becomes; transport never looks inside."""

from __future__ import annotations

from .base import PayloadRow, QuantisedRows, QuantisingRecipe, Recipe
from .fp8 import FP8_BLOCK, FP8_TENSOR, FP8_TOKEN
from .global_scale import check_global_scale
from .mxfp8 import MXFP8
from .nvfp4 import NVFP4
from .unquantised import BF16, FP16, FP32, unquantised_recipe_of

#: Those of this package, in an order that all ranks have.
BUILT_IN: tuple[Recipe, ...] = (
    BF16,
    FP16,
    FP32,
    FP8_BLOCK,
    FP8_TOKEN,
    FP8_TENSOR,
    MXFP8,
    NVFP4,
)

__all__ = [
    "BF16",
    "BUILT_IN",
    "FP8_BLOCK",
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
    "unquantised_recipe_of",
]
