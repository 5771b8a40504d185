"""A group of servers that grows and shrinks while it answers (elastic expert parallelism).

    .venv-vllm33/bin/python -m pytest -n 0 -m long tests/integration/servers/test_elastic_e2e.py

vLLM scales without Ray from 0.33 on, so this runs in the environment of `make vllm33-env`;
test_vllm33.py runs it there.
"""

from __future__ import annotations

import contextlib
import json
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip(
    "vllm.distributed.elastic_ep.external_elastic_ep", reason="vLLM before 0.33 scales by Ray only"
)

from moe_nvlink_plugin.integration.demo.server import free_port
from tests.integration.servers.servers import EpServer, Requests, our_files
from tests.integration.servers.test_vllm_e2e import EAGER, QWEN3, ask_one_rank

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(900)]

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
#: Several seconds of them, so that they are on their way when ranks join.
LONG_TOKENS = 300


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("elastic")


@pytest.fixture(scope="module")
def requests(folder: Path) -> Requests:
    return ask_one_rank(QWEN3, folder)


class Elastic:
    """Servers of a group, one a rank."""

    def __init__(self, requests: Requests, folder: Path, stack: contextlib.ExitStack) -> None:
        self.ranks: list[EpServer] = []
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

    @contextlib.contextmanager
    def scaling(self, size: int) -> Iterator[None]:
        """Lets ranks join or leave while the block runs; returns when they have."""
        old = list(self.ranks)
        joining = [
            self._start(rank, size, VLLM_ELASTIC_EP_SCALE_UP_LAUNCH="1")
            for rank in range(len(old), size)
        ]
        with ThreadPoolExecutor(len(old)) as pool:
            told = [pool.submit(_scale, server, size) for server in old]
            yield
            self._wait(told)
        for server in joining:
            server.server.wait_until_ready()
        for server in self.ranks[size:]:
            server.server.stop()
        del self.ranks[size:]

    def _wait(self, told: Sequence[Future[int]]) -> None:
        while not all(one.done() for one in told):
            for server in self.ranks:  # vLLM itself would wait for a dead one for minutes
                assert server.server.pids, server.server.log_tail()
            time.sleep(0.5)
        assert [one.result() for one in told] == [200] * len(told)

    def differing(self, numbers: range) -> list[list[int]]:
        """Of each rank the requests whose tokens are not the one-rank server's; all at once."""
        with ThreadPoolExecutor(len(self.ranks)) as pool:
            return list(pool.map(lambda server: server.differing(numbers, 4), self.ranks))


def _scale(server: EpServer, size: int) -> int:
    body = json.dumps({"new_data_parallel_size": size}).encode()
    url = f"{server.server.url}/scale_elastic_ep"
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=400) as answer:
        status: int = answer.status
        return status


def long_answers(server: EpServer) -> list[list[int]]:
    prompts = server.requests.prompts[:3]
    answers = server.server.complete(prompts, max_tokens=LONG_TOKENS, timeout_s=300)
    return [answer.token_ids for answer in answers]


def mapped_of(server: EpServer, pid: int) -> list[str]:
    """The lines by which a server's processes map memory that a worker has shared."""
    paths = (Path(f"/proc/{one}/maps") for one in server.server.pids)
    lines = [line for path in paths for line in path.read_text().splitlines()]
    return [line for line in lines if "moe_nvlink" in line and f"-{pid}-" in line]


def test_ranks_join_and_leave(requests: Requests, folder: Path) -> None:
    """Tokens of every size are those of one rank, also of requests that were on their way."""
    with contextlib.ExitStack() as stack:
        group = Elastic(requests, folder, stack)
        assert group.differing(range(6)) == [[], []]
        expected = long_answers(group.ranks[0])

        with ThreadPoolExecutor(FIRST_SIZE) as pool:
            on_their_way = [pool.submit(long_answers, server) for server in group.ranks]
            with group.scaling(3):
                pass
            assert [answers.result() for answers in on_their_way] == [expected] * FIRST_SIZE
        assert group.differing(range(6, 14)) == [[], [], []]
        of_three = group.ranks[0].stats(3)
        assert [counted["ep_size"] for counted in of_three] == [3, 3, 3]
        assert all(counted["bytes_dispatched_remote"] > 0 for counted in of_three)
        pids = [counted["pid"] for counted in of_three]
        assert mapped_of(group.ranks[0], pids[2])

        with group.scaling(2):
            pass
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

        with group.scaling(4):
            pass
        assert group.differing(range(22, 30)) == [[], [], [], []]
        of_four = group.ranks[0].stats(4)
        assert [counted["ep_size"] for counted in of_four] == [4] * 4
        assert our_files([*of_three, *of_four]) == []
