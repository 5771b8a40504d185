"""Dispatch and combine of mixture-of-experts layers over symmetric memory.

A token passes these folders, in this order:

    integration/   the porch: one adapter per framework, which uses the public names below
                   (and integration/vllm/scheduler/, which no token passes: whom vLLM admits)
    exchange/      MoeAllToAll: create, dispatch, combine (all_to_all.py); a call of a verb as a
                   value (calls.py); torch.ops.moe_nvlink.* (ops.py, inductor.py); verbs that run
                   beside their caller (in_flight.py); one layer on one workspace (layer.py,
                   checks.py), its views on one channel (channel.py), and its kernels (kernels.py):
                   two, two for small batches, and one by which ranks meet after a death; masks of
                   ranks (rank_masks.py); how ranks go on then (survivors.py), or with newcomers
                   (elastic.py); what ranks agree on first (agreement.py)
    launch/        says what a kernel is (Kernel, kernel.py), and starts one: on CPU threads
                   (cpu.py) or on a CUDA stream (cuda.py)
    kernels/       dispatch puts: it routes, stores rows to the peers, signals, waits
                   combine gets: it waits, loads the partial rows, adds, stores; for
                   small batches the experts' ranks put them

A shared LM head takes the same path from lm_head/: HeadGroup, sharded_argmax and sharded_logits
(group.py), its three kernels (kernels.py), and the rule that estimates when sharing pays (cost.py).
A new kernel is one .cu file, one argument struct in args.h, one Kernel, and its caller.

Six folders serve them. memory/ says what lies where in symmetric memory and what a kernel reports
there. transport/ says how peers reach that memory. jit/ makes machine code from kernels/ and keeps
it. recipes/ say what travels, there and back. plugins/ find recipes and transports, and try whether
a transport connects ranks. verify/ holds rounds to the reference: self_check, and what `moe-nvlink
verify` runs and times; and searches for what `moe-nvlink tune` writes. tools/ serves the shell: the
command `moe-nvlink` with its doctor, verify, tune, precompile, top
and watch.

The doorway, which every module may use: config.py (AllToAllConfig), choices.py (what launches
choose, in one table), errors.py, env.py, version.py, frameworks.py (what adapters tell our tools),
groups.py (the collective steps of create), driver.py (calls of the CUDA driver), reference.py (the
same verbs in plain torch) and testing.py.

Knowledge goes one way: doorway <- recipes, transport, jit <- memory, plugins <- launch <- exchange,
lm_head <- verify <- integration/common <- integration/vllm. A test reads these arrows off the
source.

`import moe_nvlink_plugin` is cheap and needs no torch: Python imports each name below when it is
first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import AllToAllConfig, local_expert_range
    from .exchange.all_to_all import MoeAllToAll
    from .exchange.calls import Dispatched, DispatchMetadata
    from .exchange.in_flight import InFlight
    from .exchange.rank_masks import rank_mask
    from .groups import StoreGroup
    from .lm_head.config import HeadConfig
    from .lm_head.group import HeadGroup, HeadStats, sharded_argmax, sharded_logits
    from .memory.workspace import ExchangeStats
    from .plugins.registry import check_connected
    from .recipes import QuantisingRecipe
    from .verify.self_check import self_check

_HOMES = {
    "AllToAllConfig": "config",
    "DispatchMetadata": "exchange.calls",
    "Dispatched": "exchange.calls",
    "ExchangeStats": "memory.workspace",
    "HeadConfig": "lm_head.config",
    "HeadGroup": "lm_head.group",
    "HeadStats": "lm_head.group",
    "InFlight": "exchange.in_flight",
    "MoeAllToAll": "exchange.all_to_all",
    "QuantisingRecipe": "recipes",
    "StoreGroup": "groups",
    "check_connected": "plugins.registry",
    "local_expert_range": "config",
    "rank_mask": "exchange.rank_masks",
    "self_check": "verify.self_check",
    "sharded_argmax": "lm_head.group",
    "sharded_logits": "lm_head.group",
}

__all__ = [
    "AllToAllConfig",
    "DispatchMetadata",
    "Dispatched",
    "ExchangeStats",
    "HeadConfig",
    "HeadGroup",
    "HeadStats",
    "InFlight",
    "MoeAllToAll",
    "QuantisingRecipe",
    "StoreGroup",
    "check_connected",
    "local_expert_range",
    "rank_mask",
    "self_check",
    "sharded_argmax",
    "sharded_logits",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
