"""The race detector (tests/support/ptx/runtime/races.h) on small programs.

The oracle is the litmus evaluator (tests/litmus), which looks at every execution that the axioms
of the PTX memory model allow. If it finds a data race, the machine reports one in some schedule; if
it finds none, the machine reports none in any. The machine runs one instruction after another, so
races that need a reordering of relaxed accesses in both threads (store buffering) are no programs
of these tests.
"""

from __future__ import annotations

import ctypes
import itertools
import random
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from tests.litmus.program import Program
from tests.ptx.litmus_kernels import LitmusKernels, module, named
from tests.support.ptx import build
from tests.support.ptx.machine import Machine, PtxError, RaceError, UninitialisedError

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
    gpu0.cta0.t0: bar.sync; atom.{0}.add first=0, arrivals, 1
    gpu0.cta1.t0: atom.{0}.add last=1, arrivals, 1; st.release.sys flag, 1
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
    "arrivals": COUNTED_OUT.format("acq_rel.gpu"),
    "weak_write_after_what_it_has_observed": """
        gpu0.cta0.t0: st.relaxed.gpu flag, 1
        gpu0.cta1.t0: ld.relaxed.gpu seen=1, flag; st.weak flag, 2
    """,
    "narrow_load_after_an_acquiring_arrival": """
        gpu0.cta0.t0: atom.relaxed.gpu.add slot, count, 1; atom.acq_rel.gpu.add first=0, arrivals, 1
        gpu0.cta1.t0: atom.acq_rel.gpu.add last=1, arrivals, 1; ld.relaxed.cta seen, count
    """,
    "narrow_store_after_an_atomic_that_has_observed_the_others": """
        gpu0.cta0.t0: atom.relaxed.gpu.add first=0, taken, 1
        gpu0.cta1.t0: atom.relaxed.gpu.add last=1, taken, 1; st.relaxed.cta taken, 0
    """,
    "narrow_load_of_what_the_same_gpu_has_stored_for_all": """
        gpu0.cta0.t0: st.release.sys cell, 1
        gpu0.cta1.t0: ld.relaxed.gpu seen, cell
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
    # Only the first look races, and no schedule has it after the store.
    "narrow_look_before_a_wide_one": """
        gpu0.cta0.t0: ld.relaxed.gpu r0, flag; ld.relaxed.sys r1, flag; st.relaxed.sys go, 1
        gpu1.cta0.t0: ld.relaxed.sys seen=1, go; st.relaxed.sys flag, 1
    """,
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
    "relaxed_arrivals": COUNTED_OUT.format("relaxed.gpu"),
    "releasing_arrivals": COUNTED_OUT.format("release.gpu"),
    "acquiring_arrivals": COUNTED_OUT.format("acquire.gpu"),
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
    return [site for site in kernels.sites(library) if ".sys" in site.text]


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
        kind = draw.choice(("ld", "ld", "st", "st", "atom"))
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
    wanted = {True: 24, False: 24}
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


# ---- what litmus programs do not have: the host, shared memory, reports

ROWS = 128  # threads of `shared`
HAND_WRITTEN = """
.version 8.8
.target sm_90a
.address_size 64

.visible .entry put(.param .u64 put_param_0)
{
    .reg .b64 %rd<3>;
    ld.param.u64 %rd1, [put_param_0];
    cvta.to.global.u64 %rd2, %rd1;
    st.global.u32 [%rd2], 7;
    st.release.sys.global.u32 [%rd2+4], 1;
    ret;
}

.visible .entry get(.param .u64 get_param_0)
{
    .reg .b32 %r<2>;
    .reg .pred %p<2>;
    .reg .b64 %rd<3>;
    ld.param.u64 %rd1, [get_param_0];
    cvta.to.global.u64 %rd2, %rd1;
$poll:
    ld.acquire.sys.global.u32 %r1, [%rd2+4];
    setp.eq.u32 %p1, %r1, 0;
    @%p1 bra $poll;
    ret;
}

.visible .entry halves(.param .u64 halves_param_0)
{
    .reg .b16 %rs<2>;
    .reg .b32 %r<3>;
    .reg .b64 %rd<5>;
    ld.param.u64 %rd1, [halves_param_0];
    cvta.to.global.u64 %rd2, %rd1;
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd3, %r1, 2;
    add.s64 %rd4, %rd2, %rd3;
    cvt.u16.u32 %rs1, %r1;
    st.global.u16 [%rd4], %rs1;
    ret;
}

.visible .entry shared(.param .u64 shared_param_0)
{
    .reg .b32 %r<9>;
    .reg .b64 %rd<3>;
    .shared .align 4 .b8 words[512];
    mov.u32 %r1, %tid.x;
    shl.b32 %r2, %r1, 2;
    mov.u32 %r3, words;
    add.s32 %r4, %r3, %r2;
    st.shared.u32 [%r4], %r1;
    bar.sync 0;
    xor.b32 %r5, %r2, 256;
    add.s32 %r6, %r3, %r5;
    ld.shared.u32 %r7, [%r6];
    ret;
}
"""


@pytest.fixture(scope="module")
def library() -> build.Library:
    return build.load(HAND_WRITTEN, races=True)


class Host(NamedTuple):
    """A machine of two ranks and eight bytes of rank 1, which rank 0 writes to."""

    machine: Machine
    address: int

    def launch(self, library: build.Library, rank: int, name: str, threads: int = 1) -> None:
        params = self.address.to_bytes(8, "little")
        self.machine.launch(rank, library[name], 1, threads, params)


@pytest.fixture(params=range(5))
def host(request: pytest.FixtureRequest) -> Iterator[Host]:
    memory = ctypes.create_string_buffer(ROWS * 4)
    with Machine(2, seed=request.param, races=True) as machine:
        machine.allocate(1, ctypes.addressof(memory), len(memory), "words")
        yield Host(machine, ctypes.addressof(memory))


def test_host_reads_what_its_rank_has_acquired(library: build.Library, host: Host) -> None:
    host.launch(library, 0, "put")
    host.launch(library, 1, "get")
    host.machine.run()
    host.machine.host_read(1, host.address, 4)
    host.machine.host_write(1, host.address, 4)


def test_host_races_with_a_peer(library: build.Library, host: Host) -> None:
    """That the peer's kernel has ended orders nothing: this rank's host does not wait for it."""
    host.launch(library, 0, "put")
    host.machine.run()
    with pytest.raises(RaceError) as race:
        host.machine.host_read(1, host.address, 8)
    for part in (
        "the host of rank 1\n",
        "race at byte 0 of 'words' of rank 1: weak read after weak write; nothing orders them\n",
        "before: rank 0 launch 0 (put) CTA 0 thread 0, PTX line 11: st.global.u32 [%rd2], 7",
    ):
        assert part in str(race.value)


def test_host_of_the_writer_reads(library: build.Library, host: Host) -> None:
    host.launch(library, 0, "put")
    host.machine.run()
    host.machine.host_read(0, host.address, 8)


def test_host_writes_before_its_launches_only(library: build.Library, host: Host) -> None:
    host.machine.host_write(0, host.address, 8)
    host.launch(library, 0, "put")
    host.machine.run()
    host.machine.host_write(0, host.address, 8)
    with pytest.raises(RaceError, match="weak write after weak write"):
        host.machine.host_write(1, host.address, 8)


def test_host_writes_what_a_peer_writes(library: build.Library, host: Host) -> None:
    host.machine.host_write(1, host.address, 8)
    host.launch(library, 0, "put")
    with pytest.raises(RaceError, match=r"before: the host of rank 1$"):
        host.machine.run()


def test_neighbours_in_a_word_do_not_race(library: build.Library, host: Host) -> None:
    host.launch(library, 0, "halves", threads=64)
    host.machine.run()


def test_shared_memory_behind_a_barrier(library: build.Library, host: Host) -> None:
    host.launch(library, 0, "shared", threads=ROWS)
    host.machine.run()


def test_shared_memory_without_its_barrier(library: build.Library, host: Host) -> None:
    """Where the word has not been written yet, the machine reports that instead."""
    barrier = next(site for site in library["shared"].sites if site.kind == "barrier")
    barrier.removed = True
    try:
        host.launch(library, 0, "shared", threads=ROWS)
        with pytest.raises(PtxError) as fault:
            host.machine.run()
    finally:
        library.reset()
    assert fault.type in (RaceError, UninitialisedError)
    assert "ld.shared.u32 %r7, [%r6]" in str(fault.value)


def test_other_kernels_of_the_rank_come_after_the_host(library: build.Library, host: Host) -> None:
    for _ in range(3):
        host.launch(library, 0, "put")
        host.machine.run()
        host.machine.host_write(0, host.address, 8)
