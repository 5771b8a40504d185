"""vLLM's schedulers with one more rule: a request that has started is never evicted.

Chosen by vLLM's own flag, with or without our exchange::

    vllm serve MODEL \\
        --scheduler-cls moe_nvlink_plugin.integration.vllm.scheduler.GuaranteedNoEvictScheduler

* ``no_evict``: the two classes; a gate in front of vLLM's allocation of KV blocks.
* ``demand``: how many blocks a request may still take, KV cache group by KV cache group.
* ``ledger``: the sum of that over all requests that hold blocks.
* ``capacity``: the options, ``additional_config["moe_nvlink"]["capacity"]``, and checks.
* ``reports``: what /metrics shows. Neither of the two imports anything of vLLM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .no_evict import AsyncGuaranteedNoEvictScheduler, GuaranteedNoEvictScheduler

__all__ = ["AsyncGuaranteedNoEvictScheduler", "GuaranteedNoEvictScheduler"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from moe_nvlink_plugin.integration.vllm import compat

    compat.check_scheduler_names()  # the import below would name one missing name only
    from . import no_evict

    return getattr(no_evict, name)
