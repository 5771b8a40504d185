"""PNGs from result files. Nothing is measured or computed here that the file does not hold.

Every PNG says in its metadata (`Source`) which result file it is of, so that a plot left behind by
an older file can be told.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import matplotlib
import pandas as pd
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, NullLocator, StrMethodFormatter
from PIL import Image

from .gb200 import HIDDEN_SIZE, LINK_GB_S, TOP_K
from .rows import PHASES

Result = Mapping[str, Any]
Look = dict[str, Any]

#: Key of the PNG's text chunk that names the result file.
SOURCE_KEY = "Source"

#: Okabe and Ito's colours, which stay apart for colour-blind eyes, the darker ones first; with
#: markers, so that no line is told by its colour alone.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C8C00")
STYLE: Any = {
    "axes.prop_cycle": cycler(color=COLOURS) + cycler(marker=list("os^DvPX*")),
    "axes.grid": True,
    "axes.titlesize": 10,
    "errorbar.capsize": 3,
    "figure.constrained_layout.use": True,
    "font.size": 8,
    "grid.alpha": 0.3,
    "lines.linewidth": 1.4,
    "lines.markersize": 5,
    "savefig.dpi": 130,
}
TITLES = {"dispatch": "dispatch", "combine": "combine", "both": "dispatch + combine"}
VERBS = PHASES[:2]


def source_of(path: Path) -> str:
    """What a PNG says of the result file it is made from: its name and its contents' hash."""
    return f"{path.name} sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"


def recorded_source(png: Path) -> str | None:
    """What a PNG says of the result file it was made from; None where it says nothing."""
    with Image.open(png) as image:
        return image.info.get(SOURCE_KEY)


def plot_file(path: Path, folder: Path) -> list[Path]:
    """The plots of a result file, of whichever kind it is. Raises ValueError as `plot`."""
    return plot(json.loads(path.read_text()), folder, source_of(path))


def plot(result: Result, folder: Path, source: str) -> list[Path]:
    """Writes a PNG for each figure of the result; `source`: source_of() its file.

    Raises:
        ValueError: as figures_of.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, figure in figures_of(result).items():
        written.append(folder / f"{name}.png")
        figure.savefig(written[-1], metadata={SOURCE_KEY: source, "Software": None})
    return written


def figures_of(result: Result) -> dict[str, Figure]:
    """A result's figures by the name of their PNG.

    Raises:
        ValueError: there are none of the result's kind, or it is empty.
    """
    kind = str(result.get("kind"))
    if kind not in _FIGURES:
        raise ValueError(f"no plots of kind {kind!r}; needs one of {', '.join(_FIGURES)}")
    table, draw = _FIGURES[kind]
    if not result.get(table):
        raise ValueError(f"the result's {table!r} is empty; nothing to plot")
    with matplotlib.rc_context(STYLE):
        return draw(result)


# ---- bench_moe_comm.


def _moe_comm(result: Result) -> dict[str, Figure]:
    """Medians with quartiles and, dotted, the 95th percentile; copied GB/s below the ceiling."""
    rows = pd.json_normalize(result["rows"]).sort_values("tokens", kind="stable")
    first = rows.iloc[0]
    setting = (
        f"EP{first.ep_size}, hidden {first.hidden_size}, top_k {first.top_k}, "
        f"{first.num_experts} experts, {first.router} router, "
        f"{first.recipe} / {first.combine_format}"
    )
    latency, panels = _panels(result, f"Latency, {setting}", PHASES)
    for phase, panel in panels.items():
        _batch_axis(panel, rows.tokens, "us, slowest rank")
        _log_us(panel)
        for name, line in rows.groupby("backend", sort=False):
            middle = line[f"{phase}.median_us"]
            below = (middle - line[f"{phase}.q25_us"]).clip(lower=0)
            above = (line[f"{phase}.q75_us"] - middle).clip(lower=0)
            label = f"{name}: median, quartiles"
            drawn = panel.errorbar(line.tokens, middle, yerr=[below, above], label=label)
            tail: Look = {"color": drawn[0].get_color(), "marker": "", "linewidth": 1}
            panel.plot(line.tokens, line[f"{phase}.p95_us"], ":", label="_p95", **tail)
    _legend(latency, panels, "dotted: 95th percentile")
    bandwidth, panels = _panels(result, f"Bandwidth, {setting}", PHASES)
    for phase, panel in panels.items():
        _batch_axis(panel, rows.tokens, "GB/s copied, mean rank, own share counted")
        for name, line in rows.groupby("backend", sort=False):
            panel.plot(line.tokens, line[f"{phase}.copied_gb_s"], label=str(name))
        if f"{phase}.ceiling_gb_s" in rows:
            ceiling = rows.dropna(subset=f"{phase}.ceiling_gb_s").drop_duplicates("tokens")
            look: Look = {"color": "#555555", "marker": "", "linewidth": 2}
            label = "ceiling: a copy of the same bytes"
            panel.plot(ceiling.tokens, ceiling[f"{phase}.ceiling_gb_s"], "--", label=label, **look)
        panel.set_ylim(bottom=0)
    _legend(bandwidth, panels, str(result.get("ceiling", "")))
    return {"latency": latency, "bandwidth": bandwidth}


# ---- The model.


def _model(result: Result) -> dict[str, Figure]:
    return {
        "model_fit": _model_fit(result),
        "model_bandwidth": _model_bandwidth(result),
        "model_ours": _model_ours(result),
        "model_where": _model_where(result),
    }


def _published(result: Result, verb: str) -> pd.DataFrame:
    """The published tables, and the logical bandwidth that is in them."""
    rows = pd.DataFrame(result["validation"]["fitted"]["rows"])
    rows = rows[rows.verb == verb]
    copies = rows.ep_size.clip(upper=TOP_K)
    return rows.assign(gb_s=rows.tokens * copies * HIDDEN_SIZE * 2 / rows.published_us / 1e3)


def _draw_published(panel: Axes, rows: pd.DataFrame, value: str) -> None:
    for ep_size, line in rows.groupby("ep_size"):
        label = f"EP{ep_size}: published table"
        panel.plot(line.tokens, line[value], linestyle="none", label=label)


def _draw_predicted(
    panel: Axes, result: Result, verb: str, colour: str, name: str, value: str = "us", **which: Any
) -> None:
    """One line of predictions in bf16; dashed where there is no table of this machine and kernel,
    with a band over all fits.
    """
    wanted = {"recipe": "bf16", "combine_format": "bf16", "router": "perfect", "machine": "GB200"}
    rows = pd.json_normalize(result["predictions"]).sort_values("tokens")
    for field, wants in (wanted | which).items():
        rows = rows[rows[field] == wants]
    beyond = bool(rows.is_extrapolated.any())
    label = f"{name}: predicted" + (", no table" if beyond else "")
    look: Look = {"color": colour, "marker": "", "linestyle": "--" if beyond else "-"}
    panel.plot(rows.tokens, rows[f"{verb}.{value}"], label=label, **look)
    if value == "us" and beyond:
        low, high = rows[f"{verb}.low_us"], rows[f"{verb}.high_us"]
        panel.fill_between(rows.tokens, low, high, color=colour, alpha=0.18, linewidth=0)


def _ep_sizes(result: Result) -> list[int]:
    return sorted({row["ep_size"] for row in result["predictions"] if row["machine"] == "GB200"})


def _model_fit(result: Result) -> Figure:
    """Published points, the model's lines, and a line for ranks that no table has."""
    checked = result["validation"]
    median = checked["fitted"]["summary"]["median"]
    unseen = checked["leave_one_out"]["summary"]["median"]
    title = (
        "Published kernels on GB200: tables, and predicted by the model "
        f"(median error {median:.1%}; {unseen:.1%} where a table is left out of its own fit)"
    )
    figure, panels = _panels(result, title, VERBS)
    for verb, panel in panels.items():
        rows = _published(result, verb)
        _batch_axis(panel, rows.tokens, "us")
        _log_us(panel)
        _draw_published(panel, rows, "published_us")
        for colour, ep_size in zip(COLOURS, _ep_sizes(result), strict=False):
            which: Look = {"protocol": "reference", "ep_size": ep_size}
            _draw_predicted(panel, result, verb, colour, f"EP{ep_size}", **which)
    _legend(figure, panels, "hidden 7168, top_k 8, 256 experts, BF16, perfect router")
    return figure


def _model_bandwidth(result: Result) -> Figure:
    """Logical GB/s, as the published tables state it."""
    title = "Published kernels on GB200: logical bandwidth, tables and predicted by the model"
    figure, panels = _panels(result, title, VERBS)
    for verb, panel in panels.items():
        rows = _published(result, verb)
        _batch_axis(panel, rows.tokens, "GB/s logical (own share counted)")
        _draw_published(panel, rows, "gb_s")
        for colour, ep_size in zip(COLOURS, _ep_sizes(result), strict=False):
            which: Look = {"protocol": "reference", "ep_size": ep_size, "value": "logical_gb_s"}
            _draw_predicted(panel, result, verb, colour, f"EP{ep_size}", **which)
        panel.axhline(LINK_GB_S, color="#555555", linewidth=1, label="link, one way: 900 GB/s")
        panel.set_ylim(bottom=0)
    _legend(figure, panels, "")
    return figure


def _model_ours(result: Result) -> Figure:
    """Our kernels as predicted beside the published table."""
    title = "Our kernels, PREDICTED by the model (not measured), beside the published table, BF16"
    cases = (
        ("GB200 EP8, reference", "GB200", 8, "reference"),
        ("GB200 EP8, ours", "GB200", 8, "moe_nvlink"),
        ("GB200 EP64, ours", "GB200", 64, "moe_nvlink"),
        ("H200 EP8, ours", "H200", 8, "moe_nvlink"),
        ("H200 EP8, reference", "H200", 8, "reference"),
    )
    figure, panels = _panels(result, title, VERBS)
    for verb, panel in panels.items():
        rows = _published(result, verb)
        rows = rows[rows.ep_size == 8]
        _batch_axis(panel, rows.tokens, "us")
        _log_us(panel)
        label = "GB200 EP8: published table of the reference"
        panel.plot(rows.tokens, rows.published_us, linestyle="none", label=label)
        for colour, (name, machine, ep_size, protocol) in zip(COLOURS, cases, strict=False):
            which: Look = {"machine": machine, "ep_size": ep_size, "protocol": protocol}
            _draw_predicted(panel, result, verb, colour, name, **which)
    _legend(figure, panels, "band: range over all fits of the tables")
    return figure


#: How terms of bytes in transit begin; the others are latencies.
_STREAM = "rows through"


def _model_where(result: Result) -> Figure:
    """Terms of our kernels stacked, as shares of the predicted time."""
    title = "Where the time of our kernels is PREDICTED to go, GB200 EP8, BF16"
    figure, panels = _panels(result, title, VERBS)
    rows = [r for r in result["where"] if (r["ep_size"], r["protocol"]) == (8, "moe_nvlink")]
    of_row = ["verb", "tokens", "us"]
    terms = pd.json_normalize(rows, "terms", of_row, record_prefix="term_")
    terms["share"] = terms.term_us / terms.us.astype(float)
    names = sorted(terms.term_name.unique(), key=lambda name: not name.startswith(_STREAM))
    for verb, panel in panels.items():
        mine = terms[terms.verb == verb]
        wide = mine.pivot_table("share", ["tokens", "us"], "term_name", "sum", fill_value=0.0)
        ticks = [f"{tokens}\n{us:.1f} us" for tokens, us in wide.index]
        bottom = pd.Series(0.0, index=wide.index)
        for index, name in enumerate(names):
            if name not in wide:
                continue
            grey = name.startswith(_STREAM)
            look: Look = {"color": "#BBBBBB" if grey else COLOURS[index % len(COLOURS)]}
            look |= {"hatch": ("", "//", "..")[index // len(COLOURS) % 3], "edgecolor": "white"}
            panel.bar(ticks, wide[name], bottom=bottom, label=f"predicted: {name}", **look)
            bottom = bottom + wide[name]
        panel.set_ylim(0.0, 1.0)
        panel.set_ylabel("share of the predicted time")
        panel.set_xlabel("tokens per rank, predicted time")
    _legend(figure, panels, "")
    return figure


# ---- growth.


def _growth(result: Result) -> dict[str, Figure]:
    """Measured points and fitted curve of every series."""
    by_name = {one["name"]: one for one in result["series"]}
    figure, panels = _panels(result, "Growth of the time: measured, and fitted curve", by_name)
    for name, panel in panels.items():
        one = by_name[name]
        points = pd.DataFrame(one["points"], columns=["x", "us", "q25", "q75"])
        spread = [(points.us - points.q25).clip(lower=0), (points.q75 - points.us).clip(lower=0)]
        label = "measured: median, quartiles"
        panel.errorbar(points.x, points.us, yerr=spread, linestyle="none", label=label)
        curve = pd.DataFrame(one["fit"]["curve"], columns=["x", "us"])
        panel.plot(curve.x, curve.us, marker="", label=f"fitted: {one['fit']['formula']}")
        panel.set_xscale("log", base=2)
        _log_us(panel)
        panel.xaxis.set_major_formatter(StrMethodFormatter("{x:,.10g}"))
        panel.set(xlabel=one["x_label"], ylabel="us")
        panel.legend(fontsize=7)
    return {"growth": figure}


#: Kind of a result -> its table that must not be empty, and what draws it.
_FIGURES = {
    "moe_comm": ("rows", _moe_comm),
    "growth": ("series", _growth),
    "model": ("predictions", _model),
}


# ---- Shared.


def _panels(result: Result, title: str, names: Iterable[str]) -> tuple[Figure, dict[str, Axes]]:
    """Panels by name, three in a row, under a title that says where the numbers are from."""
    names = list(names)
    columns = min(len(names), 3)
    lines = -(-len(names) // columns)
    # Not pyplot: its state would stay behind in the process that plots.
    figure = Figure(figsize=(5.0 * columns + 0.4, 4.2 * lines + 1.5))
    said = [title, ranks_of(result), _origin(result)]
    figure.suptitle("\n".join(part for part in said if part), fontsize=10)
    grid = list(figure.subplots(lines, columns, squeeze=False).flat)
    panels = dict(zip(names, grid, strict=False))
    for panel in grid[len(names) :]:
        panel.set_axis_off()
    for name, panel in panels.items():
        panel.set_title(TITLES.get(name, name))
    return figure, panels


def ranks_of(result: Result) -> str:
    """What kind of ranks: said in every title, so that a plot cannot be taken for another."""
    options, machine = result.get("options", {}), result.get("machine", {})
    device = options.get("device", result.get("device"))
    if device == "cuda":
        gpu = machine.get("gpu", "GPU")
        # growth.py knows no other ranks on GPUs.
        if options.get("emulate_ranks") or result["kind"] == "growth":
            return f"ranks emulated on one GPU ({gpu}): no NVLink"
        return f"one GPU a rank ({gpu})"
    if device == "rehearsal":
        return "REHEARSAL on CPU threads: no GPU, times mean nothing"
    return f"CPU ranks: processes on {machine.get('cores', '?')} cores" if device == "cpu" else ""


def _origin(result: Result) -> str:
    machine, is_model = result.get("machine", {}), result.get("kind") == "model"
    processor = None if is_model else machine.get("gpu") or machine.get("cpu")
    commit = f"commit {machine['commit']}" if machine.get("commit") else None
    shows = result.get("shows") if is_model else None
    return "  |  ".join(str(p) for p in (processor, machine.get("date"), commit, shows) if p)


def _batch_axis(panel: Axes, tokens: Iterable[int], y_label: str) -> None:
    panel.set_xscale("log", base=2)
    batches = sorted(set(tokens))
    shown = batches if len(batches) <= 8 else batches[::2]
    panel.set_xticks(shown, [str(batch) for batch in shown])
    panel.xaxis.set_minor_locator(NullLocator())
    panel.set(xlabel="tokens per rank", ylabel=y_label)


def _log_us(panel: Axes) -> None:
    """Microseconds on a logarithmic scale, written as plain numbers."""
    panel.set_yscale("log")
    panel.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    panel.yaxis.set_major_formatter(StrMethodFormatter("{x:,.10g}"))
    panel.yaxis.set_minor_formatter(NullFormatter())


def _legend(figure: Figure, panels: Mapping[str, Axes], title: str) -> None:
    """One for all panels, each line once."""
    lines: dict[str, Any] = {}
    for panel in panels.values():
        handles, labels = panel.get_legend_handles_labels()
        lines = dict(zip(labels, handles, strict=True)) | lines
    columns = 3 if max(map(len, lines)) > 26 else 5
    look: Look = {"fontsize": 7.5, "title_fontsize": 7.5, "ncols": columns, "title": title or None}
    figure.legend(list(lines.values()), list(lines), loc="outside lower center", **look)
