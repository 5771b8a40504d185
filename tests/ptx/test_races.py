"""The race detector (tests/support/ptx/runtime/races.h) on small programs.

The oracle is the litmus evaluator (tests/litmus), which looks at every execution that the axioms
of the PTX memory model allow. If it finds a data race, the machine reports one in some schedule; if
it finds none, the machine reports none in any. The machine runs one instruction after another, so
races that need a reordering of relaxed accesses in both threads (store buffering) are no programs
of these tests.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from tests.litmus.program import Program
from tests.ptx.litmus_kernels import LitmusKernels, module, named
from tests.support.ptx import build

SEEDS = range(60)

SENDER = "gpu0.cta0.t0: st.weak row, 1; st.{} flag, 1\n"
RECEIVER = "{}: ld.{} seen=1, flag; ld.weak got, row\n"
RECEIVERS = {
    "same_cta": "gpu0.cta0.t1",
    "other_cta": "gpu0.cta1.t0",
    "other_gpu": "gpu1.cta0.t0",
}
SCOPES = ("cta", "gpu", "sys")
COUNTED_OUT = """
    gpu0.cta0.t1: st.weak row, 1; bar.sync
    gpu0.cta0.t0: bar.sync; {before} atom.{arrival}.add first=0, arrivals, 1
    gpu0.cta1.t0: {before} atom.{arrival}.add last=1, arrivals, 1; {last} flag, 1
    gpu1.cta0.t0: ld.acquire.sys seen=1, flag; ld.weak got, row
"""

#: Programs without a race.
ORDERED = {
    "strong_accesses": """
        gpu0.cta0.t0: st.relaxed.sys flag, 1
        gpu1.cta0.t0: ld.relaxed.sys seen, flag
    """,
    "barrier": """
        gpu0.cta0.t0: st.weak row, 1; bar.sync
        gpu0.cta0.t1: bar.sync; ld.weak got, row
    """,
    "barrier_of_a_warp": """
        gpu0.cta0.t0: st.weak row, 1; bar.warp.sync
        gpu0.cta0.t1: bar.warp.sync; ld.weak got, row
    """,
    "release_after_a_barrier": """
        gpu0.cta0.t1: st.weak row, 1; bar.sync
        gpu0.cta0.t0: bar.sync; st.release.sys flag, 1
        gpu1.cta0.t0: ld.acquire.sys seen=1, flag; bar.sync
        gpu1.cta0.t1: bar.sync; ld.weak got, row
    """,
    "acquire_after_a_poll": """
        gpu0.cta0.t0: st.weak row, 1; st.release.sys flag, 1
        gpu1.cta0.t0: ld.relaxed.sys seen=1, flag; ld.acquire.sys again, flag; ld.weak got, row
    """,
    "release_before_another_store_of_the_word": """
        gpu0.cta0.t0: st.weak row, 1; st.release.sys flag, 1; st.relaxed.sys flag, 2
        gpu1.cta0.t0: ld.acquire.sys seen=2, flag; ld.weak got, row
    """,
    "read_before_the_next_write": """
        gpu0.cta0.t0: ld.weak got, row; st.release.sys done, 1
        gpu1.cta0.t0: ld.acquire.sys seen=1, done; st.weak row, 2
    """,
    "from_scope_to_scope": """
        gpu0.cta0.t0: st.weak row, 1; st.release.gpu near, 1
        gpu0.cta1.t0: ld.acquire.gpu first=1, near; st.release.sys far, 1
        gpu1.cta0.t0: ld.acquire.sys second=1, far; ld.weak got, row
    """,
    "chain_of_atomics": """
        gpu0.cta0.t0: st.weak row, 1; atom.release.gpu.add first=0, count, 1
        gpu0.cta1.t0: atom.relaxed.gpu.add second=1, count, 1
        gpu0.cta2.t0: ld.acquire.gpu seen=2, count; ld.weak got, row
    """,
    "arrivals": COUNTED_OUT.format(before="", arrival="acq_rel.gpu", last="st.release.sys"),
    "fence_in_every_cta": COUNTED_OUT.format(
        before="fence.acq_rel.gpu;", arrival="relaxed.gpu", last="fence.acq_rel.sys; st.relaxed.sys"
    ),
    "fences": """
        gpu0.cta0.t0: st.weak row, 1; fence.acq_rel.sys; st.relaxed.sys flag, 1
        gpu1.cta0.t0: ld.relaxed.sys seen=1, flag; fence.acq_rel.sys; ld.weak got, row
    """,
    "fence_and_acquire": """
        gpu0.cta0.t0: st.weak row, 1; fence.sc.sys; st.relaxed.sys flag, 1
        gpu1.cta0.t0: ld.acquire.sys seen=1, flag; ld.weak got, row
    """,
    "weak_write_after_what_it_has_observed": """
        gpu0.cta0.t0: st.relaxed.gpu flag, 1
        gpu0.cta1.t0: ld.relaxed.gpu seen=1, flag; st.weak flag, 2
    """,
    "stream": """
        gpu0.k0.cta0.t0: st.weak row, 1
        gpu0.k1.cta1.t0: griddepcontrol.wait; ld.weak got, row
    """,
    "release_after_the_kernel_before": """
        gpu0.k0.cta1.t0: st.weak row, 1
        gpu0.k1.cta0.t0: griddepcontrol.wait; st.release.sys flag, 1
        gpu1.cta0.t0: ld.acquire.sys seen=1, flag; ld.weak got, row
    """,
    "read_by_the_next_kernel": """
        gpu0.cta0.t0: st.weak row, 1; st.release.sys flag, 1
        gpu1.k0.cta0.t0: ld.acquire.sys seen=1, flag; st.weak ours, 1
        gpu1.k1.cta1.t0: griddepcontrol.wait; ld.weak there=1, ours; ld.weak got, row
    """,
}

#: Programs with a race.
RACY = {
    "strong_accesses_of_narrow_scope": """
        gpu0.cta0.t0: st.relaxed.gpu flag, 1
        gpu1.cta0.t0: ld.relaxed.sys seen, flag
    """,
    "no_barrier": """
        gpu0.cta0.t0: st.weak row, 1
        gpu0.cta0.t1: ld.weak got, row
    """,
    "barrier_of_another_warp": """
        gpu0.cta0.t0: st.weak row, 1; bar.warp.sync
        gpu0.cta0.t1: bar.warp.sync
        gpu0.cta0.t32: bar.warp.sync; ld.weak got, row
    """,
    "no_barrier_after_the_acquire": """
        gpu0.cta0.t0: st.weak row, 1; st.release.sys flag, 1
        gpu1.cta0.t0: ld.acquire.sys seen=1, flag
        gpu1.cta0.t1: ld.weak got, row
    """,
    "acquire_of_another_word": """
        gpu0.cta0.t0: st.weak row, 1; st.release.sys flag, 1
        gpu1.cta0.t0: ld.relaxed.sys seen=1, flag; ld.acquire.sys again, other; ld.weak got, row
    """,
    "store_of_another_thread_after_the_release": """
        gpu0.cta0.t0: st.weak row, 1; st.release.sys flag, 1
        gpu0.cta1.t0: ld.relaxed.sys first=1, flag; st.relaxed.sys flag, 2
        gpu1.cta0.t0: ld.acquire.sys seen=2, flag; ld.weak got, row
    """,
    "read_before_the_next_write_relaxed": """
        gpu0.cta0.t0: ld.weak got, row; st.relaxed.sys done, 1
        gpu1.cta0.t0: ld.acquire.sys seen=1, done; st.weak row, 2
    """,
    "chain_of_atomics_of_narrow_scope": """
        gpu0.cta0.t0: st.weak row, 1; atom.release.gpu.add first=0, count, 1
        gpu0.cta1.t0: atom.relaxed.cta.add second=1, count, 1
        gpu0.cta2.t0: ld.acquire.gpu seen=2, count; ld.weak got, row
    """,
    "relaxed_arrivals": COUNTED_OUT.format(before="", arrival="relaxed.gpu", last="st.release.sys"),
    "releasing_arrivals": COUNTED_OUT.format(
        before="", arrival="release.gpu", last="st.release.sys"
    ),
    "acquiring_arrivals": COUNTED_OUT.format(
        before="", arrival="acquire.gpu", last="st.release.sys"
    ),
    "fence_in_the_last_cta": COUNTED_OUT.format(
        before="", arrival="relaxed.gpu", last="fence.acq_rel.sys; st.relaxed.sys"
    ),
    "strong_fence_in_the_last_cta": COUNTED_OUT.format(
        before="", arrival="relaxed.gpu", last="fence.sc.sys; st.relaxed.sys"
    ),
    "fence_of_narrow_scope": """
        gpu0.cta0.t0: st.weak row, 1; fence.acq_rel.gpu; st.relaxed.sys flag, 1
        gpu1.cta0.t0: ld.relaxed.sys seen=1, flag; fence.acq_rel.sys; ld.weak got, row
    """,
    "acquiring_fence_of_narrow_scope": """
        gpu0.cta0.t0: st.weak row, 1; fence.acq_rel.sys; st.relaxed.sys flag, 1
        gpu1.cta0.t0: ld.relaxed.sys seen=1, flag; fence.acq_rel.gpu; ld.weak got, row
    """,
    "fence_after_the_store": """
        gpu0.cta0.t0: st.weak row, 1; st.relaxed.sys flag, 1; fence.acq_rel.sys
        gpu1.cta0.t0: ld.relaxed.sys seen=1, flag; fence.acq_rel.sys; ld.weak got, row
    """,
    "fences_without_a_direction": """
        gpu0.cta0.t0: st.weak row, 1; fence.sc.sys
        gpu1.cta0.t0: fence.sc.sys; st.weak row, 2
    """,
    "weak_write_after_what_another_thread_has_observed": """
        gpu0.cta0.t0: st.relaxed.gpu flag, 1
        gpu0.cta1.t0: ld.relaxed.gpu seen=1, flag
        gpu0.cta1.t1: st.weak flag, 2
    """,
    "dependents_that_do_not_wait": """
        gpu0.k0.cta0.t0: st.weak row, 1
        gpu0.k1.cta1.t0: ld.weak got, row
    """,
    "relaxed_after_the_kernel_before": """
        gpu0.k0.cta1.t0: st.weak row, 1
        gpu0.k1.cta0.t0: griddepcontrol.wait; st.relaxed.sys flag, 1
        gpu1.cta0.t0: ld.acquire.sys seen=1, flag; ld.weak got, row
    """,
    "kernel_after_a_relaxed_one": """
        gpu0.cta0.t0: st.weak row, 1; st.relaxed.sys flag, 1
        gpu1.k0.cta0.t0: ld.acquire.sys seen=1, flag
        gpu1.k1.cta1.t0: griddepcontrol.wait; ld.weak got, row
    """,
}


def check(kernels: LitmusKernels, library: build.Library, is_racy: bool) -> None:
    race = kernels.race(library, SEEDS)
    assert (race is not None) == is_racy, f"{kernels.name}: {race}"


def loaded(kernels: list[LitmusKernels]) -> build.Library:
    return build.load(module(kernels), races=True)


@pytest.fixture(scope="module")
def shapes() -> tuple[dict[str, LitmusKernels], build.Library]:
    """ORDERED, RACY and message passing, in one library."""
    passing = {
        name: SENDER.format("release.sys") + RECEIVER.format(place, "acquire.sys")
        for name, place in RECEIVERS.items()
    }
    kernels = named(ORDERED | RACY | passing)
    return {each.name: each for each in kernels}, loaded(kernels)


Shapes = tuple[dict[str, LitmusKernels], build.Library]


@pytest.mark.parametrize("name", [*ORDERED, *RACY])
def test_verdict_is_that_of_the_axioms(name: str, shapes: Shapes) -> None:
    kernels = shapes[0][name]
    assert kernels.program.reachable(), "no execution gets to the end"
    assert kernels.program.race() == (name in RACY)
    check(kernels, shapes[1], name in RACY)


@pytest.mark.parametrize("place", RECEIVERS)
@pytest.mark.parametrize("loaded_as", ["weak", "relaxed", "acquire"])
@pytest.mark.parametrize("stored_as", ["weak", "relaxed", "release"])
def test_message_passing(stored_as: str, loaded_as: str, place: str, shapes: Shapes) -> None:
    """Every order and scope, set in the table of sites."""
    kernels, library = shapes[0][place], shapes[1]
    store, load = flag_sites(kernels, library)
    try:
        for scopes in itertools.product(SCOPES, SCOPES):
            (store.order, load.order), (store.scope, load.scope) = (stored_as, loaded_as), scopes
            orders = [
                order if order == "weak" else f"{order}.{scope}"
                for order, scope in zip((stored_as, loaded_as), scopes, strict=True)
            ]
            text = SENDER.format(orders[0]) + RECEIVER.format(RECEIVERS[place], orders[1])
            check(kernels, library, Program(text).race())
    finally:
        library.reset()


def flag_sites(kernels: LitmusKernels, library: build.Library) -> list[build.Site]:
    """The store and the load of the flag."""
    sites = [site for kernel, _ in kernels.sites(library) for site in kernel.sites]
    return [site for site in sites if ".sys" in site.text]


# ---- random programs


class Drawn(NamedTuple):
    """A random program: threads of random operations."""

    text: str

    @classmethod
    def of(cls, number: int) -> Drawn:
        draw = random.Random(number)
        places = draw.sample(
            ["gpu0.cta0.t0", "gpu0.cta0.t1", "gpu0.cta1.t0", "gpu1.cta0.t0"], draw.choice((2, 2, 3))
        )
        lines = []
        for thread, place in enumerate(places):
            count = draw.randint(2, 4 if len(places) == 2 else 3)
            operations = [cls._operation(draw, f"r{thread}{n}") for n in range(count)]
            lines.append(f"{place}: " + "; ".join(operations))
        return cls("\n".join(lines))

    @staticmethod
    def _operation(draw: random.Random, register: str) -> str:
        scope, place = draw.choice(("cta", "gpu", "gpu", "sys", "sys")), draw.choice("xxy")
        kind = draw.choice(("ld", "ld", "st", "st", "atom", "fence"))
        if kind == "fence":
            return f"fence.{draw.choice(('acq_rel', 'sc'))}.{scope}"
        if kind == "atom":
            order = draw.choice(("relaxed", "acquire", "release", "acq_rel"))
            return f"atom.{order}.{scope}.add {register}, {place}, 1"
        weak = draw.random() < 0.15 if place == "x" else draw.random() < 0.6
        order = draw.choice(("relaxed", "acquire" if kind == "ld" else "release"))
        qualifiers = "weak" if weak else f"{order}.{scope}"
        if kind == "st":
            return f"st.{qualifiers} {place}, 1"
        branch = "=1" if draw.random() < 0.5 else ""
        return f"ld.{qualifiers} {register}{branch}, {place}"


def drawn() -> Iterator[LitmusKernels]:
    """Programs whose branches some execution takes, as many with a race as without."""
    wanted = {True: 40, False: 40}
    for number in itertools.count():
        kernels = LitmusKernels(f"drawn_{number}", Drawn.of(number).text)
        if kernels.program.reachable() and wanted[kernels.program.race()]:
            wanted[kernels.program.race()] -= 1
            yield kernels
        if not any(wanted.values()):
            return


def test_random_programs_have_the_axioms_verdict() -> None:
    programs = list(drawn())
    library = loaded(programs)
    for kernels in programs:
        check(kernels, library, kernels.program.race())
