"""Many rounds on a GPU: random skew, poison, CUDA graphs, a rank that does not come."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.kernels import emulated
from tests.kernels.cases import Case

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(280)]

SMALL = Case(
    name="small",
    tokens=(0, 0, 0, 0),
    num_experts=10,
    top_k=3,
    hidden_size=19,
    capacity=6,
    routing="invalid",
)
BF16 = dataclasses.replace(SMALL, name="bf16", dtype=torch.bfloat16, hidden_size=264, top_k=8)


def test_thousand_rounds() -> None:
    """One launch a verb; sleeps before every release and arrival, after every wait."""
    emulated.check_rounds("cuda", SMALL, rounds=1000, ctas=3, delays=True)


@pytest.mark.parametrize("case", [SMALL, BF16], ids=lambda case: case.name)
def test_ranks_run_apart(case: Case) -> None:
    """1500 rounds in one launch: a rank is ahead of another by as much as the protocol lets it."""
    emulated.check_fused("cuda", case, rounds=1500, ctas=3)


def test_64_ranks_run_apart() -> None:
    case = dataclasses.replace(
        SMALL, name="64 ranks", tokens=(0,) * 64, num_experts=130, capacity=2, top_k=8
    )
    emulated.check_fused("cuda", case, rounds=15, ctas=2)


@pytest.mark.parametrize("pdl", [False, True], ids=["plain", "pdl"])
def test_thousand_replays(pdl: bool) -> None:
    """Captured before anything has run; other tokens and other counts in every replay."""
    emulated.check_static_rounds("cuda", SMALL, rounds=1000, pdl=pdl)


def test_rounds_with_pdl() -> None:
    emulated.check_rounds("cuda", BF16, rounds=200, ctas=3, pdl=True, delays=True)


def test_a_missing_rank_is_named() -> None:
    emulated.check_missing_rank("cuda")
