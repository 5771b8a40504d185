"""Order and skips of the whole suite: fast tests first, GPU tests only where there is a GPU."""

from __future__ import annotations

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))
    # Minutes of server start-up are wasted when a unit test would have told the same story.
    items.sort(key=lambda item: item.get_closest_marker("e2e") is not None)
