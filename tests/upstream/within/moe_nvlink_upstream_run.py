"""A pytest plugin of every upstream run: says whether vLLM took our platform, and saves seconds.

Without the first a run shows nothing. Imports nothing of our package, because runs without our
plugin load this too.
"""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

import pytest

PLATFORM = "moe_nvlink_plugin.integration.vllm.plugin.platform"

_taken: list[bool] = []

# vLLM's conftest collects garbage after every test. Little of what an import makes becomes garbage.
gc.disable()


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Before the first test, which may leave another platform behind."""
    _taken.append(_is_taken())
    gc.collect()
    gc.freeze()
    gc.unfreeze = lambda: None  # that conftest would thaw what is frozen
    gc.enable()


def pytest_sessionfinish() -> None:
    """Once vLLM has had every reason to load its plugins."""
    taken = any(_taken) or _is_taken()
    Path(os.environ["MOE_NVLINK_UPSTREAM_TAKEN"]).write_text("taken" if taken else "not taken")


def _is_taken() -> bool:
    """Whether the platform that vLLM works with is ours. Never makes vLLM choose one."""
    platforms = sys.modules.get("vllm.platforms")
    chosen = None if platforms is None else vars(platforms).get("_current_platform")
    return type(chosen).__module__ == PLATFORM
