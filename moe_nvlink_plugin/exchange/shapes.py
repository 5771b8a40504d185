"""Launch shapes of dispatch and combine.

The GPU must hold all CTAs of a dispatch, or 32 of them, at the same time, because some CTAs wait
while others may not have started. Combine has no such condition: its CTAs wait only for signals of
the ranks, and a rank's own signal comes from CTAs that run (kernels/README.md).
"""

from __future__ import annotations

from typing import NamedTuple

from moe_nvlink_plugin.choices import TODAY, Choices
from moe_nvlink_plugin.launch.shape import (
    VECTOR_BYTES,
    WARP,
    Limits,
    Shape,
    ceil_div,
    whole_warps,
)

#: Elements of a quantised row that one thread of combine takes at a time (kQuantisedWidth of
#: add_rows.h on the GPU).
QUANTISED_WIDTH = 8
#: Items whose rows may be on their way to a CTA (kMostStages of combine_shared.h).
MOST_STAGES = 16
#: Elements that one thread of dispatch quantises at a time (kLaneElements of platform_gpu.h).
LANE_ELEMENTS = 16


class DispatchSizes(NamedTuple):
    """Sizes of one layer on which the launch shape of dispatch depends.

    Attributes:
        row_bytes: bytes of the widest payload's row; with a quantiser, 16 bytes for each thread
            that can quantise at once.
        tail_bytes: bytes that dispatch writes at its end: the expert ids in all slots, which it may
            have to mark as empty; the weights, if it writes zeros there; and
            Choices.laid_out_weight times the scales, if it lays them out.
        choices: of the layer.
    """

    row_bytes: int
    tail_bytes: int
    choices: Choices = TODAY


class CombineSizes(NamedTuple):
    """Sizes of one layer on which the launch shape of combine depends: see combine_shape.

    Attributes:
        staged_rows: rows of a token that come to shared memory by TMA, which is top_k; 0: they come
            to registers.
    """

    hidden_size: int
    element_bytes: int
    slots: int
    choices: Choices = TODAY
    staged_rows: int = 0


class SmallSizes(NamedTuple):
    """Sizes of one layer on which the launch shapes of small batches depend.

    Attributes:
        send_parts: parts of a sent row that CTAs share.
        receive_parts: parts of a received row, or of a token's sum, that CTAs share.
        sent_rows: rows that a rank sends for each of its tokens, as the kernel counts its items: 1
            in dispatch, where a CTA puts a row to all its targets.
        received_rows: rows that a rank receives for each token that it sends, if the router is
            balanced; 1 in combine, where a CTA adds the rows of a token.
        sent_cost: time that a CTA needs for a sent part, in any unit.
        received_cost: time that a CTA needs for a received part, in the same unit.
        fixed_parts: whether a receiver takes the same part of all its rows, so that as many
            receivers should take each part.
        choices: of the layer.
    """

    send_parts: int
    receive_parts: int
    sent_rows: int = 1
    received_rows: int = 1
    sent_cost: float = 1.0
    received_cost: float = 1.0
    fixed_parts: bool = False
    choices: Choices = TODAY


def small_shape(num_tokens: int, sizes: SmallSizes, limits: Limits) -> Shape:
    """Return the launch shape of a kernel for small batches; `splits` is the number of senders.

    Each part of a row gets a CTA while they fit. A rank without tokens receives all the same, so
    both roles have a CTA at least. If not all parts fit, each role gets CTAs as its parts take
    time.
    """
    threads = min(sizes.choices.small_threads, limits.max_threads)
    most = limits.resident(threads)
    if most < 2:
        return Shape(1, threads, 1)  # one CTA has both roles
    tokens = max(num_tokens, 1)
    sending = tokens * sizes.sent_rows * sizes.send_parts
    # One more, for the CTA that signals the peers before it receives.
    receiving = tokens * sizes.received_rows * sizes.receive_parts + 1
    if sending + receiving > most:
        sent, received = sending * sizes.sent_cost, receiving * sizes.received_cost
        senders = min(sending, max(round(most * sent / (sent + received)), 1), most - 1)
        receiving = min(receiving, most - senders)
        if sizes.fixed_parts and receiving > sizes.receive_parts:
            receiving -= receiving % sizes.receive_parts
        sending = min(sending, most - receiving)
    return Shape(sending + receiving, threads, sending)


def quantising_lanes(hidden_size: int) -> int:
    """Return how many threads can quantise a row at once.

    A thread takes 16 elements (kLaneElements of platform_gpu.h). If hidden_size is no multiple of
    16, a thread takes one element.
    """
    return hidden_size if hidden_size % LANE_ELEMENTS else hidden_size // LANE_ELEMENTS


def dispatch_shape(
    num_tokens: int, row_bytes: int, tail_bytes: int, limits: Limits, choices: Choices = TODAY
) -> Shape:
    """Return the launch shape of dispatch, in which a CTA takes one token at a time.

    Args:
        num_tokens: tokens of this call on this rank.
        row_bytes: as in DispatchSizes.
        tail_bytes: as in DispatchSizes.
        limits: limits of the kernel on this GPU.
        choices: of the layer.
    """
    threads = min(choices.dispatch_threads, limits.max_threads)
    wide = choices.wide_ctas_per_sm * limits.num_sms
    if num_tokens <= wide or limits.blocks_per_sm(threads) == 1:
        # Each CTA has an SM alone, or nearly. It gets one thread for each vector of the row, so the
        # whole row is in flight at once.
        threads = whole_warps(ceil_div(row_bytes, VECTOR_BYTES), limits.max_threads)
    marking = min(ceil_div(tail_bytes, choices.marked_bytes_per_cta), choices.marking_ctas)
    blocks = max(num_tokens, marking, 1)
    return Shape(min(blocks, max(limits.resident(threads), 1)), threads)


def combine_shape(
    num_tokens: int,
    hidden_size: int,
    element_bytes: int,
    limits: Limits,
    slots: int = 0,
    choices: Choices = TODAY,
) -> Shape:
    """Return the launch shape of combine, which splits a row over CTAs while all of them fit.

    With few tokens, each thread then loads one vector of each of the top_k rows. All these loads
    are in flight together, so the call costs one trip to the peers instead of one per vector. With
    many tokens, a CTA takes whole rows. Then an SM holds several CTAs, and one computes while
    others wait for peers. With very many, Choices.full_link_sms bounds the grid.

    Args:
        num_tokens: tokens of this call on this rank.
        hidden_size: elements of a row.
        element_bytes: bytes of an unquantised element.
        limits: limits of the kernel on this GPU.
        slots: with a format, the rows that this rank can receive and then quantises; 0 without a
            format. Only the GPU knows how many rows the rank has received, and a rank without
            tokens may have received the most. So each slot gets a CTA while they fit.
        choices: of the layer.
    """
    vectors = ceil_div(hidden_size * element_bytes, VECTOR_BYTES)
    if slots:
        vectors = ceil_div(hidden_size, QUANTISED_WIDTH)
    most = min(choices.combine_threads, limits.max_threads)
    parts = ceil_div(vectors, most)
    # Even parts: 896 vectors make four parts of 224, not three of 256 and one of 128.
    threads = whole_warps(ceil_div(vectors, parts), most)
    resident = max(limits.resident(threads), 1)
    splits = max(min(parts, choices.most_splits or parts, resident // max(num_tokens, 1)), 1)
    pulling = min(limits.num_sms, choices.full_link_sms) * limits.blocks_per_sm(threads)
    if not slots and num_tokens >= choices.many_tokens_per_cta * pulling > 0:
        resident = pulling
    return Shape(min(max(num_tokens * splits, slots, 1), resident), threads, splits)


def tma_combine_shape(num_tokens: int, sizes: CombineSizes, limits: Limits) -> Shape:
    """Return the launch shape of a combine that gets rows by TMA: a CTA on each SM.

    Each item is a part of a token's row with a vector for each thread. A CTA has as many stages for
    items as its SM has shared memory for, and no more than it has items.
    """
    vectors = ceil_div(sizes.hidden_size * sizes.element_bytes, VECTOR_BYTES)
    most = min(sizes.choices.combine_threads, limits.max_threads)
    stage_bytes = sizes.staged_rows * VECTOR_BYTES
    # At least two stages, or nothing would be on its way while a CTA adds.
    most = min(most, max(limits.shared_bytes // (2 * stage_bytes), WARP))
    threads = whole_warps(ceil_div(vectors, ceil_div(vectors, most)), most)
    splits = ceil_div(vectors, threads)
    items = max(num_tokens, 1) * splits
    blocks = min(items, max(limits.num_sms, 1))
    stages = min(
        limits.shared_bytes // (stage_bytes * threads), ceil_div(items, blocks), MOST_STAGES
    )
    return Shape(blocks, threads, splits, stages * stage_bytes * threads)
