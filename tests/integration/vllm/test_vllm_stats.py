"""Threads of a worker: one writes the counters' file, another looks for a failed exchange."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from pathlib import Path

import pytest

from moe_nvlink_plugin import ExchangeStats
from moe_nvlink_plugin.errors import MoeNvlinkError, PeerError
from moe_nvlink_plugin.integration.common import stats
from moe_nvlink_plugin.integration.common.stats import StatsWriter
from moe_nvlink_plugin.integration.common.watch import FailureWatch

ABOUT = {"ep_rank": 3, "ep_size": 4}


class Counters:
    """Counters a test can move."""

    def __init__(self) -> None:
        self.now = ExchangeStats()

    def count(self, rounds: int) -> None:
        self.now = self.now._replace(rounds=rounds, bytes_combined=10 * rounds)

    def read(self) -> dict[str, int]:
        return self.now._asdict()


def _path(writer: StatsWriter) -> Path:
    assert writer.path is not None
    return writer.path


def _until_rounds(path: Path, rounds: int) -> dict[str, int]:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if path.exists():
            content: dict[str, int] = json.loads(path.read_text("utf-8"))
            if content["rounds"] == rounds:
                return content
        time.sleep(0.05)
    raise AssertionError(f"{path} never reached {rounds} rounds")


def test_the_file_follows_the_counters_without_being_asked(tmp_path: Path) -> None:
    counters = Counters()
    writer = StatsWriter(tmp_path / "new" / "folder", ABOUT, counters.read)
    counters.count(5)
    content = _until_rounds(_path(writer), 5)
    assert content == {**ABOUT, "pid": os.getpid(), **counters.now._asdict(), "waited_ns": []}
    counters.count(9)
    _until_rounds(_path(writer), 9)
    writer.close()


def test_close_writes_the_last_state_and_leaves_one_file(tmp_path: Path) -> None:
    counters = Counters()
    writer = StatsWriter(tmp_path, ABOUT, counters.read)
    counters.count(7)
    writer.close()
    writer.close()
    assert json.loads(_path(writer).read_text("utf-8"))["rounds"] == 7
    assert [path.name for path in tmp_path.iterdir()] == ["rank3.json"]
    assert not writer._thread.is_alive()


@pytest.fixture
def resting_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the test and `close` write."""
    monkeypatch.setattr(stats, "_PERIOD_S", 3600.0)


def test_a_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    """Who has opened the file reads the state that was whole then, whatever is written since."""
    counters = Counters()
    writer = StatsWriter(tmp_path, ABOUT, counters.read)
    writer.close()
    before = json.loads(_path(writer).read_text("utf-8"))
    with _path(writer).open(encoding="utf-8") as reader:
        counters.count(5)
        writer._write()
        assert json.load(reader) == before
    assert json.loads(_path(writer).read_text("utf-8"))["rounds"] == 5


def test_unchanged_counters_are_not_written_again(tmp_path: Path) -> None:
    counters = Counters()
    writer = StatsWriter(tmp_path, ABOUT, counters.read)
    writer.close()
    written = _path(writer).stat().st_mtime_ns, _path(writer).stat().st_ino
    writer._write()
    assert (_path(writer).stat().st_mtime_ns, _path(writer).stat().st_ino) == written
    counters.count(1)
    writer._write()
    assert _path(writer).stat().st_ino != written[1]


@pytest.mark.usefixtures("resting_thread")
def test_a_folder_that_cannot_be_made_is_logged_once_and_stops_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An error at start-up would reach this rank alone, and the other ranks would wait for it."""
    (tmp_path / "a file").write_text("")
    counters = Counters()
    with caplog.at_level(logging.WARNING, logger="moe_nvlink_plugin"):
        writer = StatsWriter(tmp_path / "a file" / "folder", ABOUT, counters.read)
        counters.count(2)
        writer.close()
    (message,) = [record.getMessage() for record in caplog.records]
    assert f"not written to {_path(writer)}: " in message
    assert "MOE_NVLINK_STATS_DIR" in message


@pytest.mark.usefixtures("resting_thread")
def test_a_folder_that_goes_away_leaves_the_thread_running(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    counters = Counters()
    folder = tmp_path / "folder"
    writer = StatsWriter(folder, ABOUT, counters.read)
    folder.rename(tmp_path / "elsewhere")
    with caplog.at_level(logging.WARNING, logger="moe_nvlink_plugin"):
        for rounds in (1, 2):
            counters.count(rounds)
            writer._write()
    assert len(caplog.records) == 1
    (tmp_path / "elsewhere").rename(folder)
    writer.close()
    assert json.loads(_path(writer).read_text("utf-8"))["rounds"] == 2


# A worker that only replays graphs hears of a failed exchange.


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
