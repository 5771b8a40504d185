"""The layouts of received scales (AllToAllConfig.scales_layout): sizes and views."""

from __future__ import annotations

import torch

from moe_nvlink_plugin.config import SCALES_LAYOUTS, AllToAllConfig
from moe_nvlink_plugin.errors import ConfigError
from moe_nvlink_plugin.recipes import PayloadRow, Recipe

#: Region of the scales that dispatch has laid out; only with a layout other than "linear".
LAID_OUT = "laid_out_scales"
#: Rows and scales of a tile of "interleaved".
TILE_ROWS, TILE_SCALES = 128, 4


def check(config: AllToAllConfig, recipe: Recipe, scales: PayloadRow | None) -> None:
    """Raise ConfigError if the recipe's scales cannot have the layout. Local."""
    needed = SCALES_LAYOUTS[config.scales_layout]
    if needed is None or (scales is not None and scales.dtype.itemsize == needed):
        return
    has = "no scales" if scales is None else f"scales of {scales.dtype.itemsize} bytes"
    raise ConfigError(
        f"scales_layout={config.scales_layout!r} is for scales of {needed} bytes, recipe "
        f'{recipe.name} has {has}; use "linear"'
    )


def laid_out_bytes(config: AllToAllConfig, scales: PayloadRow, slots: int) -> int:
    """Return the bytes of the scales of so many slots in the region LAID_OUT. Local."""
    if config.scales_layout == "column_major":
        return slots * scales.row_bytes
    return _padded(slots, TILE_ROWS) * _padded(scales.elements, TILE_SCALES)


def strides(
    config: AllToAllConfig, scales: PayloadRow, slots: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return shape and strides of Dispatched.scales for so many slots. Local.

    Both count elements of `dtype_of`.
    """
    if config.scales_layout == "interleaved":
        return (laid_out_bytes(config, scales, slots),), (1,)
    if config.scales_layout == "column_major":
        return (slots, scales.elements), (1, slots)
    return (slots, scales.elements), (scales.elements, 1)


def dtype_of(config: AllToAllConfig, scales: PayloadRow) -> torch.dtype:
    """Return the type of Dispatched.scales: bytes if they are interleaved. Local."""
    return torch.uint8 if config.scales_layout == "interleaved" else scales.dtype


def _padded(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
