"""The regions of a layer in symmetric memory, and the rows in them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch

from moe_nvlink_plugin.config import (
    MAX_CALLER_PAYLOADS,
    AllToAllConfig,
)
from moe_nvlink_plugin.errors import ConfigError
from moe_nvlink_plugin.memory.layout import REGION_ALIGNMENT, ROOM, WorkspaceLayout
from moe_nvlink_plugin.recipes import PayloadRow, Recipe, combine_formats

from . import scales_layout

#: Bytes of a unit, in which rows of small batches and counts travel, and of data in one with two
#: marks (units.h); AllToAllConfig.unit_data_bytes says how many the units of rows have.
UNIT_BYTES, UNIT_DATA_BYTES = 16, 12
#: Payloads begin at multiples of these bytes in a packed row.
PACKED_ALIGNMENT = 16
#: Regions of counts per expert: what all ranks have counted, the same on its way, this rank's
#: counters.
COUNTS_REGIONS = ("expert_counts", "expert_counts_staging", "expert_counters")
#: Beginning of a region's name -> what `memory_by_part` calls it; the first that fits.
_PARTS = {
    "recv_": "received rows",
    scales_layout.LAID_OUT: "received rows",
    "combine_": "experts' quantised output",
    "combine": "experts' output",
    "expert_count": "counts per expert",
    "control": "control",
    "": "small batches",  # the staging of each verb
}


def layer_layout(
    config: AllToAllConfig,
    recipe: Recipe,
    alignment: int = REGION_ALIGNMENT,
    room: int = ROOM,
) -> WorkspaceLayout:
    """Make the layout of one layer.

    Args:
        config: the layer's configuration.
        recipe: what travels.
        alignment: bytes to which the transport aligns places.
        room: multiple as in layout.ROOM.

    Raises:
        ConfigError: there are more than 8 payloads, or more bytes than a window holds.
    """
    sizes = _data_sizes(config, recipe)
    return WorkspaceLayout.of(config.ep_size, config.num_channels, sizes, alignment, room)


def memory_by_part(config: AllToAllConfig, recipe: Recipe, alignment: int) -> dict[str, int]:
    """Return what the bytes of a layer's own workspace are for, the largest part first. Local.

    Arguments and errors as of `layer_layout`.
    """
    totals: Counter[str] = Counter()
    for name, size_bytes in layer_layout(config, recipe, alignment).bytes_by_region().items():
        part = next(part for start, part in _PARTS.items() if name.startswith(start))
        totals[part] += size_bytes
    return dict(totals.most_common())


def payload_rows(config: AllToAllConfig, recipe: Recipe) -> dict[str, PayloadRow]:
    """Return region name -> row for every payload of a token, in order of DispatchArgs.payloads.

    Raises:
        ConfigError: there are more than 8 payloads beside expert ids and router weights, or the
            recipe's scales cannot have the layout.
    """
    rows = {
        "recv_topk_ids": PayloadRow(torch.int32, config.top_k),
        "recv_topk_weights": PayloadRow(torch.float32, config.top_k),
        "recv_hidden_states": recipe.hidden_row(config.hidden_size),
    }
    scales = recipe.scales_row(config.hidden_size)
    scales_layout.check(config, recipe, scales)
    if scales is not None:
        rows["recv_scales"] = scales
    for index, row_bytes in enumerate(config.extra_payload_bytes):
        rows[f"recv_extra_{index}"] = PayloadRow(torch.uint8, row_bytes)
    if len(rows) > MAX_CALLER_PAYLOADS + 2:
        raise ConfigError(
            f"{len(rows) - 2} payloads (hidden states, scales and extra_payload_bytes="
            f"{config.extra_payload_bytes}) exceed the limit of {MAX_CALLER_PAYLOADS}; "
            "pack several small extra payloads into one row"
        )
    return rows


def combine_row(config: AllToAllConfig) -> PayloadRow:
    """Return the row of the experts' output, if a call names no other."""
    return PayloadRow(config.dtype, config.hidden_size)


def combine_dtypes(config: AllToAllConfig) -> tuple[torch.dtype, ...]:
    """Return the types in which combine takes rows, each once; config.dtype is the first."""
    return tuple(dict.fromkeys((config.dtype, *config.combine_dtypes)))


def widest_combine_row(config: AllToAllConfig) -> int:
    """Return the most bytes of a row of the experts' output."""
    return config.hidden_size * max(dtype.itemsize for dtype in combine_dtypes(config))


def quantised_combine_rows(config: AllToAllConfig) -> dict[str, PayloadRow]:
    """Return region name -> row for the quantised rows that peers read in combine.

    It is empty if they read the experts' output itself.

    Raises:
        ConfigError: the format of combine does not support this hidden_size.
    """
    return combine_formats.combine_rows(config.combine, config.hidden_size)


def packed_offsets(row_bytes: Iterable[int]) -> tuple[list[int], int]:
    """Return where payloads of these bytes lie in a token's packed row, and its bytes. Local."""
    offsets, end = [], 0
    for size in row_bytes:
        offsets.append(end)
        end += -(-size // PACKED_ALIGNMENT) * PACKED_ALIGNMENT
    return offsets, end


def packed_bytes(row_bytes: Iterable[int]) -> int:
    """Return the bytes of a token's packed row. Local."""
    return packed_offsets(row_bytes)[1]


def are_whole_words(row_bytes: Iterable[int]) -> bool:
    """Return whether units can carry rows of these bytes: as whole words of 4 bytes. Local."""
    return all(size % 4 == 0 for size in row_bytes)


def staged_bytes(row_bytes: int, data_bytes: int = UNIT_DATA_BYTES) -> int:
    """Return the bytes of a row of so many bytes as units with so many bytes of data. Local."""
    return -(-row_bytes // data_bytes) * UNIT_BYTES


def row_data_bytes(config: AllToAllConfig) -> int:
    """Return the bytes of data of units that carry rows. Local."""
    assert config.unit_data_bytes is not None  # AllToAllConfig has filled it in
    return config.unit_data_bytes


def summed_data_bytes(config: AllToAllConfig, element_bytes: int) -> int:
    """Return the bytes of data of units that carry rows of such elements in combine. Local."""
    # 14 bytes would cut an element of 4.
    return row_data_bytes(config) if element_bytes == 2 else UNIT_DATA_BYTES


def combines_small_batches(config: AllToAllConfig) -> bool:
    """Return whether combine can bring a small batch's widest rows back as units. Local.

    Units carry unquantised rows of whole 4-byte words.
    """
    return config.combine == "bf16" and are_whole_words([widest_combine_row(config)])


def small_combine_tokens(config: AllToAllConfig) -> int:
    """Return up to how many tokens of a rank combine uses the kernel for small batches. Local."""
    if not combines_small_batches(config):
        return 0
    limit = config.small_combine_tokens
    return (config.small_tokens or 0) if limit is None else limit


def gets_by_tma(config: AllToAllConfig) -> bool:
    """Return whether a GPU rank's combine gets rows by TMA, if they are whole vectors. Local.

    It does if it may fill few SMs, and rows have no format.
    """
    few = config.max_sms is not None and config.max_sms <= config.choices.tma_sms
    return few and config.combine == "bf16"


def sms_beside(config: AllToAllConfig) -> int:
    """Return how many SMs a GPU rank's verbs fill that run beside their caller. Local.

    0: as many as the others. Combine keeps to it where rows come by TMA.
    """
    few = config.choices.tma_sms
    return few if config.leave_sms and few < (config.max_sms or few + 1) else 0


def loads_tma(config: AllToAllConfig) -> bool:
    """Return whether a GPU rank's combine or combine_async gets rows by TMA. Local."""
    return gets_by_tma(config) or (sms_beside(config) > 0 and config.combine == "bf16")


def staging_rows(config: AllToAllConfig, packed_bytes: int) -> dict[str, int]:
    """Return region name -> bytes of one row's units, for a packed row of so many bytes. Local."""
    rows = {"dispatch_staging": staged_bytes(packed_bytes, row_data_bytes(config))}
    if combines_small_batches(config):
        sizes = [dtype.itemsize for dtype in combine_dtypes(config)]
        widest = max(
            staged_bytes(config.hidden_size * size, summed_data_bytes(config, size))
            for size in sizes
        )
        rows |= {f"{parity}_combine_staging": widest for parity in ("even", "odd")}
    return rows


def _data_sizes(config: AllToAllConfig, recipe: Recipe) -> dict[str, int]:
    """Return the bytes of the regions for one channel's rows in this geometry."""
    slots = config.ep_size * config.max_tokens_per_rank
    rows = payload_rows(config, recipe)
    sizes = {name: slots * row.row_bytes for name, row in rows.items()}  # slice s: by rank s
    if config.scales_layout != "linear":
        sizes[scales_layout.LAID_OUT] = scales_layout.laid_out_bytes(
            config, rows["recv_scales"], slots
        )
    sizes["combine"] = slots * widest_combine_row(config)  # written by this rank's experts
    for name, row in quantised_combine_rows(config).items():
        sizes[name] = slots * row.row_bytes  # of those rows, written by combine for the peers
    packed = packed_bytes(row.row_bytes for row in rows.values())
    for name, row_bytes in staging_rows(config, packed).items():
        combines = name != "dispatch_staging"
        tokens = small_combine_tokens(config) if combines else config.small_tokens
        if tokens:
            sizes[name] = config.ep_size * tokens * row_bytes  # slice s: by rank s
    if config.num_expert_counts:
        sizes |= _counts_sizes(config)
    return sizes


def _counts_sizes(config: AllToAllConfig) -> dict[str, int]:
    block = config.num_expert_counts * 4
    staged = config.ep_size * staged_bytes(block)  # slice s: by rank s
    blocks = (config.ep_size * block, staged, config.num_experts * 4)
    return dict(zip(COUNTS_REGIONS, blocks, strict=True))
