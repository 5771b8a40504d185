"""Make every table and plot of README.md and benchmarks/README.md out of benchmarks/results/.

    python benchmarks/report.py            # rewrites the blocks, draws plots that are out of date
    python benchmarks/report.py --check    # changes nothing; shows what is out of date, and exits 1

cog fills the blocks: in a document `block("NAME")` between cog's marks is a table of BLOCKS or a
plot of PLOTS. A plot says in its PNG which file it was drawn from, with that file's sha256.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from cogapp import Cog

sys.path.append(str(Path(__file__).resolve().parents[1]))

from benchmarks.moe_comm import plots
from benchmarks.reporting import goals, tables
from benchmarks.reporting.files import ReportError, Result, lacks, link, load, newest

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = ("README.md", "benchmarks/README.md")
#: Where the PNGs lie, from the repository's root.
PLOTS_FOLDER = Path("benchmarks") / "plots"
#: Before the code of each block.
PROLOGUE = (
    "import cog; from benchmarks import report; "
    "block = lambda name: cog.outl(report.block(name, cog.inFile))"
)
WHAT_TO_DO = "run `python benchmarks/report.py`, look at the changes, commit them with the result"


class Table(NamedTuple):
    """A block that `render` makes of the newest file that matches `pattern`."""

    pattern: str
    render: Callable[[Result], str]

    def text(self, name: str, document: Path) -> str:
        found = newest(load(document), self.pattern)
        if found is None:
            return f"**Not measured yet**: no result file is called `{self.pattern}`."
        try:
            return self.render(found).strip("\n")
        except (KeyError, IndexError, TypeError) as error:
            raise ReportError(
                f"block {name}: {found.path.name} is not as a file of that name should be "
                f"({type(error).__name__}: {error}); measure again with the command of its block"
            ) from error


class Pair(NamedTuple):
    """A block that `render` makes of two files of one run: `kind` names the first one's."""

    kind: str
    pattern: str
    render: Callable[[Result, Result], str]

    def text(self, name: str, document: Path) -> str:
        results = load(document)
        second = newest(results, self.pattern)
        if second is None:
            return f"**Not measured yet**: no result file is called `{self.pattern}`."
        wanted = second.path.name.replace(self.pattern.removeprefix("*-GPU"), f"-{self.kind}.json")
        first = next((each for each in results if each.path.name == wanted), None)
        if first is None:
            raise ReportError(
                f"block {name}: {second.path.name} has no {wanted} beside it; measure both in one "
                "run (benchmarks/on_gpu.sh numbers)"
            )
        return self.render(first, second).strip("\n")


class Plot(NamedTuple):
    """A PNG and the block that shows it. `figure`: its name among those of the result's kind."""

    pattern: str
    figure: str
    shows: str

    def text(self, name: str, document: Path) -> str:
        found = newest(load(document), self.pattern)
        if found is None:
            return f"(No plot yet. {self.shows}.)"
        image = f"![{self.shows}]({link(document, file_of(name))})"
        return f"{image}\n\n{self.shows}, from [{found.path.name}]({found.link})."

    def stale(self, path: Path, found: Result | None) -> str:
        """Say why the PNG is not what the newest result file would give."""
        if found is None:
            return f"{path.name}: no result file is there that it shows" if path.exists() else ""
        if not path.exists():
            return f"{path.name}: missing; {found.path.name} is there to draw it from"
        try:
            said, wanted = plots.recorded_source(path) or "", plots.source_of(found.path)
        except OSError as error:
            raise ReportError(f"{path}: {error}; delete it and run benchmarks/report.py") from error
        return "" if said == wanted else f"{path.name}: drawn from {said!r}, not from {wanted!r}"

    def draw(self, path: Path, found: Result) -> None:
        """Draw the result's figure. Raise ReportError if it has no such figure."""
        with tempfile.TemporaryDirectory() as folder:
            try:
                drawn = {png.stem: png for png in plots.plot_file(found.path, Path(folder))}
                png = drawn[self.figure].read_bytes()
            except (KeyError, ValueError) as error:
                raise ReportError(
                    f"{path.name}: {found.path.name} gives no figure {self.figure!r} ({error}); "
                    "name one of benchmarks/moe_comm/plots.py in benchmarks/report.py, or measure "
                    "again"
                ) from error
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png)


CPU_TABLE, GPU_TABLE = "*-cpu-moe-comm.json", "*-GPU-moe-comm.json"
#: Machines and recipes of which the clock's table is shown.
CLOCKED = {("h200", "bf16"), ("h200", "fp8_block"), ("gb200", "bf16"), ("gb200", "nvfp4")}


def _is_shown(row: tables.Row) -> bool:
    return bool(row["ep_size"] == 8 and (row["machine"], row["recipe"]) in CLOCKED)


def _is_every_second(row: tables.Row) -> bool:
    return row["tokens"] in (1, 8, 32, 64, 128, 512)


SCHEDULER = "*-cpu-scheduler.json"
TABLES: dict[str, Table | Pair] = {
    "serve": Table("*-cpu-serve.json", tables.serve),
    "serve-0.2B": Table("*-cpu-serve-0.2B.json", tables.serve),
    "serve-1.7B": Table("*-cpu-serve-1.7B.json", tables.serve),
    "serve-1.7B-4": Table("*-cpu-serve-1.7B-4.json", tables.serve),
    "deaths": Table("*-cpu-deaths.json", tables.deaths),
    "exchange-two": Table("*-cpu-ep2.json", tables.moe_comm_alone),
    "exchange-all": Table(CPU_TABLE, tables.moe_comm),
    "gpu-ratios": Table(GPU_TABLE, tables.ratios),
    "gpu-all": Table(GPU_TABLE, tables.moe_comm),
    "gpu-small-two": Pair("two-ranks", "*-GPU-two-ranks-bulk.json", tables.small_beside_bulk),
    "recipes-all": Table("*-cpu-recipes.json", tables.recipes),
    "recipes-gpu": Table("*-GPU-recipes.json", tables.recipes_gpu),
    "ptx-clock": Table("*-ptx-clock.json", partial(tables.ptx_clock, shows=_is_shown)),
    "ptx-clock-formats": Table(
        "*-ptx-clock-formats.json", partial(tables.ptx_clock, shows=_is_every_second)
    ),
    "ptx-clock-sms": Table("*-ptx-clock-sms.json", tables.ptx_clock),
    "ptx-clock-wide": Table("*-ptx-clock-wide.json", tables.ptx_clock),
    "sync": Table("*-sync.json", tables.sync),
    "lm-head-gpu": Table("*-GPU-lm-head.json", tables.lm_head),
    "launch-gpu": Table("*-GPU-launch.json", tables.launch),
    "scheduler": Table(SCHEDULER, tables.scheduler_waves),
}
PLOTS = {
    "plot-latency": Plot(CPU_TABLE, "latency", "Time against tokens per rank"),
    "plot-scheduler-iterations": Plot(SCHEDULER, "iterations", "Running requests and KV cache"),
    "plot-scheduler-requests": Plot(SCHEDULER, "requests", "Which requests run in which iteration"),
    "plot-scheduler-waits": Plot(SCHEDULER, "waits", "What users wait, against the rate"),
}


def file_of(plot: str) -> Path:
    return PLOTS_FOLDER / f"{plot.removeprefix('plot-')}.png"


def block(name: str, document: str) -> str:
    """Return what stands in a document's block.

    Raises:
        ReportError: no such block, or its file is not as it should be.
    """
    if name == "goals":
        return goals.table(load(Path(document)))
    blocks = TABLES | PLOTS
    if name not in blocks:
        raise ReportError(f"{document}: no block {name!r}; there are goals, {', '.join(blocks)}")
    return blocks[name].text(name, Path(document))


def problems(results: Sequence[Result]) -> Iterator[str]:
    """Yield what is wrong with result files and plots."""
    yield from filter(None, map(lacks, results))
    for name, plot in PLOTS.items():
        if why := plot.stale(file_of(name), newest(results, plot.pattern)):
            yield why
    for path in sorted({*PLOTS_FOLDER.glob("*.png")} - {*map(file_of, PLOTS)}):
        yield f"{path.name}: no plot of benchmarks/report.py; name it there or delete it"


def main(arguments: Sequence[str] | None = None) -> int:
    """Work on the documents below the current directory."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    what = "change nothing; exit 1 if out of date"
    parser.add_argument("--check", action="store_true", help=what)
    options = parser.parse_args(arguments)
    how = ("--check", "--diff") if options.check else ("-r",)
    try:
        results = load()
        for name, plot in {} if options.check else PLOTS.items():
            found = newest(results, plot.pattern)
            if found and plot.stale(file_of(name), found):
                plot.draw(file_of(name), found)
        wrong = list(problems(results))
    except ReportError as error:
        print(error, file=sys.stderr)
        return 1
    for problem in wrong:
        print(problem, file=sys.stderr)
    status = Cog().main(["cog", *how, "-p", PROLOGUE, *DOCUMENTS])
    if options.check and (status or wrong):
        print(f"Is what blocks show out of date? Then {WHAT_TO_DO}.", file=sys.stderr)
    return 1 if wrong else status


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(main())
