"""Counts per expert that arrive with dispatch, on CPU ranks: as the reference counts, on all ranks,
whatever kernels a round takes; and staging and counters that are left clean.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from moe_nvlink_plugin import MoeAllToAll, rank_mask, reference
from moe_nvlink_plugin.errors import (
    ConfigError,
    ExchangeTimeoutError,
    InputError,
)
from moe_nvlink_plugin.testing import ThreadGroup, run_ranks, try_ranks
from moe_nvlink_plugin.verify import cases, compare
from moe_nvlink_plugin.verify.cases import Case, Inputs
from tests.support import case_list

#: Twelve experts of five ranks; a block of counts is four units.
FIVE = Case(
    name="five ranks",
    tokens=(8, 0, 5, 7, 3),
    num_experts=12,
    top_k=5,
    routing="invalid",
    num_expert_counts=12,
)
#: Counts that do not fill their last unit, several of one token, more units than a CTA has threads.
CASES = (
    FIVE,
    dataclasses.replace(FIVE, name="duplicates", routing="duplicates", num_threads=3),
    dataclasses.replace(FIVE, name="wrapping", routing="wrapping", ids_dtype=torch.int64),
    dataclasses.replace(FIVE, name="no experts", routing="all invalid"),
    dataclasses.replace(FIVE, name="local ids", received_ids="local"),
    Case(name="one rank", tokens=(3,), num_experts=7, num_expert_counts=7),
    Case(
        name="many experts", tokens=(8, 3), num_experts=1000, num_expert_counts=1000, num_threads=2
    ),
    dataclasses.replace(FIVE, name="without a rank", left_out=(1, 3)),
    dataclasses.replace(FIVE, name="alone", left_out=(0, 1, 2, 4), routing="duplicates"),
)

both_kernels = pytest.mark.parametrize("small", [False, True], ids=["bulk", "small"])


def words(layer: MoeAllToAll, name: str) -> torch.Tensor:
    """A region of this rank's workspace."""
    workspace = layer._layer.workspace
    return workspace.region_bytes(workspace.layout.channel_regions(0)[name])


def dispatched(layer: MoeAllToAll, mine: Inputs, **options: Any) -> torch.Tensor:
    """The counts of one round, copied after its combine: nothing overwrites them until then."""
    options["global_scale"] = cases.global_scale(layer.config, "cpu")
    received = layer.dispatch(mine.hidden_states, mine.topk_ids, mine.topk_weights, **options)
    # Until this rank combines, no peer may send more.
    for name in ("expert_counts_staging", "expert_counters"):
        assert not words(layer, name).any(), f"dispatch has left something in {name}"
    layer.combine(layer.combine_input(metadata=received.metadata).zero_(), received.metadata)
    assert received.expert_counts is not None
    return received.expert_counts.clone()


def paddings(inputs: Sequence[Inputs]) -> list[torch.Tensor]:
    """Every third token of each rank is padding."""
    return [torch.arange(len(mine.topk_ids)) % 3 == 1 for mine in inputs]


def expected(case: Case, inputs: Sequence[Inputs], rank: int, *, padded: bool) -> torch.Tensor:
    ids = [mine.topk_ids for mine in inputs]
    masks = paddings(inputs) if padded else None
    return reference.expert_counts(case.config(0), ids, masks, case.active_ranks(rank))


@both_kernels
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_as_the_reference(case: Case, small: bool) -> None:
    """Rounds of other ids, the second with padding."""
    case = dataclasses.replace(case, small=small)
    inputs = [cases.make_inputs(case, seed=seed) for seed in range(3)]

    def rank_main(group: ThreadGroup) -> list[torch.Tensor]:
        found = []
        with MoeAllToAll.create(case.config(group.rank), group) as layer:
            for number, of_round in enumerate(inputs):
                mask = paddings(of_round)[group.rank] if number == 1 else None
                options: dict[str, Any] = {"is_padding": mask}
                options["active_ranks"] = case.mask(group.rank)
                found.append(dispatched(layer, of_round[group.rank], **options))
        return found

    for rank, found in enumerate(run_ranks(case.ep_size, rank_main)):
        for number, counts in enumerate(found):
            wanted = expected(case, inputs[number], rank, padded=number == 1)
            compare.assert_same_bits(counts, wanted, f"{case.name}, rank {rank}, round {number}")


@both_kernels
def test_rows_are_as_without_counts(small: bool) -> None:
    case_list.check_case(dataclasses.replace(FIVE, small=small))


@both_kernels
@pytest.mark.parametrize("recipe", ["fp8_block", "nvfp4"])
def test_with_a_quantiser(recipe: str, small: bool) -> None:
    case = cases.with_formats(dataclasses.replace(FIVE, dtype=torch.bfloat16), recipe)
    test_as_the_reference(case, small)


@both_kernels
def test_what_the_caller_has_counted(small: bool) -> None:
    """Any words, of a number that has nothing to do with the experts; through rounds of both kinds
    on one workspace, beside a layer that counts by itself and one that has no counts.
    """
    given = dataclasses.replace(FIVE, small=small, num_expert_counts=7)
    plain = dataclasses.replace(given, num_expert_counts=0)
    counting = dataclasses.replace(FIVE, small=not small, capacity=9)
    inputs = cases.make_inputs(given)
    blocks = [torch.full((7,), rank - 3, dtype=torch.int32) for rank in range(5)]
    blocks[1][2], blocks[4][6] = 2**31 - 1, -(2**31)

    def rank_main(group: ThreadGroup) -> tuple[torch.Tensor, torch.Tensor]:
        mine = inputs[group.rank]
        first = MoeAllToAll.create(given.config(group.rank), group)
        others = [
            MoeAllToAll.create(case.config(group.rank), group, share_with=first)
            for case in (counting, plain)
        ]
        for turn in range(3):
            mine_now = blocks[group.rank] + turn
            got = dispatched(first, mine, expert_counts=mine_now)
            counted = dispatched(others[0], mine)
            received = others[1].dispatch(mine.hidden_states, mine.topk_ids, mine.topk_weights)
            assert received.expert_counts is None
            others[1].combine(others[1].combine_input().zero_(), received.metadata)
        for layer in (first, *others):
            layer.close()
        return got, counted

    wanted = torch.stack(blocks) + 2
    for rank, (got, counted) in enumerate(run_ranks(5, rank_main)):
        compare.assert_same_bits(got, wanted, f"rank {rank}")
        whole = expected(counting, inputs, rank, padded=False)
        compare.assert_same_bits(counted, whole, f"rank {rank}, which counts")


@both_kernels
def test_a_rank_that_is_left_out_and_late(small: bool) -> None:
    """What it stores into its slice of the staging when the others have gone on counts for nobody:
    it is cleared by nobody either.
    """
    case = Case(name="late", tokens=(3, 4, 2), num_experts=6, num_expert_counts=6, small=small)
    inputs = cases.make_inputs(case)
    masked = dataclasses.replace(case, left_out=(2,))

    def rank_main(group: ThreadGroup) -> torch.Tensor | None:
        with MoeAllToAll.create(case.config(group.rank), group) as layer:
            dispatched(layer, inputs[group.rank])
            staging = words(layer, "expert_counts_staging").view(3, -1)
            group.all_gather_object(None)
            if group.rank == 2:
                group.all_gather_object(None)
                return None
            staging[2].fill_(0x5A)
            mask = rank_mask((0, 1), 3)
            received = layer.dispatch(*inputs[group.rank][:3], active_ranks=mask)
            layer.combine(layer.combine_input().zero_(), received.metadata)
            assert staging[2].eq(0x5A).all()
            group.all_gather_object(None)
            assert received.expert_counts is not None
            return received.expert_counts.clone()

    *found, _late = run_ranks(3, rank_main)
    for rank, counts in enumerate(found):
        assert counts is not None
        wanted = expected(masked, inputs, rank, padded=False)
        assert not wanted[2].any()
        compare.assert_same_bits(counts, wanted, f"rank {rank}")


# What breaks; test_mask_mutants.py has more.


def check_who_sends_no_counts(small: bool) -> None:
    """With a kernel that sends no counts of rank 2: the wait is bounded, and names the rank."""
    case = dataclasses.replace(FIVE, small=small, timeout_s=1.0)
    inputs = cases.make_inputs(case)

    def rank_main(group: ThreadGroup) -> None:
        with MoeAllToAll.create(case.config(group.rank), group) as layer:
            try:
                layer.dispatch(*inputs[group.rank][:3])
            finally:
                group.all_gather_object(None)

    for error in try_ranks(5, rank_main):
        assert isinstance(error, ExchangeTimeoutError), error
        assert (error.phase, error.ranks) == ("dispatch", (2,))


# Bad input.


@pytest.mark.parametrize(
    ("number", "given", "message"),
    [
        (5, None, r"no expert_counts, but num_expert_counts=5; pass 5 int32, or .*=16 \(num_exp"),
        (0, torch.zeros(16, dtype=torch.int32), r"expert_counts of \[16\], but num_expert_coun"),
        (16, torch.zeros(15, dtype=torch.int32), r"expert_counts .*\[15\].*\[16\]"),
        (16, torch.zeros(16), r"expert_counts .*float32.*int32"),
    ],
)
def test_counts_that_do_not_fit(number: int, given: torch.Tensor | None, message: str) -> None:
    case = Case(name="one", tokens=(2,), num_expert_counts=number)
    (mine,) = cases.make_inputs(case)
    (group,) = ThreadGroup.ranks(1)
    with MoeAllToAll.create(case.config(0), group) as layer:
        with pytest.raises(InputError, match=message):
            layer.dispatch(*mine[:3], expert_counts=given)
        right = torch.zeros(number, dtype=torch.int32) if number else None
        layer.dispatch(*mine[:3], expert_counts=right)  # nothing was sent


@pytest.mark.parametrize("number", [-1, 2**16 + 1, True])
def test_a_number_of_counts_out_of_range(number: int) -> None:
    with pytest.raises(ConfigError, match=r"num_expert_counts=.* from 0 to 65536"):
        Case(tokens=(1,), num_expert_counts=number).config(0)
