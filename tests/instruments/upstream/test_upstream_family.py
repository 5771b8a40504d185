"""What a run of vLLM's tests has started ends with it, and what it has not started stays."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.upstream import family

pytestmark = pytest.mark.long

#: A process with shared memory, a child, a server in a session of its own, and the server's child.
PROGRAM = """
import os, subprocess, sys, time
from multiprocessing.shared_memory import SharedMemory

memory = SharedMemory(create=True, size=64)
child = subprocess.Popen(["sleep", "600"])
code = "import subprocess, time; print(subprocess.Popen(['sleep', '600'], env={}).pid, flush=True)"
line = [sys.executable, "-c", code + "; time.sleep(600)"]
server = subprocess.Popen(line, stdout=subprocess.PIPE, start_new_session=True)
print(memory.name, child.pid, server.pid, int(server.stdout.readline()), flush=True)
if sys.argv[1] == "crash":
    os.kill(os.getpid(), 9)
time.sleep(600)
"""


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    """Another run's."""
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as process:
        yield process
        process.kill()


@pytest.mark.parametrize("how", ["killed", "crash"])
def test_all_that_was_started_ends_and_leaves_no_shared_memory(
    how: str,
    tmp_path: Path,
    stranger: subprocess.Popen[bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(family, "PATIENCE_S", 120.0)  # what cleans up needs it on a busy machine
    leader = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, how],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert leader.stdout is not None
    name, *pids = leader.stdout.readline().decode().split()
    started_by_it = [psutil.Process(int(pid)) for pid in pids]
    if how == "crash":
        leader.wait()
    assert all(map(family.is_alive, started_by_it))
    started = time.monotonic()
    family.end(leader, tmp_path)
    assert time.monotonic() - started < family.PATIENCE_S, "what cleans up was killed as well"
    assert not any(map(family.is_alive, started_by_it))
    assert leader.returncode == -9
    assert not (Path("/dev/shm") / name).exists()
    assert stranger.poll() is None
