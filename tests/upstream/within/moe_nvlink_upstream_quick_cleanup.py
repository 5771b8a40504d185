"""A pytest plugin of every upstream run: vLLM's cleanup between tests without a second each.

Its conftest collects garbage after every test, over all that torch and vLLM have imported, after
thawing what is frozen. Here what exists once tests are collected stays frozen, and only what is
younger is looked through. Imports nothing of our package, as runs without our plugin load it too.
"""

from __future__ import annotations

import gc

import pytest

# Little of what an import makes becomes garbage, and vLLM's is looked through a hundred times.
gc.disable()


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Nothing collected so far becomes garbage before the process ends."""
    gc.collect()
    gc.freeze()
    gc.unfreeze = lambda: None
    gc.enable()
