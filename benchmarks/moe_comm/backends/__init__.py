"""Who moves the rows: one module for each way, found by name."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from benchmarks.moe_comm.options import Options

from .base import Context, Side, WrongResult

#: Module and class of every name in options.BACKENDS; fetched when first used, because some import
#: what a machine may lack.
_HOMES = {
    "moe_nvlink": ("ours", "Ours"),
    "gloo_gather": ("gloo_gather", "GlooGather"),
    "gloo_gather_full": ("gloo_gather", "GlooGatherFull"),
    "all_to_all": ("all_to_all", "AllToAll"),
    "all_to_all_full": ("all_to_all", "AllToAllFull"),
    "nccl_gather": ("nccl_gather", "NcclGather"),
    "flashinfer": ("flashinfer", "FlashInfer"),
}


def _home(name: str) -> Any:
    module, member = _HOMES[name]
    return getattr(importlib.import_module(f"{__name__}.{module}"), member)


def _maker(name: str) -> Callable[[Context], Side]:
    def make(context: Context) -> Side:
        side: Side = _home(name)(context)
        return side

    return make


BACKENDS: dict[str, Callable[[Context], Side]] = {name: _maker(name) for name in _HOMES}


def unavailable(name: str, options: Options) -> str | None:
    """Why a backend cannot run with these options on this machine, or None. Local."""
    try:
        reason: str | None = _home(name).unavailable(options)
    except ImportError as error:
        return f"not importable: {error}"
    return reason


__all__ = ["BACKENDS", "Context", "Side", "WrongResult", "unavailable"]
