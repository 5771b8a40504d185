"""The axioms of the PTX memory consistency model, over one candidate execution.

Sources, read for facts and written down here in our own words and code:

* NVIDIA, *PTX ISA* 9, chapter 8 "Memory Consistency Model": 8.4 operation types, 8.5 scope, 8.7
  morally strong operations, 8.8 release and acquire patterns, 8.9 orders, 8.10 axioms.
* D. Lustig, S. Sahasrabuddhe, O. Giroux: *A Formal Analysis of the NVIDIA PTX Memory Consistency
  Model*, ASPLOS 2019, and its Alloy text (NVlabs/ptxmemorymodel, ptx.als).
* D. Lustig, S. Cooksey, O. Giroux: *Mixed-Proxy Extensions for the NVIDIA PTX Memory Consistency
  Model*, ISCA 2022 (NVlabs/mixedproxy): causality is kept between accesses of one address.

No existing checker could be had: Dat3M (the one maintained public tool with PTX axioms), herd7 and
Alloy are in neither PyPI, Debian 12 nor npm (looked for in 2026-11). The candidate executions of
programs of this size are few, so they are enumerated and no solver is needed.

Modelled: loads, stores and atomic additions, weak or strong, of one or more units of memory; scopes
cta, gpu and sys; release and acquire patterns, through chains of atomics too; fence.acq_rel and
fence.sc; CTA barriers; one kernel behind another in a stream.

Not modelled, and which way that errs:

* Proxies: every access here is generic and every location has one address. The data path uses no
  bulk copies; a second address of one piece of memory would need fence.proxy.alias (8.7).
* A CTA barrier orders the threads that meet in it (8.9.4), one of a warp (bar.warp.sync) those of
  the warp. That it is also a fence of CTA scope to release and acquire patterns (ptx.als) is left
  out: more executions are allowed here than there.
* Kernel order in a stream and griddepcontrol.wait are edges from each thread's end in the kernel
  before to the waiting thread (8.9.4 "API synchronization"; griddepcontrol).
* Clusters, red, volatile, mmio, and the host's own memory.
* Accesses that overlap in part: the axioms do not apply to a program in which such accesses race
  (8.7.2). `mixed_size_race` finds those, and nothing may then be said of the program.
* The hardware: it may be stronger than the model, and it may have errors.
* Progress: an execution in which a loop never ends is not an execution here.

An execution that the axioms forbid can not happen. One they allow need not happen on any GPU.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

#: A relation over events 0..n-1: bit b of relation[a] says that a stands before b.
Relation = list[int]

Scope = Literal["cta", "gpu", "sys"]
Kind = Literal["load", "store", "add", "fence", "arrive", "wait", "end", "start", "initial"]

#: The axioms a candidate must satisfy; a test takes each away and sees a verdict change.
AXIOMS = frozenset(
    {
        "Coherence",
        "Fence-SC",
        "Atomicity",
        "No-thin-air",
        "SC-per-location",
        "Causality",
    }
)

WRITES = ("store", "add", "initial")
READS = ("load", "add")


@dataclass(frozen=True)
class Place:
    """Where a thread runs: GPU (rank), kernel of that GPU's stream, CTA of that kernel, thread."""

    gpu: int
    kernel: int
    cta: int
    thread: int


@dataclass(frozen=True)
class Event:
    """One memory operation, fence, or half of a barrier.

    order: weak, relaxed, acquire, release, acq_rel or sc. scope: None for what is not strong.
    units: the parts of memory it touches; two operations overlap completely if these are equal.
    barrier, turn: which barrier of its CTA the two halves of a bar.sync belong to.
    """

    kind: Kind
    place: Place | None
    order: str = "weak"
    scope: Scope | None = None
    units: tuple[str, ...] = ()
    barrier: str = ""
    turn: int = 0

    @property
    def writes(self) -> bool:
        return self.kind in WRITES

    @property
    def reads(self) -> bool:
        return self.kind in READS

    @property
    def strong(self) -> bool:
        return self.kind == "fence" or (self.kind in READS + WRITES and self.order != "weak")

    @property
    def releases(self) -> bool:
        return self.writes and self.order in ("release", "acq_rel")

    @property
    def acquires(self) -> bool:
        return self.reads and self.order in ("acquire", "acq_rel")


def empty(size: int) -> Relation:
    return [0] * size


def bits(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def pairs(relation: Relation) -> Iterator[tuple[int, int]]:
    for first, row in enumerate(relation):
        for second in bits(row):
            yield first, second


def union(*relations: Relation) -> Relation:
    result = list(relations[0])
    for relation in relations[1:]:
        for event, row in enumerate(relation):
            result[event] |= row
    return result


def both(left: Relation, right: Relation) -> Relation:
    return [a & b for a, b in zip(left, right, strict=True)]


def compose(left: Relation, right: Relation) -> Relation:
    result = empty(len(left))
    for event, row in enumerate(left):
        for middle in bits(row):
            result[event] |= right[middle]
    return result


def closure(relation: Relation) -> Relation:
    result = list(relation)
    for middle, bit in ((m, 1 << m) for m in range(len(result))):
        reach = result[middle]
        if not reach:
            continue
        for event in range(len(result)):
            if result[event] & bit:
                result[event] |= result[middle]
    return result


def irreflexive(relation: Relation) -> bool:
    return not any(row >> event & 1 for event, row in enumerate(relation))


def acyclic(relation: Relation) -> bool:
    return irreflexive(closure(relation))


def relate(size: int, ordered: Iterable[tuple[int, int]]) -> Relation:
    result = empty(size)
    for first, second in ordered:
        result[first] |= 1 << second
    return result


def _covers(scope: Scope | None, owner: Place, other: Place) -> bool:
    if scope == "sys":
        return True
    if scope == "gpu":
        return owner.gpu == other.gpu
    return (owner.gpu, owner.kernel, owner.cta) == (other.gpu, other.kernel, other.cta)


def _mutually_in_scope(left: Event, right: Event) -> bool:
    if left.place is None or right.place is None or not (left.strong and right.strong):
        return False
    return _covers(left.scope, left.place, right.place) and _covers(
        right.scope, right.place, left.place
    )


def morally_strong(left: Event, right: Event) -> bool:
    """One thread, or both strong with scopes that hold each other; accesses overlap completely."""
    if left.units and right.units and left.units != right.units:
        return False
    same_thread = left.place is not None and left.place == right.place
    return same_thread or _mutually_in_scope(left, right)


class Skeleton:
    """What all candidate executions of one program share.

    `program_order` is transitive; `depends` holds the data and control dependencies of later events
    on loads.
    """

    def __init__(self, events: list[Event], program_order: Relation, depends: Relation) -> None:
        self.events = events
        self.program_order = program_order
        self.depends = depends
        self.strong = self._where(morally_strong)
        self.overlap = self._where(_overlap)
        self.same_location = self._where(_same_location)
        self.barriers = self._where(_meets)
        self.fences = [i for i, e in enumerate(events) if e.kind == "fence" and e.order == "sc"]
        self.releases = self._release_patterns()
        self.acquires = self._acquire_patterns()

    def _where(self, holds: Callable[[Event, Event], bool]) -> Relation:
        numbered = list(enumerate(self.events))
        every = itertools.permutations(numbered, 2)
        return relate(len(numbered), ((i, j) for (i, a), (j, b) in every if holds(a, b)))

    def _release_patterns(self) -> list[tuple[int, int]]:
        """(first operation, the strong write that is observed)."""
        found = []
        for first, event in enumerate(self.events):
            fence = event.kind == "fence" and event.order in ("release", "acq_rel", "sc")
            if event.releases:
                found.append((first, first))
            if not (event.releases or fence):
                continue
            later = self.program_order[first] & (-1 if fence else self.same_location[first])
            found += [(first, w) for w in bits(later) if _strong_write(self.events[w])]
        return found

    def _acquire_patterns(self) -> list[tuple[int, int]]:
        """(the strong read that observes, last operation)."""
        found = []
        for first, event in enumerate(self.events):
            if event.acquires:
                found.append((first, first))
            if not (event.reads and event.strong):
                continue
            for last in bits(self.program_order[first]):
                later = self.events[last]
                fence = later.kind == "fence" and later.order in ("acquire", "acq_rel", "sc")
                if fence or (later.acquires and self.same_location[first] >> last & 1):
                    found.append((first, last))
        return found

    def fence_orders(self) -> Iterator[Relation]:
        """Every Fence-SC order: one direction for each morally strong pair of fence.sc."""
        seen = set()
        for order in itertools.permutations(self.fences):
            relation = relate(len(self.events), itertools.combinations(order, 2))
            relation = both(relation, self.strong)
            key = tuple(relation)
            if key not in seen:
                seen.add(key)
                yield relation


def _asked(axiom: str) -> bool:
    return axiom in AXIOMS


def _overlap(left: Event, right: Event) -> bool:
    return bool(set(left.units) & set(right.units))


def _same_location(left: Event, right: Event) -> bool:
    return bool(left.units) and left.units == right.units


def _strong_write(event: Event) -> bool:
    return event.writes and event.strong


def _meets(left: Event, right: Event) -> bool:
    """Arrival and wait of one turn of one CTA's barrier; end of a kernel and start of the next."""
    if left.place is None or right.place is None:
        return False
    a, b = left.place, right.place
    if (left.kind, right.kind) == ("arrive", "wait"):
        same_cta = (a.gpu, a.kernel, a.cta) == (b.gpu, b.kernel, b.cta)
        return same_cta and (left.barrier, left.turn) == (right.barrier, right.turn)
    if (left.kind, right.kind) == ("end", "start"):
        return (a.gpu, a.kernel + 1) == (b.gpu, b.kernel)
    return False


#: What each load read: (event, unit) -> the write.
ReadsFrom = dict[tuple[int, str], int]


class Execution:
    """A candidate: a program's events, and for every read the write it took its value from."""

    def __init__(self, skeleton: Skeleton, reads_from: ReadsFrom) -> None:
        self.skeleton = skeleton
        self.sources = reads_from
        told = ((write, read) for (read, _), write in reads_from.items())
        self.reads_from = relate(len(skeleton.events), told)
        self.observed = self._observation()

    def consistent(self) -> Iterator[tuple[Relation, Relation]]:
        """(coherence, base causality) of each way this candidate satisfies the axioms."""
        skeleton = self.skeleton
        if _asked("No-thin-air") and not acyclic(union(self.reads_from, skeleton.depends)):
            return
        for fence_order in skeleton.fence_orders():
            base = self._base_causality(fence_order)
            against = any(base[b] >> a & 1 for a, b in pairs(fence_order))
            if _asked("Fence-SC") and against:
                continue
            kept = both(base, skeleton.overlap)
            causality = union(kept, compose(self.observed, kept))
            for coherence in self._coherence_orders(causality):
                if self._axioms_hold(coherence, causality):
                    yield coherence, base

    def mixed_size_race(self, base: Relation) -> bool:
        """Do accesses that overlap in part, one of them a write, stand in no order?"""
        events = self.skeleton.events
        return any(
            a.units != b.units
            and (a.writes or b.writes)
            and not (base[i] >> j & 1 or base[j] >> i & 1)
            for (i, a), (j, b) in itertools.combinations(enumerate(events), 2)
            if "initial" not in (a.kind, b.kind) and self.skeleton.overlap[i] >> j & 1
        )

    def race(self, base: Relation) -> bool:
        """Do conflicting accesses, not morally strong, stand in no causality order (ISA 8.7.1)?"""
        skeleton = self.skeleton
        kept = both(base, skeleton.overlap)
        causality = union(kept, compose(self.observed, kept))
        return any(
            (a.writes or b.writes)
            and not (skeleton.strong[i] >> j & 1 or causality[i] >> j & 1 or causality[j] >> i & 1)
            for (i, a), (j, b) in itertools.combinations(enumerate(skeleton.events), 2)
            if "initial" not in (a.kind, b.kind) and skeleton.overlap[i] >> j & 1
        )

    def _observation(self) -> Relation:
        """A write and a read of its value, morally strong, or a chain of those through atomics."""
        direct = both(self.reads_from, self.skeleton.strong)
        atomics = sum(1 << i for i, e in enumerate(self.skeleton.events) if e.kind == "add")
        chained = list(direct)
        for _ in range(atomics.bit_count()):
            chained = union(direct, compose([row & atomics for row in chained], direct))
        return chained

    def _base_causality(self, fence_order: Relation) -> Relation:
        skeleton = self.skeleton
        synchronizes = union(skeleton.barriers, fence_order)
        for first, write in skeleton.releases:
            for read, last in skeleton.acquires:
                if self.observed[write] >> read & 1 and skeleton.strong[first] >> last & 1:
                    synchronizes[first] |= 1 << last
        return closure(union(skeleton.program_order, synchronizes))

    def _coherence_orders(self, causality: Relation) -> Iterator[Relation]:
        """Smallest orders the model allows: more order would only forbid more.

        Overlapping writes are ordered by causality, the morally strong ones one way or the other;
        others are in a race and stay without order.
        """
        events = self.skeleton.events
        writes = [i for i, event in enumerate(events) if event.writes]
        forced = empty(len(events))
        open_pairs = []
        for a, b in itertools.permutations(writes, 2):
            if not self.skeleton.overlap[a] >> b & 1:
                continue
            caused = _asked("Coherence") and causality[a] >> b & 1
            if events[a].kind == "initial" or caused:
                forced[a] |= 1 << b
            elif a < b and self.skeleton.strong[a] >> b & 1:
                open_pairs.append((a, b))
        yield from self._orient(closure(forced), open_pairs)

    def _orient(self, order: Relation, open_pairs: list[tuple[int, int]]) -> Iterator[Relation]:
        if not irreflexive(order):
            return
        for index, (a, b) in enumerate(open_pairs):
            if order[a] >> b & 1 or order[b] >> a & 1:
                continue
            for first, second in ((a, b), (b, a)):
                chosen = list(order)
                chosen[first] |= 1 << second
                yield from self._orient(closure(chosen), open_pairs[index + 1 :])
            return
        yield order

    def _from_reads(self, coherence: Relation) -> Relation:
        """A read stands before the writes that come behind the one it read."""
        result = empty(len(coherence))
        for (read, unit), write in self.sources.items():
            for later in bits(coherence[write]):
                if later != read and unit in self.skeleton.events[later].units:
                    result[read] |= 1 << later
        return result

    def _axioms_hold(self, coherence: Relation, causality: Relation) -> bool:
        from_reads = self._from_reads(coherence)
        communication = union(self.reads_from, coherence, from_reads)
        per_location = union(
            both(communication, self.skeleton.strong),
            both(self.skeleton.program_order, self.skeleton.overlap),
        )
        told = compose(union(self.reads_from, from_reads), causality)
        return (
            not (_asked("Causality") and not irreflexive(told))
            and not (_asked("SC-per-location") and not acyclic(per_location))
            and not (_asked("Atomicity") and not self._atomic(coherence, from_reads))
        )

    def _atomic(self, coherence: Relation, from_reads: Relation) -> bool:
        """Nothing morally strong comes between an atomic's read and write; no read mixes two."""
        strong = self.skeleton.strong
        for read, event in enumerate(self.skeleton.events):
            if event.kind == "add" and any(
                coherence[w] >> read & 1 for w in bits(from_reads[read] & strong[read])
            ):
                return False
            if event.reads and any(
                from_reads[read] >> w & 1 and strong[read] >> w & 1
                for w in (self.sources[read, unit] for unit in event.units)
            ):
                return False
        return True
