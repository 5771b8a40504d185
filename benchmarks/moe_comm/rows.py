"""From samples to the rows of a result, and the result itself."""

from __future__ import annotations

import dataclasses
import os
import statistics
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks import common

from .accounting import Traffic
from .options import OURS, Options

#: Phase -> float64 [iterations, ranks] microseconds; emulated ranks are one column.
Samples = dict[str, torch.Tensor]

#: "both" is measured: dispatch and combine one after the other, in iterations of their own.
PHASES = ("dispatch", "combine", "both")

SCHEMA = 1

#: Where samples stay until the ratios are made, which need those of two backends; never written.
_SAMPLES = "_slowest_us"


def make_row(
    options: Options,
    backend: str,
    tokens: int,
    samples: Samples,
    traffic: Traffic,
    ceilings: Samples,
    extra: dict[str, Any],
) -> dict[str, Any]:
    """One backend at one batch. Call add_ratios on the rows of a batch.

    Args:
        samples: of PHASES.
        ceilings: the same phases of a plain copy of the put rows; empty: not measured.
        extra: more fields: "given", what this backend is spared, must be one of them.
    """
    assert extra.get("given"), f"{backend} does not say what it is given"
    row: dict[str, Any] = {
        "backend": backend,
        "tokens": tokens,
        **{name: getattr(options, name) for name in _OF_OPTIONS},
        "combine_format": options.combine,  # "combine" is the phase
        "checked": True,
    }
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


_OF_OPTIONS = (
    "ep_size",
    "hidden_size",
    "top_k",
    "num_experts",
    "recipe",
    "router",
)


def slowest(samples: torch.Tensor) -> list[float]:
    """Per iteration, microseconds until the last rank was done."""
    found: list[float] = samples.amax(dim=1).tolist()
    return found


def _phase(
    samples: torch.Tensor, traffic: Traffic, phase: str, ceiling: torch.Tensor | None
) -> dict[str, float]:
    times = common.summary(slowest(samples))
    medians = samples.quantile(0.5, dim=0)
    median_us = times["median_us"]
    found = {name: times[name] for name in ("median_us", "p95_us", "q25_us", "q75_us")}
    found["min_rank_us"] = float(medians.min())
    found["max_rank_us"] = float(medians.max())
    found["logical_gb_s"] = traffic.logical_bytes(phase) / median_us / 1e3
    found["wire_gb_s"] = traffic.mean_wire_bytes(phase) / median_us / 1e3
    found["copied_gb_s"] = traffic.mean_put_bytes(phase) / median_us / 1e3
    if ceiling is not None:
        ceiling_us = statistics.median(slowest(ceiling))
        found["ceiling_us"] = ceiling_us
        found["ceiling_gb_s"] = traffic.mean_put_bytes(phase) / ceiling_us / 1e3
        found["of_ceiling"] = ceiling_us / median_us
    return found


def _per_rank(samples: torch.Tensor) -> dict[str, dict[str, float]]:
    return {
        f"rank{rank}": {
            "mean": statistics.fmean(times),
            "median": statistics.median(times),
            "stdev": statistics.stdev(times),
            "min": min(times),
            "max": max(times),
        }
        for rank, times in enumerate(samples.T.tolist())
    }


def add_ratios(rows: Sequence[dict[str, Any]]) -> None:
    """ratio_to_ours of every peer: its time over ours at the same batch, larger is better for us.

    The median is that of the medians' ratio; the quartiles are of the ratios within single
    iterations, in which the backends took turns. Where a peer and ours were not launched in the
    same way (field "launch", of emulated ranks) there is none: `not_comparable` says so instead.
    """
    all_ours = {row["tokens"]: row for row in rows if row["backend"] == OURS}
    for row in rows:
        if row["backend"] == OURS or row["tokens"] not in all_ours:
            continue
        ours = all_ours[row["tokens"]]
        if row.get("launch") != ours.get("launch"):
            row["not_comparable"] = f"{row.get('launch')}; ours: {ours.get('launch')}"
            continue
        row["ratio_to_ours"] = {
            phase: _ratio(row[_SAMPLES][phase], ours[_SAMPLES][phase]) for phase in PHASES
        }


def _ratio(theirs: list[float], ours: list[float]) -> dict[str, float]:
    low, _middle, high = statistics.quantiles(
        [one / other for one, other in zip(theirs, ours, strict=True)], n=4
    )
    median = statistics.median(theirs) / statistics.median(ours)
    return {"median": median, "q25": low, "q75": high}


def head(
    options: Options, *, ceiling: str = "", machine: dict[str, Any] | None = None
) -> dict[str, Any]:
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
    rows: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def __call__(self, made: Sequence[dict[str, Any]]) -> None:
        self.rows += made
        self._write(complete=False)

    def finish(self, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The whole result, of all batches' rows."""
        self.rows = list(rows)
        return self._write(complete=True)

    def _write(self, *, complete: bool) -> dict[str, Any]:
        bare = [{name: row[name] for name in row if name != _SAMPLES} for row in self.rows]
        measured = {"not_measured": self.not_measured, "rows": bare}
        return self.record.write(measured, complete=complete)
