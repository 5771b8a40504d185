"""Ranks as processes over CUDA VMM and file descriptors, which meet on one GPU.

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

sizes = pytest.mark.parametrize("size", [2, 4])


@pytest.fixture(autouse=True)
def shared_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_NVLINK_ALLOW_SHARED_GPU", "1")


def run(size: int, body: Callable[..., Any], folder: Path, *args: Any) -> list[Any]:
    """What each rank returns."""
    return processes.run_processes(size, body, folder, "cuda", *args, timeout_s=JOIN_S)


# Dispatch and combine.


@sizes
def test_rounds(size: int, tmp_path: Path) -> None:
    real_path.check_process_rounds(run(size, real_path.process_rounds, tmp_path, 100), "cuda", 100)


def test_ranks_that_enter_capture_at_different_times(tmp_path: Path) -> None:
    outputs = run(3, real_path.process_replays, tmp_path, 100)
    real_path.check_process_replays(outputs, 100)


def test_a_missing_rank(tmp_path: Path) -> None:
    """The one that waits names the one that is missing, and its context lives."""
    first, last = run(2, real_path.process_missing, tmp_path)
    assert first == ("dispatch", (1,), 8.0)
    assert last == ()


# The same with the kernels for small batches.


@sizes
def test_small_rounds(size: int, tmp_path: Path) -> None:
    seen = run(size, real_path.process_rounds, tmp_path, 100, True)
    real_path.check_process_rounds(seen, "cuda", 100)


def test_small_replays(tmp_path: Path) -> None:
    outputs = run(3, real_path.process_replays, tmp_path, 100, True)
    real_path.check_process_replays(outputs, 100)


def test_a_missing_rank_of_small_batches(tmp_path: Path) -> None:
    first, last = run(2, real_path.process_missing, tmp_path, True)
    assert first == ("dispatch", (1,), 8.0)
    assert last == ()


# Either kind.


def test_growth(tmp_path: Path) -> None:
    real_path.check_process_rounds(run(2, real_path.process_grows, tmp_path, 20), "cuda", 20)


def test_two_ranks_on_one_gpu_are_refused_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MOE_NVLINK_ALLOW_SHARED_GPU")
    assert "MOE_NVLINK_ALLOW_SHARED_GPU" not in os.environ
    messages = run(2, real_path.process_refused, tmp_path)
    assert all("MOE_NVLINK_ALLOW_SHARED_GPU" in message for message in messages), messages


# The shared LM head.


@sizes
def test_head_rounds(size: int, tmp_path: Path) -> None:
    assert run(size, real_head.process_rounds, tmp_path, 50) == [100] * size


def test_head_replays_of_different_sizes(tmp_path: Path) -> None:
    assert run(3, real_head.process_replays, tmp_path, 100) == [100] * 3


def test_a_missing_rank_of_a_head(tmp_path: Path) -> None:
    first, last = run(2, real_head.process_missing, tmp_path)
    assert first == ("head gather", (1,), 8.0)
    assert last == ()
