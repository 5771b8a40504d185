"""Ours beside FlashInfer's one-sided kernels on the software GPU's clock: **modelled times**.

    python benchmarks/ptx_peer.py                                   H200 and GB200, EP8 and EP64
    python benchmarks/ptx_peer.py --gpu h200 --ep-size 8 --tokens 1 --paths

Both are PTX that NVRTC made, executed instruction by instruction with one table of costs
(tests/support/ptx/costs.py), the same routing (the perfect router) and bf16 rows. Counted: from the
begin of a verb's first launch, on every rank at once, to the end of its last kernel.

- Ours: one kernel a verb. Theirs: dispatch is prepare, dispatch and sanitize, which marks empty
  slots as our dispatch does; combine is prepare and combine. Theirs have programmatic dependent
  launch, as their host code gives it; "without marks" ends before sanitize.
- Theirs have the CTAs an SM that their registers allow.
- "cake" is their other back end, for Blackwell on request.

Not counted: the host, the experts, what is not on the GPU. Rank 0 stands for all (clocked.py): no
rank is late, and nothing waits because several ranks store to one at once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common
from benchmarks.moe_comm import clocked, peer_cake, peer_launches, peer_source
from benchmarks.moe_comm.flashinfer_api import READ_FROM
from benchmarks.moe_comm.terms import VERBS, Work
from benchmarks.reporting import tables
from tests.support import wheels
from tests.support.ptx import costs, critical_path
from tests.support.ptx.critical_path import Clock

#: Registers a thread of dispatch and of combine for top_k 8, by `ptxas -v` of CUDA 13.0.88.
_REGISTERS = {
    ("trtllm", "h200"): {"dispatch": 88, "combine": 104},
    ("trtllm", "gb200"): {"dispatch": 32, "combine": 96},
    ("cake", "gb200"): {"dispatch": 28, "combine": 80},
}
_SM_REGISTERS, _SM_THREADS, _REGISTERS_AT_A_TIME = 65536, 2048, 8


class Theirs(clocked.Peer):
    """FlashInfer's default back end with as many CTAs an SM as its registers allow."""

    backend = "trtllm"

    def run(self, verb: str) -> clocked.Clocked:
        changes = {"threads_per_sm": self._resident_threads(verb)}
        table = costs.costs(self._gpu, changes)
        keeps_steps = self.work.tokens <= clocked.MOST_TOKENS_WITH_PATHS
        self._clock = Clock(self._machine, table, keeps_steps=keeps_steps)
        return super().run(verb)

    def _resident_threads(self, verb: str) -> int:
        registers = _REGISTERS[self.backend, self._gpu][verb]
        taken = -(-registers // _REGISTERS_AT_A_TIME) * _REGISTERS_AT_A_TIME
        ctas = _SM_REGISTERS // (taken * peer_launches.THREADS)
        return min(ctas * peer_launches.THREADS, _SM_THREADS)

    def ends_us(self) -> list[float]:
        """Return when rank 0's kernels of the last verb ended, in the order of their launches."""
        launches = sorted(self._clock.launches(), key=lambda launch: launch.number)
        return [launch.end_ns / 1e3 for launch in launches if launch.rank == 0]


class Cake(Theirs):
    """FlashInfer's back end for Blackwell."""

    backend = "cake"
    verbs = peer_cake

    def _compiled(self) -> peer_source.Compiled:
        return peer_source.compiled_cake(tuple(peer_cake.KERNELS.values()))


class Row(NamedTuple):
    """One verb at one batch.

    Attributes:
        theirs: FlashInfer's default back end.
        unmarked_us: the same without sanitize; a combine has none.
        cake: its other back end; None where that has no kernels.
    """

    gpu: str
    ep_size: int
    tokens: int
    verb: str
    ours: clocked.Clocked
    theirs: clocked.Clocked
    unmarked_us: float
    cake: clocked.Clocked | None


def rows(gpu: str, work: Work) -> Iterator[Row]:
    """Model both verbs of one batch.

    Raises:
        FetchError, CompileError: as peer_source.compiled.
    """
    with clocked.Ours(work, gpu) as ours:
        mine = {verb: ours.run(verb) for verb in VERBS}
    theirs, unmarked = {}, {}
    with Theirs(work, gpu, pdl=True) as layer:
        for verb in VERBS:
            theirs[verb] = layer.run(verb)
            unmarked[verb] = layer.ends_us()[1]  # prepare, and the verb itself
    cake: dict[str, clocked.Clocked] = {}
    if ("cake", gpu) in _REGISTERS:
        with Cake(work, gpu, pdl=True) as layer:
            cake = {verb: layer.run(verb) for verb in VERBS}
    for verb in VERBS:
        yield Row(
            gpu,
            *(work.ep_size, work.tokens, verb, mine[verb]),
            *(theirs[verb], unmarked[verb], cake.get(verb)),
        )


_COLUMNS = (
    *("ranks", "tokens", "verb", "ours", "FlashInfer", "ratio"),
    *("without marks", "ratio", "cake", "ratio"),
)


def line(row: Row) -> list[str]:
    """Return a row's cells; a ratio above 1 says that ours takes less time."""
    ours = row.ours.us

    def pair(us: float | None) -> list[str]:
        return ["", ""] if us is None else [f"{us:.1f}", f"{us / ours:.2f}"]

    unmarked = None if row.verb == "combine" else row.unmarked_us
    cake = None if row.cake is None else row.cake.us
    which = [str(row.ep_size), str(row.tokens), row.verb, f"{ours:.1f}"]
    return [*which, *pair(row.theirs.us), *pair(unmarked), *pair(cake)]


def path_text(who: str, row: Row, clock: clocked.Clocked) -> str:
    """Return what the end of a verb waited for, kind by kind, longest first."""
    waits = critical_path.round_trips(clock.path)
    totals = critical_path.totals(clock.path)
    parts = (
        f"{kind} {ns / 1e3:.2f} us" + (f" in {waits[kind]}" if kind in waits else "")
        for kind, ns in totals.items()
    )
    return f"{who}, {row.verb}, {row.gpu}, EP{row.ep_size}, {row.tokens} tokens: {'; '.join(parts)}"


def main(arguments: list[str] | None = None) -> int:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--gpu", nargs="+", choices=costs.MACHINES, default=list(costs.MACHINES))
    made.add_argument("--ep-size", nargs="+", type=int, default=[8, 64])
    made.add_argument("--tokens", nargs="+", type=int, default=[1, 4, 16, 64, 128, 512])
    made.add_argument("--paths", action="store_true", help="what each verb's end waited for")
    given = made.parse_args(arguments)
    print(f"All times are MODELLED microseconds; nothing of this has run on a GPU. {_facts()}")
    for gpu in given.gpu:
        found: list[Row] = []
        for ep_size in given.ep_size:
            for tokens in given.tokens:
                try:
                    found += rows(gpu, Work(ep_size=ep_size, tokens=tokens))
                except wheels.FetchError as error:
                    print(f"FlashInfer's source cannot be had: {error}", file=sys.stderr)
                    return 1
        print(f"\nModelled, {gpu}:\n\n{tables.table(_COLUMNS, map(line, found))}")
        for row in found if given.paths else ():
            print()
            print(path_text("ours", row, row.ours))
            print(path_text("FlashInfer", row, row.theirs))
            if row.cake is not None:
                print(path_text("cake", row, row.cake))
    return 0


def _facts() -> str:
    run = common.describe_run()
    return f"Commit {run.get('commit')}, {run.get('date')}, FlashInfer {READ_FROM}."


if __name__ == "__main__":
    sys.exit(main())
