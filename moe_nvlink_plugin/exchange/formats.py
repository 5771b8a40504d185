"""The formats of what one layer sends and gets back, equal on all of its channels."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch

from moe_nvlink_plugin.config import AllToAllConfig
from moe_nvlink_plugin.recipes import PayloadRow, QuantisingRecipe, Recipe

from . import calls, rank_masks
from .arguments import quantiser_code
from .calls import Dispatch, Expected
from .sizes import combine_dtypes, payload_rows


class LayerFormat(NamedTuple):
    """The rows of one layer.

    Attributes:
        config: the layer's configuration.
        recipe: the format that travels.
        quantising: the recipe if it can quantise, else None.
        quantiser: kQuantiser* of config.h by which dispatch quantises; 0: it does not.
        rows: name of the region -> row, for every payload.
        combine_dtypes: types in which combine takes rows.
        device: device of the tensors.
        expected: what tensors of a dispatch must be: of rows as they travel, and of activations
            that the kernel quantises.
    """

    config: AllToAllConfig
    recipe: Recipe
    quantising: QuantisingRecipe | None
    quantiser: int
    rows: dict[str, PayloadRow]
    combine_dtypes: tuple[torch.dtype, ...]
    device: torch.device
    expected: tuple[tuple[Expected, ...], tuple[Expected, ...]]

    @classmethod
    def of(cls, config: AllToAllConfig, recipe: Recipe, device: torch.device) -> LayerFormat:
        """Make the formats of a layer of this configuration.

        Raises:
            ConfigError: the recipe names a quantiser that the kernels do not have or that makes
                other rows, or there are too many payloads.
        """
        quantising = recipe if isinstance(recipe, QuantisingRecipe) else None
        quantiser = quantiser_code(recipe, config.hidden_size)
        rows = payload_rows(config, recipe)
        dtypes, expected = combine_dtypes(config), _expected(config, rows)
        return cls(config, recipe, quantising, quantiser, rows, dtypes, device, expected)

    @property
    def num_slots(self) -> int:
        """Number of rows that this rank can receive in one call, whatever its bound."""
        return self.slots_of(self.config.max_tokens_per_rank)

    def slots_of(self, max_tokens: int) -> int:
        """Return the number of slots of a call with this bound."""
        return self.config.ep_size * max_tokens


def _expected(
    config: AllToAllConfig, rows: dict[str, PayloadRow]
) -> tuple[tuple[Expected, ...], tuple[Expected, ...]]:
    sizes = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    sizes["num_mask_words"] = rank_masks.num_words(config.ep_size)
    always = calls.expected(Dispatch, sizes)
    activations = _tokens("hidden_states", config.hidden_size, config.dtype)
    as_they_travel = [
        _tokens(name, row.elements, row.dtype)
        for name in ("hidden_states", "scales")
        if (row := rows.get(f"recv_{name}")) is not None
    ]
    return (*as_they_travel, *always), (activations, *always)


def _tokens(name: str, elements: int, dtype: torch.dtype) -> Expected:
    return Expected(Dispatch._fields.index(name), name, False, True, (elements,), (dtype,))
