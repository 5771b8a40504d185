"""Ranks as processes, which meet on one GPU: what `moe-nvlink verify --ranks N` does not show.

The GPU serves the processes in turns (a spinning kernel is preempted after its time slice), so
every round takes milliseconds and nothing here is a measurement. A rank waits at most WAIT_S for
the others and the test at most JOIN_S for all: a GPU's minutes are lent. Ranks that share a GPU
launch without programmatic dependent launch, so nothing here shows that between processes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import ranks as processes
from tests.support import real_head, real_path

JOIN_S = 60.0

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(JOIN_S + 20)]

each_kind = pytest.mark.parametrize("small", [False, True], ids=["bulk", "small"])


def run(size: int, body: Callable[..., Any], folder: Path, *args: Any) -> list[Any]:
    """What each rank returns."""
    return processes.run_processes(size, body, folder, "cuda", *args, timeout_s=JOIN_S)


@each_kind
def test_ranks_that_enter_capture_at_different_times(small: bool, tmp_path: Path) -> None:
    outputs = run(3, real_path.process_replays, tmp_path, 100, small)
    real_path.check_process_replays(outputs, 100)


@pytest.mark.parametrize(
    ("body", "phase", "options"),
    [
        (real_path.process_missing, "dispatch", [False]),
        (real_path.process_missing, "dispatch", [True]),
        (real_head.process_missing, "head gather", []),
    ],
    ids=["bulk", "small", "head"],
)
def test_a_missing_rank(body: Any, phase: str, options: list[bool], tmp_path: Path) -> None:
    """The one that waits names the one that is missing, and its context lives."""
    assert run(2, body, tmp_path, *options) == [(phase, (1,), 8.0), ()]


@each_kind
def test_growth(small: bool, tmp_path: Path) -> None:
    seen = run(2, real_path.process_grows, tmp_path, 40, small)
    real_path.check_process_rounds(seen, "cuda", 40)


def test_two_ranks_on_one_gpu_are_refused_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MOE_NVLINK_ALLOW_SHARED_GPU")
    assert "MOE_NVLINK_ALLOW_SHARED_GPU" not in os.environ
    messages = run(2, real_path.process_refused, tmp_path)
    assert all("MOE_NVLINK_ALLOW_SHARED_GPU" in message for message in messages), messages


def test_head_replays_of_different_sizes(tmp_path: Path) -> None:
    assert run(3, real_head.process_replays, tmp_path, 100) == [100] * 3
