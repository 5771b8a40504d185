"""Combine with `add` and `scale`: round(scale * sum + add), bit for bit as the reference says.

On the kernels' text for CPU ranks, and through the product; tests/ptx and tests/gpu have such cases
too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from typing import Any

import pytest
import torch

from moe_nvlink_plugin import MoeAllToAll
from moe_nvlink_plugin.jit.header import constants
from moe_nvlink_plugin.testing import ThreadGroup, run_ranks
from moe_nvlink_plugin.verify import cases, compare
from moe_nvlink_plugin.verify.cases import ADDS, COMBINE_FORMATS, Case
from tests.core.exchange.small_exchange import alone
from tests.support import case_list, emulated

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
#: None; one that is no number of float32; one that makes +0.0 of -0.0.
SCALES = (1.0, 1 / 3, -2.5)
#: Tokens without an expert, ranks that are named twice, a rank without tokens.
RAGGED = Case(name="ragged", tokens=(8, 0, 5, 3), top_k=5, routing="invalid", hidden_size=70)


def check(case: Case, **options: Any) -> None:
    """The pull combine and the one for small batches."""
    emulated.check_case("cpu", case, ctas=3, hidden_splits=2, **options)
    emulated.check_case("cpu", dataclasses.replace(case, small=True), ctas=3, **options)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize(("add", "scale"), list(itertools.product(ADDS, SCALES)))
def test_every_finish(add: str, scale: float, dtype: torch.dtype) -> None:
    check(dataclasses.replace(RAGGED, dtype=dtype, add=add, scale=scale))


@pytest.mark.parametrize("top_k", [1, 2, 3, 4, 5, 6, 7, 8, 13, 22, 32])
def test_every_top_k(top_k: int) -> None:
    """Each number of partial rows has a sum of its own on CPU ranks."""
    for dtype in (BF16, FP16, FP32):
        case = Case(tokens=(3, 8, 0, 4, 5), num_experts=max(16, top_k), top_k=top_k, dtype=dtype)
        check(dataclasses.replace(case, hidden_size=38, add="in place", scale=1 / 3))


@pytest.mark.parametrize("hidden_size", [1, 2, 3, 16, 101, 768, 1538])
def test_every_width(hidden_size: int) -> None:
    for dtype, add in itertools.product((BF16, FP32), ("in place", "unaligned")):
        case = Case(tokens=(4, 0, 7), hidden_size=hidden_size, dtype=dtype, add=add, scale=0.3)
        check(case)


@pytest.mark.parametrize("routing", ["all invalid", "distinct"])
def test_ranks_without_tokens_and_tokens_without_experts(routing: str) -> None:
    for tokens in ((0, 0, 0), (0, 3, 8)):
        for add in ("apart", ""):
            check(Case(tokens=tokens, routing=routing, add=add, scale=-2.5, hidden_size=26))


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("combine", COMBINE_FORMATS)
def test_every_format(combine: str, dtype: torch.dtype) -> None:
    """Through MoeAllToAll; rows of two blocks and more."""
    case = dataclasses.replace(RAGGED, hidden_size=300, dtype=dtype, num_threads=2)
    case = cases.with_formats(case, None, combine)
    for add, scale in (("in place", 1.0), ("apart", 1 / 3), ("", -2.5)):
        case_list.check_case(dataclasses.replace(case, add=add, scale=scale))


# Values that say which arithmetic it was.


def one_token(dtype: torch.dtype, *, small: bool) -> MoeAllToAll:
    """A rank alone with a row of four elements, all experts of which are its own."""
    sizes = {"hidden_size": 4, "max_tokens_per_rank": 1, "small_tokens": int(small)}
    return alone(**sizes, dtype=dtype)


def finished(
    rows: list[float], added: list[float] | None, scale: float, dtype: torch.dtype, *, small: bool
) -> torch.Tensor:
    """What combine makes of a row of four sums."""
    with one_token(dtype, small=small) as layer:
        ids, weights = torch.tensor([[0, 1]], dtype=torch.int32), torch.ones(1, 2)
        received = layer.dispatch(torch.zeros(1, 4, dtype=dtype), ids, weights)
        partial = torch.tensor([rows], dtype=dtype)
        add = None if added is None else torch.tensor([added], dtype=dtype)
        result = layer.combine(partial, received.metadata, add=add, scale=scale)
        return result.float()[0]


both_kernels = pytest.mark.parametrize("small", [False, True], ids=["pull", "small"])


@both_kernels
def test_product_and_sum_are_rounded_apart(small: bool) -> None:
    """3 * float32(1/3) is 1 after rounding, and more before: a fused operation would leave it."""
    found = finished([3.0] * 4, [-1.0] * 4, 1 / 3, FP32, small=small)
    assert found.tolist() == [0.0] * 4


@both_kernels
def test_nothing_is_rounded_to_the_type_before_the_end(small: bool) -> None:
    """In bf16 the product, 1 + 2^-8, would become 1, and 1 + 2^-8 then again 1."""
    found = finished([1.0] * 4, [2.0**-8] * 4, 1 + 2.0**-8, BF16, small=small)
    assert found.tolist() == [1 + 2.0**-7] * 4


@both_kernels
def test_signs_of_zero(small: bool) -> None:
    rows, signs = [-0.0, 0.0, -0.0, 0.0], [True, False, True, False]
    assert finished(rows, None, 1.0, FP32, small=small).signbit().tolist() == signs
    negated = finished(rows, None, -1.0, FP32, small=small)
    assert negated.signbit().tolist() == [not sign for sign in signs]
    both = finished(rows, [-0.0, -0.0, 0.0, 0.0], 1.0, FP32, small=small)
    assert both.signbit().tolist() == [True, False, False, False]


@both_kernels
def test_a_token_without_experts_keeps_its_added_row(small: bool) -> None:
    """Also its -0.0, and the result without `add` is 0.0."""
    with one_token(BF16, small=small) as layer:
        ids, weights = torch.full((1, 2), -1, dtype=torch.int32), torch.ones(1, 2)
        rows = torch.zeros(1, 4, dtype=BF16)
        added = torch.tensor([[-0.0, 0.0, 1e-40, float("inf")]]).to(BF16)
        for add, expected in ((added, added), (None, torch.zeros(1, 4, dtype=BF16))):
            metadata = layer.dispatch(rows, ids, weights).metadata
            found = layer.combine(rows, metadata, add=add, scale=3.0)
            compare.assert_same_bits(found, expected, f"add={add}")


def test_ranks_need_not_agree() -> None:
    """Each has what it has asked for, whatever the others do; the scale is that of its call."""
    case = Case(tokens=(4, 6, 2), hidden_size=40, dtype=BF16)
    inputs = cases.make_inputs(case)
    asked = (("", 1.0), ("in place", 1.0), ("apart", -0.7))

    def rank_main(group: ThreadGroup) -> list[torch.Tensor]:
        with MoeAllToAll.create(case.config(group.rank), group) as layer:
            seen = []
            for add, scale in (asked[group.rank], ("", 1.0)):
                mine = inputs[group.rank]
                seen.append(cases.run_round(layer, mine, add=add, scale=scale).combined)
            return seen

    for rank, (first, second) in enumerate(run_ranks(case.ep_size, rank_main)):
        add, scale = asked[rank]
        mine = dataclasses.replace(case, add=add, scale=scale)
        for found, of_call in ((first, mine), (second, case)):
            expected = compare.expected_combined(of_call, inputs[rank], rank)
            compare.assert_same_bits(
                compare.one_nan(found), compare.one_nan(expected), f"rank {rank}"
            )


@both_kernels
def test_after_a_fault_the_rows_are_nan(small: bool) -> None:
    case = dataclasses.replace(RAGGED, small=small, add="in place", dtype=BF16)
    inputs = cases.make_inputs(case)
    fault = constants()["kFaultTimeout"] << 56 | 1
    with contextlib.closing(emulated.make_backend("cpu", case)) as backend:
        ranks = emulated.EmulatedRanks(emulated.config_of(case, timeout_s=0.3), backend)
        received = ranks.dispatch(inputs)
        for rank in range(case.ep_size):
            region = ranks.regions[0]["local"]
            word = ranks.memory[rank, region.offset : region.offset + 8]
            word.view(torch.int64).fill_(fault)
        rows = [cases.added_rows(mine.hidden_states, case.add) for mine in inputs]
        outputs = [row for row in rows if row is not None]
        ranks.combine([mine.send_slots for mine in received], outputs, added=rows)
    assert all(bool(output.isnan().all()) for output in outputs)
    assert sum(output.numel() for output in outputs) > 0
