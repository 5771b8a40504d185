"""The formats of what one layer sends and gets back, equal on all of its channels."""

from __future__ import annotations

from typing import NamedTuple

import torch

from moe_nvlink_plugin.config import AllToAllConfig
from moe_nvlink_plugin.recipes import PayloadRow, QuantisingRecipe, Recipe

from .arguments import quantiser_code
from .sizes import combine_dtypes, payload_rows


class Activations(NamedTuple):
    """Arguments of one dispatch that say what the tokens are: see MoeAllToAll.dispatch."""

    hidden_states: torch.Tensor
    scales: torch.Tensor | None
    global_scale: torch.Tensor | None
    is_padding: torch.Tensor | None = None
    active_ranks: torch.Tensor | None = None
    expert_counts: torch.Tensor | None = None


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
    """

    config: AllToAllConfig
    recipe: Recipe
    quantising: QuantisingRecipe | None
    quantiser: int
    rows: dict[str, PayloadRow]
    combine_dtypes: tuple[torch.dtype, ...]
    device: torch.device

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
        return cls(config, recipe, quantising, quantiser, rows, combine_dtypes(config), device)

    @property
    def num_slots(self) -> int:
        """Number of rows that this rank can receive in one call, whatever its bound."""
        return self.slots_of(self.config.max_tokens_per_rank)

    def slots_of(self, max_tokens: int) -> int:
        """Return the number of slots of a call with this bound."""
        return self.config.ep_size * max_tokens
