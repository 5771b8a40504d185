"""Protocols that a recipe implements."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple, Protocol, runtime_checkable

import torch


@dataclasses.dataclass(frozen=True)
class PayloadRow:
    """Row of one token in one payload: `[elements]` of `dtype`."""

    dtype: torch.dtype
    elements: int

    @property
    def row_bytes(self) -> int:
        """Bytes of the row."""
        return self.elements * self.dtype.itemsize


class Recipe(Protocol):
    """Format in which `hidden_size` activations of a token travel. Stateless; methods are local.

    The hook `moe_nvlink_recipes` registers recipes, our own and third-party ones. If a recipe has
    only these four members, the caller quantises before dispatch; see QuantisingRecipe.
    """

    @property
    def name(self) -> str:
        """Name by which AllToAllConfig.recipe selects the recipe."""
        ...

    @property
    def activation_dtypes(self) -> tuple[torch.dtype, ...]:
        """Values of AllToAllConfig.dtype that the recipe supports."""
        ...

    def hidden_row(self, hidden_size: int) -> PayloadRow:
        """Return the row that `dispatch(hidden_states=...)` takes.

        Raises:
            ConfigError: the recipe does not support this hidden_size.
        """
        ...

    def scales_row(self, hidden_size: int) -> PayloadRow | None:
        """Return the row of scales that travels beside hidden_row, or None if there are none.

        Raises:
            ConfigError: the recipe does not support this hidden_size.
        """
        ...


class QuantisedRows(NamedTuple):
    """Rows and scales that a recipe makes of activations.

    Attributes:
        rows: `[num_tokens, elements of hidden_row]`, in its dtype.
        scales: `[num_tokens, elements of scales_row]`, in its dtype; None if the recipe sends none.
    """

    rows: torch.Tensor
    scales: torch.Tensor | None


@runtime_checkable
class QuantisingRecipe(Recipe, Protocol):
    """Recipe that also quantises activations and dequantises rows, in plain torch.

    With such a recipe, dispatch takes activations too. If the kernels have the quantiser, dispatch
    applies it while it sends the rows, with the same bits as `quantise` (nvfp4.py says what differs
    on a GPU). Otherwise dispatch calls `quantise` first.
    """

    @property
    def needs_global_scale(self) -> bool:
        """Whether `quantise` needs one fp32 scale for the whole tensor; it does not travel."""
        ...

    @property
    def quantiser(self) -> str:
        """Name of the kernels' quantiser (kQuantiser* in config.h, without prefix), or "None"."""
        ...

    def quantise(
        self, hidden_states: torch.Tensor, global_scale: torch.Tensor | None = None
    ) -> QuantisedRows:
        """Quantise `[num_tokens, hidden_size]` activations. Local; capturable."""
        ...

    def dequantise(
        self,
        rows: torch.Tensor,
        scales: torch.Tensor | None,
        dtype: torch.dtype,
        global_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return rows and scales as `[num_tokens, hidden_size]` of `dtype`. Local; capturable."""
        ...
