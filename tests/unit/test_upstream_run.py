"""The processes of upstream runs: what they see, and what is known of them when they crash."""

from __future__ import annotations

import itertools
import os
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.unit.upstream_toys import ASKED, CONFTEST, run_toy, toy_group, toy_tree
from tests.upstream import run as running
from tests.upstream import settings
from tests.upstream.groups import Device, Plugin
from tests.upstream.outcomes import Outcome, Result, read_run
from tests.upstream.run import Job, Part, Ran, environment, is_below, jobs_of, run

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
    said = {name: result.outcome for name, result in results.items()}
    assert said == {
        "test_passes[a-b]": Outcome.PASSED,
        "test_passes[x y]": Outcome.PASSED,
        "test_passes[*]": Outcome.PASSED,
        "test_fails": Outcome.FAILED,
        "test_setup": Outcome.FAILED,
        "test_teardown": Outcome.FAILED,
        "test_skips": Outcome.SKIPPED,
        "test_marked": Outcome.SKIPPED,
        "test_xfails": Outcome.FAILED,
        "test_xpasses": Outcome.PASSED,
        "test_subtests": Outcome.FAILED,
        "tests/test_b.py": Outcome.FAILED,
        "tests/test_c.py": Outcome.SKIPPED,
    }
    for name, words in {
        "test_fails": ["ValueError: the failure", "OSError: the cause"],
        "test_setup": ["setup: RuntimeError: no setup"],
        "test_teardown": ["teardown: RuntimeError: no teardown"],
        "test_skips": ["Skipped: no reason"],
        "test_marked": ["marked"],
        "test_xfails": ["vLLM expects this failure: known"],
        "test_xpasses": ["vLLM expected a failure: thought"],
        "test_subtests": ["in a subtest"],
        "tests/test_b.py": ["No module named 'nothing_such'"],
        "tests/test_c.py": ["no triton"],
    }.items():
        assert all(word in results[name].message for word in words), results[name]


def test_a_crash_leaves_tests_that_were_not_run(tmp_path: Path) -> None:
    text = """
import os, signal
def test_before(): pass
def test_crash(): os.kill(os.getpid(), signal.SIGSEGV)
def test_after(): pass
"""
    ran = run_toy(toy_tree(tmp_path, {"test_a.py": text}))
    assert outcomes_of(ran) == {
        "test_before": "passed",
        "test_crash": "not run",
        "test_after": "not run",
    }
    assert "SIGSEGV" in ran.ending
    assert ran.results[f"{A}::test_after"].message == ran.ending


def test_a_crash_in_a_teardown_leaves_its_test_not_run(tmp_path: Path) -> None:
    text = """
import os, pytest

@pytest.fixture
def crashes():
    yield
    os._exit(0)

def test_crash(crashes): pass
"""
    assert outcomes_of(run_toy(toy_tree(tmp_path, {"test_a.py": text}))) == {
        "test_crash": "not run"
    }


def test_a_run_that_stops_by_itself_says_so(tmp_path: Path) -> None:
    text = "def test_bad(): assert False\ndef test_later(): pass\n"
    ran = run_toy(toy_tree(tmp_path, {"test_a.py": text}), "tests", "-x")
    assert ran.results[f"{A}::test_later"] == Result(Outcome.NOT_RUN, "pytest stopped before it")


def test_an_exit_in_the_middle_is_not_taken_for_the_end(tmp_path: Path) -> None:
    """The exit code alone says that all is well."""
    text = "import os\ndef test_exit(): os._exit(0)\ndef test_after(): pass\n"
    ran = run_toy(toy_tree(tmp_path, {"test_a.py": text}))
    assert outcomes_of(ran) == {"test_exit": "not run", "test_after": "not run"}


def test_a_test_that_takes_too_long_fails_and_the_next_runs(tmp_path: Path) -> None:
    text = "import time\ndef test_slow(): time.sleep(600)\ndef test_next(): pass\n"
    where = toy_tree(tmp_path, {"test_a.py": text})
    group = replace(toy_group(), test_timeout_s=5)  # for the next one, on a busy machine
    ran = run(where, Job(Part(group, group.arguments)))
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
    ran = run(where, Job(Part(group, group.arguments)))
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
    where = toy_tree(tmp_path, files)
    group = toy_group(*places)
    leave = ("tests/*::test_two", "tests/deep/*.py")
    ran = run(where, Job(Part(group, group.arguments), leave))
    assert ran.results == {
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
    assert os.environ["MOE_NVLINK_CACHE_DIR"] == "/kernels"
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    assert os.environ["VLLM_CACHE_ROOT"].endswith("/moe_nvlink/upstream/vllm")
    with pytest.raises(OSError):
        urllib.request.urlopen("http://vllm.example/", timeout=5)
"""
    monkeypatch.setenv("VLLM_FOREIGN", "1")
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("MOE_NVLINK_DISPATCH", "bf16")
    monkeypatch.setenv("MOE_NVLINK_CACHE_DIR", "/kernels")
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "cpu")
    monkeypatch.setenv("VLLM_PLUGINS", "")
    monkeypatch.setenv("PYTEST_ADDOPTS", "--collect-only")
    ran = run_toy(toy_tree(tmp_path, {"test_a.py": text}))
    assert ran.results == {f"{A}::test_sees": Result(Outcome.PASSED)}


def test_without_the_plugin_our_package_is_not_there(tmp_path: Path) -> None:
    text = """
import importlib.metadata, multiprocessing, pytest, subprocess, sys

def ours():
    return len(importlib.metadata.entry_points(group="vllm.platform_plugins", name="moe_nvlink"))

def test_with(): assert ours() == 1

def test_without():
    assert ours() == 0
    code = "import moe_nvlink_plugin"
    assert subprocess.run([sys.executable, "-c", code]).returncode != 0
    with pytest.raises(ImportError):
        import moe_nvlink_plugin
"""
    where = toy_tree(tmp_path, {"test_a.py": text})
    assert outcomes_of(run_toy(where)) == {"test_with": "passed", "test_without": "failed"}
    without = run_toy(where, plugin=False)
    assert outcomes_of(without) == {"test_with": "failed", "test_without": "passed"}
    assert without.ending == ""


@pytest.mark.parametrize(
    ("conftest", "of_selected", "of_installed"),
    [
        ("", "did not take our platform plugin", "did not ask our platform plugin"),
        (ASKED, "did not take our platform plugin", ""),  # another platform is active
        (CONFTEST, "", ""),
    ],
)
def test_a_run_for_which_vllm_did_not_take_our_platform_says_nothing(
    tmp_path: Path, conftest: str, of_selected: str, of_installed: str
) -> None:
    files = {"conftest.py": conftest, "test_a.py": "def test_one(): pass\n"}
    where = toy_tree(tmp_path, files)
    for plugin, words in ((Plugin.SELECTED, of_selected), (Plugin.INSTALLED, of_installed)):
        group = toy_group(plugin=plugin)
        ending = run(where, Job(Part(group, group.arguments))).ending
        assert ending == (words and f"vLLM {words} in this run")


def test_gpus_are_hidden_from_runs_on_cpus_alone(tmp_path: Path) -> None:
    where = toy_tree(tmp_path, {})
    job = Job(Part(toy_group(), ()))
    on_cpu = environment(where, job, tmp_path)
    assert on_cpu["CUDA_VISIBLE_DEVICES"] == ""
    assert on_cpu["MOE_NVLINK_UPSTREAM_DEVICE"] == "cpu"
    on_gpu = environment(replace(where, device=Device.GPU, gpus=2), job, tmp_path)
    assert on_gpu.get("CUDA_VISIBLE_DEVICES") == os.environ.get("CUDA_VISIBLE_DEVICES")
    assert "VLLM_CPU_KVCACHE_SPACE" not in on_gpu
    assert on_gpu["MOE_NVLINK_UPSTREAM_GPUS"] == "2"


def test_avx512_is_hidden_with_the_plugin_and_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what the user says of torch's own kernels is neither added to that nor left in a run."""
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    where = replace(toy_tree(tmp_path, {}), without_avx512=True)
    group = toy_group(plugin=Plugin.COMPARED)
    for job in jobs_of(Part(group, group.arguments), ()).values():
        own = environment(where, job, tmp_path)
        assert own["PYTHONPATH"].split(os.pathsep)[0].endswith("hiding")
        assert own[settings.HIDE] == ("avx512" if job.plugin else "plugin,avx512")
        assert own["ATEN_CPU_CAPABILITY"] == "avx2"
        seen = environment(replace(where, without_avx512=False), job, tmp_path)
        assert seen[settings.HIDE] == ("" if job.plugin else "plugin")
        assert "ATEN_CPU_CAPABILITY" not in seen


def test_a_break_reaches_the_run_with_the_plugin_alone(tmp_path: Path) -> None:
    where = replace(toy_tree(tmp_path, {}), broken="dropped-row")
    group = toy_group(plugin=Plugin.COMPARED)
    with_it, without = jobs_of(Part(group, group.arguments), ()).values()
    line = running.command(where, with_it, tmp_path, tmp_path)
    assert line[line.index(f"{running.PACKAGE}.breaks") - 1] == "-p"
    assert f"{running.PACKAGE}.breaks" not in running.command(where, without, tmp_path, tmp_path)
    assert environment(where, with_it, tmp_path)["MOE_NVLINK_UPSTREAM_BREAK"] == "dropped-row"


@pytest.mark.parametrize(
    ("place", "node", "expected"),
    [
        ("tests/a", "tests/a/test_b.py::test_c", True),
        ("tests/a/", "tests/a/test_b.py::test_c", True),
        ("tests/a.py", "tests/a.py::test_c", True),
        ("tests/a.py::test_c", "tests/a.py::test_c[1]", True),
        ("tests/a.py::test_c", "tests/a.py::test_c", True),
        ("tests/a.py::Group", "tests/a.py::Group::test_c", True),
        ("tests/a", "tests/ab/test_b.py::test_c", False),
        ("tests/a.py::test_c", "tests/a.py::test_cd", False),
        ("tests/a.py::test_c[1]", "tests/a.py::test_c[12]", False),
        ("tests/a.py::test_c", "tests/a.py", False),
    ],
)
def test_what_is_below_a_place(place: str, node: str, expected: bool) -> None:
    assert is_below(place, node) is expected


def test_a_report_that_was_cut_is_none(tmp_path: Path) -> None:
    """The process was killed while it wrote."""
    report, chosen = tmp_path / "reports", tmp_path / "chosen"
    report.write_text('{"nodeid": "t.py::test", "when": "teardown", "outcome": "pas')
    chosen.write_text('{"chosen": ["t.py::test"], "left_out": []}')
    assert read_run(report, chosen, "killed") == {"t.py::test": Result(Outcome.NOT_RUN, "killed")}
    assert read_run(tmp_path / "none", tmp_path / "nothing", "killed") == {}
