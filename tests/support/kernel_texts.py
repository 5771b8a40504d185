"""Texts of the product's kernels, put together as tests and benchmarks want them.

The product compiles each kernel by itself for a GPU, and one host library for each family.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

from moe_nvlink_plugin.exchange.kernels import (
    ASYNC_RELEASE,
    COMBINE,
    COMBINE_FORMAT,
    DISPATCH,
    EXPERT_COUNTS,
    LAYER,
    ORDERED_SLOTS,
    QUANTISER,
    TMA,
    TOP_K,
    UNITS,
)
from moe_nvlink_plugin.jit import source
from moe_nvlink_plugin.launch import kernel
from moe_nvlink_plugin.launch.kernel import ELEMENT, PDL, Axis
from moe_nvlink_plugin.lm_head.kernels import HEAD

LAYER_FILES = tuple(each.source for each in LAYER.kernels)
HEAD_FILES = tuple(each.source for each in HEAD.kernels)
HEAD_KERNELS = tuple(each.name for each in HEAD.kernels)

_INCLUDE = re.compile(r'^#include ".*"\n', re.MULTILINE)


@functools.cache
def conversions() -> str:
    """conversions.cpp as it follows the text of dispatch."""
    path = Path(__file__).with_name("conversions.cpp")
    return _INCLUDE.sub("", path.read_text(encoding="utf-8"))


def host_source() -> str:
    """A host library with all of the product's kernels and with conversions.cpp."""
    return kernel.host_source((LAYER, HEAD)) + conversions()


def host_unit(*files: str, constants: dict[str, str] | None = None) -> str:
    """These kernels on host threads, for a program of the tests' own.

    Args:
        constants: of Config, as `{"int kTopK": "8"}`.
    """
    return source.translation_unit(source.config_text(constants or {}), files, ("host/grid.h",))


def specialised_source(
    top_k: int,
    element: int,
    *,
    pdl: bool = True,
    host: bool = False,
    quantiser: int = 0,
    combine: int = 0,
    expert_counts: int = 0,
    ordered_slots: int = 0,
    units: int = 14,
    tma: int = 0,
    async_release: int = 0,
    small: bool = False,
) -> str:
    """Dispatch and combine in one unit for one top_k and element type: as a GPU gets them, or a
    host library of all kernels with the same values.

    Args:
        quantiser, combine: kQuantiser* of dispatch and kCombine* of combine.
        expert_counts: whether counts per expert travel.
        ordered_slots: whether rows lie in the order of their tokens.
        units: bytes of data of small batches' units.
        tma: whether combine gets rows by TMA.
        async_release: whether signals hold no thread.
        small: all kernels of a layer, those for small batches too, as the host's library has them.
    """
    values: dict[Axis, int] = {TOP_K: top_k, ELEMENT: element, PDL: int(pdl)}
    values |= {QUANTISER: quantiser, COMBINE_FORMAT: combine, EXPERT_COUNTS: expert_counts}
    values |= {ORDERED_SLOTS: ordered_slots, UNITS: units, TMA: tma}
    values |= {ASYNC_RELEASE: async_release}
    if host:
        return kernel.host_source((LAYER, HEAD), values)
    return kernel.gpu_source(LAYER.kernels if small else (DISPATCH, COMBINE), values)


def head_source(element: int, *, pdl: bool = True) -> str:
    """The kernels of the shared LM head in one unit for one element type, as a GPU gets them."""
    return kernel.gpu_source(HEAD.kernels, {ELEMENT: element, PDL: int(pdl)})
