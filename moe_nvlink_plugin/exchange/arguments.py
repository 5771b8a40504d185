"""Fills the argument structs (kernels/include/moe_nvlink/args.h) for one layer and channel.

These functions set what does not change from call to call. At each call, the channel sets
num_tokens, max_tokens_per_rank, quantiser, is_padding, active_ranks, expert_counts, timeout_ns and
the addresses of the call's tensors; for combine also element, hidden_size, scale and is_masked. On
a GPU the launch sets hidden_splits or senders.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

from moe_nvlink_plugin.config import COMBINE_FORMATS, AllToAllConfig
from moe_nvlink_plugin.errors import ConfigError
from moe_nvlink_plugin.jit.header import (
    combine_formats,
    constants,
    received_ids,
    scales_layouts,
)
from moe_nvlink_plugin.launch.arguments import Window, element_code, new_arguments
from moe_nvlink_plugin.launch.kernel import Kernel
from moe_nvlink_plugin.memory.layout import Region
from moe_nvlink_plugin.recipes import (
    BUILT_IN,
    PayloadRow,
    QuantisingRecipe,
    Recipe,
    unquantised_recipe_of,
)

from .kernels import COMBINE, DISPATCH
from .scales_layout import LAID_OUT
from .sizes import COUNTS_REGIONS, are_whole_words, packed_offsets


def combine_code(config: AllToAllConfig) -> int:
    """Return kCombine* of config.h for the format in which partial rows travel back."""
    assert config.combine is not None
    return combine_formats()[config.combine]


def formats_code(config: AllToAllConfig) -> int:
    """Return 7 bits that name the recipe and combine's format; each pair of BUILT_IN has its own.

    If two layers have rows of different formats, ranks must not take one layer for the other in a
    round, even if the rows have the same size. Any other recipe, bytes_N too, has one of the other
    codes by its name, so two of them may share a code.
    """
    names = [recipe.name for recipe in BUILT_IN]
    name = config.recipe or unquantised_recipe_of(config.dtype).name
    if name not in names:
        taken = len(COMBINE_FORMATS) * len(names)
        return taken + zlib.crc32(f"{name} {config.combine}".encode()) % (128 - taken)
    return len(COMBINE_FORMATS) * names.index(name) + combine_code(config)


def number_code(layer_number: int) -> int:
    """Return 7 bits that stand for a layer's number on its workspace.

    They are combined with formats_code by exclusive or. So of 128 layers in a row that differ in
    nothing else, no two have the same tag; nor have two in a row, of any BUILT_IN formats, whose
    codes are below 64.
    """
    return (layer_number & 1) << 6 | layer_number >> 1 & 63


def received_ids_code(config: AllToAllConfig) -> tuple[int, int]:
    """Return kReceivedIds* of config.h, and the argument absent_id; 0 if the config has none."""
    if isinstance(config.received_ids, int):
        return received_ids()["given"], config.received_ids
    return received_ids()[config.received_ids], 0


def all_ids_travel(config: AllToAllConfig) -> bool:
    """Return whether each row carries all ids and weights of its token."""
    return config.received_ids == "global"


def written_code(config: AllToAllConfig) -> int:
    """Return 25 bits that stand for what dispatch writes beside the rows; 0 for the defaults.

    Layers that differ in nothing else have different tags, given absent ids and numbers of counts
    apart: of 128 pairs of them one shares a tag.
    """
    code, absent_id = received_ids_code(config)
    code |= scales_layouts()[config.scales_layout] << 2 | (absent_id & 0xFFFF) << 4
    num_counts = config.num_expert_counts
    return code | (num_counts % 31 + 1 if num_counts else 0) << 20


def quantiser_code(recipe: Recipe, hidden_size: int) -> int:
    """Return kQuantiser* of config.h, by which dispatch makes this recipe's rows. Local.

    The result is kQuantiserNone if dispatch cannot make them, or the recipe does not quantise.

    Raises:
        ConfigError: the recipe names a quantiser that the kernels do not have, or one that makes
            other rows than the recipe declares.
    """
    name = recipe.quantiser if isinstance(recipe, QuantisingRecipe) else None
    code = constants().get(f"kQuantiser{name}")
    if code is None:
        raise ConfigError(
            f"recipe {recipe.name} names quantiser {name!r}, which the kernels do not have; name "
            '"None", and dispatch calls the recipe\'s own quantise() before it sends'
        )
    for ours in BUILT_IN:
        if isinstance(ours, QuantisingRecipe) and ours.quantiser == name:
            rows = [(r.hidden_row(hidden_size), r.scales_row(hidden_size)) for r in (recipe, ours)]
            if rows[0] != rows[1]:
                raise ConfigError(
                    f"recipe {recipe.name} names quantiser {name!r} for rows {rows[0]}, but this "
                    f'quantiser makes {rows[1]}; name "None", and dispatch calls the recipe\'s '
                    "own quantise() before it sends"
                )
    return code


def dispatch_arguments(
    config: AllToAllConfig,
    rows: Mapping[str, PayloadRow],
    regions: Mapping[str, Region],
    base_ptr: int,
    rank_stride: int,
    layer_number: int = 0,
) -> Any:
    """Make the DispatchArgs of the rank `config.ep_rank`.

    Args:
        config: the layer's configuration.
        rows: result of sizes.payload_rows.
        regions: regions of the channel, by name.
        base_ptr: address of rank 0's workspace.
        rank_stride: bytes from one rank's workspace to the next rank's.
        layer_number: of the layer among those created on the workspace.
    """
    args = _common(DISPATCH, config, regions, Window(base_ptr, rank_stride))
    args.received_ids, args.absent_id = received_ids_code(config)
    args.scales_layout = scales_layouts()[config.scales_layout]
    if args.scales_layout:
        args.laid_out_region = regions[LAID_OUT].block
    for payload, (name, row) in zip(args.payloads, rows.items(), strict=False):
        payload.region, payload.row_bytes = regions[name].block, row.row_bytes
    set_extra_payloads(args, config, len(rows), config.extra_payload_bytes, layer_number)
    _set_regions(args, regions, ("staging_region",), prefix="dispatch_")
    args.ordered_slots = int(config.ordered_slots)
    args.num_expert_counts = config.num_expert_counts
    if config.num_expert_counts:
        fields = ("counts_region", "counts_staging_region", "counters_region")
        for field, name in zip(fields, COUNTS_REGIONS, strict=True):
            setattr(args, field, regions[name].block)
    return args


def set_extra_payloads(
    args: Any,
    config: AllToAllConfig,
    most_payloads: int,
    row_bytes: tuple[int, ...],
    layer_number: int,
) -> None:
    """Set what depends on the extra payloads of a call. Local.

    Args:
        args: the DispatchArgs.
        config: the layer's configuration.
        most_payloads: payloads of a call with all extra payloads of the configuration.
        row_bytes: bytes of a row of each extra payload of the call, none above its capacity.
        layer_number: as for dispatch_arguments.
    """
    first = most_payloads - len(config.extra_payload_bytes)
    args.num_payloads = first + len(row_bytes)
    for index, size in enumerate(row_bytes):
        args.payloads[first + index].row_bytes = size
    sizes = [payload.row_bytes for payload in args.payloads[: args.num_payloads]]
    offsets, packed = packed_offsets(sizes)
    args.packed_offsets[: len(offsets)] = offsets
    args.packed_bytes = packed if are_whole_words(sizes) else 0
    code = _formats(config) ^ number_code(layer_number)
    args.geometry.formats = code ^ _payloads_code(config, row_bytes) << 7


def _payloads_code(config: AllToAllConfig, row_bytes: tuple[int, ...]) -> int:
    """Return 25 bits that stand for a call's extra payloads; 0 for those of the configuration.

    They are part of the tag, like written_code, so ranks notice if their calls have different extra
    payloads.
    """
    if row_bytes == config.extra_payload_bytes:
        return 0
    return zlib.crc32(repr(row_bytes).encode()) % (2**25 - 1) + 1


def _formats(config: AllToAllConfig) -> int:
    return formats_code(config) | written_code(config) << 7


def combine_arguments(
    config: AllToAllConfig, regions: Mapping[str, Region], base_ptr: int, rank_stride: int
) -> Any:
    """Make the CombineArgs of the rank `config.ep_rank`; arguments as for dispatch_arguments."""
    args = _common(COMBINE, config, regions, Window(base_ptr, rank_stride))
    args.region = regions["combine"].block
    args.hidden_splits = 1
    args.tells_end = 1 if config.ranks_may_leave else 0
    args.scale = 1.0
    args.format = combine_code(config)
    args.rows_factor = 1.0 / ctypes.c_float(config.combine_scale).value
    fields = ("rows_region", "scales_region", "row_scales_region")
    _set_regions(args, regions, fields, prefix="combine_")
    for parity in ("even", "odd"):
        name = f"{parity}_combine_staging"
        if name in regions:
            setattr(args, f"{parity}_staging_region", regions[name].block)
    return args


def _set_regions(
    args: Any, regions: Mapping[str, Region], fields: Iterable[str], *, prefix: str
) -> None:
    """Set each field `X_region` to the region `prefix + X`, if the layer has it."""
    for field in fields:
        name = prefix + field.removesuffix("_region")
        if name in regions:
            setattr(args, field, regions[name].block)


def _common(
    kernel: Kernel[Any], config: AllToAllConfig, regions: Mapping[str, Region], window: Window
) -> Any:
    args = new_arguments(kernel, regions, window, config.timeout_s)
    geometry = args.geometry
    for name in ("ep_size", "ep_rank", "num_experts", "top_k", "hidden_size"):
        setattr(geometry, name, getattr(config, name))
    geometry.max_tokens_per_rank = config.max_tokens_per_rank
    geometry.element = element_code(config.dtype)
    geometry.formats = _formats(config)
    return args
