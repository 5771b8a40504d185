"""vLLM's schedulers with one more rule: a request that has started is never evicted.

Chosen by vLLM's own flag, with or without our exchange::

    vllm serve MODEL \\
        --scheduler-cls moe_nvlink_plugin.integration.vllm.scheduler.GuaranteedNoEvictScheduler

* ``no_evict``: the two classes; a gate in front of vLLM's allocation of KV blocks.
* ``demand``: how many blocks a request may still take, KV cache group by KV cache group.
* ``ledger``: the sum of that over all requests that hold blocks.
* ``capacity``: the options, ``additional_config["moe_nvlink"]["capacity"]``.
"""

from .no_evict import AsyncGuaranteedNoEvictScheduler, GuaranteedNoEvictScheduler

__all__ = ["AsyncGuaranteedNoEvictScheduler", "GuaranteedNoEvictScheduler"]
