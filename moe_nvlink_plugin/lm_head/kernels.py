"""The kernels of a shared LM head: the axes of their builds, and their launch shapes.

This module imports no torch, because every compiling process of `moe-nvlink precompile` would pay
for it.
"""

from __future__ import annotations

from typing import Any

from moe_nvlink_plugin.launch.kernel import ELEMENT, PDL, Family, Kernel
from moe_nvlink_plugin.launch.shape import Limits, Shape
from moe_nvlink_plugin.memory.phases import Phase

from .shapes import RowSizes, head_argmax_shape, head_rows_shape


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
