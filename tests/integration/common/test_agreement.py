"""How ranks meet and gather before they exchange anything: as threads, and over gloo."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from moe_nvlink_plugin.integration.common.agreement import Ranks
from moe_nvlink_plugin.testing import ThreadGroup, run_ranks
from tests.integration.common.test_adapter_common import WORDING
from tests.support.ranks import run_processes


class CountingGroup:
    """A group of one rank, which counts its collectives."""

    rank, size = 0, 1

    def __init__(self) -> None:
        self.gathered: list[Any] = []

    def all_gather_object(self, value: Any) -> list[Any]:
        self.gathered.append(value)
        return [value]


def ranks_of(group: Any) -> Ranks:
    return Ranks(group, group.rank, group.size, WORDING)


def test_gather_is_by_rank() -> None:
    found = run_ranks(3, lambda group: ranks_of(group).gather(f"of rank {group.rank}"))
    assert found == [["of rank 0", "of rank 1", "of rank 2"]] * 3


class TellingGroup:
    """A rank's group that says when the rank begins a collective."""

    def __init__(self, group: ThreadGroup, begins: threading.Event) -> None:
        self.rank, self.size = group.rank, group.size
        self._group, self._begins = group, begins

    def all_gather_object(self, value: Any) -> list[Any]:
        self._begins.set()
        return self._group.all_gather_object(value)


def test_the_first_to_arrive_waits_for_the_last() -> None:
    first_waits, last_has_come = threading.Event(), threading.Event()

    def body(group: ThreadGroup) -> bool:
        if group.rank == 1:
            assert first_waits.wait(60), "rank 0 does not meet anybody"
            last_has_come.set()
        ranks_of(TellingGroup(group, first_waits) if group.rank == 0 else group).meet()
        return last_has_come.is_set()

    assert run_ranks(2, body) == [True, True]


def test_ranks_meet_once() -> None:
    """A rank that is alone later returns at once: the others may be in another step by then."""
    group = CountingGroup()
    ranks = ranks_of(group)
    ranks.meet()
    ranks.meet()
    assert group.gathered == [None]


def test_a_meeting_that_failed_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    group = CountingGroup()
    ranks = ranks_of(group)

    def fails(_value: Any) -> list[Any]:
        raise ConnectionError("rank 1 has gone")

    with monkeypatch.context() as patch:
        patch.setattr(group, "all_gather_object", fails)
        with pytest.raises(ConnectionError, match="rank 1 has gone"):
            ranks.meet()
    ranks.meet()
    assert group.gathered == [None]


def over_gloo(ep_rank: int, ep_size: int) -> list[Any]:
    ranks = Ranks(dist.group.WORLD, ep_rank, ep_size, WORDING)
    ranks.meet()
    if ep_rank == 0:
        ranks.meet()  # alone: would never return if it were collective
    return ranks.gather({"rank": ep_rank})


def test_process_groups(tmp_path: Path) -> None:
    assert run_processes(2, over_gloo, tmp_path) == [[{"rank": 0}, {"rank": 1}]] * 2
