"""Ranks that come: after a renewal, or after a mask, on the PTX of the product's kernels.

Two lives, with what each of them must do and what a rank may forget. A forgotten step is found by
the check of races, by a wrong result, or by a wait that ends.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from moe_nvlink_plugin import rank_mask
from moe_nvlink_plugin.exchange import launches
from moe_nvlink_plugin.exchange.kernels import MEET
from moe_nvlink_plugin.jit.header import constants
from moe_nvlink_plugin.verify import cases, compare
from moe_nvlink_plugin.verify.cases import Case
from tests.ptx.test_cases import SMALL
from tests.ptx.test_mutants import PAIRS
from tests.support import emulated
from tests.support.delays import replace_once
from tests.support.emulated import EmulatedRanks
from tests.support.ptx import mutants, survivors
from tests.support.ptx.backend import PtxBackend

pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC is not installed")

CASE = dataclasses.replace(SMALL, tokens=(3, 1, 4, 2), num_experts=11)
ALL, LAST = tuple(range(4)), 3
SEEDS = (1, 2, 3)
CTAS = 2
KINDS = pytest.mark.parametrize("small", [False, True], ids=["bulk", "small"])

#: What a life may forget; None: nothing.
Forgets = str | None


@contextlib.contextmanager
def running(small: bool, seed: int, **options: Any) -> Iterator[tuple[Case, EmulatedRanks]]:
    case = dataclasses.replace(CASE, small=small)
    made = PtxBackend(4, case.config(0), ctas=CTAS, pdl=True, races=True, seed=seed, **options)
    with contextlib.closing(made) as backend:
        config = emulated.config_of(case, timeout_s=1e-3)
        yield case, EmulatedRanks(config, backend, hidden_splits=2)


def round_of(case: Case, ranks: EmulatedRanks, members: int, seed: int = 0) -> None:
    """A round of the first ranks, with a mask of them, against the reference."""
    absent = ALL[members:]
    tokens = (*case.tokens[:members], *[0] * len(absent))
    inputs = cases.make_inputs(case, tokens, seed=seed)
    ranks._masks = [rank_mask(ALL[:members], 4)] * 4
    seen = ranks.run_round(inputs[:members])
    nothing = compare.nothing(case, seen[0])
    masked = emulated.with_ctas(dataclasses.replace(case, left_out=absent), CTAS)
    emulated.check_round(masked, inputs, [*seen, *[nothing] * len(absent)])


def broken_round(case: Case, ranks: EmulatedRanks, begun: int) -> list[Any]:
    """The first ranks begin a round of all; return what must live until it has ended."""
    inputs = cases.make_inputs(case)[:begun]
    ranks._masks = [rank_mask(ALL, 4)] * 4
    received = ranks.dispatch(inputs)
    outputs = [torch.zeros_like(mine.hidden_states) for mine in inputs[:LAST]]
    ranks.combine([each.send_slots for each in received[:LAST]], outputs)
    return [inputs, received, outputs]


def renew(ranks: EmulatedRanks, forgets: Forgets) -> None:
    """Fresh memory for all ranks at the addresses that they have: no rank knows it yet."""
    backend = ranks.backend
    assert isinstance(backend, PtxBackend)
    for rank in ALL:
        address = ranks.memory[rank].data_ptr()
        span = backend.grids._owned.pop(address, None)
        if span is not None:
            backend.grids.machine.release(address)
        if not (rank == 0 and forgets == "fresh memory"):
            ranks.memory[rank].zero_()


def a_newcomer_meets(small: bool, forgets: Forgets, seed: int, **options: Any) -> None:
    """Two ranks that have met; one joins, one more; that one dies before its first round.

    The third comes to the meeting from no round of its own, with the number of a first meeting. The
    two have met before, so their number is larger; it sees that, and comes to theirs.
    """
    with running(small, seed, **options) as (case, ranks):
        round_of(case, ranks, 2)
        for number in (1, 2):
            survivors.meet(ranks, ALL[:2], number)
        renew(ranks, forgets)
        round_of(case, ranks, 3, seed=1)
        renew(ranks, None)
        alive, numbers = ALL[:LAST], {0: 3, 1: 3, 2: 1}
        assert isinstance(ranks.backend, PtxBackend)
        with ranks.backend.grids.queued():
            kept = broken_round(case, ranks, 2)
            if forgets != "first meeting":
                survivors.come_to_meeting(ranks, alive, numbers)
                survivors.come_to_meeting(ranks, alive, 3, come=[2])
        assert all(ranks.control(rank).fault for rank in range(len(kept[0])))
        if forgets != "first meeting":
            survivors.check_all_came(ranks, alive)
        clear(ranks, alive, (LAST,), forgets)
        if forgets != "second meeting":
            survivors.meet(ranks, alive, 4)
        for number in range(2):
            round_of(case, ranks, 3, seed=2 + number)


def a_mask_grows(small: bool, forgets: Forgets, seed: int, **options: Any) -> None:
    """A rank stops in a round, all meet, it is left out for some rounds, and all meet again.

    No memory is fresh. The rank's dispatch of the broken round may be late: only its meeting ends
    what it stores.
    """
    with running(small, seed, **options) as (case, ranks):
        round_of(case, ranks, 4)
        assert isinstance(ranks.backend, PtxBackend)
        with ranks.backend.grids.queued():
            kept = broken_round(case, ranks, 4)
            if forgets != "first meeting":
                survivors.come_to_meeting(ranks, ALL, 1)
        assert any(ranks.control(rank).fault for rank in range(len(kept[2])))
        if forgets != "first meeting":
            survivors.check_all_came(ranks, ALL)
        survivors.clear(ranks, ALL)
        survivors.meet(ranks, ALL, 2)
        for number in range(2):
            round_of(case, ranks, 3, seed=1 + number)
        survivors.meet(ranks, ALL, 3)
        clear(ranks, ALL, (), forgets)
        if forgets != "second meeting":
            survivors.meet(ranks, ALL, 4)
        for number in range(2):
            round_of(case, ranks, 4, seed=3 + number)


def clear(
    ranks: EmulatedRanks, alive: tuple[int, ...], gone: tuple[int, ...], forgets: Forgets
) -> None:
    """All ranks clear their memory, so that epochs begin anew; rank 0 may forget it."""
    survivors.clear(ranks, alive[1:] if forgets == "zeros" else alive, gone)


LIVES: dict[str, Callable[..., None]] = {"joins": a_newcomer_meets, "returns": a_mask_grows}


@KINDS
@pytest.mark.parametrize("life", LIVES)
def test_rounds_are_right_with_those_who_came(life: str, small: bool) -> None:
    for seed in SEEDS:
        LIVES[life](small, None, seed)


@KINDS
@pytest.mark.parametrize(
    ("life", "forgets"),
    [
        ("joins", "fresh memory"),
        ("joins", "first meeting"),
        ("joins", "second meeting"),
        ("joins", "zeros"),
        ("returns", "first meeting"),
        ("returns", "second meeting"),
        ("returns", "zeros"),
    ],
)
def test_a_step_that_is_left_out_is_found(life: str, forgets: str, small: bool) -> None:
    for seed in SEEDS:
        run = functools.partial(LIVES[life], small, forgets, seed)
        assert mutants.report_of([run]) is not None, f"not in the order of seed {seed}"


@KINDS
def test_a_launch_without_the_mask_does_not_wait(small: bool) -> None:
    """As of a graph that was captured before the death: the code is not that of a wait in vain."""
    with running(small, 1) as (case, ranks):
        broken_round(case, ranks, LAST)
        survivors.go_on_without(ranks, LAST)
        ranks._masks = [None] * 4
        ranks.dispatch(cases.make_inputs(case)[:LAST])
        for rank in range(LAST):
            word = int(ranks.control(rank).fault)
            assert (word >> 56, word >> 32 & 0xFFFF) == (constants()["kFaultAhead"], LAST)


def without_the_wait(text: str) -> str:
    """The meeting's kernel, which takes what is there."""
    old = "    if (is_active(args, peer)) {\n      fault = take_entry("
    return replace_once(text, old, old.replace("is_active(args, peer)", "false"))


def of_meet(change: Callable[[str], str]) -> Callable[[str], str]:
    """The change, of that kernel's text alone."""
    return lambda text: change(text) if "MeetShared" in text else text


@pytest.mark.parametrize("life", LIVES)
def test_a_meeting_that_waits_for_nobody_is_found(life: str) -> None:
    change = of_meet(without_the_wait)
    runs = [functools.partial(LIVES[life], False, None, seed, change=change) for seed in SEEDS]
    assert mutants.report_of(runs) is not None


@pytest.mark.parametrize("half", PAIRS["P13"])
@pytest.mark.parametrize("life", LIVES)
def test_both_halves_of_a_meeting_are_needed(life: str, half: str) -> None:
    """Between GPUs: of its number the release, and the acquire."""
    made = launches.variant(CASE.config(0), 0).build(MEET, pdl=True)
    every = [each for each in mutants.mutants_of(made, "sm_90a") if re.search(half, str(each))]
    assert every
    for mutant in every:
        runs = [functools.partial(LIVES[life], False, None, seed) for seed in SEEDS]
        assert mutants.find(mutant, runs) is not None, str(mutant)
