"""Measure how times grow with tokens, ranks, top_k and payload, one at a time; fit a curve to each.

    python benchmarks/growth.py --output_file growth.json            # ranks are processes on CPUs
    python benchmarks/growth.py --device cuda --output_file g.json   # ranks emulated on one GPU
    python benchmarks/growth.py --dimensions ranks top_k             # some of them

Times are bench_moe_comm's, by its code. Every point off its curve by more than its own spread is a
knee; all are printed and named in the file. benchmarks/README.md says what the curves are made of.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))

from benchmarks import common, growth_fit
from benchmarks.growth_fit import Point, Term
from benchmarks.moe_comm import accounting, processes
from benchmarks.moe_comm.options import OURS, OptionError, Options
from benchmarks.moe_comm.processes import RunError
from benchmarks.reporting import tables
from benchmarks.reporting.files import Result

Row = dict[str, Any]
#: Rows of bench_moe_comm of ours, one per batch of the options.
Measure = Callable[[Options], list[Row]]

PHASES = ("dispatch", "combine")
#: Tokens per rank where another dimension moves.
BASE_TOKENS = 64
#: Batches up to this have `iters` iterations; larger ones as many less, but no fewer than these.
FULL_ITERS_UP_TO, LEAST_ITERS = 512, 8


class Place(NamedTuple):
    """What the curves take from the machine. `ranks_share`: ranks wait for each other's cores."""

    cores: int
    cache_bytes: int  # the last level
    ranks_share: bool


@dataclasses.dataclass(frozen=True)
class Dimension:
    """What moves while all else stays.

    Attributes:
        field: of the options; its values are `values`.
        terms: base point and machine -> what takes time.
        where: what the names in the curve's formula mean.
        recipe: of the options, while this dimension moves.
    """

    field: str
    values: tuple[int, ...]
    x_label: str
    terms: Callable[[Options, Place], tuple[Term, ...]]
    where: str
    phases: tuple[str, ...] = PHASES
    recipe: str = "bf16"

    def at(self, base: Options, value: int) -> Options:
        changed: Any = {self.field: (value,) if self.field == "batches" else value}
        return dataclasses.replace(base, recipe=self.recipe, **changed)

    def x(self, options: Options, tokens: int) -> float:
        """Return where a point stands on the axis: of a payload, its bytes."""
        if self.field == "hidden_size":
            return row_bytes(options)
        return tokens if self.field == "batches" else getattr(options, self.field)


def expected_ranks(ranks: float, top_k: float, num_experts: int) -> float:
    """Return how many different ranks a token's experts have if drawn at random, none twice.

    1 less the chance that all come from the experts of the others, times the ranks; continuous in
    both, so that a curve has values between the points.
    """
    others = num_experts * (1 - 1 / ranks)
    if others <= top_k - 1:
        return ranks  # too few others for all of them
    missed = _log_choose(others, top_k) - _log_choose(num_experts, top_k)
    return ranks * (1 - math.exp(missed))


def _log_choose(n: float, k: float) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)


def row_bytes(options: Options) -> int:
    """Return the bytes of one token's activations and scales, as dispatch moves them."""
    return accounting.traffic(dataclasses.replace(options, ep_size=1), 1).dispatch_row_bytes


def fitting(base: Options, place: Place, bytes_per: float) -> float:
    """Return how many of something fit the last cache: all ranks' rows, read and put."""
    rows = 1 + expected_ranks(base.ep_size, base.top_k, base.num_experts)
    return place.cache_bytes / (base.ep_size * rows * bytes_per)


def _two_rates(name: str, end: float) -> tuple[Term, ...]:
    """Return a fixed cost, one rate up to the end of the cache, and another rate beyond."""
    short = f"{end:.4g}"
    return (
        Term("a", "", lambda _x: 1.0),
        Term("b", f"min({name}, {short})", lambda x: min(x, end)),
        Term("c", f"max(0, {name} - {short})", lambda x: max(0.0, x - end)),
    )


_FIXED = Term("a", "", lambda _x: 1.0)
Terms = tuple[Term, ...]


def tokens_terms(base: Options, place: Place) -> Terms:
    return _two_rates("n", fitting(base, place, row_bytes(base)))


def payload_terms(base: Options, place: Place) -> Terms:
    return _two_rates("B", fitting(base, place, base.batches[0]))


def quantised_payload_terms(_base: Options, _place: Place) -> Terms:
    """Return one rate for copying and quantising, which both grow with the row."""
    return _FIXED, Term("b", "B", lambda x: x)


def top_k_terms(base: Options, _place: Place) -> Terms:
    def rows(k: float) -> float:
        return base.batches[0] * expected_ranks(base.ep_size, k, base.num_experts)

    return _FIXED, Term("b", "rows", rows), Term("c", "k", lambda k: k)


def ranks_terms(base: Options, place: Place) -> Terms:
    """Return terms that wait for a core on CPUs; on one GPU all ranks' rows share the memory."""

    def share(ranks: float) -> float:
        return max(1.0, ranks / place.cores)

    def rows(ranks: float) -> float:
        return base.batches[0] * expected_ranks(ranks, base.top_k, base.num_experts)

    if not place.ranks_share:
        return _FIXED, Term("b", "N*rows", lambda n: n * rows(n)), Term("c", "N", lambda n: n)
    copied = Term("b", "s*rows", lambda n: share(n) * rows(n))
    return Term("a", "s", share), copied, Term("c", "s*N", lambda n: share(n) * n)


_ROWS = "rows: tokens x expected number of different ranks of a token's experts"
_CACHE = "the number is where the rows of all ranks fill the machine's last cache"
_HIDDEN = (512, 1024, 2048, 4096, 7168, 16384)
_BATCHES, _RANKS = tuple(2**n for n in range(14)), tuple(2**n for n in range(7))
_OF_N, _OF_B = f"n: tokens per rank; {_CACHE}", f"B: bytes of a row; {_CACHE}"
_OF_RANKS = f"N: ranks; s: ranks per core, at least 1; {_ROWS}"
_K, _OF_K = "experts per token (top_k)", f"k: top_k; {_ROWS}"
_OF_QUANTISED = "B: bytes of a row, activations and scales"
_QUANTISED = (quantised_payload_terms, _OF_QUANTISED, ("dispatch",))
DIMENSIONS = {
    "tokens": Dimension("batches", _BATCHES, "tokens per rank", tokens_terms, _OF_N),
    "ranks": Dimension("ep_size", _RANKS, "ranks", ranks_terms, _OF_RANKS),
    "top_k": Dimension("top_k", _RANKS[:6], _K, top_k_terms, _OF_K),
    "payload": Dimension("hidden_size", _HIDDEN, "bytes of a row, bf16", payload_terms, _OF_B),
} | {
    f"payload_{recipe}": Dimension(
        "hidden_size", _HIDDEN[1:5], f"bytes of a row, {recipe}", *_QUANTISED, recipe
    )
    for recipe in ("mxfp8", "nvfp4")
}


# --- measuring


def measure_on(device: str) -> Measure:
    """bench_moe_comm's own way of timing ours on that device."""
    if device == "cpu":
        return processes.run
    from benchmarks.moe_comm import emulated

    return emulated.run


class Sweep(NamedTuple):
    """The points of one dimension, by phase; what was not measured, with reasons; what failed."""

    points: dict[str, list[Point]]
    left_out: list[str]
    failed: str


def runs(base: Options, name: str) -> Iterator[Options]:
    """Yield what is run for a dimension, from cheap to dear. Small batches are one run together."""
    dimension, iters = DIMENSIONS[name], base.iters
    if name == "tokens":
        small = tuple(tokens for tokens in dimension.values if tokens <= FULL_ITERS_UP_TO)
        large = [(tokens,) for tokens in dimension.values if tokens not in small]
        for batches in (small, *large):
            yield dataclasses.replace(
                base, batches=batches, iters=_fewer(iters, max(batches) / FULL_ITERS_UP_TO)
            )
        return
    for value in dimension.values:
        options = dimension.at(base, value)
        yield dataclasses.replace(options, iters=_fewer(iters, options.ep_size / base.ep_size))


def _fewer(iters: int, times: float) -> int:
    """Return fewer iterations for a dear point, as far as its quartiles bear it."""
    return min(iters, max(LEAST_ITERS, int(iters / times)))


def sweep(base: Options, name: str, measure: Measure, passes: int) -> Sweep:
    """Measure a dimension in passes up and down its values.

    What else the machine does between two passes is so in the spread of every point. A run that
    ends without a result ends the sweep; a run whose options cannot be is left out. What was
    measured stays.
    """
    dimension, planned, failed = DIMENSIONS[name], list(runs(base, name)), ""
    left_out: dict[str, str] = {}
    done: set[str] = set()
    taken: list[Row] = []
    for number in range(passes):
        for options in planned[::-1] if number % 2 else planned:
            what = f"{name} {getattr(options, dimension.field)}"
            start = time.monotonic()
            if failed:
                left_out[what] = failed
                continue
            try:
                rows = measure(options)
            except (RunError, OptionError) as error:
                # Options that cannot be, by the memory they take, are this point's alone.
                failed = str(error) if isinstance(error, RunError) else ""
                left_out[what] = str(error)
                continue
            if rows:
                done.add(what)
            else:
                left_out[what] = "more than the GPU's memory"
            for row in rows:
                x = dimension.x(options, row["tokens"])
                taken += [{"phase": phase, "x": x, **row[phase]} for phase in dimension.phases]
            print(f"{what}: {time.monotonic() - start:.1f} s", flush=True)
    points = {phase: _together(taken, phase) for phase in dimension.phases}
    missing = [f"{what}: {why}" for what, why in left_out.items() if what not in done]
    return Sweep(points, missing, failed)


def _together(taken: Sequence[Row], phase: str) -> list[Point]:
    """Make one point of several passes: the median of medians, and the widest quartiles."""
    if not taken:
        return []
    rows = pd.DataFrame(taken)
    by = {"median_us": "median", "q25_us": "min", "q75_us": "max"}
    found = rows[rows.phase == phase].groupby("x").agg(by)
    return [Point(*(float(value) for value in row)) for row in found.itertuples()]


# --- curves


def series_of(
    base: Options, place: Place, name: str, phase: str, points: Sequence[Point]
) -> dict[str, Any]:
    """Return one curve as the result has it.

    Raises:
        ValueError: too few points for the curve.
    """
    dimension = DIMENSIONS[name]
    found = growth_fit.fit(points, dimension.terms(base, place))
    series: Row = {"name": f"{name}: {phase}", "dimension": name, "phase": phase}
    series |= {"x_label": dimension.x_label}
    series |= found.described(f"{base.device}-{name}-{phase}")
    series["fit"]["where"] = dimension.where
    series["options"] = dataclasses.asdict(base)
    if name == "ranks" and place.ranks_share:
        # What one rank's work takes while it has a core: all ranks' turns together are the time.
        series["core_us"] = [[p.x, p.us * min(place.cores, p.x) / p.x] for p in points]
    return series


def place_of(device: str) -> Place:
    """Return cores and last cache of this machine, or of its GPU."""
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        return Place(properties.multi_processor_count, properties.L2_cache_size, ranks_share=False)
    return Place(len(os.sched_getaffinity(0)), last_cache_bytes(), ranks_share=True)


def last_cache_bytes(folder: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """Return the bytes of the largest cache that Linux names for a core of this machine.

    Raises:
        OptionError: it gives none.
    """
    units = {"K": 2**10, "M": 2**20, "G": 2**30}
    texts = [path.read_text().strip() for path in folder.glob("index*/size")]
    sizes = [int(text[:-1]) * units[text[-1]] for text in texts if text[-1:] in units]
    if not sizes:
        raise OptionError(
            f"{folder} names no cache, and the curves need the size of the last; measure on a "
            "machine whose kernel shows it"
        )
    return max(sizes)


def base_point(arguments: argparse.Namespace, name: str) -> Options:
    """Return where the dimensions that do not move stay.

    Raises:
        OptionError: out of the limits of bench_moe_comm.
    """
    on_cpu = arguments.device == "cpu"
    # The memory of 64 ranks is this machine's, too.
    tokens = BASE_TOKENS // 4 if name == "ranks" and on_cpu else BASE_TOKENS
    return Options(
        backends=(OURS,),
        ep_size=4 if on_cpu else 8,
        batches=(tokens,),
        hidden_size=arguments.hidden_size,
        iters=arguments.iters,
        warmup=arguments.warmup,
        device=arguments.device,
        emulate_ranks=not on_cpu,
        cuda_graph=arguments.device == "cuda",
    )


SHOWS = {
    "cpu": "CPU ranks are processes: where they outnumber the cores they take turns, and the time "
    "is that of all turns",
    "cuda": "Ranks emulated on one GPU share its SMs and memory; nothing of NVLink is in it",
    "rehearsal": "Rehearsal on CPU threads: times mean nothing",
}


def measured(arguments: argparse.Namespace, measure: Measure) -> dict[str, Any]:
    """Measure the dimensions asked for, one after the other, and write each when it is done.

    Raises:
        OptionError: the machine does not say how large its last cache is.
    """
    place, made, left_out = place_of(arguments.device), list[Row](), list[str]()
    gpu = common.describe_gpu() if arguments.device == "cuda" else {}
    head = {
        "schema": 1,
        "kind": "growth",
        "device": arguments.device,
        "machine": common.describe_run() | gpu,
        "place": place._asdict(),
        "shows": SHOWS[arguments.device],
    }
    record = common.Record(arguments.output_file, head)
    for name in arguments.dimensions:
        base = base_point(arguments, name)
        found = sweep(base, name, measure, arguments.passes)
        left_out += found.left_out
        for phase, points in found.points.items():
            try:
                made.append(series_of(base, place, name, phase, points))
            except ValueError as error:
                left_out.append(f"curve of {name}, {phase}: {error}")
        record.write({"not_measured": left_out, "series": made})
        if found.failed:
            break
    return record.write({"not_measured": left_out, "series": made}, complete=True)


# --- the command line


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    add, names = parser.add_argument, list(DIMENSIONS)
    add("--device", default="cpu", choices=list(SHOWS))
    add("--dimensions", nargs="+", default=names, choices=names, metavar="NAME")
    add("--hidden_size", type=int, default=7168, help="where the payload does not move")
    add("--iters", type=int, default=30, help="fewer for large batches")
    add("--warmup", type=int, default=3)
    add("--passes", type=int, default=2, help="over all values; a point's spread is over them")
    add("--output_file", type=Path, help="JSON, written after every dimension")
    made = parser.parse_args(arguments)
    if made.passes < 1:
        parser.error(f"--passes {made.passes} must be at least 1; raise it")
    if made.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU; use --device cpu")
    try:
        base_point(made, "tokens")
    except OptionError as error:
        parser.error(str(error))
    return made


def main(arguments: Sequence[str] | None = None, measure: Measure | None = None) -> None:
    asked = parse(arguments)
    try:
        result = measured(asked, measure or measure_on(asked.device))
    except OptionError as error:
        sys.exit(str(error))
    print(tables.growth(Result(asked.output_file or Path("growth"), result)))
    for knee in (knee for series in result["series"] for knee in series["knees"]):
        print(
            f"KNEE {knee['id']}: {knee['us']:.0f} us, the curve says {knee['fit_us']:.0f} "
            f"({knee['off']:+.0%}); explain `{knee['id']}` in benchmarks/NOTES.md"
        )


if __name__ == "__main__":
    main()
