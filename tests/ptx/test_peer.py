"""FlashInfer's one-sided kernels on the software GPU: rows, ids, slots and sums, bit for bit.

Their source is read in their wheel, which is fetched and never installed.
"""

from __future__ import annotations

import pytest
import torch

from benchmarks.moe_comm import peer_ptx
from benchmarks.moe_comm.peer_launches import Geometry
from benchmarks.moe_comm.peer_ptx import Library, Round
from tests.support import compare, wheels
from tests.support.cases import Case, make_inputs
from tests.support.ptx.machine import Machine, TrapError
from tests.unit.framework_wheels import left_out

pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC is not installed")

#: Slots are given out by an atomic: num_threads=2 says that their order is not the tokens'.
CASE = Case(
    name="FlashInfer's",
    tokens=(3, 0, 4),
    num_experts=10,  # not divisible: the first rank has one more
    top_k=2,
    hidden_size=256,
    capacity=4,
    dtype=torch.bfloat16,
    num_threads=2,
)


@pytest.fixture(scope="module")
def library() -> Library:
    try:
        return peer_ptx.load("sm_90a", peer_ptx.geometry(CASE))
    except wheels.FetchError as error:
        left_out(error)


@pytest.mark.parametrize("seed", [1, 2])
def test_two_rounds_bit_for_bit(library: Library, seed: int) -> None:
    inputs = make_inputs(CASE)
    with Machine(CASE.ep_size, seed=seed) as machine:
        exchange = Round(CASE, inputs, library, machine)
        for _ in range(2):
            seen = exchange.run()
            compare.check_slots(CASE, inputs, seen)
            compare.check_received(CASE, inputs, seen)
            compare.check_combined(CASE, inputs, seen)


@pytest.mark.parametrize("verb", ["dispatch", "combine"])
def test_who_waits_for_a_peer_in_vain_traps(library: Library, verb: str) -> None:
    """So the flags are waited for, in both verbs: without its peers no rank comes to an end."""
    with Machine(CASE.ep_size, seed=1) as machine:
        exchange = Round(CASE, make_inputs(CASE), library, machine)
        if verb == "combine":
            exchange.run()
        exchange.enqueue(0, getattr(exchange, verb)(0))
        with pytest.raises(TrapError, match=f"rank 0 .*{verb.title()}Kernel"):
            machine.run()


def test_a_geometry_without_a_kernel_is_refused() -> None:
    with pytest.raises(ValueError, match="top_k=3 has no kernel; take one of"):
        Geometry(ep_size=2, num_experts=4, top_k=3, hidden_size=8, max_tokens=1).kernels()


def test_a_case_that_no_round_runs_is_refused() -> None:
    with pytest.raises(ValueError, match="unquantised bfloat16 rows"):
        peer_ptx.geometry(Case(name="fp32", tokens=(1,)))
