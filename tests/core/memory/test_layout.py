"""Regions: aligned, apart from each other, large enough, and at the same place for every layer."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_nvlink_plugin import AllToAllConfig
from moe_nvlink_plugin.errors import ConfigError
from moe_nvlink_plugin.exchange.sizes import combine_row, layer_layout, payload_rows
from moe_nvlink_plugin.memory.layout import (
    REGION_ALIGNMENT,
    Region,
    WorkspaceLayout,
)
from moe_nvlink_plugin.recipes import unquantised_recipe_of
from moe_nvlink_plugin.transport import HUGE_PAGE_BYTES

configs = st.builds(
    AllToAllConfig,
    ep_size=st.just(5),
    ep_rank=st.just(0),
    num_experts=st.integers(1, 300),
    top_k=st.integers(1, 32),
    hidden_size=st.integers(1, 9000),
    max_tokens_per_rank=st.integers(1, 5000),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    num_channels=st.integers(1, 3),
    extra_payload_bytes=st.lists(st.integers(1, 999), max_size=7).map(tuple),
)


def layout_of(*members: AllToAllConfig) -> WorkspaceLayout:
    layouts = [layer_layout(c, unquantised_recipe_of(c.dtype)) for c in members]
    return functools.reduce(WorkspaceLayout.union, layouts)


def all_regions(layout: WorkspaceLayout) -> list[Region]:
    return [r for c in range(layout.num_channels) for r in layout.channel_regions(c).values()]


@settings(deadline=None)
@given(configs)
def test_regions_are_aligned_and_apart(config: AllToAllConfig) -> None:
    layout = layout_of(config)
    regions = all_regions(layout)
    assert all(region.offset % REGION_ALIGNMENT == 0 for region in regions)
    assert all(region.block * REGION_ALIGNMENT == region.offset for region in regions)
    large = [region for region in regions if region.size_bytes >= HUGE_PAGE_BYTES]
    assert all(region.offset % HUGE_PAGE_BYTES == 0 for region in large)
    for left, right in itertools.pairwise(regions):
        assert left.offset + left.size_bytes <= right.offset
    assert regions[-1].offset + regions[-1].size_bytes <= layout.end
    assert sum(region.size_bytes for region in regions) <= layout.total_bytes <= layout.end


@settings(deadline=None)
@given(configs)
def test_every_slot_has_its_bytes(config: AllToAllConfig) -> None:
    slots = config.ep_size * config.max_tokens_per_rank
    rows = payload_rows(config, unquantised_recipe_of(config.dtype))
    regions = layout_of(config).channel_regions(0)
    for name, row in {**rows, "combine": combine_row(config)}.items():
        assert regions[name].size_bytes == slots * row.row_bytes
    assert rows["recv_hidden_states"].row_bytes == config.hidden_size * config.dtype.itemsize


@settings(deadline=None)
@given(configs, configs)
def test_union_serves_both_and_says_the_same_either_way(
    first: AllToAllConfig, second: AllToAllConfig
) -> None:
    layout = layout_of(first, second)
    for mine in (layout_of(first), layout_of(second)):
        assert layout.num_channels >= mine.num_channels
        assert all(layout.sizes[name] >= size for name, size in mine.sizes.items())
        assert layout.union(mine) == layout, "a layer that fits moves nothing"
    assert layout_of(first).union(layout_of(second)).sizes == layout.sizes
    names = set(layout_of(first).sizes) | set(layout_of(second).sizes)
    assert set(layout.sizes) == names


def small(**values: object) -> AllToAllConfig:
    usual = {"ep_size": 2, "ep_rank": 0, "num_experts": 4, "top_k": 2, "hidden_size": 8}
    return AllToAllConfig(**{**usual, "max_tokens_per_rank": 4, **values})  # type: ignore[arg-type]


def grown(
    first: AllToAllConfig, second: AllToAllConfig, alignment: int
) -> tuple[WorkspaceLayout, WorkspaceLayout]:
    """A workspace's layout for one layer, then for two."""
    before, alone = (
        layer_layout(c, unquantised_recipe_of(c.dtype), alignment) for c in (first, second)
    )
    return before, before.union(alone)


@settings(deadline=None)
@given(configs, configs, st.sampled_from([REGION_ALIGNMENT, 4096, 2 * 2**20]))
def test_growth_moves_nothing_that_fits_and_maps_what_is_missing(
    first: AllToAllConfig, second: AllToAllConfig, alignment: int
) -> None:
    before, after = grown(first, second, alignment)
    mapped: list[tuple[int, int]] = []
    for extent in [*before.extents(), *after.extents(before)]:
        assert extent.offset % alignment == extent.size_bytes % alignment == 0
        mapped.append((extent.offset, extent.offset + extent.size_bytes))
    mapped.sort()
    for (_start, end), (next_start, _end) in itertools.pairwise(mapped):
        assert end <= next_start, "a byte is mapped twice"
    # As the transport sees it: adjacent extents are one range.
    ranges: list[tuple[int, int]] = []
    for start, end in mapped:
        if ranges and ranges[-1][1] == start:
            ranges[-1] = (ranges[-1][0], end)
        else:
            ranges.append((start, end))
    for region in [*all_regions(before), *all_regions(after)]:
        assert any(
            start <= region.offset and region.offset + region.size_bytes <= end
            for start, end in ranges
        )
    assert sum(end - start for start, end in ranges) == after.total_bytes
    for channel in range(before.num_channels):
        old, new = before.channel_regions(channel), after.channel_regions(channel)
        for name, region in old.items():
            outgrown = (
                new[name].size_bytes > before.places[channel, name].room
                if ((channel, name) in before.places)
                else False
            )
            assert outgrown or new[name].offset == region.offset, name


def test_a_region_grows_within_its_room_and_moves_beyond_it() -> None:
    before, after = grown(small(), small(max_tokens_per_rank=16), 256)
    assert before.channel_regions(0)["combine"].offset == after.channel_regions(0)["combine"].offset
    assert after.outgrown_bytes == 0
    before, after = grown(small(), small(max_tokens_per_rank=999), 256)
    moved = after.channel_regions(0)["combine"].offset
    assert moved >= before.end, "beside what the first layer uses"
    assert after.outgrown_bytes > 0
    for name in ("dispatch_cells", "local", "counters"):  # all layers meet in these
        assert before.channel_regions(0)[name] == after.channel_regions(0)[name]


def test_a_workspace_beyond_32_bit_offsets_is_refused() -> None:
    with pytest.raises(ConfigError, match="address space exceeds the limit"):
        layout_of(small(max_tokens_per_rank=2**24, hidden_size=2**20))


def test_groups_of_different_size_share_nothing() -> None:
    with pytest.raises(ConfigError, match="ep_size 2 and 3"):
        layout_of(small(), small(ep_size=3))


def test_more_than_eight_payloads() -> None:
    payload_rows(small(extra_payload_bytes=(1,) * 7), unquantised_recipe_of(torch.bfloat16))
    with pytest.raises(ConfigError, match="9 payloads .* limit of 8"):
        payload_rows(small(extra_payload_bytes=(1,) * 8), unquantised_recipe_of(torch.bfloat16))
