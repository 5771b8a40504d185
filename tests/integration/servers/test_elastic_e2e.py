"""A group of servers that grows and shrinks while it answers (elastic expert parallelism).

    .venv-vllm33/bin/python -m pytest -n 0 -m long tests/integration/servers/test_elastic_e2e.py

vLLM scales without Ray from 0.33 on, so this runs in the environment of `make vllm33-env`;
test_vllm33.py runs it there.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

pytest.importorskip(
    "vllm.distributed.elastic_ep.external_elastic_ep", reason="vLLM before 0.33 scales by Ray only"
)

from moe_nvlink_plugin.integration.demo.server import ServerError, free_port
from tests.integration.servers.servers import EpServer, Requests, our_files
from tests.integration.servers.test_vllm_e2e import EAGER

pytestmark = [pytest.mark.e2e, pytest.mark.long]

#: Two ranks have all 16 experts once.
FIRST_SIZE, MOST = 2, 4
#: Of so few steps that experts move between and beside all that happens here.
INTERVAL = 12
BALANCING = {
    "num_redundant_experts": 0,
    "step_interval": INTERVAL,
    "window_size": INTERVAL,
    "use_async": False,
    "communicator": "torch_gloo",
}
#: Several seconds of them, so that requests are on their way when ranks join; each stream of
#: requests has a length of its own, so that they do not all end together.
LONG_TOKENS = (150, 250, 350)


class Elastic:
    """Servers of a group, one a rank."""

    def __init__(self, requests: Requests, folder: Path, stack: contextlib.ExitStack) -> None:
        self.ranks: list[EpServer] = []
        #: When all old ranks had last said that ranks have joined or left.
        self.changed = 0.0
        self._requests, self._folder, self._stack = requests, folder, stack
        self._meeting = f"--data-parallel-rpc-port={free_port()}"
        self._stats = folder / "stats"
        for rank in range(FIRST_SIZE):
            self._start(rank, FIRST_SIZE)
        for server in self.ranks:
            server.server.wait_until_ready()

    def _start(self, rank: int, size: int, **environment: str) -> EpServer:
        server = EpServer(
            self._requests,
            self._folder,
            f"rank {rank} of {size}",
            *(EAGER, "--enable-elastic-ep", f"--elastic-ep-max-dp-size={MOST}", "--enable-eplb"),
            f"--eplb-config={json.dumps(BALANCING)}",
            *(f"--data-parallel-size={size}", f"--data-parallel-rank={rank}"),
            *("--data-parallel-address=127.0.0.1", self._meeting),
            environment={
                "MOE_NVLINK_STATS_DIR": str(self._stats),
                # Load balancing on CPU ranks is refused with the other one.
                "VLLM_USE_V2_MODEL_RUNNER": "0",
                **environment,
            },
        )
        server.stats_folder = self._stats
        self._stack.callback(server.server.stop)
        self.ranks.append(server)
        return server

    def scale(self, size: int) -> None:
        """Lets ranks join or leave; returns when they have."""
        old = list(self.ranks)
        joining = [
            self._start(rank, size, VLLM_ELASTIC_EP_SCALE_UP_LAUNCH="1")
            for rank in range(len(old), size)
        ]
        with ThreadPoolExecutor(len(old)) as pool:
            told = [pool.submit(_scale, server, size) for server in old]
            self._wait(told)
        self.changed = time.monotonic()
        for server in joining:
            server.server.wait_until_ready()
        for server in self.ranks[size:]:
            server.server.stop()
        del self.ranks[size:]

    def _wait(self, told: Sequence[Future[None]]) -> None:
        while not all(one.done() for one in told):
            for server in self.ranks:  # vLLM itself would wait for a dead one for minutes
                assert server.server.pids, server.server.log_tail()
            time.sleep(0.5)
        for one in told:
            one.result()

    def differing(self, numbers: range) -> list[list[int]]:
        """Of each rank the requests whose tokens are not the one-rank server's; all at once."""
        with ThreadPoolExecutor(len(self.ranks)) as pool:
            return list(pool.map(lambda server: server.differing(numbers, 4), self.ranks))


def _scale(server: EpServer, size: int) -> None:
    server.server._post("/scale_elastic_ep", {"new_data_parallel_size": size}, 400.0)


class Answer(NamedTuple):
    """One of a stream of equal requests: when it was asked for and came; no tokens: refused."""

    asked: float
    came: float
    tokens: list[int]


class Stream(threading.Thread):
    """Asks a server for the same long answer again and again, until it is told to end."""

    def __init__(self, server: EpServer, number: int) -> None:
        super().__init__(daemon=True)
        self.answers: list[Answer] = []
        self._server, self._number, self._ended = server.server, number, False
        self._prompt = server.requests.prompts[number]

    def ask(self) -> Answer:
        asked = time.monotonic()
        length = LONG_TOKENS[self._number]
        (answer,) = self._server.complete([self._prompt], max_tokens=length, timeout_s=300)
        return Answer(asked, time.monotonic(), answer.token_ids)

    def run(self) -> None:
        while not self._ended:
            asked = time.monotonic()
            try:
                self.answers.append(self.ask())
            except ServerError as error:
                if "HTTP 503" not in str(error):  # which vLLM says while ranks change
                    raise
                self.answers.append(Answer(asked, time.monotonic(), []))
                time.sleep(0.2)

    def end(self) -> None:
        """Waits for the last answer."""
        self._ended = True
        self.join(timeout=300)
        assert not self.is_alive()


def mapped_of(server: EpServer, pid: int) -> list[str]:
    """The lines by which a server's processes map memory that a worker has shared."""
    paths = (Path(f"/proc/{one}/maps") for one in server.server.pids)
    lines = [line for path in paths for line in path.read_text().splitlines()]
    return [line for line in lines if "moe_nvlink" in line and f"-{pid}-" in line]


def test_tokens_of_every_size_are_those_of_one_rank(requests: Requests, folder: Path) -> None:
    """Also those of requests that were on their way when ranks joined."""
    with contextlib.ExitStack() as stack:
        group = Elastic(requests, folder, stack)
        assert group.differing(range(6)) == [[], []]
        streams = [Stream(server, n) for server in group.ranks for n in range(len(LONG_TOKENS))]
        expected = [stream.ask().tokens for stream in streams[: len(LONG_TOKENS)]] * FIRST_SIZE
        for stream in streams:
            stream.start()
        group.scale(3)
        for stream in streams:
            stream.end()
        for stream, tokens in zip(streams, expected, strict=True):
            assert all(answer.tokens in (tokens, []) for answer in stream.answers)
        across = [
            answer
            for stream in streams
            for answer in stream.answers
            if answer.tokens and answer.asked < group.changed < answer.came
        ]
        assert across, "a request was on its way before the change and after it"
        assert group.differing(range(6, 14)) == [[], [], []]
        of_three = group.ranks[0].stats(3)
        assert [counted["ep_size"] for counted in of_three] == [3, 3, 3]
        assert all(counted["bytes_dispatched_remote"] > 0 for counted in of_three)
        pids = [counted["pid"] for counted in of_three]
        assert mapped_of(group.ranks[0], pids[2])

        group.scale(2)
        assert group.differing(range(14, 22)) == [[], []]
        of_two = group.ranks[0].stats(2)
        assert [(counted["ep_size"], counted["pid"]) for counted in of_two] == [
            (2, pids[0]),
            (2, pids[1]),
        ]
        for server in group.ranks:
            assert mapped_of(server, pids[2]) == [], "of the rank that has left"
        moves = [counted["eplb"]["rearrangements"] for counted in of_two]
        assert moves[0] == moves[1] > of_three[0]["eplb"]["rearrangements"] > 0

        group.scale(4)
        assert group.differing(range(22, 30)) == [[], [], [], []]
        of_four = group.ranks[0].stats(4)
        assert [counted["ep_size"] for counted in of_four] == [4] * 4
        assert our_files([*of_three, *of_four]) == []
