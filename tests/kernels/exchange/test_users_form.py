"""tests/support/users_form.py on the CPU: what tests/gpu runs on a GPU, and that it can fail."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from moe_nvlink_plugin import MoeAllToAll
from moe_nvlink_plugin.exchange.kernels import LAYER
from moe_nvlink_plugin.jit import host
from moe_nvlink_plugin.verify import cases
from tests.gpu.test_users_form import MANY
from tests.support import emulated, fake_cuda, real_path, users_form
from tests.support import ranks as processes
from tests.support.fake_cuda.processes import Driven
from tests.support.fake_cuda.transport import capturing
from tests.support.long_tests import first_of

each_kind = pytest.mark.parametrize("small", [False, True], ids=["bulk", "small"])


def one_rank(small: bool) -> cases.Case:
    return users_form.SMALL if small else users_form.ONE_RANK


@each_kind
def test_masks_padding_and_ids(small: bool) -> None:
    users_form.check_users_rounds("cpu", 20, one_rank(small), capture=False)
    laid_out = dataclasses.replace(users_form.LAID_OUT, small=small)
    users_form.check_users_rounds("cpu", 10, laid_out, capture=True)


@each_kind
@pytest.mark.parametrize("combines_beside", [False, True], ids=["combine", "combine_async"])
def test_combine_right_after_the_wait(small: bool, combines_beside: bool) -> None:
    case = real_path.SMALL if small else real_path.ONE_RANK
    users_form.check_direct_rounds("cpu", 20, case, combines_beside=combines_beside, capture=True)


@each_kind
def test_a_graph_without_its_combine_is_a_fault(small: bool) -> None:
    case = real_path.SMALL if small else real_path.ONE_RANK
    users_form.check_replayed_dispatch("cpu", case, None)


@each_kind
def test_many_ranks(small: bool) -> None:
    case = dataclasses.replace(MANY, small=small)
    for received_ids in ("elsewhere", 5):
        emulated.check_case("cpu", dataclasses.replace(case, received_ids=received_ids), ctas=3)
    left_out = dataclasses.replace(case, left_out=(1,), received_ids="elsewhere")
    emulated.check_case("cpu", left_out, ctas=3)
    users_form.check_counts("cpu", dataclasses.replace(left_out, num_expert_counts=13), ctas=3)
    users_form.check_leaving("cpu", dataclasses.replace(case, left_out=(2,)), 10)
    for recipe, layout in (("fp8_block", "column_major"), ("nvfp4", "interleaved")):
        quantised = dataclasses.replace(cases.with_formats(case, recipe), scales_layout=layout)
        users_form.check_laid_out_scales("cpu", quantised, ctas=3)


@each_kind
def test_a_rank_that_is_killed(small: bool, tmp_path: Path) -> None:
    host.load(LAYER.host_source())
    lives = processes.run_processes(3, users_form.process_dies, tmp_path, "cpu", small, killed=(2,))
    users_form.check_process_dies(lives, small=small)
    lives[1].outputs[-1][0, 0] += 1
    with pytest.raises(AssertionError, match="rank 1, replay 5"):
        users_form.check_process_dies(lives, small=small)


# Through the product's launches for GPUs, on the stand-in for the driver.


def _captured(body: Callable[[], None]) -> Callable[[], None]:
    fake_cuda.control().forget_capture()
    with capturing():
        body()
    return fake_cuda.control().replay


def _by_driver() -> None:
    create = functools.partial(real_path.create, transport="launched_by_driver")
    with mock.patch.object(real_path, "create", create):
        users_form.check_users_rounds("cpu", 10, users_form.SMALL, capture=False)
        for case in (real_path.ONE_RANK, real_path.SMALL):
            for beside in (False, True):
                users_form.check_direct_rounds(
                    "cpu", 10, case, combines_beside=beside, capture=False
                )
            users_form.check_replayed_dispatch("cpu", case, _captured)


@pytest.mark.parametrize("pdl", first_of(["1", "0"]))
def test_on_the_stand_in_driver(pdl: str, driven: Driven, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")
    monkeypatch.setenv("MOE_NVLINK_PDL", pdl)
    driven(_by_driver)


# These checks can fail.


def test_a_combine_that_does_not_wait_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a combine that overtakes the dispatch: it takes the slots that lie there from before."""
    combine: Any = MoeAllToAll.combine
    before: dict[str, torch.Tensor] = {}

    def overtake(self: Any, rows: Any, metadata: Any, **options: Any) -> Any:
        slots = metadata.send_slots.clone()
        stale = before.get("slots", slots)
        metadata.send_slots.copy_(stale)
        result = combine(self, rows, metadata, **options)
        metadata.send_slots.copy_(slots)
        before["slots"] = slots
        return result

    monkeypatch.setattr(MoeAllToAll, "combine", overtake)
    with pytest.raises(AssertionError, match=r"round \d+: tokens .* rows of other slots or rounds"):
        users_form.check_direct_rounds(
            "cpu", 20, real_path.ONE_RANK, combines_beside=False, capture=False
        )


@pytest.mark.parametrize("left", ["is_padding", "active_ranks"])
def test_an_argument_that_has_no_effect_is_noticed(
    left: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one rank alone a mask has no effect, so it is left away where ranks are left out."""
    if left == "active_ranks":
        monkeypatch.setattr(cases.Case, "mask", lambda self, *_: torch.tensor([15]))
        with pytest.raises(AssertionError):
            users_form.check_leaving("cpu", dataclasses.replace(MANY, left_out=(2,)), 3)
        return
    dispatch: Any = MoeAllToAll.dispatch

    def without(self: Any, *given: Any, is_padding: Any, **options: Any) -> Any:
        return dispatch(self, *given, **options)

    monkeypatch.setattr(MoeAllToAll, "dispatch", without)
    with pytest.raises(AssertionError, match="round"):
        users_form.check_users_rounds("cpu", 5, users_form.ONE_RANK, capture=False)
