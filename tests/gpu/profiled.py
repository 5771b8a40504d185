"""ncu over our kernels, all ranks in one launch: python -m tests.gpu.profiled --reports PREFIX

Leaves a report of ncu for each group of batches, the kernels' source, whose lines the reports name,
and the reports as text (so that they can be read where there is no ncu). Each group has its share
of `--limit`, and one that fails or is cut takes nothing of the other.

ncu runs each kernel several times, and gives memory its old contents back in between. Ranks in
other processes would not take part in that, and the kernel would wait for them for ever. Here all
ranks are one cooperative launch, with their epochs in the memory that is given back: each pass is
the same round. Each pass begins with empty caches.

Exit status 0: the reports are there. CANNOT_RUN: there is none, as ncu is not installed or may not
count here; the last line says which. Otherwise ncu or the program failed. `--rehearse` runs the
program without ncu, on CPU ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from moe_nvlink_plugin.jit import cache
from tests.gpu import watched
from tests.gpu.watched import CANNOT_RUN

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
#: What is kept back of a group's time for its texts.
TEXTS_S = 12.0
#: Kind of text -> ncu's options. The last one has each line of the source with its instructions.
TEXTS = {
    "raw.csv": "--page raw --csv --print-units base",
    "details.txt": "--page details",
    "source.csv": "--page source --csv --print-source cuda,sass",
}


def run_rounds(batches: Sequence[int], *, rehearse: bool) -> None:
    """Run a round of each batch that is checked, then one that ncu watches."""
    # It loads torch, which the process that starts ncu has no time for.
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
    import torch

    profiler: Any = torch.cuda.profiler
    torch.cuda.synchronize()
    profiler.start()
    yield
    torch.cuda.synchronize()
    profiler.stop()


def measure(batches: Sequence[int], prefix: str, end: float) -> int:
    """Make a report of one dispatch and one combine of each batch. Return the exit status."""
    report = Path(f"{prefix}-{'-'.join(map(str, batches))}.ncu-rep")
    program = [sys.executable, "-m", "tests.gpu.profiled", "--batches", *map(str, batches)]
    options = ["--export", str(report), *OPTIONS.split(), *program]
    limit_s = end - TEXTS_S - time.monotonic()
    status, said = watched.run("ncu", *options, limit_s=limit_s, MOE_NVLINK_LINEINFO="1")
    print(said[-4000:], flush=True)
    for source in cache.directory().glob("*.cu"):
        shutil.copy(source, f"{prefix}-{source.name}")
    if not report.exists():
        return status or 1
    for kind, page in TEXTS.items():
        pages = ["--import", str(report), *page.split()]
        _status, text = watched.run("ncu", *pages, limit_s=end - time.monotonic())
        Path(f"{report}.{kind}").write_text(text)
    return int(bool(status))


def profile(prefix: str, limit_s: float) -> int:
    """Make the reports within a time. Return the exit status."""
    last, statuses = time.monotonic() + limit_s - watched.SPARE_S, list[int]()
    for number, batches in enumerate(GROUPS):
        now = time.monotonic()
        statuses.append(measure(batches, prefix, now + (last - now) / (len(GROUPS) - number)))
    return CANNOT_RUN if set(statuses) == {CANNOT_RUN} else int(any(statuses))


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--reports", help="where the reports' names begin")
    parser.add_argument("--limit", type=float, default=watched.LIMIT_S, help="seconds in all")
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--batches", type=int, nargs="+", help="run them: what ncu watches")
    given = parser.parse_args(arguments)
    if given.reports is None or given.rehearse:
        run_rounds(given.batches or REHEARSED, rehearse=given.rehearse)
        return 0
    return profile(given.reports, given.limit)


if __name__ == "__main__":
    raise SystemExit(main())
