"""The processes of upstream runs: what they see, what becomes of their tests, how they crash."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.instruments.upstream.upstream_toys import CONFTEST, toy_group, toy_tree
from tests.upstream.groups import Failures, Outcome, between
from tests.upstream.run import check, run

pytestmark = pytest.mark.long

OUTCOMES = """
import pytest

@pytest.fixture
def no_setup():
    raise RuntimeError("no setup")

@pytest.fixture
def no_teardown():
    yield
    raise RuntimeError("no teardown")

@pytest.mark.parametrize("value", ["a-b", "x y", "*"])
def test_passes(value): pass

def test_fails():
    try:
        raise OSError("the cause")
    except OSError as error:
        raise ValueError("the failure") from error

def test_setup(no_setup): pass
def test_teardown(no_teardown): pass
def test_skips(): pytest.skip("no reason")

@pytest.mark.skip(reason="marked")
def test_marked(): pass

def test_subtests(subtests):
    with subtests.test("one"):
        assert False, "in a subtest"
"""


def test_every_kind_of_outcome_is_told_with_its_message(tmp_path: Path) -> None:
    files = {"test_a.py": OUTCOMES, "test_b.py": "import nothing_such"}
    files["test_c.py"] = "import pytest\npytest.skip('no triton', allow_module_level=True)\n"
    where = toy_tree(tmp_path, files)
    ran = run(where, toy_group(3), time.monotonic() + 100)
    assert ran.problem == ""
    found = {name.rpartition("::")[2]: one for name, one in ran.outcomes.items()}
    for name, words in (
        ("test_passes[a-b]", "passed"),
        ("test_passes[x y]", "passed"),
        ("test_passes[*]", "passed"),
        ("test_fails", "failed (ValueError: the failure)"),
        ("test_setup", 'failed (failed on setup with "RuntimeError: no setup")'),
        ("test_teardown", 'failed (failed on teardown with "RuntimeError: no teardown")'),
        ("test_skips", "skipped (no reason)"),
        ("test_marked", "skipped (marked)"),
        ("test_subtests", "failed (AssertionError: in a subtest"),
        ("tests.test_b", "failed (collection failure)"),
        ("tests.test_c", "skipped (collection skipped)"),
    ):
        assert words in str(found.pop(name))
    assert not found
    says = {"test_fails": "OSError: the cause", "tests.test_b": "No module named 'nothing_such'"}
    says |= {"test_setup": "no setup", "test_teardown": "no teardown", "test_subtests": "subtest"}
    assert check(where, toy_group(3, failed=(Failures("So.", says),))) == []


def test_any_other_outcome_is_a_difference(tmp_path: Path) -> None:
    text = 'import pytest\n@pytest.mark.parametrize("n", [1, 2])\ndef test_a(n): assert n == {}\n'
    text += "def test_b(): pass\n"
    where = toy_tree(tmp_path, {"test_a.py": text.format(1)})
    known = {"failed": (Failures("So.", {"test_a": "assert 2 == 1"}),)}
    assert check(where, toy_group(2, **known)) == []
    assert check(where, toy_group(1, **known)) == ["2 tests passed, expected 1"]
    (found,) = check(where, toy_group(2))
    assert "::test_a[2]: failed (" in found
    (found,) = check(where, toy_group(2, failed=(Failures("So.", {"test_a": "2 == 3"}),)))
    assert "expected to say '2 == 3'; it is: failed" in found
    (found,) = check(where, toy_group(1, **known), "-k", "test_b")
    assert found == "test_a: no test failed"
    (found,) = check(where, toy_group(1), "-k", "nothing_of_the_sort")
    assert "pytest ended by code 5" in found


def test_a_compared_group_runs_twice_and_differs_where_the_plugin_matters(tmp_path: Path) -> None:
    text = "def test_one(): pass\ndef test_bad(): assert 0\ndef test_ours():\n"
    text += "    from importlib.metadata import entry_points\n"
    text += "    assert entry_points(group='vllm.platform_plugins', name='moe_nvlink')\n"
    where = toy_tree(tmp_path, {"test_a.py": text})
    (found,) = check(where, toy_group(2, compared=True))
    assert "test_ours: with the plugin passed, without it failed" in found
    assert check(where, toy_group(1, compared=True), "-k", "not ours") == []
    passed = Outcome("passed")
    (found,) = between({"a": passed, "b": passed}, {"a": passed})
    assert found == "b: with the plugin passed, without it not run"


@pytest.mark.parametrize(
    ("dies", "ending"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "ended by SIGSEGV"),
        ("os._exit(0)", "ended by code 0"),
        ("request.addfinalizer(lambda: os._exit(0))", "ended by code 0"),
    ],
)
def test_a_process_that_ends_early_is_a_difference(tmp_path: Path, dies: str, ending: str) -> None:
    """Its log says in which test."""
    text = f"import os, signal\ndef test_dies(request): {dies}\n"
    where = toy_tree(tmp_path, {"test_a.py": "def test_dies(): pass\n"})
    assert check(where, toy_group(1)) == []
    (where.tree / "tests/test_a.py").write_text(text)
    (found,) = check(where, toy_group(1), "-v")
    assert ending in found
    assert "::test_dies" in (where.logs / "toy.log").read_text()


def test_a_test_that_takes_too_long_fails_and_the_next_runs(tmp_path: Path) -> None:
    text = "import time\ndef test_slow(): time.sleep(600)\ndef test_next(): pass\n"
    where = toy_tree(tmp_path, {"test_a.py": text})
    known = (Failures("So.", {"test_slow": "Timeout"}),)
    assert check(where, toy_group(1, failed=known, test_timeout_s=5)) == []  # 5: on a busy machine


def test_a_run_for_which_vllm_has_not_taken_our_platform_says_nothing(tmp_path: Path) -> None:
    where = toy_tree(tmp_path, {"conftest.py": "", "test_a.py": "def test_one(): pass\n"})
    (found,) = check(where, toy_group(1))
    assert "our platform plugin was not taken by vLLM in this run" in found
    (where.tree / "tests" / "conftest.py").write_text(CONFTEST.replace("if importlib", "if 1 or i"))
    ran = run(where, toy_group(1), time.monotonic() + 100, plugin=False)
    assert "our platform plugin was taken by vLLM in this run" in ran.problem
