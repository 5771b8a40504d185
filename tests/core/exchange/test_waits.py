"""A slow rank is named by its peers' totals, by the log, by the metrics, and by `moe-nvlink top`.

The slow rank goes on when every other rank has looked at its clock so often. Only looks move the
clocks, so a busy machine changes no result.
"""

from __future__ import annotations

import contextlib
import http.server
import itertools
import logging
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from moe_nvlink_plugin import ExchangeStats
from moe_nvlink_plugin.integration.common import pool, slow_rank, stats
from moe_nvlink_plugin.integration.common.agreement import Geometry, Ranks
from moe_nvlink_plugin.integration.common.options import Options
from moe_nvlink_plugin.integration.common.pool import ExchangePool
from moe_nvlink_plugin.integration.vllm.metrics import RankFile, RanksCollector
from moe_nvlink_plugin.jit import host
from moe_nvlink_plugin.testing import ThreadGroup, run_ranks
from moe_nvlink_plugin.tools import cli, top
from tests.integration.common.test_adapter_common import WORDING
from tests.support import delays

SIZE, SLOW = 4, 2
OTHERS = [rank for rank in range(SIZE) if rank != SLOW]
#: What a look adds to a rank's clock, and the looks for which the slow rank waits.
LOOK_NS, LOOKS = 1_000_000, 30
GEOMETRY = Geometry(
    num_experts=SIZE, top_k=2, hidden_size=16, max_tokens_per_rank=8, dtype=torch.float32
)


@pytest.fixture(scope="module")
def library() -> host.HostLibrary:
    return delays.clock_of_looks(LOOK_NS)


class Moment(NamedTuple):
    """What was known at one moment: by each rank of itself, by rank 0 of all, by the server."""

    stats: list[ExchangeStats]
    waits: list[list[int]]
    metrics: str


class Ranked:
    """One rank, which meets the others and looks at what they have counted."""

    def __init__(self, group: ThreadGroup, library: host.HostLibrary, folder: Path) -> None:
        self._group, self._library = group, library._library
        self._library.test_enter(group.rank)
        self.pool = ExchangePool(
            Ranks(group, group.rank, SIZE, WORDING),
            torch.device("cpu"),
            Options(),
            publication=RankFile(folder),
        )
        self.exchange = self.pool.exchange(GEOMETRY)
        self._folder = folder

    def moment(self) -> Moment:
        """Between two verbs, so nobody waits in a kernel."""
        assert self.pool._stats_writer is not None
        self.pool._stats_writer._write()
        stats = self._group.all_gather_object(self.exchange.stats())
        found = Moment(stats, self.exchange.waits(), metrics_of(self._folder))
        self._group.all_gather_object(None)
        return found

    def be_slow(self) -> None:
        """The slow rank returns when all others wait for it, and for it alone."""
        before = self._group.all_gather_object(self._library.test_looks(self._group.rank))
        if self._group.rank != SLOW:
            return
        # A rank that has looked at its clock has put and signalled, so it is late for nobody.
        self._until_looked([looks + 1 for looks in before])
        now = [self._library.test_looks(rank) for rank in range(SIZE)]
        # On a busy machine they have waited for one another too: each waits longer for this rank.
        longest = max(now[rank] - before[rank] for rank in OTHERS)
        self._until_looked([looks + longest + LOOKS + 3 for looks in now])

    def _until_looked(self, looks: Sequence[int]) -> None:
        pause = threading.Event()
        while any(self._library.test_looks(rank) < looks[rank] for rank in OTHERS):
            pause.wait(0.001)


def metrics_of(folder: Path) -> str:
    """What a server shows that serves prometheus_client's registry."""
    client = pytest.importorskip("prometheus_client", reason="it comes with vLLM")
    registry = client.CollectorRegistry()
    registry.register(RanksCollector([folder]))
    text: str = client.generate_latest(registry).decode()
    return text


def rounds(ranked: Ranked) -> list[Moment]:
    """Before the round, after a dispatch for which a rank is late, after such a combine."""
    exchange = ranked.exchange
    hidden = torch.ones(2, GEOMETRY.hidden_size)
    # Each token has an expert on the slow rank.
    ids = torch.tensor([[SLOW, exchange.config.ep_rank], [SLOW, 0]], dtype=torch.int32)
    moments = [ranked.moment()]
    ranked.be_slow()
    received = exchange.dispatch(hidden, ids, torch.ones(2, 2))
    moments.append(ranked.moment())
    region = exchange.combine_input()
    region.copy_(received.hidden_states)
    ranked.be_slow()
    exchange.combine(region, received.metadata)
    moments.append(ranked.moment())
    return moments


@pytest.fixture(params=["0", "8"], ids=["bulk", "small"])
def moments(
    request: pytest.FixtureRequest,
    library: host.HostLibrary,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> list[Moment]:
    """What rank 0 has seen; the log is caplog's."""
    monkeypatch.setenv("MOE_NVLINK_SMALL_TOKENS", request.param)
    monkeypatch.setattr(host, "load", lambda _text: library)
    # Only the test writes: the writer's thread would use the same scratch file.
    monkeypatch.setattr(stats, "_PERIOD_S", 3600.0)
    caplog.set_level("WARNING", logger="moe_nvlink_plugin")

    def rank_main(group: ThreadGroup) -> list[Moment]:
        ranked = Ranked(group, library, tmp_path / "metrics")
        try:
            return rounds(ranked)
        finally:
            ranked.pool.close()

    found = run_ranks(SIZE, rank_main)[0]
    assert not (tmp_path / "metrics").exists(), "a worker that ends takes its file away"
    return found


def more(before: Moment, after: Moment) -> list[list[int]]:
    pairs = zip(before.waits, after.waits, strict=True)
    return [[b - a for a, b in zip(*rows, strict=True)] for rows in pairs]


def test_the_slow_rank_is_named_everywhere(
    moments: list[Moment],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for moment in moments:
        assert moment.waits == [list(one.waited_ns) for one in moment.stats]
    assert sum(map(sum, moments[0].waits)) == 0
    for before, after in itertools.pairwise(moments):
        waited = more(before, after)
        for rank in OTHERS:
            assert waited[rank][SLOW] >= LOOKS * LOOK_NS
        assert waited[SLOW] == [0] * SIZE, "the others were there before"
        check_log(before, after, caplog)
        check_top(before, after, monkeypatch, capsys)


def check_log(before: Moment, after: Moment, caplog: pytest.LogCaptureFixture) -> None:
    caplog.clear()
    slow = slow_rank.SlowRank()
    slow.look(before.waits, 100.0)
    assert not caplog.records
    slow.look(after.waits, 100.1)
    waited = [more(before, after)[rank][SLOW] / 1e9 for rank in OTHERS]
    (record,) = caplog.records
    assert record.getMessage().startswith(
        f"moe_nvlink: all ranks wait for rank {SLOW}: waits that ended in the last 0.1 s took each "
        f"of the other 3 rank(s) {min(waited):.1f} to {max(waited):.1f} s; look at rank {SLOW}: "
    )


def check_top(
    before: Moment,
    after: Moment,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Two servers: one shows ranks 0 and 1, the other the rest."""
    moments = iter([before.metrics] * 2 + [after.metrics] * 2)
    clock = iter([10.0, 11.0])
    of_second = SimpleNamespace(
        monotonic=lambda: next(clock), sleep=lambda _: None, strftime=time.strftime
    )
    monkeypatch.setattr(top, "time", of_second)
    with serving(moments) as url:
        assert cli.main(["top", f"{url}/a", f"{url}/b/metrics", "--interval", "0.1", "--once"]) == 0
    title, head, *rows = capsys.readouterr().out.splitlines()
    assert title.endswith(f"  {SIZE} rank(s)")
    assert re.split(r"  +", head.strip())[:4] == ["rank", "waited for", "most by", "by all"]
    assert [int(row.split()[0]) for row in rows[:1]] == [SLOW]
    waited = more(before, after)
    of_slow = {rank: waited[rank][SLOW] / 1e9 for rank in OTHERS}
    _, average, _, who, most, by_all, waits, *_ = rows[0].split()
    assert average == f"{sum(of_slow.values()) / 3:.1%}"
    assert of_slow[int(who)] == max(of_slow.values())
    assert (most, by_all) == (f"{max(of_slow.values()):.1%}", f"{min(of_slow.values()):.1%}")
    assert waits == "0.0%"


@contextlib.contextmanager
def serving(texts: Iterator[str]) -> Iterator[str]:
    """A web server that answers each question for metrics with the next text; its URL.

    The paths of two servers stand for their ranks: /a/metrics has ranks 0 and 1.
    """

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            ranks = {"/a/metrics": "01", "/b/metrics": "23"}[self.path]
            lines = next(texts).splitlines(keepends=True)
            mine = [line for line in lines if re.search(f'ep_rank="[{ranks}]"|^#', line)]
            self.send_response(200)
            self.end_headers()
            self.wfile.write("".join(mine).encode())

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_metrics_have_names_units_and_labels(moments: list[Moment]) -> None:
    _, _, last = moments
    lines = last.metrics.splitlines()
    of_audits = ("audited", "audit_faults")  # without samples: nobody has asked for audits
    assert [line.split()[2:4] for line in lines if line.startswith("# TYPE")] == [
        [f"moe_nvlink_{name}_total", "counter"]
        for name in ("rounds", "tokens", "bytes", "wait_seconds", "faults", *of_audits)
    ]
    stats = last.stats[1]
    remote = stats.bytes_combined_remote
    waited = stats.waited_ns[SLOW] / 1e9
    for line in (
        'moe_nvlink_rounds_total{ep_rank="1"} 1.0',
        'moe_nvlink_tokens_total{ep_rank="1"} 2.0',
        f'moe_nvlink_bytes_total{{ep_rank="1",place="remote",verb="combine"}} {remote:.1f}',
        f'moe_nvlink_wait_seconds_total{{ep_rank="1",peer="2"}} {waited}',
        'moe_nvlink_faults_total{ep_rank="1"} 0.0',
    ):
        assert any(set(_words(line)) == set(_words(each)) for each in lines), (line, lines)
    assert not any('ep_rank="1",peer="1"' in line for line in lines)


def _words(sample: str) -> list[str]:
    """Its name, labels and value: prometheus_client writes labels in their own order."""
    return re.split(r"[{},]\s*", sample)


def test_the_watch_looks_by_itself_and_names_a_rank_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(slow_rank, "LEAST_SHARE", 0.0)
    done, waits = threading.Event(), [[0, 0], [0, 0]]

    def slower() -> list[list[int]] | None:
        if waits[0][1] == 5_000_000_000:
            done.set()
            return None
        waits[0][1] += 1_000_000_000
        return [list(row) for row in waits]

    with caplog.at_level(logging.WARNING, logger="moe_nvlink_plugin"):
        watch = slow_rank.SlowRankWatch(slower, period_s=0.001)
        assert done.wait(60)
        watch.close()
    (record,) = caplog.records
    assert "all ranks wait for rank 1" in record.getMessage()


def test_a_rank_is_named_again_only_much_later(caplog: pytest.LogCaptureFixture) -> None:
    slow = slow_rank.SlowRank()
    seconds_waited = {0: 0, 10: 9, 20: 18, 320: 300, 640: 305}
    named = []
    for now, waited in seconds_waited.items():
        caplog.clear()
        slow.look([[0, waited * 10**9], [0, 0]], float(now))
        named += [now] * len(caplog.records)
    assert named == [10, 320], "at 20 it is no news; until 640 the rank was not slow"


def test_totals_that_are_away_for_a_while_are_no_news(caplog: pytest.LogCaptureFixture) -> None:
    """As between release and renewal, which writes them into the new memory."""
    slow = slow_rank.SlowRank()
    for now, waited in enumerate((900, 0, 0, 900)):
        slow.look([[0, waited * 10**9], [0, 0]], float(now))
    assert not caplog.records


def test_a_pool_starts_the_watch_on_rank_0_and_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    class Watch(slow_rank.SlowRankWatch):
        def __init__(self, waits: Any) -> None:
            made.append(self)
            super().__init__(waits)

    monkeypatch.setattr(pool, "SlowRankWatch", Watch)

    def rank_main(group: ThreadGroup) -> None:
        ranks = Ranks(group, group.rank, 2, WORDING)
        mine = ExchangePool(ranks, torch.device("cpu"), Options())
        mine.exchange(GEOMETRY)
        group.all_gather_object(None)
        mine.close()
        mine.close()

    run_ranks(2, rank_main)
    (watch,) = made
    assert not watch._thread.is_alive()


_PUBLISHES = """
import sys
from moe_nvlink_plugin.integration.vllm.metrics import ProcessCounters
counters = ProcessCounters()
for rounds in (3, 7):
    counted = dict.fromkeys(("tokens", "bytes_dispatched", "bytes_dispatched_remote",
                             "bytes_combined", "bytes_combined_remote", "faults"), 0)
    counters.publish({"ep_rank": 1, "rounds": rounds, "waited_ns": [rounds * 10**9, 5], **counted})
"""


def test_workers_of_several_servers_count_where_prometheus_client_looks(tmp_path: Path) -> None:
    """With --api-server-count vLLM sets this variable, and each server shows the directory."""
    client = pytest.importorskip("prometheus_client", reason="it comes with vLLM")
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", _PUBLISHES], env=environment, check=True)
    registry = client.CollectorRegistry()
    multiprocess = pytest.importorskip("prometheus_client.multiprocess")
    multiprocess.MultiProcessCollector(registry, path=str(tmp_path))
    (look,) = [top.parse([client.generate_latest(registry).decode()], 0.0)]
    assert look.ranks[1]["rounds", ""] == 7
    assert look.ranks[1]["wait_seconds", "0"] == 7.0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["localhost:8000"], "'localhost:8000' is no URL of a server"),
        (["http://"], "'http://' is no URL of a server"),
        (["http://localhost:99999"], "'http://localhost:99999' is no URL of a server"),
        (["http://127.0.0.1:9"], "http://127.0.0.1:9/metrics does not answer"),
    ],
)
def test_top_says_what_is_wrong_with_a_url(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["top", *arguments, "--once"]) == 1
    assert said in capsys.readouterr().err


def test_top_leaves_other_programs_metrics_out() -> None:
    lines = [
        'moe_nvlink_rounds_total{rank="0",peer="x"} 5',
        'moe_nvlink_rounds_total{ep_rank="first"} 5',
        'moe_nvlink_rounds_total{ep_rank="1"} abc',
        'moe_nvlink_rounds_total{ep_rank="1"} NaN',
        'moe_nvlink_rounds_total{ep_rank="2"} 7.0',
    ]
    assert top.parse(["\n".join(lines)], 0.0).ranks == {2: {("rounds", ""): 7.0}}


def test_top_without_ranks_and_after_a_restart() -> None:
    empty = top.parse(["num_requests_running 1\n"], 0.0)
    assert top.table(empty, empty) == "no rank shows metrics of moe_nvlink yet"
    texts = [f'moe_nvlink_rounds_total{{ep_rank="0"}} {count}\n' for count in (50, 4)]
    before, after = (top.parse([text], float(at)) for at, text in enumerate(texts))
    assert top.table(before, after).splitlines()[1].split()[5] == "0.0"
