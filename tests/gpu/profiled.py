"""ncu over our kernels, all ranks in one launch: python -m tests.gpu.profiled --output_file X.json

Leaves beside X.json: a report of ncu for each group of batches, the same as text (so that it can be
read where there is no ncu), and the kernels' source, whose lines the reports name. X.json has a row
a kernel. Whatever goes wrong with text and rows, the reports stay.

ncu runs each kernel several times, and gives memory its old contents back in between. Ranks in
other processes would not take part in that, and the kernel would wait for them for ever. Here all
ranks are one cooperative launch, with their epochs in the memory that is given back: each pass is
the same round. Each pass begins with empty caches.

Exit status 0: a report is there. CANNOT_RUN: ncu is not installed, or may not count here; the last
line says which. Otherwise ncu or the program failed. `--rehearse` runs the program without ncu, on
CPU ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import glob
import gzip
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.gpu.watched import CANNOT_RUN, ROOT
from tests.gpu.watched import PLACES as TOOLKITS

#: Batches, in tokens per rank, of one report each: one process measures a group. If it is cut, the
#: groups before it are there.
GROUPS = ((16, 2048), (1, 64))
#: What a rehearsal runs in their place.
REHEARSED = ((1, 4),)
VERBS = ("dispatch", "combine")

PLACES = tuple(
    place
    for pattern in (*TOOLKITS, "/usr/local/cuda-*/bin", "/opt/nvidia/nsight-compute/*")
    for place in sorted(glob.glob(pattern), reverse=True)
)
SECTIONS = (
    *("SourceCounters", "WarpStateStats", "MemoryWorkloadAnalysis"),
    *("MemoryWorkloadAnalysis_Tables", "SpeedOfLight", "LaunchStats", "Occupancy"),
)
#: What is kept back of the time for the reports as text.
TEXTS_S = 20.0
#: A report is not begun with less time left: loading torch takes the most of it.
LEAST_S = 10.0
#: What ncu says where it may not count, as in a container without the right to.
REFUSED = re.compile(
    r"==ERROR==.*(ERR_NVGPUCTRPERM|not supported|[Uu]nsupported|resource was unavailable).*"
)

#: Kind of text -> ncu's options. The last one has each line of the source with its instructions.
TEXTS = {
    "raw.csv": "--page raw --csv --print-units base",
    "details.txt": "--page details",
    "source.csv": "--page source --csv --print-source cuda,sass",
}
#: Field of a row -> metrics, of which the first that is there counts, and what it is divided by.
METRICS = {
    "duration_us": (("gpu__time_duration.sum",), 1000),
    "registers": (("launch__registers_per_thread",), 1),
    "ctas": (("launch__grid_size",), 1),
    "threads": (("launch__block_size",), 1),
    "occupancy_percent": (("sm__warps_active.avg.pct_of_peak_sustained_active",), 1),
    "dram_percent": (
        (
            "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
            "dram__throughput.avg.pct_of_peak_sustained_elapsed",
        ),
        1,
    ),
    "l2_percent": (("lts__throughput.avg.pct_of_peak_sustained_elapsed",), 1),
}
#: Cycles that a warp waits for a reason, per instruction issued.
STALL = re.compile(
    r"smsp__average_warps_issue_stalled_(\w+?)(?<!_not_issued)_per_issue_active(\.ratio)?"
)


def profiler() -> str | None:
    """ncu's path, or None."""
    return shutil.which("ncu", path=os.pathsep.join([os.environ["PATH"], *PLACES]))


def workload(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "tests.gpu.profiled", "--workload", *arguments]


def command(report: Path, batches: Sequence[int], facts: Path) -> list[str]:
    """ncu over one dispatch and one combine of each batch, after a round that is not counted."""
    chosen = [part for name in SECTIONS for part in ("--section", name)]
    return [
        *(profiler() or "ncu", "--force-overwrite", "--export", str(report)),
        *("--clock-control", "none", "--import-source", "yes", "--profile-from-start", "off"),
        *("--kernel-name", "regex:moe_nvlink", "--launch-count", str(len(VERBS) * len(batches))),
        *chosen,
        *workload("--facts", str(facts), "--batches", *map(str, batches)),
    ]


# What ncu watches.


def run_workload(batches: Sequence[int], *, rehearse: bool, facts: Path | None) -> None:
    """A round of each batch that is checked, then one between the profiler's start and stop."""
    import torch

    from benchmarks import common
    from benchmarks.moe_comm import emulated, options

    made = options.Options(
        backends=("moe_nvlink",),
        batches=tuple(batches),
        ep_size=2 if rehearse else 8,
        device="rehearsal" if rehearse else "cuda",
        emulate_ranks=True,
        router="perfect",
        profile="custom" if rehearse else "deepseek_v3",
        hidden_size=64 if rehearse else 7168,
    )
    if facts is not None:
        machine = common.describe_run() | ({} if rehearse else common.describe_gpu())
        common.write_json(facts, {"machine": machine, "batches": list(batches)})
    with contextlib.closing(emulated.make_backend(made)) as backend:
        for tokens in batches:
            layer = emulated.Layer(made, tokens, backend)
            layer.check()
            with _counted(torch, rehearse):
                layer.dispatch()
                layer.combine()
            layer.ranks.check_faults()
            print(f"{tokens} tokens: a round of {made.ep_size} ranks, no fault", flush=True)


@contextlib.contextmanager
def _counted(torch: Any, rehearse: bool) -> Iterator[None]:
    """Kernels inside are counted; all others are over before, and these are over after."""
    if rehearse:
        yield
        return
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    yield
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


# What it found.


def export(report: Path) -> str:
    """Write each text of a report beside it, compressed, or why there is none. Return raw.csv."""

    def one(kind: str) -> str:
        asked = [profiler() or "ncu", "--import", str(report), *TEXTS[kind].split()]
        seconds = TEXTS_S / len(GROUPS)
        try:
            text = subprocess.check_output(asked, stderr=subprocess.STDOUT, timeout=seconds)
        except (OSError, subprocess.SubprocessError) as error:
            text = str(error).encode()
        (report.parent / f"{report.name}.{kind}.gz").write_bytes(gzip.compress(text))
        return text.decode(errors="replace")

    with ThreadPoolExecutor(len(TEXTS)) as pool:
        return next(iter(pool.map(one, TEXTS)))


def rows_of(raw: str, batches: Sequence[int]) -> list[dict[str, Any]]:
    """Return a row of each kernel; `tokens` is None where nobody can tell.

    Args:
        raw: ncu's raw page.
        batches: each a dispatch and a combine, in the order of the kernels; the last may lack.

    Raises:
        ValueError: the text is not as expected.
    """
    lines = raw.splitlines()
    start = next((n for n, line in enumerate(lines) if '"Kernel Name"' in line), None)
    if start is None:
        raise ValueError(f"no column is called Kernel Name: {raw[:200]!r}")
    # The row below the headings has units.
    found = [row for row in csv.DictReader(lines[start:]) if (row.get("ID") or "").isdigit()]
    rounds = [(verb, tokens) for tokens in batches for verb in VERBS]
    paired = zip(found, rounds, strict=False)  # a report that was cut has fewer
    is_known = len(found) <= len(rounds) and all(
        verb in metrics["Kernel Name"] for metrics, (verb, _tokens) in paired
    )
    return [
        _row(metrics, rounds[number][1] if is_known else None)
        for number, metrics in enumerate(found)
    ]


def _row(metrics: dict[str, Any], tokens: int | None) -> dict[str, Any]:
    row: dict[str, Any] = {"kernel": metrics["Kernel Name"].partition("(")[0], "tokens": tokens}
    for field, (names, divisor) in METRICS.items():
        values = [_number(metrics[name]) for name in names if name in metrics]
        row[field] = next((value / divisor for value in values if value is not None), None)
    stalls = {
        match[1]: value
        for name, text in metrics.items()
        if name and (match := STALL.fullmatch(name)) and (value := _number(text)) is not None
    }
    ordered = sorted(stalls.items(), key=lambda item: -item[1])
    row["stalls"] = {name: round(value, 2) for name, value in ordered[:3]}
    return row


def _number(text: Any) -> float | None:
    try:
        return float(str(text).replace(",", ""))
    except ValueError:
        return None


# The step.


class Profile:
    """The reports of one output file, within `limit_s`."""

    def __init__(self, output: Path, limit_s: float) -> None:
        self._output, self._end = output, time.monotonic() + limit_s
        self._facts = output.with_suffix(".facts")
        self._reports: list[tuple[Path, tuple[int, ...]]] = []
        self._rows: list[dict[str, Any]] = []
        self.said = ""

    def _left_s(self) -> float:
        return self._end - time.monotonic() - TEXTS_S

    def run(self) -> int:
        """Return the exit status."""
        status = 0
        for batches in GROUPS:
            if self._left_s() < LEAST_S:
                print(f"no time is left for {batches}", flush=True)
                break
            report = self._output.with_name(
                f"{self._output.stem}-{'-'.join(map(str, batches))}.ncu-rep"
            )
            status = self._profile(report, batches) or status
            if REFUSED.search(self.said):
                break
        self._keep_source()
        if not self._reports:
            refused = REFUSED.search(self.said)
            if refused:
                print(refused[0])
            return CANNOT_RUN if refused else status or 1
        self._summarise()
        return status

    def _profile(self, report: Path, batches: tuple[int, ...]) -> int:
        report.unlink(missing_ok=True)
        status = self._call(command(report, batches, self._facts))
        if report.exists():
            self._reports.append((report, batches))
            self._rows.append({"report": report.name, "not_summarised": "it was cut before"})
            self._write()
        return status

    def _call(self, asked: list[str]) -> int:
        print(" ".join(asked), flush=True)
        limits = ("timeout", "--signal=INT", "--kill-after=3", f"{max(self._left_s(), 1):.0f}")
        done = subprocess.run(
            [*limits, *asked],
            cwd=ROOT,
            env=os.environ | {"MOE_NVLINK_LINEINFO": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )
        self.said += done.stdout
        print(done.stdout[-4000:], flush=True)
        return done.returncode

    def _keep_source(self) -> None:
        from moe_nvlink_plugin.jit import cache

        with contextlib.suppress(OSError):
            for text in cache.directory().glob("*.cu"):
                kept = self._output.with_name(f"{self._output.stem}-{text.name}.gz")
                kept.write_bytes(gzip.compress(text.read_bytes()))

    def _summarise(self) -> None:
        """Make rows of the reports; whatever happens, the reports stay."""
        rows: list[dict[str, Any]] = []
        for report, batches in self._reports:
            try:
                made = rows_of(export(report), batches)
                rows += [row | {"report": report.name} for row in made]
                expected = len(VERBS) * len(batches)
                if len(made) < expected:
                    raise ValueError(f"it was cut: {len(made)} of {expected} kernels")
            except Exception as error:  # of a version that writes otherwise
                why = f"{type(error).__name__}: {error}"
                rows.append({"report": report.name, "not_summarised": why})
        self._rows = rows
        self._write()
        self._facts.unlink(missing_ok=True)
        print("\n".join(map(str, rows)), flush=True)

    def _write(self) -> None:
        facts: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError):
            facts = json.loads(self._facts.read_text())
        document = {"kind": "ncu", "machine": facts.get("machine", {}), "rows": self._rows}
        unfinished = self._output.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(document, indent=1) + "\n")
        unfinished.replace(self._output)


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--output_file", type=Path)
    parser.add_argument("--limit", type=float, default=55.0, help="seconds for everything")
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--workload", action="store_true", help="what ncu watches")
    parser.add_argument("--batches", type=int, nargs="+", default=[])
    parser.add_argument("--facts", type=Path)
    given = parser.parse_args(arguments)
    if given.workload:
        run_workload(given.batches, rehearse=False, facts=given.facts)
        return 0
    if given.output_file is None:
        parser.error("--output_file says where the reports go")
    if given.rehearse:
        facts = given.output_file.with_suffix(".facts")
        for batches in REHEARSED:
            print("without ncu:", " ".join(command(Path("REPORT"), batches, facts)), flush=True)
            run_workload(batches, rehearse=True, facts=facts)
            rows = [{"tokens": tokens, "kernel": verb} for tokens in batches for verb in VERBS]
            document = json.loads(facts.read_text()) | {"kind": "ncu", "rows": rows}
            given.output_file.write_text(json.dumps(document) + "\n")
        facts.unlink()
        return 0
    if profiler() is None:
        print("ncu is not installed")
        return CANNOT_RUN
    return Profile(given.output_file, given.limit).run()


if __name__ == "__main__":
    raise SystemExit(main())
