"""Litmus programs over and over on a GPU: what the PTX model forbids must not be seen.

Each program comes intact and weakened. A weak outcome of the weakened form may be seen or not; the
lines that are printed (pytest -s) say how often: 0 everywhere means that this harness sees none. An
intact form fails, too, if hardly any run could have told: if readers came before every flag, say.
"""

from __future__ import annotations

import ctypes
import functools
from collections import Counter
from typing import Any

import pytest
import torch

from moe_nvlink_plugin import driver
from tests.litmus.test_ptx_model import CASES
from tests.support import emulated, litmus_loops
from tests.support.litmus_loops import Loop, Memory

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(25)]

#: A row, the counter with which the CTAs of dispatch tell each other that they have written, and a
#: cell that a peer polls (P1 to P3); rows are plain stores of other threads of a CTA.
CELL = """
    gpu0.cta0.t0: st.weak row0, 1; bar.sync
    gpu0.cta0.t32: bar.sync; atom.{count}.gpu.add before0=1, count, 1; {store} cell, 1
    gpu0.cta1.t0: st.weak row1, 1; bar.sync
    gpu0.cta1.t32: bar.sync; atom.{count}.gpu.add before1, count, 1
    gpu1.cta0.t0: {load} seen=1, cell; ld.weak copy0, row0; ld.weak copy1, row1
"""
#: One word of data, published by a cell, read after it. No branch holds the second load back.
MP = """
    gpu0.cta0.t0: st.weak data, 1; {store} flag, 1
    gpu1.cta0.t0: {load} seen, flag; ld.weak copy, data
"""

#: (store, load) of the message: intact, and with one or both sides weakened
_MESSAGES = {
    "mp_release_acquire": ("st.release.sys", "ld.acquire.sys"),
    "mp_relaxed": ("st.relaxed.sys", "ld.relaxed.sys"),
    "mp_relaxed_store": ("st.relaxed.sys", "ld.acquire.sys"),
    "mp_relaxed_load": ("st.release.sys", "ld.relaxed.sys"),
    "mp_narrow_store": ("st.release.cta", "ld.acquire.sys"),
    "mp_atom": ("st.release.sys", "atom.acquire.sys.add"),
}
#: (count, store, load) of a cell
_CELLS = {
    "cell": ("acq_rel", "st.release.sys", "ld.acquire.sys"),
    "cell_relaxed_counter": ("relaxed", "st.release.sys", "ld.acquire.sys"),
    "cell_relaxed": ("relaxed", "st.relaxed.sys", "ld.relaxed.sys"),
}
#: name -> (program, outcome)
PROGRAMS: dict[str, tuple[str, dict[str, int]]] = {
    name: (MP.format(store=store, load=load), {"seen": 1, "copy": 0})
    for name, (store, load) in _MESSAGES.items()
} | {
    name: (CELL.format(count=count, store=store, load=load), {"copy0": 1, "copy1": 0})
    for name, (count, store, load) in _CELLS.items()
}
atom, outcome = PROGRAMS["mp_atom"]
PROGRAMS["mp_atom"] = (atom.replace("seen, flag", "seen, flag, 1"), outcome)
#: name -> name of a published program (tests/litmus/test_ptx_model.py)
PUBLISHED = {
    "mp_fences": "MP, fences",
    "mp_barrier_release": "barrier, then release, is cumulative",
    "mp_barrier_relaxed": "barrier, then relaxed store",
    "isa2": "ISA2 across scopes",
    "isa2_relaxed": "ISA2, first link relaxed",
    "sb_fence_sc": "SB, fence.sc",
    "sb_fence_acq_rel": "SB, fence.acq_rel",
    "sb_atomics": "SB of atomics",
    "iriw_fence_sc": "IRIW, fence.sc",
    "iriw_acquire": "IRIW, acquire",
    "lb_release": "LB, acquire and release",
    "lb_weak": "LB, without dependencies",
    "corr": "CoRR",
    "corr_weak": "CoRR, weak",
}


def _published(name: str) -> tuple[str, dict[str, int]]:
    case = CASES[name]
    return case.program, {register: int(value) for register, value in case.outcome.items()}


LOOPS = [
    Loop(name, *given)
    for name, given in (
        *PROGRAMS.items(),
        *((name, _published(published)) for name, published in PUBLISHED.items()),
    )
]
TURNS = 256
#: In cycles of an SM: the warps' longest delays. On an H200 (benchmarks/gpu_constants.py) a relaxed
#: store is seen after 550, a releasing one after 1660; a fence takes 5000 while other SMs store.
DELAYS = (0, 600, 4000, 20_000, 80_000)
#: Launches of each program: (places of one run lie together, the longest delay)
LAUNCHES = [(together, delay) for delay in DELAYS for together in (False, True)]


@functools.cache
def module() -> Any:
    """All kernels, loaded."""
    code = emulated.load_or_compile(litmus_loops.source(LOOPS), driver.device(0).architecture)
    torch.zeros(1, device="cuda")  # torch's context is current from here on
    with driver.on_device(0):
        return driver.call("cuModuleLoadData", code)


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.name)
def test_no_forbidden_outcome(loop: Loop) -> None:
    device = torch.device("cuda:0")
    groups = min(driver.device(0).num_sms, 128) // loop.roles
    with driver.on_device(0):
        function = driver.call("cuModuleGetFunction", module(), f"litmus_{loop.name}".encode())
    outcomes: Counter[int] = Counter()
    for seed, (together, most_delay) in enumerate(LAUNCHES):
        memory = Memory(loop, groups, TURNS, device, together)
        given = memory.parameters(seed, most_delay)
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(given))
        config = emulated.launch_config(
            (groups * loop.roles, 1), loop.threads, _stream(device), pdl=False
        )
        with driver.on_device(0):
            driver.call("cuLaunchKernelEx", config, function, ctypes.addressof(pointers), 0)
        outcomes += memory.outcomes()
    print(litmus_loops.judge(loop, outcomes))
    litmus_loops.demand_telling(loop, outcomes)


def _stream(device: torch.device) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream)
