"""vLLM's own tests: the fast subset ends as expected, and notices a backend that is broken."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.upstream import fetch
from tests.upstream.groups import all_groups

#: One layer on two ranks.
CASE = "False-moe_nvlink-2-1-True"

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module", autouse=True)
def tree() -> Path:
    """vLLM's tests, fetched once."""
    try:
        return fetch.tree(fetch.installed_version())
    except fetch.UnreachableError as error:
        # Where tests run for others to rely on, these are not left out in silence.
        if os.environ.get("CI"):
            raise
        pytest.skip(f"no registry can be reached; {error}")


def run(logs: Path, *arguments: str, timeout_s: float = 850) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.upstream", "--logs", str(logs)]
    with subprocess.Popen(
        [*command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            printed, said = process.communicate(timeout=timeout_s)
        finally:
            process.terminate()  # ends what it has started too, as killing it would not
    return subprocess.CompletedProcess(process.args, process.returncode, printed, said)


@pytest.mark.long
def test_the_fast_subset_ends_as_expected(tmp_path: Path) -> None:
    """Every group's, two processes at a time."""
    done = run(tmp_path, "--fast", "--jobs", "2")
    logs = "".join(f"\n== {log.name}\n{log.read_text()[-3000:]}" for log in tmp_path.glob("*.log"))
    assert done.returncode == 0, done.stdout + done.stderr + logs
    assert "every outcome is as expected" in done.stdout


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", [group.name for group in all_groups()])
def test_a_whole_group_ends_as_expected(name: str, tmp_path: Path) -> None:
    done = run(tmp_path, "--group", name, timeout_s=1750)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "every outcome is as expected" in done.stdout


@pytest.mark.long
def test_vllms_tests_catch_a_broken_backend(tmp_path: Path) -> None:
    """One of our classes sends tokens to the next rank's experts; vLLM's comparison fails."""
    done = run(
        tmp_path, "--group", "moe-layer", "--fast", "--break", "wrong-owner", "--", "-k", CASE
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "expected: passed; it is: failed" in done.stdout
    assert "Mismatched elements" in (tmp_path / "moe-layer.log").read_text()


def test_what_is_selected_exists(tree: Path) -> None:
    for group in all_groups():
        for word in (*group.arguments, *group.fast):
            path, *function = word.split("[")[0].split("::")
            if not path.startswith("tests/"):
                continue
            found = tree / path
            assert found.exists(), f"{group.name}: {path}"
            assert not function or f" {function[-1]}" in found.read_text("utf-8"), word
