"""The launcher of ranks: what fails is named, and nothing outlives its use."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist

from tests.support import ranks
from tests.support.ranks import RankError, run_processes, run_threads

ROOT = Path(__file__).parents[2]


def one_fails(rank: int, _size: int) -> None:
    """Rank 1 at once; the other would go on for minutes."""
    if rank == 1:
        raise ValueError("what rank 1 says")
    time.sleep(150)


def test_a_failed_process_ends_the_wait_for_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "GRACE_S", 0.5)
    start = time.monotonic()
    with pytest.raises(RankError, match="^rank 1: ValueError: what rank 1 says\n") as told:
        run_processes(2, one_fails, tmp_path)
    assert time.monotonic() - start < 100
    assert list(told.value.failures) == [1, 0], "the first to fail is named first"
    assert "in one_fails" in told.value.failures[1].trace
    assert "rank 0: still ran" in str(told.value)


def ends_itself(rank: int, _size: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL if rank == 0 else signal.SIGTERM)


def test_a_process_that_says_nothing_is_named(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="^rank 1: exit status -15$"):
        run_processes(2, ends_itself, tmp_path, killed=(0,), meets=False)


def has_met(_rank: int, _size: int) -> tuple[bool, int]:
    return dist.is_initialized(), threading.active_count()


def test_processes_that_do_not_meet(tmp_path: Path) -> None:
    """Of a fresh interpreter, as ranks on GPUs need it, and with a thread that waits for us."""
    options: dict[str, Any] = {"method": "spawn", "meets": False, "ends_with_parent": True}
    assert run_processes(1, has_met, tmp_path, **options) == [(False, 2)]


PARENT = """
import sys
from pathlib import Path
from tests.support.ranks import run_processes
from tests.instruments.test_ranks import stays
run_processes(1, stays, Path(sys.argv[1]), sys.argv[1], ends_with_parent=True)
"""


def stays(_rank: int, _size: int, folder: str) -> None:
    Path(folder, "writes").write_text(str(os.getpid()))
    Path(folder, "writes").rename(Path(folder, "pid"))
    time.sleep(200)


def test_processes_end_with_their_parent(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path)], cwd=ROOT) as parent:
        give_up = time.monotonic() + 100
        while not (tmp_path / "pid").exists() and time.monotonic() < give_up:
            time.sleep(0.05)
        rank = psutil.Process(int((tmp_path / "pid").read_text()))
        parent.kill()
    rank.wait(timeout=60)


def test_a_thread_that_fails_or_hangs_is_named() -> None:
    with pytest.raises(ZeroDivisionError) as raised:
        run_threads(2, lambda rank: 1 // (1 - rank))
    if sys.version_info >= (3, 11):
        assert raised.value.__notes__ == ["on rank 1"]
    release = threading.Event()
    with pytest.raises(RankError, match=r"^rank 1: still ran after 0 s$"):
        run_threads(2, lambda rank: rank == 0 or release.wait(60), timeout_s=0.3)
    release.set()
