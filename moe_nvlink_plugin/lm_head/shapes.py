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

#: Bytes of a row's logits for which one more CTA is worth launching: a few vectors per thread. An
#: estimate.
LOGITS_BYTES_PER_CTA = 16 * 1024
#: Most CTAs that share one row of logits (kMaxHeadSplits of config.h).
MOST_HEAD_SPLITS = 8


class RowSizes(NamedTuple):
    """Sizes of one group on which the launch shapes of gather and collect depend.

    Attributes:
        row_bytes: bytes that one CTA moves at a time.
        tp_size: ranks of the group.
    """

    row_bytes: int
    tp_size: int


def head_rows_shape(num_rows: int, row_bytes: int, tp_size: int, limits: Limits) -> Shape:
    """Return the launch shape of gather and collect: a CTA moves one row to or from one rank.

    No CTA waits for another CTA of its grid. So a grid need not fit on the GPU at once; a larger
    one is only not worth launching.

    Args:
        num_rows: rows of this call on this rank.
        row_bytes: bytes that one CTA moves at a time.
        tp_size: ranks of the group.
        limits: limits of the kernel on this GPU.
    """
    threads = whole_warps(ceil_div(row_bytes, VECTOR_BYTES), limits.max_threads)
    return Shape(max(min(num_rows * tp_size, limits.resident(threads)), 1), threads)


def head_argmax_shape(num_rows: int, row_bytes: int, limits: Limits) -> Shape:
    """Return the launch shape of argmax: a CTA takes one row, or a part of it if rows are few.

    Args:
        num_rows: most rows of all ranks together.
        row_bytes: bytes of one row's logits on this rank.
        limits: limits of the kernel on this GPU.
    """
    threads = whole_warps(ceil_div(row_bytes, VECTOR_BYTES), min(FEW_THREADS, limits.max_threads))
    resident = max(limits.resident(threads), 1)
    worth = min(ceil_div(row_bytes, LOGITS_BYTES_PER_CTA), MOST_HEAD_SPLITS)
    rows = max(num_rows, 1)
    splits = max(min(worth, resident // rows), 1)
    return Shape(min(rows * splits, resident), threads, splits)
