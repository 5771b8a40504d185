"""The case list on a GPU: every rank of a case in one cooperative launch on one device.

Quantised rows are held to the recipes' torch code, bit for bit but for nvfp4, whose codes may be
one away (tests/support/compare.py says why). test_quantisers.py has the framework's own quantisers.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable

import pytest
import torch

from moe_nvlink_plugin.config import MAX_SMALL_TOKENS
from moe_nvlink_plugin.verify import cases
from moe_nvlink_plugin.verify.cases import ADDS, COMBINE_FORMATS, RECIPES, Case
from tests.support import emulated
from tests.support.case_list import CASES, CORE_RECIPE_CASES

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(60)]


def smaller(cases_: Iterable[Case]) -> list[Case]:
    """Those that fit, with the kernels for small batches."""
    fit = [case for case in cases_ if case.capacity <= MAX_SMALL_TOKENS]
    return [dataclasses.replace(case, name=f"{case.name}, small", small=True) for case in fit]


def named(cases_: Iterable[Case], name: str) -> list[Case]:
    return [case for case in cases_ if case.name.startswith(name)]


SMALL_CASES = smaller(CASES)

#: Cases, numbers of CTAs, options. One CTA per rank shows the order of the slots too; four race for
#: them. Of small batches one CTA sends, then receives; of four, two send.
RUNS: list[tuple[Iterable[Case], tuple[int, ...], dict[str, bool]]] = [
    (CASES, (1, 4), {}),
    (SMALL_CASES, (1, 4), {}),
    (CORE_RECIPE_CASES, (1, 3), {}),
    (smaller(CORE_RECIPE_CASES[::2]), (3,), {}),
    (CORE_RECIPE_CASES[::2], (2,), {"post_quant": True}),
    (CASES[::4], (2,), {"pdl": True}),
    (smaller(named(CASES, "invalid ids")), (2,), {"pdl": True}),
    (named(CORE_RECIPE_CASES, "invalid ids, fp8_token"), (2,), {"pdl": True}),
]


@pytest.mark.parametrize(
    ("case", "ctas", "options"),
    [
        pytest.param(case, count, options, id="-".join([case.name, str(count), *options]))
        for of_run, ctas, options in RUNS
        for case in of_run
        for count in ctas
    ],
)
def test_case(case: Case, ctas: int, options: dict[str, bool]) -> None:
    emulated.check_case("cuda", case, ctas=ctas, **options)


@pytest.mark.parametrize("recipe", RECIPES)
def test_other_activations(recipe: str) -> None:
    """fp16 and fp32 take turns, and so do the formats of combine: each pair is compiled."""
    turn = list(RECIPES).index(recipe)
    dtype = torch.float16 if turn % 2 else torch.float32
    case = Case(name=f"{dtype}", tokens=(8, 3, 5, 0), hidden_size=300, dtype=dtype, top_k=8)
    combine = list(COMBINE_FORMATS)[(turn + 1) % len(COMBINE_FORMATS)]
    emulated.check_case("cuda", cases.with_formats(case, recipe, combine), ctas=3)


@pytest.mark.parametrize("hidden_splits", [2, 3, 8])
@pytest.mark.parametrize("hidden_size", [7, 1024, 1031])
def test_rows_shared_by_ctas(hidden_splits: int, hidden_size: int) -> None:
    case = Case(
        name=f"{hidden_size} by {hidden_splits}",
        tokens=(8, 3, 0),
        hidden_size=hidden_size,
        dtype=torch.bfloat16,
    )
    emulated.check_case("cuda", case, ctas=5, hidden_splits=hidden_splits)


@pytest.mark.parametrize("add", ADDS)
@pytest.mark.parametrize("combine", COMBINE_FORMATS)
def test_sums_that_are_scaled_and_added_to(combine: str, add: str) -> None:
    case = Case(name=f"{add}, {combine}", tokens=(8, 3, 0), dtype=torch.bfloat16, routing="invalid")
    case = dataclasses.replace(cases.with_formats(case, None, combine), add=add, scale=1 / 3)
    emulated.check_case("cuda", case, ctas=5, hidden_splits=2)
    if combine == "bf16":
        emulated.check_case("cuda", dataclasses.replace(case, small=True), ctas=5)


@pytest.mark.parametrize(
    ("ep_size", "hidden_size", "formats"),
    [
        *((16, 64, ()), (32, 264, ()), (64, 128, ()), (72, 40, ())),
        (32, 1536, ("fp8_token", "nvfp4")),
    ],
)
def test_many_ranks(ep_size: int, hidden_size: int, formats: tuple[str, ...]) -> None:
    choose = random.Random(ep_size)
    case = Case(
        name=f"{ep_size} ranks",
        tokens=tuple(choose.randint(0, 6) for _ in range(ep_size)),
        num_experts=2 * ep_size + 1,
        top_k=8,
        hidden_size=hidden_size,
        dtype=torch.bfloat16,
        routing="invalid",
    )
    emulated.check_case(
        "cuda", cases.with_formats(case, *formats) if formats else case, rounds=2, ctas=4
    )


@pytest.mark.parametrize("seed", range(12))
def test_drawn_case(seed: int) -> None:
    choose = random.Random(1000 + seed)
    ep_size, capacity = choose.randint(2, 12), choose.randint(1, 9)
    routing = choose.choice(sorted(set(cases.ROUTINGS) - {"none to rank 1", "wrapping"}))
    case = Case(
        name=f"drawn {seed}",
        tokens=tuple(choose.randint(0, capacity) for _ in range(ep_size)),
        num_experts=choose.randint(1, 40),
        top_k=choose.choice([1, 2, 8]),  # few values: each is compiled
        hidden_size=choose.randint(1, 300),
        capacity=capacity,
        dtype=choose.choice([torch.float32, torch.bfloat16, torch.float16]),
        routing=routing,
        extras=tuple((torch.uint8, (choose.randint(1, 70),)) for _ in range(choose.randint(0, 3))),
        num_channels=choose.randint(1, 2),
        seed=seed,
    )
    emulated.check_case(
        "cuda", case, ctas=choose.choice([1, 3]), hidden_splits=choose.choice([1, 2])
    )
