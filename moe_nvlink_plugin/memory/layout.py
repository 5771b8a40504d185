"""WorkspaceLayout: the ordered regions of a workspace. The only place where offsets exist.

A layer's regions keep their offsets for the life of the workspace, whatever the batch or dtype and
whichever layers join later: only so does one barrier per verb protect the rows of the round before
(kernels/dispatch.cu says how), and only so may a CUDA graph hold their addresses. So every region
gets address space for several times its size, and grows into it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

from moe_nvlink_plugin.config import MAX_CALLER_PAYLOADS, AllToAllConfig
from moe_nvlink_plugin.errors import ConfigError
from moe_nvlink_plugin.recipes import PayloadRow, Recipe, combine_formats
from moe_nvlink_plugin.transport import Extent

#: Bytes; compared with kRegionAlignment of kernels/include/moe_nvlink/config.h in the tests.
REGION_ALIGNMENT = 256

#: Address space of a region, in multiples of what it needs at first. Costs no memory.
ROOM = 4

#: Offsets travel as 32-bit counts of REGION_ALIGNMENT.
MAX_WINDOW_BYTES = REGION_ALIGNMENT << 32

#: Bytes reserved for the structs LocalControl and ExchangeCounters of args.h (checked on load).
STRUCT_BYTES = 256


@dataclasses.dataclass(frozen=True)
class Region:
    """A named, 256-byte-aligned range of every rank's workspace."""

    name: str
    offset: int
    size_bytes: int

    @property
    def block(self) -> int:
        """Offset in units of REGION_ALIGNMENT, as the kernels take it."""
        return self.offset // REGION_ALIGNMENT


def payload_rows(config: AllToAllConfig, recipe: Recipe) -> dict[str, PayloadRow]:
    """Region name -> row, for every payload of a token, in the order of DispatchArgs.payloads.

    Raises:
        ConfigError: more than 8 payloads beside expert ids and router weights.
    """
    rows = {
        "recv_topk_ids": PayloadRow(torch.int32, config.top_k),
        "recv_topk_weights": PayloadRow(torch.float32, config.top_k),
        "recv_hidden_states": recipe.hidden_row(config.hidden_size),
    }
    scales = recipe.scales_row(config.hidden_size)
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
    """A row of the experts' output."""
    return PayloadRow(config.dtype, config.hidden_size)


def quantised_combine_rows(config: AllToAllConfig) -> dict[str, PayloadRow]:
    """Region name -> row, for what the peers read in combine where it is not the experts' output.

    Raises:
        ConfigError: the format of combine cannot take rows of this hidden size.
    """
    return combine_formats.combine_rows(config.combine, config.hidden_size)


def _control_sizes(ep_size: int) -> dict[str, int]:
    """Bytes of the regions that steer a channel. They depend on the group only, so never grow."""
    return {
        "dispatch_cells": ep_size * 8,  # written by the peers
        "combine_cells": ep_size * 8,  # written by the peers
        "recv_counts": ep_size * 4,
        "rows_from": ep_size * 4,
        "send_counters": ep_size * 4,
        "local": STRUCT_BYTES,
        "counters": STRUCT_BYTES,
    }


def _data_sizes(config: AllToAllConfig, recipe: Recipe) -> dict[str, int]:
    """Bytes of the regions that hold one channel's rows in this geometry."""
    slots = config.ep_size * config.max_tokens_per_rank
    rows = payload_rows(config, recipe)
    sizes = {name: slots * row.row_bytes for name, row in rows.items()}  # slice s: by rank s
    sizes["combine"] = slots * combine_row(config).row_bytes  # written by this rank's experts
    for name, row in quantised_combine_rows(config).items():
        sizes[name] = slots * row.row_bytes  # of those rows, written by combine for the peers
    return sizes


#: The control regions lie together in a place of this name; each data region has one of its own.
_CONTROL = "control"

#: (channel, name of the place).
_Key = tuple[int, str]


@dataclasses.dataclass(frozen=True)
class _Place:
    """Address space of a region in every rank's workspace, and the room it has to grow."""

    offset: int
    room: int


@dataclasses.dataclass(frozen=True)
class WorkspaceLayout:
    """Regions that serve every one of a set of geometries: each as large as any needs it.

    Attributes:
        sizes: bytes of each data region of one channel.
        places: where they are.
        end: bytes of address space in use.
        outgrown_bytes: memory of places that became too small; layers made before still use it.
        alignment: bytes that places are aligned to: what the transport maps at a time.
        room: see ROOM.
    """

    ep_size: int
    num_channels: int
    sizes: dict[str, int]
    places: dict[_Key, _Place]
    end: int
    alignment: int
    room: int
    outgrown_bytes: int = 0

    @classmethod
    def for_geometry(
        cls,
        config: AllToAllConfig,
        recipe: Recipe,
        alignment: int = REGION_ALIGNMENT,
        room: int = ROOM,
    ) -> WorkspaceLayout:
        """What one layer needs.

        Raises:
            ConfigError: more than 8 payloads, or more bytes than a window holds.
        """
        sizes = _data_sizes(config, recipe)
        return cls.of(config.ep_size, config.num_channels, sizes, alignment, room)

    @classmethod
    def of(
        cls,
        num_ranks: int,
        num_channels: int,
        sizes: dict[str, int],
        alignment: int = REGION_ALIGNMENT,
        room: int = ROOM,
    ) -> WorkspaceLayout:
        """Data regions of these sizes in bytes, for each channel, beside the control regions.

        Raises:
            ConfigError: more bytes than a window holds.
        """
        empty = cls(num_ranks, 0, {}, {}, 0, alignment, room)
        return empty._with(num_channels, sizes)

    def union(self, other: WorkspaceLayout) -> WorkspaceLayout:
        """A layout that serves both; what has a place here keeps it while its room suffices.

        Raises:
            ConfigError: they are for groups of different size, or too large together.
        """
        if self.ep_size != other.ep_size:
            raise ConfigError(
                f"layers of ep_size {self.ep_size} and {other.ep_size} cannot share one workspace; "
                "create one for each expert-parallel group"
            )
        names = [*self.sizes, *(name for name in other.sizes if name not in self.sizes)]
        sizes = {name: max(self.sizes.get(name, 0), other.sizes.get(name, 0)) for name in names}
        return self._with(max(self.num_channels, other.num_channels), sizes)

    def _with(self, num_channels: int, sizes: dict[str, int]) -> WorkspaceLayout:
        places, end, outgrown = dict(self.places), self.end, self.outgrown_bytes
        needs = {_CONTROL: self._control_bytes, **sizes}
        for channel in range(num_channels):
            for name, size in needs.items():
                place = places.get((channel, name))
                if place is not None and place.room < size:
                    outgrown += _rounded(self.sizes[name], self.alignment)
                if place is None or place.room < size:
                    room = size if name == _CONTROL else size * self.room
                    place = _Place(end, _rounded(room, self.alignment))
                    places[channel, name] = place
                    end += place.room
        if end > MAX_WINDOW_BYTES:
            raise ConfigError(
                f"a workspace of {end} bytes of address space exceeds the limit of "
                f"{MAX_WINDOW_BYTES}; lower max_tokens_per_rank or num_channels (of a "
                "shared LM head: max_rows_per_rank)"
            )
        return WorkspaceLayout(
            self.ep_size, num_channels, sizes, places, end, self.alignment, self.room, outgrown
        )

    @property
    def _control_bytes(self) -> int:
        sizes = _control_sizes(self.ep_size).values()
        return sum(_rounded(size, REGION_ALIGNMENT) for size in sizes)

    def channel_regions(self, channel: int) -> dict[str, Region]:
        """The regions of one channel, by name."""
        regions = {}
        offset = self.places[channel, _CONTROL].offset
        for name, size in _control_sizes(self.ep_size).items():
            regions[name] = Region(name, offset, size)
            offset += _rounded(size, REGION_ALIGNMENT)
        for name, size in self.sizes.items():
            regions[name] = Region(name, self.places[channel, name].offset, size)
        return regions

    def extents(self, before: WorkspaceLayout | None = None) -> list[Extent]:
        """The memory that must be put behind this layout where `before` has its own already."""
        mapped = {} if before is None else dict(before._mapped())
        extents = []
        for offset, end in self._mapped():
            start = mapped.get(offset, offset)
            if start < end:
                extents.append(Extent(start, end - start))
        return extents

    def _mapped(self) -> Iterator[tuple[int, int]]:
        """(offset, end) of the memory behind every place."""
        for (_channel, name), place in self.places.items():
            size = self._control_bytes if name == _CONTROL else self.sizes[name]
            yield place.offset, place.offset + _rounded(size, self.alignment)

    @property
    def total_bytes(self) -> int:
        """Memory of one rank's workspace."""
        return self.outgrown_bytes + sum(end - offset for offset, end in self._mapped())


def _rounded(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment
