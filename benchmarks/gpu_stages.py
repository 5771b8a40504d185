"""Run a stage of gpu_steps.py: each step within its limit, whatever becomes of the others.

    python -m benchmarks.gpu_stages [--rehearse] smoke --results DIR     # on_gpu.sh calls this

A step is a program of its own. If a step is stuck, the runner ends it with all processes that it
has started, and begins the next one. After each step these files are complete: everything that was
said, a summary, and the result files that the benchmarks write batch by batch. This module imports
Python's own library alone, so that it can name the packages that a machine lacks.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import logging
import os
import platform
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
from typing import Any

from benchmarks.gpu_steps import STAGES, STEPS, Stage, Step, again

#: A step does not begin with less time left.
LEAST_S = 5.0
#: What a step gets between the signal that asks it to end and the signal that ends it.
GRACE_S = 4.0
#: A rehearsal shares two processors with other tests.
REHEARSAL_FACTOR = 4.0
#: A program's exit status for "cannot run here"; its last line says why (tests/gpu/watched.py).
CANNOT_RUN = 77
#: Why steps were left out.
TIME_WAS_OVER, ENDED = "the stage's time was over", "ended from outside"

PACKAGES = (
    *("torch", "numpy", "cuda.bindings.driver", "cuda.bindings.nvrtc", "filelock", "pluggy"),
    *("pytest", "pytest_timeout", "hypothesis"),
)

_REPORT = logging.getLogger("gpu_stages")
_REPORT.setLevel(logging.INFO)
_REPORT.propagate = False
say = _REPORT.info


def report_to(path: Path) -> None:
    """From now on `say` writes to the terminal and to this file."""
    _REPORT.handlers = [logging.StreamHandler(sys.stdout), logging.FileHandler(path, "w")]


@dataclasses.dataclass
class Outcome:
    """What became of a step: passed, failed, cut (its time ran out) or "not run"."""

    step: str
    outcome: str
    seconds: float = 0.0
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.step:14} {self.outcome:8} {self.seconds:6.1f} s  {self.detail}"

    @property
    def is_bad(self) -> bool:
        """What a machine cannot do (a tool that its runtime refuses) is named, and no failure."""
        return self.outcome in ("failed", "cut") or self.detail in (TIME_WAS_OVER, ENDED)


class Running:
    """A step's process, in a process group of its own, which one signal ends.

    The group stays in this program's session: whoever ends the session ends the step too.
    """

    def __init__(self, command: Sequence[str], environment: dict[str, str]) -> None:
        self.last_line = ""
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

    def wait(self, limit_s: float, prefix: str) -> int | None:
        """The exit status; None: its time ran out. No process of the step is left."""
        reader = threading.Thread(target=self._read, args=(prefix,), daemon=True)
        reader.start()
        status = None
        try:
            status = self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self.signal(signal.SIGINT)  # pytest says what it has, then
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE_S)
        finally:
            self.signal(signal.SIGKILL)  # ranks that are left would keep the GPU busy
            self._process.wait()
            self.ended = time.monotonic()
        reader.join(GRACE_S)
        return status

    def _read(self, prefix: str) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.last_line = line.strip() or self.last_line
            say("%s", prefix + line.rstrip("\n"))

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to all processes of the step."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


class Run:
    """One stage on this machine.

    Args:
        results: folder for the report, the summary and the benchmarks' result files.
        date: in front of every file's name.
        rehearse: small, without a GPU.
    """

    def __init__(self, stage: Stage, results: Path, date: str, *, rehearse: bool) -> None:
        self.stage, self.rehearse = stage, rehearse
        self._factor = REHEARSAL_FACTOR if rehearse else 1.0
        self._limit_s = stage.limit_s * self._factor
        self._started = time.monotonic()
        self._prefix = f"{results / date}-{'rehearsal' if rehearse else 'gpu'}"
        self._summary = Path(f"{self._prefix}-{stage.name}.json")
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
            "limit_s": self._limit_s,
        }

    def run(self) -> int:
        """Exit status: 0 all well, 1 a step failed, was cut or had no time, 2 nothing could run."""
        reason = self._introduce()
        if reason is not None:
            say(f"\nnothing could run: {reason}")
            self.facts["nothing_could_run"] = reason
            self._write()
            return 2
        for group in self.stage.steps:
            self._run_group(group)
            self._write()
        return self._conclude()

    def stop(self) -> None:
        """Ends the steps that run and begins no other; the summary is still written.

        A signal's handler calls this between any two lines of this program.
        """
        self._stopped = True
        for process in self._running:
            process.signal(signal.SIGKILL)

    def _introduce(self) -> str | None:
        """Says where this is. Returns why nothing can run here, or None."""
        self.facts |= _look()
        for name in ("stage", "date", "commit", "python", "torch", "gpu"):
            say(f"{name:8} {self.facts.get(name)}")
        say(f"carried  {os.environ.get('GPU_STAGES_CARRIED', 'nothing')}")
        if self.rehearse:
            say("A rehearsal, small, on CPU ranks and the stand-in for the driver.")
            say("None of its times means anything, and GPU tests are only collected.")
        say("One GPU: nothing here shows NVLink's latency, bandwidth or ordering.")
        if self.facts["missing"]:
            return f"these packages are missing: {', '.join(self.facts['missing'])}"
        if not self.rehearse:
            return None if self.facts["cuda"] else "torch sees no CUDA device"
        command = [sys.executable, "-m", "benchmarks.stand_in", str(self._scratch)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            return "the stand-in for the driver could not be built; what stopped it stands above"
        self._environment |= json.loads(done.stdout)
        return None

    def _left_s(self) -> float:
        return self._limit_s - (time.monotonic() - self._started)

    def _run_group(self, group: tuple[Step, ...]) -> None:
        ready = [step for step in group if self._may_run(step)]
        limits = [min(step.limit_s * self._factor, self._left_s()) for step in ready]
        commands = [self._command(step) for step in ready]
        for step, command in zip(ready, commands, strict=True):
            say("%s", f"\n== {step.name}\n{' '.join(command)}")
        # All before the first thread: what runs between fork and exec then has no locks to fear.
        self._running = [Running(command, self._environment) for command in commands]
        if self._stopped:
            self.stop()
        with ThreadPoolExecutor(len(group)) as pool:
            prefixes = [f"[{step.name}] " if group[1:] else "" for step in ready]
            statuses = pool.map(Running.wait, self._running, limits, prefixes)
            for step, process, status, limit in zip(
                ready, self._running, statuses, limits, strict=True
            ):
                self._add(self._judge(step, process, status, limit))

    def _may_run(self, step: Step) -> bool:
        reason = ""
        if self._stopped:
            reason = ENDED
        elif self._left_s() < LEAST_S:
            reason = TIME_WAS_OVER
        elif step.needs and not self.rehearse and not _is_there(step.needs):
            reason = f"{step.needs} was not carried (benchmarks/carry.sh) and is not installed"
        if reason:
            self._add(Outcome(step.name, "not run", detail=reason))
        return not reason

    def _add(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        say("%s", f"== {outcome}")

    def _command(self, step: Step) -> list[str]:
        parts = step.command + (step.rehearsed if self.rehearse else ())
        return [sys.executable, *map(self._filled, parts, [step] * len(parts))]

    def _filled(self, part: str, step: Step) -> str:
        return part.replace("{results}", self._prefix).replace("{junit}", str(self._junit(step)))

    def _junit(self, step: Step) -> Path:
        return self._scratch / f"{step.name}.xml"

    def _judge(self, step: Step, process: Running, status: int | None, limit_s: float) -> Outcome:
        seconds = round(process.ended - process.started, 1)
        outcome, detail = "passed" if status == 0 else "failed", ""
        if status is None:
            outcome, detail = "cut", f"at {limit_s:.0f} s"
        elif status and self._stopped:
            outcome, detail = "cut", ENDED
        elif status == CANNOT_RUN:
            outcome, detail = "not run", process.last_line
        elif status:
            detail = f"exit status {status}"
        if self._junit(step).exists():
            detail, ran = _tests_of(self._junit(step))
            if outcome == "passed" and not ran:
                outcome = "not run"
        elif step.result is not None:
            written = Path(self._filled(step.result, step))
            rows = _rows_of(written, not_before=time.time() - seconds - 1)
            detail += f"{', ' if detail else ''}{rows} rows in {written.name}"
            if outcome == "passed" and not rows:
                outcome = "failed"
        return Outcome(step.name, outcome, seconds, detail)

    def _conclude(self) -> int:
        compiled = self.facts["kernels_compiled_here"] = _cubins() - self._cubins
        say(f"\nkernels compiled here, because they were not carried: {compiled}")
        self._write()
        say(f"\nsummary of {self.stage.name} after {time.monotonic() - self._started:.0f} s:")
        for outcome in self.outcomes:
            say("%s", f"  {outcome}")
        bad = [outcome.step for outcome in self.outcomes if outcome.is_bad]
        names = ", ".join(bad)
        say(f"NOT WELL: {names}; again: on_gpu.sh again {' '.join(bad)}" if bad else "all well")
        return int(bool(bad))

    def _write(self) -> None:
        """After every step: this program may be ended at any time."""
        seconds = round(time.monotonic() - self._started, 1)
        steps = [dataclasses.asdict(outcome) for outcome in self.outcomes]
        unfinished = self._summary.with_suffix(".unfinished")
        text = json.dumps(self.facts | {"seconds": seconds, "steps": steps}, indent=1)
        unfinished.write_text(text + "\n")
        unfinished.replace(self._summary)


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
    """Rows of a result file; 0: there is no file, or it was there before."""
    try:
        if path.stat().st_mtime < not_before:
            return 0
        document = json.loads(path.read_text())
    except (OSError, ValueError):
        return 0
    return len(document.get("rows") or document.get("groups") or ())


def _cubins() -> int:
    return len(list(Path(os.environ.get("MOE_NVLINK_CACHE_DIR", "/nowhere")).glob("*.cubin")))


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:  # a package that it would be in
        return False


_ASK_TORCH = """
import torch
print(torch.__version__)
print(torch.cuda.get_device_name(0) if torch.cuda.is_available() else "")
"""


def _look() -> dict[str, Any]:
    """What this machine has. Another process loads torch."""
    missing = [name for name in PACKAGES if not _is_there(name)]
    facts: dict[str, Any] = {"missing": missing, "python": platform.python_version()}
    version, gpu = None, ""
    if "torch" not in missing:
        command = [sys.executable, "-W", "ignore", "-c", _ASK_TORCH]
        try:
            said = subprocess.check_output(command, text=True, timeout=120)
            version, gpu = said.removesuffix("\n").split("\n")[-2:]
        except subprocess.SubprocessError:
            missing.append("a torch that answers")
    return facts | {"torch": version, "gpu": gpu or None, "cuda": bool(gpu)}


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
    report_to(run.report_path)
    raise SystemExit(run.run())


if __name__ == "__main__":
    main()
