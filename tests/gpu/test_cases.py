"""The case list on a GPU: every rank of a case in one cooperative launch on one device."""

from __future__ import annotations

import random

import pytest
import torch

from tests.kernels import cases, emulated
from tests.kernels.cases import CASES, Case

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "-"))


@each_case
@pytest.mark.parametrize("ctas", [1, 4])
def test_named_case(case: Case, ctas: int) -> None:
    """One CTA per rank shows the order of the slots too; four race for them."""
    emulated.check_case("cuda", case, ctas=ctas)


@pytest.mark.parametrize("case", CASES[::4], ids=lambda case: case.name.replace(" ", "-"))
def test_named_case_with_pdl(case: Case) -> None:
    emulated.check_case("cuda", case, ctas=2, pdl=True)


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


@pytest.mark.parametrize(("ep_size", "hidden_size"), [(16, 64), (32, 264), (64, 128), (72, 40)])
def test_many_ranks(ep_size: int, hidden_size: int) -> None:
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
    emulated.check_case("cuda", case, rounds=2, ctas=4)


def test_deepseek_v3_rows() -> None:
    case = Case(
        name="DeepSeek-V3",
        tokens=(32, 0, 17, 1, 32, 8, 5, 31),
        num_experts=256,
        top_k=8,
        hidden_size=7168,
        capacity=32,
        dtype=torch.bfloat16,
    )
    emulated.check_case("cuda", case, ctas=16, hidden_splits=4)


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
