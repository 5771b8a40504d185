"""Copies by TMA (cp.async.bulk) and their barriers (mbarrier) on the software GPU: what lands, and
which mistake is reported as what.

The oracle is the PTX ISA: a phase ends when its arrivals have come and its bytes have landed; a
copy is of the async proxy, so a fence stands between it and earlier accesses of the generic proxy.
"""

from __future__ import annotations

import ctypes
import struct

import pytest

from tests.support.ptx import build
from tests.support.ptx.machine import (
    DeadlockError,
    Machine,
    MisalignedError,
    OutOfBoundsError,
    PtxError,
    RaceError,
    UninitialisedError,
)

SEEDS = range(12)
THREADS, WORDS = 64, 128

#: Thread 1 copies the row in two parts, twice, between which it changes the row; all threads add
#: what they have got, and store the sums.
PROGRAM = """
.version 9.0
.target sm_90a
.address_size 64
.extern .shared .align 128 .b8 landed[];
.visible .entry copies(.param .u64 row, .param .u64 result)
{
.reg .pred %p<4>;
.reg .b32 %r<12>;
.reg .b64 %rd<6>;
.shared .align 8 .b8 barrier[8];
ld.param.u64 %rd0, [row];
ld.param.u64 %rd1, [result];
mov.u32 %r0, %tid.x;
mov.u32 %r1, landed;
mov.u32 %r2, barrier;
mov.u32 %r3, 0;
mov.u32 %r4, 0;
shl.b32 %r8, %r0, 3;
setp.ne.u32 %p0, %r0, 0;
setp.ne.u32 %p1, %r0, 1;
@%p0 bra READY;
mbarrier.init.shared::cta.b64 [%r2], 1;
fence.proxy.async.shared::cta; // init
READY:
bar.sync 0;
AGAIN:
@%p1 bra WAIT;
mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 512;
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd0], 256, [%r2];
add.s32 %r5, %r1, 256;
add.s64 %rd2, %rd0, 256;
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r5], [%rd2], 256, [%r2];
WAIT:
mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r2], %r3;
@!%p2 bra WAIT;
add.s32 %r6, %r1, %r8;
ld.shared.v2.u32 {%r7, %r9}, [%r6];
add.s32 %r4, %r4, %r7;
add.s32 %r4, %r4, %r9;
bar.sync 0; // read
fence.proxy.async.shared::cta; // overwrite
@%p1 bra NEXT;
st.global.u32 [%rd0], 1000;
fence.proxy.async.global; // row
NEXT:
add.s32 %r3, %r3, 1;
setp.eq.u32 %p3, %r3, 1;
@%p3 bra AGAIN;
mul.wide.u32 %rd3, %r0, 4;
add.s64 %rd4, %rd1, %rd3;
st.global.u32 [%rd4], %r4;
ret;
}
"""


def run(program: str, *, races: bool, seed: int) -> None:
    row = (ctypes.c_uint32 * WORDS)(*range(WORDS))
    result = (ctypes.c_uint32 * THREADS)()
    kernel = build.load(program, races=races)["copies"]
    with Machine(1, seed=seed, races=races) as machine:
        for memory, size, name in ((row, 4 * WORDS, "row"), (result, 4 * THREADS, "result")):
            machine.allocate(0, ctypes.addressof(memory), size, name)
        params = struct.pack("QQ", ctypes.addressof(row), ctypes.addressof(result))
        machine.launch(0, kernel, 1, THREADS, params, shared_bytes=4 * WORDS)
        machine.run()
    expected = [2 * (4 * thread + 1) for thread in range(THREADS)]
    expected[0] += 1000
    assert list(result) == expected


def run_all(program: str, *, races: bool) -> None:
    for seed in SEEDS:
        run(program, races=races, seed=seed)


@pytest.mark.parametrize("races", [False, True])
def test_what_lands(races: bool) -> None:
    run_all(PROGRAM, races=races)


def without(line: str) -> str:
    (found,) = [each for each in PROGRAM.split("\n") if each.startswith(line)]
    return PROGRAM.replace(f"{found}\n", "")


def instead(old: str, new: str) -> str:
    assert PROGRAM.count(old) == 1
    return PROGRAM.replace(old, new)


COPY = (
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd0], 256, [%r2];"
)
Kinds = type[PtxError] | tuple[type[PtxError], ...]
MISTAKES: dict[str, tuple[str, Kinds]] = {
    "nobody waits": (without("@!%p2 bra WAIT"), (RaceError, UninitialisedError)),
    "the phase before": (
        instead("mov.u32 %r3, 0;", "mov.u32 %r3, 1;"),
        (RaceError, UninitialisedError),
    ),
    "no fence after init": (without("fence.proxy.async.shared::cta; // init"), RaceError),
    "no fence after reads": (without("fence.proxy.async.shared::cta; // overwrite"), RaceError),
    "no fence after the row": (without("fence.proxy.async.global; // row"), RaceError),
    "no barrier after reads": (without("bar.sync 0; // read"), RaceError),
    "one part twice": (instead("[%r5], [%rd2], 256", "[%r1], [%rd2], 256"), RaceError),
    "more expected": (instead("[%r2], 512;", "[%r2], 528;"), DeadlockError),
    "fewer expected": (instead("[%r2], 512;", "[%r2], 256;"), PtxError),
    "two arrivals": (instead("[%r2], 1;", "[%r2], 2;"), DeadlockError),
    "not initialised": (without("mbarrier.init"), UninitialisedError),
    "misaligned": (instead("add.s64 %rd2, %rd0, 256", "add.s64 %rd2, %rd0, 252"), MisalignedError),
    "beyond the row": (
        instead("add.s64 %rd2, %rd0, 256", "add.s64 %rd2, %rd0, 272"),
        OutOfBoundsError,
    ),
    "beyond shared": (instead("add.s32 %r5, %r1, 256", "add.s32 %r5, %r1, 272"), OutOfBoundsError),
    "ends too early": (instead(COPY, f"{COPY}\nret;"), (OutOfBoundsError, DeadlockError)),
}


#: Two barriers with a copy each: of the first barrier's copy nobody knows by the second one.
TWO_BARRIERS = (
    PROGRAM.replace(".b8 barrier[8];", ".b8 barrier[16];")
    .replace(
        "mbarrier.init.shared::cta.b64 [%r2], 1;",
        """mbarrier.init.shared::cta.b64 [%r2], 1;
mbarrier.init.shared::cta.b64 [%r2+8], 1;""",
    )
    .replace(
        "expect_tx.shared::cta.b64 _, [%r2], 512;",
        """expect_tx.shared::cta.b64 _, [%r2], 256;
mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2+8], 256;""",
    )
    .replace("[%r5], [%rd2], 256, [%r2];", "[%r5], [%rd2], 256, [%r2+8];")
)
SECOND_WAIT = """@!%p2 bra WAIT;
ALSO:
mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r2+8], %r3;
@!%p2 bra ALSO;"""


def test_a_barrier_tells_of_its_own_copies_alone() -> None:
    run_all(TWO_BARRIERS.replace("@!%p2 bra WAIT;", SECOND_WAIT), races=True)
    for place in ("[%r2]", "[%r2+8]"):
        one = TWO_BARRIERS.replace("b64 %p2, [%r2], %r3", f"b64 %p2, {place}, %r3")
        for seed in SEEDS:
            with pytest.raises((RaceError, UninitialisedError)):
                run(one, races=True, seed=seed)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_reported(name: str) -> None:
    """In some schedule, by the machine that looks for races."""
    program, kind = MISTAKES[name]
    with pytest.raises(kind):
        run_all(program, races=True)
