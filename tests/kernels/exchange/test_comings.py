"""tests/support/comings.py on CPU ranks, and that its check can fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import comings
from tests.support.ranks import run_processes


@pytest.mark.parametrize("small", [pytest.param(False, marks=pytest.mark.long), True])
def test_ranks_that_come_and_go(small: bool, tmp_path: Path) -> None:
    lives = run_processes(3, comings.process_stays, tmp_path, "cpu", small, killed=(2,))
    comings.check(lives, "cpu", small=small)
    first = lives[0].seen[0]
    first.output[0, 0] += 1
    with pytest.raises(AssertionError, match="rank 0, replay 0"):
        comings.check(lives, "cpu", small=small)
