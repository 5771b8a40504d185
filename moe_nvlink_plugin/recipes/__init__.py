"""Recipes: what travels. A recipe says which rows a token becomes; transport never looks inside."""

from __future__ import annotations

from .base import PayloadRow, QuantisedRows, QuantisingRecipe, Recipe
from .unquantised import BF16, FP16, FP32, unquantised_recipe_of

__all__ = [
    "BF16",
    "FP16",
    "FP32",
    "PayloadRow",
    "QuantisedRows",
    "QuantisingRecipe",
    "Recipe",
    "unquantised_recipe_of",
]
