"""How the suite is handed to two processes: nothing twice, and nothing impatient beside servers."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

pytest.importorskip("xdist", reason="pytest-xdist is not installed")

from tests.scheduler import FilesThenAlone, Kinds

SERVERS, PATIENT, ALONE = "tests/integration/", "tests/litmus/", "tests/unit/test_shared_memory.py"


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


class Ran(NamedTuple):
    """A test that ran, by which process, and what the other one still had to run."""

    process: str
    test: str
    beside: list[str]


def run(tests: list[str], turns: str) -> list[Ran]:
    """Tests in the order they ran; `turns` says whose turn it is, over and over."""
    config = SimpleNamespace(
        getvalue=lambda _name: ["popen", "popen"],
        option=SimpleNamespace(loadscopereorder=False),
    )
    scheduler = FilesThenAlone(Kinds((PATIENT,), (SERVERS,), (ALONE,)), config, None)
    processes: dict[str, Any] = {name: Process(name) for name in "ab"}
    for process in processes.values():
        scheduler.add_node(process)
        scheduler.add_node_collection(process, tests)
    scheduler.schedule()
    ran = []
    for name in turns * (20 * len(tests)):
        process = processes.get(name)
        if process is None:
            continue
        if process.ready():
            index = process.queue.popleft()
            others = [other for other in processes.values() if other is not process]
            beside = [tests[number] for other in others for number in other.queue]
            ran.append(Ran(name, tests[index], beside))
            scheduler.mark_test_complete(process, index)
        elif process.shutting_down:
            del processes[name]
            if process in scheduler.nodes:
                assert scheduler.remove_node(process) is None
    return ran


def suite(files: int, servers: int, patient: int = 0, alone: int = 0) -> list[str]:
    places = ["tests/unit/"] * files + [PATIENT] * patient
    tests = [
        f"{place}test_{file}.py::test_{n}" for file, place in enumerate(places) for n in range(4)
    ]
    tests += [f"{ALONE}::test_{n}" for n in range(alone)]
    return tests + [f"{SERVERS}test_{n % 2}.py::test_{n}" for n in range(servers)]


TURNS = ["ab", "aaaaab", "abbbbbbbbb"]
SIZES = [(5, 4, 0, 0), (1, 4, 0, 0), (0, 3, 0, 0), (5, 0, 0, 0), (2, 1, 0, 0)]
SIZES += [(5, 9, 3, 2), (1, 4, 1, 0), (0, 3, 2, 1), (0, 0, 2, 2), (3, 0, 4, 1), (2, 5, 6, 0)]


@pytest.mark.parametrize("turns", TURNS)
@pytest.mark.parametrize("sizes", SIZES)
def test_servers_run_beside_patient_tests_only(turns: str, sizes: tuple[int, ...]) -> None:
    tests = suite(*sizes)
    ran = run(tests, turns)
    assert sorted(one.test for one in ran) == sorted(tests)
    of_servers = [one for one in ran if one.test.startswith(SERVERS)]
    assert [one.test for one in of_servers] == [one for one in tests if one.startswith(SERVERS)]
    assert all(test.startswith(PATIENT) for one in of_servers for test in one.beside)
    assert not any(one.beside for one in ran if one.test.startswith(ALONE))


def test_servers_do_not_wait_for_the_patient() -> None:
    """Most of them run while there are patient tests; else nothing would be gained."""
    ran = run(suite(4, 20, 6), "ab")
    of_servers = [one for one in ran if one.test.startswith(SERVERS)]
    assert sum(bool(one.beside) for one in of_servers) >= 15


def test_a_file_stays_in_one_process() -> None:
    ran = run(suite(6, 0), "ab")
    by_file: dict[str, set[str]] = {}
    for one in ran:
        by_file.setdefault(one.test.split("::")[0], set()).add(one.process)
    assert len(by_file) == 6
    assert all(len(processes) == 1 for processes in by_file.values())
    assert {one.process for one in ran} == {"a", "b"}
