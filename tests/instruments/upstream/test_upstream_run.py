"""The processes of upstream runs: what they see, and what is known of them when they crash."""

from __future__ import annotations

import itertools
import os
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.instruments.upstream.upstream_toys import ASKED, run_toy, toy_group, toy_tree
from tests.upstream import run as running
from tests.upstream.groups import Plugin
from tests.upstream.outcomes import Outcome, Result, read_run
from tests.upstream.run import Job, Ran, environment, run

A = "tests/test_a.py"


def outcomes_of(ran: Ran) -> dict[str, str]:
    return {node.split("::")[-1]: result.outcome.value for node, result in ran.results.items()}


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
    ran = run_toy(toy_tree(tmp_path, files))
    assert ran.ending == ""
    results = {node.removeprefix(A + "::"): result for node, result in ran.results.items()}
    failed, skipped, passed = Outcome.FAILED, Outcome.SKIPPED, Outcome.PASSED
    for name, outcome, words in (
        ("test_passes[a-b]", passed, ""),
        ("test_passes[x y]", passed, ""),
        ("test_passes[*]", passed, ""),
        ("test_fails", failed, "ValueError: the failure\nOSError: the cause"),
        ("test_setup", failed, "setup: RuntimeError: no setup"),
        ("test_teardown", failed, "teardown: RuntimeError: no teardown"),
        ("test_skips", skipped, "Skipped: no reason"),
        ("test_marked", skipped, "marked"),
        ("test_xfails", failed, "vLLM expects this failure: known"),
        ("test_xpasses", passed, "vLLM expected a failure: thought"),
        ("test_subtests", failed, "in a subtest"),
        ("tests/test_b.py", failed, "No module named 'nothing_such'"),
        ("tests/test_c.py", skipped, "no triton"),
    ):
        result = results.pop(name)
        assert result.outcome is outcome
        assert words in result.message, result
    assert not results


@pytest.mark.parametrize(
    ("dies", "expected", "ending", "why"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "not run", "ended by SIGSEGV", "ended by SIGSEGV"),
        ("os._exit(0)", "not run", "", "the process ended before it"),  # whose exit code is good
        ("request.addfinalizer(lambda: os._exit(0))", "not run", "", "the process ended before it"),
        ("request.session.shouldfail = 'now'", "passed", "", "pytest stopped before it"),
    ],
)
def test_a_run_that_stops_leaves_tests_that_were_not_run(
    tmp_path: Path, dies: str, expected: str, ending: str, why: str
) -> None:
    text = "import os, signal\ndef test_before(): pass\n"
    text += f"def test_dies(request): {dies}\ndef test_after(): pass\n"
    ran = run_toy(toy_tree(tmp_path, {"test_a.py": text}))
    assert outcomes_of(ran) == {
        "test_before": "passed",
        "test_dies": expected,
        "test_after": "not run",
    }
    assert ending in ran.ending
    assert why in ran.results[f"{A}::test_after"].message


def test_a_test_that_takes_too_long_fails_and_the_next_runs(tmp_path: Path) -> None:
    text = "import time\ndef test_slow(): time.sleep(600)\ndef test_next(): pass\n"
    where = toy_tree(tmp_path, {"test_a.py": text})
    group = replace(toy_group(), test_timeout_s=5)  # for the next one, on a busy machine
    ran = run(where, Job(group, group.arguments))
    assert outcomes_of(ran) == {"test_slow": "failed", "test_next": "passed"}
    assert "Timeout" in ran.results[f"{A}::test_slow"].message


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
    hangs = where.tree / "hangs"
    looks = itertools.count()

    def quick() -> float:
        """A clock that runs by 30 s at each look, once the test hangs."""
        return time.monotonic() + (30 * next(looks) if hangs.exists() else 0)

    monkeypatch.setattr(running, "time", SimpleNamespace(monotonic=quick, sleep=time.sleep))
    group = replace(toy_group(), test_timeout_s=1)
    ran = run(where, Job(group, group.arguments))
    assert outcomes_of(ran) == {"test_hangs": "not run"}
    assert "ended after 121 s without a report" in ran.ending
    assert hangs.exists()
    assert not list(tmp_path.rglob("child"))


def test_a_wrong_argument_is_an_ending(tmp_path: Path) -> None:
    ran = run_toy(toy_tree(tmp_path, {"test_a.py": ""}), "tests/test_gone.py")
    assert "ended with code 4" in ran.ending


@pytest.mark.parametrize("places", [["tests"], ["tests/test_a.py", "tests/deep/test_b.py"]])
def test_what_is_left_out_is_neither_run_nor_imported(tmp_path: Path, places: list[str]) -> None:
    files = {
        "test_a.py": "def test_one(): pass\ndef test_two(): raise SystemExit(9)\n",
        "deep/test_b.py": "raise SystemExit(9)",
    }
    leave = ("tests/*::test_two", "tests/deep/*.py")
    assert run_toy(toy_tree(tmp_path, files), *places, leave_out=leave).results == {
        f"{A}::test_one": Result(Outcome.PASSED),
        f"{A}::test_two": Result(Outcome.LEFT_OUT),
        "tests/deep/test_b.py": Result(Outcome.LEFT_OUT),
    }


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
    ran = run_toy(toy_tree(tmp_path, {"test_a.py": text}))
    assert ran.results == {f"{A}::test_sees": Result(Outcome.PASSED)}


def test_a_run_for_which_vllm_did_not_take_our_platform_says_nothing(tmp_path: Path) -> None:
    """Where our backend is not chosen, another platform may be active: ours must be asked."""
    where = toy_tree(tmp_path, {"conftest.py": ASKED, "test_a.py": "def test_one(): pass\n"})
    assert run_toy(where).ending == "vLLM did not take our platform plugin in this run"
    installed = Job(toy_group(plugin=Plugin.INSTALLED), ("tests",))
    assert run(where, installed).ending == ""
    (where.tree / "tests" / "conftest.py").write_text("")
    assert run(where, installed).ending == "vLLM did not ask our platform plugin in this run"
    without = replace(installed, plugin=False)
    assert "did take" in running._vacuous(without, {"platform": True, "asked": True})
    assert running._vacuous(without, {"platform": False, "asked": False}) == ""


def test_gpus_are_hidden_from_runs_on_cpus_alone(tmp_path: Path) -> None:
    where = toy_tree(tmp_path, {})
    job = Job(toy_group(), ())
    on_cpu = environment(where, job, tmp_path)
    assert on_cpu["CUDA_VISIBLE_DEVICES"] == ""
    assert on_cpu["MOE_NVLINK_UPSTREAM_GPUS"] == "0"
    on_gpu = environment(replace(where, gpus=2), job, tmp_path)
    assert on_gpu.get("CUDA_VISIBLE_DEVICES") == os.environ.get("CUDA_VISIBLE_DEVICES")
    assert "VLLM_CPU_KVCACHE_SPACE" not in on_gpu
    assert on_gpu["MOE_NVLINK_UPSTREAM_GPUS"] == "2"


def test_a_break_reaches_the_run_with_the_plugin_alone(tmp_path: Path) -> None:
    where = replace(toy_tree(tmp_path, {}), broken="dropped-row")
    job = Job(toy_group(plugin=Plugin.COMPARED), ("tests",))
    line = running.command(where, job, tmp_path, tmp_path)
    assert line[line.index(f"{running.PACKAGE}.breaks") - 1] == "-p"
    without = running.command(where, replace(job, plugin=False), tmp_path, tmp_path)
    assert f"{running.PACKAGE}.breaks" not in without
    assert environment(where, job, tmp_path)["MOE_NVLINK_UPSTREAM_BREAK"] == "dropped-row"


def test_a_report_that_was_cut_is_none(tmp_path: Path) -> None:
    """The process was killed while it wrote."""
    report = tmp_path / "reports"
    report.write_text('{"nodeid": "t.py::test", "when": "teardown", "outcome": "pas')
    said = {"chosen": ["t.py::test"], "left_out": []}
    assert read_run(report, said, "killed") == {"t.py::test": Result(Outcome.NOT_RUN, "killed")}
    assert read_run(tmp_path / "none", {}, "killed") == {}
