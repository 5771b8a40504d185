"""Run a stage of steps.py: each step within its limit, whatever becomes of the others.

    python -m tests.gpu.day.stages --out DIR [--rehearse] smoke     # on_gpu.sh calls this

A step is a program in a process group of its own, of which nothing is left when the step ends, when
its time is over, or when this program is asked to end. Two files are complete after every step: a
summary, and an archive of the result files, which benchmarks write batch by batch. A third has what
the steps say, as soon as they say it.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import gzip
import importlib
import importlib.metadata
import io
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from tests.gpu.day.steps import AGAIN_S, STAGES, STEPS, Step, again, limit_of

#: What a step gets between the signal that asks it to end and the signal that ends it.
GRACE_S = 4.0
#: A rehearsal shares two processors with other tests: its limits are there for what hangs.
REHEARSAL_FACTOR = 20.0
#: A program's exit status for "cannot run here"; its last line says why (tests/gpu/watched.py).
CANNOT_RUN = 77
#: What an archive holds at most: a lent machine gives back files of 16 MiB.
ARCHIVE_BYTES = 15 << 20
#: Of gzip. An archive is made anew after every step, while the stage's time runs.
LEVEL = 1
#: When the driver has not said by then which GPU there is, it never will.
ANSWER_S = 20.0


class Outcome(NamedTuple):
    """What became of a step.

    Attributes:
        outcome: passed, failed, cut (its time ran out), "left out" (there was no time for it), or
            "not run" (this machine cannot do it, which counts as no failure).
    """

    step: str
    outcome: str
    detail: str
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.step:14} {self.outcome:8} {self.seconds:6.1f} s  {self.detail}"


@dataclasses.dataclass
class Running:
    """A step that has begun.

    Attributes:
        process: it leads a process group, not a session: if a lent machine ends a command that runs
            over, it ends all of the command's session, and no other.
        said: what it says, from where it was last read.
    """

    step: Step
    limit_s: float
    process: subprocess.Popen[bytes]
    said: BinaryIO
    began: float = dataclasses.field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def end(self) -> None:
        """Send ^C, at which pytest reports what it has; then end the step."""
        os.killpg(self.process.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(GRACE_S)
        self.sweep()

    def sweep(self) -> None:
        """End what is left of it; ranks would keep the GPU busy."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def new_text(self) -> str:
        """Return what it has said since the last time, in whole lines until it has ended."""
        text = self.said.read()
        if self.process.returncode is None:
            whole = text.rfind(b"\n") + 1
            self.said.seek(whole - len(text), os.SEEK_CUR)
            text = text[:whole]
        return text.decode(errors="replace")

    def last_line(self) -> str:
        self.said.seek(0)
        return self.said.read().decode(errors="replace").rstrip().rpartition("\n")[2]


class Day:
    """A stage on this machine.

    Args:
        gpu: its name; "": this is a rehearsal.
        out: takes the three files; each one's name begins with the date and the GPU.
        scratch: an empty folder for what the steps write.

    Attributes:
        limit_s: of the stage; 0 ends it now, and the files are complete all the same.
    """

    def __init__(
        self, stage: str, steps: tuple[Step, ...], gpu: str, out: Path, scratch: Path
    ) -> None:
        self._steps, self._rehearse, self._scratch = steps, not gpu, scratch
        self._factor = 1.0 if gpu else REHEARSAL_FACTOR
        self._began, self.limit_s = time.monotonic(), limit_of(steps) * self._factor
        self._running: list[Running] = []
        self._outcomes: list[Outcome] = []
        self._speaker = ""
        date = time.strftime("%Y-%m-%d", time.gmtime())
        self._facts: dict[str, Any] = {
            "stage": stage,
            "date": date,
            "gpu": gpu,
            "python": platform.python_version(),
            "torch": version_of("torch"),
            "commit": os.environ.get("BENCH_COMMIT"),
            "limit_s": self.limit_s,
            "carried": os.environ.get("GPU_STAGES_CARRIED"),
            "kernels_carried": cubins(),
        }
        model = re.search(r"[a-z]+\d+", gpu.lower())  # such as h100
        name = f"{date}-{(model[0] if model else 'gpu') if gpu else 'rehearsal'}"
        self._results = scratch / "results"
        self._results.mkdir()
        out.mkdir(parents=True, exist_ok=True)
        self._prefix = str(self._results / name)
        self._summary = out / f"{name}-{stage}.json"
        self._report = self._summary.with_suffix(".txt").open("w", buffering=1)

    def run(self) -> int:
        """Return 0 if all is well, 1 if a step failed or had too little time."""
        self._introduce()
        try:
            for step in self._steps:
                if not step.beside:
                    self._wait()
                self._begin(step)
            self._wait()
        finally:  # a full disk, say
            for one in self._running:
                one.sweep()
        return self._conclude()

    def _introduce(self) -> None:
        for name, value in self._facts.items():
            self._say(f"{name:15} {value}")
        self._say("One GPU: nothing here shows NVLink's latency, bandwidth or ordering.")
        if self._rehearse:
            self._say("A rehearsal, small, on CPU ranks and the stand-in for the driver.")
            self._say("None of its times means anything, and GPU tests are only collected.")

    def _conclude(self) -> int:
        self._say(f"\nkernels compiled here, not carried: {self._facts['kernels_compiled_here']}")
        self._say("\n".join(["summary:", *(f"  {outcome}" for outcome in self._outcomes)]))
        well = ("passed", "not run")
        bad = " ".join(each.step for each in self._outcomes if each.outcome not in well)
        self._say(f"NOT WELL; once more: on_gpu.sh again {bad}" if bad else "all well")
        return int(bool(bad))

    def _say(self, text: str) -> None:
        print(text, flush=True)
        print(text, file=self._report)

    def _left_s(self) -> float:
        return self.limit_s - (time.monotonic() - self._began)

    def _begin(self, step: Step) -> None:
        """Start a step, or say why it cannot run."""
        environment = os.environ | step.environment
        if self._left_s() < 0:
            self._add(Outcome(step.name, "left out", "the stage's time was over"))
        elif step.needs and not self._rehearse and not has(step.needs, environment):
            reason = f"{step.needs} is neither carried (benchmarks/carry.sh) nor installed"
            self._add(Outcome(step.name, "not run", reason))
        else:
            self._start(step, environment)

    def _start(self, step: Step, environment: dict[str, str]) -> None:
        limit_s = min(step.limit_s * self._factor, self._left_s())
        text = f"{step.command} {step.rehearsed if self._rehearse else ''}"
        for name, value in (("results", self._prefix), ("limit_s", f"{limit_s:.0f}")):
            text = text.replace(f"{{{name}}}", value)
        command = [sys.executable, *text.split()]
        self._say(f"\n== {step.name}\n{step.variables} {' '.join(command)}".rstrip())
        self._speaker = step.name
        path = self._scratch / f"{step.name}.said"
        with path.open("wb") as said:
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                preexec_fn=os.setpgrp,  # process_group= needs Python 3.11
            )
        self._running.append(Running(step, limit_s, process, path.open("rb")))

    def _wait(self) -> None:
        """Wait for what runs, report what it says, and cut what has had its time."""
        while self._running:
            for one in list(self._running):
                status = one.process.poll()
                if status is not None:
                    one.sweep()
                elif one.seconds > one.limit_s or self._left_s() < 0:
                    one.end()
                self._hear(one)
                if one.process.returncode is not None:
                    self._running.remove(one)
                    self._finish(one, status)
            time.sleep(0.05)

    def _hear(self, one: Running) -> None:
        """Report what a step has said, at once: this program may be killed at any time."""
        if text := one.new_text():
            if self._speaker != one.step.name:
                self._speaker = one.step.name
                self._say(f"-- {one.step.name} says:")
            self._say(text.removesuffix("\n"))

    def _finish(self, one: Running, status: int | None) -> None:
        """Judge a step that has ended. One that was cut has no status."""
        outcome, detail = self._judge(one.step, status, one.last_line()[:200])
        one.said.close()
        self._add(Outcome(one.step.name, outcome, detail, round(one.seconds, 1)))

    def _judge(self, step: Step, status: int | None, last_line: str) -> tuple[str, str]:
        """Return outcome and detail; of a step that was cut there is no status."""
        outcome, detail = "passed", last_line
        if status is None:
            outcome, detail = "cut", "its time was over"
        elif status == CANNOT_RUN:
            outcome = "not run"
        elif status:
            outcome, detail = "failed", f"exit status {status}: {last_line}"
        elif "-m pytest" in step.command and " passed" not in last_line:
            outcome = "not run"
        if f" {{results}}-{step.name}.json" in step.command:
            rows = rows_of(Path(f"{self._prefix}-{step.name}.json"))
            detail = f"{rows} rows; {detail}"
            outcome = "failed" if outcome == "passed" and not rows else outcome
        return outcome, detail

    def _add(self, outcome: Outcome) -> None:
        self._say(f"== {outcome}")
        self._outcomes.append(outcome)
        self._write()

    def _write(self) -> None:
        """Write summary and archive, after every step: this program may be killed at any time."""
        self._facts |= {
            "seconds": round(time.monotonic() - self._began, 1),
            "kernels_compiled_here": cubins() - self._facts["kernels_carried"],
            "too_large_to_come_back": pack(self._results, self._summary.with_suffix(".tar.gz")),
            "steps": [outcome._asdict() for outcome in self._outcomes],
        }
        with renewed(self._summary) as unfinished:
            unfinished.write_text(json.dumps(self._facts, indent=1) + "\n")


def has(module: str, environment: dict[str, str]) -> bool:
    """Whether a program of that environment finds a module."""
    folders = environment.get("PYTHONPATH", "").split(":")
    return PathFinder.find_spec(module, [*folders, *sys.path]) is not None


@contextlib.contextmanager
def renewed(path: Path) -> Iterator[Path]:
    """Whenever this process is killed, the old file is there or the new one."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    yield unfinished
    unfinished.replace(path)


def pack(folder: Path, archive: Path) -> list[str]:
    """Make one archive of a folder's files, small ones first. Return what it has no room for.

    A step that runs may rename or remove a file meanwhile.
    """
    left_out, total = [], 0
    with (
        renewed(archive) as unfinished,
        tarfile.open(unfinished, "w:gz", compresslevel=LEVEL) as to,
    ):
        for size, path in sized(folder):
            total += size
            if total > ARCHIVE_BYTES:
                left_out.append(path.name)
            else:
                with contextlib.suppress(FileNotFoundError):
                    content = path.read_bytes()  # whole, whatever becomes of the file meanwhile
                    member = tarfile.TarInfo(path.name)
                    member.size, member.mtime = len(content), int(path.stat().st_mtime)
                    to.addfile(member, io.BytesIO(content))
    return left_out


def sized(folder: Path) -> list[tuple[int, Path]]:
    """Return the folder's finished files, each after the bytes that it takes in an archive."""
    found = []
    for path in folder.iterdir():
        if path.suffix != ".unfinished":
            with contextlib.suppress(FileNotFoundError, IsADirectoryError):
                found.append((compressed_bytes(path, path.stat().st_mtime_ns), path))
    return sorted(found)


@functools.cache
def compressed_bytes(path: Path, _changed_ns: int) -> int:
    """Return what a file takes in an archive; found once, unless the file has changed."""
    return len(gzip.compress(path.read_bytes(), LEVEL))


def rows_of(path: Path) -> int:
    """Count the rows of a result file; 0: there is no file."""
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError):
        return 0
    return sum(len(document.get(name) or ()) for name in ("rows", "groups", "checks"))


def cubins() -> int:
    return len(list(Path(os.environ.get("MOE_NVLINK_CACHE_DIR", "/nowhere")).glob("*.cubin")))


def version_of(package: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def name_of_gpu() -> str:
    """Return what the driver calls the first GPU; "": there is none."""
    by_torch = "import torch; print(torch.cuda.get_device_name())"
    return first_line("nvidia-smi", "--query-gpu=name", "--format=csv,noheader") or first_line(
        sys.executable, "-c", by_torch
    )


def first_line(*command: str) -> str:
    """Return the first line of what a program prints; "": it fails, or does not answer."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        said = subprocess.check_output(command, text=True, timeout=ANSWER_S)
        return said.partition("\n")[0]
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(prog="on_gpu.sh", description="The stages of a GPU's minutes.")
    parser.add_argument("--rehearse", action="store_true", help="small, without a GPU")
    parser.add_argument("--out", type=Path, required=True, help="where the files go")
    stages = parser.add_subparsers(dest="stage", required=True)
    for name in STAGES:
        stages.add_parser(name)
    stages.add_parser("again").add_argument("names", nargs="+", choices=STEPS, metavar="NAME")
    given = parser.parse_args()
    steps = STAGES.get(given.stage) or again(given.names)
    if given.stage == "again" and limit_of(steps) > AGAIN_S:
        parser.error(f"they may take {limit_of(steps):g} s, of {AGAIN_S:g} s; name fewer")
    gpu = "" if given.rehearse else name_of_gpu()
    if not gpu and not given.rehearse:
        parser.error("nothing can run: neither nvidia-smi nor torch shows a GPU")
    with tempfile.TemporaryDirectory() as scratch:
        if given.rehearse:
            stand_in = importlib.import_module("tests.gpu.day.stand_in")  # imports torch
            os.environ.update(stand_in.environment(Path(scratch)))
        day = Day(given.stage, steps, gpu, given.out, Path(scratch))
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_given: setattr(day, "limit_s", 0.0))
        raise SystemExit(day.run())


if __name__ == "__main__":
    main()
