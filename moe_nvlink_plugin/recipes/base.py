"""The shape of a recipe."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple, Protocol, runtime_checkable

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

    Registered through the hook `moe_nvlink_recipes`, ours as well as a stranger's. With these four
    members the caller quantises before dispatch; see QuantisingRecipe for more.
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


class QuantisedRows(NamedTuple):
    """What activations become.

    rows: `[num_tokens, elements of hidden_row]`; scales: `[num_tokens, elements of scales_row]`,
    None where the recipe sends none.
    """

    rows: torch.Tensor
    scales: torch.Tensor | None


@runtime_checkable
class QuantisingRecipe(Recipe, Protocol):
    """A recipe that also says how activations become its rows and back, in plain torch.

    dispatch then takes activations too. Where the kernels have the quantiser they apply it on the
    way, with the same bits as `quantise`; otherwise dispatch calls `quantise` first.
    """

    @property
    def needs_global_scale(self) -> bool:
        """Whether `quantise` takes one fp32 scale for the whole tensor, which does not travel."""
        ...

    @property
    def quantiser(self) -> str:
        """kQuantiser* of kernels/include/moe_nvlink/config.h without the prefix; "None": none."""
        ...

    def quantise(
        self, hidden_states: torch.Tensor, global_scale: torch.Tensor | None = None
    ) -> QuantisedRows:
        """`[num_tokens, hidden_size]` activations as rows that travel. Local; capturable."""
        ...

    def dequantise(
        self,
        rows: torch.Tensor,
        scales: torch.Tensor | None,
        dtype: torch.dtype,
        global_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Rows and scales as `[num_tokens, hidden_size]` of `dtype`. Local; capturable."""
        ...
