"""Every table and plot of README.md and benchmarks/README.md, out of benchmarks/results/.

    python benchmarks/report.py            # rewrites the blocks, draws plots that are out of date
    python benchmarks/report.py --check    # changes nothing; says what is out of date, and exits 1

A block is what stands between `<!-- report: NAME -->` and `<!-- end report -->`; BLOCKS below says
what goes into each. A plot says in its PNG which file it was drawn from, with that file's sha256.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

from benchmarks.reporting import documents, figures, goals, tables
from benchmarks.reporting.files import ReportError, Result, complaints, load, newest
from benchmarks.reporting.tables import Page

ROOT = Path(__file__).resolve().parents[1]
README, METHODS = "README.md", "benchmarks/README.md"
#: Documents -> the section in which measurements stand in blocks only; None: everywhere.
SECTIONS: dict[str, str | None] = {README: "Benchmarks", METHODS: None}
WHAT_TO_DO = "run `python benchmarks/report.py`, look at the changes, commit them with the result"


@dataclasses.dataclass(frozen=True)
class Block:
    """A generated part of a document.

    `patterns`: names of result files, the newest of the first pattern that any file matches is
    taken; none: the block is of all files. `measure`: the command that makes such a file.
    """

    name: str
    document: str
    patterns: tuple[str, ...]
    render: Callable[[Page, Result], str]
    measure: str

    def made_of(self, page: Page, results: Sequence[Result]) -> str:
        found = newest(results, self.patterns)
        if found is None:
            return f"**Not measured yet**: `{self.measure}`."
        try:
            return self.render(page, found)
        except (KeyError, IndexError, TypeError) as error:
            raise ReportError(
                f"block {self.name}: {found.name} is not as its kind {found.kind!r} should be "
                f"({type(error).__name__}: {error}); measure again with `{self.measure}`"
            ) from error


CPU_TABLE = ("*-cpu-moe-comm.json", "*-cpu-ep4.json")
GPU_TABLE = ("*-gpu-moe-comm.json",)
GROWTH_CPU, GROWTH_GPU = ("*-cpu-growth.json",), ("*-gpu-growth.json",)
RECIPES = ("*-cpu-recipes.json",)
MODEL = ("*-model.json",)
SERVE = ("*-cpu-serve.json",)

_COMM = "python benchmarks/bench_moe_comm.py"
_OUT = "--output_file benchmarks/results/DATE"
MEASURE_CPU = f"{_COMM} --ep_size 4 --batches 1 16 128 2048 {_OUT}-cpu-moe-comm.json"
MEASURE_GPU = (
    f"{_COMM} --device cuda --emulate_ranks 8 --cuda_graph --backend moe_nvlink flashinfer "
    f"{_OUT}-gpu-moe-comm.json"
)
MEASURE_GROWTH = f"python benchmarks/growth.py {_OUT}-cpu-growth.json"
MEASURE_GROWTH_GPU = f"python benchmarks/growth.py --device cuda {_OUT}-gpu-growth.json"
MEASURE_SERVE = "python benchmarks/bench_serve.py --output benchmarks/results/DATE-cpu-serve.json"
MEASURE_MODEL = f"python benchmarks/model.py {_OUT}-model.json"
MEASURE_RECIPES = (
    "python benchmarks/bench_recipes.py --output benchmarks/results/DATE-cpu-recipes.json"
)
MEASURE_HEAD = (
    "python benchmarks/bench_lm_head.py --output benchmarks/results/DATE-cpu-lm-head.json"
)
MEASURE_LAUNCH = (
    "python benchmarks/bench_launch.py --output benchmarks/results/DATE-launch-stand-in.json"
)


def whole(page: Page, result: Result) -> str:
    """All rows, and what is to be said beside them."""
    parts = [tables.by_kind(page, result)]
    if result.kind == "moe_comm":
        parts.append(tables.moe_comm_notes(page, result))
    return "\n\n".join(parts)


BLOCKS = (
    Block("serve", METHODS, SERVE, tables.by_kind, MEASURE_SERVE),
    Block("exchange-all", METHODS, CPU_TABLE, whole, MEASURE_CPU),
    Block("gpu-all", METHODS, GPU_TABLE, whole, MEASURE_GPU),
    Block("recipes-all", METHODS, RECIPES, tables.by_kind, MEASURE_RECIPES),
    Block("growth-cpu", METHODS, GROWTH_CPU, tables.by_kind, MEASURE_GROWTH),
    Block("growth-gpu", METHODS, GROWTH_GPU, tables.by_kind, MEASURE_GROWTH_GPU),
    Block("model", METHODS, MODEL, tables.by_kind, MEASURE_MODEL),
    Block("lm-head", METHODS, ("*-cpu-lm-head*.json",), tables.by_kind, MEASURE_HEAD),
    Block("launch", METHODS, ("*-launch*.json",), tables.by_kind, MEASURE_LAUNCH),
)
#: Plots are blocks, too: `![what it shows](file)`, or that it was not measured.
PLOTS = (
    figures.Plot("plot-latency", METHODS, CPU_TABLE[:1], "latency", "Time against tokens per rank"),
    figures.Plot(
        "plot-bandwidth", METHODS, CPU_TABLE[:1], "bandwidth", "GB/s beside the copy ceiling"
    ),
    figures.Plot("plot-growth-cpu", METHODS, GROWTH_CPU, "growth", "Points and fitted curves"),
    figures.Plot("plot-growth-gpu", METHODS, GROWTH_GPU, "growth", "Points and fitted curves"),
    figures.Plot(
        "plot-model-fit", METHODS, MODEL, "model_fit", "Published times beside the model's"
    ),
    figures.Plot(
        "plot-model-bandwidth", METHODS, MODEL, "model_bandwidth", "The same as bandwidth"
    ),
    figures.Plot("plot-model-ours", METHODS, MODEL, "model_ours", "Our kernels, predicted"),
    figures.Plot(
        "plot-model-where", METHODS, MODEL, "model_where", "Where our time goes, predicted"
    ),
)
#: The goals' table is of all files.
GOALS = ("goals", README)


class Report:
    """The documents of a checkout, as they are and as its result files want them."""

    def __init__(self, root: Path = ROOT) -> None:
        self.root = root
        self.results = load(root / "benchmarks" / "results")

    def render(self, document: str, name: str) -> str:
        """One block's contents.

        Raises:
            ReportError: no such block in this document, or its file is not as it should be.
        """
        page = Page(document, self.root)
        if (name, document) == GOALS:
            return goals.goals_table(page, self.results)
        for block in BLOCKS:
            if (block.name, block.document) == (name, document):
                return block.made_of(page, self.results)
        for plot in PLOTS:
            if (plot.name, plot.document) == (name, document):
                return plot.block(page, self.results)
        raise ReportError(
            f"{document}: no block {name!r}; those of this document: "
            f"{', '.join(expected_blocks(document))} (benchmarks/report.py)"
        )

    def wanted(self, document: str) -> str:
        """The document as it should be.

        Raises:
            ReportError: as `render`; or a block has no place in it.
        """
        text = (self.root / document).read_text()
        missing = set(expected_blocks(document)) - set(documents.blocks_of(text, document))
        if missing:
            raise ReportError(
                f"{document}: nowhere stands <!-- report: {sorted(missing)[0]} -->; put it where "
                f"its table belongs, {documents.END} behind it, or take it out of report.py"
            )
        return documents.rewrite(text, document, lambda name: self.render(document, name))

    def problems(self) -> Iterator[str]:
        """Everything in which the documents are not what the result files say."""
        for result in self.results:
            yield from complaints(result)
        for document, section in SECTIONS.items():
            text, wanted = (self.root / document).read_text(), self.wanted(document)
            changes = difflib.unified_diff(
                text.splitlines(), wanted.splitlines(), document, "from result files", "", "", 0, ""
            )
            yield from ["\n".join(lines)] if (lines := list(changes)) else []
            yield from documents.strays(text, document, section)
        yield from figures.problems(PLOTS, self.root, self.results)

    def write(self) -> list[str]:
        """Rewrites what is out of date; returns the names of what it wrote."""
        written = []
        for document in SECTIONS:
            path, wanted = self.root / document, self.wanted(document)
            if path.read_text() != wanted:
                path.write_text(wanted)
                written.append(document)
        return written + figures.draw_stale(PLOTS, self.root, self.results)


def expected_blocks(document: str) -> list[str]:
    places = [(each.name, each.document) for each in (*BLOCKS, *PLOTS)] + [GOALS]
    return [name for name, where in places if where == document]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument(
        "--check", action="store_true", help="change nothing; exit 1 if out of date"
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    options = parse(arguments)
    try:
        report = Report(root)
        if not options.check:
            for name in report.write():
                print(f"wrote {name}")
        problems = list(report.problems())
    except ReportError as error:
        print(error, file=sys.stderr)
        return 1
    for problem in problems:
        print(problem, file=sys.stderr)
    if problems and options.check:
        print(f"What blocks show is out of date? Then {WHAT_TO_DO}.", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
