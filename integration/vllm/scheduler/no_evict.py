"""The two classes: vLLM's schedulers with a gate in front of the allocation of KV blocks.

vLLM admits a request as soon as its prompt fits, and evicts the youngest request when blocks run
out: that one starts again later. With the gate a request is admitted only if the blocks that it may
take until its end fit into the free blocks, beside what all admitted requests may still take. The
order stays vLLM's: if the gate says no, vLLM tries no later request in this step.
"""

from __future__ import annotations

import inspect
import logging
import time
from typing import Any, cast

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from moe_nvlink_plugin.errors import ConfigError
from moe_nvlink_plugin.integration import overrides

from .capacity import MAX_UTILIZATION, Reserve, check
from .demand import Hits, groups_of
from .ledger import Ledger
from .reports import Report, Reporter

logger = logging.getLogger(__name__)

#: Seconds between two messages about requests that wait.
_MESSAGE_EVERY_S = 10.0


class Waits:
    """When a request last had to wait because blocks are reserved for others."""

    def __init__(self) -> None:
        self.step = -1
        self._next_message = 0.0

    def note(self, step: int, request: Any, needed: int, free: int, claimed: int) -> None:
        """Note it, and log it from time to time."""
        self.step = step
        if time.monotonic() >= self._next_message:
            self._next_message = time.monotonic() + _MESSAGE_EVERY_S
            logger.info(
                "Request %s and those after it wait: it may take %d KV cache blocks until its end. "
                "%d are free, of which %d are reserved for requests that have started.",
                request.request_id,
                needed,
                free,
                claimed,
            )


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
        return object.__new__(cls)

    @overrides
    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        chosen = check(vllm_config)
        super().__init__(vllm_config, *args, **kwargs)
        num_batches = vllm_config.max_concurrent_batches
        # Slots beyond the last token but one: drafts of this step and of those in flight, and what
        # a draft model writes ahead.
        ahead = num_batches - 1 if isinstance(self, AsyncScheduler) else 0
        drafts = (ahead + 1) * self.num_spec_tokens + self.num_lookahead_tokens
        self._overshoot = max(ahead - 1, 0) + drafts
        self._reserve = Reserve(chosen.reserve)
        self._refused: dict[str, str] = {}
        self._num_refused = 0
        self._waits = Waits()
        if chosen.policy == MAX_UTILIZATION:
            self._ledger: Ledger | None = None
            return
        manager = self.kv_cache_manager
        groups = groups_of(manager, self.num_lookahead_tokens, num_batches)
        self._ledger = Ledger(groups, self._end_of, self._learn)
        self._num_blocks = manager.block_pool.get_num_free_blocks()
        self._reporter = Reporter(vllm_config)
        self._allocate = manager.allocate_slots
        self._how_to_allocate = inspect.signature(manager.allocate_slots)
        manager.allocate_slots = self._allocate_if_reserved

    @overrides
    def add_request(self, request: Any) -> None:
        """Take a request as vLLM does; refuse it if the pool can never hold its blocks."""
        is_new = request.request_id not in self.requests
        super().add_request(request)
        if self._ledger is None or not is_new:
            return
        needed = self._ledger.fewest(request, self._tokens_of(request))
        if needed > self._num_blocks:
            self._refuse(request, needed)

    @overrides
    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, Any]:
        """Update as vLLM does; give refused requests their reason, and report."""
        outputs = cast(
            dict[int, Any], super().update_from_output(scheduler_output, model_runner_output)
        )
        if self._refused:
            for output in (one for each in outputs.values() for one in each.outputs):
                output.stop_reason = self._refused.pop(output.request_id, output.stop_reason)
            self._refused = {
                name: text for name, text in self._refused.items() if name in self.requests
            }
        if self._ledger is not None:
            self._report(self._ledger)
        return outputs

    def _end_of(self, request: Any) -> int:
        """Return the number of tokens of which a request's KV cache may have to hold slots."""
        return int(min(self._tokens_of(request) + self._overshoot, self.max_model_len))

    def _tokens_of(self, request: Any) -> int:
        """Return the number of tokens that a request is admitted for."""
        most = request.max_tokens
        if request.resumable:  # a session takes input for as long as the model can
            most = self.max_model_len
        promised = request.num_prompt_tokens + self._reserve.tokens(most) - 1
        # Without the whole reserve, a request may get past what it was admitted for.
        return int(min(max(promised, request.num_tokens), self.max_model_len))

    def _learn(self, request: Any) -> None:
        """Note the length of an output that has ended by itself."""
        ended = request.status in (
            RequestStatus.FINISHED_STOPPED,
            RequestStatus.FINISHED_LENGTH_CAPPED,
        )
        if ended and self._reserve.lengths is not None and not request.resumable:
            self._reserve.lengths.add(request.num_output_tokens)

    def _refuse(self, request: Any, needed: int) -> None:
        text = (
            f"needs at least {needed} KV cache blocks ({request.num_prompt_tokens} prompt tokens, "
            f"max_tokens={request.max_tokens}), and the server has {self._num_blocks}. Lower "
            f"max_tokens, shorten the prompt, or give the server more memory for its KV cache "
            f"(--gpu-memory-utilization, --num-gpu-blocks-override, on CPU VLLM_CPU_KVCACHE_SPACE)"
        )
        logger.error("Request %s was refused: it %s.", request.request_id, text)
        self._refused[request.request_id] = text
        self._num_refused += 1
        # vLLM ends the requests of this set with an error when it processes the next output.
        self.encoder_cache_mismatch_reqs.add(request.request_id)

    def _allocate_if_reserved(
        self, request: Any, num_new_tokens: int, *args: Any, **kwargs: Any
    ) -> Any:
        """Stand in for vLLM's allocate_slots; None: the request has to wait."""
        ledger = self._ledger
        if (
            ledger is None
            or request.status == RequestStatus.RUNNING
            or ledger.holds_blocks(request)
        ):
            return self._allocate(request, num_new_tokens, *args, **kwargs)
        if request.request_id in self._refused:
            return None
        hits = self._hits(request, num_new_tokens, *args, **kwargs)
        free = self.kv_cache_manager.block_pool.get_num_free_blocks()
        claimed = ledger.claimed(self.current_step, request)
        needed = ledger.needed(request, self._end_of(request), hits)
        # Who may need more than there is starts when everything is free, and then runs alone.
        needed = min(needed, self._num_blocks)
        if needed + claimed > free:
            if ledger.needed(request, request.num_tokens, hits) <= free:
                # vLLM itself would start it now, and evict somebody later.
                self._waits.note(self.current_step, request, needed, free, claimed)
            return None
        shared = ledger.shared_by(hits)
        allocated = self._allocate(request, num_new_tokens, *args, **kwargs)
        if allocated is not None:
            ledger.admit(request, shared)
        return allocated

    def _report(self, ledger: Ledger) -> None:
        if not self._reporter.is_due(is_idle=not self.has_unfinished_requests()):
            return
        waiting = len(self.waiting) if self._waits.step == self.current_step else 0
        self._reporter.publish(Report(waiting, ledger.count(), self._num_refused))

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
