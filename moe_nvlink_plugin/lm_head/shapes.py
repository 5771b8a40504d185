"""Launch shapes of the kernels of a shared LM head."""

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

#: Bytes of a row of logits that a CTA of its own is worth: a few vectors each thread, an estimate.
LOGITS_BYTES_PER_CTA = 16 * 1024
#: CTAs that share one row of logits at most (kMaxHeadSplits of config.h).
MOST_HEAD_SPLITS = 8


class RowSizes(NamedTuple):
    """Of one group.

    Attributes:
        row_bytes: that one CTA moves at a time.
        tp_size: ranks.
    """

    row_bytes: int
    tp_size: int


def head_rows_shape(num_rows: int, row_bytes: int, tp_size: int, limits: Limits) -> Shape:
    """Gather and collect of a shared LM head: a CTA moves one row for, or from, one rank at a time.

    No CTA waits for another of its grid, so what is resident limits only what is worth launching.

    Args:
        num_rows: of this call on this rank.
        row_bytes: that one CTA moves at a time.
        tp_size: ranks.
        limits: of the kernel on this GPU.
    """
    threads = whole_warps(ceil_div(row_bytes, VECTOR_BYTES), limits.max_threads)
    return Shape(max(min(num_rows * tp_size, limits.resident(threads)), 1), threads)


def head_argmax_shape(num_rows: int, row_bytes: int, limits: Limits) -> Shape:
    """Argmax of a shared LM head: one row per CTA, or a part of it where rows are few.

    Args:
        num_rows: that all ranks together may have brought.
        row_bytes: logits of one row on this rank.
        limits: of the kernel on this GPU.
    """
    threads = whole_warps(ceil_div(row_bytes, VECTOR_BYTES), min(FEW_THREADS, limits.max_threads))
    resident = max(limits.resident(threads), 1)
    worth = min(ceil_div(row_bytes, LOGITS_BYTES_PER_CTA), MOST_HEAD_SPLITS)
    rows = max(num_rows, 1)
    splits = max(min(worth, resident // rows), 1)
    return Shape(min(rows * splits, resident), threads, splits)
