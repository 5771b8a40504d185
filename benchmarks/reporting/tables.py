"""Tables of result files, as Markdown. All numbers come out of the file, also the caption's."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from benchmarks.reporting.files import Page, Result

#: How a backend is called where people read it.
NAMES = {
    "moe_nvlink": "**moe_nvlink**",
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

Row = Mapping[str, Any]


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    body = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns), *body])


def caption(page: Page, result: Result, before: str) -> str:
    """What was measured, by which command, on what, when: the paragraph above a table."""
    machine = result.machine
    what = machine.get("gpu") or f"{machine.get('cpu')}, {machine.get('cores')} cores"
    return (
        f"{before}. `{machine.get('command')}`, {what}, {machine.get('date')}, commit "
        f"{machine.get('commit')} ([result file]({page.link(result.path)})):"
    )


def layer(result: Result) -> str:
    """The shape of the layer, out of the options."""
    options = result.options
    forms = ("{ep_size} ranks", "hidden size {hidden_size}", "top_k {top_k}")
    shape = ", ".join((*forms, "{num_experts} experts", "{dtype}")).format(**options)
    formats = [f"{n} {options[n]}" for n in ("recipe", "combine", "router") if n in options]
    return ", ".join([shape, *formats])


def us(value: float) -> str:
    """Microseconds, three digits or more."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def spread(ratio: Row | None) -> str:
    """A ratio and its quartiles; of none, nothing."""
    if not ratio:
        return ""
    middle = ratio.get("ratio", ratio.get("median"))
    return f"{middle:.2f} ({ratio['q25']:.2f}..{ratio['q75']:.2f})"


def times(found: Row | None, unit: str = "_us") -> str:
    """A median and its quartiles; of none, nothing."""
    if not found:
        return ""
    middle, low, high = (us(found[name + unit]) for name in ("median", "q25", "q75"))
    return f"{middle} ({low}..{high})"


def percent(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def of_batches(result: Result, batches: Collection[int]) -> list[Row]:
    """The rows of these tokens per rank; of no batches, all rows."""
    return [row for row in result.data["rows"] if not batches or row["tokens"] in batches]


# --- kind "moe_comm": bench_moe_comm.py -----------------------------------------------------------


def moe_comm(page: Page, result: Result, batches: Collection[int] = ()) -> str:
    """The table of bench_moe_comm.py; `batches`: of these tokens per rank only."""
    columns = ["tokens per rank", "exchange", *(f"{phase} us (quartiles)" for phase in PHASES)]
    columns += ["times ours (quartiles)", "GB/s logical / wire", "of ceiling"]
    options, body = result.options, list[list[str]]()
    for row in of_batches(result, batches):
        name, one_launch = NAMES.get(row["backend"], row["backend"]), row.get("one_launch")
        beside = f"{name}, {row['launch']}" if one_launch else str(name)
        body.append(_moe_comm_row(row, beside, _times_ours(row)))
        if one_launch:  # ours alone, beside ours launched as the peers are
            apart = {**one_launch, "tokens": row["tokens"]}
            body.append(_moe_comm_row(apart, f"{name}, {apart['launch']}", "not comparable"))
    ranks = "ranks emulated on one device" if options.get("emulate_ranks") else "one rank a process"
    method = f"{layer(result)}; {ranks}; median of {options['iters']} iterations"
    return "\n\n".join([caption(page, result, method), table(columns, body)])


def _times_ours(row: Row) -> str:
    if row["backend"] == OURS:
        return "1"
    ratio = row.get("ratio_to_ours", {}).get("both")
    return spread(ratio) or ("not comparable" if "not_comparable" in row else "")


def _moe_comm_row(row: Row, name: str, times_ours: str) -> list[str]:
    both = row["both"]
    rates = f"{both['logical_gb_s']:.2f} / {both['wire_gb_s']:.2f}"
    cells = [str(row["tokens"]), name, *(times(row[phase]) for phase in PHASES)]
    return [*cells, times_ours, rates, percent(both.get("of_ceiling"))]


def moe_comm_whole(page: Page, result: Result) -> str:
    """All rows; how the ceiling was measured, what each was spared, what is not shown."""
    lines = [f"- Ceiling: {result.data.get('ceiling', 'not stated')}."]
    given = {row["backend"]: row.get("given") for row in result.data["rows"]}
    lines += [f"- {NAMES.get(name, name)}: {text}." for name, text in given.items() if text]
    lines += [
        f"- {NAMES.get(row['backend'], row['backend'])}, {row['tokens']} tokens: no ratio, because "
        f"it is launched as {row['not_comparable']}."
        for row in result.data["rows"]
        if "not_comparable" in row
    ]
    lines += [f"- Not measured: {text}." for text in result.data.get("not_measured", [])]
    notes = "\n".join(line.replace("..", ".") for line in lines)
    return f"{moe_comm(page, result)}\n\n{notes}"


# --- recipes, the LM head, a launch, serving ------------------------------------------------------


def recipes(page: Page, result: Result, batches: Collection[int] = ()) -> str:
    """Every recipe's dispatch and every format's combine, of these tokens per rank."""
    columns = ["tokens per rank", "verb", "format", "bytes to other ranks, per token", "ms"]
    columns += ["times faster than bf16", "fused faster than quantising first"]
    body = []
    for row in of_batches(result, batches):
        if row["name"].endswith(("two steps", "torch")):
            continue
        name, wire = row["name"].removesuffix(" fused"), row.get("wire_bytes_per_token")
        cells = [str(row["tokens"]), row["verb"], name, "" if wire is None else f"{wire:.0f}"]
        faster = row.get("times_bf16") if name != "bf16" else None
        cells += [f"{row['median_us'] / 1e3:.1f}", spread(faster)]
        body.append([*cells, spread(row.get("over_two_steps"))])
    method = (
        f"{layer(result)}; median of {result.options['iterations']} iterations, in brackets "
        "the quartiles of single iterations"
    )
    return "\n\n".join([caption(page, result, method), table(columns, body)])


def lm_head(page: Page, result: Result) -> str:
    """Work of the whole head on every rank over that of the head split, by rows and groups."""
    groups, options = result.data["groups"], result.options
    counts = [str(row["rows"]) for row in groups[0]["rows"]]
    on_cpu = "work_ratio" in groups[0]["rows"][0]
    field, what = ("work_ratio", "Work on all cores") if on_cpu else ("ratio", "Time of a step")
    body = [
        [f"groups of {group['tp_size']}", *(f"{row[field]:.2f}" for row in group["rows"])]
        for group in groups
    ]
    method = (
        f"{what}, replicated over split; vocabulary {options['vocab']}, "
        f"hidden size {options['hidden']}, {options['dtype']}"
    )
    parts = [caption(page, result, method), table(["rows a rank", *counts], body)]
    parts.append("\n".join(f"- {_crossover(group)}" for group in groups))
    if "note" in result.data:
        parts.append(f"Noted when it was recorded: {result.data['note']}")
    return "\n\n".join(parts)


def _crossover(group: Row) -> str:
    ends = group.get("by_work", group)
    most, least = ends["faster_up_to"], ends["slower_from"]
    less = f"less up to {most} rows a rank" if most else "less nowhere"
    more = f"is not at {least}" if least else "nowhere more"
    return f"groups of {group['tp_size']}: split, it is {less}, and {more}"


def launch(page: Page, result: Result) -> str:
    """Host cost of a launch, level by level."""
    body = [
        [name, *(f"{row[field]:.2f}" for field in ("median_us", "min_us", "p95_us"))]
        for name, row in result.data["rows"].items()
    ]
    method = f"Driver: {result.data['driver']}; {result.data['tokens']} tokens"
    columns = ["level", "us, median", "least", "p95"]
    return "\n\n".join([caption(page, result, method), table(columns, body)])


def serve(page: Page, result: Result) -> str:
    """Decode tokens/s of the server through each backend, and ours over the others."""
    columns = ["requests at once", "exchange", "decode tokens/s (quartiles)"]
    body = []
    for row in sorted(result.data["rows"], key=lambda row: int(row["concurrency"])):
        count, name = str(row["concurrency"]), NAMES.get(row["backend"], row["backend"])
        ratio = result.data["ratio"].get(row["backend"], {}).get(count)
        body.append([count, name, times(row["decode_tokens_per_s"], ""), spread(ratio) or "1"])
    options = result.options
    method = (
        f"vLLM server of {result.data['ep_size']} ranks, {options['layers']} layers, hidden size "
        f"{options['hidden_size']}, top_k {options['top_k']}, {options['num_experts']} experts; "
        f"every answer {options['tokens']} tokens, median of {options['rounds']} rounds"
    )
    shown = table([*columns, "ours over it (quartiles)"], body)
    return "\n\n".join([caption(page, result, method), shown])


# --- growth, the model ----------------------------------------------------------------------------


def growth(page: Page, result: Result) -> str:
    """Each series' curve, how far its points lie off it, and the knees; then the points."""
    body, means = [], dict[str, None]()
    by_dimension: dict[str, list[Row]] = {}
    for series in result.data["series"]:
        fit, points = series["fit"], series["points"]
        off = sorted(abs(each) for each in fit["off"])
        knees = ", ".join(f"`{knee['id']}`" for knee in series["knees"]) or "none"
        spanned = f"{series['x_label']}, {points[0][0]:g} to {points[-1][0]:g}"
        amounts = f"{percent(off[len(off) // 2])}, {percent(off[-1])}"
        body.append([series["name"], spanned, f"`{fit['printed']}`", amounts, knees])
        means[f"- {series['dimension']}: {fit['where']}."] = None
        by_dimension.setdefault(series["dimension"], []).append(series)
    columns = ["series", "x", "fitted curve, us", "off it: median, most", "knees"]
    parts = [caption(page, result, result.data["shows"]), table(columns, body), "\n".join(means)]
    parts += [_points(of) for of in by_dimension.values()]
    left_out = [f"- Not measured: {text}." for text in result.data["not_measured"]]
    return "\n\n".join([*parts, "\n".join(left_out)]).strip()


def _points(of_dimension: Sequence[Row]) -> str:
    """A dimension's points, one column each."""
    body = []
    for series in of_dimension:
        body.append([f"{series['phase']}, us", *(us(point[1]) for point in series["points"])])
        body.append(["off the curve", *(f"{off:+.0%}" for off in series["fit"]["off"])])
        if "core_us" in series:
            body.append(["us of a core, a rank", *(us(each) for _x, each in series["core_us"])])
    first = of_dimension[0]
    return table([first["x_label"], *(f"{point[0]:g}" for point in first["points"])], body)


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
    predicted = "Predicted, dispatch + combine, us (range over all fits of the tables):"
    parts = [caption(page, result, result.data["shows"]), table(columns, body)]
    return "\n\n".join([*parts, predicted, _predictions(result)])


def _predictions(result: Result) -> str:
    """Unquantised rows under the default routing, of each machine, kernel and number of ranks."""
    rows = pd.DataFrame(result.data["predictions"])
    plain = (rows["recipe"] == "bf16") & (rows["combine_format"] == "bf16")
    rows = rows[plain & rows["tokens"].isin([1, 64, 512, 2048]) & (rows["router"] != "uniform")]
    cells = rows["dispatch"].map(_predicted) + " + " + rows["combine"].map(_predicted)
    rows = rows.assign(cell=cells, ranks="EP" + rows["ep_size"].astype(str))
    index = ["machine", "protocol", "ranks"]
    wide = rows.pivot_table("cell", index, "tokens", aggfunc="first", fill_value="", sort=False)
    heads = ["machine", "kernels", "ranks", *(f"predicted at {n} tokens" for n in wide.columns)]
    return table(heads, wide.reset_index().to_numpy().tolist())


def _predicted(verb: Row) -> str:
    return f"{verb['us']:.1f} ({verb['low_us']:.1f}..{verb['high_us']:.1f})"
