"""The processes of upstream runs: what they see, and what is known of them when they crash."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.instruments.upstream.upstream_toys import (
    ASKED,
    CONFTEST,
    run_toy,
    toy_group,
    toy_tree,
)
from tests.upstream.groups import Plugin
from tests.upstream.run import Job, Ran, run
from tests.upstream.within.moe_nvlink_upstream_expected import Rule

pytestmark = pytest.mark.long

A = "tests/test_a.py"


def said_of(ran: Ran) -> dict[str, str]:
    """What was found of each test, where there is no rule for any."""
    split = (line.partition(": no rule fits; it is: ") for line in ran.differences)
    return {node.removeprefix(A + "::"): said for node, _, said in split}


def test_every_kind_of_outcome_is_told_with_its_message(tmp_path: Path) -> None:
    text = """
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

@pytest.mark.xfail(reason="known")
def test_xfails(): assert False

@pytest.mark.xfail(reason="thought")
def test_xpasses(): pass

def test_subtests(subtests):
    with subtests.test("one"):
        assert False, "in a subtest"
"""
    files = {"test_a.py": text, "test_b.py": "import nothing_such"}
    files["test_c.py"] = "import pytest\npytest.skip('no triton', allow_module_level=True)\n"
    where = toy_tree(tmp_path, files)
    said = said_of(run_toy(where))
    for name, words in (
        ("test_passes[a-b]", "passed"),
        ("test_passes[x y]", "passed"),
        ("test_passes[*]", "passed"),
        ("test_fails", "failed (ValueError: the failure)"),
        ("test_setup", "failed (setup: RuntimeError: no setup)"),
        ("test_teardown", "failed (teardown: RuntimeError: no teardown)"),
        ("test_skips", "skipped (Skipped: no reason)"),
        ("test_marked", "marked"),
        ("test_xfails", "failed (vLLM expects this failure: known)"),
        ("test_xpasses", "passed (vLLM expected a failure: thought)"),
        ("test_subtests", "failed (AssertionError: in a subtest"),
        ("tests/test_b.py", "failed"),
        ("tests/test_c.py", "skipped"),
    ):
        assert words in said.pop(name)
    assert not said
    causes = {"test_fails": "OSError: the cause", "test_b.py": "No module named 'nothing_such'"}
    rules = [Rule(f"*{test}", 1, "failed", "So.", says) for test, says in causes.items()]
    found = run_toy(where, rules=(*rules, Rule("*c.py", 1, "cannot run", "So.", "no triton")))
    assert not set(said_of(found)) & {*causes, "tests/test_b.py", "tests/test_c.py"}


@pytest.mark.parametrize(
    ("dies", "ending"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "ended by SIGSEGV before pytest's end"),
        ("os._exit(0)", "ended by code 0 before pytest's end"),
        ("request.addfinalizer(lambda: os._exit(0))", "ended by code 0 before pytest's end"),
    ],
)
def test_a_process_that_ends_early_is_a_difference(tmp_path: Path, dies: str, ending: str) -> None:
    """Its log says in which test."""
    text = f"import os, signal\ndef test_dies(request): {dies}\n"
    ran = run_toy(toy_tree(tmp_path, {"test_a.py": text}), "tests", "-v")
    (found,) = ran.differences
    assert ending in found
    assert ran.output.read_text().count("::test_dies") >= 1


def test_a_test_that_takes_too_long_fails_and_the_next_runs(tmp_path: Path) -> None:
    text = "import time\ndef test_slow(): time.sleep(600)\ndef test_next(): pass\n"
    where = toy_tree(tmp_path, {"test_a.py": text})
    group = replace(toy_group(), test_timeout_s=5)  # for the next one, on a busy machine
    said = said_of(run(where, Job(group, group.arguments)))
    assert said.pop("test_next") == "passed"
    assert "Timeout" in said["test_slow"]


def test_a_run_for_which_vllm_has_not_taken_our_platform_says_nothing(tmp_path: Path) -> None:
    """Where our backend is not chosen, another platform may be active: ours must be asked."""
    where = toy_tree(tmp_path, {"conftest.py": ASKED, "test_a.py": "def test_one(): pass\n"})
    passes = (Rule("*", 1, "passed"),)
    words = "vLLM has {} our platform plugin in this run"
    assert run_toy(where, rules=passes).differences == (words.format("not taken"),)
    installed = Job(toy_group(plugin=Plugin.INSTALLED), ("tests",), passes)
    assert run(where, installed).differences == ()
    (where.tree / "tests" / "conftest.py").write_text("")
    assert run(where, installed).differences == (words.format("not asked"),)
    (where.tree / "tests" / "conftest.py").write_text(CONFTEST.replace("if importlib", "if 1 or i"))
    without = replace(installed, plugin=False)
    assert run(where, without).differences == (words.format("taken"),)
