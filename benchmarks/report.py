"""Every table and plot of README.md and benchmarks/README.md, out of benchmarks/results/.

    python benchmarks/report.py            # rewrites the blocks, draws plots that are out of date
    python benchmarks/report.py --check    # changes nothing; says what is out of date, and exits 1

A block is what stands between `<!-- report: NAME -->` and `<!-- end report -->`; BLOCKS below says
what goes into each. A plot says in its PNG which file it was drawn from, with that file's sha256.
"""

from __future__ import annotations

import argparse
import difflib
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.append(str(Path(__file__).resolve().parents[1]))

from benchmarks.moe_comm import plots
from benchmarks.reporting import goals, tables
from benchmarks.reporting.files import Page, ReportError, Result, complaints, load, newest

ROOT = Path(__file__).resolve().parents[1]
README, METHODS = "README.md", "benchmarks/README.md"
#: Documents -> the section in which measurements stand in blocks only; None: everywhere.
SECTIONS: dict[str, str | None] = {README: "Benchmarks", METHODS: None}
WHAT_TO_DO = "run `python benchmarks/report.py`, look at the changes, commit them with the result"
#: Where the PNGs lie, from the repository's root.
PLOTS_FOLDER = Path("benchmarks") / "plots"

END = "<!-- end report -->"
BLOCK = re.compile(r"^<!-- report: ([a-z0-9-]+) -->\n(?:.*\n)*?<!-- end report -->$", re.MULTILINE)
MARK = re.compile(r"^<!-- (?:report: .*|end report) -->$", re.MULTILINE)

#: A measured number with its unit, in prose. Sizes and counts of a method are none.
MEASURED = re.compile(
    r"\b\d[\d.,]*\s?(?:us|ms|microseconds|milliseconds|GB/s|tokens/s|tokens per second)\b"
    r"|\b\d[\d.,]*x\b"
    r"|\b\d[\d.,]*\s?times (?:as |faster|slower|more|less)"
)
#: A table's cell that is a number, bold or not, with a unit or not.
NUMBER = re.compile(r"^\W*\d[\d.,]*\s?(?:x|%|us|ms|GB/s)?(?:\s?\(.*\))?\W*$")
#: Sections that begin so reason about a model's constants, assumed and fitted: no measurements.
PREDICTED = "Analytical model"
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A generated part of a document: `render` makes it of the newest file of `patterns`.

    `measure`: the command that makes such a file.
    """

    name: str
    document: str
    patterns: tuple[str, ...]
    render: Callable[[Page, Result], str]
    measure: str

    def text(self, page: Page, results: Sequence[Result]) -> str:
        found = newest(results, self.patterns)
        if found is None:
            return f"**Not measured yet**: `{self.measure}`."
        try:
            return self.render(page, found)
        except (KeyError, IndexError, TypeError) as error:
            raise ReportError(
                f"block {self.name}: {found.name} is not as a file of that name should be "
                f"({type(error).__name__}: {error}); measure again with `{self.measure}`"
            ) from error


class Plot(NamedTuple):
    """A PNG and the block that shows it. `figure`: its name among those of the result's kind."""

    name: str
    document: str
    patterns: tuple[str, ...]
    figure: str
    shows: str

    def file(self, root: Path) -> Path:
        return root / PLOTS_FOLDER / f"{self.name.removeprefix('plot-')}.png"

    def text(self, page: Page, results: Sequence[Result]) -> str:
        found = newest(results, self.patterns)
        if found is None:
            return f"(No plot yet. {self.shows}.)"
        return (
            f"![{self.shows}]({page.link(self.file(page.root))})\n\n"
            f"{self.shows}, from [{found.name}]({page.link(found.path)})."
        )

    def stale(self, root: Path, results: Sequence[Result]) -> str | None:
        """Why the PNG is not what the newest result file would give; None: it is."""
        found, path = newest(results, self.patterns), self.file(root)
        if found is None:
            return f"{path.name}: no result file is there that it shows" if path.exists() else None
        if not path.exists():
            return f"{path.name}: missing; {found.name} is there to draw it from"
        try:
            said, wanted = plots.recorded_source(path) or "", plots.source_of(found.path)
        except OSError as error:
            raise ReportError(f"{path}: {error}; delete it and run benchmarks/report.py") from error
        return None if said == wanted else f"{path.name}: drawn from {said!r}, not from {wanted!r}"

    def draw(self, root: Path, results: Sequence[Result]) -> str:
        """Draws the PNG of the newest file; returns its name.

        Raises:
            ReportError: the result has no such figure.
        """
        found, png = newest(results, self.patterns), self.file(root)
        assert found is not None
        png.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            try:
                files = {path.stem: path for path in plots.plot_file(found.path, Path(folder))}
                shutil.copy(files[self.figure], png)
            except (KeyError, ValueError) as error:
                raise ReportError(
                    f"{png.name}: {found.name} gives no figure {self.figure!r} ({error}); name one "
                    "of benchmarks/moe_comm/plots.py in benchmarks/report.py, or measure again"
                ) from error
        return png.name


CPU_TABLE, GPU_TABLE = ("*-cpu-moe-comm.json",), ("*-gpu-moe-comm.json",)
GROWTH_CPU, GROWTH_GPU = ("*-cpu-growth.json",), ("*-gpu-growth.json",)
RECIPES, SERVE, MODEL = ("*-cpu-recipes.json",), ("*-cpu-serve.json",), ("*-model.json",)
HEAD, LAUNCH = ("*-cpu-lm-head*.json",), ("*-launch*.json",)

_OUT = "benchmarks/results/DATE"
_COMM = "python benchmarks/bench_moe_comm.py"
_EMULATED = "--device cuda --emulate_ranks 8 --cuda_graph --backend moe_nvlink flashinfer"
_CPU = f"{_COMM} --ep_size 4 --batches 1 16 128 2048 --output_file {_OUT}-cpu-moe-comm.json"
_GPU = f"{_COMM} {_EMULATED} --output_file {_OUT}-gpu-moe-comm.json"
_GROW = f"python benchmarks/growth.py --output_file {_OUT}-cpu-growth.json"
_GROW_GPU = f"python benchmarks/growth.py --device cuda --output_file {_OUT}-gpu-growth.json"
_SERVE = f"python benchmarks/bench_serve.py --output {_OUT}-cpu-serve.json"
_MODEL = f"python benchmarks/model.py --output_file {_OUT}-model.json"
_RECIPES = f"python benchmarks/bench_recipes.py --output {_OUT}-cpu-recipes.json"
_HEAD = f"python benchmarks/bench_lm_head.py --output {_OUT}-cpu-lm-head.json"
_LAUNCH = f"python benchmarks/bench_launch.py --output {_OUT}-launch-stand-in.json"

BLOCKS: tuple[Block | Plot, ...] = (
    Block("serve", METHODS, SERVE, tables.serve, _SERVE),
    Block("exchange-all", METHODS, CPU_TABLE, tables.moe_comm_whole, _CPU),
    Block("gpu-all", METHODS, GPU_TABLE, tables.moe_comm_whole, _GPU),
    Block("recipes-all", METHODS, RECIPES, tables.recipes, _RECIPES),
    Block("growth-cpu", METHODS, GROWTH_CPU, tables.growth, _GROW),
    Block("growth-gpu", METHODS, GROWTH_GPU, tables.growth, _GROW_GPU),
    Block("model", METHODS, MODEL, tables.model, _MODEL),
    Block("lm-head", METHODS, HEAD, tables.lm_head, _HEAD),
    Block("launch", METHODS, LAUNCH, tables.launch, _LAUNCH),
    Plot("plot-latency", METHODS, CPU_TABLE, "latency", "Time against tokens per rank"),
    Plot("plot-bandwidth", METHODS, CPU_TABLE, "bandwidth", "GB/s beside the copy ceiling"),
    Plot("plot-growth-cpu", METHODS, GROWTH_CPU, "growth", "Points and fitted curves"),
    Plot("plot-growth-gpu", METHODS, GROWTH_GPU, "growth", "Points and fitted curves"),
    Plot("plot-model-fit", METHODS, MODEL, "model_fit", "Published times beside the model's"),
    Plot("plot-model-bandwidth", METHODS, MODEL, "model_bandwidth", "The same as bandwidth"),
    Plot("plot-model-ours", METHODS, MODEL, "model_ours", "Our kernels, predicted"),
    Plot("plot-model-where", METHODS, MODEL, "model_where", "Where our time goes, predicted"),
)
PLOTS = [block for block in BLOCKS if isinstance(block, Plot)]
#: The goals' table is of all files.
GOALS = ("goals", README)


def expected_blocks(document: str) -> list[str]:
    places = [*((block.name, block.document) for block in BLOCKS), GOALS]
    return [name for name, where in places if where == document]


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
                return block.text(page, self.results)
        raise ReportError(
            f"{document}: no block {name!r}; those of this document: "
            f"{', '.join(expected_blocks(document))} (benchmarks/report.py)"
        )

    def wanted(self, document: str) -> str:
        """The document as it should be.

        Raises:
            ReportError: as `render`; or the marks do not fit, or a block has no place in it.
        """
        text = (self.root / document).read_text()
        names = BLOCK.findall(text)
        if len(MARK.findall(text)) != 2 * len(names) or MARK.search(BLOCK.sub("", text)):
            raise ReportError(
                f"{document}: {MARK.findall(text)} are not pairs; begin each block with "
                f"<!-- report: NAME --> and end it with {END}"
            )
        if twice := {name for name in names if names.count(name) > 1}:
            raise ReportError(f"{document}: {', '.join(sorted(twice))} stands twice; delete one")
        if missing := sorted(set(expected_blocks(document)) - set(names)):
            raise ReportError(
                f"{document}: nowhere stands <!-- report: {missing[0]} -->; put it where "
                f"its table belongs, {END} after it, or take it out of report.py"
            )

        def made(found: re.Match[str]) -> str:
            contents = self.render(document, found[1]).strip("\n")
            return f"<!-- report: {found[1]} -->\n{contents}\n{END}"

        return BLOCK.sub(made, text)

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
            yield from strays(text, document, section)
        yield from (why for plot in PLOTS if (why := plot.stale(self.root, self.results)))
        known = {plot.file(self.root) for plot in PLOTS}
        for path in sorted((self.root / PLOTS_FOLDER).glob("*.png")):
            if path not in known:
                yield f"{path.name}: no plot of benchmarks/report.py; name it there or delete it"

    def write(self) -> list[str]:
        """Rewrites what is out of date; returns the names of what it wrote."""
        written = []
        for document in SECTIONS:
            path, wanted = self.root / document, self.wanted(document)
            if path.read_text() != wanted:
                path.write_text(wanted)
                written.append(document)
        stale = [plot for plot in PLOTS if plot.stale(self.root, self.results)]
        measured = [plot for plot in stale if newest(self.results, plot.patterns)]
        return written + [plot.draw(self.root, self.results) for plot in measured]


def strays(text: str, document: str, section: str | None) -> Iterator[str]:
    """Measurements outside any block: rows of tables with numbers, prose with measured units.

    `section`: the heading whose text is looked at; None: all of the document.
    """
    for generated in (BLOCK, FENCED):  # lines keep their numbers
        text = generated.sub(lambda found: "\n" * found[0].count("\n"), text)
    heading = ""
    for number, line in enumerate(text.splitlines(), 1):
        heading = line[3:].strip() if line.startswith("## ") else heading
        if line.startswith("    ") or section not in (None, heading):
            continue
        bare, where = re.sub(r"`[^`]*`", "", line), f"{document}:{number}"
        if bare.startswith("|"):
            if any(NUMBER.match(cell) for cell in bare.strip("|").split("|")):
                yield f"{where}: a table's row of numbers: {line}"
        elif not heading.startswith(PREDICTED) and (measured := MEASURED.search(bare)):
            yield f"{where}: {measured[0]!r} in prose: {line}"


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    what = "change nothing; exit 1 if out of date"
    parser.add_argument("--check", action="store_true", help=what)
    options = parser.parse_args(arguments)
    try:
        report = Report(root)
        for name in [] if options.check else report.write():
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
