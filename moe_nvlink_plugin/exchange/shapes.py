"""Launch shapes of dispatch and combine.

Dispatch must have its CTAs, or 32 of them, on the GPU together, for some wait while others may not
have started. Combine need not: its CTAs wait for the signals of the peers only, and a rank's own
signal comes from CTAs that run (kernels/README.md).
"""

from __future__ import annotations

from typing import NamedTuple

from moe_nvlink_plugin.launch.shape import (
    FEW_THREADS,
    VECTOR_BYTES,
    Limits,
    Shape,
    ceil_div,
    whole_warps,
)

#: Elements one thread of combine takes of a quantised row at a time (kQuantisedWidth of platform.h
#: on the GPU).
QUANTISED_WIDTH = 8
#: Elements one thread of dispatch quantises at a time (kLaneElements there).
LANE_ELEMENTS = 16
#: Bytes of empty slots that one CTA of dispatch marks before another one is worth launching, and
#: the most CTAs that mark (kMaxFinishers of config.h).
MARKED_BYTES_PER_CTA = 64 * 1024
MOST_MARKING_CTAS = 32


class DispatchSizes(NamedTuple):
    """Of one layer.

    Attributes:
        row_bytes: of the widest payload; with a quantiser, of what its threads load at a time.
        empty_bytes: of expert ids that may have to be marked as empty.
    """

    row_bytes: int
    empty_bytes: int


class CombineSizes(NamedTuple):
    """Of one layer: see combine_shape."""

    hidden_size: int
    element_bytes: int
    slots: int


def quantising_lanes(hidden_size: int) -> int:
    """Threads that can quantise a row at once: one for 16 elements (kLaneElements of platform.h on
    the GPU), or for one where rows are no multiple of that.
    """
    return hidden_size if hidden_size % LANE_ELEMENTS else hidden_size // LANE_ELEMENTS


def dispatch_shape(num_tokens: int, row_bytes: int, empty_bytes: int, limits: Limits) -> Shape:
    """Dispatch: one token per CTA at a time.

    Args:
        num_tokens: of this call on this rank.
        row_bytes: of the widest payload.
        empty_bytes: of expert ids that may have to be marked as empty.
        limits: of the kernel on this GPU.
    """
    threads = min(FEW_THREADS, limits.max_threads)
    if num_tokens <= limits.num_sms or limits.blocks_per_sm(threads) == 1:
        # A CTA has its SM to itself: as many threads as the row has vectors, so that all of it is
        # in flight at once.
        threads = whole_warps(ceil_div(row_bytes, VECTOR_BYTES), limits.max_threads)
    marking = min(ceil_div(empty_bytes, MARKED_BYTES_PER_CTA), MOST_MARKING_CTAS)
    blocks = max(num_tokens, marking, 1)
    return Shape(min(blocks, max(limits.resident(threads), 1)), threads)


def combine_shape(
    num_tokens: int, hidden_size: int, element_bytes: int, limits: Limits, slots: int = 0
) -> Shape:
    """Combine: the row of a token is split over CTAs as long as they all fit at once.

    With few tokens every thread then has one vector of each of the top_k rows to load, all in
    flight together, and the call costs one trip to the peers instead of one per vector. With many
    tokens a CTA takes whole rows, and the CTAs an SM holds hide each other's trips.

    Args:
        num_tokens: of this call on this rank.
        hidden_size: elements of a row.
        element_bytes: of an unquantised one.
        limits: of the kernel on this GPU.
        slots: with a format, the rows this rank may have received and then quantises; 0 without
            one. How many it has received only the GPU knows, and a rank without tokens may have
            the most. So there is a CTA for each slot as far as they fit.
    """
    vectors = ceil_div(hidden_size * element_bytes, VECTOR_BYTES)
    if slots:
        vectors = ceil_div(hidden_size, QUANTISED_WIDTH)
    most = min(FEW_THREADS, limits.max_threads)
    parts = ceil_div(vectors, most)
    # Even parts: 896 vectors are four times 224, not three times 256 and a CTA half idle.
    threads = whole_warps(ceil_div(vectors, parts), most)
    resident = max(limits.resident(threads), 1)
    splits = max(min(parts, resident // max(num_tokens, 1)), 1)
    return Shape(min(max(num_tokens * splits, slots, 1), resident), threads, splits)
