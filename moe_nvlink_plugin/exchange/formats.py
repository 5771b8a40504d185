"""What one layer sends and gets back, whichever channel it goes through."""

from __future__ import annotations

from typing import NamedTuple

import torch

from moe_nvlink_plugin.config import AllToAllConfig
from moe_nvlink_plugin.recipes import PayloadRow, QuantisingRecipe, Recipe

from .arguments import quantiser_code
from .sizes import payload_rows


class Activations(NamedTuple):
    """What dispatch is given of the tokens themselves: see MoeAllToAll.dispatch."""

    hidden_states: torch.Tensor
    scales: torch.Tensor | None
    global_scale: torch.Tensor | None


class LayerFormat(NamedTuple):
    """The rows of one layer.

    Attributes:
        quantising: the recipe, if it quantises.
        quantiser: kQuantiser* of config.h by which dispatch quantises; 0: it does not.
        rows: of every payload, by its region.
        device: where the tensors are.
    """

    config: AllToAllConfig
    recipe: Recipe
    quantising: QuantisingRecipe | None
    quantiser: int
    rows: dict[str, PayloadRow]
    device: torch.device

    @classmethod
    def of(cls, config: AllToAllConfig, recipe: Recipe, device: torch.device) -> LayerFormat:
        """For a layer of this configuration.

        Raises:
            ConfigError: the recipe or the number of payloads is none that the kernels can do.
        """
        quantising = recipe if isinstance(recipe, QuantisingRecipe) else None
        quantiser = quantiser_code(recipe, config.hidden_size)
        return cls(config, recipe, quantising, quantiser, payload_rows(config, recipe), device)

    @property
    def num_slots(self) -> int:
        """Rows that this rank may receive."""
        return self.config.ep_size * self.config.max_tokens_per_rank
