"""Rounds as frameworks ask for them, on a GPU: masks of ranks, padding, ids "elsewhere", counts per
expert, laid-out scales, verbs beside the caller, a death among processes, replays that are wrong.

tests/support/users_form.py has what is done; kernels for batches of any size, and for small ones.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from moe_nvlink_plugin.verify import cases
from moe_nvlink_plugin.verify.cases import Case
from tests.support import emulated, real_path, users_form
from tests.support import ranks as processes

JOIN_S = 45.0

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(JOIN_S + 15)]

#: Many ranks in one launch. Element type and top_k are those of test_rounds.py: compiled once.
MANY = Case(
    name="many",
    tokens=(8, 3, 0, 5),
    num_experts=13,
    top_k=8,
    hidden_size=264,
    dtype=torch.bfloat16,
    routing="invalid",
)

each_kind = pytest.mark.parametrize("small", [False, True], ids=["bulk", "small"])
with_and_without_pdl = pytest.mark.parametrize("pdl", [False, True], ids=["plain", "pdl"])
eager_and_captured = pytest.mark.parametrize("capture", [False, True], ids=["eager", "captured"])


# One rank, the product's own path.


@each_kind
@with_and_without_pdl
@eager_and_captured
def test_masks_padding_and_ids(
    small: bool, pdl: bool, capture: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As vLLM's adapter calls, and with counts per expert."""
    monkeypatch.setenv("MOE_NVLINK_PDL", str(int(pdl)))
    case = users_form.SMALL if small else users_form.ONE_RANK
    users_form.check_users_rounds("cuda", 100, case, capture=capture)


@each_kind
@eager_and_captured
def test_scales_in_the_layout_of_the_experts(small: bool, capture: bool) -> None:
    case = dataclasses.replace(users_form.LAID_OUT, small=small)
    users_form.check_users_rounds("cuda", 50, case, capture=capture)


@each_kind
@with_and_without_pdl
@eager_and_captured
@pytest.mark.parametrize("combines_beside", [False, True], ids=["combine", "combine_async"])
def test_combine_right_after_the_wait(
    small: bool, pdl: bool, capture: bool, combines_beside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing but the order of two streams keeps the combine behind the dispatch."""
    monkeypatch.setenv("MOE_NVLINK_PDL", str(int(pdl)))
    case = real_path.SMALL if small else real_path.ONE_RANK
    users_form.check_direct_rounds(
        "cuda", 200, case, combines_beside=combines_beside, capture=capture
    )


@each_kind
def test_a_graph_without_its_combine_is_a_fault(small: bool) -> None:
    case = real_path.SMALL if small else real_path.ONE_RANK
    users_form.check_replayed_dispatch("cuda", case, emulated.captured)


# Many ranks in one launch.


@each_kind
@with_and_without_pdl
def test_counts_per_expert(small: bool, pdl: bool) -> None:
    case = dataclasses.replace(MANY, small=small, left_out=(1,), num_expert_counts=13)
    users_form.check_counts("cuda", case, ctas=3, pdl=pdl)


@each_kind
@pytest.mark.parametrize(
    ("recipe", "layout"), [("fp8_block", "column_major"), ("nvfp4", "interleaved")]
)
def test_scales_as_experts_read_them(recipe: str, layout: str, small: bool) -> None:
    case = dataclasses.replace(MANY, small=small)
    case = dataclasses.replace(cases.with_formats(case, recipe), scales_layout=layout)
    users_form.check_laid_out_scales("cuda", case, ctas=3)


@each_kind
@with_and_without_pdl
def test_replays_whose_masks_change(small: bool, pdl: bool) -> None:
    case = dataclasses.replace(MANY, small=small, left_out=(2,))
    users_form.check_leaving("cuda", case, 50, pdl=pdl)


@each_kind
def test_a_dispatch_that_is_repeated_without_its_combine(small: bool) -> None:
    emulated.check_repeated_dispatch("cuda", small=small, ctas=4)


# Processes.


@each_kind
def test_a_rank_that_is_killed(small: bool, tmp_path: Path) -> None:
    """The survivors name it, leave it out, and replay the graph that they had captured before."""
    lives = processes.run_processes(
        3, users_form.process_dies, tmp_path, "cuda", small, killed=(2,), timeout_s=JOIN_S
    )
    users_form.check_process_dies(lives, small=small)
