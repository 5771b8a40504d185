"""`make demo` as a user meets it: it succeeds, and however it ends, nothing of it stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from moe_nvlink_plugin.integration.demo import processes
from moe_nvlink_plugin.integration.demo.demo import EXIT_INTERRUPTED
from tests.integration.servers.servers import templates

#: The limits of this file are for demos that hang: the machine may be busy.
pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[3]
#: Looking through /proc takes a tenth of a second of CPU time, which servers that start need, too.
LOOK_S = 0.5
#: Stages of a demo: the first by its server's log, the second by its own output.
WORKERS_LOAD, SERVING = "workers load", "the moe_nvlink server is ready"


class RunningDemo:
    """The demo as a child process, and a record of what it started.

    Args:
        forked: Its servers that are forks of templates, see fast_demo.py.
        num_forked: How many these are.
    """

    def __init__(self, folder: Path, *arguments: str, forked: str, num_forked: int) -> None:
        self.output = folder / "output.txt"
        self.log = folder / "demo" / "moe_nvlink.log"
        self.sessions: set[int] = set()
        self.shared_memory: set[Path] = set()
        self._told_sessions = folder / "sessions"
        self._num_forked = num_forked
        sockets = [template.control.fileno() for template in templates()]
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-u",
                    "-m",
                    "tests.integration.servers.fast_demo",
                    forked,
                    *map(str, sockets),
                    str(self._told_sessions),
                    "--folder",
                    str(folder / "demo"),
                    *arguments,
                ],
                cwd=ROOT,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=sockets,
                start_new_session=True,
            )

    def look(self) -> list[int]:
        """Note the sessions and the shared memory of its servers; return their processes."""
        try:
            children = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            children = []
        for child in children:
            try:
                self.sessions.add(os.getsid(child.pid))
            except ProcessLookupError:
                continue
        if self._told_sessions.exists():
            self.sessions |= set(map(int, self._told_sessions.read_text().split()))
        alive = [pid for one in self.sessions for pid in processes.processes_of_session(one)]
        self.shared_memory |= processes.shared_memory_of(alive)
        return alive

    def wait_for(self, stage: str, timeout_s: float = 900.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not self._reached(stage):
            assert self.process.poll() is None, self.text()
            assert time.monotonic() < deadline, f"{stage!r} not reached:\n{self.text()}"
            time.sleep(LOOK_S)

    def wait_for_success(self) -> None:
        while self.process.poll() is None:
            self.look()
            time.sleep(LOOK_S)
        assert self.process.returncode == 0, self.text()

    def _reached(self, stage: str) -> bool:
        self.look()
        if stage == WORKERS_LOAD:
            log = self.log.read_text(errors="replace") if self.log.exists() else ""
            return "Starting to load model" in log
        return stage in self.text()

    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def assert_nothing_stays(self, within_s: float) -> None:
        forked = self._told_sessions.read_text().split()
        assert len(forked) == self._num_forked, "which servers are forks"
        assert self.sessions, "the demo started no server, so there was nothing to leave behind"
        assert self.shared_memory, "its servers held no shared memory, so this shows nothing"
        deadline = time.monotonic() + within_s
        while (stay := self.stays()) != ([], []) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert stay == ([], [])

    def stays(self) -> tuple[list[int], list[Path]]:
        pids = [pid for one in self.sessions for pid in processes.processes_of_session(one)]
        return pids, sorted(path for path in self.shared_memory if path.exists())


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., RunningDemo]]:
    """Starts a demo; at the end nothing of it is left, whatever it did."""
    started: list[RunningDemo] = []

    def start_one(*arguments: str, forked: str = "all", num_forked: int = 2) -> RunningDemo:
        demo = RunningDemo(tmp_path, *arguments, forked=forked, num_forked=num_forked)
        started.append(demo)
        return started[-1]

    yield start_one
    for demo in started:
        demo.look()
        demo.process.kill()
        demo.process.wait()
        for session in demo.sessions - {os.getsid(0)}:
            processes.end_session(session, grace_s=0.0)


def test_demo_succeeds_and_leaves_nothing(start: Callable[..., RunningDemo]) -> None:
    """`make demo`, in which vLLM starts the processes of our server in its own way.

    The one-rank server has nothing of ours in it.
    """
    demo = start(forked="one-rank", num_forked=1)
    demo.wait_for(SERVING)
    demo.wait_for_success()
    assert "every answer equals the one-rank server's" in demo.text()
    assert "4,032    28.1%" in demo.text()  # of nvfp4
    demo.assert_nothing_stays(within_s=1.0)


@pytest.mark.long
def test_survivors_of_a_killed_rank_serve_on(
    start: Callable[..., RunningDemo], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody but `moe-nvlink watch --act` tells them to; the dead rank leaves nothing either."""
    # The demo's 2 seconds are few for ranks that share busy cores.
    monkeypatch.setenv("MOE_NVLINK_TIMEOUT_S", "10")
    demo = start("--kill", "--replicas", num_forked=3)
    demo.wait_for("the rank 2 server is ready")
    demo.wait_for_success()
    told = demo.text()
    assert 'posts {"instruction": "retry", "params": {"dead_ranks": [2]}} to rank(s) 0, 1' in told
    assert "after the kill (MOE_NVLINK_TIMEOUT_S=10)" in told
    assert "OK: the survivors answer again, with the tokens of before the death." in told
    demo.assert_nothing_stays(within_s=1.0)


@pytest.mark.parametrize(
    ("stage", "arguments"),
    [
        pytest.param(WORKERS_LOAD, (), id="while-starting"),
        # Requests for much longer than it takes to interrupt them.
        pytest.param(SERVING, ("--requests", "200"), id="while-serving"),
    ],
)
def test_ctrl_c_leaves_nothing(
    stage: str, arguments: tuple[str, ...], start: Callable[..., RunningDemo]
) -> None:
    demo = start(*arguments)
    demo.wait_for(stage)
    time.sleep(1.0)
    demo.look()
    demo.process.send_signal(signal.SIGINT)
    assert demo.process.wait(timeout=600) == EXIT_INTERRUPTED, demo.text()
    demo.assert_nothing_stays(within_s=1.0)


def test_killed_demo_leaves_nothing(start: Callable[..., RunningDemo]) -> None:
    """kill -9 gives the demo no chance to clean up; the servers' watchdogs do it."""
    demo = start()
    demo.wait_for(WORKERS_LOAD)
    demo.process.kill()
    demo.process.wait()
    demo.assert_nothing_stays(within_s=200.0)
