"""Combine of small batches, whose rows travel as units, against the oracle.

The ranks go from verb to verb together; test_small_dispatch.py has rounds of ranks that run apart.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

import pytest
import torch

from moe_nvlink_plugin.jit.header import constants
from moe_nvlink_plugin.verify import cases, compare
from moe_nvlink_plugin.verify.cases import Case, Inputs
from tests.support import emulated
from tests.support.emulated import EmulatedRanks

BF16, FP32 = torch.bfloat16, torch.float32
TIMEOUT, COMBINE_PHASE = constants()["kFaultTimeout"], constants()["kPhaseCombine"]


@contextlib.contextmanager
def ranks_of(
    case: Case, *, ctas: int = 1, senders: int = 0, timeout_s: float = 10.0
) -> Iterator[EmulatedRanks]:
    """senders: CTAs that send; 0: all CTAs have both roles."""
    case = dataclasses.replace(case, small=True)
    with contextlib.closing(emulated.make_backend("cpu", case, ctas=ctas)) as backend:
        ranks = EmulatedRanks(emulated.config_of(case, timeout_s), backend)
        ranks._senders = senders
        yield ranks


def dispatched(ranks: EmulatedRanks, inputs: Sequence[Inputs]) -> list[torch.Tensor]:
    """A dispatch and the experts; returns send_slots of each rank."""
    received = ranks.dispatch(inputs)
    for rank, mine in enumerate(received):
        ranks.poison_combine(rank)
        ranks.experts(rank, mine)
        ranks.poison(rank)
    return [mine.send_slots for mine in received]


def combined(
    ranks: EmulatedRanks, slots: Sequence[torch.Tensor], inputs: Sequence[Inputs]
) -> list[torch.Tensor]:
    outputs = [torch.full_like(mine.hidden_states, 77.0) for mine in inputs]
    ranks.combine(slots, outputs)
    return outputs


def check_combined(case: Case, mine: Inputs, rank: int, output: torch.Tensor) -> None:
    expected = compare.expected_combined(case, mine, rank)
    compare.assert_same_bits(
        compare.one_nan(output), compare.one_nan(expected), f"{case.name}: rank {rank}"
    )


def check_rounds(case: Case, **options: int) -> None:
    """Rounds of both parities with other tokens and counts; the first with the case's."""
    with ranks_of(case, **options) as ranks:
        of_rounds = [cases.make_inputs(case), *emulated.varying_inputs(case, 2)]
        for number, inputs in enumerate(of_rounds):
            with emulated.naming(f"round {number}"):
                seen = ranks.run_round(inputs)
                emulated.check_round(dataclasses.replace(case, small=True), inputs, seen)


@pytest.mark.parametrize(
    ("hidden_size", "dtype"),
    [
        *((size, FP32) for size in (1, 2, 3, 4, 101, 767, 768, 769, 1031)),
        *((size, BF16) for size in (2, 4, 6, 8, 10, 12, 14, 100, 1790, 1792, 1794, 3592)),
    ],
)
def test_rows_that_end_within_a_unit(hidden_size: int, dtype: torch.dtype) -> None:
    """And rows of several parts, the last of which has few units."""
    check_rounds(Case(tokens=(4, 0, 8), hidden_size=hidden_size, dtype=dtype))


@pytest.mark.parametrize(("ctas", "senders"), [(2, 0), (2, 1), (5, 3), (7, 1), (3, 3)])
def test_every_share_of_the_work(ctas: int, senders: int) -> None:
    """Roles apart and together; more CTAs than parts, and many more parts than CTAs."""
    for case in (
        Case(tokens=(1, 0), top_k=2, hidden_size=6, dtype=BF16),
        Case(tokens=(8, 1, 5), top_k=3, hidden_size=3592, dtype=BF16),
        Case(tokens=(8, 8, 8), routing="to one rank", hidden_size=800),
    ):
        check_rounds(case, ctas=ctas, senders=senders)


def test_output_at_an_odd_address() -> None:
    """A caller's rows of 2-byte elements that begin between two words."""
    case = Case(tokens=(8, 3), hidden_size=26, dtype=BF16)
    inputs = cases.make_inputs(case)
    with ranks_of(case) as ranks:
        slots = dispatched(ranks, inputs)
        outputs = [torch.zeros(mine.hidden_states.numel() + 1, dtype=BF16) for mine in inputs]
        views = [output[1:].view(-1, case.hidden_size) for output in outputs]
        assert all(view.data_ptr() % 4 == 2 for view in views)
        ranks.combine(slots, views)
    for rank, mine in enumerate(inputs):
        check_combined(case, mine, rank, views[rank])


def staging(ranks: EmulatedRanks, rank: int, parity: str) -> torch.Tensor:
    region = ranks.regions[0][f"{parity}_combine_staging"]
    return ranks.memory[rank, region.offset : region.offset + region.size_bytes]


def test_stagings_are_zero_after_their_round() -> None:
    """Each unit is cleared by its reader; a round uses the staging of its epoch's parity only."""
    case = Case(tokens=(8, 5, 0), hidden_size=101, top_k=5)
    with ranks_of(case, ctas=3) as ranks:
        for number, inputs in enumerate(emulated.varying_inputs(case, 4)):
            mine, other = ("odd", "even") if number % 2 == 0 else ("even", "odd")
            slots = dispatched(ranks, inputs)
            for rank in range(case.ep_size):
                staging(ranks, rank, other).fill_(0x55)
            combined(ranks, slots, inputs)
            ranks.check_faults()
            for rank in range(case.ep_size):
                assert not staging(ranks, rank, mine).any(), f"round {number}: rank {rank}"
                assert bool((staging(ranks, rank, other) == 0x55).all())
                staging(ranks, rank, other).zero_()


def faults(ranks: EmulatedRanks) -> list[tuple[int, int, int, int]]:
    """{code, phase, peer, epoch} of each rank."""
    words = [int(ranks.control(rank).fault) for rank in range(ranks.config.ep_size)]
    return [(w >> 56, w >> 48 & 0xFF, w >> 32 & 0xFFFF, w & 0xFFFFFFFF) for w in words]


def wait_for(ranks: EmulatedRanks, timeout_s: float) -> None:
    """How long verbs wait from now on; a short time is fit where nobody will come."""
    ranks.configs = [dataclasses.replace(each, timeout_s=timeout_s) for each in ranks.configs]


@pytest.mark.parametrize(("ctas", "senders"), [(1, 0), (3, 1)])
def test_a_rank_that_does_not_combine(ctas: int, senders: int) -> None:
    """The others name it, store NaN where its rows are missing, and send nothing from then on."""
    case = Case(tokens=(8, 5, 8), top_k=3, hidden_size=800)
    inputs = cases.make_inputs(case)
    with ranks_of(case, ctas=ctas, senders=senders, timeout_s=60.0) as ranks:
        slots = dispatched(ranks, inputs)
        wait_for(ranks, 1.0)
        outputs = combined(ranks, slots[:2], inputs[:2])
        wanted = (TIMEOUT, COMBINE_PHASE, 2, 1)
        assert faults(ranks) == [wanted, wanted, (0, 0, 0, 0)]
        for rank, output in enumerate(outputs):
            waits = (slots[rank] // case.capacity == 2).any(1)
            assert bool(waits.any())
            assert bool(output[waits].isnan().all())
        # The late rank: the others had sent it their rows before they gave it up.
        wait_for(ranks, 60.0)
        late = combined(ranks, slots, inputs)
        assert all(bool(output.isnan().all()) for output in late[:2])
        check_combined(case, inputs[2], 2, late[2])


def test_after_a_fault_nothing_is_sent() -> None:
    """A failed rank's rows are NaN at once; its peers wait for it in vain, and the first fault of
    each stays.
    """
    case = Case(tokens=(4, 4), top_k=4)
    inputs = cases.make_inputs(case)
    with ranks_of(case, ctas=4, timeout_s=60.0) as ranks:  # some CTA's first part is for rank 1
        slots = dispatched(ranks, inputs)
        wait_for(ranks, 1.0)
        region = ranks.regions[0]["local"]
        first = TIMEOUT << 56 | COMBINE_PHASE << 48 | 1 << 32 | 7
        ranks.memory[0, region.offset : region.offset + 8].view(torch.int64).fill_(first)
        outputs = combined(ranks, slots, inputs)
        assert faults(ranks) == [(TIMEOUT, COMBINE_PHASE, 1, 7), (TIMEOUT, COMBINE_PHASE, 0, 1)]
        assert bool(outputs[0].isnan().all())
        assert bool(outputs[1][(slots[1] // case.capacity == 0).any(1)].isnan().all())
        received = staging(ranks, 1, "odd")
        assert not received[: received.numel() // 2].any()
        assert int(ranks.control(0).combined_epoch) == 0
