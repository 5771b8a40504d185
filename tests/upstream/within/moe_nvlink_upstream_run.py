"""A pytest plugin of every upstream run: says what vLLM did with our plugin, and saves seconds.

Without the first a run shows nothing. Imports nothing of our package, because runs without our
plugin load this too.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path

import pytest

#: Imported by vLLM alone, when it follows our entry point; it may then stay out.
PLATFORM = "moe_nvlink_plugin.integration.vllm.plugin.platform"
#: The file to write.
USED = "MOE_NVLINK_UPSTREAM_USED"

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
    used = {"asked": PLATFORM in sys.modules, "taken": any(_taken) or _is_taken()}
    Path(os.environ[USED]).write_text(json.dumps(used), encoding="utf-8")


def _is_taken() -> bool:
    """Whether the platform that vLLM works with is ours. Never makes vLLM choose one."""
    platforms = sys.modules.get("vllm.platforms")
    chosen = None if platforms is None else vars(platforms).get("_current_platform")
    return type(chosen).__module__ == PLATFORM
