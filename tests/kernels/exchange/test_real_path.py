"""real_path.py and comings.py on CPU ranks: the GPU tests' own code, before there is a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_nvlink_plugin.exchange.kernels import LAYER
from moe_nvlink_plugin.jit import host
from moe_nvlink_plugin.verify import cases
from tests.support import comings, real_path
from tests.support import ranks as processes

each_kind = pytest.mark.parametrize("small", [False, True], ids=["bulk", "small"])


def test_small_batches_of_one_rank() -> None:
    real_path.check_replays("cpu", 30, real_path.SMALL)
    real_path.check_two_channels("cpu", 10, real_path.SMALL)


@pytest.mark.parametrize("zero_copy", [True, False])
def test_replays_of_one_rank(zero_copy: bool) -> None:
    real_path.check_replays("cpu", rounds=30, zero_copy=zero_copy)


@pytest.mark.parametrize("recipe", cases.RECIPES)
def test_quantisers(recipe: str) -> None:
    real_path.check_quantiser("cpu", recipe)


def test_quantised_rounds() -> None:
    case = cases.with_formats(real_path.ONE_RANK, "fp8_tensor", "fp8_block")
    real_path.check_replays("cpu", 20, case)


def test_code_of_inductor() -> None:
    real_path.check_compiled("cpu", 5)


def test_sm_budget() -> None:
    real_path.check_sm_budget("cpu", tokens=200, max_sms=3)


def test_two_channels() -> None:
    real_path.check_two_channels("cpu", rounds=20)


def test_bad_input() -> None:
    real_path.check_bad_input("cpu", elsewhere="meta")


@each_kind
def test_processes_that_enter_capture_at_different_times(small: bool, tmp_path: Path) -> None:
    host.load(LAYER.host_source())
    outputs = processes.run_processes(2, real_path.process_replays, tmp_path, "cpu", 10, small)
    real_path.check_process_replays(outputs, 10)
    outputs[1][3][0, 0] += 1
    with pytest.raises(AssertionError, match="replay 3: 2 processes: rank 1"):
        real_path.check_process_replays(outputs, 10)


@each_kind
def test_a_missing_process(small: bool, tmp_path: Path) -> None:
    seen = processes.run_processes(2, real_path.process_missing, tmp_path, "cpu", small)
    assert seen == [("dispatch", (1,), 8.0), ()]


@each_kind
def test_growth(small: bool, tmp_path: Path) -> None:
    seen = processes.run_processes(2, real_path.process_grows, tmp_path, "cpu", 10, small)
    real_path.check_process_rounds(seen, "cpu", 10)


@pytest.mark.parametrize("small", [pytest.param(False, marks=pytest.mark.long), True])
def test_ranks_that_come_and_go(small: bool, tmp_path: Path) -> None:
    lives = processes.run_processes(3, comings.process_stays, tmp_path, "cpu", small, killed=(2,))
    comings.check(lives, "cpu", small=small)
    lives[0].seen[0].output[0, 0] += 1
    with pytest.raises(AssertionError, match="rank 0, replay 0"):
        comings.check(lives, "cpu", small=small)
