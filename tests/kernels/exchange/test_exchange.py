"""Dispatch and combine against the oracle, bit for bit: named cases, then drawn ones.

tests/gpu/test_cases.py runs the same list on a GPU.
"""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moe_nvlink_plugin import MoeAllToAll
from moe_nvlink_plugin.jit import header, host
from moe_nvlink_plugin.plugins import find_recipe
from moe_nvlink_plugin.testing import ThreadGroup, run_ranks
from moe_nvlink_plugin.verify import cases, compare
from moe_nvlink_plugin.verify.cases import RECIPES, Case
from tests.support import case_list, delays
from tests.support.case_list import CASES, RECIPE_CASES


def name_of(case: Case) -> str:
    return case.name.replace(" ", "-")


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_named_case(case: Case) -> None:
    case_list.check_case(case)


@pytest.mark.parametrize(("ranks", "top_k"), [(8, 8), (12, 20)])
def test_many_partial_rows(ranks: int, top_k: int) -> None:
    """More than four of them: other sums of present_rows.h than the named cases meet."""
    tokens = tuple((7 * rank + 1) % 9 for rank in range(ranks))
    case = Case(tokens=tokens, num_experts=8 * ranks, top_k=top_k, hidden_size=27)
    case_list.check_case(case)


@pytest.mark.parametrize("case", RECIPE_CASES, ids=name_of)
def test_named_case_quantised(case: Case) -> None:
    """In one round by the kernel, in the next by the caller: the same bits, those of the recipe."""
    case_list.check_case(case)


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_are_quantised_in_the_kernel(recipe: str) -> None:
    """By their own quantiser, and not by torch in front of it: the cases above would not notice."""
    case = cases.with_formats(Case(name="fused", tokens=(3, 2)), recipe)

    def rank_main(group: ThreadGroup) -> int:
        with MoeAllToAll.create(case.config(group.rank), group) as layer:
            received = cases.dispatch(layer, cases.make_inputs(case)[group.rank])
            layer.combine(layer.combine_input(), received.metadata)
            return int(layer._layer.channel(0)._dispatch_args.quantiser)

    never = AssertionError("torch has quantised")
    with mock.patch.object(type(find_recipe(case.config(0))), "quantise", side_effect=never):
        assert run_ranks(2, rank_main) == [header.quantisers()[recipe]] * 2


@st.composite
def drawn_cases(draw: st.DrawFn) -> Case:
    capacity = draw(st.integers(1, 9))
    ep_size = draw(st.integers(1, 8))
    num_experts = draw(st.integers(1, 40))
    routing = draw(st.sampled_from(sorted(cases.ROUTINGS)))
    if routing == "none to rank 1" and (ep_size == 1 or num_experts == 1):
        routing = "distinct"
    int64 = routing == "wrapping" or draw(st.booleans())
    extra = st.tuples(
        st.sampled_from([torch.uint8, torch.int16, torch.float32, torch.int64]),
        st.tuples(st.integers(1, 70)),
    )
    case = Case(
        tokens=tuple(draw(st.lists(st.integers(0, capacity), min_size=ep_size, max_size=ep_size))),
        num_experts=num_experts,
        top_k=draw(st.integers(1, 22)),
        hidden_size=draw(st.integers(1, 140)),
        capacity=capacity,
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])),
        routing=routing,
        ids_dtype=torch.int64 if int64 else torch.int32,
        extras=tuple(draw(st.lists(extra, max_size=7))),
        num_channels=draw(st.integers(1, 2)),
        num_threads=draw(st.sampled_from([1, 1, 1, 3])),
        seed=draw(st.integers(0, 2**20)),
    )
    formats = draw(st.sampled_from(["bf16", "bf16", *cases.COMBINE_FORMATS]))
    return cases.with_formats(case, draw(st.sampled_from([None, None, *RECIPES])), formats)


@settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(drawn_cases())
def test_drawn_case(case: Case) -> None:
    case_list.check_case(case)


def test_same_bits_though_the_slots_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three CTAs race for slots, made to sleep here and there: the order of the slots changes from
    round to round, and no output bit does.
    """
    library = delays.randomly_delayed()
    monkeypatch.setattr(host, "load", lambda _text: library)
    case = Case(name="race", tokens=(64, 64), capacity=64, num_threads=3, top_k=6, hidden_size=96)
    rounds = case_list.run_case(case, rounds=20)
    orders = {str([rank.send_slots.tolist() for rank in seen]) for seen in rounds}
    assert len(orders) > 1, "the CTAs never raced"
    for seen in rounds:
        for mine, first in zip(seen, rounds[0], strict=True):
            compare.assert_same_bits(mine.combined, first.combined, "race")


# The comparison itself can fail.


@pytest.mark.parametrize("damage", ["payload", "scale", "id", "count", "combined", "empty slot"])
def test_the_checks_notice(damage: str) -> None:
    case = Case(name="damaged", tokens=(5, 5))
    if damage == "scale":
        case = cases.with_formats(case, "nvfp4")
    inputs = cases.make_inputs(case)
    (seen,) = case_list.run_case(case, rounds=1)
    rank = seen[1]
    if damage == "payload":
        rank.payloads[1][0, 3] += 1
    elif damage == "scale":
        rank.payloads[2].view(torch.uint8)[0, 1] ^= 1
    elif damage == "id":
        rank.topk_ids[0, 0] = 15 - rank.topk_ids[0, 0]
    elif damage == "count":
        rank.recv_counts[0] += 1
    elif damage == "empty slot":
        rank.topk_ids[case.capacity - 1, 0] = 0
    else:
        rank.combined[0, 0] = torch.nextafter(rank.combined[0, 0], torch.tensor(9e9))
    check = compare.check_combined if damage == "combined" else compare.check_received
    with pytest.raises(AssertionError, match="damaged"):
        check(case, inputs, seen)
