"""Write a line for each iteration of a vLLM engine: who runs, who is evicted, the KV cache's use.

A vLLM general plugin in one file, for `plugins.install`. It wraps `Scheduler.schedule`, which no
scheduler here overrides. vLLM's stat loggers know how many requests run, but not which.
"""

from __future__ import annotations

import functools
import json
import os
import re
from pathlib import Path
from typing import Any

#: Names the file.
FILE_VARIABLE = "BENCH_STEPS_FILE"
#: vLLM puts what the client sends as X-Request-Id into the request's own id.
NUMBER = re.compile(r"numbered(\d+)-")


def register() -> None:
    """Record from now on. vLLM calls this in each of its processes, in some of them twice."""
    from vllm.v1.core.sched.scheduler import Scheduler

    if not hasattr(Scheduler.schedule, "__wrapped__"):
        file = Path(os.environ[FILE_VARIABLE])
        file.touch()
        Scheduler.schedule = recording(Scheduler.schedule, file)


def recording(schedule: Any, file: Path) -> Any:
    """Return `schedule` that appends what it returns to a file, if a request runs."""

    @functools.wraps(schedule)
    def record(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = schedule(self, *args, **kwargs)
        if output.num_scheduled_tokens:
            step = {
                "running": numbers(output.num_scheduled_tokens),
                "evicted": numbers(output.preempted_req_ids or ()),
                "known": sum(self.get_request_counts()),
                "kv_share": self.kv_cache_manager.usage,
            }
            with file.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(step) + "\n")
        return output

    return record


def numbers(request_ids: Any) -> list[int]:
    """Return the clients' numbers of requests, of those that have one."""
    return sorted(int(found[1]) for found in map(NUMBER.search, request_ids) if found)
