"""tests/support/litmus_loops.py without a GPU: its kernels on the software GPU; what it tells."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch

from tests.gpu import test_litmus as on_gpu
from tests.support import litmus_loops
from tests.support.litmus_loops import Loop, Memory
from tests.support.ptx import build
from tests.support.ptx.machine import Machine

pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC is not installed")
pytestmark = pytest.mark.timeout(600)

#: The flag is set before the data are there. At the barrier the software GPU runs other threads.
SWAPPED = """
    gpu0.cta0.t0: st.release.sys flag, 1; bar.sync; st.weak data, 1
    gpu0.cta0.t1: bar.sync
    gpu1.cta0.t0: ld.acquire.sys seen=1, flag; ld.weak copy, data
"""


def run(loop: Loop, library: build.Library, seeds: range) -> Counter[int]:
    """Two groups, four turns; the software GPU runs one instruction after the other."""
    outcomes: Counter[int] = Counter()
    for seed in seeds:
        memory = Memory(loop, 2, 4, torch.device("cpu"), together=seed % 2 == 0)
        with Machine(1, seed=seed) as machine:
            for number, tensor in enumerate(memory.tensors()):
                machine.allocate(0, tensor.data_ptr(), tensor.nbytes, f"tensor {number}")
            kernel = library[f"litmus_{loop.name}"]
            given = bytes(memory.parameters(seed, most_delay=3))
            machine.launch(0, kernel, 2 * loop.roles, loop.threads, given)
            machine.run()
        outcomes += memory.outcomes()
    return outcomes


@pytest.fixture(scope="module")
def library() -> build.Library:
    return build.load(build.ptx_of(litmus_loops.source(on_gpu.LOOPS), "sm_90a"))


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
