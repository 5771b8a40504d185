"""How the suite is handed to two processes: nothing twice, and servers beside nothing else."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("xdist", reason="pytest-xdist is not installed")

from tests.scheduler import FilesThenAlone

SERVERS = "tests/integration/"


class Process:
    """A worker of pytest-xdist: it runs a test when it knows the next one, or that none comes."""

    def __init__(self, name: str) -> None:
        self.gateway = SimpleNamespace(id=name)
        self.queue: deque[int] = deque()
        self.shutting_down = False

    def send_runtest_some(self, indices: list[int]) -> None:
        self.queue.extend(indices)

    def shutdown(self) -> None:
        self.shutting_down = True

    def ready(self) -> bool:
        return len(self.queue) > (0 if self.shutting_down else 1)


def run(tests: list[str], turns: str) -> tuple[list[tuple[str, str]], list[set[str]]]:
    """(process, test) in the order they ran, and the processes there were at each; `turns` says
    whose turn it is, over and over.
    """
    config = SimpleNamespace(
        getvalue=lambda _name: ["popen", "popen"],
        option=SimpleNamespace(loadscopereorder=False),
    )
    scheduler = FilesThenAlone((SERVERS,), config, None)
    processes: dict[str, Any] = {name: Process(name) for name in "ab"}
    for process in processes.values():
        scheduler.add_node(process)
        scheduler.add_node_collection(process, tests)
    scheduler.schedule()
    ran, present = [], []
    for name in turns * (20 * len(tests)):
        process = processes.get(name)
        if process is None:
            continue
        if process.ready():
            index = process.queue.popleft()
            ran.append((name, tests[index]))
            present.append(set(processes))
            scheduler.mark_test_complete(process, index)
        elif process.shutting_down:
            del processes[name]
            if process in scheduler.nodes:
                assert scheduler.remove_node(process) is None
    return ran, present


def suite(files: int, servers: int) -> list[str]:
    ordinary = [f"tests/unit/test_{file}.py::test_{n}" for file in range(files) for n in range(4)]
    return ordinary + [f"{SERVERS}test_{n % 2}.py::test_{n}" for n in range(servers)]


@pytest.mark.parametrize("turns", ["ab", "aaaaab", "abbbbbbbbb"])
@pytest.mark.parametrize(("files", "servers"), [(5, 4), (1, 4), (0, 3), (5, 0), (2, 1)])
def test_servers_run_alone_and_last(files: int, servers: int, turns: str) -> None:
    tests = suite(files, servers)
    ran, present = run(tests, turns)
    assert sorted(test for _process, test in ran) == sorted(tests)
    of_servers = [there for (_, test), there in zip(ran, present, strict=True) if SERVERS in test]
    assert all(len(there) == 1 for there in of_servers if files)
    assert [test for _, test in ran if SERVERS in test] == tests[4 * files :]


def test_a_file_stays_in_one_process() -> None:
    ran, _present = run(suite(6, 0), "ab")
    by_file: dict[str, set[str]] = {}
    for process, test in ran:
        by_file.setdefault(test.split("::")[0], set()).add(process)
    assert len(by_file) == 6
    assert all(len(processes) == 1 for processes in by_file.values())
    assert {process for process, _test in ran} == {"a", "b"}
