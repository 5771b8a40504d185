"""benchmarks/on_gpu.sh without a GPU: every stage rehearsed; what becomes of steps that fail."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import common
from benchmarks.moe_comm import flashinfer_api, options
from moe_nvlink_plugin import version
from tests.gpu.day import stages
from tests.gpu.day.steps import AGAIN_S, STAGES, START_S, STEPS, Stage, Step

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.timeout(1200)


def run(folder: Path, *arguments: str, **variables: str) -> tuple[int, str]:
    """Exit status of on_gpu.sh, and all it said."""
    nothing_carried = {"CARRY": str(folder / "no-such-folder")}
    done = subprocess.run(
        ["bash", str(ROOT / "benchmarks/on_gpu.sh"), *arguments],
        env=os.environ
        | {"OUT": str(folder), "PYTHON": sys.executable}
        | nothing_carried
        | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=1150,
    )
    return done.returncode, done.stdout


def outcomes(folder: Path, stage: str, kind: str = "rehearsal") -> dict[str, str]:
    """Step -> what the summary says of it."""
    (summary,) = folder.glob(f"*-{kind}-{stage}.json")
    return {step["step"]: step["outcome"] for step in json.loads(summary.read_text())["steps"]}


def result(folder: Path, name: str, kind: str = "rehearsal") -> Any:
    """What a benchmark has written, out of the stage's archive."""
    (path,) = folder.glob(f"*-{kind}-*.tar.gz")
    with tarfile.open(path) as archive:
        (member,) = [each for each in archive.getnames() if each.endswith(f"-{kind}-{name}.json")]
        file = archive.extractfile(member)
        assert file is not None
        return json.loads(file.read())


# The stages, small, from the first command to the last.


def test_smoke_rehearsed(tmp_path: Path) -> None:
    status, said = run(tmp_path, "--rehearse", "smoke", BENCH_COMMIT="0123abc")
    assert status == 0, said
    (report,) = tmp_path.glob("*-rehearsal-smoke.txt")
    assert said == report.read_text(), "the report is what was printed"
    assert re.search(r"^commit   0123abc$", said, re.MULTILINE)
    assert "carried  nothing; benchmarks/carry.sh" in said
    assert "CPU ranks: will work" in said
    assert said.count("all rounds verified") == 1, "the sanitizers' program, on the stand-in"
    skipped = {"real", "two-processes"}
    expected = {name: "not run" if name in skipped else "passed" for name in outcomes_of("smoke")}
    assert outcomes(tmp_path, "smoke") == expected
    assert re.search(r"^  real +not run .* 0 passed, \d+ skipped: no CUDA device$", said, re.M)
    assert said.endswith("all well\n")
    assert [row["tokens"] for row in result(tmp_path, "emulated")["rows"]] == [1, 4]


def test_numbers_rehearsed(tmp_path: Path) -> None:
    status, said = run(tmp_path, "--rehearse", "numbers")
    assert status == 0, said
    assert outcomes(tmp_path, "numbers") == dict.fromkeys(outcomes_of("numbers"), "passed")
    endings = sorted(path.name.partition("-rehearsal-")[2] for path in tmp_path.iterdir())
    assert endings == ["numbers.json", "numbers.tar.gz", "numbers.txt"], "a machine gives back 8"
    constants = result(tmp_path, "constants")["rows"]
    assert not [row for row in constants if "error" in row]
    emulated = result(tmp_path, "moe-comm")
    assert emulated["options"]["router"] == "perfect"
    for row in emulated["rows"]:
        both = (row["both"], row["plain_launches"]["both"]) if "plain_launches" in row else ()
        assert all(times["median_us"] > 0 for times in both)
    assert any("NVLink" in text for text in emulated["not_measured"])
    found = {row["name"]: row for row in result(tmp_path, "recipes")["rows"]}
    per_row = {name: row["wire_bytes_per_token"] for name, row in found.items()}
    # Of 256 elements with 8 ids and weights; in nvfp4 half a byte each, and 16 scales.
    assert per_row["nvfp4 fused"] / per_row["fp8_tensor fused"] == (128 + 16 + 64) / (256 + 64)
    (group,) = result(tmp_path, "lm-head")["groups"]
    weights = {row["split_weight_bytes"] / row["replicated_weight_bytes"] for row in group["rows"]}
    assert weights == {512 / 1000}, "half of the vocabulary, rounded up to 16"
    launch = result(tmp_path, "launch")
    assert launch["driver"].startswith("stand-in, runs the kernels"), "whose faults it would tell"
    assert {"dispatch: MoeAllToAll", "combine: torch op"} < launch["rows"].keys()


def test_breadth_rehearsed(tmp_path: Path) -> None:
    status, said = run(tmp_path, "--rehearse", "breadth")
    assert status == 0, said
    found = outcomes(tmp_path, "breadth")
    assert list(found) == outcomes_of("breadth")
    assert {name for name, outcome in found.items() if outcome == "passed"} == {
        *("racecheck", "memcheck", "synccheck", "initcheck")
    }
    assert re.search(r"^\[cases\] ", said, re.MULTILINE), "which of those side by side said it"
    for tool in ("racecheck", "memcheck", "synccheck"):
        assert re.search(rf"--tool {tool} .*--kernel-name kernel_substring=moe_nvlink", said)


def outcomes_of(stage: str) -> list[str]:
    return [step.name for group in STAGES[stage].steps for step in group]


def test_again_runs_what_is_named(tmp_path: Path) -> None:
    status, said = run(tmp_path, "--rehearse", "again", "initcheck", "synccheck")
    assert status == 0, said
    assert outcomes(tmp_path, "again") == {"initcheck": "passed", "synccheck": "passed"}


def test_without_a_compiler(tmp_path: Path) -> None:
    """What a rehearsal itself needs; on a GPU only the launch benchmark does."""
    names = ("launch", "synccheck")
    status, said = run(tmp_path, "--rehearse", "again", *names, MOE_NVLINK_CXX="no-such-compiler")
    assert status == 2, said
    assert "'no-such-compiler' not found" in said
    assert "nothing could run: the stand-in for the driver could not be built" in said


# What the plan promises.


def test_limits_add_up() -> None:
    """What all steps may take at most is what the stage has; and what a lease has."""
    for stage in STAGES.values():
        longest = sum(max(step.limit_s for step in group) for group in stage.steps)
        assert START_S + longest <= stage.limit_s, stage.name
    limits = {name: stage.limit_s for name, stage in STAGES.items()}
    assert limits == {"smoke": 240, "numbers": 530, "breadth": 540}
    assert sum(limits.values()) + AGAIN_S <= 30 * 60
    of_all = [step for stage in STAGES.values() for group in stage.steps for step in group]
    assert {step.name: step for step in of_all} == STEPS
    assert all(STEPS[step.name] == step for step in of_all), "one name, one step"


def test_benchmarks_take_the_options_of_the_stages() -> None:
    """Also where a rehearsal replaces them."""
    for step in STEPS.values():
        if "bench_moe_comm.py" in step.command[0]:
            request = options.parse("", step.command[1:])
            ranks = 2 if step.name.startswith("two-ranks") else 8
            assert request.options.ep_size == ranks
            assert (request.options.device, request.options.emulate_ranks) == ("cuda", True)


def test_again_refuses(tmp_path: Path) -> None:
    for arguments, wanted in (
        (["again", "nosuch"], "no step is called nosuch; the steps are doctor, real, "),
        (["again"], "again which step?"),
        (["smoke", "doctor"], "smoke takes no names; on_gpu.sh again doctor does"),
        (
            ["again", "cases", "rounds", "processes"],
            f"may take 640 s, and one call has {AGAIN_S:g} s",
        ),
        (["everything"], "invalid choice: 'everything'"),
    ):
        status, said = run(tmp_path, *arguments)
        assert status == 2
        assert wanted in said
    assert not list(tmp_path.iterdir()), "nothing was begun"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu(tmp_path: Path) -> None:
    carried = tmp_path / "carried"
    (carried / "kernels").mkdir(parents=True)
    (carried / "kernels/0123.cubin").write_bytes(b"code")
    (carried / "commit").write_text("89abcde-dirty\n")
    (carried / "unknown").mkdir()
    cache = tmp_path / "cache"
    status, said = run(tmp_path, "smoke", CARRY=str(carried), MOE_NVLINK_CACHE_DIR=str(cache))
    assert status == 2
    assert "nothing could run: torch sees no CUDA device" in said
    assert "carried  1 kernels, no FlashInfer (benchmarks/carry.sh packs it)" in said
    assert (cache / "0123.cubin").read_bytes() == b"code"
    assert [path.name for path in cache.glob("*") if path.suffix != ".lock"] == ["0123.cubin"]
    assert re.search(r"^commit   89abcde-dirty$", said, re.MULTILINE), "not of the copy's history"
    (summary,) = tmp_path.glob("*-gpu-smoke.json")
    assert "no CUDA device" in json.loads(summary.read_text())["nothing_could_run"]


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="a copy without its history")
def test_the_commit_is_carried(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        return subprocess.check_output(["git", *arguments], cwd=ROOT, text=True).strip()

    carry = ["bash", str(ROOT / "benchmarks/carry.sh"), "--commit"]
    subprocess.run(carry, env=os.environ | {"CARRY": str(tmp_path)}, check=True)
    dirty = "-dirty" if git("diff", "--name-only", "HEAD") else ""
    assert (tmp_path / "commit").read_text() == f"{git('rev-parse', '--short', 'HEAD')}{dirty}\n"
    assert [path.name for path in tmp_path.iterdir()] == ["commit"]


# Steps that go wrong.


#: Runs a stage as on_gpu.sh does, on a machine that has a GPU.
TRIED = """
import sys
from tests.gpu.day import stages
from tests.gpu.day.steps import STAGES, Stage, Step
stages.look = lambda: {{"missing": [], "gpu": "NVIDIA H100 80GB HBM3"}}
stages.time.strftime = lambda *_given: "2026-01-01"
STAGES["tried"] = {stage!r}
sys.argv[1:] = ["tried", "--results", {folder!r}, *{more!r}]
stages.main()
"""

Conduct = Callable[..., tuple[int, dict[str, Any], str]]


def start(
    folder: Path, *groups: tuple[Step, ...], limit_s: float = 100, more: Sequence[str] = ()
) -> subprocess.Popen[str]:
    """A process of its own: nothing that other tests leave behind reaches it."""
    stage = Stage("tried", limit_s, groups)
    program = TRIED.format(stage=stage, folder=str(folder), more=[*more])
    return subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )


@pytest.fixture
def conduct(tmp_path: Path) -> Conduct:
    """Runs a stage to its end: its exit status, each step's outcome, all that was said."""

    def conducted(*groups: tuple[Step, ...], limit_s: float = 100) -> tuple[int, Any, str]:
        process = start(tmp_path, *groups, limit_s=limit_s)
        said, _none = process.communicate(timeout=500)
        (summary,) = tmp_path.glob("*-h100-tried.json")
        steps = {step.pop("step"): step for step in json.loads(summary.read_text())["steps"]}
        return process.returncode, steps, said

    return conducted


def script(name: str, text: str, limit_s: float = 60, *more: str) -> Step:
    return Step(name, limit_s, ("-c", text, *more))


def test_a_failed_step_is_named_and_the_others_run(conduct: Conduct) -> None:
    status, steps, said = conduct(
        (script("first", "raise SystemExit('no such thing')"),),
        (script("second", "print('done')"),),
    )
    assert status == 1
    assert (steps["first"]["outcome"], steps["second"]["outcome"]) == ("failed", "passed")
    assert steps["first"]["detail"] == "exit status 1"
    assert "no such thing" in said
    assert said.endswith("NOT WELL: first; again: on_gpu.sh again first\n")


#: Starts a process that heeds no ^C, says which, and waits for ever.
STUCK = """
import subprocess, sys, time
deaf = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(300)"
print("deaf", subprocess.Popen([sys.executable, "-c", deaf]).pid, flush=True)
time.sleep(300)
"""


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


def gone(said: str) -> bool:
    """Whether the processes that were named end within seconds."""
    pids = [int(pid) for pid in re.findall(r"deaf (\d+)", said)]
    assert pids
    give_up = time.monotonic() + 20
    while any(map(is_running, pids)) and time.monotonic() < give_up:
        time.sleep(0.05)
    return not any(map(is_running, pids))


def test_a_stuck_step_is_cut_with_all_its_processes(conduct: Conduct) -> None:
    status, steps, said = conduct((script("stuck", STUCK, 10),), (script("next", ""),))
    assert status == 1
    assert (steps["stuck"]["outcome"], steps["next"]["outcome"]) == ("cut", "passed")
    assert steps["stuck"]["detail"] == "at 10 s"
    assert gone(said)


def test_a_step_that_ends_leaves_no_process(conduct: Conduct) -> None:
    """A rank that still spins would take the GPU's time from the next step."""
    ends = STUCK.replace("time.sleep(300)\n", "")
    status, steps, said = conduct((script("ends", ends),))
    assert (status, steps["ends"]["outcome"]) == (0, "passed")
    assert gone(said)


def test_steps_side_by_side_are_cut_one_by_one(conduct: Conduct) -> None:
    waits = "import time; time.sleep(300)"
    status, steps, said = conduct(
        (script("one", waits, 3), script("two", "print('done')"), script("three", waits, 3)),
    )
    assert status == 1
    assert [steps[name]["outcome"] for name in ("one", "two", "three")] == ["cut", "passed", "cut"]
    assert "[two] done\n" in said


def test_when_the_stages_time_is_over(conduct: Conduct) -> None:
    waits = script("waits", "import time; time.sleep(300)")
    status, steps, _said = conduct((waits,), (script("late", ""),), limit_s=7)
    assert status == 1
    assert (steps["waits"]["outcome"], steps["late"]["outcome"]) == ("cut", "not run")
    assert steps["late"]["detail"] == "the stage's time was over"


#: A benchmark that records each batch, and does not come to the end of the third.
BATCHES = """
import json, os, sys, time
rows = []
for tokens in (1, 4):
    rows.append({"tokens": tokens})
    with open(sys.argv[1] + ".unfinished", "w") as file:
        json.dump({"rows": rows}, file)
    os.replace(file.name, sys.argv[1])
print("deaf", os.getpid(), flush=True)
time.sleep(300)
"""


def test_a_cut_benchmark_keeps_its_batches(conduct: Conduct, tmp_path: Path) -> None:
    status, steps, said = conduct((script("bench", BATCHES, 10, "{results}-bench.json"),))
    assert (status, steps["bench"]["outcome"]) == (1, "cut")
    (file,) = tmp_path.glob("*-h100-bench.json")
    assert steps["bench"]["detail"] == f"at 10 s, 2 rows in {file.name}"
    left = json.loads(file.read_text())
    assert [row["tokens"] for row in left["rows"]] == [1, 4]
    assert gone(said)


def test_what_was_measured_outlives_a_kill(tmp_path: Path) -> None:
    """The machine may end all processes at once; by then the archive holds the batches."""
    scratch, back = tmp_path / "scratch", tmp_path / "back"
    bench = script("bench", BATCHES, 500, "{results}-bench.json")
    process = start(scratch, (bench,), limit_s=600, more=["--back", str(back)])
    archive = back / "2026-01-01-h100-tried.tar.gz"
    give_up = time.monotonic() + 300
    rows: list[Any] = []
    while len(rows) < 2 and time.monotonic() < give_up:
        time.sleep(0.1)
        if archive.exists():
            with contextlib.suppress(ValueError):  # an archive of nothing yet
                rows = result(back, "bench", "h100")["rows"]
    process.kill()
    said, _none = process.communicate(timeout=60)
    for pid in re.findall(r"deaf (\d+)", said):
        os.kill(int(pid), signal.SIGKILL)
    assert len(rows) == 2
    assert result(back, "bench", "h100")["rows"] == rows
    assert "\n== bench\n" in archive.with_name("2026-01-01-h100-tried.txt").read_text()
    assert len(list(back.iterdir())) <= 8, "as many files come back from a lent machine"


def test_an_archive_that_would_be_too_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine does not give it back at all, so the largest files stay away."""
    monkeypatch.setattr(stages, "ARCHIVE_BYTES", 100)
    (tmp_path / "results").mkdir()
    for name, size in (("large.ncu-rep", 90), ("a-gpu-bench.json", 20), ("b.json.unfinished", 1)):
        (tmp_path / "results" / name).write_text("1" * size)
    with stages.Archive(tmp_path / "results", tmp_path / "x-gpu-y.tar.gz") as archive:
        pass
    assert archive.left_out == ["large.ncu-rep"]
    assert result(tmp_path, "bench", "gpu") == int("1" * 20)
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(
    ("gpu", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA GeForce RTX 4090", "4090"),
        ("a GPU", "agpu"),
        (None, "gpu"),
    ],
)
def test_what_a_gpu_is_called_in_file_names(gpu: str | None, expected: str) -> None:
    assert stages.slug(gpu) == expected


def test_a_benchmark_without_a_result_has_failed(conduct: Conduct, tmp_path: Path) -> None:
    """It printed "not measured", say; and what lay there before is not its own."""
    old = tmp_path / "2026-01-01-h100-bench.json"
    old.write_text('{"rows": [1]}')
    os.utime(old, (1e9, 1e9))
    status, steps, _said = conduct((script("bench", "", 60, "{results}-bench.json"),))
    assert (status, steps["bench"]["outcome"]) == (1, "failed")
    assert steps["bench"]["detail"] == f"0 rows in {old.name}"


def test_what_the_machine_cannot_do_is_no_failure(conduct: Conduct) -> None:
    """A tool that its runtime refuses, and a package that was not carried."""
    refuses = "print('the runtime refuses it'); raise SystemExit(77)"
    lacking = Step("lacking", 60, ("-c", ""), needs="no_such_package")
    status, steps, _said = conduct((script("refused", refuses),), (lacking,))
    assert status == 0
    assert {step["outcome"] for step in steps.values()} == {"not run"}
    assert steps["refused"]["detail"] == "the runtime refuses it"
    assert "no_such_package was not carried (benchmarks/carry.sh)" in steps["lacking"]["detail"]


TESTS = """
import pytest
@pytest.mark.skipif({all_skipped}, reason="not here")
def test_fails(): assert False
@pytest.mark.skip(reason="not here")
def test_skipped(): pass
@pytest.mark.skipif({all_skipped}, reason="not here")
def test_passes(): pass
"""


@pytest.mark.parametrize(
    ("all_skipped", "status", "outcome", "detail"),
    [
        (False, 1, "failed", "1 passed, 1 failed: test_fails, 1 skipped: not here"),
        (True, 0, "not run", "0 passed, 3 skipped: not here"),
    ],
)
def test_what_became_of_tests(
    all_skipped: bool, status: int, outcome: str, detail: str, conduct: Conduct, tmp_path: Path
) -> None:
    """Tests that were skipped, all of them, have not passed."""
    file = tmp_path / "test_some.py"
    file.write_text(TESTS.format(all_skipped=all_skipped))
    command = ("-m", "pytest", "-q", "-c", os.devnull, "--junit-xml={junit}", str(file))
    ended, steps, _said = conduct((Step("tests", 100, command),))
    assert (ended, steps["tests"]["outcome"]) == (status, outcome)
    assert steps["tests"]["detail"] == detail


def test_ended_from_outside(tmp_path: Path) -> None:
    """The summary is there all the same, and no process is left."""
    process = start(tmp_path, (script("stuck", STUCK, 90),), (script("next", ""),))
    assert process.stdout is not None
    said = ""
    while not re.match(r"deaf \d", said):
        said = process.stdout.readline()
        assert said, "it ended by itself"
    process.send_signal(signal.SIGTERM)
    rest, _none = process.communicate(timeout=60)
    assert process.returncode == 1, rest
    assert outcomes(tmp_path, "tried", "h100") == {"stuck": "cut", "next": "not run"}
    assert gone(said)


# What such a machine lacks.


def test_a_bare_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither git nor an installed package: figures and doctor's report are there all the same."""

    def no_such_distribution(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("BENCH_COMMIT", "0123abc")
    monkeypatch.setattr("importlib.metadata.version", no_such_distribution)
    assert common.commit() == "0123abc"
    assert version.own_version() == "not installed"


def test_platformdirs_is_not_needed_where_the_cache_is_named(tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules['platformdirs'] = None\n"
        "import moe_nvlink_plugin.tools.cli\n"
        "from moe_nvlink_plugin.jit import cache\n"
        "print(cache.directory())"
    )
    cache = tmp_path / "cache"
    said = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"MOE_NVLINK_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert said.stdout.strip() == str(cache), said.stderr


#: Of the extras `bench`, `test` and `upstream`, which such a machine may not have.
LACKING = (
    *("cogapp", "matplotlib", "pandas", "platformdirs", "psutil", "pydantic", "requests", "scipy"),
    *("tqdm", "tree_sitter", "tree_sitter_cpp", "yaml"),
)


def test_programs_of_the_stages_need_only_what_the_stages_look_for() -> None:
    names = {step.command[0] for step in STEPS.values() if step.command[0].endswith(".py")}
    programs = [name.removesuffix(".py").replace("/", ".") for name in sorted(names)]
    assert len(programs) == 5
    tests = [f"tests.gpu.{file.stem}" for file in sorted((ROOT / "tests/gpu").glob("*.py"))]
    others = ["tests.conftest", "tests.support.sanitized", "benchmarks.moe_comm.emulated"]
    others += ["moe_nvlink_plugin.tools.doctor"]
    block = f"import sys; sys.modules.update(dict.fromkeys({LACKING!r}))"
    lines = [block, *(f"import {name}" for name in (*programs, *tests, *others))]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_the_peer_that_is_carried() -> None:
    """The release whose interface the adapter was read from."""
    text = (ROOT / "benchmarks/carry.sh").read_text()
    assert f"flashinfer-python=={flashinfer_api.READ_FROM} " in text
    assert "://" not in text, "a host is the caller's choice"
