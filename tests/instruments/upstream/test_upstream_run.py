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
from tests.upstream import run as running
from tests.upstream.expectations import Rule
from tests.upstream.groups import Plugin
from tests.upstream.run import Job, Ran, environment, run

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


def test_tests_before_which_pytest_stops_were_not_run(tmp_path: Path) -> None:
    text = "def test_stops(request): request.session.shouldfail = 'now'\ndef test_after(): pass\n"
    said = said_of(run_toy(toy_tree(tmp_path, {"test_a.py": text})))
    assert said == {"test_stops": "passed", "test_after": "not run (pytest stopped before it)"}


def test_a_test_that_takes_too_long_fails_and_the_next_runs(tmp_path: Path) -> None:
    text = "import time\ndef test_slow(): time.sleep(600)\ndef test_next(): pass\n"
    where = toy_tree(tmp_path, {"test_a.py": text})
    group = replace(toy_group(), test_timeout_s=5)  # for the next one, on a busy machine
    said = said_of(run(where, Job(group, group.arguments)))
    assert said.pop("test_next") == "passed"
    assert "Timeout" in said["test_slow"]


def test_a_process_that_hangs_beyond_its_time_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its children: none may write afterwards."""
    text = """
import signal, subprocess, time
from pathlib import Path

def test_hangs():
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    subprocess.Popen(["sh", "-c", "sleep 600; touch child"])
    Path("hangs").touch()
    time.sleep(600)
"""
    where = toy_tree(tmp_path, {"test_a.py": text})
    monkeypatch.setattr(running, "GRACE_S", 10)
    group = replace(toy_group(), test_timeout_s=5)
    ran = run(where, Job(group, group.arguments))
    assert "before pytest's end" in ran.differences[0]
    assert "in test_hangs" in ran.output.read_text()
    assert (where.tree / "hangs").exists()
    assert not list(tmp_path.rglob("child"))


def test_a_wrong_argument_is_a_difference(tmp_path: Path) -> None:
    ran = run_toy(toy_tree(tmp_path, {"test_a.py": ""}), "tests/test_gone.py")
    assert "pytest ended with code 4" in ran.differences


@pytest.mark.parametrize("places", [["tests"], ["tests/test_a.py", "tests/deep/test_b.py"]])
def test_what_is_left_out_is_neither_run_nor_imported(tmp_path: Path, places: list[str]) -> None:
    files = {
        "test_a.py": "def test_one(): pass\ndef test_two(): raise SystemExit(9)\n",
        "deep/test_b.py": "raise SystemExit(9)",
    }
    left_out = ("tests/*::test_two", "tests/deep/*.py")
    rules = [Rule(tests, 1, "cannot run", "So.", run=False) for tests in left_out]
    where = toy_tree(tmp_path, files)
    job = Job(toy_group(*places), tuple(places), (*rules, Rule("*_one", 1, "passed")), whole=True)
    ran = run(where, job)
    assert ran.differences == ()
    assert ran.outcomes == {"tests.test_a::test_one": "passed"}


def test_the_process_sees_the_tree_and_nothing_of_this_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`tests` is theirs, our pytest settings do not hold, and no hub or network is there."""
    text = """
import os, tests, urllib.request, pytest

def test_sees(request):
    assert tests.__file__ == os.path.join(os.getcwd(), "tests", "__init__.py")
    assert str(request.config.rootpath) == os.getcwd()
    assert request.config.getini("testpaths") == []
    assert "VLLM_FOREIGN" not in os.environ and "PYTEST_ADDOPTS" not in os.environ
    assert "VLLM_TARGET_DEVICE" not in os.environ and "VLLM_PLUGINS" not in os.environ
    assert "LOCAL_RANK" not in os.environ and "MOE_NVLINK_DISPATCH" not in os.environ
    assert "ATEN_CPU_CAPABILITY" not in os.environ
    assert os.environ["MOE_NVLINK_CACHE_DIR"] == "/kernels"
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    assert os.environ["VLLM_CACHE_ROOT"].endswith("/moe_nvlink/upstream/vllm")
    with pytest.raises(OSError):
        urllib.request.urlopen("http://vllm.example/", timeout=5)
"""
    foreign = {"VLLM_FOREIGN": "1", "LOCAL_RANK": "3", "VLLM_TARGET_DEVICE": "cpu"}
    foreign |= {"MOE_NVLINK_DISPATCH": "bf16", "MOE_NVLINK_CACHE_DIR": "/kernels"}
    foreign |= {"VLLM_PLUGINS": "", "PYTEST_ADDOPTS": "--collect-only", "ATEN_CPU_CAPABILITY": "x"}
    for name, value in foreign.items():
        monkeypatch.setenv(name, value)
    assert said_of(run_toy(toy_tree(tmp_path, {"test_a.py": text}))) == {"test_sees": "passed"}


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


def test_a_break_reaches_the_run_with_the_plugin_alone(tmp_path: Path) -> None:
    where = replace(toy_tree(tmp_path, {}), broken="dropped-row")
    job = Job(toy_group(plugin=Plugin.COMPARED), ("tests",))
    files = dict.fromkeys(("expected.json", "xml"), tmp_path)
    line = running.command(where, job, files)
    assert line[line.index(f"{running.PACKAGE}.breaks") - 1] == "-p"
    without = running.command(where, replace(job, plugin=False), files)
    assert f"{running.PACKAGE}.breaks" not in without
    assert environment(where, job, tmp_path)["MOE_NVLINK_UPSTREAM_BREAK"] == "dropped-row"
