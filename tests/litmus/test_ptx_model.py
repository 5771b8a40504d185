"""The evaluator against litmus tests whose verdict somebody else has published.

"allowed" and "forbidden" mean the outcome named with the program. Where a source gives a condition
that must hold, the outcome here is its negation, one test per way to negate it.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest

from tests.litmus import ptx_model
from tests.litmus.program import Program, ProgramError

ISA = "PTX ISA 9, "
PAPER = "Lustig et al., ASPLOS 2019, "
NVLITMUS = "NVlabs/mixedproxy, tests/"
DAT3M = "Dat3M, litmus/PTX/Manual/"


class Case(NamedTuple):
    """A program, an outcome, whether the model allows it, and who says so."""

    source: str
    program: str
    outcome: dict[str, int | str]
    allowed: bool


MP = """
    gpu0.cta0.t0: st.weak data, 1; {store} flag, 1
    gpu{gpu}.cta{cta}.t{thread}: {load} r0=1, flag; ld.weak r1, data
"""


def mp(store: str, load: str, gpu: int = 0, cta: int = 1, thread: int = 0) -> str:
    return MP.format(store=store, load=load, gpu=gpu, cta=cta, thread=thread)


SB = """
    gpu0.cta0.t0: st.weak x, 1; {fence}; ld.weak r0, y
    gpu0.cta1.t0: st.weak y, 1; {fence}; ld.weak r1, x
"""
IRIW = """
    gpu0.cta0.t0: st.relaxed.sys x, 1
    gpu1.cta0.t0: {load} r0, x; {fence} {load} r1, y
    gpu2.cta0.t0: {load} r2, y; {fence} {load} r3, x
    gpu3.cta0.t0: st.relaxed.sys y, 1
"""
IRIW_OUTCOME: dict[str, int | str] = {"r0": 1, "r1": 0, "r2": 1, "r3": 0}

CASES = {
    # Message passing
    "MP, fences": Case(
        ISA + "8.10.6 Message Passing",
        """
        gpu0.cta0.t0: st.weak data, 1; fence.acq_rel.sys; st.relaxed.sys flag, 1
        gpu1.cta0.t0: ld.relaxed.sys r0, flag; fence.acq_rel.sys; ld.weak r1, data
        """,
        {"r0": 1, "r1": 0},
        allowed=False,
    ),
    "MP, release and acquire, one CTA": Case(
        NVLITMUS + "MP_cta.test",
        mp("st.release.cta", "ld.acquire.cta", cta=0, thread=1),
        {"r1": 0},
        allowed=False,
    ),
    "MP, release and acquire, one GPU": Case(
        NVLITMUS + "MP_gpu.test", mp("st.release.gpu", "ld.acquire.gpu"), {"r1": 0}, allowed=False
    ),
    "MP, release and acquire, two GPUs": Case(
        NVLITMUS + "Manual/MP-sys.test",
        mp("st.release.sys", "ld.acquire.sys", gpu=1),
        {"r1": 0},
        allowed=False,
    ),
    "MP, different scopes that hold each other": Case(
        NVLITMUS + "Manual/MP-cta-gpu.test",
        mp("st.release.cta", "ld.acquire.gpu", cta=0, thread=1),
        {"r1": 0},
        allowed=False,
    ),
    "MP, relaxed": Case(
        NVLITMUS + "Manual/MP-relaxed.test",
        mp("st.relaxed.sys", "ld.relaxed.sys"),
        {"r1": 0},
        allowed=True,
    ),
    "MP, relaxed store": Case(
        ISA + "8.8: a lone relaxed store is no release pattern",
        mp("st.relaxed.sys", "ld.acquire.sys"),
        {"r1": 0},
        allowed=True,
    ),
    "MP, relaxed load": Case(
        ISA + "8.8: a lone relaxed load is no acquire pattern",
        mp("st.release.sys", "ld.relaxed.sys"),
        {"r1": 0},
        allowed=True,
    ),
    "MP, scope of the store too narrow": Case(
        ISA + "8.7: each scope must include the other's thread",
        mp("st.release.cta", "ld.acquire.sys"),
        {"r1": 0},
        allowed=True,
    ),
    "MP, scope of the load too narrow": Case(
        ISA + "8.7: each scope must include the other's thread",
        mp("st.release.sys", "ld.acquire.gpu", gpu=1),
        {"r1": 0},
        allowed=True,
    ),
    "MP, relaxed look before the acquire": Case(
        ISA + "8.8: ld.relaxed [M]; ld.acquire [M] is an acquire pattern",
        """
        gpu0.cta0.t0: st.weak data, 1; st.release.sys flag, 1
        gpu1.cta0.t0: ld.relaxed.sys look=1, flag; ld.acquire.sys r0, flag; ld.weak r1, data
        """,
        {"r1": 0},
        allowed=False,
    ),
    "MP, a relaxed store behind the release": Case(
        ISA + "8.8: st.release [M]; st.relaxed [M] is a release pattern",
        """
        gpu0.cta0.t0: st.weak y, 1; st.release.sys x, 1; st.relaxed.sys x, 2
        gpu1.cta0.t0: ld.relaxed.sys r1, x; fence.acq_rel.sys; ld.weak r3, y
        """,
        {"r1": 2, "r3": 0},
        allowed=False,
    ),
    "MP, a release of another word": Case(
        ISA + "8.8: both operations of a release pattern are on M",
        """
        gpu0.cta0.t0: st.weak y, 1; st.release.sys z, 1; st.relaxed.sys x, 2
        gpu1.cta0.t0: ld.relaxed.sys r1, x; fence.acq_rel.sys; ld.weak r3, y
        """,
        {"r1": 2, "r3": 0},
        allowed=True,
    ),
    "MP, an acquire of another word": Case(
        ISA + "8.8: both operations of an acquire pattern are on M",
        """
        gpu0.cta0.t0: st.weak y, 1; fence.acq_rel.sys; st.relaxed.sys x, 2
        gpu1.cta0.t0: ld.relaxed.sys r1, x; ld.acquire.sys r2, z; ld.weak r3, y
        """,
        {"r1": 2, "r3": 0},
        allowed=True,
    ),
    "MP, the acquire sees a later relaxed store": Case(
        ISA + "8.8: the strong read before an acquire of the same word is part of the pattern",
        """
        gpu0.cta0.t0: st.weak data, 1; st.release.sys flag, 1
        gpu0.cta1.t0: ld.relaxed.sys r0=1, flag; st.relaxed.sys flag, 2
        gpu1.cta0.t0: ld.relaxed.sys r1=1, flag; ld.acquire.sys r2=2, flag; ld.weak r3, data
        """,
        {"r3": 0},
        allowed=False,
    ),
    "MP, the acquire sees only a later relaxed store": Case(
        ISA + "8.9.2: a plain store does not extend an observation",
        """
        gpu0.cta0.t0: st.weak data, 1; st.release.sys flag, 1
        gpu0.cta1.t0: ld.relaxed.sys r0=1, flag; st.relaxed.sys flag, 2
        gpu1.cta0.t0: ld.acquire.sys r2=2, flag; ld.weak r3, data
        """,
        {"r3": 0},
        allowed=True,
    ),
    "MP, a narrow release before a wide store": Case(
        ISA + "8.9.4: the first operation of one pattern and the last of the other",
        """
        gpu0.cta0.t0: st.weak y, 1; st.release.cta x, 1; st.relaxed.sys x, 2
        gpu1.cta0.t0: ld.acquire.sys r1, x; ld.weak r3, y
        """,
        {"r1": 2, "r3": 0},
        allowed=True,
    ),
    "MP over a part of the flag": Case(
        ISA + "8.7: morally strong accesses overlap completely",
        """
        gpu0.cta0.t0: st.weak data, 1; st.release.sys a|b, 1|1
        gpu1.cta0.t0: ld.acquire.sys r0=1, a; ld.weak r1, data
        """,
        {"r1": 0},
        allowed=True,
    ),
    # Chains through atomics
    "MP through a relaxed atomic": Case(
        ISA + "8.9.2 (observation through atomics); " + DAT3M + "MP+RMW.litmus",
        """
        gpu0.cta0.t0: st.relaxed.gpu x, 1; st.release.gpu y, 1
        gpu0.cta1.t0: atom.relaxed.gpu.add r0, y, 1
        gpu0.cta2.t0: ld.acquire.gpu r1, y; ld.relaxed.gpu r2, x
        """,
        {"r0": 1, "r1": 2, "r2": 0},
        allowed=False,
    ),
    "MP through an atomic of too narrow a scope": Case(
        ISA + "8.9.2: each link of the observation is morally strong",
        """
        gpu0.cta0.t0: st.relaxed.gpu x, 1; st.release.gpu y, 1
        gpu0.cta1.t0: atom.relaxed.cta.add r0, y, 1
        gpu0.cta2.t0: ld.acquire.gpu r1, y; ld.relaxed.gpu r2, x
        """,
        {"r0": 1, "r1": 2, "r2": 0},
        allowed=True,
    ),
    "MP through a plain copy": Case(
        ISA + "8.9.2: only atomics extend an observation",
        """
        gpu0.cta0.t0: st.relaxed.gpu x, 1; st.release.gpu y, 1
        gpu0.cta1.t0: ld.relaxed.gpu r0, y; st.relaxed.gpu y, 2
        gpu0.cta2.t0: ld.acquire.gpu r1, y; ld.relaxed.gpu r2, x
        """,
        {"r0": 1, "r1": 2, "r2": 0},
        allowed=True,
    ),
    "MP, atom as the acquiring read": Case(
        ISA + "8.11.1: with atom instead of red the stale read is forbidden",
        """
        gpu0.cta0.t0: st.weak x, 42; st.release.gpu flag, 1
        gpu0.cta1.t0: atom.relaxed.sys.add r0, flag, 1; fence.acquire.gpu; ld.weak r1, x
        """,
        {"r1": 0, "flag": 2},
        allowed=False,
    ),
    # Cumulativity
    "ISA2 across scopes": Case(
        NVLITMUS + "ISA2.test",
        """
        gpu0.cta0.t0: st.weak x, 42; st.release.cta flag1, 1
        gpu0.cta0.t1: ld.acquire.cta r0=1, flag1; st.release.gpu flag2, 1
        gpu0.cta1.t0: ld.acquire.gpu r1=1, flag2; ld.weak r2, x
        """,
        {"r2": 0},
        allowed=False,
    ),
    "ISA2, first link relaxed": Case(
        ISA + "8.9.5: no synchronization, no base causality",
        """
        gpu0.cta0.t0: st.weak x, 42; st.relaxed.cta flag1, 1
        gpu0.cta0.t1: ld.acquire.cta r0=1, flag1; st.release.gpu flag2, 1
        gpu0.cta1.t0: ld.acquire.gpu r1=1, flag2; ld.weak r2, x
        """,
        {"r2": 0},
        allowed=True,
    ),
    "WRC, strong first write": Case(
        ISA + "8.9.5: causality begins with an observation",
        """
        gpu0.cta0.t0: st.relaxed.sys x, 1
        gpu0.cta1.t0: ld.relaxed.sys r0, x; st.release.sys y, 1
        gpu0.cta2.t0: ld.acquire.sys r1, y; ld.weak r2, x
        """,
        {"r0": 1, "r1": 1, "r2": 0},
        allowed=False,
    ),
    "WRC, weak first write": Case(
        ISA + "8.9.2: a weak write is not observed",
        """
        gpu0.cta0.t0: st.weak x, 1
        gpu0.cta1.t0: ld.relaxed.sys r0, x; st.release.sys y, 1
        gpu0.cta2.t0: ld.acquire.sys r1, y; ld.weak r2, x
        """,
        {"r0": 1, "r1": 1, "r2": 0},
        allowed=True,
    ),
    "causality through an observed store": Case(
        NVLITMUS + "Manual/Cause-base-strong.test",
        """
        gpu0.cta0.t0: st.release.gpu x, 1; st.release.sys f1, 1
        gpu0.cta1.t0: ld.acquire.gpu r1, x; st.weak x, 2; st.release.sys f2, 1
        gpu0.cta2.t0: ld.acquire.sys r2, f2; ld.acquire.sys r3, f2; ld.weak r4, x
        """,
        {"r1": 1, "r2": 1, "r3": 1, "r4": 1},
        allowed=False,
    ),
    "no causality through a weak store": Case(
        NVLITMUS + "Manual/Cause-base-weak.test",
        """
        gpu0.cta0.t0: st.weak x, 1; st.release.sys f1, 1
        gpu0.cta1.t0: ld.acquire.gpu r1, x; st.weak x, 2; st.release.sys f2, 1
        gpu0.cta2.t0: ld.acquire.sys r2, f2; ld.acquire.sys r3, f2; ld.weak r4, x
        """,
        {"r1": 1, "r2": 1, "r3": 1, "r4": 1},
        allowed=True,
    ),
    # CTA barriers
    "MP over a CTA barrier": Case(
        ISA + "8.9.4: bar.sync synchronizes with bar.sync",
        """
        gpu0.cta0.t0: st.weak x, 1; bar.sync
        gpu0.cta0.t1: bar.sync; ld.weak r0, x
        """,
        {"r0": 0},
        allowed=False,
    ),
    "MP over the barrier of a warp": Case(
        ISA + "bar.warp.sync: orders memory among the threads that take part",
        """
        gpu0.cta0.t0: st.weak x, 1; bar.warp.sync
        gpu0.cta0.t1: bar.warp.sync; ld.weak r0, x
        """,
        {"r0": 0},
        allowed=False,
    ),
    "MP over the barriers of two warps": Case(
        ISA + "bar.warp.sync: orders memory among the threads that take part",
        """
        gpu0.cta0.t0: st.weak x, 1; bar.warp.sync
        gpu0.cta0.t32: bar.warp.sync; ld.weak r0, x
        """,
        {"r0": 0},
        allowed=True,
    ),
    "a store behind a CTA barrier": Case(
        DAT3M + "PC-bar-sync-sync-1.litmus",
        """
        gpu0.cta0.t0: ld.weak r0, x; bar.sync
        gpu0.cta0.t1: bar.sync; st.weak x, 1
        """,
        {"r0": 1},
        allowed=False,
    ),
    "SB over a CTA barrier": Case(
        DAT3M + "SB+bar-const-equal.litmus",
        """
        gpu0.cta0.t0: st.weak x, 1; bar.sync; ld.weak r0, y
        gpu0.cta0.t1: st.weak y, 1; bar.sync; ld.weak r1, x
        """,
        {"r0": 0, "r1": 0},
        allowed=False,
    ),
    "SB over the barriers of two CTAs": Case(
        DAT3M + "SB+bar-diff-cta.litmus",
        """
        gpu0.cta0.t0: st.weak x, 1; bar.sync; ld.weak r0, y
        gpu0.cta1.t0: st.weak y, 1; bar.sync; ld.weak r1, x
        """,
        {"r0": 0, "r1": 0},
        allowed=True,
    ),
    "barrier, then release, is cumulative": Case(
        ISA + "8.9.5, note on cumulativity; " + DAT3M + "XF-Barrier-relacq.litmus",
        """
        gpu0.cta0.t1: st.weak x, 1; bar.sync
        gpu0.cta0.t0: bar.sync; st.release.gpu flag, 1
        gpu0.cta1.t0: ld.acquire.gpu r0=1, flag; bar.sync
        gpu0.cta1.t1: bar.sync; ld.weak r1, x
        """,
        {"r1": 0},
        allowed=False,
    ),
    "barrier, then relaxed store": Case(
        DAT3M + "XF-Barrier-rlx.litmus",
        """
        gpu0.cta0.t1: st.weak x, 1; bar.sync
        gpu0.cta0.t0: bar.sync; st.relaxed.gpu flag, 1
        gpu0.cta1.t0: ld.relaxed.gpu r0=1, flag; bar.sync
        gpu0.cta1.t1: bar.sync; ld.weak r1, x
        """,
        {"r1": 0},
        allowed=True,
    ),
    "MP over the wrong turn of a barrier": Case(
        ISA + "8.9.4: the same barrier; its next turn is another",
        """
        gpu0.cta0.t0: bar.sync; st.weak x, 1; bar.sync
        gpu0.cta0.t1: bar.sync; ld.weak r0, x; bar.sync
        """,
        {"r0": 0},
        allowed=True,
    ),
    # Kernels of one stream
    "MP over the end of a kernel": Case(
        ISA + "8.9.4 API synchronization",
        """
        gpu0.k0.cta0.t0: st.weak x, 1
        gpu0.k1.cta0.t0: griddepcontrol.wait; ld.weak r0, x
        """,
        {"r0": 0},
        allowed=False,
    ),
    "MP into a kernel that does not wait": Case(
        ISA + "griddepcontrol: without .wait a dependent launch may overlap",
        """
        gpu0.k0.cta0.t0: st.weak x, 1
        gpu0.k1.cta0.t0: ld.weak r0, x; griddepcontrol.wait
        """,
        {"r0": 0},
        allowed=True,
    ),
    "MP over a kernel that waits": Case(
        ISA + "8.9.4 API synchronization, twice",
        """
        gpu0.k0.cta0.t0: st.weak x, 1
        gpu0.k1.cta0.t0: griddepcontrol.wait
        gpu0.k2.cta0.t0: griddepcontrol.wait; ld.weak r0, x
        """,
        {"r0": 0},
        allowed=False,
    ),
    "MP over a kernel that does not wait": Case(
        ISA + "griddepcontrol: .wait is for the prerequisite grids, here the kernel before",
        """
        gpu0.k0.cta0.t0: st.weak x, 1
        gpu0.k1.cta0.t0: st.weak y, 1
        gpu0.k2.cta0.t0: griddepcontrol.wait; ld.weak r0, x
        """,
        {"r0": 0},
        allowed=True,
    ),
    # fence.sc
    "SB, fence.sc": Case(
        ISA + "8.10.6 Store Buffering",
        SB.format(fence="fence.sc.sys"),
        {"r0": 0, "r1": 0},
        allowed=False,
    ),
    "SB, fence.acq_rel": Case(
        ISA + "8.10.6 Store Buffering, last sentence",
        SB.format(fence="fence.acq_rel.sys"),
        {"r0": 0, "r1": 0},
        allowed=True,
    ),
    "SB, fence.sc of too narrow a scope": Case(
        PAPER + "figure 6: the fences must be morally strong",
        SB.format(fence="fence.sc.cta"),
        {"r0": 0, "r1": 0},
        allowed=True,
    ),
    "SB, two fences each": Case(
        NVLITMUS + "Manual/SB+sc-gpu-multipleFence.test",
        """
        gpu0.cta0.t0: st.weak x, 1; fence.sc.gpu; st.weak x, 2; fence.sc.gpu; ld.weak r1, y
        gpu0.cta1.t0: st.weak y, 1; fence.sc.gpu; st.weak y, 2; fence.sc.gpu; ld.weak r2, x
        """,
        {"r1": 1, "r2": 1},
        allowed=False,
    ),
    "SB of atomics": Case(
        NVLITMUS + "SB_rmw.test",
        """
        gpu0.cta0.t0: atom.acq_rel.gpu.add r1, x, 1; atom.acq_rel.gpu.add r2, y, 1
        gpu0.cta1.t0: atom.acq_rel.gpu.add r3, y, 1; atom.acq_rel.gpu.add r4, x, 1
        """,
        {"r2": 0, "r4": 0},
        allowed=False,
    ),
    "SB of atomics and plain accesses": Case(
        NVLITMUS + "SB_rmw_2.test",
        """
        gpu0.cta0.t0: atom.acq_rel.gpu.add r1, x, 1; atom.acq_rel.gpu.add r2, y, 1
        gpu0.cta1.t0: st.relaxed.gpu y, 1; ld.relaxed.gpu r3, x
        """,
        {"r2": 0, "r3": 0},
        allowed=True,
    ),
    # Many copies of memory
    "IRIW, acquire": Case(
        PAPER + "section 1: PTX is not multi-copy atomic; only fence.sc restores an order",
        IRIW.format(load="ld.acquire.sys", fence=""),
        IRIW_OUTCOME,
        allowed=True,
    ),
    "IRIW, fence.sc": Case(
        ISA + "8.9.3 and 8.9.5: one Fence-SC order, begun by an observation",
        IRIW.format(load="ld.relaxed.sys", fence="fence.sc.sys;"),
        IRIW_OUTCOME,
        allowed=False,
    ),
    # Load buffering
    "LB, without dependencies": Case(
        ISA + "8.10.4 Load Buffering without dependencies",
        """
        gpu0.cta0.t0: ld.weak r0, x; st.weak y, 1
        gpu0.cta1.t0: ld.weak r1, y; st.weak x, 1
        """,
        {"r0": 1, "r1": 1},
        allowed=True,
    ),
    "LB, with dependencies": Case(
        ISA + "8.10.4 Load Buffering with true dependencies",
        """
        gpu0.cta0.t0: ld.weak r0, x; st.weak y, r0
        gpu0.cta1.t0: ld.weak r1, y; st.weak x, r1
        """,
        {"r0": 1, "r1": 1},
        allowed=False,
    ),
    "LB, with branches": Case(
        PAPER + "figure 7, axiom 4: dep holds every dependency on a read",
        """
        gpu0.cta0.t0: ld.weak r0=1, x; st.weak y, 1
        gpu0.cta1.t0: ld.weak r1=1, y; st.weak x, 1
        """,
        {},
        allowed=False,
    ),
    "LB, acquire and release": Case(
        ISA + "8.10.6: a read before a write in causality order does not read it",
        """
        gpu0.cta0.t0: ld.weak r0, x; st.release.sys y, 1
        gpu1.cta0.t0: ld.acquire.sys r1=1, y; st.weak x, 1
        """,
        {"r0": 1},
        allowed=False,
    ),
    "LB, release and relaxed": Case(
        ISA + "8.8: a lone relaxed load is no acquire pattern, and nothing else orders it",
        """
        gpu0.cta0.t0: ld.weak r0, x; st.release.sys y, 1
        gpu1.cta0.t0: ld.relaxed.sys r1, y; st.weak x, 1
        """,
        {"r0": 1, "r1": 1},
        allowed=True,
    ),
    # One location
    "CoRR": Case(
        ISA + "8.10.5 CoRR",
        """
        gpu0.cta0.t0: st.relaxed.sys x, 1
        gpu1.cta0.t0: ld.relaxed.sys r0, x; ld.relaxed.sys r1, x
        """,
        {"r0": 1, "r1": 0},
        allowed=False,
    ),
    "CoRR, second read weak": Case(
        PAPER + "figure 9a",
        """
        gpu0.cta0.t0: st.relaxed.gpu x, 1
        gpu0.cta1.t0: ld.relaxed.gpu r0, x; ld.weak r1, x
        """,
        {"r0": 1, "r1": 0},
        allowed=False,
    ),
    "CoRR, weak": Case(
        DAT3M + "CoRR-weak-weak.litmus; " + ISA + "8.10.5 speaks of morally strong accesses only",
        """
        gpu0.cta0.t0: st.weak x, 1
        gpu0.cta1.t0: ld.weak r0, x; ld.weak r1, x
        """,
        {"r0": 1, "r1": 0},
        allowed=True,
    ),
    "CoRW": Case(
        PAPER + "figure 9b",
        """
        gpu0.cta0.t0: st.relaxed.gpu x, 1
        gpu0.cta1.t0: ld.relaxed.gpu r0, x; st.weak x, 2
        """,
        {"r0": 1, "x": 1},
        allowed=False,
    ),
    "CoWW": Case(
        PAPER + "figure 9d",
        "gpu0.cta0.t0: st.weak x, 1; st.weak x, 2",
        {"x": 1},
        allowed=False,
    ),
    "two readers disagree about two strong writes": Case(
        NVLITMUS + "Manual/Coherence.test",
        """
        gpu0.cta0.t0: st.relaxed.sys x, 1
        gpu0.cta0.t1: st.relaxed.sys x, 2
        gpu0.cta0.t2: ld.acquire.sys r0, x; ld.acquire.sys r1, x
        gpu0.cta0.t3: ld.acquire.sys r2, x; ld.acquire.sys r3, x
        """,
        {"r0": 1, "r1": 2, "r2": 2, "r3": 1},
        allowed=False,
    ),
    "two readers disagree about two weak writes": Case(
        NVLITMUS + "Manual/Coherence-weak.test",
        """
        gpu0.cta0.t0: st.weak x, 1
        gpu0.cta0.t1: st.weak x, 2
        gpu0.cta0.t2: ld.acquire.sys r0, x; ld.acquire.sys r1, x
        gpu0.cta0.t3: ld.acquire.sys r2, x; ld.acquire.sys r3, x
        """,
        {"r0": 1, "r1": 2, "r2": 2, "r3": 1},
        allowed=True,
    ),
    "weak writes in a race have no order": Case(
        NVLITMUS + "Manual/Co-Total-3-threads-scope-same.test",
        """
        gpu0.cta0.t0: st.weak x, 1; st.release.sys f1, 1
        gpu0.cta0.t1: st.weak x, 2; st.release.sys f2, 1
        gpu0.cta0.t2: ld.acquire.sys r0, f1; ld.acquire.sys r1, f2; ld.weak r2, x; ld.weak r3, x
        """,
        {"r0": 1, "r1": 1, "r2": 1, "r3": 2},
        allowed=True,
    ),
    "2+2W, release": Case(
        ISA + "8.9.6: nothing relates the two words",
        """
        gpu0.cta0.t0: st.release.sys x, 1; st.release.sys y, 2
        gpu0.cta1.t0: st.release.sys y, 1; st.release.sys x, 2
        """,
        {"x": 1, "y": 1},
        allowed=True,
    ),
    "2+2W, fence.sc": Case(
        ISA + "8.10.1 with 8.9.3: causality between the writes is their coherence",
        """
        gpu0.cta0.t0: st.relaxed.sys x, 1; fence.sc.sys; st.relaxed.sys y, 2
        gpu0.cta1.t0: st.relaxed.sys y, 1; fence.sc.sys; st.relaxed.sys x, 2
        """,
        {"x": 1, "y": 1},
        allowed=False,
    ),
    "a store overtaken by what it caused": Case(
        ISA + "8.10.1 Coherence",
        """
        gpu0.cta0.t0: st.weak x, 1; st.release.sys flag, 1
        gpu1.cta0.t0: ld.acquire.sys r0=1, flag; st.weak x, 2
        """,
        {"x": 1},
        allowed=False,
    ),
    # Atomicity
    "two increments": Case(
        ISA + "8.10.3 Litmus Test 1",
        """
        gpu0.cta0.t0: atom.relaxed.sys.add r0, x, 1
        gpu0.cta1.t0: atom.relaxed.sys.add r1, x, 1
        """,
        {"x": 1},
        allowed=False,
    ),
    "two increments of too narrow a scope": Case(
        ISA + "8.10.3 Litmus Test 2",
        """
        gpu0.cta0.t0: atom.relaxed.cta.add r0, x, 1
        gpu0.cta1.t0: atom.relaxed.gpu.add r1, x, 1
        """,
        {"x": 1},
        allowed=True,
    ),
    "half of a strong wide store": Case(
        ISA + "8.10.3 Single-Copy Atomicity",
        """
        gpu0.cta0.t0: st.relaxed.sys a|b, 1|1
        gpu1.cta0.t0: ld.relaxed.sys r0, a|b
        """,
        {"r0": "1|0"},
        allowed=False,
    ),
    "half of a weak wide store": Case(
        ISA + "8.10.3: only morally strong operations are atomic",
        """
        gpu0.cta0.t0: st.weak a|b, 1|1
        gpu1.cta0.t0: ld.relaxed.sys r0, a|b
        """,
        {"r0": "1|0"},
        allowed=True,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_published_verdict(name: str) -> None:
    case = CASES[name]
    program = Program(case.program)
    if case.outcome:
        assert program.reachable(), "no execution takes the branches: the verdict says nothing"
    assert program.allows(**case.outcome) == case.allowed, case.source


#: Forbidden by these axioms and by no other. Fence-SC is missing: where causality orders two
#: fences, an order of them the other way only adds constraints, so it decides no outcome alone. And
#: SC-per-location always stands beside another: Causality holds program order since ISA 7.5, and
#: here the read and write of an atomic are one event, so what breaks its atomicity is a cycle too.
DECIDED_BY = {
    "a store overtaken by what it caused": {"Coherence"},
    "two increments": {"Atomicity", "SC-per-location"},
    "half of a strong wide store": {"Atomicity", "SC-per-location"},
    "LB, with branches": {"No-thin-air"},
    "MP, fences": {"Causality"},
    "LB, acquire and release": {"Causality"},
    "CoRR": {"Causality", "SC-per-location"},
}


@pytest.mark.parametrize("name", DECIDED_BY)
def test_an_axiom_that_is_not_asked_decides_nothing(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the evaluator could forbid for a reason of its own."""
    case = CASES[name]
    for axiom in DECIDED_BY[name]:
        monkeypatch.setattr(ptx_model, "AXIOMS", ptx_model.AXIOMS - {axiom})
    assert Program(case.program).allows(**case.outcome)


def test_mixed_size_race_is_reported() -> None:
    """ISA 8.7.2: in such a program the axioms do not apply."""
    writer = "gpu0.cta0.t0: st.release.sys a|b, 1|1"
    assert Program(f"{writer}\ngpu1.cta0.t0: ld.relaxed.sys r0, a").mixed_size_race()
    assert not Program(f"{writer}\ngpu1.cta0.t0: ld.relaxed.sys r0, a|b").mixed_size_race()
    ordered = "gpu1.cta0.t0: ld.acquire.sys r0=1|1, a|b; ld.weak r1, a"
    assert not Program(f"{writer}\n{ordered}").mixed_size_race()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("gpu0.cta0: st.weak x, 1", "no thread of the form"),
        ("gpu0.cta0.t0: st.release x, 1", "not an instruction"),
        ("gpu0.cta0.t0: st.weak.sys x, 1", "not an instruction"),
        ("gpu0.cta0.t0: atom.relaxed.gpu.add r0, x", "wrong number of operands"),
        ("gpu0.cta0.t0: ld.weak r0=1, a|b", "not a value of 2 units"),
        ("gpu0.cta0.t0: ld.weak r0, x; ld.weak r0, x", "loaded twice"),
        ("gpu0.cta0.t0: bar.sync\ngpu0.cta0.t1: st.weak x, 1", "meet at different barriers"),
    ],
)
def test_what_is_no_program(text: str, complaint: str) -> None:
    with pytest.raises(ProgramError, match=complaint):
        Program(text)


def test_what_is_no_question() -> None:
    program = Program("gpu0.cta0.t0: ld.weak r0=1, x; st.weak y, 1")
    with pytest.raises(ProgramError, match="neither a register nor memory"):
        program.allows(r1=1)
    with pytest.raises(ProgramError, match="branch"):
        program.allows(r0=2)
    assert not program.reachable()
