"""What our conftest does for the suite: tests take turns, no death hangs the run, and what
a test changes in its process is undone.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.turns import Turn

pytest.importorskip("xdist", reason="pytest-xdist is not installed")

ROOT = Path(__file__).parents[2]
MAKEFILE = ROOT / "Makefile"
#: Every test says when it ran, and in which process.
TEST = """
import json, os, time
import pytest

@pytest.fixture(scope="module", autouse=True)
def lives_as_long_as_its_file():
    yield from said("fixture")

@pytest.mark.parametrize("number", range(3))
def test_it(number):
    for _ in said(f"test {number}"):
        time.sleep(0.05)

def said(what):
    start = time.monotonic()
    yield
    line = json.dumps([os.environ["PYTEST_XDIST_WORKER"], __file__, what, start, time.monotonic()])
    with open(os.environ["TOLD"], "a") as told:
        told.write(line + "\\n")
"""
ALONE = ["tests/core/transport/test_host_transport.py", "tests/core/transport/test_other_ranks.py"]
SERVERS = ["tests/integration/servers/test_a.py", "tests/integration/servers/test_b.py"]
OTHERS = [f"tests/core/test_{letter}.py" for letter in "uvwxyz"]


class Ran(NamedTuple):
    """A test or a file's fixture, in the process that ran it, from and until when."""

    process: str
    file: str
    what: str
    start: float
    end: float


def suite(folder: Path, files: dict[str, str], *options: str) -> subprocess.CompletedProcess[str]:
    """Runs files with our conftest as `make test` runs ours, with more options of pytest."""
    for name, text in {
        **files,
        "tests/conftest.py": (ROOT / "tests/conftest.py").read_text(),
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    shutil.copytree(ROOT / "tests/support", folder / "tests/support")
    shutil.copy(ROOT / "pyproject.toml", folder)
    (command,) = re.findall(r"^test: .*\n\t@\$\(PY\) ([^$]*)\$", MAKEFILE.read_text(), re.MULTILINE)
    variables = {name: value for name, value in os.environ.items() if "PYTEST" not in name}
    return subprocess.run(
        [sys.executable, *command.split(), "-q", *options],
        cwd=folder,
        env=variables | {"TOLD": str(folder / "told")},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def test_each_in_its_turn(tmp_path: Path) -> None:
    done = suite(tmp_path, dict.fromkeys([*ALONE, *SERVERS, *OTHERS], TEST))
    assert done.returncode == 0, done.stdout + done.stderr
    ran = [Ran(*json.loads(line)) for line in (tmp_path / "told").read_text().splitlines()]
    ran = [one._replace(file=str(Path(one.file).relative_to(tmp_path))) for one in ran]
    tests = sorted((one for one in ran if one.what != "fixture"), key=lambda one: one.start)
    assert len(tests) == 3 * 10
    processes = dict(sorted({(one.file, one.process) for one in ran}))
    assert len({(one.file, one.process) for one in ran}) == len(processes) == 10
    assert len({one.process for one in tests}) > 1
    (of_servers,) = {processes[file] for file in SERVERS}
    # Of its process: another may be slow to begin what it was given first.
    first = next(one.file for one in tests if one.process == of_servers)
    assert first in SERVERS, "servers start first"
    for one in (one for one in ran if one.file in ALONE):
        beside = [other for other in ran if other.start < one.end and one.start < other.end]
        assert {other.file for other in beside} == {one.file}


def test_a_process_that_dies_ends_the_run(tmp_path: Path) -> None:
    """Here one that others may wait for."""
    where = ALONE[0]
    dies = "import os\ndef test_it():\n    os._exit(3)\n"
    done = suite(tmp_path, {**dict.fromkeys([*OTHERS, *ALONE], TEST), where: dies})
    assert done.returncode != 0
    assert f"{where}::test_it" in done.stdout, "the test is named that ran when it died"
    assert re.search(r"^1 failed.* in ", done.stdout, re.MULTILINE), done.stdout


def test_a_wait_has_an_end(tmp_path: Path) -> None:
    first, second = Turn(tmp_path / "lock"), Turn(tmp_path / "lock")
    first.take(alone=False)
    second.take(alone=False)
    second.give_back()
    with pytest.raises(TimeoutError, match="lock for 0 s; end the test run that hangs"):
        second.take(alone=True, patience_s=0.1)
    first.give_back()
    second.take(alone=True)
    with pytest.raises(TimeoutError):
        first.take(alone=False, patience_s=0.1)
    second.give_back()
