"""PNGs from result files. Nothing is measured or computed here that the file does not hold.

`plot_*` write PNGs; `*_figures` return matplotlib Figures by name, for the tests and for whoever
wants another format. matplotlib is imported when one of them is called. Every PNG says in its
metadata (`Source`) which result file it is of, so that a plot left behind by an older file can be
told.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .gb200 import HIDDEN_SIZE, LINK_GB_S, TOP_K

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Row = Mapping[str, Any]

#: Key of the PNG's text chunk that names the result file.
SOURCE_KEY = "Source"

#: Okabe and Ito's colours, which stay apart for colour-blind eyes, the darker ones first; with
#: markers and line styles, so that no line is told by its colour alone.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C8C00")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")

PHASES = ("dispatch", "combine", "both")
_TITLES = {"dispatch": "dispatch", "combine": "combine", "both": "dispatch + combine"}
_DPI = 130


def source_of(path: Path) -> str:
    """What a PNG says of the result file it is made from: its name and its contents' hash."""
    return f"{path.name} sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"


def recorded_source(png: Path) -> str | None:
    """What a PNG says of the result file it was made from; None where it says nothing."""
    from PIL import Image

    with Image.open(png) as image:
        return image.info.get(SOURCE_KEY)


def plot_file(path: Path, folder: Path) -> list[Path]:
    """The plots of a result file, of whichever kind it is.

    Raises:
        ValueError: there are none of its kind, or it is empty.
    """
    result = json.loads(path.read_text())
    by_kind = {"moe_comm": plot_result, "model": plot_model, "growth": plot_growth}
    if result.get("kind") not in by_kind:
        raise ValueError(f"{path}: kind {result.get('kind')!r}; needs one of {', '.join(by_kind)}")
    return by_kind[result["kind"]](result, folder, source_of(path))


def plot_result(result: Mapping[str, Any], folder: Path, source: str) -> list[Path]:
    """Latency, bandwidth and, where there are several, recipes, of one bench_moe_comm result.

    Args:
        source: source_of() the result file.

    Raises:
        ValueError: the result is of another kind, or has no rows.
    """
    return _write(result_figures(result), folder, source)


def plot_model(result: Mapping[str, Any], folder: Path, source: str) -> list[Path]:
    """The analytical model beside the published tables; what it predicts and where the time goes.

    Raises:
        ValueError: the result is of another kind.
    """
    return _write(model_figures(result), folder, source)


def plot_growth(result: Mapping[str, Any], folder: Path, source: str) -> list[Path]:
    """Measured points and fitted curve of every series.

    Raises:
        ValueError: the result is of another kind, or has no series.
    """
    return _write(growth_figures(result), folder, source)


# ---- bench_moe_comm.


def result_figures(result: Mapping[str, Any]) -> dict[str, Figure]:
    """Figures of plot_result by the name of their PNG."""
    rows = _rows_of(result, "moe_comm", "rows")
    found = {
        "latency": _latency(result, rows),
        "bandwidth": _bandwidth(result, rows),
    }
    if len({_format_of(row) for row in rows}) > 1:
        found["recipes"] = _recipes(result, rows)
    return found


def _latency(result: Mapping[str, Any], rows: Sequence[Row]) -> Figure:
    """Medians with quartiles and, dotted above them, the 95th percentile; per backend and phase."""
    figure, panels = _panels(result, f"Latency, {_setting(rows)}")
    for panel, phase in zip(panels, PHASES, strict=True):
        _batch_axis(panel, rows, "us, slowest rank")
        _log_us(panel)
        for style, (name, line) in zip(_styles(), _series(rows).items(), strict=False):
            tokens = [row["tokens"] for row in line]
            medians = [row[phase]["median_us"] for row in line]
            panel.errorbar(
                tokens,
                medians,
                yerr=_whiskers(line, phase),
                label=f"{name}: median, quartiles",
                capsize=3,
                **style,
            )
            panel.plot(
                tokens,
                [row[phase]["p95_us"] for row in line],
                linestyle=":",
                linewidth=1,
                color=style["color"],
                label="_p95",
            )
        panel.set_title(_TITLES[phase])
    _legend(figure, panels, "dotted: 95th percentile")
    return figure


def _whiskers(line: Sequence[Row], phase: str) -> list[list[float]]:
    below = [row[phase]["median_us"] - row[phase]["q25_us"] for row in line]
    above = [row[phase]["q75_us"] - row[phase]["median_us"] for row in line]
    return [[max(value, 0.0) for value in below], [max(value, 0.0) for value in above]]


def _bandwidth(result: Mapping[str, Any], rows: Sequence[Row]) -> Figure:
    """Copied GB/s of every backend below the copy of the same bytes in the same run."""
    figure, panels = _panels(result, f"Bandwidth, {_setting(rows)}")
    for panel, phase in zip(panels, PHASES, strict=True):
        _batch_axis(panel, rows, "GB/s copied, mean rank, own share counted")
        ceilings: dict[int, float] = {}
        for style, (name, line) in zip(_styles(), _series(rows).items(), strict=False):
            panel.plot(
                [row["tokens"] for row in line],
                [row[phase]["copied_gb_s"] for row in line],
                label=name,
                **style,
            )
            for row in line:
                # Of one format: the others copy fewer bytes, at hardly another speed.
                if "ceiling_gb_s" in row[phase] and _format_of(row) == _format_of(rows[0]):
                    ceilings.setdefault(row["tokens"], row[phase]["ceiling_gb_s"])
        if ceilings:
            panel.plot(
                sorted(ceilings),
                [ceilings[tokens] for tokens in sorted(ceilings)],
                color="#555555",
                linestyle="--",
                linewidth=2,
                label="ceiling: a copy of the same bytes",
            )
        panel.set_ylim(bottom=0)
        panel.set_title(_TITLES[phase])
    _legend(figure, panels, str(result.get("ceiling", "")))
    return figure


def _recipes(result: Mapping[str, Any], rows: Sequence[Row]) -> Figure:
    """Median of every recipe and combine format over the batches, backend by backend."""
    backends = list(dict.fromkeys(row["backend"] for row in rows))
    figure, panels = _panels(result, f"Recipes, {_setting(rows)}", PHASES[:2])
    formats = list(dict.fromkeys(_format_of(row) for row in rows))
    for panel, phase in zip(panels, PHASES, strict=False):
        _batch_axis(panel, rows, "us, slowest rank")
        _log_us(panel)
        for backend, line_style in zip(backends, ("-", "--", "-.", ":"), strict=False):
            for style, one in zip(_styles(), formats, strict=False):
                line = [
                    row
                    for row in sorted(rows, key=_tokens)
                    if row["backend"] == backend and _format_of(row) == one
                ]
                panel.errorbar(
                    [row["tokens"] for row in line],
                    [row[phase]["median_us"] for row in line],
                    yerr=_whiskers(line, phase),
                    label=f"{backend}, {one}",
                    capsize=3,
                    **(style | {"linestyle": line_style}),
                )
        panel.set_title(_TITLES[phase])
    _legend(figure, panels, "what dispatch sends / what combine gets; median, quartiles")
    return figure


def _series(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Rows by what a line is of, backend and, where there are several, format; by batch."""
    rows = list(rows)
    several = len({_format_of(row) for row in rows}) > 1
    found: dict[str, list[Row]] = {}
    for row in sorted(rows, key=_tokens):
        name = f"{row['backend']}, {_format_of(row)}" if several else str(row["backend"])
        found.setdefault(name, []).append(row)
    return found


def _tokens(row: Row) -> int:
    return int(row["tokens"])


def _format_of(row: Row) -> str:
    return f"{row['recipe']} / {row['combine_format']}"


def _setting(rows: Sequence[Row]) -> str:
    row = rows[0]
    return (
        f"EP{row['ep_size']}, hidden {row['hidden_size']}, top_k {row['top_k']}, "
        f"{row['num_experts']} experts, {row['router']} router, {_format_of(row)}"
        + (" and others" if len({_format_of(one) for one in rows}) > 1 else "")
    )


# ---- The model.


def model_figures(result: Mapping[str, Any]) -> dict[str, Figure]:
    """Figures of plot_model by the name of their PNG."""
    _rows_of(result, "model", "predictions")
    return {
        "model_fit": _model_fit(result),
        "model_bandwidth": _model_bandwidth(result),
        "model_ours": _model_ours(result),
        "model_where": _model_where(result),
    }


def _predicted(result: Mapping[str, Any], **fields: object) -> list[Row]:
    """Predictions in bf16 with these fields, by batch."""
    wanted = {"recipe": "bf16", "combine_format": "bf16", "router": "perfect"} | fields
    return sorted(
        (
            row
            for row in result["predictions"]
            if all(row[name] == value for name, value in wanted.items())
        ),
        key=_tokens,
    )


def _published(result: Mapping[str, Any], verb: str) -> dict[int, list[Row]]:
    """Rows of the published tables by ep_size."""
    found: dict[int, list[Row]] = {}
    for row in result["validation"]["fitted"]["rows"]:
        if row["verb"] == verb:
            found.setdefault(row["ep_size"], []).append(row)
    return found


def _model_fit(result: Mapping[str, Any]) -> Figure:
    """Published points, the model's lines, and a line for ranks that no table has."""
    median = result["validation"]["fitted"]["summary"]["median"]
    unseen = result["validation"]["leave_one_out"]["summary"]["median"]
    figure, panels = _panels(
        result,
        "Published kernels on GB200: tables, and predicted by the model "
        f"(median error {median:.1%}; {unseen:.1%} where a table is left out of its own fit)",
        PHASES[:2],
    )
    for panel, verb in zip(panels, PHASES, strict=False):
        tables = _published(result, verb)
        _batch_axis(panel, tables[min(tables)], "us")
        _log_us(panel)
        for style, (ep_size, rows) in zip(_styles(), tables.items(), strict=False):
            panel.plot(
                [row["tokens"] for row in rows],
                [row["published_us"] for row in rows],
                label=f"EP{ep_size}: published table",
                **(style | {"linestyle": "none"}),
            )
        for style, ep_size in zip(_styles(), _ep_sizes(result), strict=False):
            _predicted_line(
                panel, result, verb, style, f"EP{ep_size}", protocol="reference", ep_size=ep_size
            )
        panel.set_title(verb)
    _legend(figure, panels, "hidden 7168, top_k 8, 256 experts, BF16, perfect router")
    return figure


def _ep_sizes(result: Mapping[str, Any]) -> list[int]:
    return sorted({row["ep_size"] for row in result["predictions"] if row["machine"] == "GB200"})


def _predicted_line(
    panel: Axes,
    result: Mapping[str, Any],
    verb: str,
    style: dict[str, Any],
    name: str,
    value: str = "us",
    **fields: object,
) -> None:
    """One line of predictions; dashed where there is no table of this machine and kernel."""
    rows = _predicted(result, **({"machine": "GB200"} | fields))
    extrapolated = any(row["is_extrapolated"] for row in rows)
    note = ", no table" if extrapolated else ""
    look = {"color": style["color"], "linestyle": "--" if extrapolated else "-", "linewidth": 1.4}
    tokens = [row["tokens"] for row in rows]
    panel.plot(tokens, [row[verb][value] for row in rows], label=f"{name}: predicted{note}", **look)
    if value == "us" and extrapolated:
        panel.fill_between(
            tokens,
            [row[verb]["low_us"] for row in rows],
            [row[verb]["high_us"] for row in rows],
            color=style["color"],
            alpha=0.18,
            linewidth=0,
        )


def _model_bandwidth(result: Mapping[str, Any]) -> Figure:
    """Logical GB/s, as the published tables state it."""
    figure, panels = _panels(
        result,
        "Published kernels on GB200: logical bandwidth, tables and predicted by the model",
        PHASES[:2],
    )
    for panel, verb in zip(panels, PHASES, strict=False):
        tables = _published(result, verb)
        _batch_axis(panel, tables[min(tables)], "GB/s logical (own share counted)")
        for style, (ep_size, rows) in zip(_styles(), tables.items(), strict=False):
            panel.plot(
                [row["tokens"] for row in rows],
                [_logical_gb_s(row) for row in rows],
                label=f"EP{ep_size}: published table",
                **(style | {"linestyle": "none"}),
            )
        for style, ep_size in zip(_styles(), _ep_sizes(result), strict=False):
            _predicted_line(
                panel,
                result,
                verb,
                style,
                f"EP{ep_size}",
                "logical_gb_s",
                protocol="reference",
                ep_size=ep_size,
            )
        panel.axhline(LINK_GB_S, color="#555555", linewidth=1, label="link, one way: 900 GB/s")
        panel.set_ylim(bottom=0)
        panel.set_title(verb)
    _legend(figure, panels, "")
    return figure


def _logical_gb_s(row: Row) -> float:
    logical = row["tokens"] * min(row["ep_size"], TOP_K) * HIDDEN_SIZE * 2
    return float(logical / row["published_us"] / 1e3)


def _model_ours(result: Mapping[str, Any]) -> Figure:
    """Our kernels as predicted beside the published table."""
    figure, panels = _panels(
        result,
        "Our kernels, PREDICTED by the model (not measured), beside the published table, BF16",
        PHASES[:2],
    )
    for panel, verb in zip(panels, PHASES, strict=False):
        tables = _published(result, verb)
        _batch_axis(panel, tables[8], "us")
        _log_us(panel)
        styles = list(_styles())
        panel.plot(
            [row["tokens"] for row in tables[8]],
            [row["published_us"] for row in tables[8]],
            label="GB200 EP8: published table of the reference",
            **(styles[0] | {"linestyle": "none"}),
        )
        cases: tuple[tuple[str, dict[str, Any]], ...] = (
            ("GB200 EP8, reference", {"ep_size": 8, "protocol": "reference"}),
            ("GB200 EP8, ours", {"ep_size": 8, "protocol": "moe_nvlink"}),
            ("GB200 EP64, ours", {"ep_size": 64, "protocol": "moe_nvlink"}),
            ("H200 EP8, ours", {"machine": "H200", "ep_size": 8, "protocol": "moe_nvlink"}),
            ("H200 EP8, reference", {"machine": "H200", "ep_size": 8, "protocol": "reference"}),
        )
        for style, (name, fields) in zip(styles, cases, strict=False):
            _predicted_line(panel, result, verb, style, name, **fields)
        panel.set_title(verb)
    _legend(figure, panels, "band: range over all fits of the tables")
    return figure


#: How terms of bytes in transit begin, the others being latencies.
_STREAM = "rows through"


def _model_where(result: Mapping[str, Any]) -> Figure:
    """Terms of our kernels stacked, as shares of the predicted time."""
    figure, panels = _panels(
        result, "Where the time of our kernels is PREDICTED to go, GB200 EP8, BF16", PHASES[:2]
    )
    cells = [
        row for row in result["where"] if (row["ep_size"], row["protocol"]) == (8, "moe_nvlink")
    ]
    found = dict.fromkeys(term["name"] for row in cells for term in row["terms"])
    names = sorted(found, key=lambda name: not name.startswith(_STREAM))
    for panel, verb in zip(panels, PHASES, strict=False):
        here = [row for row in cells if row["verb"] == verb]
        bottom = [0.0] * len(here)
        for index, name in enumerate(names):
            shares = [_term_us(row, name) / row["us"] for row in here]
            if not any(shares):
                continue
            panel.bar(
                [f"{row['tokens']}\n{row['us']:.1f} us" for row in here],
                shares,
                bottom=bottom,
                label=f"predicted: {name}",
                color="#BBBBBB" if name.startswith(_STREAM) else COLOURS[index % len(COLOURS)],
                hatch=("", "//", "..")[index // len(COLOURS) % 3],
                edgecolor="white",
                width=0.7,
            )
            bottom = [low + share for low, share in zip(bottom, shares, strict=True)]
        panel.set_ylim(0.0, 1.0)
        panel.set_ylabel("share of the predicted time")
        panel.set_xlabel("tokens per rank, predicted time")
        panel.set_title(verb)
    _legend(figure, panels, "")
    return figure


def _term_us(row: Row, name: str) -> float:
    return float(sum(term["us"] for term in row["terms"] if term["name"] == name))


# ---- growth.


def growth_figures(result: Mapping[str, Any]) -> dict[str, Figure]:
    """Figures of plot_growth by the name of their PNG."""
    from matplotlib.ticker import StrMethodFormatter

    series = _rows_of(result, "growth", "series")
    figure, panels = _panels(
        result,
        "Growth of the time: measured, and fitted curve",
        [one["name"] for one in series],
        has_legend=False,
    )
    for panel, one in zip(panels, series, strict=True):
        points = one["points"]
        panel.errorbar(
            [point[0] for point in points],
            [point[1] for point in points],
            yerr=[
                [max(point[1] - point[2], 0.0) for point in points],
                [max(point[3] - point[1], 0.0) for point in points],
            ],
            label="measured: median, quartiles",
            capsize=3,
            **(next(_styles()) | {"linestyle": "none"}),
        )
        curve = one["fit"]["curve"]
        panel.plot(
            [point[0] for point in curve],
            [point[1] for point in curve],
            color=COLOURS[1],
            label=f"fitted: {one['fit']['formula']}",
        )
        panel.set_xscale("log", base=2)
        _log_us(panel)
        panel.xaxis.set_major_formatter(StrMethodFormatter("{x:,.10g}"))
        panel.set_xlabel(one["x_label"])
        panel.set_ylabel("us")
        panel.set_title(one["name"])
        panel.grid(True, which="major", alpha=0.3)
        panel.legend(fontsize=7)
    return {"growth": figure}


# ---- Shared.


def _rows_of(result: Mapping[str, Any], kind: str, name: str) -> list[Row]:
    if result.get("kind") != kind:
        raise ValueError(f"a result of kind {result.get('kind')!r}; needs {kind!r}")
    rows: list[Row] = result.get(name, [])
    if not rows:
        raise ValueError(f"the result's {name!r} is empty; nothing to plot")
    return rows


def _panels(
    result: Mapping[str, Any],
    title: str,
    names: Sequence[str] = PHASES,
    *,
    has_legend: bool = True,
) -> tuple[Figure, list[Axes]]:
    """A row of panels under a title, above a place for the legend and a footer that says where the
    numbers are from.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(len(names), 3)
    lines = -(-len(names) // columns)
    height, below = 4.2, 0.75 if has_legend else 0.01
    # Not pyplot: its state would stay behind in the process that plots.
    figure = Figure(
        figsize=(5.0 * columns + 0.4, height * lines + 0.75 + below), layout="constrained"
    )
    FigureCanvasAgg(figure)
    of_machine = ranks_of(result)
    figure.suptitle(f"{title}\n{of_machine}" if of_machine else title, fontsize=10.5)
    grid = figure.add_gridspec(lines + 1, columns, height_ratios=[height] * lines + [below])
    panels = [
        figure.add_subplot(grid[index // columns, index % columns]) for index in range(len(names))
    ]
    for panel in panels:
        panel.tick_params(labelsize=8)
    legend = figure.add_subplot(grid[lines, :], label=_LEGEND)
    legend.set_axis_off()
    figure.supxlabel(_footer(result), fontsize=7, color="#444444")
    return figure, panels


#: Label of the axes that hold nothing but the legend.
_LEGEND = "legend"


def ranks_of(result: Mapping[str, Any]) -> str:
    """What kind of ranks: said in every title, so that a plot cannot be taken for another."""
    options = result.get("options", {})
    device = options.get("device", result.get("device"))
    machine = result.get("machine", {})
    if device == "cuda":
        gpu = machine.get("gpu", "GPU")
        # growth.py knows no other ranks on GPUs.
        if options.get("emulate_ranks") or result["kind"] == "growth":
            return f"ranks emulated on one GPU ({gpu}): no NVLink"
        return f"one GPU a rank ({gpu})"
    if device == "rehearsal":
        return "REHEARSAL on CPU threads: no GPU, times mean nothing"
    return f"CPU ranks: processes on {machine.get('cores', '?')} cores" if device == "cpu" else ""


def _footer(result: Mapping[str, Any]) -> str:
    machine = result.get("machine", {})
    parts = [machine.get("gpu") or machine.get("cpu"), machine.get("date")]
    found = [str(part) for part in parts if part]
    if machine.get("commit"):
        found.append(f"commit {machine['commit']}")
    if result.get("kind") == "model":
        found = [*found[1:], str(result.get("shows", ""))]
    return "  |  ".join(found)


def _batch_axis(panel: Axes, rows: Sequence[Row], y_label: str) -> None:
    from matplotlib.ticker import NullLocator

    panel.set_xscale("log", base=2)
    batches = sorted({row["tokens"] for row in rows})
    shown = batches if len(batches) <= 8 else batches[::2]
    panel.set_xticks(shown, [str(batch) for batch in shown])
    panel.xaxis.set_minor_locator(NullLocator())
    panel.set_xlabel("tokens per rank")
    panel.set_ylabel(y_label)
    panel.grid(True, which="major", alpha=0.3)


def _log_us(panel: Axes) -> None:
    """Microseconds on a logarithmic scale, written as plain numbers."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    panel.set_yscale("log")
    panel.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    panel.yaxis.set_major_formatter(StrMethodFormatter("{x:,.10g}"))
    panel.yaxis.set_minor_formatter(NullFormatter())


def _styles() -> Iterator[dict[str, Any]]:
    """Colour, marker and line style of one line after the other."""
    for index in range(4 * len(COLOURS)):
        yield {
            "color": COLOURS[index % len(COLOURS)],
            "marker": MARKERS[index % len(MARKERS)],
            "markersize": 5,
            "linewidth": 1.4,
            "linestyle": "-" if index < len(COLOURS) else "--",
        }


def _legend(figure: Figure, panels: Sequence[Axes], title: str) -> None:
    """One for all panels, each line once."""
    lines: dict[str, Any] = {}
    for panel in panels:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            lines.setdefault(label, handle)
    place = next(axes for axes in figure.axes if axes.get_label() == _LEGEND)
    place.legend(
        list(lines.values()),
        list(lines),
        loc="center",
        ncols=3 if max(map(len, lines)) > 26 else 5,
        fontsize=7.5,
        title=title or None,
        title_fontsize=7.5,
    )


def _write(figures: Mapping[str, Figure], folder: Path, source: str) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, figure in figures.items():
        path = folder / f"{name}.png"
        figure.savefig(path, dpi=_DPI, metadata={SOURCE_KEY: source, "Software": None})
        written.append(path)
    return written
