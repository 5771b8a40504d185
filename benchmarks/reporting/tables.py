"""Render result files as Markdown. All numbers come out of the file, also the caption's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import pandas as pd

from benchmarks.reporting.files import Result

#: How a backend is called where people read it.
NAMES = {
    "moe_nvlink": "**moe_nvlink**",
    "moe_nvlink_one_launch": "**moe_nvlink**",
    "gloo_gather": "gloo all-gather + reduce-scatter",
    "gloo_gather_full": "gloo all-gather + reduce-scatter, packing and reducing timed",
    "all_to_all": "torch all_to_all_single, both ways",
    "all_to_all_full": "torch all_to_all_single, both ways, packing and reducing timed",
    "gloo_ag_rs": "gloo all-gather + reduce-scatter, one packed row a token",
    "gloo_ag_rs_unpacked": "gloo all-gather + reduce-scatter, a collective for each tensor",
    "one_rank": "none: a server of one rank",
    "tensor_parallel": "none: tensor parallelism",
    "moe_nvlink_tp2": "moe_nvlink, pairs of ranks in tensor parallelism",
    "nccl_gather": "NCCL all-gather + reduce-scatter",
    "flashinfer": "FlashInfer moe_a2a",
    "flashinfer_cake": "FlashInfer moe_a2a, cake",
}
OURS = "moe_nvlink"
#: Nominal rate of an H100's or H200's NVLink in one direction, of which an estimate is made.
LINK_GB_S = 450
PHASES = ("dispatch", "combine", "both")

Row = Mapping[str, Any]


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    body = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns), *body])


def shown(result: Result, method: str, *parts: str) -> str:
    """Say what was measured, on what, when; then show tables and notes."""
    machine = result.machine
    what = machine.get("gpu") or f"{machine.get('cpu')}, {machine.get('cores')} cores"
    source = f" ([result file]({result.link}))" if result.link else ""
    made = f"{what}, {machine.get('date')}, commit {machine.get('commit')}{source}"
    return "\n\n".join([f"{method}. {made}:", *filter(None, parts)])


def notes(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def layer(result: Result) -> str:
    """Return the shape of the layer, out of the options."""
    options = result.options
    text = "{ep_size} ranks, hidden size {hidden_size}, top_k {top_k}, {num_experts} experts, "
    formats = [f"{n} {options[n]}" for n in ("recipe", "combine", "router") if n in options]
    return ", ".join([(text + "{dtype}").format(**options), *formats])


def us(value: float) -> str:
    """Format microseconds with three digits or more."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def spread(ratio: Row | None) -> str:
    """Format a ratio and its quartiles; of none, nothing."""
    if not ratio:
        return ""
    middle = ratio.get("ratio", ratio.get("median"))
    return f"{middle:.2f} ({ratio['q25']:.2f}..{ratio['q75']:.2f})"


def times(found: Row, unit: str = "_us") -> str:
    """Format a median and its quartiles."""
    middle, low, high = (us(found[name + unit]) for name in ("median", "q25", "q75"))
    return f"{middle} ({low}..{high})"


# --- kind "moe_comm": bench_moe_comm.py -----------------------------------------------------------


def moe_comm(result: Result) -> str:
    """Render a line for each batch, the ceiling's method, what each backend is spared.

    What no backend's time holds is said where the method is, in benchmarks/README.md.
    """
    rows = result.data["rows"]
    said = [f"Ceiling: {result.data.get('ceiling', 'not stated')}."]
    given: dict[str, dict[str, None]] = {}
    for row in rows:
        for part in (row.get("given") or "").split("; "):
            given.setdefault(NAMES.get(row["backend"], row["backend"]), {})[part] = None
    said += [f"{name}: {'; '.join(filter(None, parts))}." for name, parts in given.items()]
    return shown(result, _of_layer(result), _batches(rows), notes(said))


def moe_comm_alone(result: Result) -> str:
    """Render the same without the notes, for a table beside one that has them."""
    return shown(result, _of_layer(result), _batches(result.data["rows"]))


def _of_layer(result: Result) -> str:
    emulated, bound = (result.options.get(name) for name in ("emulate_ranks", "bind"))
    ranks = "ranks emulated on one device" if emulated else "one rank a process"
    ranks += ", bound to cores in turn" if bound else ""
    return f"{layer(result)}; {ranks}; median of {result.options['iters']} iterations"


def _name(row: Row) -> str:
    """Name the backend; of emulated ranks, how they were launched."""
    name = NAMES.get(row["backend"], row["backend"])
    return f"{name}, {row['launch']}" if "launch" in row else str(name)


def _small(row: Row) -> str:
    """Say what the kernels of a small batch are for. Older rows do not tell combine's."""
    return "for small batches" + ("" if row.get("combine_is_small", True) else " in dispatch alone")


def _batches(rows: Sequence[Row]) -> str:
    """Render ours, then the peers with their ratio to ours, then ours in one launch."""
    places = {_name(row): _place(row) for row in rows}
    names = sorted(places, key=lambda name: places[name])
    has_small = any(row.get("is_small") for row in rows)
    columns = ["tokens per rank", *(["our kernels"] if has_small else [])]
    for name in names:
        columns.append(f"{name}: dispatch, combine, both us")
        columns += [["of ceiling"], ["both, times ours (quartiles)"], []][places[name]]
    body = []
    for tokens in dict.fromkeys(row["tokens"] for row in rows):
        found = {_name(row): row for row in rows if row["tokens"] == tokens}
        cells = [str(tokens)]
        if has_small:
            cells.append(next((_small(row) for row in found.values() if row.get("is_small")), ""))
        for name in names:
            cells += _of_batch(places[name], found.get(name))
        body.append(cells)
    return table(columns, body)


def _place(row: Row) -> int:
    """Return 0 for ours, 2 for ours that is launched otherwise than the peers, 1 for a peer."""
    return {OURS: 0, f"{OURS}_one_launch": 2}.get(row["backend"], 1)


def _of_batch(place: int, row: Row | None) -> list[str]:
    """Return a backend's cells of one batch; empty ones if it did not run."""
    if row is None:
        return [""] if place == 2 else ["", ""]
    cells = [", ".join(us(row[phase]["median_us"]) for phase in PHASES)]
    if place == 0:
        share = row["both"].get("of_ceiling")
        cells.append("" if share is None else f"{share:.0%}")
    if place == 1:
        ratio = spread(row.get("ratio_to_ours", {}).get("both"))
        cells.append(ratio or ("not comparable" if "launch" in row else ""))
    return cells


def ratios(result: Result) -> str:
    """Render the peers' times over ours, batch by batch, of rows that were launched alike."""
    found = [row for row in result.data["rows"] if row.get("ratio_to_ours")]
    tokens = list(dict.fromkeys(row["tokens"] for row in found))
    of_batch = {(row["backend"], row["tokens"]): row["ratio_to_ours"] for row in found}
    body = [
        [
            f"{NAMES.get(backend, backend)}, {phase}",
            *(_middle_of(of_batch.get((backend, batch), {}).get(phase)) for batch in tokens),
        ]
        for backend in dict.fromkeys(row["backend"] for row in found)
        for phase in PHASES
    ]
    method = f"Their time over ours (above 1: ours is faster), medians; {layer(result)}"
    return shown(result, method, table(["tokens per rank", *map(str, tokens)], body))


def _middle_of(ratio: Row | None) -> str:
    return f"{ratio['median']:.2f}" if ratio else ""


def small_beside_bulk(small: Result, bulk: Result) -> str:
    """Render the batches of two results of ours that were launched alike, one beside the other.

    Args:
        small: batches below a limit have the kernels for small batches; the others tell what two
            runs of the same kernels differ by.
        bulk: every batch has the kernels for large ones.
    """
    first = {(row["launch"], row["tokens"]): row for row in small.data["rows"]}
    columns = ["tokens per rank", "kernels"]
    columns += [f"{phase} us, beside bulk's (over bulk)" for phase in PHASES]
    body = []
    for row in bulk.data["rows"]:
        if (other := first.get((row["launch"], row["tokens"]))) is None:
            continue
        kernels = _small(other) if other.get("is_small") else "bulk again"
        pairs = ((other[phase]["median_us"], row[phase]["median_us"]) for phase in PHASES)
        cells = (f"{us(one)} / {us(two)} ({one / two:.2f})" for one, two in pairs)
        body.append([str(row["tokens"]), kernels, *cells])
    method = (
        f"{layer(small)}; one launch of all ranks; median of {small.options['iters']} iterations; "
        f"bulk is [another result file]({bulk.link}) of the same run"
    )
    return shown(small, method, table(columns, body))


# --- recipes, the LM head, a launch, serving ------------------------------------------------------


#: What a row's name may say after its format: how its dispatch came to quantised rows.
WAYS = ("", "fused", "two steps", "given rows", "quantiser alone")


def recipes(result: Result) -> str:
    """Render every recipe's dispatch and every format's combine, beside bf16."""
    heads = ["fused faster than quantising first"]
    body = [
        [*cells, spread(rows.get("fused", {}).get("over_two_steps"))]
        for cells, rows in _formats(result)
    ]
    return shown(result, _of_recipes(result), table([*_heads(result), *heads], body))


def recipes_gpu(result: Result) -> str:
    """Render the same of ranks emulated on a GPU: fused, of rows that were given, the quantiser."""
    heads = ["rows given, us", "quantiser alone, us", "time over the quantiser's"]
    body = []
    for cells, rows in _formats(result):
        alone = (rows.get(way) for way in WAYS[3:])
        body.append(
            [
                *cells,
                *(us(found["median_us"]) if found else "" for found in alone),
                spread(rows.get("fused", {}).get("over_quantiser")),
            ]
        )
    parts = [table([*_heads(result), *heads], body)]
    if estimates := list(_estimates(result)):
        text = (
            "*Estimate, no measurement*, of combine with {} GPUs, each with a rank: the additional "
            "work is divided among them, the links carry {} GB/s (nominal), and neither overlaps. "
            "us of work more, us of bytes less, of all bytes:"
        )
        batches = [f"{tokens} tokens" for tokens in _batches_of(result)]
        parts += [text.format(result.options["ep_size"], LINK_GB_S)]
        parts += [table(["combine", *batches], estimates)]
    return shown(result, f"{_of_recipes(result)}; ranks emulated on one device", *parts)


def _of_recipes(result: Result) -> str:
    return (
        f"{layer(result)}; median of {result.options['iterations']} iterations; behind the time, "
        f"how many times faster than bf16 (quartiles); last columns: {_batches_of(result)[-1]} "
        "tokens"
    )


def _batches_of(result: Result) -> list[int]:
    return list(dict.fromkeys(row["tokens"] for row in result.data["rows"]))


def _heads(result: Result) -> list[str]:
    batches = (f"{tokens} tokens, us" for tokens in _batches_of(result))
    return ["verb", "format", "bytes to other ranks, per token", *batches]


def _formats(result: Result) -> Iterator[tuple[list[str], dict[str, Row]]]:
    """Yield each format's cells, and its rows of the largest batch by their way."""
    found: dict[tuple[str, str], dict[int, dict[str, Row]]] = {}
    for row in result.data["rows"]:
        name, _, way = row["name"].partition(" ")
        if way in WAYS:  # bf16 has turns with each recipe: its first ones are shown
            batches = found.setdefault((row["verb"], name), {})
            batches.setdefault(row["tokens"], {}).setdefault(way, row)
    largest = _batches_of(result)[-1]
    for (verb, name), batches in found.items():
        rows = batches.get(largest, {})
        cells = [verb, name, f"{_sent(rows)['wire_bytes_per_token']:.0f}"]
        for tokens in _batches_of(result):
            row = _sent(batches[tokens])
            faster = spread(row.get("times_bf16") if name != "bf16" else None)
            cells.append("; ".join(filter(None, (us(row["median_us"]), faster))))
        yield cells, rows


def _sent(rows: Mapping[str, Row]) -> Row:
    """Return the row of what a user calls."""
    return rows.get("fused") or rows[""]


def _estimates(result: Result) -> Iterator[list[str]]:
    """Yield what each format of combine would cost and save, if every rank had a GPU."""
    combines = [row for row in result.data["rows"] if row["verb"] == "combine"]
    of_format = {(row["name"], row["tokens"]): row for row in combines}
    for name in dict.fromkeys(row["name"] for row in combines if row["name"] != "bf16"):
        cells = [str(name)]
        for tokens in _batches_of(result):
            row, bf16 = of_format[name, tokens], of_format["bf16", tokens]
            work = (row["median_us"] - bf16["median_us"]) / result.options["ep_size"]
            sent, all_sent = (
                each["wire_bytes_per_token"] * tokens / LINK_GB_S / 1e3 for each in (row, bf16)
            )
            cells.append(f"{work:.1f}, {all_sent - sent:.1f}, {all_sent:.1f}")
        yield cells


def lm_head(result: Result) -> str:
    """Render the time of a step with the whole head on every rank over that with a split head."""
    groups, options = result.data["groups"], result.options
    columns = ["rows a rank", *(str(row["rows"]) for row in groups[0]["rows"])]
    fields = {"": "ratio", ", expected": "expected_ratio"}
    body = [
        [f"groups of {group['tp_size']}{kind}", *(f"{row[name]:.2f}" for row in group["rows"])]
        for group in groups
        for kind, name in fields.items()
    ]
    method = (
        f"Time of a step, replicated over split; vocabulary {options['vocab']}, "
        f"hidden size {options['hidden']}, {options['dtype']}"
    )
    return shown(result, method, table(columns, body), notes(map(_crossover, groups)))


def _crossover(group: Row) -> str:
    most, least = group["faster_up_to"], group["slower_from"]
    less = f"less up to {most} rows a rank" if most else "less nowhere"
    more = f"is not at {least}" if least else "nowhere more"
    expected = f"expected up to {group['expected_up_to']}"
    return f"groups of {group['tp_size']}: split, it is {less}, and {more}; {expected}"


def launch(result: Result) -> str:
    """Render the host cost of a launch, level by level."""
    fields = {"median_us": "us, median", "p95_us": "p95"}
    body = [
        [name, *(f"{row[field]:.2f}" for field in fields)]
        for name, row in result.data["rows"].items()
    ]
    method = f"Driver: {result.data['driver']}; {result.data['tokens']} tokens"
    return shown(result, method, table(["level", *fields.values()], body))


def serve(result: Result) -> str:
    """Render decode tokens/s of the server through each backend, and ours over the others."""
    rates = {
        (int(row["concurrency"]), row["backend"]): row["decode_tokens_per_s"]
        for row in result.data["rows"]
    }
    backends = sorted(
        dict.fromkeys(backend for _, backend in rates), key=lambda backend: backend != OURS
    )
    columns = ["requests at once"]
    for backend in backends:
        columns.append(f"{NAMES.get(backend, backend)}: tokens/s")
        columns += [] if backend == OURS else ["ours over it (quartiles)"]
    body = []
    for count in sorted({concurrency for concurrency, _ in rates}):
        cells = [str(count)]
        for backend in backends:
            rate = rates.get((count, backend))
            cells.append(us(rate["median"]) if rate else "")
            if backend != OURS:
                cells.append(spread(result.data["ratio"].get(backend, {}).get(str(count))))
        body.append(cells)
    for what, cell_of in _of_servers(result):
        cells = [what]
        for backend in backends:
            cells += [cell_of(backend)] if backend == OURS else [cell_of(backend), ""]
        body.append(cells)
    text = (
        "vLLM server of {ep_size} ranks, {layers} layers, hidden size {hidden_size}, top_k {top_k},"
        " {num_experts} experts{dtype}; decode tokens/s of answers of {tokens} tokens, median of "
        "{rounds} rounds"
    )
    dtype = f", {result.data['dtype']}" if "dtype" in result.data else ""
    method = text.format(**result.options | {"ep_size": result.data["ep_size"], "dtype": dtype})
    return shown(result, method, table(columns, body))


def _of_servers(result: Result) -> Iterator[tuple[str, Callable[[str], str]]]:
    """Yield what is told of whole servers, if the file has it: a heading, and the cell by name."""
    if threads := result.data.get("threads_per_rank"):
        yield "compute threads of each rank", lambda name: str(threads[name])
    if held := result.data.get("memory_bytes"):
        yield (
            "memory of each rank (PSS), GiB",
            lambda name: ", ".join(f"{each / 2**30:.2f}" for each in held[name]),
        )
    if result.data.get("dtype", "float32") != "float32":
        yield "tokens that differ from one rank's after equal ones", partial(_different, result)


def _different(result: Result, backend: str) -> str:
    rows = [row for row in result.data["rows"] if row["backend"] == backend]
    different, checked = (
        sum(row[f"tokens_{what}"] for row in rows) for what in ("different", "checked")
    )
    return f"{different / checked:.1%}"


# --- kind "scheduler": bench_scheduler.py ---------------------------------------------------------

#: Heading -> fields of a row.
_WAITS = {
    "first token, ms: p50, p99": ("first_p50_ms", "first_p99_ms"),
    "largest gap of a request, ms: p50, most": ("largest_gap_p50_ms", "largest_gap_max_ms"),
}


def scheduler(result: Result) -> str:
    """Render waves of requests, then requests that arrive at several rates, by policy."""
    columns = ["policy", "preemptions", "longest pause, iterations", *_WAITS]
    columns += ["whole request, ms: p50", "tokens/s"]
    rates = [[f"{row['rate']:g}", *_scheduler_row(row)] for row in result.data["rows"]]
    return "\n\n".join(
        [
            scheduler_waves(result),
            notes(_about_schedules(result)),
            "Long answers, independent arrivals:",
            table(["requests/s", *columns], rates),
        ]
    )


def scheduler_waves(result: Result) -> str:
    """Render waves alone; the plots show what arrives at several rates."""
    columns = ["workload", "policy", "preemptions", "longest pause, iterations", *_WAITS]
    columns += ["whole request, ms: p50", "tokens/s", "iterations", "mean KV share"]
    workloads = result.data["workloads"]
    waves = [
        [
            *(workloads[row["workload"]]["title"], *_scheduler_row(row)),
            *(_middle(row, "iterations"), f"{row['kv_share']:.0%}"),
        ]
        for row in result.data["waves"]
    ]
    method = (
        "vLLM server of one rank, {model}, KV cache of {kv_blocks} blocks of {block_size} tokens; "
        "all requests at once; every figure is the median of {rounds} rounds"
    )
    return shown(result, method.format(**result.options), table(columns, waves))


def _about_schedules(result: Result) -> Iterable[str]:
    """Say which schedules are equal, and what else the machine did."""
    for name, by_policy in result.data["drawn"].items():
        first, *others = by_policy.values()
        equal = "the same" if all(other == first for other in others) else "not the same"
        repeat = all(r["schedule_repeats"] for r in result.data["waves"] if r["workload"] == name)
        yield (
            f"Schedules of {result.data['workloads'][name]['title']!r}: {equal} with all policies; "
            f"{'the same' if repeat else 'not the same'} in all rounds of a policy."
        )
    before, after = (result.machine[f"load_{when}"][0] for when in ("before", "after"))
    yield f"Load of the machine before: {before:.1f}; after, with that of the run: {after:.1f}."


def _scheduler_row(row: Row) -> list[str]:
    waits = (", ".join(_middle(row, field) for field in fields) for fields in _WAITS.values())
    rest = (_middle(row, field) for field in ("whole_p50_ms", "tokens_per_s"))
    counts = (_middle(row, field) for field in ("preemptions", "longest_pause"))
    return [f"`{row['policy']}`", *counts, *waits, *rest]


def _middle(row: Row, field: str) -> str:
    middle = row[field]["median"]
    return f"{middle:.0f}" if middle == round(middle) else us(middle)


# --- kind "ptx_clock": ptx_clock.py ---------------------------------------------------------------


def ptx_clock(result: Result, shows: Callable[[Row], bool] = bool) -> str:
    """Render modelled times, ours beside FlashInfer's, and the clock beside published times.

    Args:
        shows: whether a row is shown.
    """
    rows = [row for row in result.data["rows"] if shows(row)]
    parts = [_clocked(rows)]
    if checked := result.data.get("errors"):
        columns = ["published times, GB200, EP8", "of them", "median error", "worst"]
        body = [
            [
                f"{row['verb']}, {'with' if row['has_sync'] else 'without'} flags",
                *(str(row["figures"]), f"{row['median']:.1%}", f"{row['worst']:.1%}"),
            ]
            for row in checked
        ]
        parts.append(table(columns, body))
    return shown(result, result.data["shows"], *parts)


def _clocked(rows: Sequence[Row]) -> str:
    """Render a line for each machine, number of ranks, format and tokens: times of ours, and their
    part of each other kernels' times.
    """
    found: dict[tuple[Any, ...], dict[tuple[str, str], Row]] = {}
    for row in rows:
        formats = f"{row['recipe']}, {row['combine']}"
        key = (row["machine"], f"EP{row['ep_size']}", formats, row["tokens"])
        found.setdefault(key, {})[row["verb"], row["kernels"]] = row
    columns = list(dict.fromkeys((row["verb"], row["kernels"]) for row in rows))
    columns.sort(key=lambda column: column[0], reverse=True)  # the dispatches first
    heads = [
        f"{verb}, {NAMES[kernels]}, us"
        if kernels == OURS
        else f"over {NAMES.get(kernels, kernels)}"
        for verb, kernels in columns
    ]
    body = [
        [*map(str, key), *(_clocked_cell(of_key, *column) for column in columns)]
        for key, of_key in found.items()
    ]
    return table(["machine", "ranks", "dispatch, combine", "tokens", *heads], body)


def _clocked_cell(of_key: Mapping[tuple[str, str], Row], verb: str, kernels: str) -> str:
    """Render one time of ours, or its part of the other kernels' time; in brackets the low ones."""
    mine, other = of_key.get((verb, OURS)), of_key.get((verb, kernels))
    if mine is None or other is None:
        return ""
    shown = [
        us(mine[field]) if kernels == OURS else f"{mine[field] / other[field]:.2f}"
        for field in ("us", "low_us")
        if mine[field] and other[field]
    ]
    return shown[0] + "".join(f" ({low})" for low in shown[1:])


# --- kind "deaths": bench_deaths.py ---------------------------------------------------------------


def deaths(result: Result) -> str:
    """Render how soon the others are right again after a death, and what a return takes."""
    frame = pd.DataFrame(result.data["rows"])
    body = [
        [f"{what}: {name}, {unit}", f"{take(frame[column]):.{digits}f}"]
        for what, column, unit, digits in (
            ("from a kill to the next right round of every other rank", "back_s", "s", 2),
            ("`renew`, in which a process takes the dead one's place", "renewal_ms", "ms", 0),
        )
        for name, take in (("median", pd.Series.median), ("most", pd.Series.max))
    ]
    rounds = result.data["rounds"]
    counts = [
        ["ranks killed and replaced", str(len(frame))],
        ["rounds of a rank, every bit right", f"{rounds:,}"],
        ["rounds lost: those that the killed ranks were in", f"at most {len(frame)}"],
        ["left in /dev/shm", "nothing"],
    ]
    text = (
        "{ep_size} CPU ranks, up to {tokens} tokens of {hidden_size}, timeout {timeout_s:g} s, "
        "for {measured_s:.0f} s"
    )
    method = text.format(**result.options, measured_s=result.data["measured_s"])
    return shown(result, method, table(("what", "found"), counts + body))


# --- kind "sync": bench_sync.py -------------------------------------------------------------------


def sync(result: Result) -> str:
    """Render each verb with and without flags and waits: published, on the clock, on CPU ranks."""
    found: dict[tuple[int, str], dict[tuple[str, bool], float]] = {}
    for row in result.data["rows"]:
        times = found.setdefault((row["tokens"], row["verb"]), {})
        times[row["where"], row["has_sync"]] = row["us"]
    places = list(dict.fromkeys(row["where"] for row in result.data["rows"]))
    names = {
        "published": "reference, GB200, published",
        "clock, flashinfer": "FlashInfer, GB200, modelled",
        "clock, moe_nvlink": "**moe_nvlink**, GB200, modelled",
        "CPU ranks": f"**moe_nvlink**, {result.data['cpu_ranks']} CPU ranks, measured",
    }
    heads = ["tokens per rank", "verb", *(f"{names[where]}: with / without us" for where in places)]
    body = [
        [str(tokens), verb, *(_with_and_without(times, where) for where in places)]
        for (tokens, verb), times in sorted(
            found.items(), key=lambda one: (PHASES.index(one[0][1]), one[0][0])
        )
    ]
    shows = "results without flags and waits are wrong; no GPU was there"
    return shown(result, shows, table(heads, body))


def _with_and_without(times: Mapping[tuple[str, bool], float], where: str) -> str:
    pair = (times.get((where, True)), times.get((where, False)))
    return " / ".join("" if one is None else us(one) for one in pair)
