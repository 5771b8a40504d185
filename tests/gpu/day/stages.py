"""Run a stage of steps.py: each step within its limit, whatever becomes of the others.

    python -m tests.gpu.day.stages [--rehearse] smoke --results DIR     # on_gpu.sh calls this
    ... --results SCRATCH --back DIR    # report and summary into DIR; the results as one archive

A step is a program of its own, which coreutils' `timeout` starts and cuts. After each step the
runner ends all processes that the step has started. Three kinds of files are then complete: all
that was said, a summary, and the result files that the benchmarks write batch by batch. With
`--back` one archive takes the latter, anew after every step. This module imports Python's own
library alone, so that it can name the packages that a machine lacks.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

from tests.gpu.day.steps import STAGES, STEPS, Stage, Step, again

#: A step does not begin with less time left.
LEAST_S = 5.0
#: What a step gets between the signal that asks it to end and the signal that ends it.
GRACE_S = 4
#: A rehearsal shares two processors with other tests: its limits are there for what hangs.
REHEARSAL_FACTOR = 20.0
#: A program's exit status for "cannot run here"; its last line says why (tests/gpu/watched.py).
CANNOT_RUN = 77
#: The exit status of coreutils' `timeout`.
TIMED_OUT = 124
#: What an archive holds at most, before compression: a lent machine gives back files of 16 MiB.
ARCHIVE_BYTES = 15 << 20
#: Why steps were left out.
TIME_WAS_OVER, ENDED = "the stage's time was over", "ended from outside"


@dataclasses.dataclass
class Outcome:
    """A step's outcome: passed, failed, cut (its time ran out) or "not run"."""

    step: str
    outcome: str
    seconds: float = 0.0
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.step:14} {self.outcome:8} {self.seconds:6.1f} s  {self.detail}"

    @property
    def is_bad(self) -> bool:
        """Count no failure if a machine cannot do a thing (a tool that its runtime refuses)."""
        return self.outcome in ("failed", "cut") or self.detail in (TIME_WAS_OVER, ENDED)


class Run:
    """One stage on this machine. Each file's name begins with `date` and the GPU.

    Args:
        results: where the benchmarks write.
        back: where report, summary and an archive of `results` go; None: no archive is made, and
            they go to `results`.
    """

    def __init__(
        self, stage: Stage, results: Path, date: str, *, rehearse: bool, back: Path | None = None
    ) -> None:
        self.stage, self.rehearse = stage, rehearse
        self._factor = REHEARSAL_FACTOR if rehearse else 1.0
        self._limit_s = stage.limit_s * self._factor
        self._started = time.monotonic()
        for folder in (results, back or results):
            folder.mkdir(parents=True, exist_ok=True)
        found = look()
        begin = f"{date}-{'rehearsal' if rehearse else slug(found['gpu'])}"
        self._results, self._prefix = results, str(results / begin)
        self._summary = (back or results) / f"{begin}-{stage.name}.json"
        self._archive = self._summary.with_suffix(".tar.gz") if back else None
        self._report = self._summary.with_suffix(".txt").open("w", buffering=1)
        self._environment = dict(os.environ)
        self._running: list[subprocess.Popen[str]] = []
        self._stopped, self._saying = False, threading.Lock()
        self.outcomes: list[Outcome] = []
        self.facts: dict[str, Any] = {
            "stage": stage.name,
            "date": date,
            "commit": os.environ.get("BENCH_COMMIT", "unknown"),
            "rehearsal": rehearse,
            "limit_s": self._limit_s,
        } | found

    def run(self) -> int:
        """Return 0 if all is well, 1 if a step failed, was cut or had no time, 2 if none ran."""
        cubins = _cubins()
        if reason := self._introduce():
            self._say(f"\nnothing could run: {reason}")
            self._write(nothing_could_run=reason)
            return 2
        for group in self.stage.steps:
            prefixes = [f"[{step.name}] " if group[1:] else "" for step in group]
            with ThreadPoolExecutor(len(group)) as pool:
                self.outcomes += pool.map(self._step, group, prefixes)
            self._write(kernels_compiled_here=_cubins() - cubins)
        return self._conclude()

    def stop(self) -> None:
        """End the steps that run and begin no other; the summary is still written.

        A signal's handler calls this between any two lines of this program.
        """
        self._stopped = True
        for process in list(self._running):
            _kill_group(process)

    def _say(self, text: str) -> None:
        with self._saying:  # steps side by side: a line of one, then a line of another
            print(text, flush=True)
            print(text, file=self._report)

    def _introduce(self) -> str:
        """Say where this is. Return why nothing can run here, or nothing."""
        for name in ("stage", "date", "commit", "python", "torch", "gpu"):
            self._say(f"{name:8} {self.facts.get(name)}")
        self._say(f"carried  {os.environ.get('GPU_STAGES_CARRIED', 'nothing')}")
        self._say("One GPU: nothing here shows NVLink's latency, bandwidth or ordering.")
        if self.facts["missing"]:
            return f"a package is missing: {self.facts['missing']}"
        if not self.rehearse:
            return "" if self.facts["gpu"] else "torch sees no CUDA device"
        self._say("A rehearsal, small, on CPU ranks and the stand-in for the driver.")
        self._say("None of its times means anything, and GPU tests are only collected.")
        command = [sys.executable, "-m", "tests.gpu.day.stand_in", tempfile.mkdtemp()]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            return "the stand-in for the driver could not be built; what stopped it stands above"
        self._environment |= json.loads(done.stdout)
        return ""

    def _left_s(self) -> float:
        return self._limit_s - (time.monotonic() - self._started)

    def _step(self, step: Step, prefix: str) -> Outcome:
        """Run a step to its end; no process of it is left. `prefix`: of each line it says."""
        limit_s = min(step.limit_s * self._factor, self._left_s())
        if reason := self._why_not(step):
            outcome = Outcome(step.name, "not run", detail=reason)
        else:
            parts = step.command + (step.rehearsed if self.rehearse else ())
            command = [sys.executable, *(self._filled(part) for part in parts)]
            set_here = [f"{name}={value}" for name, value in step.variables]
            self._say(f"\n== {step.name}\n{' '.join([*set_here, *command])}")
            started = time.time()
            variables = self._environment | dict(step.variables)
            if (path := self._environment.get(step.path)) is not None:
                variables["PYTHONPATH"] = path
            status, last_line = self._run(command, variables, limit_s, prefix)
            outcome = self._judge(step, status, started, limit_s, last_line)
        self._say(f"== {outcome}")
        return outcome

    def _why_not(self, step: Step) -> str:
        if self._stopped:
            return ENDED
        if self._left_s() < LEAST_S:
            return TIME_WAS_OVER
        if step.needs and not self.rehearse and not self._has_what_it_needs(step):
            return f"{step.needs} was not carried (benchmarks/carry.sh) and is not installed"
        return ""

    def _has_what_it_needs(self, step: Step) -> bool:
        path = self._environment.get(step.path)
        if path is not None:
            return any(Path(folder, step.needs).is_dir() for folder in path.split(":"))
        return importlib.util.find_spec(step.needs) is not None

    def _filled(self, part: str) -> str:
        return part.replace("{results}", self._prefix)

    def _run(
        self, command: list[str], variables: dict[str, str], limit_s: float, prefix: str
    ) -> tuple[int, str]:
        """Return exit status and last line.

        `timeout` leads a process group, which holds the step. At the limit pytest gets ^C, so that
        it reports what it has.
        """
        limits = (f"--kill-after={GRACE_S}", f"{limit_s:.1f}")
        process = subprocess.Popen(
            ["timeout", "--signal=INT", *limits, *command],
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        self._running.append(process)
        if self._stopped:
            self.stop()
        assert process.stdout is not None
        lines = [""]
        reader = threading.Thread(
            target=self._read, args=(process.stdout, prefix, lines), daemon=True
        )
        reader.start()
        status = process.wait()
        self._running.remove(process)
        _kill_group(process)  # ranks that are left would keep the GPU busy
        reader.join(GRACE_S)
        return status, lines[-1]

    def _read(self, stdout: IO[str], prefix: str, lines: list[str]) -> None:
        for line in stdout:
            lines += [line.strip()] if line.strip() else []
            self._say(prefix + line.rstrip("\n"))

    def _judge(
        self, step: Step, status: int, started: float, limit_s: float, last_line: str
    ) -> Outcome:
        seconds = time.time() - started
        said = last_line[:200]
        outcome, detail = (
            ("failed", f"exit status {status}: {said}") if status else ("passed", said)
        )
        if status and self._stopped:
            outcome, detail = "cut", ENDED
        elif status == TIMED_OUT or (status and seconds >= limit_s):
            outcome, detail = "cut", f"at {limit_s:.0f} s"
        elif status == CANNOT_RUN or (step.is_tests and not status and " passed" not in said):
            outcome, detail = "not run", said
        if step.result is not None:
            written = Path(self._filled(step.result))
            rows = _rows_of(written, not_before=started - 1)
            found = f"{rows} rows in {written.name}"
            detail = found if outcome == "passed" else f"{detail}, {found}"
            outcome = "failed" if outcome == "passed" and not rows else outcome
        return Outcome(step.name, outcome, round(seconds, 1), detail)

    def _conclude(self) -> int:
        compiled = self.facts["kernels_compiled_here"]
        self._say(f"\nkernels compiled here, because they were not carried: {compiled}")
        self._say(f"\nsummary of {self.stage.name} after {self.facts['seconds']:.0f} s:")
        for outcome in self.outcomes:
            self._say(f"  {outcome}")
        bad = [outcome.step for outcome in self.outcomes if outcome.is_bad]
        well = f"NOT WELL: {', '.join(bad)}; again: on_gpu.sh again {' '.join(bad)}"
        self._say(well if bad else "all well")
        return int(bool(bad))

    def _write(self, **facts: Any) -> None:
        """Write summary and archive, after every step: this program may be ended at any time."""
        self.facts |= {"seconds": round(time.monotonic() - self._started, 1)} | facts
        steps = [dataclasses.asdict(outcome) for outcome in self.outcomes]
        if self._archive and (lost := pack(self._results, self._archive)):
            self.facts["too_large_to_come_back"] = lost
            self._say(f"too large to come back ({ARCHIVE_BYTES} bytes in all): {', '.join(lost)}")
        unfinished = self._summary.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(self.facts | {"steps": steps}, indent=1) + "\n")
        unfinished.replace(self._summary)


def pack(folder: Path, archive: Path) -> list[str]:
    """Make one archive of a folder's files, small ones first. Return what it has no room for.

    Whenever this process is killed, the old archive is there or the new one.
    """
    left_out, total = [], 0
    unfinished = archive.with_name(f"{archive.name}.unfinished")
    with tarfile.open(unfinished, "w:gz", compresslevel=6) as packed:
        for path in sorted(folder.iterdir(), key=lambda each: (each.stat().st_size, each)):
            if path.suffix == ".unfinished" or not path.is_file():
                continue
            total += path.stat().st_size
            if total > ARCHIVE_BYTES:
                left_out.append(path.name)
            else:
                packed.add(path, path.name)
    unfinished.replace(archive)
    return left_out


def slug(gpu: str | None) -> str:
    """Return the model in a GPU's name, such as "h100"; of letters and digits alone."""
    words = re.findall(r"[a-z0-9]+", (gpu or "gpu").lower())
    return next((word for word in words if re.search(r"\d", word)), "".join(words))


def _kill_group(process: subprocess.Popen[str]) -> None:
    """End all processes of a step. Before `timeout` has made its group it is alone."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        process.kill()


def _rows_of(path: Path, *, not_before: float) -> int:
    """Count the rows of a result file; 0: there is no file, or it was there before."""
    try:
        if path.stat().st_mtime < not_before:
            return 0
        document = json.loads(path.read_text())
    except (OSError, ValueError):
        return 0
    return sum(len(document.get(name) or ()) for name in ("rows", "groups", "checks"))


def _cubins() -> int:
    return len(list(Path(os.environ.get("MOE_NVLINK_CACHE_DIR", "/nowhere")).glob("*.cubin")))


#: What every step needs; the answer is about torch.
_ASK = """
import cuda.bindings.driver, cuda.bindings.nvrtc, filelock, hypothesis, numpy, pluggy
import pytest, pytest_timeout, torch
print(torch.__version__)
print(torch.cuda.get_device_name(0) if torch.cuda.is_available() else "")
"""


def look() -> dict[str, Any]:
    """Return what this machine has. Another process loads torch."""
    found = {"missing": "", "python": platform.python_version(), "torch": None, "gpu": None}
    command = [sys.executable, "-W", "ignore", "-c", _ASK]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        return found | {"missing": done.stderr.strip().rpartition("\n")[2] or "no torch answers"}
    version, gpu = done.stdout.removesuffix("\n").split("\n")[-2:]
    return found | {"torch": version, "gpu": gpu or None}


def main() -> None:
    parser = argparse.ArgumentParser(prog="on_gpu.sh", description="The stages of a GPU's minutes.")
    parser.add_argument("stage", choices=[*STAGES, "again"])
    parser.add_argument("names", nargs="*", help=f"of again: {', '.join(STEPS)}")
    parser.add_argument("--rehearse", action="store_true", help="small, without a GPU")
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--back", type=Path, help="takes an archive of the results")
    given = parser.parse_args()
    try:
        if given.names and given.stage != "again":
            raise ValueError(f"{given.stage} takes no names; on_gpu.sh again {given.names[0]} does")
        stage = again(given.names) if given.stage == "again" else STAGES[given.stage]
    except ValueError as error:
        parser.error(str(error))
    date = time.strftime("%Y-%m-%d", time.gmtime())
    run = Run(stage, given.results, date, rehearse=given.rehearse, back=given.back)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_given: run.stop())
    raise SystemExit(run.run())


if __name__ == "__main__":
    main()
