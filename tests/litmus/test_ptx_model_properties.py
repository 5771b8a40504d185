"""The evaluator on random programs: what must hold of any of them.

* What some interleaving of the threads does, the model allows: it may only allow more.
* A stronger order or a wider scope allows nothing new. NVIDIA's atomics ABI (PTX Writer's Guide to
  Interoperability) says that every such parameter may be strengthened.
* With fence.sc.sys between any two accesses, all of system scope, only interleavings are left:
  the mapping of C++ atomics to PTX is proven (Lustig et al., ASPLOS 2019), and there such fences
  restore sequential consistency.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.litmus.program import Program

ORDERS = {
    "ld": ("weak", "relaxed", "acquire"),
    "st": ("weak", "relaxed", "release"),
    "atom": ("relaxed", "acquire", "release", "acq_rel"),
    "fence": ("acq_rel", "sc"),
}
#: order -> the orders that are stronger.
STRONGER = {
    "weak": ("relaxed", "acquire", "release"),
    "relaxed": ("acquire", "release", "acq_rel"),
    "acquire": ("acq_rel",),
    "release": ("acq_rel",),
    "acq_rel": ("sc",),
    "sc": (),
}
SCOPES = ("cta", "gpu", "sys")
PLACES = ("gpu0.cta0.t0", "gpu0.cta0.t1", "gpu0.cta1.t0", "gpu1.cta0.t0")


@dataclass(frozen=True)
class Op:
    kind: str
    order: str
    scope: str
    place: str = ""
    value: int = 0

    def text(self, register: str) -> str:
        if self.kind == "fence":
            return f"fence.{self.order}.{self.scope}"
        qualifiers = self.order if self.order == "weak" else f"{self.order}.{self.scope}"
        if self.kind == "ld":
            return f"ld.{qualifiers} {register}, {self.place}"
        if self.kind == "st":
            return f"st.{qualifiers} {self.place}, {self.value}"
        return f"atom.{qualifiers}.add {register}, {self.place}, {self.value}"

    def stronger(self) -> Iterator[Op]:
        for order in STRONGER[self.order]:
            if order in ORDERS[self.kind]:
                yield replace(self, order=order)
        for scope in SCOPES[SCOPES.index(self.scope) + 1 :]:
            yield replace(self, scope=scope)


Threads = tuple[tuple[Op, ...], ...]


def program(threads: Threads, places: tuple[str, ...]) -> Program:
    return Program(
        "\n".join(
            f"{place}: " + "; ".join(op.text(f"r{t}{i}") for i, op in enumerate(ops))
            for t, (place, ops) in enumerate(zip(places, threads, strict=True))
        )
    )


Outcome = tuple[tuple[int | None, ...], ...]


def interleavings(threads: Threads) -> set[Outcome]:
    """What the registers hold after each way to run one operation after the other."""
    outcomes: set[Outcome] = set()

    def run(
        done: tuple[int, ...], memory: dict[str, int], held: dict[tuple[int, int], int]
    ) -> None:
        running = [t for t, ops in enumerate(threads) if done[t] < len(ops)]
        if not running:
            outcomes.add(tuple((held[key],) for key in sorted(held)))
        for t in running:
            op = threads[t][done[t]]
            before = memory.get(op.place, 0)
            after = before + op.value if op.kind == "atom" else op.value
            reads = {(t, done[t]): before} if op.kind in ("ld", "atom") else {}
            writes = {op.place: after} if op.kind in ("st", "atom") else {}
            run((*done[:t], done[t] + 1, *done[t + 1 :]), memory | writes, held | reads)

    run((0,) * len(threads), {}, {})
    return outcomes


@st.composite
def operations(draw: st.DrawFn, kinds: tuple[str, ...] = ("ld", "st", "atom", "fence")) -> Op:
    kind = draw(st.sampled_from(kinds))
    order = draw(st.sampled_from(ORDERS[kind]))
    where = draw(st.sampled_from(("x", "y")))
    return Op(kind, order, draw(st.sampled_from(SCOPES)), where, draw(st.integers(1, 2)))


def threads_of(lengths: tuple[int, ...]) -> st.SearchStrategy[Threads]:
    return st.tuples(*(st.tuples(*[operations()] * length) for length in lengths))


THREADS = st.sampled_from([(2, 2), (3, 3), (1, 2, 2), (2, 2, 2)]).flatmap(threads_of)
PLACED = st.permutations(PLACES)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(THREADS, PLACED)
def test_interleavings_are_allowed(threads: Threads, places: list[str]) -> None:
    allowed = program(threads, tuple(places[: len(threads)])).outcomes()
    assert interleavings(threads) <= allowed


@settings(max_examples=150, deadline=None, derandomize=True)
@given(THREADS, PLACED, st.data())
def test_what_is_stronger_allows_nothing_new(
    threads: Threads, places: list[str], data: st.DataObject
) -> None:
    changes = [
        (t, i, op)
        for t, ops in enumerate(threads)
        for i, old in enumerate(ops)
        for op in old.stronger()
    ]
    if not changes:
        return
    t, i, op = data.draw(st.sampled_from(changes))
    thread = (*threads[t][:i], op, *threads[t][i + 1 :])
    stronger = (*threads[:t], thread, *threads[t + 1 :])
    where = tuple(places[: len(threads)])
    assert program(stronger, where).outcomes() <= program(threads, where).outcomes()


@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.sampled_from([(2, 2), (1, 2, 2), (2, 2, 1)]).flatmap(threads_of), PLACED)
def test_fences_everywhere_leave_interleavings_only(threads: Threads, places: list[str]) -> None:
    fence = Op("fence", "sc", "sys")
    fenced = []
    for ops in threads:
        strong = [
            fence if op.kind == "fence" else replace(op, order="relaxed", scope="sys") for op in ops
        ]
        fenced.append(tuple(itertools.chain(*((op, fence) for op in strong)))[:-1])
    allowed = program(tuple(fenced), tuple(places[: len(threads)])).outcomes()
    assert allowed == interleavings(tuple(tuple(op for op in ops if op != fence) for ops in fenced))
