"""FlashInfer's one-sided kernels on the software GPU: rows, ids, slots and sums, bit for bit.

Their source is read in their wheel, which is fetched and never installed.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from benchmarks.moe_comm import peer_ptx
from benchmarks.moe_comm.options import Options
from benchmarks.moe_comm.peer_launches import Geometry
from benchmarks.moe_comm.peer_ptx import Library, Round
from benchmarks.moe_comm.routers import tokens_of
from moe_nvlink_plugin.verify import compare
from moe_nvlink_plugin.verify.cases import Case, Inputs, make_inputs
from tests.integration.common.framework_wheels import left_out
from tests.support import wheels
from tests.support.ptx.machine import Machine, TrapError

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


#: What benchmarks/ptx_clock.py puts a time to, and the kernel that four ranks have of their own.
LONG = (
    Case(
        name="FlashInfer's, eight ranks",
        tokens=(16,) * 8,
        num_experts=256,
        top_k=8,
        hidden_size=7168,
        capacity=16,
        dtype=torch.bfloat16,
        num_threads=2,
    ),
    dataclasses.replace(CASE, name="FlashInfer's, four ranks", tokens=(3, 0, 4, 1), top_k=8),
)


def loaded(architecture: str, case: Case) -> Library:
    try:
        return peer_ptx.load(architecture, peer_ptx.geometry(case))
    except wheels.FetchError as error:
        left_out(error)


@pytest.fixture(scope="module")
def library() -> Library:
    return loaded("sm_90a", CASE)


def check_two_rounds(case: Case, inputs: list[Inputs], library: Library, seed: int) -> None:
    with Machine(case.ep_size, seed=seed) as machine:
        exchange = Round(case, inputs, library, machine)
        for _ in range(2):
            seen = exchange.run()
            compare.check_slots(case, inputs, seen)
            compare.check_received(case, inputs, seen)
            compare.check_combined(case, inputs, seen)


@pytest.mark.parametrize("seed", [1, 2])
def test_two_rounds_bit_for_bit(library: Library, seed: int) -> None:
    check_two_rounds(CASE, make_inputs(CASE), library, seed)


@pytest.mark.long
@pytest.mark.parametrize("architecture", ["sm_90a", "sm_100a", peer_ptx.CAKE])
@pytest.mark.parametrize("case", LONG, ids=lambda case: str(case.name))
def test_what_is_timed_is_right_bit_for_bit(case: Case, architecture: str) -> None:
    library = loaded(architecture, case)
    check_two_rounds(case, make_inputs(case), library, 1)
    if case.num_experts % case.ep_size == 0:
        check_two_rounds(case, perfectly_routed(case), library, 2)


def perfectly_routed(case: Case) -> list[Inputs]:
    asked = Options(
        ep_size=case.ep_size,
        hidden_size=case.hidden_size,
        top_k=case.top_k,
        num_experts=case.num_experts,
        router="perfect",
    )
    tokens = (tokens_of(asked, count, rank) for rank, count in enumerate(case.tokens))
    return [Inputs(*each, extras=()) for each in tokens]


@pytest.mark.parametrize("verb", ["dispatch", "combine"])
def test_who_waits_for_a_peer_in_vain_traps(library: Library, verb: str) -> None:
    """So the flags are waited for, in both verbs: without its peers no rank comes to an end."""
    with Machine(CASE.ep_size, seed=1) as machine:
        exchange = Round(CASE, make_inputs(CASE), library, machine)
        if verb == "combine":
            exchange.run()
        exchange.enqueue(verb, 0)
        with pytest.raises(TrapError, match=f"rank 0 .*{verb.title()}Kernel"):
            machine.run()


def test_a_geometry_without_a_kernel_is_refused() -> None:
    with pytest.raises(ValueError, match="top_k=3 has no kernel; take one of"):
        Geometry(ep_size=2, num_experts=4, top_k=3, hidden_size=8, max_tokens=1).kernels()


def test_a_case_that_no_round_runs_is_refused() -> None:
    with pytest.raises(ValueError, match="unquantised bfloat16 rows"):
        peer_ptx.geometry(Case(name="fp32", tokens=(1,)))
