"""The benchmark that kills ranks: its figures, and what it must not report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from benchmarks import bench_deaths
from moe_nvlink_plugin.verify import cases, compare


@pytest.mark.long
def test_ranks_are_killed_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "deaths.json"
    given = ["--deaths", "2", "--every", "2", "--ep_size", "3", "--output_file", str(path)]
    assert bench_deaths.main(given) == 0
    result = json.loads(path.read_text())
    assert len(result["rows"]) == 2
    assert result["rounds"] > 3 * len(result["rows"])
    for row in result["rows"]:
        # Nobody is back before the timeout after which a rank counts as dead.
        assert row["back_s"] >= 2
        assert row["renewal_ms"] > 0


@pytest.mark.long
def test_a_rank_that_ends_by_itself_ends_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--deaths", "1", "--ep_size", "2", "--hidden_size", "-1"]
    assert bench_deaths.main(given) == 1
    assert "have ended by themselves" in capsys.readouterr().err


def test_a_wrong_bit_is_no_round() -> None:
    case = bench_deaths.Options(1, 5, 2, 4, 64, 2, 0).case
    inputs = cases.make_inputs(case, (4, 4), seed=1)
    rank: Any = bench_deaths.Rank.__new__(bench_deaths.Rank)
    rank.place, rank.step = 1, 7
    sums = compare.expected_combined(case, inputs[1], 1)
    rank._check(case, inputs, mock.Mock(combined=sums))
    wrong = sums.clone()
    wrong.view(torch.int16)[2, 3] ^= 1
    with pytest.raises(AssertionError, match="rank 1, step 7: combined"):
        rank._check(case, inputs, mock.Mock(combined=wrong))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--ep_size", "1"], "--ep_size 1 is not between 2 and 64"),
        (["--deaths", "0"], "--deaths 0 is not between 1 and 10000"),
        (["--every", "-1"], "--every -1.0 is not between 0 and 3600"),
        (["--timeout_s", "0"], "--timeout_s 0.0 is not between 0 and 60"),
    ],
)
def test_bad_options_are_refused(
    given: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        bench_deaths.main(given)
    assert message in capsys.readouterr().err
