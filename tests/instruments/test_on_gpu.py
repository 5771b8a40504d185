"""benchmarks/on_gpu.sh without a GPU: every stage rehearsed; what becomes of steps that fail."""

from __future__ import annotations

import importlib.metadata
import io
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from benchmarks import common
from benchmarks.moe_comm import flashinfer_api, options
from moe_nvlink_plugin import version
from moe_nvlink_plugin.launch.kernel import Variant
from moe_nvlink_plugin.verify.cases import COMBINE_FORMATS, RECIPES
from tests.gpu.day import carried, stages
from tests.gpu.day.steps import AGAIN_S, STAGES, START_S, STEPS, Stage, Step, again

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.long


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


@pytest.mark.long
def test_smoke_rehearsed(tmp_path: Path) -> None:
    status, said = run(tmp_path, "--rehearse", "smoke", BENCH_COMMIT="0123abc")
    assert status == 0, said
    (report,) = tmp_path.glob("*-rehearsal-smoke.txt")
    assert said == report.read_text(), "the report is what was printed"
    assert re.search(r"^commit   0123abc$", said, re.MULTILINE)
    assert "carried  nothing; benchmarks/carry.sh" in said
    assert "CPU ranks: will work" in said
    assert said.count("all rounds verified") >= 1, "the sanitizers' program, on the stand-in"
    expected = {name: "not run" if name == "real" else "passed" for name in outcomes_of("smoke")}
    assert outcomes(tmp_path, "smoke") == expected
    assert re.search(r"^  real +not run .* \d+ skipped in", said, re.M)
    assert said.endswith("all well\n")
    assert [row["tokens"] for row in result(tmp_path, "emulated")["rows"]] == [1, 4]
    for name, ranks in (("verify", 2), ("verify-one", 1)):
        report = result(tmp_path, name)
        assert (report["right"], report["geometry"]["ep_size"]) == (True, ranks)
        assert {len(check["wrong"]) for check in report["checks"]} == {ranks}
        assert report["machine"]["gpus"], "each report names its GPU"


@pytest.mark.long
def test_numbers_rehearsed(tmp_path: Path) -> None:
    status, said = run(tmp_path, "--rehearse", "numbers")
    assert status == 0, said
    assert outcomes(tmp_path, "numbers") == dict.fromkeys(outcomes_of("numbers"), "passed")
    endings = sorted(path.name.partition("-rehearsal-")[2] for path in tmp_path.iterdir())
    assert endings == ["numbers.json", "numbers.tar.gz", "numbers.txt"], "a machine gives back 8"
    assert not [row for row in result(tmp_path, "constants")["rows"] if "error" in row]
    for row in result(tmp_path, "moe-comm")["rows"]:
        both = (row["both"], row["plain_launches"]["both"]) if "plain_launches" in row else ()
        assert all(times["median_us"] > 0 for times in both)
    launch = result(tmp_path, "launch")
    assert launch["driver"].startswith("stand-in, runs the kernels"), "whose faults it would tell"
    assert {"dispatch: MoeAllToAll", "combine: torch op"} < launch["rows"].keys()


def test_breadth_rehearsed(tmp_path: Path) -> None:
    status, said = run(tmp_path, "--rehearse", "breadth")
    assert status == 0, said
    found = outcomes(tmp_path, "breadth")
    assert list(found) == outcomes_of("breadth")
    assert {name for name, outcome in found.items() if outcome == "passed"} == {
        *("verify-all", "verify-pdl", "tune", "racecheck", "memcheck", "synccheck", "initcheck")
    }
    assert re.search(r"^\[cases\] ", said, re.MULTILINE), "which of those side by side said it"
    for tool in ("racecheck", "memcheck", "synccheck"):
        assert re.search(rf"--tool {tool} .*--kernel-name kernel_substring=moe_nvlink", said)


def outcomes_of(stage: str) -> list[str]:
    return [step.name for group in STAGES[stage].steps for step in group]


# What the plan promises.


def test_limits_add_up() -> None:
    """What all steps may take at most is what the stage has; and what a lease has."""
    for stage in STAGES.values():
        longest = sum(max(step.limit_s for step in group) for group in stage.steps)
        assert START_S + longest <= stage.limit_s, stage.name
    limits = {name: stage.limit_s for name, stage in STAGES.items()}
    assert limits == {"smoke": 265, "numbers": 530, "breadth": 540, "vllm": 335}
    assert limits.pop("vllm") <= AGAIN_S, "it has the time of `again`"
    assert sum(limits.values()) + AGAIN_S <= 30 * 60
    of_all = [step for stage in STAGES.values() for group in stage.steps for step in group]
    assert {step.name: step for step in of_all} == STEPS
    assert all(STEPS[step.name] == step for step in of_all), "one name, one step"


def test_benchmarks_take_the_options_of_the_stages() -> None:
    """Also where a rehearsal replaces them."""
    for step in STEPS.values():
        if "bench_moe_comm.py" in step.command[0]:
            request = options.parse("", step.command[1:])
            ranks = {"two-ranks": 2, "two-ranks-bulk": 2, "audits": 1}.get(step.name, 8)
            assert request.options.ep_size == ranks
            assert request.options.device == "cuda"
            assert request.options.emulate_ranks == (ranks > 1)


def test_kernels_of_verify_are_carried(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Variant] = []
    monkeypatch.setattr(carried, "product", asked.append)
    carried.of_verify()
    texts = [str(each) for each in asked]
    for name in (*(f"recipe={each}" for each in RECIPES), *COMBINE_FORMATS, "lm_head"):
        assert any(name in text for text in texts), name


def test_again_runs_what_is_named(tmp_path: Path) -> None:
    """One python for all: what is refused begins nothing."""
    names = ["initcheck", "synccheck"]
    assert [step.name for (step,) in again(names).steps] == names
    for given, wanted in (
        (["nosuch"], "no step is called nosuch; the steps are verify, verify-one, doctor, "),
        ([], "again which step?"),
        (["cases", "rounds", "forms"], f"may take 640 s, and one call has {AGAIN_S:g} s"),
    ):
        with pytest.raises(ValueError, match=re.escape(wanted)):
            again(given)
    status, said = run(tmp_path, "smoke", "doctor")
    assert (status, "smoke takes no names; on_gpu.sh again doctor does" in said) == (2, True)
    assert not list(tmp_path.iterdir()), "nothing was begun"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu(tmp_path: Path) -> None:
    carried = tmp_path / "carried"
    carried.mkdir()
    with tarfile.open(carried / "kernels.tar.gz", "w:gz") as archive:
        member = tarfile.TarInfo("./0123.cubin")
        member.size = 4
        archive.addfile(member, io.BytesIO(b"code"))
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


# Steps that go wrong.


Conduct = Callable[..., tuple[int, dict[str, Any], str]]


@pytest.fixture
def conduct(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Conduct]:
    """Runs a stage as on_gpu.sh does on a machine that has a GPU.

    Returns its exit status, each step's outcome and detail, all that was said.
    """
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    monkeypatch.setattr(stages, "look", lambda: {"missing": "", "gpu": "NVIDIA H100 80GB HBM3"})
    monkeypatch.setattr(time, "strftime", lambda *_given: "2026-01-01")

    def conducted(*groups: tuple[Step, ...], limit_s: float = 100) -> tuple[int, Any, str]:
        monkeypatch.setitem(STAGES, "tried", Stage("tried", limit_s, groups))
        places = ["--results", str(tmp_path / "results"), "--back", str(tmp_path)]
        monkeypatch.setattr(sys, "argv", ["on_gpu.sh", "tried", *places])
        with pytest.raises(SystemExit) as ended:
            stages.main()
        steps = json.loads((tmp_path / f"{H100}-tried.json").read_text())["steps"]
        found = {step["step"]: (step["outcome"], step["detail"]) for step in steps}
        return cast("int", ended.value.code), found, capsys.readouterr().out

    yield conducted
    for number, handler in handlers.items():
        signal.signal(number, handler)


H100 = "2026-01-01-h100"


def script(name: str, text: str, limit_s: float = 60, *more: str) -> Step:
    return Step(name, limit_s, ("-c", text, *more))


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


def test_what_becomes_of_steps(conduct: Conduct, tmp_path: Path) -> None:
    """One that fails, one that is stuck, one that leaves a process, two side by side."""
    refuses = "print('the runtime refuses it'); raise SystemExit(77)"
    (tmp_path / "results").mkdir()
    old = tmp_path / f"results/{H100}-silent.json"
    old.write_text('{"rows": [1]}')
    os.utime(old, (1e9, 1e9))
    status, found, said = conduct(
        (script("first", "raise SystemExit('no such thing')"),),
        (script("stuck", STUCK, 10), script("beside", "print('done')")),
        (script("leaves", STUCK.replace("time.sleep(300)\n", "print('left')")),),
        (script("silent", "", 60, "{results}-silent.json"),),
        (script("refused", refuses),),
        (Step("lacking", 60, ("-c", ""), needs="no_such_package"),),
    )
    assert status == 1
    lacking = "no_such_package was not carried (benchmarks/carry.sh) and is not installed"
    assert found == {
        "first": ("failed", "exit status 1: no such thing"),
        "stuck": ("cut", "at 10 s"),
        "beside": ("passed", "done"),
        # A rank that still spins would take the GPU's time from the next step.
        "leaves": ("passed", "left"),
        # It printed "not measured", say; and what lay there before is not its own.
        "silent": ("failed", f"0 rows in {old.name}"),
        "refused": ("not run", "the runtime refuses it"),
        "lacking": ("not run", lacking),
    }
    assert "[beside] done\n" in said
    bad = ("first", "stuck", "silent")
    assert said.endswith(f"NOT WELL: {', '.join(bad)}; again: on_gpu.sh again {' '.join(bad)}\n")
    assert gone(said)


def test_a_step_with_a_path_of_its_own(
    conduct: Conduct, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others do not see what it alone may import; without the folder it does not begin."""
    (tmp_path / "own/such_a_package").mkdir(parents=True)
    monkeypatch.setenv("ITS_PATH", f"{tmp_path}/elsewhere:{tmp_path}/own")
    imports = "import such_a_package; print('imported')"
    refuses = "import importlib.util as u; print(u.find_spec('such_a_package'))"
    own = Step("own", 60, ("-c", imports), needs="such_a_package", path="ITS_PATH")
    lacks = Step("lacks", 60, ("-c", ""), needs="another_package", path="ITS_PATH")
    _status, found, _said = conduct((own,), (script("other", refuses),), (lacks,))
    assert found["own"] == ("passed", "imported")
    assert found["other"] == ("passed", "None")
    assert found["lacks"][0] == "not run"


def test_when_the_stages_time_is_over(conduct: Conduct) -> None:
    waits = script("waits", "import time; time.sleep(300)")
    status, found, _said = conduct((waits,), (script("late", ""),), limit_s=7)
    assert (status, found["waits"][0]) == (1, "cut")
    assert found["late"] == ("not run", "the stage's time was over")


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
    """In the archive too, which is there while the next step runs: a kill takes nothing."""
    looks = f"import os; print(*sorted(os.listdir({str(tmp_path)!r})))"
    bench = script("bench", BATCHES, 10, "{results}-bench.json")
    status, found, said = conduct((bench,), (script("looks", looks),))
    files = [f"{H100}-tried.{ending}" for ending in ("json", "tar.gz", "txt")]
    assert (status, found) == (
        1,
        {
            "bench": ("cut", f"at 10 s, 2 rows in {H100}-bench.json"),
            "looks": ("passed", " ".join([*files, "results"])),
        },
    )
    assert [row["tokens"] for row in result(tmp_path, "bench", "h100")["rows"]] == [1, 4]
    assert gone(said)


def test_an_archive_that_would_be_too_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine does not give it back at all, so the largest files stay away."""
    monkeypatch.setattr(stages, "ARCHIVE_BYTES", 100)
    (tmp_path / "results").mkdir()
    for name, size in (("large.ncu-rep", 90), ("a-gpu-bench.json", 20), ("b.json.unfinished", 1)):
        (tmp_path / "results" / name).write_text("1" * size)
    assert stages.pack(tmp_path / "results", tmp_path / "x-gpu-y.tar.gz") == ["large.ncu-rep"]
    assert result(tmp_path, "bench", "gpu") == int("1" * 20)
    assert len(list(tmp_path.iterdir())) == 2


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
        (False, 1, "failed", "exit status 1: 1 failed, 1 passed, 1 skipped in "),
        (True, 0, "not run", "3 skipped in "),
    ],
)
def test_what_became_of_tests(
    all_skipped: bool, status: int, outcome: str, detail: str, conduct: Conduct, tmp_path: Path
) -> None:
    """Tests that were skipped, all of them, have not passed."""
    file = tmp_path / "test_some.py"
    file.write_text(TESTS.format(all_skipped=all_skipped))
    command = ("-m", "pytest", "-q", "-c", os.devnull, str(file))
    ended, found, _said = conduct((Step("tests", 100, command),))
    assert (ended, found["tests"][0]) == (status, outcome)
    assert found["tests"][1].startswith(detail)


def test_ended_from_outside(conduct: Conduct) -> None:
    """The summary is there all the same, and no process is left."""
    ends = f"import os, signal; os.kill({os.getpid()}, signal.SIGTERM)\ntime.sleep(300)\n"
    stuck = script("stuck", STUCK.replace("time.sleep(300)\n", ends), 90)
    status, found, said = conduct((stuck,), (script("next", ""),))
    ended = "ended from outside"
    assert (status, found) == (1, {"stuck": ("cut", ended), "next": ("not run", ended)})
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


#: Of the extras `bench`, `test` and `upstream`, which such a machine may not have.
LACKING = (
    *("cogapp", "matplotlib", "pandas", "platformdirs", "psutil", "pydantic", "requests", "scipy"),
    *("tqdm", "tree_sitter", "tree_sitter_cpp", "yaml"),
)


def test_programs_of_the_stages_need_only_what_the_stages_look_for(tmp_path: Path) -> None:
    names = {step.command[0] for step in STEPS.values() if step.command[0].endswith(".py")}
    programs = [name.removesuffix(".py").replace("/", ".") for name in sorted(names)]
    assert len(programs) == 5
    tests = [f"tests.gpu.{file.stem}" for file in sorted((ROOT / "tests/gpu").glob("*.py"))]
    others = ["tests.conftest", "tests.support.sanitized", "benchmarks.moe_comm.emulated"]
    others += ["moe_nvlink_plugin.tools.doctor", "moe_nvlink_plugin.tools.verify"]
    block = f"import sys; sys.modules.update(dict.fromkeys({LACKING!r}))"
    lines = [block, *(f"import {name}" for name in (*programs, *tests, *others))]
    lines += ["from moe_nvlink_plugin.jit import cache", "print(cache.directory())"]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        cwd=ROOT,
        env=os.environ | {"MOE_NVLINK_CACHE_DIR": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == str(tmp_path / "cache"), done.stderr


def test_the_peer_that_is_carried() -> None:
    """The release whose interface the adapter was read from."""
    text = (ROOT / "benchmarks/carry.sh").read_text()
    assert f"flashinfer-python=={flashinfer_api.READ_FROM} " in text
    assert "://" not in text, "a host is the caller's choice"
