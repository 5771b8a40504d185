"""A worker that only replays graphs hears of a failed exchange."""

from __future__ import annotations

import logging
import threading

import pytest

from moe_nvlink_plugin.errors import MoeNvlinkError, PeerError
from moe_nvlink_plugin.integration.common.watch import FailureWatch


def test_a_failure_ends_the_worker_once(caplog: pytest.LogCaptureFixture) -> None:
    ended = threading.Event()
    times: list[int] = []
    answers: list[MoeNvlinkError | None] = [None, None, PeerError("rank 3 is gone")]

    def end() -> None:
        times.append(len(answers))
        ended.set()

    with caplog.at_level(logging.CRITICAL, logger="moe_nvlink_plugin"):
        watch = FailureWatch(lambda: answers.pop(0), end, period_s=0.001, what="The head")
        assert ended.wait(30)
        watch.close()
    assert times == [0]
    assert "The head has failed, this worker ends: rank 3 is gone" in caplog.text


def test_closing_ends_the_thread_and_nothing_else() -> None:
    before, ended = threading.active_count(), list[bool]()
    watch = FailureWatch(lambda: None, lambda: ended.append(True), period_s=0.001)
    watch.close()
    watch.close()
    assert threading.active_count() == before
    assert not ended
