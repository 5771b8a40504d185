"""Make result rows of samples, and print them."""

from __future__ import annotations

import dataclasses
import os
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks import common
from benchmarks.columns import print_row

from .accounting import Traffic
from .options import OURS, Options

#: Phase -> float64 [iterations, ranks] microseconds. Emulated ranks are one column.
Samples = dict[str, torch.Tensor]
Row = dict[str, Any]

#: "both" is measured: dispatch and combine one after the other, in iterations of their own.
PHASES = ("dispatch", "combine", "both")
SCHEMA = 1

#: Where a row keeps its samples until add_ratios takes them out.
_SAMPLES = "_slowest_us"
_OF_OPTIONS = ("ep_size", "hidden_size", "top_k", "num_experts", "recipe", "router")

#: Of --iter_stats.
_STATS: dict[str, Callable[[list[float]], float]] = {
    "mean": statistics.fmean,
    "median": statistics.median,
    "stdev": statistics.stdev,
    "min": min,
    "max": max,
}

#: A line for each phase of a row.
COLUMNS = {
    "tokens/rank": "{tokens}",
    "backend": "{backend}",
    "phase": "{phase}",
    "median us": "{median_us:.1f}",
    "quartiles": "{q25_us:.1f}..{q75_us:.1f}",
    "p95 us": "{p95_us:.1f}",
    "ranks' medians us": "{min_rank_us:.1f}..{max_rank_us:.1f}",
    "logical GB/s": "{logical_gb_s:.3f}",
    "wire GB/s": "{wire_gb_s:.3f}",
    "of copy": "{of_ceiling:.0%}",
    "x ours (quartiles)": "{ratio[median]:.1f} ({ratio[q25]:.1f}..{ratio[q75]:.1f})",
}


def make_row(
    options: Options,
    backend: str,
    tokens: int,
    samples: Samples,
    traffic: Traffic,
    ceilings: Samples,
    extra: Row,
) -> Row:
    """Return the row of one backend at one batch. Call add_ratios on all rows of the batch.

    Args:
        ceilings: samples of a plain copy of the put rows; empty if it was not measured.
        extra: more fields. "given", what this backend is spared, must be one of them.
    """
    assert extra.get("given"), f"{backend} does not say what it is given"
    row: Row = {"backend": backend, "tokens": tokens}
    row |= {name: getattr(options, name) for name in _OF_OPTIONS}
    row |= {"combine_format": options.combine, "checked": True}  # "combine" is the phase
    for phase in PHASES:
        row[phase] = _phase(samples[phase], traffic, phase, ceilings.get(phase))
        if options.iter_stats:
            row[phase]["per_rank"] = {
                f"rank{rank}": {name: of(times) for name, of in _STATS.items()}
                for rank, times in enumerate(samples[phase].T.tolist())
            }
    if options.iter_stats:
        row["samples"] = {phase: samples[phase].round(decimals=3).tolist() for phase in PHASES}
    row[_SAMPLES] = {phase: slowest(samples[phase]) for phase in PHASES}
    return row | extra


def slowest(samples: torch.Tensor) -> list[float]:
    """Return for each iteration the microseconds until the last rank was done."""
    found: list[float] = samples.amax(dim=1).tolist()
    return found


def _phase(samples: torch.Tensor, traffic: Traffic, phase: str, ceiling: Any) -> dict[str, float]:
    found = common.summary(slowest(samples))
    del found["min_us"]  # of single iterations it says nothing that lasts
    medians, median_us = samples.quantile(0.5, dim=0), found["median_us"]
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


def add_ratios(rows: Sequence[Row]) -> None:
    """Give every peer's row `ratio_to_ours`: its time over ours at the same batch, phase by phase.

    The median is the ratio of the medians. The quartiles are of the ratios within single
    iterations, in which the backends took turns. A peer is compared only with a row of ours that
    was launched in the same way (field "launch" of emulated ranks).
    """
    samples = [(row, row.pop(_SAMPLES)) for row in rows]
    ours = {
        (row["tokens"], row.get("launch")): times
        for row, times in samples
        if row["backend"] == OURS
    }
    for row, theirs in samples:
        beside = ours.get((row["tokens"], row.get("launch")))
        if beside is not None and row["backend"] != OURS:
            row["ratio_to_ours"] = {phase: _ratio(theirs[phase], beside[phase]) for phase in PHASES}


def _ratio(theirs: list[float], ours: list[float]) -> dict[str, float]:
    ratios = [one / other for one, other in zip(theirs, ours, strict=True)]
    low, _middle, high = statistics.quantiles(ratios, n=4)
    median = statistics.median(theirs) / statistics.median(ours)
    return {"median": median, "q25": low, "q75": high}


# The result.


def head(options: Options, *, ceiling: str = "", machine: Row | None = None) -> Row:
    """Return a result before anything is measured: what a reader needs to believe or repeat it.

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
        not_measured: what was left out and why, and what the run cannot show. It may grow, too.
    """

    record: common.Record
    not_measured: list[str]
    rows: list[Row] = dataclasses.field(default_factory=list)

    def __call__(self, made: Sequence[Row]) -> None:
        self.rows += made
        self._write(complete=False)

    def finish(self, rows: Sequence[Row]) -> Row:
        """Write and return the whole result, of all batches' rows."""
        self.rows = list(rows)
        return self._write(complete=True)

    def _write(self, *, complete: bool) -> Row:
        measured = {"not_measured": self.not_measured, "rows": self.rows}
        return self.record.write(measured, complete=complete)


# What is printed while a run goes on, and after it.


def show(rows: Sequence[Row]) -> None:
    """Print a line for each phase of each row."""
    for row in rows:
        for phase in PHASES:
            ratio = {"ratio": row["ratio_to_ours"][phase]} if "ratio_to_ours" in row else {}
            print_row(COLUMNS, row | row[phase] | ratio | {"phase": phase})


def footnotes(rows: Sequence[Row]) -> list[str]:
    """Say once what each backend was given; then what kernels took, and each rank's statistics."""
    given = {row["backend"]: row["given"] for row in rows}
    notes = [f"{backend} is given: {what}" for backend, what in given.items()]
    for row in rows:
        what = f"{row['backend']}, {row['tokens']} tokens"
        if "not_profiled" in row:
            notes.append(f"{what}: no kernels: {row['not_profiled']}")
        for phase in PHASES:
            kernels = row.get("kernels", {}).get(phase, {})
            if kernels:
                told = ", ".join(f"{name} {_told(part)}" for name, part in kernels.items())
                notes.append(f"{what}, {phase}: {told}")
            for rank, stats in row[phase].get("per_rank", {}).items():
                notes.append(f"{what}, {phase}, {rank}: {_told(stats)}")
    return notes


def _told(part: Any) -> str:
    if isinstance(part, dict):
        return ", ".join(f"{name} {value:.1f}" for name, value in part.items())
    return f"{part:.1f}"
