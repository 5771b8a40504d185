"""Times of dispatch and combine by the clock of the software GPU: **modelled**, none measured.

    python benchmarks/ptx_clock.py                               ours and FlashInfer's, EP8, EP64
    python benchmarks/ptx_clock.py --tokens 1 --ep 8 --verb dispatch --path   what takes the time
    python benchmarks/ptx_clock.py --calibrate        published times of GB200 beside the clock's
    python benchmarks/ptx_clock.py --fit              the three numbers of the table that are fitted

The PTX of both is executed (tests/support/ptx) with the same routing, on the same table of costs
(tests/support/ptx/costs.py), one rank for all of them (benchmarks/moe_comm/clocked.py). Of the
table three numbers are fitted to published times of GB200, and those times hold what the published
benchmark adds: so rows of up to 64 tokens, where these three decide, have a second figure, `low`,
by what a reader of the SASS expects of the three, and rows of fewer SMs have it for any number.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scipy.optimize import least_squares

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common
from benchmarks.moe_comm import clocked, gb200, peer_launches
from benchmarks.moe_comm.terms import FORMATS, VERBS, Work
from benchmarks.reporting import tables
from benchmarks.reporting.files import Result
from moe_nvlink_plugin.config import COMBINE_FORMATS, MAX_SMALL_TOKENS
from tests.support.ptx import costs
from tests.support.ptx.critical_path import round_trips, totals

SCHEMA = 1
LABEL = "modelled"
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
KERNELS: Mapping[str, type[clocked.Layer]] = {
    "moe_nvlink": clocked.Ours,
    "moe_nvlink_small": clocked.Small,
    "moe_nvlink_bulk": clocked.Bulk,
    "moe_nvlink_loads": clocked.Loads,
    "moe_nvlink_ordered": clocked.Ordered,
    "moe_nvlink_async_release": clocked.Signals,
    "flashinfer": clocked.Peer,
    "flashinfer_cake": clocked.Cake,
}
#: What "moe_nvlink" would do with either kind of kernels, on request, up to these tokens.
MOST_TOKENS = {
    "moe_nvlink_small": MAX_SMALL_TOKENS,
    "moe_nvlink_bulk": MAX_SMALL_TOKENS,
    "moe_nvlink_loads": 2**24,
    "moe_nvlink_ordered": 2**24,
    "moe_nvlink_async_release": 2**24,
}
#: Whose source is for one machine alone.
ONLY_ON = {"flashinfer_cake": "gb200", "moe_nvlink_async_release": "gb200"}
DEFAULTS = [name for name in KERNELS if name not in MOST_TOKENS]
#: SASS of the text that was published (TensorRT-LLM's, before its loop was split in two) keeps four
#: wide loads of combine in flight, where the text in FlashInfer's wheel keeps all eight.
PUBLISHED = {"thread_loads_in_flight": 4.0}
CALIBRATED_ON = (1, 4, 16)
#: With more, the fitted numbers hardly matter.
MOST_TOKENS_WITH_LOW = 64

Row = dict[str, Any]


def run(
    kernels: str, work: Work, machine: str, verbs: Sequence[str], changes: Mapping[str, float]
) -> dict[str, clocked.Clocked]:
    """Run verbs of one layer; a combine alone needs its dispatch, too.

    FlashInfer gives all of its launches programmatic dependent launch; ours is one for each verb.
    """
    with KERNELS[kernels](work, machine, changes, pdl=True) as layer:
        return {verb: layer.run(verb) for verb in VERBS if "combine" in verbs or verb in verbs}


def rows_of(
    kernels: str, work: Work, machine: str, verbs: Sequence[str], num_sms: int | None = None
) -> list[Row]:
    """Return a row for each verb, of a machine with so many SMs; None: all of its own."""
    changes: dict[str, float] = {} if num_sms is None else {"num_sms": num_sms}
    fitted = run(kernels, work, machine, verbs, changes)
    if kernels.startswith("flashinfer") and work.combine != "bf16":
        verbs = [verb for verb in verbs if verb == "dispatch"]  # its combine is run for bf16 alone
    low: dict[str, clocked.Clocked] = {}
    if work.tokens <= MOST_TOKENS_WITH_LOW or num_sms is not None:
        low = run(kernels, work, machine, verbs, {**costs.expected(machine), **changes})
    return [
        {
            "label": LABEL,
            "kernels": kernels,
            "machine": machine if num_sms is None else f"{machine}, {num_sms} SMs",
            "ep_size": work.ep_size,
            "recipe": work.recipe,
            "combine": work.combine,
            "tokens": work.tokens,
            "verb": verb,
            "us": fitted[verb].us,
            "low_us": low[verb].us if low else None,
            "ends_us": fitted[verb].ends_us,
            "round_trips": round_trips(fitted[verb].path),
            "ns_by_kind": totals(fitted[verb].path),
            "path": [str(step) for step in fitted[verb].path],
        }
        for verb in verbs
    ]


def calibration(batches: Sequence[int], changes: Mapping[str, float]) -> list[Row]:
    """Return the published times of 8 ranks beside the clock's, with and without flags."""
    published = {
        (one.verb, one.has_sync, one.tokens): one.us
        for one in gb200.published("tables", "without sync")
        if one.ep_size == 8
    }
    rows = []
    for tokens, has_sync in itertools.product(batches, (True, False)):
        of = clocked.Peer if has_sync else clocked.PeerWithoutSync
        with of(Work(8, tokens), "gb200", {**PUBLISHED, **changes}) as layer:
            for verb in VERBS:
                us, said = layer.run(verb).us, published[verb, has_sync, tokens]
                row = {"verb": verb, "has_sync": has_sync, "tokens": tokens, "published_us": said}
                row |= {"modelled_us": us, "error": us / said - 1}
                rows.append(row | {"is_fitted": tokens in CALIBRATED_ON})
    return rows


def fit() -> dict[str, float]:
    """Fit the table's three numbers, in relative terms, from where one would expect them."""
    scale = [costs.EXPECTED[name] for name in costs.FITTED]

    def residuals(values: Sequence[float]) -> list[float]:
        changes = dict(zip(costs.FITTED, map(float, values), strict=True))
        return [math.log1p(row["error"]) for row in calibration(CALIBRATED_ON, changes)]

    found = least_squares(residuals, scale, x_scale=scale, diff_step=0.02, xtol=1e-3)
    return dict(zip(costs.FITTED, map(float, found.x), strict=True))


def errors(rows: Sequence[Row]) -> list[Row]:
    """Return median and worst error of each verb, with and without flags."""
    found = []
    for verb, has_sync in itertools.product(VERBS, (True, False)):
        sizes = [
            abs(row["error"]) for row in rows if (row["verb"], row["has_sync"]) == (verb, has_sync)
        ]
        told = {"verb": verb, "has_sync": has_sync, "figures": len(sizes)}
        found.append(told | {"median": statistics.median(sizes), "worst": max(sizes)})
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--ep", type=int, nargs="+", default=[8, 64], help="number of ranks")
    parser.add_argument("--machine", nargs="+", choices=costs.MACHINES, default=["gb200"])
    parser.add_argument("--recipe", nargs="+", choices=FORMATS, default=["bf16"], help="dispatch's")
    formats = list(COMBINE_FORMATS)
    parser.add_argument("--combine", nargs="+", choices=formats, default=["bf16"], help="combine's")
    parser.add_argument("--sms", nargs="+", type=int, default=[None], help="instead of all")
    parser.add_argument("--verb", nargs="+", choices=VERBS, default=list(VERBS))
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=DEFAULTS)
    parser.add_argument("--path", action="store_true", help="print the critical paths")
    parser.add_argument("--calibrate", action="store_true", help="beside the published times")
    parser.add_argument("--output_file", type=Path, help="JSON of all of it")
    parser.add_argument("--fit", action="store_true", help="print the fitted numbers, and end")
    given = parser.parse_args(arguments)
    if given.fit:
        print(fit())
        return
    made: Row = {"schema": SCHEMA, "kind": "ptx_clock", "label": LABEL, "rows": []}
    made |= {"shows": "modelled by executing PTX; no GPU was there, nothing is measured"}
    made |= {"machine": common.describe_run(), "costs": [row._asdict() for row in costs.TABLE]}
    if given.calibrate:
        made["calibration"] = calibration(TOKENS, {})
        made["errors"] = errors(made["calibration"])
    cases = itertools.product(
        given.machine,
        given.sms,
        given.ep,
        given.recipe,
        given.combine,
        given.tokens,
        given.kernels,
    )
    for machine, num_sms, ep_size, recipe, combine, tokens, kernels in cases:
        if ONLY_ON.get(kernels, machine) != machine or tokens > MOST_TOKENS.get(kernels, tokens):
            continue
        if kernels.startswith("flashinfer") and ep_size > peer_launches.MOST_RANKS:
            continue
        began = time.monotonic()
        work = Work(ep_size, tokens, recipe, combine)
        # Every rank has as many, which FlashInfer asks for: 288 experts on 72 ranks.
        work = work._replace(num_experts=-(-work.num_experts // ep_size) * ep_size)
        made["rows"] += rows_of(kernels, work, machine, given.verb, num_sms)
        took = time.monotonic() - began
        print(f"{kernels} {machine} EP{ep_size} {recipe} {tokens}: {took:.0f} s", file=sys.stderr)
        if given.path:
            for row in made["rows"][-len(given.verb) :]:
                print(f"\n{row['verb']}, {LABEL}: {row['us']:.2f} us", *row["path"], sep="\n  ")
        if given.output_file is not None:
            common.write_json(given.output_file, made)
    print("\n" + tables.ptx_clock(Result(given.output_file or Path("ptx_clock"), made)))


if __name__ == "__main__":
    main()
