"""WorkspaceLayout: the regions of a workspace, and the only module that computes offsets.

The users of a workspace say how large its data regions are (exchange/sizes.py,
lm_head/launches.py).

The regions of a layer keep their offsets for the life of the workspace, whatever the batch or
dtype, and whichever layers join later. Only because of this, one barrier per verb protects the rows
of the previous round (kernels/PROTOCOL.md says how), and a CUDA graph may hold their addresses.
Therefore every region gets address space for several times its size, and grows into it.
"""

from __future__ import annotations

import dataclasses
import math
import mmap
from collections import Counter
from collections.abc import Iterator

from moe_nvlink_plugin.errors import ConfigError
from moe_nvlink_plugin.transport import HUGE_PAGE_BYTES, Extent

#: What is mapped of a rank's workspace.
Extents = tuple[Extent, ...]

#: Bytes. The tests compare it with kRegionAlignment of kernels/include/moe_nvlink/config.h.
REGION_ALIGNMENT = 256

#: Address space of a region as a multiple of its first size. It costs no memory.
ROOM = 4

#: Kind of device -> bytes in which its memory is mapped.
UNITS = {"cpu": mmap.PAGESIZE, "cuda": HUGE_PAGE_BYTES}

#: Offsets travel as 32-bit counts of REGION_ALIGNMENT.
MAX_WINDOW_BYTES = REGION_ALIGNMENT << 32

#: Bytes reserved for the structs LocalControl and ExchangeCounters of args.h (checked on load).
STRUCT_BYTES = 256

#: Words of an entry of a meeting (kMeetingWords of config.h).
_MEETING_WORDS = 3


@dataclasses.dataclass(frozen=True)
class Region:
    """Named range of every rank's workspace; offset in bytes, a multiple of 256."""

    name: str
    offset: int
    size_bytes: int

    @property
    def block(self) -> int:
        """Offset in units of REGION_ALIGNMENT, as the kernels take it."""
        return self.offset // REGION_ALIGNMENT


def _control_sizes(ep_size: int) -> dict[str, int]:
    """Return the bytes of a channel's control regions. They depend only on the group's size."""
    return {
        "dispatch_cells": ep_size * 8,  # written by the peers
        "combine_cells": ep_size * 8,  # written by the peers
        "pulled_cells": ep_size * 8,  # written by the peers
        "recv_counts": ep_size * 4,
        "rows_from": ep_size * 4,
        "send_counters": ep_size * 4,
        "local": STRUCT_BYTES,
        "counters": STRUCT_BYTES,
        "wait_totals": ep_size * 8,
        # Entries written by the peers, and what this rank has taken of them.
        "meeting": ep_size * (3 * _MEETING_WORDS + 1) * 8,
    }


#: The control regions lie together in a place of this name; each data region has one of its own.
_CONTROL = "control"

#: (channel, name of the place).
_Key = tuple[int, str]


@dataclasses.dataclass(frozen=True)
class _Place:
    """Address space of a region in every rank's workspace, in bytes."""

    offset: int
    room: int


@dataclasses.dataclass(frozen=True)
class WorkspaceLayout:
    """Regions for a set of geometries; each region is as large as the largest geometry needs.

    Attributes:
        ep_size: number of ranks.
        num_channels: number of channels.
        sizes: bytes of each data region of one channel.
        places: address space of each region.
        end: bytes of address space in use.
        alignment: bytes to which places are aligned: the unit in which the transport maps.
        room: multiple as in ROOM.
        outgrown_bytes: bytes of places that became too small; earlier layers still use them.
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
    def of(
        cls,
        num_ranks: int,
        num_channels: int,
        sizes: dict[str, int],
        alignment: int = REGION_ALIGNMENT,
        room: int = ROOM,
    ) -> WorkspaceLayout:
        """Make a layout of data regions of these sizes (bytes) per channel, and control regions.

        Raises:
            ConfigError: it has more bytes than a window holds.
        """
        empty = cls(num_ranks, 0, {}, {}, 0, alignment, room)
        return empty._with(num_channels, sizes)

    def union(self, other: WorkspaceLayout) -> WorkspaceLayout:
        """Make a layout for both; a region of this layout keeps its place if it is large enough.

        Raises:
            ConfigError: the layouts have different ep_size, or are too large together.
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
                    unit = math.lcm(self.alignment, HUGE_PAGE_BYTES)
                    start = _rounded(end, unit) if size >= HUGE_PAGE_BYTES else end
                    place = _Place(start, _rounded(room, self.alignment))
                    places[channel, name] = place
                    end = start + place.room
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
        """Return name -> region for one channel."""
        regions = {}
        offset = self.places[channel, _CONTROL].offset
        for name, size in _control_sizes(self.ep_size).items():
            regions[name] = Region(name, offset, size)
            offset += _rounded(size, REGION_ALIGNMENT)
        for name, size in self.sizes.items():
            regions[name] = Region(name, self.places[channel, name].offset, size)
        return regions

    def extents(self, before: WorkspaceLayout | None = None) -> list[Extent]:
        """Return the extents that this layout needs in addition to the memory of `before`."""
        mapped = {} if before is None else dict(before._mapped())
        extents = []
        for offset, end in self._mapped():
            start = mapped.get(offset, offset)
            if start < end:
                extents.append(Extent(start, end - start))
        return extents

    def _mapped(self) -> Iterator[tuple[int, int]]:
        """Yield (offset, end) of the memory of every place."""
        for (_channel, name), place in self.places.items():
            size = self._control_bytes if name == _CONTROL else self.sizes[name]
            yield place.offset, place.offset + _rounded(size, self.alignment)

    def bytes_by_region(self) -> dict[str, int]:
        """Return the bytes of memory of each data region and of all control regions, "control".

        All channels together.
        """
        totals: Counter[str] = Counter()
        for (_channel, name), (offset, end) in zip(self.places, self._mapped(), strict=True):
            totals[name] += end - offset
        return dict(totals)

    @property
    def total_bytes(self) -> int:
        """Bytes of memory of one rank's workspace."""
        return self.outgrown_bytes + sum(self.bytes_by_region().values())


def _rounded(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment
