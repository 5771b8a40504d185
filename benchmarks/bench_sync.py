"""What flags, waits and fences cost: dispatch and combine with and without them.

    python benchmarks/bench_sync.py --output_file benchmarks/results/DATE-sync.json
    python benchmarks/bench_sync.py --only cpu --tokens 1 64

Beside the published ablation of the reference on GB200: its kernels and ours on the clock of the
software GPU, **modelled**, and ours on CPU ranks, measured. Without synchronisation every result
is wrong, so none is checked; nothing but this benchmark can leave it out (moe_comm/no_sync.py).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common
from benchmarks.moe_comm import clocked, clocked_no_sync, gb200, no_sync, options, processes
from benchmarks.moe_comm.terms import VERBS, Work
from benchmarks.reporting import tables
from benchmarks.reporting.files import Result

SCHEMA = 1
TOKENS = (1, 4, 16, 64, 128)
#: As in the published table.
EP_SIZE, MACHINE = 8, "gb200"
CLOCKED: dict[str, tuple[type[clocked.Layer], type[clocked.Layer]]] = {
    "flashinfer": (clocked.Peer, clocked.PeerWithoutSync),
    "moe_nvlink": (clocked.Ours, clocked_no_sync.ClockedWithoutSync),
}

Row = dict[str, Any]


def published(batches: Sequence[int]) -> Iterator[Row]:
    """Yield the reference's times on GB200."""
    for one in gb200.published("tables", "without sync"):
        if one.ep_size == EP_SIZE and one.tokens in batches:
            yield _row("published", one.tokens, one.verb, one.has_sync, one.us)


def modelled(batches: Sequence[int]) -> Iterator[Row]:
    """Yield times of FlashInfer's kernels and ours on the clock."""
    for tokens in batches:
        for name, layers in CLOCKED.items():
            for has_sync, of in zip((True, False), layers, strict=True):
                with of(Work(EP_SIZE, tokens), MACHINE, pdl=True) as layer:
                    for verb in VERBS:
                        yield _row(f"clock, {name}", tokens, verb, has_sync, layer.run(verb).us)


def measured(batches: Sequence[int], ep_size: int, iters: int, hidden_size: int) -> Iterator[Row]:
    """Yield medians on CPU ranks; both kinds take turns in the same processes.

    Raises:
        RunError: a rank failed.
    """
    names = ("moe_nvlink", no_sync.OursWithoutSync.name)
    asked = options.Options(
        backends=names,
        profile=options.CUSTOM,
        ep_size=ep_size,
        batches=tuple(batches),
        iters=iters,
        hidden_size=hidden_size,
        router="perfect",
    )
    for row in processes.run(asked):
        for verb in VERBS:
            has_sync = row["backend"] == names[0]
            yield _row("CPU ranks", row["tokens"], verb, has_sync, row[verb]["median_us"])


def _row(where: str, tokens: int, verb: str, has_sync: bool, us: float) -> Row:
    return {"where": where, "tokens": tokens, "verb": verb, "has_sync": has_sync, "us": us}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--ep_size", type=int, default=2, help="CPU ranks")
    parser.add_argument("--iters", type=int, default=100, help="of CPU ranks")
    parser.add_argument("--hidden_size", type=int, default=gb200.HIDDEN_SIZE, help="of CPU ranks")
    parser.add_argument("--only", choices=("cpu", "clock"), help="leave the other out")
    parser.add_argument("--output_file", type=Path)
    given = parser.parse_args(arguments)
    made: Row = {"schema": SCHEMA, "kind": "sync", "machine": common.describe_run()}
    made |= {"cpu_ranks": given.ep_size, "rows": list(published(given.tokens))}
    if given.only != "clock":
        made["rows"] += measured(given.tokens, given.ep_size, given.iters, given.hidden_size)
    if given.only != "cpu":
        made["rows"] += modelled(given.tokens)
    if given.output_file is not None:
        common.write_json(given.output_file, made)
    print("\n" + tables.sync(Result(given.output_file or Path("sync"), made)))


if __name__ == "__main__":
    main()
