"""Bookkeeping of both transports: which part of every rank's workspace is mapped."""

from __future__ import annotations

from collections.abc import Sequence

from moe_nvlink_plugin.errors import TransportError
from moe_nvlink_plugin.groups import Group, members_of

from .base import Extent


def round_up(number: int, unit: int) -> int:
    """Return the smallest multiple of `unit` that is at least `number`."""
    return -(-number // unit) * unit


class MappedRanges:
    """Mapped part of a rank's workspace, which is equal on all ranks. All methods are local."""

    def __init__(self, stride: int, alignment: int) -> None:
        self._stride = stride
        self._alignment = alignment
        self._ranges: list[tuple[int, int]] = []  # [start, end), sorted, not adjacent

    def clear(self) -> None:
        """Record that nothing is mapped."""
        self._ranges = []

    def check(self, extents: Sequence[Extent]) -> None:
        """Check that `extents` can be mapped.

        Raises:
            TransportError: there is no extent, or an extent is misaligned, is empty, ends after the
                window, or overlaps another.
        """
        if not extents:
            raise TransportError("no extents to map")
        taken = list(self._ranges)
        for extent in extents:
            end = round_up(extent.offset + extent.size_bytes, self._alignment)
            if extent.offset < 0 or extent.offset % self._alignment or extent.size_bytes <= 0:
                raise TransportError(
                    f"{extent}: offset must be a multiple of {self._alignment}, size above 0"
                )
            if end > self._stride:
                raise TransportError(
                    f"{extent} ends after the {self._stride} bytes per rank of this window, and a "
                    "window cannot grow or move; create the layers with the largest "
                    "max_tokens_per_rank and rows first, or close all layers and create them again"
                )
            for first, last in taken:
                if extent.offset < last and first < end:
                    raise TransportError(f"{extent} overlaps mapped bytes [{first}, {last})")
            taken.append((extent.offset, end))

    def add(self, extents: Sequence[Extent]) -> None:
        """Record that `extents` are mapped, each up to the next multiple of the alignment."""
        added = [(e.offset, round_up(e.offset + e.size_bytes, self._alignment)) for e in extents]
        merged: list[tuple[int, int]] = []
        for first, last in sorted([*self._ranges, *added]):
            if merged and merged[-1][1] == first:
                merged[-1] = (merged[-1][0], last)
            else:
                merged.append((first, last))
        self._ranges = merged

    def require(self, offset: int, size_bytes: int) -> None:
        """Check that the whole range is mapped.

        Raises:
            TransportError: a part of it is not mapped.
        """
        end = offset + size_bytes
        inside = (first <= offset and end <= last for first, last in self._ranges)
        if size_bytes < 0 or not any(inside):
            raise TransportError(f"bytes [{offset}, {end}) are not mapped; mapped: {self._ranges}")


def check_same_extents(
    group: Group, extents: Sequence[Extent], everyones: Sequence[object]
) -> None:
    """Check that all ranks were asked to map the same extents. Local.

    Args:
        group: the ranks.
        extents: the extents of this rank.
        everyones: for each rank of the group, in its order: its extents as a tuple.

    Raises:
        TransportError: a rank was asked for other extents; names that rank and both requests.
    """
    mine = tuple(extents)
    for peer, theirs in zip(members_of(group), everyones, strict=True):
        if theirs != mine:
            raise TransportError(
                f"rank {peer} was asked to map {theirs}, rank {group.rank} {mine}; the ranks' "
                "configurations differ"
            )
