"""Tables of result files, as Markdown. All numbers come out of the file, also the caption's."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.reporting.files import ReportError, Result

#: How a backend is called where people read it.
NAMES = {
    "moe_nvlink": "**moe_nvlink**",
    "allgather": "gloo all-gather + reduce-scatter",
    "gloo_gather": "gloo all-gather + reduce-scatter",
    "gloo_gather_full": "gloo all-gather + reduce-scatter, packing and reducing timed",
    "all_to_all": "torch all_to_all_single, both ways",
    "all_to_all_full": "torch all_to_all_single, both ways, packing and reducing timed",
    "gloo_ag_rs": "gloo all-gather + reduce-scatter, one packed row a token",
    "gloo_ag_rs_unpacked": "gloo all-gather + reduce-scatter, a collective for each tensor",
    "nccl_gather": "NCCL all-gather + reduce-scatter",
    "flashinfer": "FlashInfer moe_a2a",
}
OURS = "moe_nvlink"
PHASES = ("dispatch", "combine", "both")


class Page(NamedTuple):
    """Where a table will stand: the document, from the repository's root."""

    document: str
    root: Path

    def link(self, path: Path) -> str:
        """From the document to a file, as Markdown wants it."""
        return Path(os.path.relpath(path, (self.root / self.document).parent)).as_posix()


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    body = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns), *body])


def caption(page: Page, result: Result, before: str = "") -> str:
    """What was measured, by which command, on what, when: the paragraph above a table."""
    machine = result.machine
    what = machine.get("gpu") or f"{machine.get('cpu')}, {machine.get('cores')} cores"
    start = f"{before}. " if before else ""
    return (
        f"{start}`{machine.get('command')}`, {what}, {machine.get('date')}, commit "
        f"{machine.get('commit')} ([result file]({page.link(result.path)})):"
    )


def layer(result: Result) -> str:
    """The shape of the layer, out of the options."""
    options = result.options
    forms = {
        "ep_size": "{} ranks",
        "hidden_size": "hidden size {}",
        "top_k": "top_k {}",
        "num_experts": "{} experts",
    }
    parts = [form.format(options[name]) for name, form in forms.items() if name in options]
    parts += [str(options["dtype"])] if "dtype" in options else []
    for name in ("recipe", "combine", "router"):
        if name in options:
            parts.append(f"{name} {options[name]}")
    return ", ".join(parts)


def us(value: float) -> str:
    """Microseconds, three digits or more."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def between(low: float, high: float, form: Callable[[float], str]) -> str:
    return f"({form(low)}..{form(high)})"


def spread(found: dict[str, float], form: str = ".2f") -> str:
    """A ratio and its quartiles."""
    middle = found["ratio"] if "ratio" in found else found["median"]
    return f"{middle:{form}} ({found['q25']:{form}}..{found['q75']:{form}})"


# --- kind "moe_comm": bench_moe_comm.py -----------------------------------------------------------


def moe_comm(batches: Sequence[int] | None = None) -> Callable[[Page, Result], str]:
    """The table of bench_moe_comm.py; `batches`: of these tokens per rank only."""

    def render(page: Page, result: Result) -> str:
        rows = [row for row in result.data["rows"] if not batches or row["tokens"] in batches]
        columns = ["tokens per rank", "exchange"]
        columns += [f"{phase} us (quartiles)" for phase in PHASES]
        columns += ["times ours (quartiles)", "GB/s logical / wire", "of ceiling"]
        body = [line for row in rows for line in _moe_comm_rows(row)]
        return "\n\n".join([caption(page, result, _method(result)), table(columns, body)])

    return render


def _method(result: Result) -> str:
    options = result.options
    ranks = "ranks emulated on one device" if options.get("emulate_ranks") else "one rank a process"
    return f"{layer(result)}; {ranks}; median of {options['iters']} iterations"


def _moe_comm_rows(row: dict[str, Any]) -> list[list[str]]:
    """A row; and ours in one launch, where that stands beside ours launched as the peers are."""
    name, one_launch = NAMES.get(row["backend"], row["backend"]), row.get("one_launch")
    if one_launch is None:
        return [_moe_comm_row(row, name)]
    apart = one_launch | {"tokens": row["tokens"], "backend": row["backend"]}
    alone = _moe_comm_row(apart, f"{name}, {one_launch['launch']}", "not comparable")
    return [_moe_comm_row(row, f"{name}, {row['launch']}"), alone]


def _moe_comm_row(row: dict[str, Any], name: str, times_ours: str = "1") -> list[str]:
    both = row.get("both", {})
    cells = [str(row["tokens"]), name]
    cells += [_times(row.get(phase)) for phase in PHASES]
    ratio = row.get("ratio_to_ours", {}).get("both")
    if row["backend"] == OURS:
        cells.append(times_ours)
    elif ratio:
        cells.append(spread(ratio))
    else:
        cells.append("not comparable" if "not_comparable" in row else "")
    rates = [both.get("logical_gb_s"), both.get("wire_gb_s")]
    cells.append(" / ".join(f"{rate:.2f}" for rate in rates) if None not in rates else "")
    cells.append(percent(both.get("of_ceiling")))
    return cells


def _times(phase: dict[str, float] | None) -> str:
    if not phase:
        return ""
    return f"{us(phase['median_us'])} {between(phase['q25_us'], phase['q75_us'], us)}"


def percent(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def moe_comm_notes(page: Page, result: Result) -> str:
    """Beside the table: how the ceiling was measured, what each was spared, what is not shown."""
    del page
    given = {row["backend"]: row.get("given") for row in result.data["rows"]}
    lines = [f"- Ceiling: {result.data.get('ceiling', 'not stated')}."]
    lines += [f"- {NAMES.get(name, name)}: {text}." for name, text in given.items() if text]
    lines += [
        f"- {NAMES.get(row['backend'], row['backend'])}, {row['tokens']} tokens: no ratio, because "
        f"it is launched as {row['not_comparable']}."
        for row in result.data["rows"]
        if "not_comparable" in row
    ]
    lines += [f"- Not measured: {text}." for text in result.data.get("not_measured", [])]
    return "\n".join(line.replace("..", ".") for line in lines)


# --- results of before bench_moe_comm.py ----------------------------------------------------------


def exchange(page: Page, result: Result) -> str:
    """Ours beside gloo: medians, and the ratio of `both` to the first backend's of a batch."""
    first: dict[int, float] = {}
    body = []
    for row in result.data["rows"]:
        ratio = row["both_us"] / first.setdefault(row["tokens"], row["both_us"])
        times = [f"{row[f'{phase}_us']:.0f}" for phase in PHASES]
        body.append([str(row["tokens"]), NAMES[row["backend"]], *times, f"{ratio:.1f}x"])
    columns = ["tokens per rank", "exchange", "dispatch us", "combine us", "both us", "times ours"]
    method = f"{layer(result)}; median of {result.options['iterations']} iterations"
    return "\n\n".join([caption(page, result, method), table(columns, body)])


def recipes(batches: Sequence[int] | None = None) -> Callable[[Page, Result], str]:
    """Every recipe's dispatch and every format's combine, of these tokens per rank."""

    def render(page: Page, result: Result) -> str:
        rows = [row for row in result.data["rows"] if not batches or row["tokens"] in batches]
        columns = ["tokens per rank", "verb", "format", "bytes to other ranks, per token", "ms"]
        columns += ["times faster than bf16", "fused faster than quantising first"]
        body = [
            _recipe_row(row) for row in rows if not row["name"].endswith(("two steps", "torch"))
        ]
        method = (
            f"{layer(result)}; median of {result.options['iterations']} iterations, in brackets "
            "the quartiles of single iterations"
        )
        return "\n\n".join([caption(page, result, method), table(columns, body)])

    return render


def _recipe_row(row: dict[str, Any]) -> list[str]:
    name = row["name"].removesuffix(" fused")
    wire = row.get("wire_bytes_per_token")
    faster = row.get("times_bf16") if name != "bf16" else None
    fused = row.get("over_two_steps")
    return [
        str(row["tokens"]),
        row["verb"],
        name,
        f"{wire:.0f}" if wire is not None else "",
        f"{row['median_us'] / 1e3:.1f}",
        spread(faster) if faster else "",
        spread(fused) if fused else "",
    ]


def lm_head(page: Page, result: Result) -> str:
    """Work of the whole head on every rank over that of the head split, by rows and groups."""
    groups = result.data["groups"]
    counts = [row["rows"] for row in groups[0]["rows"]]
    field = "work_ratio" if "work_ratio" in groups[0]["rows"][0] else "ratio"
    body = [
        [f"groups of {group['tp_size']}", *(f"{row[field]:.2f}" for row in group["rows"])]
        for group in groups
    ]
    options = result.options
    what = "work on all cores" if field == "work_ratio" else "time of a step"
    method = (
        f"{what[0].upper()}{what[1:]}, replicated over split; vocabulary {options['vocab']}, "
        f"hidden size {options['hidden']}, {options['dtype']}"
    )
    parts = [caption(page, result, method), table(["rows a rank", *map(str, counts)], body)]
    ends = [_crossover(group) for group in groups]
    parts.append("\n".join(f"- {line}" for line in ends))
    if "note" in result.data:
        parts.append(f"Noted when it was recorded: {result.data['note']}")
    return "\n\n".join(parts)


def _crossover(group: dict[str, Any]) -> str:
    ends = group.get("by_work", group)
    most, least = ends["faster_up_to"], ends["slower_from"]
    less = f"less up to {most} rows a rank" if most else "less nowhere"
    more = f"is not at {least}" if least else "nowhere more"
    return f"groups of {group['tp_size']}: split, it is {less}, and {more}"


def launch(page: Page, result: Result) -> str:
    """Host cost of a launch, level by level."""
    body = [
        [name, f"{row['median_us']:.2f}", f"{row['min_us']:.2f}", f"{row['p95_us']:.2f}"]
        for name, row in result.data["rows"].items()
    ]
    method = f"Driver: {result.data['driver']}; {result.data['tokens']} tokens"
    columns = ["level", "us, median", "least", "p95"]
    return "\n\n".join([caption(page, result, method), table(columns, body)])


# --- serving, growth, the model -------------------------------------------------------------------


def serve(page: Page, result: Result) -> str:
    """Decode tokens/s of the server through each backend, and ours over the others."""
    columns = ["requests at once", "exchange", "decode tokens/s (quartiles)"]
    columns += ["ours over it (quartiles)"]
    rows = sorted(result.data["rows"], key=lambda row: row["concurrency"])
    body = []
    for row in rows:
        rate, count = row["decode_tokens_per_s"], str(row["concurrency"])
        ratio = result.data["ratio"].get(row["backend"], {}).get(count)
        cell = f"{us(rate['median'])} {between(rate['q25'], rate['q75'], us)}"
        name = NAMES.get(row["backend"], row["backend"])
        body.append([count, name, cell, spread(ratio) if ratio else "1"])
    options = result.options
    method = (
        f"vLLM server of {result.data['ep_size']} ranks, {options['layers']} layers, hidden size "
        f"{options['hidden_size']}, top_k {options['top_k']}, {options['num_experts']} experts; "
        f"every answer {options['tokens']} tokens, median of {options['rounds']} rounds"
    )
    return "\n\n".join([caption(page, result, method), table(columns, body)])


def growth(page: Page, result: Result) -> str:
    """Each series' curve, how far its points lie off it, and the knees; then the points."""
    columns = ["series", "x", "fitted curve, us", "off it: median, most", "knees"]
    body = []
    for series in result.data["series"]:
        fit = series["fit"]
        off = sorted(abs(each) for each in fit["off"])
        low, high = series["points"][0][0], series["points"][-1][0]
        knees = ", ".join(f"`{knee['id']}`" for knee in series["knees"]) or "none"
        spanned = f"{series['x_label']}, {low:g} to {high:g}"
        amounts = f"{percent(off[len(off) // 2])}, {percent(off[-1])}"
        body.append([series["name"], spanned, f"`{fit['printed']}`", amounts, knees])
    parts = [caption(page, result, result.data["shows"]), table(columns, body)]
    means = dict.fromkeys(
        f"- {series['dimension']}: {series['fit']['where']}." for series in result.data["series"]
    )
    parts.append("\n".join(means))
    dimensions = dict.fromkeys(series["dimension"] for series in result.data["series"])
    parts += [_points(result, dimension) for dimension in dimensions]
    left_out = [f"- Not measured: {text}." for text in result.data["not_measured"]]
    return "\n\n".join([*parts, "\n".join(left_out)]).strip()


def _points(result: Result, dimension: str) -> str:
    """A dimension's points, one column each."""
    mine = [series for series in result.data["series"] if series["dimension"] == dimension]
    body = []
    for series in mine:
        body.append([f"{series['phase']}, us", *(us(point[1]) for point in series["points"])])
        body.append(["off the curve", *(f"{off:+.0%}" for off in series["fit"]["off"])])
        if "core_us" in series:
            body.append(["us of a core, a rank", *(us(each) for _x, each in series["core_us"])])
    return table([mine[0]["x_label"], *(f"{point[0]:g}" for point in mine[0]["points"])], body)


def model(page: Page, result: Result) -> str:
    """How well the model repeats what was published, and what it predicts of ours."""
    checked = result.data["validation"]
    errors = {"fitted": checked["fitted"]["summary"]}
    for ep_size, one in checked["leave_one_out"]["by_ep_size"].items():
        errors[f"EP{ep_size}, by a fit without it"] = one
    errors |= {f"held out, {name}": one for name, one in checked["held_out"]["summary"].items()}
    body = [
        [name, str(one["figures"]), *(f"{one[part]:.1%}" for part in ("median", "p90", "worst"))]
        for name, one in errors.items()
    ]
    columns = ["published figures", "of them", "median error", "90th percentile", "worst"]
    return "\n\n".join(
        [
            caption(page, result, result.data["shows"]),
            table(columns, body),
            "Predicted, dispatch + combine, us (range over all fits of the tables):",
            _predictions(result),
        ]
    )


def _predictions(result: Result, batches: Sequence[int] = (1, 64, 512, 2048)) -> str:
    """Unquantised rows under the default routing, of each machine, kernel and number of ranks."""
    found: dict[tuple[str, ...], dict[int, str]] = {}
    for row in result.data["predictions"]:
        plain = (row["recipe"], row["combine_format"]) == ("bf16", "bf16")
        if not plain or row["tokens"] not in batches or row["router"] == "uniform":
            continue
        cell = " + ".join(_predicted(row[verb]) for verb in ("dispatch", "combine"))
        key = (row["machine"], row["protocol"], f"EP{row['ep_size']}")
        found.setdefault(key, {})[row["tokens"]] = cell
    body = [[*key, *(cells.get(n, "") for n in batches)] for key, cells in found.items()]
    heads = [f"predicted at {n} tokens" for n in batches]
    return table(["machine", "kernels", "ranks", *heads], body)


def _predicted(verb: dict[str, float]) -> str:
    low, high = verb["low_us"], verb["high_us"]
    return f"{verb['us']:.1f} ({low:.1f}..{high:.1f})"


RENDERERS: dict[str, Callable[[Page, Result], str]] = {
    "moe_comm": moe_comm(),
    "exchange": exchange,
    "recipes": recipes(),
    "lm_head": lm_head,
    "launch": launch,
    "serve": serve,
    "growth": growth,
    "model": model,
}


def by_kind(page: Page, result: Result) -> str:
    """The table of the file's kind.

    Raises:
        ReportError: no table is known for it.
    """
    render = RENDERERS.get(result.kind)
    if render is None:
        raise ReportError(
            f"{result.name}: no table for results of kind {result.kind!r}; there is one for "
            f"{', '.join(sorted(RENDERERS))} (benchmarks/reporting/tables.py)"
        )
    return render(page, result)
