"""vLLM's API server, with the processes of its tree forked from one that has imported everything.

    python tests/integration/fast_server.py <arguments of vllm.entrypoints.openai.api_server>

vLLM's CPU platform insists on "spawn", so that each of the six processes of a two-rank server
imports torch and vLLM again: 55 s of CPU time, of which 45 are imports. Here "spawn" means Python's
own "forkserver", which vLLM offers on its other platforms: one process imports what they need, has
no threads, and is forked. What the processes do then is the same; `make demo`, whose test runs it
as it is, and the test of `LLM` in Python start theirs in vLLM's own way.
"""

from __future__ import annotations

import multiprocessing.context as contexts
import multiprocessing.forkserver as forkserver
import multiprocessing.resource_tracker as resource_tracker
import multiprocessing.spawn as spawn
import os
import runpy
from collections.abc import Mapping
from typing import Any

PRELOADED = (
    "vllm.v1.engine.core",
    "vllm.v1.engine.coordinator",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.glm4_moe",
    "vllm.model_executor.models.qwen3_moe",
)

_get_preparation_data = spawn.get_preparation_data
_prepare = spawn.prepare


def get_preparation_data(name: str) -> dict[str, Any]:
    """What a parent tells its child, with its environment: spawn's children inherit that."""
    return {**_get_preparation_data(name), "environ": dict(os.environ)}


def prepare(data: Mapping[str, Any]) -> None:
    """In the child, before it runs its target."""
    os.environ.clear()
    os.environ.update(data["environ"])
    # A child's children come from the same server; Python would start another for them.
    forkserver._forkserver.ensure_running = resource_tracker.ensure_running  # type: ignore[method-assign]
    _prepare(data)


def spawn_by_forking() -> None:
    """Let "spawn" mean "forkserver" in this process and in those forked for it."""
    spawn.get_preparation_data = get_preparation_data
    spawn.prepare = prepare
    methods = contexts._concrete_contexts  # type: ignore[attr-defined]
    methods["spawn"] = methods["forkserver"]


if __name__ in ("__main__", "__mp_main__"):  # the second in the server of forks
    spawn_by_forking()
if __name__ == "__main__":
    forkserver.set_forkserver_preload(["__main__", *PRELOADED])
    forkserver.ensure_running()  # it imports while this process does
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
