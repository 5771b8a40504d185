"""Draw PNGs of result files. Nothing is measured or computed here that the file does not hold.

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
GREY = "#555555"
#: The plain lines beside the points.
LINE: Look = {"marker": "", "linewidth": 1.4}
VERBS = PHASES[:2]


def source_of(path: Path) -> str:
    """Say of which result file a PNG is made: the file's name and its contents' hash."""
    return f"{path.name} sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"


def recorded_source(png: Path) -> str | None:
    """Return what a PNG says of the result file it was made from; None if it says nothing."""
    with Image.open(png) as image:
        return image.info.get(SOURCE_KEY)


def plot_file(path: Path, folder: Path) -> list[Path]:
    """Draw the plots of a result file, of whichever kind it is. Raises ValueError as `plot`."""
    return plot(json.loads(path.read_text()), folder, source_of(path))


def plot(result: Result, folder: Path, source: str) -> list[Path]:
    """Write a PNG for each figure of the result; `source`: source_of() its file.

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
    """Return a result's figures by the name of their PNG.

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
    """Draw medians with quartiles and 95th percentiles; and copied GB/s below the ceiling."""
    rows = pd.json_normalize(result["rows"]).sort_values("tokens", kind="stable")
    setting = (
        "EP{ep_size}, hidden {hidden_size}, top_k {top_k}, {num_experts} experts, {router} router, "
        "{recipe} / {combine_format}"
    ).format(**rows.iloc[0])
    latency, panels = _panels(result, f"Latency, {setting}", PHASES)
    for phase, panel in panels.items():
        _batch_axis(panel, rows.tokens, "us, slowest rank")
        _log_us(panel)
        for name, line in rows.groupby("backend", sort=False):
            us = [line[f"{phase}.{which}_us"] for which in ("median", "q25", "q75")]
            drawn = _quartiles(panel, line.tokens, *us, label=f"{name}: median, quartiles")
            colour = drawn[0].get_color()
            p95 = line[f"{phase}.p95_us"]
            panel.plot(line.tokens, p95, ":", color=colour, label="_p95", **LINE)
    _legend(latency, panels, "dotted: 95th percentile")
    bandwidth, panels = _panels(result, f"Bandwidth, {setting}", PHASES)
    for phase, panel in panels.items():
        _batch_axis(panel, rows.tokens, "GB/s copied, mean rank, own share counted")
        for name, line in rows.groupby("backend", sort=False):
            panel.plot(line.tokens, line[f"{phase}.copied_gb_s"], label=str(name))
        if f"{phase}.ceiling_gb_s" in rows:
            line = rows.dropna(subset=f"{phase}.ceiling_gb_s").drop_duplicates("tokens")
            label, gb_s = "ceiling: a copy of the same bytes", line[f"{phase}.ceiling_gb_s"]
            panel.plot(line.tokens, gb_s, "--", color=GREY, label=label, **LINE)
        panel.set_ylim(bottom=0)
    _legend(bandwidth, panels, str(result.get("ceiling", "")))
    return {"latency": latency, "bandwidth": bandwidth}


def _quartiles(
    panel: Axes, x: Any, median: pd.Series, low: pd.Series, high: pd.Series, **look: Any
) -> Any:
    spread = [(median - low).clip(lower=0), (high - median).clip(lower=0)]
    return panel.errorbar(x, median, yerr=spread, **look)


# ---- bench_scheduler.


def _scheduler(result: Result) -> dict[str, Figure]:
    """Draw iterations of waves, which requests ran in them, and waits against the rate."""
    drawn, options = result["drawn"], result["options"]
    setting = "KV cache of {kv_blocks} blocks of {block_size} tokens".format(**options)
    kinds = {"running": "requests running", "kv_share": "share of KV blocks in use"}
    names = [(name, kind) for kind in kinds for name in drawn]
    titles = [f"{result['workloads'][name]['title']}: {kinds[kind]}" for name, kind in names]
    iterations, panels = _panels(result, f"Every iteration, {setting}", titles)
    for (name, kind), panel in zip(names, panels.values(), strict=True):
        for policy, of in drawn[name].items():
            panel.plot(of[kind], label=policy, **LINE)
        panel.set(xlabel="iteration", ylabel=kinds[kind])
        panel.set_ylim(bottom=0)
    _legend(iterations, panels, "")
    return {
        "iterations": iterations,
        "requests": _requests(result, f"Long answers, request by request, {setting}"),
        "waits": _waits(result, f"Long answers, independent arrivals, {setting}"),
    }


def _requests(result: Result, title: str) -> Figure:
    """Draw a line for each request of the first workload, where it runs."""
    by_policy = next(iter(result["drawn"].values()))
    figure, panels = _panels(result, title, by_policy)
    last = max(span[1] for of in by_policy.values() for spans in of["spans"] for span in spans)
    for policy, panel in panels.items():
        for number, spans in enumerate(by_policy[policy]["spans"]):
            look: Look = {"color": COLOURS[number % len(COLOURS)], "linewidth": 4}
            begins, ends = zip(*spans, strict=True)
            panel.hlines([number] * len(spans), begins, [end + 1 for end in ends], **look)
        panel.set(xlabel="iteration", ylabel="request", xlim=(0, last + 1))
        panel.invert_yaxis()
    return figure


def _waits(result: Result, title: str) -> Figure:
    """Draw what users wait for, tokens per second and preemptions, against the rate."""
    rows = pd.json_normalize(result["rows"]).sort_values("rate", kind="stable")
    fields = {
        "first token, ms: p99": "first_p99_ms",
        "between tokens, ms: p50": "gap_p50_ms",
        "between tokens, ms: p99": "gap_p99_ms",
        "largest gap of all requests, ms": "largest_gap_max_ms",
        "whole request, ms: p50": "whole_p50_ms",
        "preemptions": "preemptions",
    }
    figure, panels = _panels(result, title, fields)
    for name, panel in panels.items():
        for policy, line in rows.groupby("policy", sort=False):
            spread = [line[f"{fields[name]}.{which}"] for which in ("median", "q25", "q75")]
            _quartiles(panel, line.rate, *spread, label=f"{policy}: median of rounds, quartiles")
        panel.set(xlabel="requests per second", ylabel=name)
        panel.set_ylim(bottom=0)
    _legend(figure, panels, "")
    return figure


#: Kind of a result -> its table that must not be empty, and what draws it.
_FIGURES = {
    "moe_comm": ("rows", _moe_comm),
    "scheduler": ("rows", _scheduler),
}


# ---- Shared.


def _panels(result: Result, title: str, names: Iterable[str]) -> tuple[Figure, dict[str, Axes]]:
    """Make panels by name, three in a row; the title says where the numbers are from."""
    names = list(names)
    columns = min(len(names), 3)
    lines = -(-len(names) // columns)
    # Not pyplot: its state would stay behind in the process that plots.
    figure = Figure(figsize=(5.0 * columns + 0.4, 4.2 * lines + 1.5))
    said = [title, ranks_of(result), _origin(result)]
    figure.suptitle("\n".join(part for part in said if part), fontsize=10)
    grid = list(figure.subplots(lines, columns, squeeze=False).flat)
    for panel in grid[len(names) :]:
        panel.set_axis_off()
    panels = dict(zip(names, grid, strict=False))
    for name, panel in panels.items():
        panel.set_title("dispatch + combine" if name == "both" else name)
    return figure, panels


def ranks_of(result: Result) -> str:
    """Say what kind of ranks they are, in every title, so that no plot is taken for another."""
    options, machine = result.get("options", {}), result.get("machine", {})
    device = options.get("device", result.get("device"))
    if device == "cuda":
        gpu = machine.get("gpu", "GPU")
        if options.get("emulate_ranks"):
            return f"ranks emulated on one GPU ({gpu}): no NVLink"
        return f"one GPU a rank ({gpu})"
    if device == "rehearsal":
        return "REHEARSAL on CPU threads: no GPU, times mean nothing"
    return f"CPU ranks: processes on {machine.get('cores', '?')} cores" if device == "cpu" else ""


def _origin(result: Result) -> str:
    machine = result.get("machine", {})
    processor = machine.get("gpu") or machine.get("cpu")
    commit = f"commit {machine['commit']}" if machine.get("commit") else None
    return "  |  ".join(str(p) for p in (processor, machine.get("date"), commit) if p)


def _batch_axis(panel: Axes, tokens: Iterable[int], y_label: str) -> None:
    panel.set_xscale("log", base=2)
    batches = sorted(set(tokens))
    shown = batches if len(batches) <= 8 else batches[::2]
    panel.set_xticks(shown, [str(batch) for batch in shown])
    panel.xaxis.set_minor_locator(NullLocator())
    panel.set(xlabel="tokens per rank", ylabel=y_label)


def _log_us(panel: Axes) -> None:
    """Scale microseconds logarithmically, and write them as plain numbers."""
    panel.set_yscale("log")
    panel.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    panel.yaxis.set_major_formatter(StrMethodFormatter("{x:,.10g}"))
    panel.yaxis.set_minor_formatter(NullFormatter())


def _legend(figure: Figure, panels: Mapping[str, Axes], title: str) -> None:
    """Make one legend for all panels, with each line once."""
    lines: dict[str, Any] = {}
    for panel in panels.values():
        handles, labels = panel.get_legend_handles_labels()
        lines = dict(zip(labels, handles, strict=True)) | lines
    columns = 3 if max(map(len, lines)) > 26 else 5
    look: Look = {"fontsize": 7.5, "title_fontsize": 7.5, "ncols": columns, "title": title or None}
    figure.legend(list(lines.values()), list(lines), loc="outside lower center", **look)
