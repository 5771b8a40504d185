"""Ranks that join, leave, give memory back, return and die, with graphs captured before it all."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import comings
from tests.support import ranks as processes

JOIN_S = 80.0

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(JOIN_S + 15)]


@pytest.mark.parametrize("small", [False, True], ids=["bulk", "small"])
def test_ranks_that_come_and_go(small: bool, tmp_path: Path) -> None:
    lives = processes.run_processes(
        3, comings.process_stays, tmp_path, "cuda", small, killed=(2,), timeout_s=JOIN_S
    )
    comings.check(lives, "cuda", small=small)
