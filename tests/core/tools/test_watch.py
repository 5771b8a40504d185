"""moe-nvlink watch: which rank it takes for dead, what it posts to whom, and when it ends.

The servers are stand-ins on real ports. The clock is the test's: a look takes no time, and one
second lies between two looks.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import socket
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from moe_nvlink_plugin import frameworks
from moe_nvlink_plugin.errors import ConfigError
from moe_nvlink_plugin.tools import cli, rank_server, watch
from moe_nvlink_plugin.tools.rank_server import State, look_at
from tests.support.programs import python

HEALTHY, UNHEALTHY = "healthy", "unhealthy"
TRANSIENT: dict[str, Any] = {"instruction": "retry", "params": {}}


def without(*ranks: int) -> dict[str, Any]:
    return {"instruction": "retry", "params": {"dead_ranks": list(ranks)}}


class Server:
    """A rank's server. Its port stays reserved while it is down: then it refuses connections.

    Attributes:
        answers: path -> code and content, instead of what a server of vLLM would say.
        posts: the time and the instruction of each post.
    """

    def __init__(self, group: Group, rank: int) -> None:
        self.group, self.rank = group, rank
        self.status: dict[str, Any] = {"id": rank, "status": HEALTHY}
        self.answers: dict[str, tuple[int, bytes]] = {}
        self.posts: list[tuple[float, Any]] = []
        self.lets_go = threading.Event()
        self.hangs = False
        self._reserved = socket.socket()
        self._reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._reserved.bind(("127.0.0.1", 0))
        self.port = self._reserved.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._http: http.server.ThreadingHTTPServer | None = None
        self.start()

    def start(self) -> None:
        self._http = http.server.ThreadingHTTPServer(("127.0.0.1", self.port), self._handler())
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,))
        self._thread.start()

    def stop(self) -> None:
        if self._http is not None:
            self._http.shutdown()
            self._thread.join()
            self._http.server_close()
            self._http = None

    def close(self) -> None:
        self.lets_go.set()
        self.stop()
        self._reserved.close()

    def _handler(self) -> type[http.server.BaseHTTPRequestHandler]:
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                engines = {"engines": [server.status]}
                self.answer(200, b"" if self.path == "/health" else json.dumps(engines).encode())

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                assert self.headers["Content-Type"] == "application/json"
                if self.path not in server.answers:
                    server.group.take(server.rank, body["params"].get("dead_ranks", []))
                server.posts.append((server.group.seconds, body))
                self.answer(202, b'{"request_id": "1"}')

            def answer(self, code: int, content: bytes) -> None:
                if server.hangs:
                    server.lets_go.wait()
                    return  # whoever asked has left
                code, content = server.answers.get(self.path, (code, content))
                self.send_response(code)
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                pass

        return Handler


class Group:
    """Ranks that go on once every live one has been told to, and of the same dead ones."""

    def __init__(self, size: int) -> None:
        self.seconds = 0.0
        self.servers = [Server(self, rank) for rank in range(size)]
        self.dead: list[int] = []
        self.heals = True
        self._told: dict[int, list[int]] = {}
        self._lock = threading.Lock()

    def take(self, rank: int, dead: list[int]) -> None:
        with self._lock:
            self._told[rank] = dead
            live = [one for one in self.servers if one.rank not in self.dead]
            if self.heals and all(self._told.get(one.rank) == self.dead for one in live):
                self._told.clear()
                for one in live:
                    one.status = {"id": one.rank, "status": HEALTHY}

    def set(self, status: str, *ranks: int, **more: str) -> None:
        for rank in ranks:
            self.servers[rank].status = {"id": rank, "status": status, **more}

    def kill(self, rank: int) -> None:
        self.dead = sorted({*self.dead, rank})
        self.servers[rank].stop()

    def posts(self) -> list[list[tuple[float, Any]]]:
        return [server.posts for server in self.servers]

    def posted(
        self, plan: Mapping[int, Callable[[], object]], until: int = 200, **options: Any
    ) -> list[list[tuple[float, Any]]]:
        """Posts to each rank, after a watch that ends in Ctrl-C."""
        assert self.play(plan, until, **options) == 0
        return self.posts()

    def kill_engine(self, rank: int) -> None:
        """Its server lives on."""
        self.dead = sorted([*self.dead, rank])
        self.servers[rank].answers["/health"] = (503, b"")

    def play(self, plan: Mapping[int, Callable[[], object]], until: int, **options: Any) -> int:
        """Watch them while the plan's calls come at their seconds; Ctrl-C comes at the end."""

        def sleep(seconds: float) -> None:
            self.seconds += seconds
            if self.seconds > until:
                raise KeyboardInterrupt
            plan.get(int(self.seconds), lambda: None)()

        urls = [server.url for server in self.servers]
        chosen = watch.Options(**{"act": True, **options})
        return watch.Watch(urls, chosen, lambda: self.seconds, sleep).run()


class Opener:
    """Waits for servers as long as it takes, but not for those that hang."""

    def __init__(self, group: Group, opener: urllib.request.OpenerDirector) -> None:
        self.group, self.opener = group, opener

    def open(self, request: urllib.request.Request, timeout: float) -> Any:
        hang = {f"127.0.0.1:{server.port}" for server in self.group.servers if server.hangs}
        return self.opener.open(request, timeout=0.05 if request.host in hang else 60.0)


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[Group]:
    """Three ranks."""
    with contextlib.ExitStack() as stack:
        made = Group(3)
        for server in made.servers:
            stack.callback(server.close)
        monkeypatch.setattr(rank_server, "DIRECT", Opener(made, rank_server.DIRECT))
        yield made


# Without a death.


def test_all_try_again_after_a_transient_fault(
    group: Group, capsys: pytest.CaptureFixture[str]
) -> None:
    fault = {2: lambda: group.set(UNHEALTHY, 0, 1, 2, fault_info="ExchangeTimeoutError")}
    assert group.posted(fault) == [[(5.0, TRANSIENT)]] * 3
    said = capsys.readouterr().out
    assert "rank 1 is unhealthy, fault_info: 'ExchangeTimeoutError'" in said
    assert "rank(s) 0, 1, 2: all healthy" in said


def test_ranks_have_time_to_notice_the_fault(group: Group) -> None:
    """Unhealthy later than the patience, but before the retry: a healthy rank would refuse it."""
    plan = {2: lambda: group.set(UNHEALTHY, 1), 9: lambda: group.set(UNHEALTHY, 0, 2)}
    assert group.posted(plan) == [[(9.0, TRANSIENT)]] * 3


def test_a_rank_that_never_notices_is_told_nevertheless(group: Group) -> None:
    assert group.posted({2: lambda: group.set(UNHEALTHY, 1)}) == [[(17.0, TRANSIENT)]] * 3


def test_a_fault_that_heals_by_itself_needs_no_retry(group: Group) -> None:
    plan = {2: lambda: group.set(UNHEALTHY, 1), 4: lambda: group.set(HEALTHY, 1)}
    assert group.posted(plan, until=60) == [[], [], []]


# Deaths.


def test_survivors_go_on_after_a_death_under_load(group: Group) -> None:
    """The status of the dead rank stays healthy as long as its server lives."""

    def fail() -> None:
        group.kill_engine(2)
        group.set(UNHEALTHY, 0, 1)

    plan = {2: fail, 4: lambda: group.kill(2)}
    assert group.posted(plan) == [[(5.0, without(2))], [(5.0, without(2))], []]


def test_an_engine_that_says_it_is_dead(group: Group) -> None:
    def fail() -> None:
        group.dead = [1]
        group.set("dead", 1)
        group.set(UNHEALTHY, 0, 2)

    assert group.posted({2: fail}) == [[(5.0, without(1))], [], [(5.0, without(1))]]


def test_a_dead_engine_alone_is_no_death(group: Group) -> None:
    """503 is also what a server answers that is not up yet."""
    group.servers[1].answers["/health"] = (503, b"")
    assert group.posted({}, until=60) == [[], [], []]


def test_a_server_that_has_never_answered_still_starts(group: Group) -> None:
    for server in group.servers:
        server.stop()
    plan = {50: group.servers[1].start, 100: group.servers[0].start, 150: group.servers[2].start}
    assert group.posted(plan) == [[], [], []]


def test_a_server_that_is_back_in_time_has_not_died(group: Group) -> None:
    """And its patience begins anew."""
    second = group.servers[2]
    plan = {2: second.stop, 4: second.start, 5: second.stop, 7: second.start}
    assert group.posted(plan, until=60) == [[], [], []]


def test_a_rank_that_comes_back_after_the_retry_stays_out(
    group: Group, capsys: pytest.CaptureFixture[str]
) -> None:
    """What follows is for the survivors alone, and names it again. Its own faults are none."""
    plan = {
        2: lambda: group.kill(2),
        20: group.servers[2].start,
        25: lambda: group.set(UNHEALTHY, 2),
        30: lambda: group.set(UNHEALTHY, 0, 1),
    }
    assert group.posted(plan) == [[(5.0, without(2)), (33.0, without(2))]] * 2 + [[]]
    said = capsys.readouterr().out
    assert "rank 2 is healthy, and stays out" in said
    assert said.count("all healthy") == 2


def test_each_death_is_a_fault_of_its_own(group: Group) -> None:
    """The second one comes while the survivors of the first try to go on, and names both."""
    plan = {2: lambda: group.kill(2), 10: lambda: group.kill(1)}
    group.heals = False
    group.set(UNHEALTHY, 0, 1)
    assert group.posted(plan, until=20, attempts=1) == [
        [(5.0, without(2)), (13.0, without(1, 2))],
        [(5.0, without(2))],
        [],
    ]


def test_ranks_that_die_one_after_the_other_are_named_together(group: Group) -> None:
    plan = {2: lambda: group.kill(2), 4: lambda: group.kill(1)}
    assert group.posted(plan, until=60) == [[(7.0, without(1, 2))], [], []]


def test_the_patience_of_each_begins_with_the_fault(group: Group) -> None:
    """And not with the death of another rank."""
    group.set(UNHEALTHY, 0)
    plan = {2: lambda: group.kill_engine(2), 4: lambda: group.kill_engine(1)}
    assert group.posted(plan, until=60) == [[(7.0, without(1, 2))], [], []]


def test_the_death_of_rank_0_ends_everything(
    group: Group, capsys: pytest.CaptureFixture[str]
) -> None:
    group.set(UNHEALTHY, 1, 2)
    assert group.play({1: lambda: group.kill(0)}, until=60) == watch.RANK_0_DIED
    assert group.posts() == [[], [], []]
    assert group.seconds == 4
    assert "the group ends with rank 0" in capsys.readouterr().out


# Servers that say nothing, or nothing useful.


def test_a_rank_that_hangs_is_not_dead(group: Group, capsys: pytest.CaptureFixture[str]) -> None:
    """The others wait until it answers; then all try again."""
    hanging = group.servers[1]

    def hang() -> None:
        hanging.hangs = True
        group.set(UNHEALTHY, 0, 1, 2)

    def wake() -> None:
        hanging.hangs = False

    assert group.posted({2: hang, 30: wake}, until=100) == [[(30.0, TRANSIENT)]] * 3
    assert "rank(s) 1: neither up nor dead yet" in capsys.readouterr().out


GARBAGE = [
    b"",
    b"\xff\xfe",
    b"null",
    b"[]",
    b"{}",
    b'{"engines": []}',
    b'{"engines": [{"id": 2}]}',
    b'{"engines": [{"id": 2, "status": "asleep"}]}',
    b'{"engines": [{"id": 2, "status": 1}]}',
    b'{"engines": [{"id": 2, "status": ["dead"]}]}',
    b'{"engines": [{"id": "2", "status": "dead"}]}',
    b'{"engines": [{"id": 2, "status": "dead"}, {"id": 3, "status": "dead"}]}',
    b"[" * 60_000,
    b"0" * 200_000,
]


def test_garbage_is_no_death(group: Group, capsys: pytest.CaptureFixture[str]) -> None:
    confused = group.servers[2]
    seconds = 4 * len(GARBAGE)

    def say(code: int, content: bytes) -> Callable[[], None]:
        return lambda: confused.answers.update({"/fault_tolerance/status": (code, content)})

    plan = {4 * turn: say(200, content) for turn, content in enumerate(GARBAGE, 1)}
    plan |= {seconds + 8: say(500, b'{"engines": [{"id": 2, "status": "dead"}]}')}
    group.set(UNHEALTHY, 0, 1)
    say(404, b"")()
    assert group.play(plan, until=seconds + 20) == 0
    assert group.posts() == [[], [], []]
    told = capsys.readouterr().out
    assert "rank 2 runs without fault tolerance: start it with that" in told
    assert "rank 2 answers 500 and no rank's status: b'{" in told
    assert "dead: it" not in told


def test_what_a_server_says_is_shown_as_text(group: Group) -> None:
    group.set(UNHEALTHY, 0, fault_info="\x1b[2J" + "x" * 10_000)
    look = look_at(0, group.servers[0].url)
    assert look.state is State.UNHEALTHY
    assert look.text.isprintable()
    assert len(look.text) < 300


def test_urls_in_another_order_would_leave_out_the_wrong_rank(group: Group) -> None:
    group.set(HEALTHY, 1)
    group.servers[2].status = group.servers[1].status
    with pytest.raises(
        ConfigError, match=r"URL 2 \(.*\) is of rank 1: name the URLs in rank order"
    ):
        group.play({}, until=3)


@pytest.mark.parametrize("url", ["localhost:8000", "http://", "http://localhost:99999"])
def test_a_url_of_no_server(url: str) -> None:
    with pytest.raises(ConfigError, match="is no URL of a server"):
        watch.Watch([url], watch.Options())


def test_no_proxy_answers_for_a_server(group: Group) -> None:
    """urllib reads the environment when it is asked for an opener."""
    group.servers[0].stop()
    code = "import sys; from moe_nvlink_plugin.tools import rank_server as it; "
    code += "print(it.look_at(0, sys.argv[1]).text)"
    url, other, _ = (server.url for server in group.servers)
    done = python("-c", code, url, variables={"http_proxy": other, "no_proxy": ""})
    assert done.stdout == "refuses connections\n"


# Retries that do not heal.


def test_a_rank_that_did_not_take_the_retry_is_asked_again(group: Group) -> None:
    """It alone: the others have it, and wait for this rank."""
    deaf = group.servers[1]
    deaf.answers["/fault_tolerance/apply"] = (500, b"not now")
    plan = {2: lambda: group.kill(2), 7: deaf.answers.clear}
    assert group.posted(plan) == [
        [(5.0, without(2))],
        [(5.0, without(2)), (8.0, without(2))],
        [],
    ]


def test_a_rank_that_never_takes_it(group: Group, capsys: pytest.CaptureFixture[str]) -> None:
    for server in group.servers:
        server.answers["/fault_tolerance/apply"] = (400, b"Invalid instruction")
    group.set(UNHEALTHY, 0, 1, 2)
    assert group.play({}, until=200) == watch.GAVE_UP
    assert [when for when, _ in group.servers[2].posts] == [3, 6, 9]
    assert "rank 2 did not take it: it answers 400: b'Invalid" in capsys.readouterr().out


def test_retries_are_bounded(group: Group, capsys: pytest.CaptureFixture[str]) -> None:
    """The ranks take them and refuse later, as their status says."""
    group.heals = False
    group.set(UNHEALTHY, 0, 1, 2)
    plan = {4: lambda: group.set(UNHEALTHY, 1, ft_error="Rejecting retry")}
    assert group.play(plan, until=500, attempts=2, timeout_s=10.0) == watch.GAVE_UP
    assert [when for when, _ in group.servers[2].posts] == [3, 13]
    assert group.seconds == 23
    said = capsys.readouterr().out
    assert "rank 1 is unhealthy, ft_error: 'Rejecting retry'" in said
    assert "gives up after 2 attempt(s)" in said


def test_the_next_fault_has_attempts_of_its_own(group: Group) -> None:
    plan = {second: lambda: group.set(UNHEALTHY, 0, 1, 2) for second in (2, 12, 22)}
    assert group.play(plan, until=60, attempts=1) == 0
    assert [when for when, _ in group.servers[0].posts] == [5, 15, 25]


# A dry run, and the command for dead ranks.


def test_a_dry_run_posts_and_runs_nothing(
    group: Group, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A rank that is back has not been left out."""
    file = tmp_path / "run"

    def revive() -> None:
        group.servers[2].start()
        group.set(HEALTHY, 0, 1)

    def fail() -> None:
        group.kill(2)
        group.set(UNHEALTHY, 0, 1)

    plan = {2: fail, 100: revive, 110: lambda: group.set(UNHEALTHY, 0, 1, 2)}
    code = group.play(plan, until=200, act=False, attempts=1, restart=("touch", str(file)))
    assert code == 0
    assert group.posts() == [[], [], []]
    assert not file.exists()
    said = capsys.readouterr().out
    assert said.count("would post") == 2
    assert f"would post {json.dumps(without(2))} to rank(s) 0, 1\n" in said
    assert f"would post {json.dumps(TRANSIENT)} to rank(s) 0, 1, 2\n" in said
    assert f"would run touch {file}" in said
    assert "stays out" not in said


def test_a_command_runs_once_for_a_dead_rank_and_without_a_shell(
    group: Group, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C of the terminal does not reach it: it has a session of its own."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    told: list[str] = []
    code = "import os, sys; alone = os.getsid(0) == os.getpid(); "
    code += "open(sys.argv[1], 'w').write(f'{alone} ' + ' '.join(sys.argv[2:]))"
    command = (sys.executable, "-c", code, str(pipe), "{rank}", "{url};{}", "$HOME")
    plan = {
        2: lambda: group.kill(2),
        6: lambda: told.append(pipe.read_text()),  # waits for the command
        20: group.servers[2].start,
        30: group.servers[2].stop,
    }
    assert group.play(plan, until=60, restart=command) == 0
    assert told == [f"True 2 {group.servers[2].url};{{}} $HOME"]
    assert capsys.readouterr().out.count("  runs ") == 1


def test_a_command_that_is_not_there(group: Group, capsys: pytest.CaptureFixture[str]) -> None:
    """The survivors, which are idle, are told of the death all the same."""
    found = group.posted({2: lambda: group.kill(2)}, until=60, restart=("no-such-command",))
    assert found == [[(5.0, without(2))], [(5.0, without(2))], []]
    assert "cannot run it: [Errno 2]" in capsys.readouterr().out


# The shell's side.


def test_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    made = mock.Mock()
    made.return_value.run.return_value = watch.GAVE_UP
    monkeypatch.setattr(watch, "Watch", made)
    assert cli.main(["watch", "http://a", "http://b"]) == watch.GAVE_UP
    made.assert_called_once_with(["http://a", "http://b"], watch.Options())
    line = "--act --patience 4 --timeout 50 --interval 0.5 --attempts 2"
    cli.main(["watch", *line.split(), "--restart", "start 'a b' {rank}", "http://a"])
    times = {"patience_s": 4.0, "timeout_s": 50.0, "attempts": 2, "interval_s": 0.5}
    options = watch.Options(act=True, restart=("start", "a b", "{rank}"), **times)  # type: ignore[arg-type]
    made.assert_called_with(["http://a"], options)


def test_help_says_whose_servers_and_how_they_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = frameworks.Framework("Other", advice={frameworks.FAULT_TOLERANCE: "--survive"})
    monkeypatch.setattr(frameworks, "installed", lambda: (other,))
    with pytest.raises(SystemExit):
        cli.main(["watch", "--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert "its own Other server, started with fault tolerance (Other: --survive)." in told
