"""ncu over our kernels, all ranks in one launch: python -m tests.gpu.profiled --reports PREFIX

Leaves a report of ncu for each group of batches, the same as text (so that it can be read where
there is no ncu), and the kernels' source, whose lines the reports name. If it is cut, the groups
before are there.

ncu runs each kernel several times, and gives memory its old contents back in between. Ranks in
other processes would not take part in that, and the kernel would wait for them for ever. Here all
ranks are one cooperative launch, with their epochs in the memory that is given back: each pass is
the same round. Each pass begins with empty caches.

Exit status 0: the reports are there. CANNOT_RUN: ncu is not installed, or may not count here; the
last line says which. Otherwise ncu or the program failed. `--rehearse` runs the program without
ncu, on CPU ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.moe_comm import emulated, options
from moe_nvlink_plugin.jit import cache
from tests.gpu import watched

#: Batches, in tokens per rank, of one report each.
GROUPS = ((16, 2048), (1, 64))
#: What a rehearsal runs in their place.
REHEARSED = (1, 4)
#: Of our kernels alone, each with its counters and the lines of its source.
OPTIONS = (
    "--force-overwrite --clock-control none --import-source yes --profile-from-start off"
    " --kernel-name regex:moe_nvlink --section SourceCounters --section WarpStateStats"
    " --section MemoryWorkloadAnalysis --section MemoryWorkloadAnalysis_Tables"
    " --section SpeedOfLight --section LaunchStats --section Occupancy"
)
#: Kind of text -> ncu's options. The last one has each line of the source with its instructions.
TEXTS = {
    "raw.csv": "--page raw --csv --print-units base",
    "details.txt": "--page details",
    "source.csv": "--page source --csv --print-source cuda,sass",
}


def run_rounds(batches: Sequence[int], *, rehearse: bool) -> None:
    """Run a round of each batch that is checked, then one that ncu watches."""
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
    with contextlib.closing(emulated.make_backend(made)) as backend:
        for tokens in batches:
            layer = emulated.Layer(made, tokens, backend)
            layer.check()
            with contextlib.nullcontext() if rehearse else counted():
                layer.dispatch()
                layer.combine()
            layer.ranks.check_faults()
            print(f"{tokens} tokens: a round of {made.ep_size} ranks, no fault", flush=True)


@contextlib.contextmanager
def counted() -> Iterator[None]:
    """Kernels inside are counted; all others are over before, and these are over after."""
    profiler: Any = torch.cuda.profiler
    torch.cuda.synchronize()
    profiler.start()
    yield
    torch.cuda.synchronize()
    profiler.stop()


def measure(batches: Sequence[int], report: Path) -> tuple[int, str]:
    """Make a report of one dispatch and one combine of each batch, and its texts beside it."""
    program = [sys.executable, "-m", "tests.gpu.profiled", "--batches", *map(str, batches)]
    options = ["--export", str(report), *OPTIONS.split(), *program]
    status, said = watched.run("ncu", *options, MOE_NVLINK_LINEINFO="1")
    for kind, page in TEXTS.items() if report.exists() else ():
        _status, text = watched.run("ncu", "--import", str(report), *page.split())
        Path(f"{report}.{kind}").write_text(text)
    return status, said


def profile(prefix: str) -> int:
    """Make the reports and keep the kernels' source. Return the exit status."""
    worst = 0
    for batches in GROUPS:
        report = Path(f"{prefix}-{'-'.join(map(str, batches))}.ncu-rep")
        status, said = measure(batches, report)
        print(said[-4000:], flush=True)
        if status == watched.CANNOT_RUN:
            return status
        worst = status or worst
        for source in cache.directory().glob("*.cu"):
            shutil.copy(source, f"{prefix}-{source.name}")
    return worst


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--reports", help="where the reports' names begin")
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--batches", type=int, nargs="+", help="run them: what ncu watches")
    given = parser.parse_args(arguments)
    if given.reports is None or given.rehearse:
        run_rounds(given.batches or REHEARSED, rehearse=given.rehearse)
        return 0
    return profile(given.reports)


if __name__ == "__main__":
    raise SystemExit(main())
