"""WorkspaceLayout: the ordered regions of a workspace. The only place where offsets exist.

A region keeps its offset for the life of the workspace, whatever the layer, batch or dtype: only so
does one barrier per verb protect the rows of the previous round (kernels/dispatch.cu says how).
"""

from __future__ import annotations

import dataclasses
import math

import torch

from .config import MAX_CALLER_PAYLOADS, AllToAllConfig
from .errors import ConfigError
from .recipes import PayloadRow, Recipe

#: Bytes; compared with kRegionAlignment of kernels/include/moe_nvlink/config.h in the tests.
REGION_ALIGNMENT = 256

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


def _region_sizes(config: AllToAllConfig, recipe: Recipe) -> dict[str, int]:
    """Bytes of each region of one channel that this geometry needs."""
    slots = config.ep_size * config.max_tokens_per_rank
    sizes = {
        "dispatch_cells": config.ep_size * 8,  # written by the peers
        "combine_cells": config.ep_size * 8,  # written by the peers
        "recv_counts": config.ep_size * 4,
        "send_counters": config.ep_size * 4,
        "local": STRUCT_BYTES,
        "counters": STRUCT_BYTES,
    }
    for name, row in payload_rows(config, recipe).items():
        sizes[name] = slots * row.row_bytes  # slice s is written by rank s
    sizes["combine"] = slots * combine_row(config).row_bytes  # written by this rank's experts
    return sizes


@dataclasses.dataclass(frozen=True)
class WorkspaceLayout:
    """Regions that serve every one of a set of geometries: each as large as any needs it."""

    ep_size: int
    num_channels: int
    sizes: dict[str, int]

    @classmethod
    def for_geometry(cls, config: AllToAllConfig, recipe: Recipe) -> WorkspaceLayout:
        """What one layer needs."""
        return cls(config.ep_size, config.num_channels, _region_sizes(config, recipe))

    def union(self, other: WorkspaceLayout) -> WorkspaceLayout:
        """A layout that serves both.

        Raises:
            ConfigError: they are for groups of different size.
        """
        if self.ep_size != other.ep_size:
            raise ConfigError(
                f"layers of ep_size {self.ep_size} and {other.ep_size} cannot share one workspace; "
                "create one for each expert-parallel group"
            )
        names = [*self.sizes, *(name for name in other.sizes if name not in self.sizes)]
        sizes = {name: max(self.sizes.get(name, 0), other.sizes.get(name, 0)) for name in names}
        return WorkspaceLayout(self.ep_size, max(self.num_channels, other.num_channels), sizes)

    def channel_regions(self, channel: int) -> dict[str, Region]:
        """The regions of one channel, by name."""
        offset = channel * self._channel_bytes
        regions = {}
        for name, size in self.sizes.items():
            regions[name] = Region(name, offset, size)
            offset += _aligned(size)
        return regions

    @property
    def _channel_bytes(self) -> int:
        return sum(_aligned(size) for size in self.sizes.values())

    @property
    def total_bytes(self) -> int:
        """Bytes of one rank's workspace."""
        return self.num_channels * self._channel_bytes


def _aligned(size: int) -> int:
    return math.ceil(size / REGION_ALIGNMENT) * REGION_ALIGNMENT
