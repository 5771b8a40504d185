"""tests/support/real_path.py on CPU ranks: the GPU tests' own code, run before there is a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from moe_nvlink_plugin.exchange.kernels import LAYER
from moe_nvlink_plugin.jit import host
from moe_nvlink_plugin.verify import cases
from moe_nvlink_plugin.verify.cases import Seen
from tests.support import ranks as processes
from tests.support import real_path

pytestmark = pytest.mark.timeout(240)


def test_rounds_of_one_rank() -> None:
    real_path.check_rounds("cpu", rounds=30)


def test_small_batches_of_one_rank() -> None:
    real_path.check_rounds("cpu", 30, real_path.SMALL)
    real_path.check_replays("cpu", 30, real_path.SMALL)
    real_path.check_two_channels("cpu", 10, real_path.SMALL)
    for combine in ("bf16", "fp8_block"):
        case = cases.with_formats(real_path.SMALL, "fp8_token", combine)
        real_path.check_rounds("cpu", 10, case)


@pytest.mark.parametrize("zero_copy", [True, False])
def test_replays_of_one_rank(zero_copy: bool) -> None:
    real_path.check_replays("cpu", rounds=30, zero_copy=zero_copy)


@pytest.mark.parametrize("recipe", cases.RECIPES)
def test_quantisers(recipe: str) -> None:
    real_path.check_quantiser("cpu", recipe)


def test_quantised_rounds() -> None:
    case = cases.with_formats(real_path.ONE_RANK, "fp8_tensor", "fp8_block")
    real_path.check_rounds("cpu", 20, case)
    real_path.check_replays("cpu", 20, case)


def test_sm_budget() -> None:
    real_path.check_sm_budget("cpu", tokens=200, max_sms=3)


def test_two_channels() -> None:
    real_path.check_two_channels("cpu", rounds=20)


def test_bad_input() -> None:
    real_path.check_bad_input("cpu", elsewhere="meta")


def test_processes(tmp_path: Path) -> None:
    host.load(LAYER.host_source())
    seen = processes.run_processes(2, real_path.process_rounds, tmp_path, "cpu", 20)
    real_path.check_process_rounds(seen, "cpu", 20)


def test_processes_that_enter_capture_at_different_times(tmp_path: Path) -> None:
    outputs = processes.run_processes(2, real_path.process_replays, tmp_path, "cpu", 10)
    real_path.check_process_replays(outputs, 10)
    outputs[1][3][0, 0] += 1
    with pytest.raises(AssertionError, match="replay 3: 2 processes: rank 1"):
        real_path.check_process_replays(outputs, 10)


def test_a_missing_process(tmp_path: Path) -> None:
    first, last = processes.run_processes(2, real_path.process_missing, tmp_path, "cpu")
    assert first == ("dispatch", (1,), 8.0)
    assert last == ()


def test_processes_of_small_batches(tmp_path: Path) -> None:
    host.load(LAYER.host_source())
    seen = processes.run_processes(2, _small_on_cpu, tmp_path)
    real_path.check_process_rounds([rounds for rounds, _outputs, _fault in seen], "cpu", 10)
    real_path.check_process_replays([outputs for _rounds, outputs, _fault in seen], 10)
    assert [fault for _rounds, _outputs, fault in seen] == [("dispatch", (1,), 8.0), ()]


def _small_on_cpu(ep_rank: int, ep_size: int) -> tuple[list[Seen], list[torch.Tensor], Any]:
    """One rank of all that tests/gpu/test_real_processes.py does with small batches."""
    return (
        real_path.process_rounds(ep_rank, ep_size, "cpu", 10, small=True),
        real_path.process_replays(ep_rank, ep_size, "cpu", 10, small=True),
        real_path.process_missing(ep_rank, ep_size, "cpu", small=True),
    )


def test_growth(tmp_path: Path) -> None:
    seen = processes.run_processes(2, real_path.process_grows, tmp_path, "cpu", 6)
    real_path.check_process_rounds(seen, "cpu", 6)
