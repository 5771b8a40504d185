"""tests/support/real_head.py on CPU ranks: the GPU tests' own code, run before there is a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support import ranks as processes
from tests.support import real_head
from tests.support.small_head import ids_of


@pytest.mark.parametrize("dtype", real_head.DTYPES)
def test_one_rank(dtype: torch.dtype) -> None:
    real_head.check_rounds("cpu", 3, dtype=dtype)
    real_head.check_special_values("cpu", dtype)


def test_sm_budget_of_one_rank() -> None:
    real_head.check_sm_budget("cpu", rows=50, max_sms=3)


def test_bad_input_of_one_rank() -> None:
    real_head.check_bad_input("cpu", elsewhere="meta")


def test_replays_of_one_rank() -> None:
    real_head.check_replays("cpu", 12)


def test_a_wrong_id_of_a_replay_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real_head, "ids_of", lambda *given: ids_of(*given) + 1)
    with pytest.raises(AssertionError, match="replay 0 of 1 rows on rank 0"):
        real_head.check_replays("cpu", 1)


@pytest.mark.parametrize("dtype", real_head.DTYPES)
def test_kernels_of_one_rank_on_memory_of_torchs(dtype: torch.dtype) -> None:
    rank = real_head.LoneRank("cpu", dtype)
    for one in real_head.problems(rank.config, 4):
        rank.check(one)


def everything(rank: int, size: int) -> tuple[int, tuple[object, ...]]:
    """What the GPU tests have processes of their own for."""
    replays = real_head.process_replays(rank, size, "cpu", 8)
    return replays, real_head.process_missing(rank, size, "cpu")


def test_processes(tmp_path: Path) -> None:
    seen = processes.run_processes(2, everything, tmp_path)
    assert seen == [(8, ("head gather", (1,), 8.0)), (8, ())]
