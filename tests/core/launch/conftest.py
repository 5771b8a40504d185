"""Processes that have the tests' own driver."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.core.launch.test_cuda_launch import in_driver


@pytest.fixture
def driven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`driven(body, *args, **options)` is in_driver() with the test's own folder and variables."""
    return lambda body, *args, **options: in_driver(body, tmp_path, monkeypatch, *args, **options)
