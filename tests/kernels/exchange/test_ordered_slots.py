"""Slots in the order of the tokens (ordered_slots.h), with as many threads as would mix them up."""

from __future__ import annotations

import dataclasses

import pytest

from moe_nvlink_plugin.errors import ConfigError, MismatchError
from moe_nvlink_plugin.verify.cases import Case, make_inputs, with_formats
from moe_nvlink_plugin.verify.compare import assert_same_bits, check_slots
from tests.core.exchange.small_exchange import config
from tests.support.case_list import CASES, check_case, run_case

MANY = Case(
    name="many threads", tokens=(200, 131, 0), capacity=200, num_experts=10, num_threads=4, top_k=6
)
DRAWN = [
    MANY,
    dataclasses.replace(MANY, name="invalid ids", routing="invalid"),
    dataclasses.replace(MANY, name="duplicates", routing="duplicates"),
    dataclasses.replace(MANY, name="small experts", num_experts=2, top_k=2),
    dataclasses.replace(MANY, name="left out", left_out=(1,)),
    dataclasses.replace(MANY, name="odd number of ranks", tokens=(64, 64, 64, 64, 64)),
    with_formats(dataclasses.replace(MANY, hidden_size=256), "fp8_token", "fp8_block"),
]


def ordered(case: Case) -> Case:
    return dataclasses.replace(case, ordered_slots=True)


@pytest.mark.parametrize("case", DRAWN, ids=lambda case: str(case.name))
def test_rows_lie_in_the_order_of_their_tokens(case: Case) -> None:
    """And combine's bits are those of any order."""
    check_case(ordered(case))


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case.name))
def test_every_case(case: Case) -> None:
    check_case(dataclasses.replace(ordered(case), num_threads=3))


def test_received_rows_lie_as_in_small_batches() -> None:
    """The kernels for small batches have no other order."""
    case = dataclasses.replace(MANY, tokens=(60, 31, 0), capacity=60)
    large, small = run_case(ordered(case)), run_case(dataclasses.replace(case, small=True))
    for rank, (one, other) in enumerate(zip(large[-1], small[-1], strict=True)):
        assert_same_bits(one.send_slots, other.send_slots, f"slots of rank {rank}")
        assert_same_bits(one.topk_ids, other.topk_ids, f"ids at rank {rank}")


def test_without_it_threads_mix_them_up() -> None:
    """So that the tests above could fail: a thread alone takes every fourth token."""
    inputs = make_inputs(MANY)
    (seen,) = run_case(MANY, rounds=1)
    check_slots(MANY, inputs, seen)
    with pytest.raises(MismatchError, match="order of the slots"):
        check_slots(ordered(MANY), inputs, seen)


def test_it_must_be_a_bool() -> None:
    with pytest.raises(ConfigError, match="ordered_slots=1 must be True or False"):
        config(ordered_slots=1)
