"""Engines that vLLM's tests start in Python are forks of a process that has imported vLLM.

vLLM's CPU platform insists on "spawn", with which an engine's processes import torch and vLLM one
by one: half a minute of a small machine's time for each test. Here "spawn" means Python's own
"forkserver", which vLLM offers on its other platforms; the server imports while pytest collects.
What the processes do then is the same.
"""

from __future__ import annotations

import multiprocessing.context as contexts
import multiprocessing.forkserver as forkserver
import multiprocessing.spawn as spawn
import os
from typing import Any

import pytest

#: What a process is told at its start beside Python's own: its parent's environment.
ENVIRONMENT = "environ"

_get_preparation_data = spawn.get_preparation_data


def get_preparation_data(name: str) -> dict[str, Any]:
    """What a process is told at its start; a spawned one would inherit the environment."""
    return {**_get_preparation_data(name), ENVIRONMENT: dict(os.environ)}


def spawn_by_forking() -> None:
    """Lets "spawn" mean "forkserver" in this process. Local, idempotent."""
    spawn.get_preparation_data = get_preparation_data
    methods = contexts._concrete_contexts  # type: ignore[attr-defined]
    methods["spawn"] = methods["forkserver"]


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Starts the server, whose imports take as long as pytest's own."""
    spawn_by_forking()
    forkserver.set_forkserver_preload([f"{__package__}.forked_imports"])
    forkserver.ensure_running()
