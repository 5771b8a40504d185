"""The kernels dispatch and combine: the axes of their builds, and their launch shapes.

This module imports no torch, because every compiling process of `moe-nvlink precompile` would pay
for it.
"""

from __future__ import annotations

from typing import Any

from moe_nvlink_plugin import env
from moe_nvlink_plugin.jit import header
from moe_nvlink_plugin.launch.kernel import ELEMENT, PDL, Axis, Family, Kernel, no_yes
from moe_nvlink_plugin.launch.shape import Limits, Shape
from moe_nvlink_plugin.memory.phases import Phase

from .shapes import (
    CombineSizes,
    DispatchSizes,
    SmallSizes,
    combine_shape,
    dispatch_shape,
    small_shape,
    tma_combine_shape,
)


def _counts() -> dict[str, int]:
    return {str(count): count for count in range(1, header.constants()["kMaxTopK"] + 1)}


#: Experts per token. The kernels unroll their loops over rows so many times.
TOP_K = Axis("top_k", ("int kTopK", "int kTopKBound"), _counts)
#: How dispatch quantises activations. Every layer also needs the build that does not quantise, for
#: rows that the caller has quantised.
QUANTISER = Axis(
    "recipe",
    ("int kQuantiser",),
    header.quantisers,
    default="none",
    is_silent=True,
    always=(0,),
    placeholder="RECIPE",
)
#: Format in which partial rows travel back.
COMBINE_FORMAT = Axis(
    "combine",
    ("int kCombine",),
    header.combine_formats,
    default="bf16",
    is_silent=True,
    placeholder="FORMAT",
)
#: Whether counts per expert travel with dispatch.
EXPERT_COUNTS = Axis(
    "expert_counts",
    ("int kExpertCounts",),
    no_yes,
    default="no",
    is_silent=True,
    placeholder="yes",
)
#: Whether rows lie in the order of their tokens.
ORDERED_SLOTS = Axis(
    "ordered_slots",
    ("int kOrderedSlots",),
    no_yes,
    default="no",
    is_silent=True,
    placeholder="yes",
)


def _unit_data_bytes() -> dict[str, int]:
    return {str(data_bytes): data_bytes for data_bytes in sorted(env.UNIT_DATA_BYTES)}


#: Bytes of data of the units that carry rows of small batches (units.h). CPU ranks have 14.
UNITS = Axis("units", ("int kUnitDataBytes",), _unit_data_bytes, default="14", is_silent=True)
#: Whether combine gets rows by TMA (kernels/exchange/tma_combine.h), for which few SMs do. Rows
#: with a format do not come so, and rows that are no whole vectors neither.
TMA = Axis(
    "tma",
    ("int kTma",),
    no_yes,
    default="no",
    is_silent=True,
    always=(0,),
    placeholder="yes",
)

#: Whether cells are signalled by st.async.release, which does not hold its thread (memory_order.h).
#: Off until a GPU says that it is faster.
ASYNC_RELEASE = Axis(
    "async_release",
    ("bool kAsyncRelease",),
    no_yes,
    default="no",
    is_silent=True,
    placeholder="yes",
    only_on=("sm_100a", "sm_103a"),
)


def _num_tokens(args: Any) -> int:
    return int(args.geometry.num_tokens)


def _dispatch_shape(num_tokens: int, sizes: DispatchSizes, limits: Limits) -> Shape:
    return dispatch_shape(num_tokens, sizes.row_bytes, sizes.tail_bytes, limits, sizes.choices)


def _combine_shape(num_tokens: int, sizes: CombineSizes, limits: Limits) -> Shape:
    if sizes.staged_rows:
        return tma_combine_shape(num_tokens, sizes, limits)
    hidden_size, element_bytes, slots, choices, _ = sizes
    return combine_shape(num_tokens, hidden_size, element_bytes, limits, slots, choices)


DISPATCH: Kernel[DispatchSizes] = Kernel(
    name="dispatch",
    source="exchange/dispatch.cu",
    struct="DispatchArgs",
    axes=(TOP_K, ELEMENT, QUANTISER, EXPERT_COUNTS, ORDERED_SLOTS, ASYNC_RELEASE, PDL),
    count=_num_tokens,
    shape=_dispatch_shape,
    phase=Phase("dispatch", "kPhaseDispatch", "dispatch_cells"),
)
COMBINE: Kernel[CombineSizes] = Kernel(
    name="combine",
    source="exchange/combine.cu",
    struct="CombineArgs",
    axes=(TOP_K, ELEMENT, COMBINE_FORMAT, TMA, ASYNC_RELEASE, PDL),
    count=_num_tokens,
    shape=_combine_shape,
    splits="hidden_splits",
    phase=Phase("combine", "kPhaseCombine", "combine_cells"),
)
SMALL_DISPATCH: Kernel[SmallSizes] = Kernel(
    name="small_dispatch",
    source="exchange/small/dispatch.cu",
    struct="DispatchArgs",
    axes=(TOP_K, ELEMENT, QUANTISER, EXPERT_COUNTS, UNITS, ASYNC_RELEASE, PDL),
    count=_num_tokens,
    shape=small_shape,
    splits="senders",
    phase=DISPATCH.phase,
)
SMALL_COMBINE: Kernel[SmallSizes] = Kernel(
    name="small_combine",
    source="exchange/small/combine.cu",
    struct="CombineArgs",
    axes=(TOP_K, ELEMENT, UNITS, ASYNC_RELEASE, PDL),
    count=_num_tokens,
    shape=small_shape,
    splits="senders",
    phase=COMBINE.phase,
)


def _one(_args: Any) -> int:
    return 1


def _meet_shape(_count: int, num_threads: int, _limits: Limits) -> Shape:
    return Shape(1, num_threads)


#: The barrier of the ranks that go on after another one has died.
MEET: Kernel[int] = Kernel(
    name="meet",
    source="exchange/meet.cu",
    struct="MeetArgs",
    axes=(PDL,),
    count=_one,
    shape=_meet_shape,
)
#: The kernels of one layer.
LAYER = Family("", (DISPATCH, COMBINE, SMALL_DISPATCH, SMALL_COMBINE, MEET))
