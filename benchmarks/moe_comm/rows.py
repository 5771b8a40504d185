"""From samples to the rows of a result, the result itself, and what is printed of it."""

from __future__ import annotations

import dataclasses
import os
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks import common

from .accounting import Traffic
from .options import OURS, Options

#: Phase -> float64 [iterations, ranks] microseconds; emulated ranks are one column.
Samples = dict[str, torch.Tensor]
Row = dict[str, Any]

#: "both" is measured: dispatch and combine one after the other, in iterations of their own.
PHASES = ("dispatch", "combine", "both")
SCHEMA = 1

#: Where samples stay until the ratios are made, which need those of two backends; never written.
_SAMPLES = "_slowest_us"
_OF_OPTIONS = ("ep_size", "hidden_size", "top_k", "num_experts", "recipe", "router")


def make_row(
    options: Options,
    backend: str,
    tokens: int,
    samples: Samples,
    traffic: Traffic,
    ceilings: Samples,
    extra: Row,
) -> Row:
    """One backend at one batch. Call add_ratios on the rows of a batch.

    Args:
        samples: of PHASES.
        ceilings: the same phases of a plain copy of the put rows; empty: not measured.
        extra: more fields: "given", what this backend is spared, must be one of them.
    """
    assert extra.get("given"), f"{backend} does not say what it is given"
    row: Row = {"backend": backend, "tokens": tokens}
    row |= {name: getattr(options, name) for name in _OF_OPTIONS}
    row |= {"combine_format": options.combine, "checked": True}  # "combine" is the phase
    for phase in PHASES:
        row[phase] = _phase(samples[phase], traffic, phase, ceilings.get(phase))
        if options.iter_stats:
            row[phase]["per_rank"] = _per_rank(samples[phase])
    if options.iter_stats:
        row["samples"] = {
            phase: [[round(value, 3) for value in one] for one in samples[phase].tolist()]
            for phase in PHASES
        }
    row[_SAMPLES] = {phase: slowest(samples[phase]) for phase in PHASES}
    return row | extra


def slowest(samples: torch.Tensor) -> list[float]:
    """Per iteration, microseconds until the last rank was done."""
    found: list[float] = samples.amax(dim=1).tolist()
    return found


def _phase(samples: torch.Tensor, traffic: Traffic, phase: str, ceiling: Any) -> dict[str, float]:
    times = common.summary(slowest(samples))
    medians, median_us = samples.quantile(0.5, dim=0), times["median_us"]
    found = {name: times[name] for name in ("median_us", "p95_us", "q25_us", "q75_us")}
    found |= {"min_rank_us": float(medians.min()), "max_rank_us": float(medians.max())}
    found["logical_gb_s"] = traffic.logical_bytes(phase) / median_us / 1e3
    found["wire_gb_s"] = traffic.mean_wire_bytes(phase) / median_us / 1e3
    found["copied_gb_s"] = traffic.mean_put_bytes(phase) / median_us / 1e3
    if ceiling is not None:
        ceiling_us = statistics.median(slowest(ceiling))
        found["ceiling_us"] = ceiling_us
        found["ceiling_gb_s"] = traffic.mean_put_bytes(phase) / ceiling_us / 1e3
        found["of_ceiling"] = ceiling_us / median_us
    return found


#: Of --iter_stats.
_STATS: dict[str, Callable[[list[float]], float]] = {
    "mean": statistics.fmean,
    "median": statistics.median,
    "stdev": statistics.stdev,
    "min": min,
    "max": max,
}


def _per_rank(samples: torch.Tensor) -> dict[str, dict[str, float]]:
    return {
        f"rank{rank}": {name: of(times) for name, of in _STATS.items()}
        for rank, times in enumerate(samples.T.tolist())
    }


def add_ratios(rows: Sequence[Row]) -> None:
    """ratio_to_ours of every peer: its time over ours at the same batch, larger is better for us.

    The median is that of the medians' ratio; the quartiles are of the ratios within single
    iterations, in which the backends took turns. Where a peer and ours were not launched in the
    same way (field "launch", of emulated ranks) there is none: `not_comparable` says so instead.
    """
    all_ours = {row["tokens"]: row for row in rows if row["backend"] == OURS}
    for row in rows:
        ours = all_ours.get(row["tokens"], row)
        if row["backend"] == OURS or ours is row:
            continue
        if row.get("launch") != ours.get("launch"):
            row["not_comparable"] = f"{row.get('launch')}; ours: {ours.get('launch')}"
            continue
        row["ratio_to_ours"] = {
            phase: _ratio(row[_SAMPLES][phase], ours[_SAMPLES][phase]) for phase in PHASES
        }


def _ratio(theirs: list[float], ours: list[float]) -> dict[str, float]:
    ratios = [one / other for one, other in zip(theirs, ours, strict=True)]
    low, _middle, high = statistics.quantiles(ratios, n=4)
    median = statistics.median(theirs) / statistics.median(ours)
    return {"median": median, "q25": low, "q75": high}


# The result.


def head(options: Options, *, ceiling: str = "", machine: Row | None = None) -> Row:
    """A result before anything is measured: whatever a reader needs to believe or repeat it.

    Args:
        ceiling: how it was measured, in words.
        machine: more of it, such as common.describe_gpu().
    """
    return {
        "schema": SCHEMA,
        "kind": "moe_comm",
        "machine": common.describe_run() | {"load_before": os.getloadavg()} | (machine or {}),
        "options": dataclasses.asdict(options),
        "ceiling": ceiling,
    }


@dataclasses.dataclass
class Growing:
    """A result that grows: call it with the rows of every batch, ratios included; then `finish`.

    Attributes:
        record: with `head`.
        not_measured: what was left out and why; what the run cannot show. It may grow, too.
    """

    record: common.Record
    not_measured: list[str]
    rows: list[Row] = dataclasses.field(default_factory=list)

    def __call__(self, made: Sequence[Row]) -> None:
        self.rows += made
        self._write(complete=False)

    def finish(self, rows: Sequence[Row]) -> Row:
        """The whole result, of all batches' rows."""
        self.rows = list(rows)
        return self._write(complete=True)

    def _write(self, *, complete: bool) -> Row:
        bare = [{name: row[name] for name in row if name != _SAMPLES} for row in self.rows]
        measured = {"not_measured": self.not_measured, "rows": bare}
        return self.record.write(measured, complete=complete)


# What is printed while a run goes on, and after it.

HEADER = """\
| tokens/rank | backend | phase | median us | quartiles | p95 us | ranks' medians us | \
logical GB/s | wire GB/s | of copy | x ours (quartiles) |
|---|---|---|---|---|---|---|---|---|---|---|"""


def lines(rows: Sequence[Row]) -> list[str]:
    """One for each phase of each row, and of what stands in it as `one_launch`."""
    found = []
    for row in rows:
        found += [_line(row, row["backend"], phase) for phase in PHASES]
        if "one_launch" in row:
            alone = row["one_launch"] | {"tokens": row["tokens"]}
            name = f"{row['backend']}, one launch"
            found += [_line(alone, name, phase) for phase in PHASES]
    return found


def _line(row: Row, name: str, phase: str) -> str:
    of = {field: number(value) for field, value in row[phase].items() if field != "per_rank"}
    ratio = row.get("ratio_to_ours", {}).get(phase)
    compared = "not comparable" if "not_comparable" in row else ""
    if ratio:
        compared = "{median:.1f} ({q25:.1f}..{q75:.1f})".format(**ratio)
    share = f"{row[phase]['of_ceiling']:.0%}" if "of_ceiling" in of else ""
    cells = "{median_us} | {q25_us}..{q75_us} | {p95_us} | {min_rank_us}..{max_rank_us} | "
    cells += "{logical_gb_s} | {wire_gb_s}"
    told = cells.format(**of)
    return f"| {row['tokens']} | {name} | {phase} | {told} | {share} | {compared} |"


def number(value: float) -> str:
    """Three figures, and all of those before the point."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def footnotes(rows: Sequence[Row]) -> list[str]:
    """What each backend was given, once; what forbids a ratio; what kernels took; ranks' times."""
    given = {row["backend"]: row["given"] for row in rows}
    notes = [f"{backend} is given: {what}" for backend, what in given.items()]
    for row in rows:
        what = f"{row['backend']}, {row['tokens']} tokens"
        if "not_comparable" in row:
            notes.append(f"{what}: no ratio, because it is launched as {row['not_comparable']}")
        if "not_profiled" in row:
            notes.append(f"{what}: no kernels: {row['not_profiled']}")
        for phase, parts in row.get("kernels", {}).items():
            told = ", ".join(f"{name} {_told(part)}" for name, part in parts.items())
            notes.append(f"{what}, {phase}: {told}")
        for phase in PHASES:
            for rank, stats in row[phase].get("per_rank", {}).items():
                notes.append(f"{what}, {phase}, {rank}: {_told(stats)}")
    return notes


def _told(part: Any) -> str:
    if isinstance(part, dict):
        return ", ".join(f"{name} {number(value)}" for name, value in part.items())
    return number(part)
