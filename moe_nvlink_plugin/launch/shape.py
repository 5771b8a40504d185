"""Launch geometry of the kernels on a GPU: CTAs, threads, and how many CTAs share a token's row.

Plain arithmetic on counts, so that it can be tested without a GPU. The rules come from how the
kernels hide latency (kernels/README.md); their constants are estimates until they have
been measured on a GPU.

A grid never exceeds what a GPU without other work holds at once: a CTA that starts late only makes
the round longer. Dispatch must have its CTAs, or 32 of them, on the GPU together, for some wait
while others may not have started. Combine need not: its CTAs wait for the peers' signals only, and
a rank's own signal comes from CTAs that run (kernels/README.md).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

from moe_nvlink_plugin.errors import ConfigError

#: Bytes one thread moves at a time (kVectorBytes of platform.h on the GPU).
VECTOR_BYTES = 16
#: Elements one thread of combine takes of a quantised row at a time (kQuantisedWidth there).
QUANTISED_WIDTH = 8
LANE_ELEMENTS = 16
WARP = 32
#: Threads of a CTA when there are tokens enough to fill the GPU: several CTAs then share an SM, and
#: one's barriers hide behind another's copies.
FEW_THREADS = 256
MOST_THREADS = 1024
#: Bytes of a row of logits that a CTA of its own is worth: a few vectors each thread, an estimate.
LOGITS_BYTES_PER_CTA = 16 * 1024
#: CTAs that share one row of logits at most (kMaxHeadSplits of config.h).
MOST_HEAD_SPLITS = 8
#: Bytes of empty slots that one CTA of dispatch marks before another one is worth launching, and
#: the most CTAs that mark (kMaxFinishers of config.h).
MARKED_BYTES_PER_CTA = 64 * 1024
MOST_MARKING_CTAS = 32


def share(num_sms: int, num_channels: int, num_ranks: int = 1) -> int:
    """SMs that a kernel may take if each channel of each rank may have one on a GPU at once.

    Two streams may bring the channels to two ranks in different order. If one channel's combine
    filled a GPU, the other channel's would wait for a place there, while the peer's combine of that
    channel fills the peer's GPU and waits for this rank's, and the other way round. Ranks that
    share a GPU keep each other out in the same way, in any order.

    Args:
        num_sms: of the GPU.
        num_channels: of the exchange.
        num_ranks: ranks of the group on the GPU.

    Raises:
        ConfigError: not every kernel gets an SM.
    """
    if num_channels * num_ranks > num_sms:
        raise ConfigError(
            f"{num_ranks} rank(s) of the group on one GPU, {num_channels} channel(s) each: their "
            "kernels wait there at the same time and need an SM each, "
            f"{num_channels * num_ranks} together, and the GPU has {num_sms}; lower num_channels, "
            "or put fewer ranks on a GPU"
        )
    return num_sms // (num_channels * num_ranks)


class Shape(NamedTuple):
    """One launch: CTAs, threads each, and (combine, the head's argmax) CTAs that share a row."""

    blocks: int
    threads: int
    hidden_splits: int = 1


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a kernel may use of a GPU.

    Attributes:
        num_sms: SMs it may fill: the GPU's, or fewer by configuration.
        max_threads: threads of a CTA that its registers allow.
        blocks_per_sm: CTAs of so many threads that one SM holds at once; 0 where none fits.
    """

    num_sms: int
    max_threads: int
    blocks_per_sm: Callable[[int], int]

    def resident(self, threads: int) -> int:
        """CTAs of so many threads that run at the same time."""
        return self.num_sms * self.blocks_per_sm(threads)

    def beside_others(self, num_sms: int) -> Limits:
        """These limits if every kernel that waits beside this one has such limits too.

        One CTA an SM, because more would promise a place that may not exist. If each of two kernels
        took half of what all SMs hold, 2 CTAs of 224 threads could wait on every SM, and the
        other's CTA of 896 threads would fit on none. But if all CTAs together are no more than
        there are SMs, a CTA that has no place yet always finds an SM without any of them.

        Args:
            num_sms: of `share`.
        """
        return dataclasses.replace(
            self,
            num_sms=min(self.num_sms, num_sms),
            blocks_per_sm=lambda threads: min(self.blocks_per_sm(threads), 1),
        )


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
        threads = _whole_warps(_ceil_div(row_bytes, VECTOR_BYTES), limits.max_threads)
    marking = min(_ceil_div(empty_bytes, MARKED_BYTES_PER_CTA), MOST_MARKING_CTAS)
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
    vectors = _ceil_div(hidden_size * element_bytes, VECTOR_BYTES)
    if slots:
        vectors = _ceil_div(hidden_size, QUANTISED_WIDTH)
    most = min(FEW_THREADS, limits.max_threads)
    parts = _ceil_div(vectors, most)
    # Even parts: 896 vectors are four times 224, not three times 256 and a CTA half idle.
    threads = _whole_warps(_ceil_div(vectors, parts), most)
    resident = max(limits.resident(threads), 1)
    splits = max(min(parts, resident // max(num_tokens, 1)), 1)
    return Shape(min(max(num_tokens * splits, slots, 1), resident), threads, splits)


def head_rows_shape(num_rows: int, row_bytes: int, tp_size: int, limits: Limits) -> Shape:
    """Gather and collect of a shared LM head: a CTA moves one row for, or from, one rank at a time.

    No CTA waits for another of its grid, so what is resident limits only what is worth launching.

    Args:
        num_rows: of this call on this rank.
        row_bytes: that one CTA moves at a time.
        tp_size: ranks.
        limits: of the kernel on this GPU.
    """
    threads = _whole_warps(_ceil_div(row_bytes, VECTOR_BYTES), limits.max_threads)
    return Shape(max(min(num_rows * tp_size, limits.resident(threads)), 1), threads)


def head_argmax_shape(num_rows: int, row_bytes: int, limits: Limits) -> Shape:
    """Argmax of a shared LM head: one row per CTA, or a part of it where rows are few.

    Args:
        num_rows: that all ranks together may have brought.
        row_bytes: logits of one row on this rank.
        limits: of the kernel on this GPU.
    """
    threads = _whole_warps(_ceil_div(row_bytes, VECTOR_BYTES), min(FEW_THREADS, limits.max_threads))
    resident = max(limits.resident(threads), 1)
    worth = min(_ceil_div(row_bytes, LOGITS_BYTES_PER_CTA), MOST_HEAD_SPLITS)
    rows = max(num_rows, 1)
    splits = max(min(worth, resident // rows), 1)
    return Shape(min(rows * splits, resident), threads, splits)


def _whole_warps(threads: int, most: int) -> int:
    return max(min(_ceil_div(threads, WARP) * WARP, most // WARP * WARP, MOST_THREADS), WARP)


def _ceil_div(count: int, size: int) -> int:
    return -(-count // size)
