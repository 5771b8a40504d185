"""The kernels of a shared LM head: the axes of their builds, and their launch shapes.

This module imports no torch, because every compiling process of `moe-nvlink precompile` would pay
for it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from moe_nvlink_plugin.choices import TODAY
from moe_nvlink_plugin.launch.kernel import ELEMENT, PDL, Family, Kernel
from moe_nvlink_plugin.launch.shape import VECTOR_BYTES, Limits, Shape, ceil_div, whole_warps
from moe_nvlink_plugin.memory.phases import Phase

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
    most = min(TODAY.head_threads, limits.max_threads)
    threads = whole_warps(ceil_div(row_bytes, VECTOR_BYTES), most)
    resident = max(limits.resident(threads), 1)
    worth = min(ceil_div(row_bytes, TODAY.logits_bytes_per_cta), MOST_HEAD_SPLITS)
    rows = max(num_rows, 1)
    splits = max(min(worth, resident // rows), 1)
    return Shape(min(rows * splits, resident), threads, splits)


def _num_rows(args: Any) -> int:
    return int(args.geometry.num_rows)


def _most_rows(args: Any) -> int:
    """Return the most rows of all ranks together; only the GPU knows their number."""
    return int(args.geometry.row_bound * args.geometry.tp_size)


def _rows_shape(num_rows: int, sizes: RowSizes, limits: Limits) -> Shape:
    return head_rows_shape(num_rows, sizes.row_bytes, sizes.tp_size, limits)


GATHER: Kernel[RowSizes] = Kernel(
    name="head_gather",
    source="lm_head/gather.cu",
    struct="HeadArgs",
    axes=(ELEMENT, PDL),
    count=_num_rows,
    shape=_rows_shape,
    phase=Phase("head gather", "kPhaseHeadGather", "dispatch_cells"),
)
#: Its launch shape depends on the bytes of one row's logits on this rank.
ARGMAX: Kernel[int] = Kernel(
    name="head_argmax",
    source="lm_head/argmax.cu",
    struct="HeadArgs",
    axes=(ELEMENT, PDL),
    count=_most_rows,
    shape=head_argmax_shape,
    splits="row_splits",
    phase=Phase("head argmax", "kPhaseHeadArgmax", "combine_cells"),
)
COLLECT: Kernel[RowSizes] = Kernel(
    name="head_collect",
    source="lm_head/collect.cu",
    struct="HeadArgs",
    axes=(ELEMENT, PDL),
    count=_num_rows,
    shape=_rows_shape,
)
HEAD = Family("lm_head", (GATHER, ARGMAX, COLLECT))
