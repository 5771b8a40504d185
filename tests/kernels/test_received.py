"""What dispatch leaves for experts to read: ids, weights, and rows that are padding."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from moe_nvlink_plugin import MoeAllToAll, reference
from moe_nvlink_plugin.config import local_expert_range
from moe_nvlink_plugin.testing import ThreadGroup, run_ranks
from tests.support import cases, compare
from tests.support.cases import Case, Inputs, Seen

#: What a layer may say of its ids; 5 is the id of an expert, 2**31 - 1 of none.
RECEIVED_IDS: tuple[str | int, ...] = ("elsewhere", "local", -1, 5, 2**31 - 1)

IDS_CASES = tuple(
    dataclasses.replace(case, name=f"{case.name}, {ids} ids", received_ids=ids)
    for number, case in enumerate(cases.CASES)
    for ids in ("elsewhere", RECEIVED_IDS[1 + number % (len(RECEIVED_IDS) - 1)])
    if case.num_channels == 1
)


@pytest.mark.parametrize("case", IDS_CASES, ids=lambda case: case.name)
def test_ids_and_weights_as_experts_read_them(case: Case) -> None:
    compare.check_case(case)


def test_every_kind_of_id_is_tried() -> None:
    """The cases above have absent ids beside local ones, weights that are not 0, empty slots."""
    case = next(case for case in IDS_CASES if case.name.startswith("invalid ids, elsewhere"))
    inputs = cases.make_inputs(case)
    ids = [mine.topk_ids for mine in inputs]
    received = reference.dispatch(case.config(0), ids, [[mine.topk_weights] for mine in inputs])
    for target, sources in enumerate(received):
        first, end = local_expert_range(case.num_experts, case.ep_size, target)
        for rows in sources:
            is_local = (rows.topk_ids >= first) & (rows.topk_ids < end)
            assert bool(is_local.any(1).all())
            assert bool(rows.is_absent.any())
            assert torch.equal(rows.is_absent, ~is_local)
            assert bool(rows.payloads[0][rows.is_absent].any())
    assert any(len(mine.topk_ids) < case.capacity for mine in inputs)


@pytest.mark.parametrize("recipe", [None, *cases.RECIPES])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_ids_of_quantised_rows(recipe: str | None, num_threads: int) -> None:
    base = Case(
        name="quantised",
        tokens=(8, 3, 0, 5),
        top_k=6,
        received_ids="elsewhere",
        routing="invalid",
        num_threads=num_threads,
    )
    compare.check_case(cases.with_formats(base, recipe))


def test_a_wrong_id_would_be_noticed() -> None:
    case = next(case for case in IDS_CASES if case.name.startswith("invalid ids, elsewhere"))
    inputs = cases.make_inputs(case)
    (seen,) = cases.run_case(case, 1)
    compare.check_received(case, inputs, seen)
    for other in ("local", 3):
        with pytest.raises(AssertionError):
            compare.check_received(dataclasses.replace(case, received_ids=other), inputs, seen)
    spoilt = [rank._replace(payloads=(rank.payloads[0] + 1.0, *rank.payloads[1:])) for rank in seen]
    with pytest.raises(AssertionError):
        compare.check_received(case, inputs, spoilt)


# Padding.

MASKS = {
    "none": lambda count: torch.zeros(count, dtype=torch.bool),
    "the last": lambda count: torch.arange(count) >= count // 2,
    "every other": lambda count: torch.arange(count) % 2 == 0,
    "all": lambda count: torch.ones(count, dtype=torch.bool),
}


def _padded_round(layer: MoeAllToAll, inputs: Inputs, mask: torch.Tensor) -> Seen:
    config, hidden = layer.config, inputs.hidden_states
    received = layer.dispatch(
        hidden,
        inputs.topk_ids,
        inputs.topk_weights,
        inputs.extras,
        global_scale=cases.global_scale(config, "cpu"),
        is_padding=mask,
    )
    rows = cases.activations(config, received.hidden_states, received.scales)
    ids = cases.global_ids(config, received.topk_ids)
    made = cases.expert_rows(config, config.ep_rank, rows, ids, received.topk_weights)
    payloads = tuple(payload.clone() for payload in cases.received_payloads(received))
    seen = (received.recv_counts.clone(), received.topk_ids.clone(), payloads)
    slots = received.metadata.send_slots.clone()
    return Seen(*seen, slots, layer.combine(made, received.metadata))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("recipe", [None, "fp8_token", "nvfp4"])
def test_padding_is_not_sent(recipe: str | None, mask: str) -> None:
    """As if all ids of the masked tokens were -1, and no kernel reads the tokens' rows."""
    base = Case(name="padded", tokens=(8, 5, 0), top_k=3, received_ids="elsewhere", num_threads=2)
    case = cases.with_formats(base, recipe)
    inputs = cases.make_inputs(case)
    masks = [MASKS[mask](len(mine.topk_ids)) for mine in inputs]
    ids = reference.without_padding([mine.topk_ids for mine in inputs], masks)
    without = [mine._replace(topk_ids=own) for mine, own in zip(inputs, ids, strict=True)]
    spoilt = [mine._replace(hidden_states=mine.hidden_states.clone()) for mine in inputs]
    for mine, padding in zip(spoilt, masks, strict=True):
        mine.hidden_states[padding] = float("nan")

    def rank_main(group: ThreadGroup) -> Seen:
        with MoeAllToAll.create(case.config(group.rank), group) as layer:
            return _padded_round(layer, spoilt[group.rank], masks[group.rank])

    seen = run_ranks(case.ep_size, rank_main)
    compare.check_slots(case, without, seen)
    compare.check_received(case, without, seen)
    compare.check_combined(case, without, seen)
    for rank, padding in zip(seen, masks, strict=True):
        assert not rank.combined[padding].any()


def test_a_mask_is_read_at_each_call() -> None:
    """As a captured graph does: the same tensor, other values."""
    case = Case(name="changed", tokens=(4,))
    (inputs,) = cases.make_inputs(case)
    mask = torch.zeros(4, dtype=torch.bool)

    def rank_main(group: ThreadGroup) -> list[int]:
        counts = []
        with MoeAllToAll.create(case.config(group.rank), group) as layer:
            for padding in (0, 3, 1):
                mask[:] = torch.arange(4) < padding
                counts.append(int(_padded_round(layer, inputs, mask).recv_counts.sum()))
        return counts

    assert run_ranks(1, rank_main) == [[4, 1, 3]]
