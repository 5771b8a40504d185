"""Plots of the documents: drawn from result files, and held to the file they say they show."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.moe_comm import plots
from benchmarks.reporting.files import ReportError, Result, newest
from benchmarks.reporting.tables import Page

#: Where the PNGs lie, from the repository's root.
FOLDER = Path("benchmarks") / "plots"
#: Kind of a result -> what draws it: a PNG for each figure, into a folder.
DRAW = {"moe_comm": "plot_result", "growth": "plot_growth", "model": "plot_model"}


@dataclasses.dataclass(frozen=True)
class Plot:
    """A PNG and the block that shows it. `figure`: its name among those of the result's kind."""

    name: str
    document: str
    patterns: tuple[str, ...]
    figure: str
    shows: str

    def file(self, root: Path) -> Path:
        return root / FOLDER / f"{self.name.removeprefix('plot-')}.png"

    def block(self, page: Page, results: Sequence[Result]) -> str:
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
        said, wanted = source_of(path), plots.source_of(found.path)
        return None if said == wanted else f"{path.name}: drawn from {said!r}, not from {wanted!r}"


def source_of(png: Path) -> str:
    """What a PNG says it was drawn from; empty: it says nothing.

    Raises:
        ReportError: it is no PNG.
    """
    try:
        return plots.recorded_source(png) or ""
    except OSError as error:
        raise ReportError(f"{png}: {error}; delete it and run benchmarks/report.py") from error


def problems(plots: Sequence[Plot], root: Path, results: Sequence[Result]) -> Iterator[str]:
    """Plots that are missing, out of date, or of nobody."""
    yield from (why for plot in plots if (why := plot.stale(root, results)))
    known = {plot.file(root) for plot in plots}
    for path in sorted((root / FOLDER).glob("*.png")):
        if path not in known:
            yield f"{path.name}: no plot of benchmarks/report.py; name it there or delete it"


def draw_stale(wanted: Sequence[Plot], root: Path, results: Sequence[Result]) -> list[str]:
    """Draws those that are missing or out of date; returns their names.

    Raises:
        ReportError: a result has no such figure.
    """
    drawn = []
    for plot in wanted:
        found = newest(results, plot.patterns)
        if found is not None and plot.stale(root, results) is not None:
            _draw(plot, found, plot.file(root))
            drawn.append(plot.file(root).name)
    return drawn


def _draw(plot: Plot, result: Result, png: Path) -> None:
    png.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        try:
            draw = getattr(plots, DRAW[result.kind])
            made = draw(result.data, Path(folder), plots.source_of(result.path))
            files = {path.stem: path for path in made}
            shutil.copy(files[plot.figure], png)
        except (KeyError, ValueError) as error:
            raise ReportError(
                f"{png.name}: {result.name} gives no figure {plot.figure!r} ({error}); name one of "
                "benchmarks/moe_comm/plots.py in benchmarks/report.py, or measure again"
            ) from error
