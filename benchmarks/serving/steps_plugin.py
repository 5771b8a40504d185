"""Write a line for each iteration of a vLLM engine: what ran, what waited, and the KV cache's use.

A vLLM stat logger plugin in one file, for `plugins.install`. vLLM hands its loggers the numbers of
every iteration, whichever scheduler it has; /metrics shows only the last ones.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase

#: Names the file; the server that has no such variable fails to start.
FILE_VARIABLE = "BENCH_STEPS_FILE"


class StepsLogger(StatLoggerBase):
    """JSON lines, whole ones whenever the file is read."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        """Make the file: vLLM makes a logger for each engine, and the benchmark has one engine."""
        self._file = open(os.environ[FILE_VARIABLE], "w", encoding="utf-8", buffering=1)

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """Append an iteration, as it was when its outputs were ready."""
        if scheduler_stats is None:
            return
        waiting = scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
        step = {
            "at_s": time.monotonic(),
            "running": scheduler_stats.num_running_reqs,
            "waiting": waiting,
            "kv_share": scheduler_stats.kv_cache_usage,
            # vLLM counts an eviction when the request has its next token.
            "preemptions": iteration_stats.num_preempted_reqs if iteration_stats else 0,
            "finished": len(iteration_stats.finished_requests) if iteration_stats else 0,
        }
        print(json.dumps(step), file=self._file)

    def log_engine_initialized(self) -> None:
        """Write nothing: the file has iterations only."""
