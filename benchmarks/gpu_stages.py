"""The stages of a first half hour on one GPU: which steps, in which order, for how long at most.

    python -m benchmarks.gpu_stages [--rehearse] smoke --results DIR     # on_gpu.sh calls this

A step is a program of its own. One that is stuck is ended with all processes it has started, and
the next one begins. What is left after each step: everything that was said, a summary, and the
result files that the benchmarks write batch by batch. Nothing but Python's own library is imported
here, so that a machine that lacks a package is told which.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

#: What a stage keeps back of its time: the machine's first import of torch, and the summary.
START_S = 10.0
#: Of `again`, whatever it is given.
AGAIN_S = 480.0
#: With less, a step is not begun.
LEAST_S = 5.0
#: What a step gets between the signal that asks it to end and the one that ends it.
GRACE_S = 4.0
#: A rehearsal shares two processors with other tests.
REHEARSAL_FACTOR = 4.0
#: A program's exit status for "cannot run here"; its last line says why (tests/gpu/watched.py).
CANNOT_RUN = 77

PACKAGES = (
    *("torch", "numpy", "cuda.bindings.driver", "cuda.bindings.nvrtc", "filelock", "pluggy"),
    *("pytest", "pytest_timeout", "hypothesis"),
)


@dataclasses.dataclass(frozen=True)
class Step:
    """One program.

    Attributes:
        name: in the summary, and what `again` takes.
        limit_s: after which it is ended.
        command: what follows the interpreter. `{results}` is where its result file's name begins,
            `{junit}` a scratch file.
        rehearsed: what is added in a rehearsal; of an option given twice the last one counts.
        needs: a module without which it is not begun.
    """

    name: str
    limit_s: float
    command: tuple[str, ...]
    rehearsed: tuple[str, ...] = ()
    needs: str = ""

    @property
    def result(self) -> str | None:
        """Its result file, as in the command."""
        return next((part for part in self.command if part.startswith("{results}")), None)


@dataclasses.dataclass(frozen=True)
class Stage:
    """Steps in their order, most valuable first; those of one tuple run side by side."""

    name: str
    limit_s: float
    steps: tuple[tuple[Step, ...], ...]


def _tests(name: str, limit_s: float, *selected: str) -> Step:
    """GPU tests. A test that takes too long is ended alone, not with all that follow it."""
    options = ("-q", "-p", "no:cacheprovider", "--timeout-method=signal", "--durations=5")
    command = ("-m", "pytest", "-m", "gpu", *options, "--junit-xml={junit}", *selected)
    return Step(name, limit_s, command)


_SMALL = (
    *("--device", "rehearsal", "--emulate_ranks", "2", "--profile", "custom"),
    *("--hidden_size", "64", "--top_k", "8", "--num_experts", "256"),
    *("--batches", "1", "4", "--iters", "10", "--warmup", "1", "--backend", "moe_nvlink"),
)


def _emulated(name: str, limit_s: float, *options: str, needs: str = "") -> Step:
    command = (
        *("benchmarks/bench_moe_comm.py", "--perfect_router", "--device", "cuda"),
        *("--emulate_ranks", "8", *options, "--output_file", f"{{results}}-{name}.json"),
    )
    return Step(name, limit_s, command, _SMALL, needs)


def _watched(tool: str) -> Step:
    rehearsed = ("--rehearse",) if tool == "memcheck" else ("--rehearse", "--command-only")
    return Step(tool, 35, ("-m", "tests.gpu.watched", tool), rehearsed)


_MEMCHECK = _watched("memcheck")
_OURS, _THEIRS = ("--backend", "moe_nvlink"), ("--backend", "flashinfer")
_PEER = "flashinfer"
_BATCHES = ("--batches", "1", "4", "16", "64", "128", "256", "512", "1024", "2048")

SMOKE = Stage(
    "smoke",
    240,
    (
        (Step("doctor", 45, ("-m", "moe_nvlink_plugin", "doctor")),),
        (_tests("real", 60, "tests/gpu/test_real_path.py", "tests/gpu/test_real_head.py"),),
        (_tests("two-processes", 25, "tests/gpu/test_real_processes.py::test_rounds[2]"),),
        (_emulated("emulated", 35, *_OURS, "--batches", "1", "64", "2048"),),
        (_MEMCHECK,),
        (_emulated("flashinfer", 30, *_THEIRS, "--batches", "64", "--iters", "10", needs=_PEER),),
    ),
)

NUMBERS = Stage(
    "numbers",
    420,
    (
        # Beside FlashInfer where it is there; the goals are at most 64 and at 2048.
        (_emulated("moe-comm", 170, *_BATCHES),),
        (_emulated("pdl", 40, *_OURS, "--pdl", "--kernel_breakdown", "--batches", "16", "2048"),),
        (
            Step(
                "recipes",
                75,
                (
                    *("benchmarks/bench_recipes.py", "--device", "cuda", "--ep-size", "8"),
                    *("--tokens", "16", "128", "2048", "--iterations", "100"),
                    *("--output", "{results}-recipes.json"),
                ),
                (
                    *("--device", "rehearsal", "--ep-size", "2", "--tokens", "4"),
                    *("--hidden-size", "256", "--num-experts", "8", "--iterations", "5"),
                ),
            ),
        ),
        (
            Step(
                "lm-head",
                45,
                (
                    *("benchmarks/bench_lm_head.py", "--device", "cuda", "--iterations", "50"),
                    *("--output", "{results}-lm-head.json"),
                ),
                (
                    *("--device", "rehearsal", "--groups", "2", "--vocab", "1000"),
                    *("--hidden", "64", "--rows", "1", "4", "--iterations", "5"),
                ),
            ),
        ),
        (
            Step(
                "launch",
                30,
                ("benchmarks/bench_launch.py", "--driver", "real", "--output")
                + ("{results}-launch.json",),
                ("--driver", "fake", "--batches", "5"),
            ),
        ),
        # Once more, for the spread from run to run.
        (_emulated("spread", 45, *_OURS, "--batches", "1", "4", "16", "64"),),
    ),
)

BREADTH = Stage(
    "breadth",
    420,
    (
        (
            _tests("cases", 210, "tests/gpu/test_cases.py", "tests/gpu/test_quantisers.py"),
            _tests("rounds", 210, "tests/gpu/test_rounds.py"),
            _tests("processes", 210, "tests/gpu/test_real_processes.py"),
        ),
        (_watched("racecheck"),),
        (_MEMCHECK,),
        (_watched("synccheck"),),
        (_watched("initcheck"),),
        (_tests("planted-bugs", 55, "tests/gpu/test_sanitizers.py", "-k", "the_tool_looks"),),
    ),
)

STAGES = {stage.name: stage for stage in (SMOKE, NUMBERS, BREADTH)}
STEPS = {step.name: step for stage in STAGES.values() for group in stage.steps for step in group}


def again(names: Sequence[str]) -> Stage:
    """The named steps, one after the other.

    Raises:
        ValueError: there is no such step, or one call has not the time for all of them.
    """
    unknown = [name for name in names if name not in STEPS]
    if unknown or not names:
        what = f"no step is called {', '.join(unknown)}" if unknown else "again which step?"
        raise ValueError(f"{what}; the steps are {', '.join(STEPS)}")
    needed = START_S + sum(STEPS[name].limit_s for name in names)
    if needed > AGAIN_S:
        raise ValueError(
            f"{', '.join(names)} may take {needed:g} s, and one call has {AGAIN_S:g} s; name fewer"
        )
    return Stage("again", AGAIN_S, tuple((STEPS[name],) for name in names))


@dataclasses.dataclass
class Outcome:
    """What became of a step: passed, failed, cut (its time ran out) or "not run"."""

    step: str
    outcome: str
    seconds: float = 0.0
    detail: str = ""


class Report:
    """What is said, to the terminal and to a file, also by several steps at once."""

    def __init__(self, file: IO[str]) -> None:
        self._file, self._lock = file, threading.Lock()

    def say(self, text: str = "") -> None:
        with self._lock:
            for out in (sys.stdout, self._file):
                out.write(text + "\n")
                out.flush()


class Running:
    """A step's process, in a process group of its own, so that it can be ended with all it started.

    Not in a session of its own: whoever ends this program's session must end the step too.
    """

    def __init__(self, command: Sequence[str], environment: dict[str, str]) -> None:
        self.started = self.ended = time.monotonic()
        self._process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            preexec_fn=os.setpgrp,
        )

    def wait(self, limit_s: float, report: Report, prefix: str) -> tuple[int | None, str]:
        """Exit status, None where it was ended; and the last line it printed."""
        last = [""]

        def read() -> None:
            assert self._process.stdout is not None
            for line in self._process.stdout:
                last[0] = line.strip() or last[0]
                report.say(prefix + line.rstrip("\n"))

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        try:
            status: int | None = self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = None
            self._signal(signal.SIGINT)  # pytest says what it has, then
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE_S)
        finally:
            self.end()
            self._process.wait()
            self.ended = time.monotonic()
        reader.join(GRACE_S)
        return status, last[0]

    def end(self) -> None:
        """Ranks that are left would keep the GPU busy."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


class Run:
    """One stage on this machine.

    Args:
        results: folder that what is left goes to.
        date: in front of every file's name.
        rehearse: small, without a GPU.
    """

    def __init__(self, stage: Stage, results: Path, date: str, *, rehearse: bool) -> None:
        self.stage, self.rehearse = stage, rehearse
        self._factor = REHEARSAL_FACTOR if rehearse else 1.0
        self._started = time.monotonic()
        kind = "rehearsal" if rehearse else "gpu"
        self.prefix = results / f"{date}-{kind}"
        self._summary = results / f"{date}-{kind}-{stage.name}.json"
        self.report_path = self._summary.with_suffix(".txt")
        self._scratch = Path(tempfile.mkdtemp(prefix="junit-"))
        self._environment = dict(os.environ)
        self._cubins = _cubins()
        self._running: list[Running] = []
        self._stopped = False
        self.outcomes: list[Outcome] = []
        self.facts: dict[str, Any] = {
            "stage": stage.name,
            "date": date,
            "commit": os.environ.get("BENCH_COMMIT", "unknown"),
            "rehearsal": rehearse,
            "limit_s": stage.limit_s * self._factor,
        }

    def run(self, report: Report) -> int:
        """Exit status: 0 all well, 1 a step failed, was cut or had no time, 2 nothing could run."""
        reason = self._introduce(report)
        if reason is not None:
            report.say(f"\nnothing could run: {reason}")
            self._write({"nothing_could_run": reason})
            return 2
        for group in self.stage.steps:
            self._run_group(group, report)
            self._write()
        self._conclude(report)
        return int(any(_is_bad(outcome) for outcome in self.outcomes))

    def stop(self) -> None:
        """Ends the steps that run and begins no other; the summary is still written. Of a signal's
        handler, which may run between any two lines of this program.
        """
        self._stopped = True
        for process in self._running:
            process.end()

    def _introduce(self, report: Report) -> str | None:
        """Says where this is; why nothing can run here, or None."""
        facts = _look()
        self.facts |= facts
        for name in ("stage", "date", "commit", "python", "torch", "gpu"):
            report.say(f"{name:8} {self.facts.get(name)}")
        report.say(f"carried  {os.environ.get('GPU_STAGES_CARRIED', 'nothing')}")
        if self.rehearse:
            report.say("A rehearsal, small, on CPU ranks and the stand-in for the driver.")
            report.say("None of its times means anything, and GPU tests are only collected.")
        report.say("One GPU: nothing here shows NVLink's latency, bandwidth or ordering.")
        if facts["missing"]:
            return f"these packages are missing: {', '.join(facts['missing'])}"
        if not self.rehearse:
            return None if facts["cuda"] else "torch sees no CUDA device"
        try:
            self._environment |= _stand_in(self._scratch)
        except subprocess.CalledProcessError:
            return "the stand-in for the driver could not be built; what stopped it stands above"
        return None

    def _left_s(self) -> float:
        return self.stage.limit_s * self._factor - (time.monotonic() - self._started)

    def _run_group(self, group: tuple[Step, ...], report: Report) -> None:
        ready = [step for step in group if self._may_run(step, report)]
        limits = [min(step.limit_s * self._factor, self._left_s()) for step in ready]
        commands = [self._command(step) for step in ready]
        for step, command in zip(ready, commands, strict=True):
            report.say(f"\n== {step.name}\n{' '.join(command)}")
        # All before the first thread: what runs between fork and exec then has no locks to fear.
        self._running = running = [Running(command, self._environment) for command in commands]
        if self._stopped:
            self.stop()
        with ThreadPoolExecutor(max(1, len(ready))) as pool:
            ended = [
                pool.submit(process.wait, limit, report, f"[{step.name}] " if group[1:] else "")
                for process, step, limit in zip(running, ready, limits, strict=True)
            ]
            for future, process, step, limit in zip(ended, running, ready, limits, strict=True):
                status, last = future.result()
                seconds = process.ended - process.started
                self._add(self._judge(step, status, last, limit, seconds), report)

    def _may_run(self, step: Step, report: Report) -> bool:
        reason = ""
        if self._stopped:
            reason = "ended from outside"
        elif self._left_s() < LEAST_S:
            reason = "the stage's time was over"
        elif step.needs and not self.rehearse and importlib.util.find_spec(step.needs) is None:
            reason = f"{step.needs} was not carried (benchmarks/carry.sh) and is not installed"
        if reason:
            self._add(Outcome(step.name, "not run", 0.0, reason), report)
        return not reason

    def _add(self, outcome: Outcome, report: Report) -> None:
        self.outcomes.append(outcome)
        report.say(f"== {_line(outcome)}")

    def _command(self, step: Step) -> list[str]:
        parts = step.command + (step.rehearsed if self.rehearse else ())
        places = {"{results}": str(self.prefix), "{junit}": str(self._junit(step))}
        return [sys.executable, *(_filled(part, places) for part in parts)]

    def _junit(self, step: Step) -> Path:
        return self._scratch / f"{step.name}.xml"

    def _judge(
        self, step: Step, status: int | None, last: str, limit_s: float, seconds: float
    ) -> Outcome:
        outcome, detail = "passed" if status == 0 else "failed", ""
        if status is None:
            outcome, detail = "cut", f"at {limit_s:.0f} s"
        elif status and self._stopped:
            outcome, detail = "cut", "ended from outside"
        elif status == CANNOT_RUN:
            outcome, detail = "not run", last
        elif status:
            detail = f"exit status {status}"
        if self._junit(step).exists():
            detail, ran = _tests_of(self._junit(step))
            if outcome == "passed" and not ran:
                outcome = "not run"
        elif step.result is not None:
            written = Path(_filled(step.result, {"{results}": str(self.prefix)}))
            rows = _rows_of(written, not_before=time.time() - seconds - 1)
            detail = ", ".join(part for part in (detail, f"{rows} rows in {written.name}") if part)
            if outcome == "passed" and not rows:
                outcome = "failed"
        return Outcome(step.name, outcome, round(seconds, 1), detail)

    def _conclude(self, report: Report) -> None:
        compiled = _cubins() - self._cubins
        report.say(f"\nkernels compiled here, because they were not carried: {compiled}")
        self.facts["kernels_compiled_here"] = compiled
        self._write()
        seconds = time.monotonic() - self._started
        report.say(f"\nsummary of {self.stage.name} after {seconds:.0f} s:")
        for outcome in self.outcomes:
            report.say("  " + _line(outcome))
        bad = [outcome.step for outcome in self.outcomes if _is_bad(outcome)]
        if bad:
            report.say(f"NOT WELL: {', '.join(bad)}; again: on_gpu.sh again {' '.join(bad)}")
        else:
            report.say("all well")

    def _write(self, more: dict[str, Any] | None = None) -> None:
        """After every step: this program may be ended at any time."""
        seconds = round(time.monotonic() - self._started, 1)
        steps = [dataclasses.asdict(outcome) for outcome in self.outcomes]
        document = self.facts | (more or {}) | {"seconds": seconds, "steps": steps}
        unfinished = self._summary.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(document, indent=1) + "\n")
        unfinished.replace(self._summary)


def _filled(part: str, places: dict[str, str]) -> str:
    for name, value in places.items():
        part = part.replace(name, value)
    return part


def _line(outcome: Outcome) -> str:
    return f"{outcome.step:14} {outcome.outcome:8} {outcome.seconds:6.1f} s  {outcome.detail}"


def _is_bad(outcome: Outcome) -> bool:
    """What a machine cannot do (a tool that its runtime refuses) is named, and no failure."""
    no_time = outcome.outcome == "not run" and (
        "time was over" in outcome.detail or "from outside" in outcome.detail
    )
    return outcome.outcome in ("failed", "cut") or no_time


def _tests_of(junit: Path) -> tuple[str, int]:
    """Counts, with the names of what failed or the reason of what was skipped; how many ran."""
    cases = list(ElementTree.parse(junit).iter("testcase"))
    failed = [c for c in cases if c.find("failure") is not None or c.find("error") is not None]
    skipped = [skip for case in cases if (skip := case.find("skipped")) is not None]
    detail = f"{len(cases) - len(failed) - len(skipped)} passed"
    if failed:
        detail += f", {len(failed)} failed: {', '.join(case.get('name', '') for case in failed)}"
    if skipped:
        detail += f", {len(skipped)} skipped: {skipped[0].get('message')}"
    return detail, len(cases) - len(skipped)


def _rows_of(path: Path, *, not_before: float) -> int:
    """Of a result file; 0 where there is none, or it was there before."""
    try:
        if path.stat().st_mtime < not_before:
            return 0
        document = json.loads(path.read_text())
    except (OSError, ValueError):
        return 0
    return len(document.get("rows") or document.get("groups") or ())


def _cubins() -> int:
    return len(list(Path(os.environ.get("MOE_NVLINK_CACHE_DIR", "/nowhere")).glob("*.cubin")))


_LOOK = """
import importlib.util, json, sys
def there(name):
    try: return importlib.util.find_spec(name) is not None
    except ImportError: return False
facts = {"missing": [name for name in sys.argv[1:] if not there(name)], "cuda": False}
facts["python"] = sys.version.split()[0]
facts["torch"] = facts["gpu"] = None
if "torch" not in facts["missing"]:
    import torch
    facts["torch"] = torch.__version__
    if torch.cuda.is_available():
        facts["cuda"], facts["gpu"] = True, torch.cuda.get_device_name(0)
print(json.dumps(facts))
"""


def _look() -> dict[str, Any]:
    """What this machine has; asked in another process, which loads torch."""
    facts: dict[str, Any] = {"missing": ["a Python that answers"], "cuda": False}
    with contextlib.suppress(subprocess.TimeoutExpired, ValueError, IndexError):
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", _LOOK, *PACKAGES],
            stdout=subprocess.PIPE,
            text=True,
            check=False,
            timeout=120,
        )
        facts = json.loads(done.stdout.splitlines()[-1])
    return facts


def _stand_in(folder: Path) -> dict[str, str]:
    command = [sys.executable, "-m", "benchmarks.stand_in", str(folder)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, str] = json.loads(done.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="on_gpu.sh", description="The stages of a GPU's minutes.")
    parser.add_argument("stage", choices=[*STAGES, "again"])
    parser.add_argument("names", nargs="*", help=f"of again: {', '.join(STEPS)}")
    parser.add_argument("--rehearse", action="store_true", help="small, without a GPU")
    parser.add_argument("--results", type=Path, required=True)
    given = parser.parse_args()
    try:
        if given.names and given.stage != "again":
            raise ValueError(f"{given.stage} takes no names; on_gpu.sh again {given.names[0]} does")
        stage = again(given.names) if given.stage == "again" else STAGES[given.stage]
    except ValueError as error:
        parser.error(str(error))
    given.results.mkdir(parents=True, exist_ok=True)
    run = Run(
        stage, given.results, time.strftime("%Y-%m-%d", time.gmtime()), rehearse=given.rehearse
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_given: run.stop())
    with run.report_path.open("w") as file:
        status = run.run(Report(file))
    raise SystemExit(status)


if __name__ == "__main__":
    main()
