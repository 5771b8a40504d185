"""Imported once, by the process that engines are forked from; see `forked`."""

from __future__ import annotations

import importlib
import multiprocessing.forkserver as forkserver
import multiprocessing.resource_tracker as resource_tracker
import multiprocessing.spawn as spawn
import os
from collections.abc import Mapping
from typing import Any

from .forked import ENVIRONMENT, spawn_by_forking

_MODULES = (
    "vllm.v1.engine.core",
    "vllm.v1.engine.coordinator",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.granitemoe",
    "vllm.model_executor.models.llama",
)

_prepare = spawn.prepare


def prepare(data: Mapping[str, Any]) -> None:
    """In a fork, before it runs its target."""
    os.environ.clear()
    os.environ.update(data[ENVIRONMENT])
    # An engine's workers come from the same server; Python would start another for them.
    forkserver._forkserver.ensure_running = resource_tracker.ensure_running  # type: ignore[method-assign]
    spawn_by_forking()
    _prepare(data)


spawn.prepare = prepare
for _name in _MODULES:  # none of them asks for plugins, or decides what one could want to change
    importlib.import_module(_name)
