"""The shape of a recipe."""

from __future__ import annotations

import dataclasses
from typing import Protocol

import torch


@dataclasses.dataclass(frozen=True)
class PayloadRow:
    """One payload of a token: `[elements]` of `dtype`."""

    dtype: torch.dtype
    elements: int

    @property
    def row_bytes(self) -> int:
        return self.elements * self.dtype.itemsize


class Recipe(Protocol):
    """Which rows travel for a token of `hidden_size` activations. Stateless.

    Registered through the hook `moe_nvlink_recipes`, ours as well as a stranger's.
    """

    @property
    def name(self) -> str:
        """What AllToAllConfig.recipe says."""
        ...

    @property
    def activation_dtypes(self) -> tuple[torch.dtype, ...]:
        """AllToAllConfig.dtype values it can be used with."""
        ...

    def hidden_row(self, hidden_size: int) -> PayloadRow:
        """The row `dispatch(hidden_states=...)` takes; ConfigError for a size it can't do."""
        ...

    def scales_row(self, hidden_size: int) -> PayloadRow | None:
        """The row of scales beside it, or None."""
        ...
