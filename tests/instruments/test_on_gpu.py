"""benchmarks/on_gpu.sh without a GPU: every stage rehearsed; what becomes of steps that fail."""

from __future__ import annotations

import contextlib
import gzip
import importlib
import itertools
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.moe_comm import flashinfer_api, options
from moe_nvlink_plugin.launch.kernel import Variant
from moe_nvlink_plugin.tools import cli, tune, verify
from moe_nvlink_plugin.verify.cases import COMBINE_FORMATS, RECIPES
from tests.gpu.day import carried, stages
from tests.gpu.day.steps import AGAIN_S, STAGES, STEPS, Step, limit_of

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.long


@contextlib.contextmanager
def start(folder: Path, *arguments: str, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """on_gpu.sh, which says all of it to its stdout; it ends with the block."""
    usual = {"OUT": str(folder), "PYTHON": sys.executable, "CARRY": str(folder / "no-such-folder")}
    with subprocess.Popen(
        ["bash", str(ROOT / "benchmarks/on_gpu.sh"), *arguments],
        env=os.environ | usual | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.terminate()


def run(folder: Path, *arguments: str, **variables: str) -> tuple[int, str]:
    """Exit status of on_gpu.sh, and all it said."""
    with start(folder, *arguments, **variables) as process:
        said, _nothing = process.communicate(timeout=1150)
    return process.returncode, said


def summary(folder: Path) -> Any:
    (path,) = folder.glob("*.json")
    return json.loads(path.read_text())


def archived(folder: Path) -> dict[str, Any]:
    """Step -> the result file that came back of it."""
    (path,) = folder.glob("*.tar.gz")
    found = {}
    with tarfile.open(path) as archive:
        for name in archive.getnames():
            file = archive.extractfile(name)
            if file is not None and name.endswith(".json"):
                step = re.sub(r"^[\d-]+-[a-z0-9]+-", "", name.removesuffix(".json"))
                found[step] = json.loads(file.read())
    return found


# The stages, small, from the first command to the last.

#: What a machine without a GPU cannot do: tests that are skipped.
NOT_HERE = {"real", "cases", "rounds", "forms", "planted-bugs"}
RANKS = {"verify": 2, "verify-one": 1, "verify-all": 4, "verify-pdl": 1}


@pytest.mark.parametrize("stage", ["smoke", "numbers", "breadth"])
def test_rehearsed(stage: str, tmp_path: Path) -> None:
    carry, out = tmp_path / "carry", tmp_path / "not/yet/there"
    carry.mkdir()
    (carry / "commit").write_text("89abcde-dirty\n")
    (tmp_path / "0123.cubin").write_text("code")
    with tarfile.open(carry / "kernels.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "0123.cubin", "./0123.cubin")
    status, said = run(out, "--rehearse", stage, CARRY=str(carry))
    assert status == 0, said
    endings = sorted(path.name.partition("-rehearsal-")[2] for path in out.iterdir())
    assert endings == [f"{stage}.{ending}" for ending in ("json", "tar.gz", "txt")]
    assert said == next(out.glob("*.txt")).read_text()
    found, results = summary(out), archived(out)
    assert found["commit"] == "89abcde-dirty", "not of the copy's history"
    assert found["carried"].split() == ["kernels"]
    assert found["kernels_carried"] >= 1, "beside those that other tests have compiled"
    assert (found["python"], found["torch"]) == (platform.python_version(), torch.__version__)
    became = {step["step"]: step["outcome"] for step in found["steps"]}
    assert became == {
        step.name: "not run" if step.name in NOT_HERE else "passed" for step in STAGES[stage]
    }
    assert results.keys() >= {step.name for step in STAGES[stage] if "output_file" in step.command}
    assert not [row for row in results.get("constants", {"rows": ()})["rows"] if "error" in row]
    for name in RANKS.keys() & results.keys():
        assert results[name]["right"]
        assert {len(check["wrong"]) for check in results[name]["checks"]} == {RANKS[name]}


def test_a_script_that_is_ended(tmp_path: Path) -> None:
    """Its step ends, the summary is there, and of its folder nothing is left."""
    out, scratch = tmp_path / "out", tmp_path / "scratch"
    scratch.mkdir()
    names = ("verify-one", "doctor")
    with start(out, "--rehearse", "again", *names, TMPDIR=str(scratch)) as process:
        wait_until(lambda: any("== verify-one" in each.read_text() for each in out.glob("*.txt")))
        process.terminate()
        said, _nothing = process.communicate(timeout=60)
    became = [step["outcome"] for step in summary(out)["steps"]]
    assert (process.returncode, became) == (1, ["cut", "left out"]), said
    assert not list(scratch.iterdir())


# What the plan promises.


def test_limits_add_up() -> None:
    """A stage is one command of a lent machine, and all of them and `again` are its half hour."""
    assert max(limit_of(steps) for steps in STAGES.values()) <= 550
    assert sum(limit_of(STAGES[each]) for each in ("smoke", "numbers", "breadth")) + AGAIN_S <= 1800
    assert limit_of(STAGES["vllm"]) <= AGAIN_S
    for steps in STAGES.values():
        assert all(STEPS[step.name] == step for step in steps), "one name, one step"
        for before, step in itertools.pairwise(steps):
            assert not step.beside or step.limit_s <= before.limit_s


def test_commands_mean_what_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """To their own programs, without what a rehearsal puts in the place of their options."""
    asked: dict[str, Any] = {}
    noted: list[Any] = []

    def note(given: Any) -> int:
        noted.append(given)
        return 0

    monkeypatch.setattr(verify, "main", note)
    monkeypatch.setattr(tune, "main", note)
    for step in STEPS.values():
        program, *given = step.command.split()
        monkeypatch.setattr(sys, "argv", [program, *given])
        if program == "benchmarks/bench_moe_comm.py":
            asked[step.name] = options.parse("").options
        elif program.endswith(".py"):
            importlib.import_module(program.removesuffix(".py").replace("/", ".")).parse()
        elif given[0] == "moe_nvlink_plugin" and given[1] != "doctor":
            assert cli.main(given[1:]) == 0
            asked[step.name] = noted.pop()
    assert {name: asked[name].ranks for name in (*RANKS, "tune")} == RANKS | {"tune": 1}
    assert [name for name in RANKS if asked[name].quick] == ["verify", "verify-one"]
    of_exchange = {name: each for name, each in asked.items() if hasattr(each, "ep_size")}
    few = {"two-ranks": 2, "two-ranks-bulk": 2, "audits": 1}
    assert {name: each.ep_size for name, each in of_exchange.items()} == {
        name: few.get(name, 8) for name in of_exchange
    }
    assert len(of_exchange) == 9
    for name, each in of_exchange.items():
        assert (each.device, each.emulate_ranks) == ("cuda", name != "audits")


def test_kernels_of_verify_are_carried(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Variant] = []
    monkeypatch.setattr(carried, "product", asked.append)
    carried.of_verify()
    texts = [str(each) for each in asked]
    for name in (*(f"recipe={each}" for each in RECIPES), *COMBINE_FORMATS, "lm_head"):
        assert any(name in text for text in texts), name


#: Tests that a GPU would be used for.
OF_GPU = """
import pytest
pytestmark = pytest.mark.gpu
def test_asks():
    from tests.gpu.day import carried
    raise carried.Compiled("its machine code is there")
def test_asks_for_nothing():
    pass
"""


def test_a_test_that_asks_for_no_kernel_is_noticed(tmp_path: Path) -> None:
    """What it will ask for on the GPU would be compiled there."""
    (tmp_path / "test_of_gpu.py").write_text(OF_GPU)
    program = (
        "import sys; from tests.gpu.day import carried; sys.exit(carried.of_tests(sys.argv[1]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, "1 failed, 1 skipped" in done.stdout) == (1, True), done.stdout
    assert "FAILED" in done.stdout
    assert "test_asks_for_nothing" in done.stdout


@pytest.mark.parametrize(("driver", "torchs"), [("exec sleep 60", "NVIDIA H200"), ("exit 9", "")])
def test_the_driver_does_not_say_which_gpu(
    driver: str, torchs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then torch may know."""
    answers = {"nvidia-smi": driver, "python": f"echo '{torchs}'; echo more"}
    for name, answer in answers.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{answer}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setattr(stages, "ANSWER_S", 2)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert stages.name_of_gpu() == torchs


@pytest.mark.parametrize(
    "given", ["smoke", "smoke doctor", "again", "again nosuch", "again cases rounds forms"]
)
def test_what_is_refused_begins_nothing(given: str, tmp_path: Path) -> None:
    """Among it a stage where there is no GPU."""
    status, said = run(tmp_path, *given.split(), PATH="/usr/bin:/bin")
    assert (status, list(tmp_path.iterdir())) == (2, []), said


# Steps that go wrong.

Conduct = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def conduct(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Conduct]:
    """Runs steps as a stage, as on a machine with a GPU. Returns exit status and outcomes."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    monkeypatch.setattr(stages, "name_of_gpu", lambda: "NVIDIA H100 80GB HBM3")

    def conducted(*steps: Step) -> tuple[int, dict[str, Any]]:
        monkeypatch.setitem(STAGES, "tried", steps)
        monkeypatch.setattr(sys, "argv", ["on_gpu.sh", "--out", str(tmp_path / "out"), "tried"])
        with pytest.raises(SystemExit) as ended:
            stages.main()
        assert isinstance(ended.value.code, int)
        steps_found = summary(tmp_path / "out")["steps"]
        return ended.value.code, {each.pop("step"): each for each in steps_found}

    yield conducted
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def script(tmp_path: Path) -> Callable[..., Step]:
    """Makes a step that runs a text; `{out}` in it is where the stage's files are."""

    def make(name: str, text: str, limit_s: float = 60, more: str = "", **values: Any) -> Step:
        path = tmp_path / f"{name}.py"
        path.write_text(text.replace("{out}", str(tmp_path / "out")))
        return Step(name, limit_s, f"{path} {more}", **values)

    return make


#: A benchmark that records two batches, and hangs; so does a process of it, which heeds no ^C.
STUCK = """
import json, os, subprocess, sys, time
deaf = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(300)"
with open("{out}/new", "w") as file:
    print(subprocess.Popen([sys.executable, "-c", deaf]).pid, file=file)
os.rename("{out}/new", "{out}/deaf")
if sys.argv[1:]:
    with open(sys.argv[1], "w") as file:
        json.dump({"rows": [1, 4]}, file)
"""
HANGS = "time.sleep(300)\n"


def wait_until(condition: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.05)


def assert_gone(out: Path) -> None:
    """The process that a step has left ends within seconds."""
    stat = Path(f"/proc/{(out / 'deaf').read_text().strip()}/stat")
    wait_until(lambda: not stat.exists() or stat.read_text().rsplit(")", 1)[1].split()[0] in "ZX")


def test_what_becomes_of_steps(
    conduct: Conduct, script: Callable[..., Step], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What failed, hung or left a process takes nothing of the others, nor of what it has done."""
    (tmp_path / "own/of_its_own").mkdir(parents=True)
    monkeypatch.setenv("ITS_PATH", f"{tmp_path}/elsewhere:{tmp_path}/own")
    skipped = tmp_path / "test_skipped.py"
    skipped.write_text("import pytest\n@pytest.mark.skip\ndef test_it(): pass\n")
    own = {"needs": "of_its_own", "variables": "PYTHONPATH=$ITS_PATH"}
    status, found = conduct(
        script("fails", "raise SystemExit('no such thing')"),
        script("stuck", STUCK + HANGS, 4, "{results}-stuck.json"),
        script("beside", "print('done')", beside=True),
        script("looks", "import os; print(*sorted(os.listdir('{out}')))"),
        script("silent", "", 60, "{results}-silent.json"),
        script("refused", "print('the runtime refuses it'); raise SystemExit(77)"),
        Step("skipped", 60, f"-m pytest -q -c {os.devnull} {skipped}"),
        script("lacks", "", needs="no_such_package"),
        script("own", "import of_its_own; print('imported')", **own),
        script("others", "import of_its_own"),
        script("leaves", f"{STUCK}print('left')"),
        script("knows", "import sys; print(sys.argv[1])", 60, "{limit_s}"),
        script("where", "import os; print(os.getsid(0), os.getpgrp() - os.getpid())"),
    )
    assert_gone(tmp_path / "out")
    assert status == 1
    assert {name: each["outcome"] for name, each in found.items()} == {
        **dict.fromkeys(("beside", "looks", "own", "leaves", "knows", "where"), "passed"),
        **dict.fromkeys(("fails", "silent", "others"), "failed"),
        **dict.fromkeys(("refused", "skipped", "lacks"), "not run"),
        "stuck": "cut",
    }
    assert found["fails"]["detail"].endswith("no such thing")
    assert found["stuck"]["detail"].startswith("2 rows")
    assert re.search(r"\.json.*\.tar\.gz.*\.txt", found["looks"]["detail"])
    assert found["refused"]["detail"] == "the runtime refuses it"
    assert found["knows"]["detail"] == "60"
    assert found["where"]["detail"] == f"{os.getsid(0)} 0", "or a machine would not end it"
    assert archived(tmp_path / "out")["stuck"] == {"rows": [1, 4]}


#: Says each word as soon as the report has the line before it.
TALKS = """
import glob, sys, time
for word, before in (pair.split(":") for pair in sys.argv[1:]):
    give_up = time.monotonic() + 60
    while f"\\n{before}\\n" not in open(*glob.glob("{out}/*.txt")).read():
        assert time.monotonic() < give_up, before
        time.sleep(0.02)
    print(word, flush=True)
print("end", end="")
"""


def test_what_steps_say_is_reported_at_once(
    conduct: Conduct, script: Callable[..., Step], tmp_path: Path
) -> None:
    """Whoever kills the runner leaves that; and which of the steps side by side said it."""
    status, found = conduct(
        script("one", TALKS, 90, "red: blue:green"),
        script("two", TALKS, 90, "green:red", beside=True),
    )
    assert status == 0, found
    said = next((tmp_path / "out").glob("*.txt")).read_text()
    assert "\n-- one says:\nred\n-- two says:\ngreen\n" in said
    assert "\n-- one says:\nblue\n" in said
    assert said.count("\nend\n") == 2, "of a step that has ended, also what is no whole line"


def test_a_runner_that_fails(
    conduct: Conduct, script: Callable[..., Step], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its steps are ended first."""

    def fails(*_given: Path) -> list[str]:
        wait_until((tmp_path / "out/deaf").exists)
        raise OSError("the disk is full")

    monkeypatch.setattr(stages, "pack", fails)
    with pytest.raises(OSError, match="the disk is full"):
        conduct(script("stuck", STUCK + HANGS), script("beside", "", beside=True))
    assert_gone(tmp_path / "out")


def test_ended_from_outside(conduct: Conduct, script: Callable[..., Step], tmp_path: Path) -> None:
    """The summary is there all the same, no process is left, and no other step begins."""
    ends = f"os.kill({os.getpid()}, {signal.SIGTERM:d})\n"
    status, found = conduct(script("stuck", STUCK + ends + HANGS), script("next", ""))
    outcomes = [each["outcome"] for each in found.values()]
    assert (status, outcomes) == (1, ["cut", "left out"])
    assert_gone(tmp_path / "out")


def test_an_archive_that_would_be_too_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine does not give it back at all, so the largest files stay away."""
    monkeypatch.setattr(stages, "ARCHIVE_BYTES", 100)
    results = tmp_path / "results"
    results.mkdir()
    for name, size in (("large.ncu-rep", 200), ("2026-h100-bench.json", 20)):
        (results / name).write_bytes(b"1" * 20 if size == 20 else os.urandom(size))
    assert stages.pack(results, tmp_path / "x.tar.gz") == ["large.ncu-rep"]
    assert archived(tmp_path) == {"bench": int("1" * 20)}


def test_an_archive_of_files_that_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is compressed once to know its size, not after every step; none may stop the stage."""
    results, compressed, compress = tmp_path / "results", list[bytes](), gzip.compress
    results.mkdir()

    def note(data: bytes, level: int) -> bytes:
        if data == b"4":
            (results / "2026-h100-gone.json").unlink()
        compressed.append(data)
        return compress(data, level)

    monkeypatch.setattr(gzip, "compress", note)
    for name, text in (("gone", "4"), ("still", "1"), ("grows", "2"), ("new", "3")):
        (results / f"2026-h100-{name}.json").write_text(text)
    (results / "2026-h100-new.json").rename(results / "new.json.unfinished")
    (results / "folder").mkdir()
    (results / "link").symlink_to("nowhere")
    assert stages.pack(results, tmp_path / "x.tar.gz") == []
    assert archived(tmp_path) == {"still": 1, "grows": 2}
    (results / "2026-h100-grows.json").write_text("22")
    os.utime(results / "2026-h100-grows.json", (1e9, 1e9))
    assert stages.pack(results, tmp_path / "x.tar.gz") == []
    assert archived(tmp_path) == {"still": 1, "grows": 22}
    assert sorted(compressed) == [b"1", b"2", b"22", b"4"]


# What such a machine lacks.


#: Of the extras `bench`, `test` and `upstream`, which such a machine may not have.
LACKING = (
    *("cogapp", "matplotlib", "pandas", "platformdirs", "psutil", "pydantic", "requests", "scipy"),
    *("tqdm", "tree_sitter", "tree_sitter_cpp", "yaml"),
)


def test_programs_of_the_stages_need_only_what_the_stages_look_for(tmp_path: Path) -> None:
    programs = {step.command.split()[0] for step in STEPS.values()}
    files = sorted(each for each in programs if each.endswith(".py"))
    files += sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests/gpu").glob("*.py"))
    names = [name.removesuffix(".py").replace("/", ".") for name in files]
    names += ["tests.conftest", "tests.support.sanitized", "benchmarks.moe_comm.emulated"]
    names += ["moe_nvlink_plugin.tools.doctor", "moe_nvlink_plugin.tools.verify"]
    lines = [f"import sys; sys.modules.update(dict.fromkeys({LACKING!r}))"]
    lines += [f"import {name}" for name in names]
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
