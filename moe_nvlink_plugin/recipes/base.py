"""Protocols that a recipe implements, and the check of the one scale that some recipes need."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple, Protocol, runtime_checkable

import torch

from moe_nvlink_plugin.errors import InputError

#: Between these limits a scale and its reciprocal are both normal fp32 numbers. Beyond them, a
#: GPU's approximate reciprocal is 0 or infinity, where a CPU still computes a subnormal number.
SMALLEST, LARGEST = 2.0**-126, 2.0**126


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


def check_global_scale(
    recipe: str, scale: torch.Tensor | None, *, read_value: bool = True
) -> torch.Tensor:
    """Return the recipe's global scale as a 0-d fp32 tensor. Local; capturable without read_value.

    Args:
        recipe: name of the recipe, for the message.
        scale: one fp32 element on any device, in any shape.
        read_value: also check the number. If the tensor is on a GPU, this waits for the GPU.

    Raises:
        InputError: the scale is missing, or of another type or size. With `read_value` also: it is
            below 2^-126 (zero and negative numbers too), above 2^126, or NaN.
    """
    if scale is None:
        raise InputError(
            f"recipe {recipe} needs global_scale, one fp32 number for the whole tensor; take it "
            "from the calibrated checkpoint, or use a recipe that scales by itself (fp8_token)"
        )
    if scale.dtype != torch.float32:
        raise InputError(
            f"global_scale of recipe {recipe} has dtype {scale.dtype}, expected torch.float32; "
            "convert it first"
        )
    if scale.numel() != 1:
        raise InputError(
            f"global_scale of recipe {recipe} has shape {list(scale.shape)}, expected one element; "
            "where every expert has its own, pass the one that the activations were calibrated with"
        )
    if read_value and not SMALLEST <= (value := float(scale)) <= LARGEST:
        raise InputError(
            f"global_scale={value} of recipe {recipe} must be from 2^-126 to 2^126; take it from a "
            "calibrated checkpoint"
        )
    return scale.reshape(())
