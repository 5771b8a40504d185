"""ncu over our kernels, all ranks in one launch: python -m tests.gpu.profiled --output_file X.json

Leaves beside X.json: a report of ncu for each group of batches, the same as text (so that it can be
read where there is no ncu), and the kernels' source, whose lines the reports name. X.json has a row
a report.

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
REHEARSED = (1, 4)
#: Kernels of a batch.
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
#: What is kept back of the time for the texts of a report.
TEXTS_S = 10.0
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


# The step.


def export(report: Path) -> None:
    """Write each text of a report beside it, compressed, or why there is none."""

    def one(kind: str) -> None:
        asked = [profiler() or "ncu", "--import", str(report), *TEXTS[kind].split()]
        try:
            text = subprocess.check_output(asked, stderr=subprocess.STDOUT, timeout=TEXTS_S)
        except (OSError, subprocess.SubprocessError) as error:
            text = str(error).encode()
        report.with_name(f"{report.name}.{kind}.gz").write_bytes(gzip.compress(text))

    with ThreadPoolExecutor(len(TEXTS)) as pool:
        list(pool.map(one, TEXTS))


def profile(output: Path, limit_s: float) -> int:
    """Make the reports within a time, and write `output` after each. Return the exit status."""
    end, facts, rows = time.monotonic() + limit_s, output.with_suffix(".facts"), list[Any]()
    status, said = 0, ""
    for batches in GROUPS:
        left_s = end - time.monotonic() - TEXTS_S
        if left_s < LEAST_S or REFUSED.search(said):
            print(f"no time is left for {batches}, or ncu refuses", flush=True)
            break
        report = output.with_name(f"{output.stem}-{'-'.join(map(str, batches))}.ncu-rep")
        report.unlink(missing_ok=True)
        asked = command(report, batches, facts)
        print(" ".join(asked), flush=True)
        done = subprocess.run(
            ["timeout", "--signal=INT", "--kill-after=3", f"{left_s:.0f}", *asked],
            cwd=ROOT,
            env=os.environ | {"MOE_NVLINK_LINEINFO": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )
        said, status = said + done.stdout, done.returncode or status
        print(done.stdout[-4000:], flush=True)
        if report.exists():
            export(report)
            rows.append({"report": report.name, "batches": batches})
            machine = json.loads(facts.read_text()) if facts.exists() else {}
            output.write_text(json.dumps(machine | {"kind": "ncu", "rows": rows}, indent=1) + "\n")
    _keep_source(output)
    if rows or not (refused := REFUSED.search(said)):
        return status
    print(refused[0])
    return CANNOT_RUN


def _keep_source(output: Path) -> None:
    from moe_nvlink_plugin.jit import cache

    with contextlib.suppress(OSError):
        for text in cache.directory().glob("*.cu"):
            kept = output.with_name(f"{output.stem}-{text.name}.gz")
            kept.write_bytes(gzip.compress(text.read_bytes()))


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
        print("without ncu:", " ".join(command(Path("REPORT"), REHEARSED, facts)), flush=True)
        run_workload(REHEARSED, rehearse=True, facts=facts)
        document = json.loads(facts.read_text()) | {"kind": "ncu", "rows": [{"report": None}]}
        given.output_file.write_text(json.dumps(document) + "\n")
        return 0
    if profiler() is None:
        print("ncu is not installed")
        return CANNOT_RUN
    return profile(given.output_file, given.limit)


if __name__ == "__main__":
    raise SystemExit(main())
