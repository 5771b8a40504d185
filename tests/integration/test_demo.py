"""`make demo` as a user meets it: it succeeds, and however it ends, nothing of it stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from moe_nvlink_plugin.integration.demo import processes
from moe_nvlink_plugin.integration.demo.demo import EXIT_INTERRUPTED
from tests.integration.servers import FAST_SERVER

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(420)]

#: Looking through /proc takes a tenth of a second of CPU time, which servers that start need, too.
LOOK_S = 0.5
DEMO = ("-m", "moe_nvlink_plugin.integration.demo")
#: The same with servers that start faster, where how processes start is not the point.
FAST_DEMO = (
    "-c",
    "from moe_nvlink_plugin.integration.demo import demo, server\n"
    f"server.API_SERVER = {FAST_SERVER}\n"
    "raise SystemExit(demo.main())\n",
)


class RunningDemo:
    """The demonstration as a child process, and a record of what it started."""

    def __init__(self, folder: Path, program: Sequence[str]) -> None:
        self.output = folder / "output.txt"
        self.log = folder / "demo" / "moe_nvlink.log"
        self.sessions: set[int] = set()
        self.shared_memory: set[Path] = set()
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-u", *program, "--folder", str(folder / "demo")],
                stdout=output,
                stderr=subprocess.STDOUT,
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
        alive = [pid for one in self.sessions for pid in processes.processes_of_session(one)]
        self.shared_memory |= processes.shared_memory_of(alive)
        return alive

    def wait_for(self, stage: str, timeout_s: float = 200.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not self._reached(stage):
            assert self.process.poll() is None, self.text()
            assert time.monotonic() < deadline, f"{stage!r} not reached:\n{self.text()}"
            time.sleep(LOOK_S)

    def _reached(self, stage: str) -> bool:
        alive = self.look()
        if stage == "workers start":
            return sum(map(is_worker, alive)) >= 2
        if stage == "workers load":
            log = self.log.read_text(errors="replace") if self.log.exists() else ""
            return "(Worker" in log
        return stage in self.text()

    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def assert_nothing_stays(self, within_s: float) -> None:
        assert self.sessions, "the demo started no server, so there was nothing to leave behind"
        assert self.shared_memory, "its servers held no shared memory, so this shows nothing"
        deadline = time.monotonic() + within_s
        while (stay := self.stays()) != ([], []) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert stay == ([], [])

    def stays(self) -> tuple[list[int], list[Path]]:
        pids = [pid for one in self.sessions for pid in processes.processes_of_session(one)]
        return pids, sorted(path for path in self.shared_memory if path.exists())


def is_worker(pid: int) -> bool:
    """A worker of vLLM: its title says so, or, while it imports, that an engine spawned it."""
    try:
        process = psutil.Process(pid)
        parents = [parent.pid for parent in process.parents()]
        command = " ".join(process.cmdline())
        of_an_engine = os.getsid(pid) in parents[1:] and "spawn_main" in command
        return "Worker" in command or of_an_engine
    except (psutil.NoSuchProcess, ProcessLookupError):
        return False


@pytest.fixture
def program() -> Sequence[str]:
    """How the demo is run; a test may override it by a parameter."""
    return DEMO


@pytest.fixture
def demo(tmp_path: Path, program: Sequence[str]) -> Iterator[RunningDemo]:
    demo = RunningDemo(tmp_path, program)
    try:
        yield demo
    finally:
        demo.look()
        demo.process.kill()
        demo.process.wait()
        for session in demo.sessions - {os.getsid(0)}:
            processes.end_session(session, grace_s=0.0)


def test_demo_succeeds_and_leaves_nothing(demo: RunningDemo) -> None:
    demo.wait_for("the moe_nvlink server is ready")
    while demo.process.poll() is None:
        demo.look()
        time.sleep(LOOK_S)
    assert demo.process.returncode == 0, demo.text()
    assert "every answer equals the one-rank server's" in demo.text()
    assert "4,032    28.1%" in demo.text()  # of nvfp4
    demo.assert_nothing_stays(within_s=1.0)


@pytest.mark.parametrize(
    ("stage", "program"),
    [
        pytest.param("workers start", DEMO, id="while-starting"),
        # Requests for much longer than it takes to interrupt them.
        pytest.param(
            "the moe_nvlink server is ready",
            (*FAST_DEMO, "--requests", "200"),
            id="while-serving",
        ),
    ],
)
def test_ctrl_c_leaves_nothing(demo: RunningDemo, stage: str) -> None:
    demo.wait_for(stage)
    time.sleep(1.0)
    demo.look()
    demo.process.send_signal(signal.SIGINT)
    assert demo.process.wait(timeout=40) == EXIT_INTERRUPTED, demo.text()
    demo.assert_nothing_stays(within_s=1.0)


@pytest.mark.parametrize("program", [FAST_DEMO], ids=["while-starting"])
def test_killed_demo_leaves_nothing(demo: RunningDemo) -> None:
    """kill -9 gives the demo no chance to clean up; the servers' watchdogs do it."""
    demo.wait_for("workers load")
    demo.process.kill()
    demo.process.wait()
    demo.assert_nothing_stays(within_s=40.0)
