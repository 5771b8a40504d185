"""Dispatch and combine of mixture-of-experts layers over symmetric memory.

The path of a token, in order, and where it is written:

    integration/          the porch: vLLM's hooks, in terms of the public names below
    all_to_all.py         MoeAllToAll: create, dispatch, combine
    ops.py                torch.ops.moe_nvlink.*, with their fakes (inductor.py: compiled by it)
    exchange.py           one layer on one workspace: checks.py, the order of calls
    channel.py            its views and arguments.py on one channel
    executors/            the launch: on CPU threads (host.py) or a CUDA stream (cuda.py, shape.py)
    kernels/dispatch.cu   put: route, store rows to the peers, signal, wait
    kernels/combine.cu    get: wait, load the partial rows, add, store

An LM head that ranks share goes the same way: lm_head.py (HeadGroup, sharded_argmax and
sharded_logits), head_ops.py, head_exchange.py, kernels/lm_head.cu. head_config.py has its geometry,
head_cost.py the rule of when it pays.

Under it: workspace.py places a layout.py in the symmetric memory of a transport/ (host.py: POSIX
shared memory; nvlink.py: CUDA virtual memory), jit/ makes machine code of kernels/ (g++ or NVRTC)
and keeps it in a cache, driver.py calls the CUDA driver.

Beside the path: config.py (AllToAllConfig), recipes/ (what travels), combine_formats.py (what
travels back), plugins.py with hookspecs.py and builtin_plugins.py (how recipes and transports are
found), faults.py (what a kernel reports, as an error), startup.py (how long ranks wait for one
another), groups.py (collective steps of create), errors.py, env.py, reference.py (the same verbs in
plain torch, for the tests), and for a shell cli.py with doctor/ (what works on this machine) and
precompile.py (fills the kernel cache).

Knowledge goes one way: errors, env, driver <- config, head_config, groups <- recipes, transport <-
combine_formats <- layout, hookspecs <- plugins, jit <- arguments <- executors <- workspace <-
faults <- channel <- exchange (and checks) <- ops <- all_to_all <- integration. A test reads these
arrows off the source.

`import moe_nvlink_plugin` is cheap, also where torch is missing: the names below are fetched when
they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import AllToAllConfig
    from .exchange.all_to_all import Dispatched, DispatchMetadata, MoeAllToAll
    from .lm_head.config import HeadConfig
    from .lm_head.group import HeadGroup, HeadStats, sharded_argmax, sharded_logits
    from .memory.workspace import ExchangeStats
    from .recipes import QuantisingRecipe

_HOMES = {
    "AllToAllConfig": "config",
    "DispatchMetadata": "all_to_all",
    "Dispatched": "all_to_all",
    "ExchangeStats": "workspace",
    "HeadConfig": "head_config",
    "HeadGroup": "lm_head",
    "HeadStats": "lm_head",
    "MoeAllToAll": "all_to_all",
    "QuantisingRecipe": "recipes",
    "sharded_argmax": "lm_head",
    "sharded_logits": "lm_head",
}

__all__ = [
    "AllToAllConfig",
    "DispatchMetadata",
    "Dispatched",
    "ExchangeStats",
    "HeadConfig",
    "HeadGroup",
    "HeadStats",
    "MoeAllToAll",
    "QuantisingRecipe",
    "sharded_argmax",
    "sharded_logits",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
