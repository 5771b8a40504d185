"""The evaluator against litmus tests whose verdict somebody else has published.

"allowed" and "forbidden" mean the outcome named with the program. Where a source gives a condition
that must hold, the outcome here is its negation, one test per way to negate it.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest

from tests.litmus import ptx_model
from tests.litmus.program import Program, ProgramError, Step

#: A case: its name and verdict, who says so, and the program. ISA is PTX ISA 9; Lustig the paper of
#: ASPLOS 2019; mixedproxy the folder tests/ of NVlabs/mixedproxy; Dat3M its litmus/PTX/Manual/.
PUBLISHED = """
# Message passing

MP, fences: forbidden r0=1, r1=0
  ISA 8.10.6 Message Passing
  gpu0.cta0.t0: st.weak data, 1; fence.acq_rel.sys; st.relaxed.sys flag, 1
  gpu1.cta0.t0: ld.relaxed.sys r0, flag; fence.acq_rel.sys; ld.weak r1, data

MP, release and acquire, two GPUs: forbidden r1=0
  mixedproxy Manual/MP-sys.test
  gpu0.cta0.t0: st.weak data, 1; st.release.sys flag, 1
  gpu1.cta1.t0: ld.acquire.sys r0=1, flag; ld.weak r1, data

MP, different scopes that hold each other: forbidden r1=0
  mixedproxy Manual/MP-cta-gpu.test
  gpu0.cta0.t0: st.weak data, 1; st.release.cta flag, 1
  gpu0.cta0.t1: ld.acquire.gpu r0=1, flag; ld.weak r1, data

MP, relaxed store: allowed r1=0
  ISA 8.8: a lone relaxed store is no release pattern
  gpu0.cta0.t0: st.weak data, 1; st.relaxed.sys flag, 1
  gpu0.cta1.t0: ld.acquire.sys r0=1, flag; ld.weak r1, data

MP, relaxed load: allowed r1=0
  ISA 8.8: a lone relaxed load is no acquire pattern
  gpu0.cta0.t0: st.weak data, 1; st.release.sys flag, 1
  gpu0.cta1.t0: ld.relaxed.sys r0=1, flag; ld.weak r1, data

MP, scope of the store too narrow: allowed r1=0
  ISA 8.7: each scope must include the other's thread
  gpu0.cta0.t0: st.weak data, 1; st.release.cta flag, 1
  gpu0.cta1.t0: ld.acquire.sys r0=1, flag; ld.weak r1, data

MP, scope of the load too narrow: allowed r1=0
  ISA 8.7: each scope must include the other's thread
  gpu0.cta0.t0: st.weak data, 1; st.release.sys flag, 1
  gpu1.cta1.t0: ld.acquire.gpu r0=1, flag; ld.weak r1, data

MP, relaxed look before the acquire: forbidden r1=0
  ISA 8.8: ld.relaxed [M]; ld.acquire [M] is an acquire pattern
  gpu0.cta0.t0: st.weak data, 1; st.release.sys flag, 1
  gpu1.cta0.t0: ld.relaxed.sys look=1, flag; ld.acquire.sys r0, flag; ld.weak r1, data

MP, a relaxed store behind the release: forbidden r1=2, r3=0
  ISA 8.8: st.release [M]; st.relaxed [M] is a release pattern
  gpu0.cta0.t0: st.weak y, 1; st.release.sys x, 1; st.relaxed.sys x, 2
  gpu1.cta0.t0: ld.relaxed.sys r1, x; fence.acq_rel.sys; ld.weak r3, y

MP, a release of another word: allowed r1=2, r3=0
  ISA 8.8: both operations of a release pattern are on M
  gpu0.cta0.t0: st.weak y, 1; st.release.sys z, 1; st.relaxed.sys x, 2
  gpu1.cta0.t0: ld.relaxed.sys r1, x; fence.acq_rel.sys; ld.weak r3, y

MP, an acquire of another word: allowed r1=2, r3=0
  ISA 8.8: both operations of an acquire pattern are on M
  gpu0.cta0.t0: st.weak y, 1; fence.acq_rel.sys; st.relaxed.sys x, 2
  gpu1.cta0.t0: ld.relaxed.sys r1, x; ld.acquire.sys r2, z; ld.weak r3, y

MP, the acquire sees a later relaxed store: forbidden r3=0
  ISA 8.8: the strong read before an acquire of the same word is part of the pattern
  gpu0.cta0.t0: st.weak data, 1; st.release.sys flag, 1
  gpu0.cta1.t0: ld.relaxed.sys r0=1, flag; st.relaxed.sys flag, 2
  gpu1.cta0.t0: ld.relaxed.sys r1=1, flag; ld.acquire.sys r2=2, flag; ld.weak r3, data

MP, the acquire sees only a later relaxed store: allowed r3=0
  ISA 8.9.2: a plain store does not extend an observation
  gpu0.cta0.t0: st.weak data, 1; st.release.sys flag, 1
  gpu0.cta1.t0: ld.relaxed.sys r0=1, flag; st.relaxed.sys flag, 2
  gpu1.cta0.t0: ld.acquire.sys r2=2, flag; ld.weak r3, data

MP, a narrow release before a wide store: allowed r1=2, r3=0
  ISA 8.9.4: the first operation of one pattern and the last of the other
  gpu0.cta0.t0: st.weak y, 1; st.release.cta x, 1; st.relaxed.sys x, 2
  gpu1.cta0.t0: ld.acquire.sys r1, x; ld.weak r3, y

MP over a part of the flag: allowed r1=0
  ISA 8.7: morally strong accesses overlap completely
  gpu0.cta0.t0: st.weak data, 1; st.release.sys a|b, 1|1
  gpu1.cta0.t0: ld.acquire.sys r0=1, a; ld.weak r1, data

# Chains through atomics

MP through a relaxed atomic: forbidden r0=1, r1=2, r2=0
  ISA 8.9.2 (observation through atomics); Dat3M MP+RMW.litmus
  gpu0.cta0.t0: st.relaxed.gpu x, 1; st.release.gpu y, 1
  gpu0.cta1.t0: atom.relaxed.gpu.add r0, y, 1
  gpu0.cta2.t0: ld.acquire.gpu r1, y; ld.relaxed.gpu r2, x

MP through an atomic of too narrow a scope: allowed r0=1, r1=2, r2=0
  ISA 8.9.2: each link of the observation is morally strong
  gpu0.cta0.t0: st.relaxed.gpu x, 1; st.release.gpu y, 1
  gpu0.cta1.t0: atom.relaxed.cta.add r0, y, 1
  gpu0.cta2.t0: ld.acquire.gpu r1, y; ld.relaxed.gpu r2, x

MP through a plain copy: allowed r0=1, r1=2, r2=0
  ISA 8.9.2: only atomics extend an observation
  gpu0.cta0.t0: st.relaxed.gpu x, 1; st.release.gpu y, 1
  gpu0.cta1.t0: ld.relaxed.gpu r0, y; st.relaxed.gpu y, 2
  gpu0.cta2.t0: ld.acquire.gpu r1, y; ld.relaxed.gpu r2, x

MP, atom as the acquiring read: forbidden r1=0, flag=2
  ISA 8.11.1: with atom instead of red the stale read is forbidden
  gpu0.cta0.t0: st.weak x, 42; st.release.gpu flag, 1
  gpu0.cta1.t0: atom.relaxed.sys.add r0, flag, 1; fence.acquire.gpu; ld.weak r1, x

# Cumulativity

ISA2 across scopes: forbidden r2=0
  mixedproxy ISA2.test
  gpu0.cta0.t0: st.weak x, 42; st.release.cta flag1, 1
  gpu0.cta0.t1: ld.acquire.cta r0=1, flag1; st.release.gpu flag2, 1
  gpu0.cta1.t0: ld.acquire.gpu r1=1, flag2; ld.weak r2, x

ISA2, first link relaxed: allowed r2=0
  ISA 8.9.5: no synchronization, no base causality
  gpu0.cta0.t0: st.weak x, 42; st.relaxed.cta flag1, 1
  gpu0.cta0.t1: ld.acquire.cta r0=1, flag1; st.release.gpu flag2, 1
  gpu0.cta1.t0: ld.acquire.gpu r1=1, flag2; ld.weak r2, x

WRC, strong first write: forbidden r0=1, r1=1, r2=0
  ISA 8.9.5: causality begins with an observation
  gpu0.cta0.t0: st.relaxed.sys x, 1
  gpu0.cta1.t0: ld.relaxed.sys r0, x; st.release.sys y, 1
  gpu0.cta2.t0: ld.acquire.sys r1, y; ld.weak r2, x

WRC, weak first write: allowed r0=1, r1=1, r2=0
  ISA 8.9.2: a weak write is not observed
  gpu0.cta0.t0: st.weak x, 1
  gpu0.cta1.t0: ld.relaxed.sys r0, x; st.release.sys y, 1
  gpu0.cta2.t0: ld.acquire.sys r1, y; ld.weak r2, x

causality through an observed store: forbidden r1=1, r2=1, r3=1, r4=1
  mixedproxy Manual/Cause-base-strong.test
  gpu0.cta0.t0: st.release.gpu x, 1; st.release.sys f1, 1
  gpu0.cta1.t0: ld.acquire.gpu r1, x; st.weak x, 2; st.release.sys f2, 1
  gpu0.cta2.t0: ld.acquire.sys r2, f2; ld.acquire.sys r3, f2; ld.weak r4, x

no causality through a weak store: allowed r1=1, r2=1, r3=1, r4=1
  mixedproxy Manual/Cause-base-weak.test
  gpu0.cta0.t0: st.weak x, 1; st.release.sys f1, 1
  gpu0.cta1.t0: ld.acquire.gpu r1, x; st.weak x, 2; st.release.sys f2, 1
  gpu0.cta2.t0: ld.acquire.sys r2, f2; ld.acquire.sys r3, f2; ld.weak r4, x

# CTA barriers

MP over a CTA barrier: forbidden r0=0
  ISA 8.9.4: bar.sync synchronizes with bar.sync
  gpu0.cta0.t0: st.weak x, 1; bar.sync
  gpu0.cta0.t1: bar.sync; ld.weak r0, x

MP over the barrier of a warp: forbidden r0=0
  ISA bar.warp.sync: orders memory among the threads that take part
  gpu0.cta0.t0: st.weak x, 1; bar.warp.sync
  gpu0.cta0.t1: bar.warp.sync; ld.weak r0, x

MP over the barriers of two warps: allowed r0=0
  ISA bar.warp.sync: orders memory among the threads that take part
  gpu0.cta0.t0: st.weak x, 1; bar.warp.sync
  gpu0.cta0.t32: bar.warp.sync; ld.weak r0, x

a store behind a CTA barrier: forbidden r0=1
  Dat3M PC-bar-sync-sync-1.litmus
  gpu0.cta0.t0: ld.weak r0, x; bar.sync
  gpu0.cta0.t1: bar.sync; st.weak x, 1

SB over a CTA barrier: forbidden r0=0, r1=0
  Dat3M SB+bar-const-equal.litmus
  gpu0.cta0.t0: st.weak x, 1; bar.sync; ld.weak r0, y
  gpu0.cta0.t1: st.weak y, 1; bar.sync; ld.weak r1, x

SB over the barriers of two CTAs: allowed r0=0, r1=0
  Dat3M SB+bar-diff-cta.litmus
  gpu0.cta0.t0: st.weak x, 1; bar.sync; ld.weak r0, y
  gpu0.cta1.t0: st.weak y, 1; bar.sync; ld.weak r1, x

barrier, then release, is cumulative: forbidden r1=0
  ISA 8.9.5, note on cumulativity; Dat3M XF-Barrier-relacq.litmus
  gpu0.cta0.t1: st.weak x, 1; bar.sync
  gpu0.cta0.t0: bar.sync; st.release.gpu flag, 1
  gpu0.cta1.t0: ld.acquire.gpu r0=1, flag; bar.sync
  gpu0.cta1.t1: bar.sync; ld.weak r1, x

barrier, then relaxed store: allowed r1=0
  Dat3M XF-Barrier-rlx.litmus
  gpu0.cta0.t1: st.weak x, 1; bar.sync
  gpu0.cta0.t0: bar.sync; st.relaxed.gpu flag, 1
  gpu0.cta1.t0: ld.relaxed.gpu r0=1, flag; bar.sync
  gpu0.cta1.t1: bar.sync; ld.weak r1, x

MP over the wrong turn of a barrier: allowed r0=0
  ISA 8.9.4: the same barrier; its next turn is another
  gpu0.cta0.t0: bar.sync; st.weak x, 1; bar.sync
  gpu0.cta0.t1: bar.sync; ld.weak r0, x; bar.sync

# Kernels of one stream

MP over the end of a kernel: forbidden r0=0
  ISA 8.9.4 API synchronization
  gpu0.k0.cta0.t0: st.weak x, 1
  gpu0.k1.cta0.t0: griddepcontrol.wait; ld.weak r0, x

MP into a kernel that does not wait: allowed r0=0
  ISA griddepcontrol: without .wait a dependent launch may overlap
  gpu0.k0.cta0.t0: st.weak x, 1
  gpu0.k1.cta0.t0: ld.weak r0, x; griddepcontrol.wait

MP over a kernel that waits: forbidden r0=0
  ISA 8.9.4 API synchronization, twice
  gpu0.k0.cta0.t0: st.weak x, 1
  gpu0.k1.cta0.t0: griddepcontrol.wait
  gpu0.k2.cta0.t0: griddepcontrol.wait; ld.weak r0, x

MP over a kernel that does not wait: allowed r0=0
  ISA griddepcontrol: .wait is for the prerequisite grids, here the kernel before
  gpu0.k0.cta0.t0: st.weak x, 1
  gpu0.k1.cta0.t0: st.weak y, 1
  gpu0.k2.cta0.t0: griddepcontrol.wait; ld.weak r0, x

# fence.sc

SB, fence.sc: forbidden r0=0, r1=0
  ISA 8.10.6 Store Buffering
  gpu0.cta0.t0: st.weak x, 1; fence.sc.sys; ld.weak r0, y
  gpu0.cta1.t0: st.weak y, 1; fence.sc.sys; ld.weak r1, x

SB, fence.acq_rel: allowed r0=0, r1=0
  ISA 8.10.6 Store Buffering, last sentence
  gpu0.cta0.t0: st.weak x, 1; fence.acq_rel.sys; ld.weak r0, y
  gpu0.cta1.t0: st.weak y, 1; fence.acq_rel.sys; ld.weak r1, x

SB, fence.sc of too narrow a scope: allowed r0=0, r1=0
  Lustig figure 6: the fences must be morally strong
  gpu0.cta0.t0: st.weak x, 1; fence.sc.cta; ld.weak r0, y
  gpu0.cta1.t0: st.weak y, 1; fence.sc.cta; ld.weak r1, x

SB, beside a fence.sc of too narrow a scope: forbidden r0=0, r1=0
  ISA 8.9.3: any two fences that are morally strong are ordered, whatever stands between them
  gpu0.cta0.t0: st.weak x, 1; fence.sc.sys; ld.weak r0, y
  gpu0.cta1.t0: fence.sc.cta; st.weak z, 1
  gpu0.cta2.t0: st.weak y, 1; fence.sc.sys; ld.weak r1, x

SB of three threads, fence.sc: forbidden r0=0, r1=0, r2=0
  ISA 8.10.6 Store Buffering, in a ring: 8.9.3 has no cycle of fences
  gpu0.cta0.t0: st.weak x, 1; fence.sc.sys; ld.weak r0, y; ld.weak r3, z
  gpu0.cta1.t0: st.weak y, 1; fence.sc.sys; ld.weak r1, z; ld.weak r4, x
  gpu0.cta2.t0: st.weak z, 1; fence.sc.sys; ld.weak r2, x; ld.weak r5, y

SB, two fences each: forbidden r1=1, r2=1
  mixedproxy Manual/SB+sc-gpu-multipleFence.test
  gpu0.cta0.t0: st.weak x, 1; fence.sc.gpu; st.weak x, 2; fence.sc.gpu; ld.weak r1, y
  gpu0.cta1.t0: st.weak y, 1; fence.sc.gpu; st.weak y, 2; fence.sc.gpu; ld.weak r2, x

SB of atomics: forbidden r2=0, r4=0
  mixedproxy SB_rmw.test
  gpu0.cta0.t0: atom.acq_rel.gpu.add r1, x, 1; atom.acq_rel.gpu.add r2, y, 1
  gpu0.cta1.t0: atom.acq_rel.gpu.add r3, y, 1; atom.acq_rel.gpu.add r4, x, 1

SB of atomics and plain accesses: allowed r2=0, r3=0
  mixedproxy SB_rmw_2.test
  gpu0.cta0.t0: atom.acq_rel.gpu.add r1, x, 1; atom.acq_rel.gpu.add r2, y, 1
  gpu0.cta1.t0: st.relaxed.gpu y, 1; ld.relaxed.gpu r3, x

# Many copies of memory

IRIW, acquire: allowed r0=1, r1=0, r2=1, r3=0
  Lustig section 1: PTX is not multi-copy atomic; only fence.sc restores an order
  gpu0.cta0.t0: st.relaxed.sys x, 1
  gpu1.cta0.t0: ld.acquire.sys r0, x;  ld.acquire.sys r1, y
  gpu2.cta0.t0: ld.acquire.sys r2, y;  ld.acquire.sys r3, x
  gpu3.cta0.t0: st.relaxed.sys y, 1

IRIW, fence.sc: forbidden r0=1, r1=0, r2=1, r3=0
  ISA 8.9.3 and 8.9.5: one Fence-SC order, begun by an observation
  gpu0.cta0.t0: st.relaxed.sys x, 1
  gpu1.cta0.t0: ld.relaxed.sys r0, x; fence.sc.sys; ld.relaxed.sys r1, y
  gpu2.cta0.t0: ld.relaxed.sys r2, y; fence.sc.sys; ld.relaxed.sys r3, x
  gpu3.cta0.t0: st.relaxed.sys y, 1

# Load buffering

LB, without dependencies: allowed r0=1, r1=1
  ISA 8.10.4 Load Buffering without dependencies
  gpu0.cta0.t0: ld.weak r0, x; st.weak y, 1
  gpu0.cta1.t0: ld.weak r1, y; st.weak x, 1

LB, with dependencies: forbidden r0=1, r1=1
  ISA 8.10.4 Load Buffering with true dependencies
  gpu0.cta0.t0: ld.weak r0, x; st.weak y, r0
  gpu0.cta1.t0: ld.weak r1, y; st.weak x, r1

LB, with branches: forbidden any
  Lustig figure 7, axiom 4: dep holds every dependency on a read
  gpu0.cta0.t0: ld.weak r0=1, x; st.weak y, 1
  gpu0.cta1.t0: ld.weak r1=1, y; st.weak x, 1

LB, acquire and release: forbidden r0=1
  ISA 8.10.6: a read before a write in causality order does not read it
  gpu0.cta0.t0: ld.weak r0, x; st.release.sys y, 1
  gpu1.cta0.t0: ld.acquire.sys r1=1, y; st.weak x, 1

LB, release and relaxed: allowed r0=1, r1=1
  ISA 8.8: a lone relaxed load is no acquire pattern, and nothing else orders it
  gpu0.cta0.t0: ld.weak r0, x; st.release.sys y, 1
  gpu1.cta0.t0: ld.relaxed.sys r1, y; st.weak x, 1

# One location

CoRR: forbidden r0=1, r1=0
  ISA 8.10.5 CoRR
  gpu0.cta0.t0: st.relaxed.sys x, 1
  gpu1.cta0.t0: ld.relaxed.sys r0, x; ld.relaxed.sys r1, x

CoRR, second read weak: forbidden r0=1, r1=0
  Lustig figure 9a
  gpu0.cta0.t0: st.relaxed.gpu x, 1
  gpu0.cta1.t0: ld.relaxed.gpu r0, x; ld.weak r1, x

CoRR, weak: allowed r0=1, r1=0
  Dat3M CoRR-weak-weak.litmus; ISA 8.10.5 speaks of morally strong accesses only
  gpu0.cta0.t0: st.weak x, 1
  gpu0.cta1.t0: ld.weak r0, x; ld.weak r1, x

CoRW: forbidden r0=1, x=1
  Lustig figure 9b
  gpu0.cta0.t0: st.relaxed.gpu x, 1
  gpu0.cta1.t0: ld.relaxed.gpu r0, x; st.weak x, 2

CoWW: forbidden x=1
  Lustig figure 9d
  gpu0.cta0.t0: st.weak x, 1; st.weak x, 2

two readers disagree about two strong writes: forbidden r0=1, r1=2, r2=2, r3=1
  mixedproxy Manual/Coherence.test
  gpu0.cta0.t0: st.relaxed.sys x, 1
  gpu0.cta0.t1: st.relaxed.sys x, 2
  gpu0.cta0.t2: ld.acquire.sys r0, x; ld.acquire.sys r1, x
  gpu0.cta0.t3: ld.acquire.sys r2, x; ld.acquire.sys r3, x

two readers disagree about two weak writes: allowed r0=1, r1=2, r2=2, r3=1
  mixedproxy Manual/Coherence-weak.test
  gpu0.cta0.t0: st.weak x, 1
  gpu0.cta0.t1: st.weak x, 2
  gpu0.cta0.t2: ld.acquire.sys r0, x; ld.acquire.sys r1, x
  gpu0.cta0.t3: ld.acquire.sys r2, x; ld.acquire.sys r3, x

weak writes in a race have no order: allowed r0=1, r1=1, r2=1, r3=2
  mixedproxy Manual/Co-Total-3-threads-scope-same.test
  gpu0.cta0.t0: st.weak x, 1; st.release.sys f1, 1
  gpu0.cta0.t1: st.weak x, 2; st.release.sys f2, 1
  gpu0.cta0.t2: ld.acquire.sys r0, f1; ld.acquire.sys r1, f2; ld.weak r2, x; ld.weak r3, x

2+2W, release: allowed x=1, y=1
  ISA 8.9.6: nothing relates the two words
  gpu0.cta0.t0: st.release.sys x, 1; st.release.sys y, 2
  gpu0.cta1.t0: st.release.sys y, 1; st.release.sys x, 2

2+2W, fence.sc: forbidden x=1, y=1
  ISA 8.10.1 with 8.9.3: causality between the writes is their coherence
  gpu0.cta0.t0: st.relaxed.sys x, 1; fence.sc.sys; st.relaxed.sys y, 2
  gpu0.cta1.t0: st.relaxed.sys y, 1; fence.sc.sys; st.relaxed.sys x, 2

a store overtaken by what it caused: forbidden x=1
  ISA 8.10.1 Coherence
  gpu0.cta0.t0: st.weak x, 1; st.release.sys flag, 1
  gpu1.cta0.t0: ld.acquire.sys r0=1, flag; st.weak x, 2

# Atomicity

two increments: forbidden x=1
  ISA 8.10.3 Litmus Test 1
  gpu0.cta0.t0: atom.relaxed.sys.add r0, x, 1
  gpu0.cta1.t0: atom.relaxed.sys.add r1, x, 1

two increments of too narrow a scope: allowed x=1
  ISA 8.10.3 Litmus Test 2
  gpu0.cta0.t0: atom.relaxed.cta.add r0, x, 1
  gpu0.cta1.t0: atom.relaxed.gpu.add r1, x, 1

half of a strong wide store: forbidden r0=1|0
  ISA 8.10.3 Single-Copy Atomicity
  gpu0.cta0.t0: st.relaxed.sys a|b, 1|1
  gpu1.cta0.t0: ld.relaxed.sys r0, a|b

half of a weak wide store: allowed r0=1|0
  ISA 8.10.3: only morally strong operations are atomic
  gpu0.cta0.t0: st.weak a|b, 1|1
  gpu1.cta0.t0: ld.relaxed.sys r0, a|b
"""


class Case(NamedTuple):
    """A program, an outcome, whether the model allows it, and who says so."""

    source: str
    program: str
    outcome: dict[str, int | str]
    allowed: bool


def cases() -> dict[str, Case]:
    found = {}
    for block in PUBLISHED.strip().split("\n\n"):
        if block.startswith("#"):
            continue
        first, source, *program = (line.strip() for line in block.splitlines())
        name, _, verdict = first.partition(": ")
        word, _, said = verdict.partition(" ")
        assert word in ("allowed", "forbidden"), first
        outcome: dict[str, int | str] = {}
        for place, _, value in (one.partition("=") for one in said.split(", ") if one != "any"):
            outcome[place] = int(value) if value.isdigit() else value
        found[name] = Case(source, "\n".join(program), outcome, word == "allowed")
    return found


CASES = cases()


@pytest.mark.parametrize("name", CASES)
def test_published_verdict(name: str) -> None:
    case = CASES[name]
    program = Program(case.program)
    if case.outcome:
        assert program.reachable(), "no execution takes the branches: the verdict says nothing"
    assert program.allows(**case.outcome) == case.allowed, case.source


@pytest.mark.parametrize("name", CASES)
def test_interleavings_are_allowed(name: str) -> None:
    """A model that allows too little says "forbidden" for nothing. Of the outcomes that the tests
    above ask for, few are interleavings. Those of SB with three threads take each order of fences.
    """
    program = Program(CASES[name].program)
    interleaved = interleavings(program)
    assert bool(interleaved) == program.reachable()
    assert interleaved <= program.outcomes()


Held = dict[str, tuple[int, ...]]
Outcome = tuple[tuple[int, ...], ...]


def interleavings(program: Program) -> set[Outcome]:
    """What the registers hold after each way to run one step after another."""
    places = {step.event.place for step in program.steps} - {None}
    threads = [
        [i for i, step in enumerate(program.steps) if step.event.place == place] for place in places
    ]
    initial = {unit: 0 for step in program.steps for unit in step.event.units}
    found: set[Outcome] = set()
    reached: set[str] = set()

    def run(left: list[list[int]], memory: dict[str, int], held: Held) -> None:
        now = str((left, sorted(memory.items()), sorted(held.items())))
        if now in reached:
            return
        reached.add(now)
        if not any(left):
            found.add(tuple(held[name] for name in program.registers))
        for number, steps in enumerate(left):
            if not steps or _waits(program, steps[0], left):
                continue
            after = _after(program.steps[steps[0]], memory, held)
            if after is not None:
                run([*left[:number], steps[1:], *left[number + 1 :]], *after)

    run(threads, initial, {})
    return found


def _waits(program: Program, step: int, left: list[list[int]]) -> bool:
    """Whether others must come to a barrier, or to the end of their kernel, before this step."""
    return any(program.skeleton.barriers[other] >> step & 1 for thread in left for other in thread)


def _after(step: Step, memory: dict[str, int], held: Held) -> tuple[dict[str, int], Held] | None:
    """Memory and registers behind a step; None: its branch goes another way."""
    units = step.event.units
    before = tuple(memory[unit] for unit in units)
    if any(want not in (None, have) for want, have in zip(step.expected, before, strict=False)):
        return None
    if step.register:
        held = held | {step.register: before}
    written = [held[text][0] if text in held else int(text) for text in step.written]
    if step.event.kind == "add":
        written = [before[0] + written[0]]
    return memory | dict(zip(units, written, strict=False)), held


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
