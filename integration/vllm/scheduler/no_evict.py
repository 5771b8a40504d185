"""The two classes: vLLM's schedulers with a gate in front of the allocation of KV blocks.

vLLM admits a request as soon as its prompt fits, and evicts the youngest request when blocks run
out: that one starts again later. With the gate a request is admitted only if the blocks that it may
take until its end fit into the free blocks, beside what all admitted requests may still take. The
order stays vLLM's: if the gate says no, vLLM tries no later request in this step.
"""

from __future__ import annotations

import inspect
from typing import Any, cast

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from moe_nvlink_plugin.errors import ConfigError

from .demand import Hits, groups_of
from .ledger import Ledger


class GuaranteedNoEvictScheduler(Scheduler):
    """vLLM's scheduler, which never evicts.

    If vLLM schedules asynchronously, the constructor returns the asynchronous twin. So users name
    this class in either case.
    """

    def __new__(cls, vllm_config: Any, *args: Any, **kwargs: Any) -> GuaranteedNoEvictScheduler:
        """Return an instance of the twin that fits vLLM's choice of asynchronous scheduling."""
        is_async = vllm_config.scheduler_config.async_scheduling
        if is_async and not issubclass(cls, AsyncScheduler):
            cls = AsyncGuaranteedNoEvictScheduler
        return cast(GuaranteedNoEvictScheduler, object.__new__(cls))

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        num_ahead = vllm_config.max_concurrent_batches - 1 if self._is_async() else 0
        # Slots beyond the last token but one: drafts of the step and of those in flight, and what
        # a draft model writes ahead.
        self._overshoot = (
            max(num_ahead - 1, 0)
            + (num_ahead + 1) * self.num_spec_tokens
            + self.num_lookahead_tokens
        )
        manager = self.kv_cache_manager
        groups = groups_of(manager, self.num_lookahead_tokens, vllm_config.max_concurrent_batches)
        self._ledger = Ledger(groups, self._end_of)
        self._allocate = manager.allocate_slots
        self._how_to_allocate = inspect.signature(manager.allocate_slots)
        manager.allocate_slots = self._allocate_if_reserved

    def _is_async(self) -> bool:
        return isinstance(self, AsyncScheduler)

    def _end_of(self, request: Any) -> int:
        """Return the number of tokens of which a request's KV cache may have to hold slots."""
        if request.resumable:
            return int(self.max_model_len)  # a session takes input for as long as the model can
        most = request.num_prompt_tokens + request.max_tokens - 1 + self._overshoot
        return int(min(most, self.max_model_len))

    def _allocate_if_reserved(
        self, request: Any, num_new_tokens: int, *args: Any, **kwargs: Any
    ) -> Any:
        """Stand in for vLLM's allocate_slots; None: the request has to wait."""
        ledger = self._ledger
        if request.status == RequestStatus.RUNNING or ledger.holds_blocks(request):
            return self._allocate(request, num_new_tokens, *args, **kwargs)
        hits = self._hits(request, num_new_tokens, *args, **kwargs)
        free = self.kv_cache_manager.block_pool.get_num_free_blocks()
        claimed = ledger.claimed(self.current_step, request)
        if ledger.needed(request, self._end_of(request), hits) + claimed > free:
            return None
        shared = ledger.shared_by(hits)
        allocated = self._allocate(request, num_new_tokens, *args, **kwargs)
        if allocated is not None:
            ledger.admit(request, shared)
        return allocated

    def _hits(self, request: Any, num_new_tokens: int, *args: Any, **kwargs: Any) -> Hits:
        given = self._how_to_allocate.bind(request, num_new_tokens, *args, **kwargs).arguments
        found = given.get("new_computed_blocks") or self.kv_cache_manager.empty_kv_cache_blocks
        num_local = request.num_computed_tokens + given.get("num_new_computed_tokens", 0)
        num_computed = num_local + given.get("num_external_computed_tokens", 0)
        return Hits(found.blocks, num_local, min(num_computed, self.max_model_len))


class AsyncGuaranteedNoEvictScheduler(GuaranteedNoEvictScheduler, AsyncScheduler):
    """The twin of GuaranteedNoEvictScheduler for asynchronous scheduling."""

    def __new__(cls, vllm_config: Any, *args: Any, **kwargs: Any) -> GuaranteedNoEvictScheduler:
        """Return an instance.

        Raises:
            ConfigError: vLLM does not schedule asynchronously.
        """
        if not vllm_config.scheduler_config.async_scheduling:
            raise ConfigError(
                "AsyncGuaranteedNoEvictScheduler needs asynchronous scheduling, which is off. Give "
                "--scheduler-cls GuaranteedNoEvictScheduler, which fits either, or "
                "--async-scheduling"
            )
        return super().__new__(cls, vllm_config, *args, **kwargs)
