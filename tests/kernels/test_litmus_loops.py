"""tests/support/litmus_loops.py without a GPU: its kernels on the software GPU; what it tells.

Where the software GPU counts time, a launch without delays shows what an H200 showed on 2026-11-26,
when ptxas had removed the loop that was to delay the warps: one outcome only.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable

import pytest
import torch

from moe_nvlink_plugin.jit import nvrtc
from tests.gpu import test_litmus as on_gpu
from tests.support import litmus_loops
from tests.support.litmus_loops import Loop, Memory
from tests.support.ptx import build, costs
from tests.support.ptx.critical_path import Clock
from tests.support.ptx.machine import Machine
from tests.support.sass import cuobjdump

pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC is not installed")
pytestmark = pytest.mark.long

#: The flag is set before the data are there. At the barrier the software GPU runs other threads.
SWAPPED = """
    gpu0.cta0.t0: st.release.sys flag, 1; bar.sync; st.weak data, 1
    gpu0.cta0.t1: bar.sync
    gpu1.cta0.t0: ld.acquire.sys seen=1, flag; ld.weak copy, data
"""


#: Whose threads meet nothing of one another unless one of them is delayed.
APART = ("cell", "mp_fences", "isa2", "sb_fence_sc", "sb_atomics", "iriw_fence_sc")
#: What the H200 showed of mp_fences: registers r0 and r1, and how often.
FIRST_RUN = {(0, 0): 32, (0, 1): 3145696}


def run(loop: Loop, library: build.Library, seeds: range) -> Counter[int]:
    """Two groups, four turns; the software GPU runs one instruction after the other."""
    outcomes: Counter[int] = Counter()
    for seed in seeds:
        memory = Memory(loop, 2, 4, torch.device("cpu"), together=seed % 2 == 0)
        with Machine(1, seed=seed) as machine:
            _launch(machine, memory, library, memory.parameters(seed, most_delay=3))
        outcomes += memory.outcomes()
    return outcomes


def timed(loop: Loop, library: build.Library, launches: Iterable[tuple[bool, int]]) -> Counter[int]:
    """Two groups, 32 turns of each launch; time passes as the table says of an H200."""
    outcomes: Counter[int] = Counter()
    for seed, (together, most_delay) in enumerate(launches):
        memory = Memory(loop, 2, 32, torch.device("cpu"), together)
        with Machine(1, seed=seed, clock=True) as machine:
            Clock(machine, costs.costs("h200"), keeps_steps=False)
            _launch(machine, memory, library, memory.parameters(seed, most_delay))
        outcomes += memory.outcomes()
    return outcomes


def _launch(
    machine: Machine, memory: Memory, library: build.Library, given: litmus_loops.Parameters
) -> None:
    loop = memory.loop
    for number, tensor in enumerate(memory.tensors()):
        machine.allocate(0, tensor.data_ptr(), tensor.nbytes, f"tensor {number}")
    kernel, ctas = library[f"litmus_{loop.name}"], memory.groups * loop.roles
    machine.launch(0, kernel, ctas, loop.threads, bytes(given))
    machine.run()


def named(name: str) -> Loop:
    return next(loop for loop in on_gpu.LOOPS if loop.name == name)


@pytest.fixture(scope="module")
def library() -> build.Library:
    return build.load(build.ptx_of(litmus_loops.source(on_gpu.LOOPS), "sm_90a"))


@pytest.fixture(scope="module")
def timed_library() -> build.Library:
    return build.load(build.ptx_of(litmus_loops.source(on_gpu.LOOPS), "sm_90a"), clock=True)


@pytest.mark.parametrize("loop", on_gpu.LOOPS, ids=lambda loop: loop.name)
def test_all_runs_of_a_program_are_seen(loop: Loop, library: build.Library) -> None:
    """As many as there are, each with an outcome that the model allows."""
    outcomes = run(loop, library, range(6))
    assert outcomes.total() == 6 * 2 * 4 * litmus_loops.LANES
    litmus_loops.judge(loop, outcomes)
    assert len(outcomes) > 1, "the threads have always come in the same order"


def test_instructions_are_those_of_the_programs(library: build.Library) -> None:
    text = litmus_loops.source([loop for loop in on_gpu.LOOPS if loop.name == "cell"])
    ptx = build.ptx_of(text, "sm_90a")
    for instruction, count in (
        ("st.weak.global.u32", 2),
        ("atom.acq_rel.gpu.global.add.u32", 2),
        ("st.release.sys.global.u32", 1),
        ("ld.acquire.sys.global.u32", 1),
        ("ld.weak.global.u32", 2),
        ("bar.sync 1, 64", 4),
    ):
        assert ptx.count(instruction) == count, instruction


def test_intact_and_weakened() -> None:
    """By the model. The weakened ones are not judged."""
    forbidden = {loop.name: loop.forbidden for loop in on_gpu.LOOPS}
    assert {"mp_release_acquire", "cell", "sb_fence_sc", "mp_fences"} <= {
        name for name, is_forbidden in forbidden.items() if is_forbidden
    }
    weakened = ("mp_relaxed", "cell_relaxed", "cell_relaxed_counter", "sb_fence_acq_rel")
    assert not any(forbidden[name] for name in weakened)


def test_a_forbidden_outcome_is_noticed() -> None:
    """Of a kernel whose stores come in the wrong order, judged as if they did not."""
    swapped = Loop("swapped", SWAPPED, {"copy": 0})
    assert not swapped.forbidden
    kernels = build.load(build.ptx_of(litmus_loops.source([swapped]), "sm_90a"))
    outcomes = run(swapped, kernels, range(20))
    assert swapped.count(outcomes) > 0
    litmus_loops.judge(swapped, outcomes)
    (intact,) = (loop for loop in on_gpu.LOOPS if loop.name == "mp_release_acquire")
    with pytest.raises(AssertionError, match="the PTX model forbids this outcome: mp_release_ac"):
        litmus_loops.judge(intact, outcomes)
    intact = copy.copy(intact)
    intact.outcome = {"seen": 0, "copy": 0}
    intact.forbidden = False
    with pytest.raises(AssertionError, match=r"forbids \[\{'seen': 1, 'copy': 0\}"):
        litmus_loops.judge(intact, outcomes)


def test_a_launch_that_does_nothing_is_noticed() -> None:
    memory = Memory(on_gpu.LOOPS[0], 1, 2, torch.device("cpu"), together=False)
    with pytest.raises(AssertionError, match="128 registers of runs have not been written"):
        memory.outcomes()


def test_who_waits_in_vain_says_so(library: build.Library) -> None:
    """A group whose other CTA does not come: the launch ends."""
    loop = on_gpu.LOOPS[0]
    memory = Memory(loop, 1, 2, torch.device("cpu"), together=False)
    with Machine(1, seed=1) as machine:
        for number, tensor in enumerate(memory.tensors()):
            machine.allocate(0, tensor.data_ptr(), tensor.nbytes, f"tensor {number}")
        given = bytes(memory.parameters(1, 0))
        machine.launch(0, library[f"litmus_{loop.name}"], 1, loop.threads, given)
        machine.run()
    with pytest.raises(AssertionError, match="a CTA has waited in vain"):
        memory.outcomes()


INTACT = [loop for loop in on_gpu.LOOPS if loop.forbidden]


@pytest.mark.parametrize("loop", INTACT, ids=lambda loop: loop.name)
def test_delays_let_runs_tell(loop: Loop, timed_library: build.Library) -> None:
    outcomes = timed(loop, timed_library, on_gpu.LAUNCHES)
    litmus_loops.judge(loop, outcomes)
    litmus_loops.demand_telling(loop, outcomes)


@pytest.mark.parametrize("name", APART)
def test_without_delays_nothing_is_shown(name: str, timed_library: build.Library) -> None:
    """As many launches, all without a delay."""
    outcomes = timed(named(name), timed_library, [(each, 0) for each, _ in on_gpu.LAUNCHES])
    litmus_loops.judge(named(name), outcomes)
    with pytest.raises(AssertionError, match=f"^{name} shows nothing: of 20480 runs at least 20 "):
        litmus_loops.demand_telling(named(name), outcomes)


def test_what_could_tell() -> None:
    """By what an H200 showed first: 32 readers came before the data, none after the flag."""
    base = litmus_loops.BASE
    first = Counter({r0 + base * r1: times for (r0, r1), times in FIRST_RUN.items()})
    loop = named("mp_fences")
    assert loop.telling(first) == {"r0": 32, "r1": 0}
    with pytest.raises(AssertionError, match=r"so many have: \{'r0': 32, 'r1': 0\}"):
        litmus_loops.demand_telling(loop, first)
    enough = first + Counter({0: 4000, 1 + base * 1: 4000})
    litmus_loops.demand_telling(loop, enough)
    assert "could tell: {'r0': 4032, 'r1': 4000}" in litmus_loops.judge(loop, enough)


def test_what_cannot_be_seen_is_not_demanded() -> None:
    """That of a cell one row is fresh is forbidden, whichever; LB has nothing to read but 0."""
    assert list(named("cell").telling(Counter())) == ["copy1"]
    assert list(named("lb_release").telling(Counter())) == ["r0"]
    assert list(named("mp_atom").telling(Counter())) == ["seen", "copy"]
    litmus_loops.demand_telling(named("mp_relaxed"), Counter({0: 1000}))


@pytest.mark.parametrize("architecture", ["sm_90a", "sm_100a"])
def test_delays_are_in_the_machine_code(architecture: str) -> None:
    """ptxas removes a loop that does nothing: both reads of the clock are there, one in a loop."""
    code = nvrtc.compile_cubin(litmus_loops.source([named("mp_fences")]), architecture)
    listing = cuobjdump(code, "-sass")
    assert listing.count("SR_CLOCK") == 2, listing
