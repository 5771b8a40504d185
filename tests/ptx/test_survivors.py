"""Ranks that go on without another one, on the PTX of the product's kernels."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import pytest
import torch

from moe_nvlink_plugin import rank_mask
from moe_nvlink_plugin.jit.header import constants, structs
from moe_nvlink_plugin.verify import cases
from tests.ptx.test_cases import ARCHITECTURES, SMALL
from tests.support import emulated
from tests.support.emulated import EmulatedRanks
from tests.support.ptx import survivors
from tests.support.ptx.backend import PtxBackend

pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC is not installed")

CASE = dataclasses.replace(SMALL, tokens=(3, 1, 4, 0), num_experts=11)


def broken_round(ranks: EmulatedRanks, inputs: list[cases.Inputs]) -> None:
    """The last rank never comes; the others end both verbs, with a fault that names it."""
    here, last = inputs[:-1], len(inputs) - 1
    received = ranks.dispatch(here)
    ranks.combine(
        [mine.send_slots for mine in received], [torch.zeros_like(m.hidden_states) for m in here]
    )
    for rank in range(last):
        word = int(ranks.control(rank).fault)
        assert (word >> 48 & 0xFF, word >> 32 & 0xFFFF) == (constants()["kPhaseDispatch"], last)


@pytest.mark.parametrize("small", [False, True], ids=["bulk", "small"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_others_go_on(architecture: str, small: bool) -> None:
    """A good round, a broken one, and two without the rank that broke it."""
    case = dataclasses.replace(CASE, small=small)
    masked = emulated.with_ctas(dataclasses.replace(case, left_out=(3,)), 2)
    options: dict[str, Any] = {"architecture": architecture, "ctas": 2, "pdl": True, "races": True}
    inputs = cases.make_inputs(case)
    with contextlib.closing(PtxBackend(4, case.config(0), **options)) as backend:
        ranks = EmulatedRanks(emulated.config_of(case, timeout_s=1e-3), backend, hidden_splits=2)
        ranks.run_round(inputs)
        broken_round(ranks, inputs)
        survivors.go_on_without(ranks, 3)
        for _ in range(2):
            survivors.check_round(masked, inputs, ranks)


@pytest.mark.parametrize("small", [False, True], ids=["bulk", "small"])
def test_a_rank_that_leaves(small: bool) -> None:
    """It may still read when the others' experts write (P14). Both combines pull."""
    case = cases.with_formats(CASE, None, "fp8_block" if small else "bf16")
    case = dataclasses.replace(case, small=small, dtype=torch.bfloat16)
    masked = emulated.with_ctas(dataclasses.replace(case, left_out=(3,)), 2)
    inputs = cases.make_inputs(case)
    options: dict[str, Any] = {"ctas": 2, "pdl": True, "races": True}
    with contextlib.closing(PtxBackend(4, case.config(0), **options)) as backend:
        ranks = EmulatedRanks(emulated.config_of(case, timeout_s=1e-3), backend, hidden_splits=2)
        ranks.run_round(inputs)
        assert all(ranks.control(rank).read_epoch == 1 for rank in range(4))
        ranks._masks = [rank_mask(range(3), 4)] * 4
        survivors.check_round(masked, inputs, ranks)
        ranks._masks = [rank_mask(range(2), 4)] * 4
        set_read_epoch(ranks, 2, 1)
        ranks.dispatch(inputs[:2])
        for rank in range(2):
            word = int(ranks.control(rank).fault)
            assert (word >> 48 & 0xFF, word >> 32 & 0xFFFF) == (constants()["kPhaseCombine"], 2)


def set_read_epoch(ranks: EmulatedRanks, rank: int, epoch: int) -> None:
    """As if the rank had died in its last combine."""
    place = ranks.regions[0]["local"].offset + structs()["LocalControl"].read_epoch.offset
    ranks.memory[rank, place : place + 8].view(torch.int64).fill_(epoch)


@pytest.mark.parametrize("small", [False, True], ids=["bulk", "small"])
def test_a_launch_without_the_mask_does_not_wait(small: bool) -> None:
    """As of a graph that was captured before the death: the code is not that of a wait in vain."""
    case = dataclasses.replace(CASE, small=small)
    inputs = cases.make_inputs(case)
    with contextlib.closing(PtxBackend(4, case.config(0), ctas=2, pdl=True)) as backend:
        ranks = EmulatedRanks(emulated.config_of(case, timeout_s=1e-3), backend)
        broken_round(ranks, inputs)
        survivors.go_on_without(ranks, 3)
        ranks._masks = [None] * 4
        ranks.dispatch(inputs[:3])
        for rank in range(3):
            word = int(ranks.control(rank).fault)
            assert (word >> 56, word >> 32 & 0xFFFF) == (constants()["kFaultAhead"], 3)
