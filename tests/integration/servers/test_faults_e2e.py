"""Servers whose rank stops for a while, or dies: `retry` heals the others (fault tolerance)."""

from __future__ import annotations

import contextlib
import json
import signal
import time
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest

from tests.integration.servers.deployments import Deployment
from tests.integration.servers.servers import Asking, EpServer, Requests, our_files, send_signal
from tests.integration.servers.test_vllm_e2e import EAGER

pytestmark = pytest.mark.e2e

TIMEOUT_S = 3


@contextlib.contextmanager
def tolerant(requests: Requests, where: Path, name: str, *more: str) -> Iterator[list[EpServer]]:
    """The servers of a deployment, one a rank, with fault tolerance."""
    limit = {"MOE_NVLINK_TIMEOUT_S": str(TIMEOUT_S)}
    arguments = (EAGER, "--enable-fault-tolerance", *more)
    with Deployment(requests, where, name, *arguments, environment=limit) as deployment:
        yield deployment.answering


def status(server: EpServer) -> dict[str, Any]:
    """What a server says of its engine."""
    engine: dict[str, Any]
    (engine,) = server.server.get("/fault_tolerance/status")["engines"]
    return engine


def retry(servers: list[EpServer], **params: Any) -> None:
    body = json.dumps({"instruction": "retry", "params": params})
    for server in servers:
        code, text = server.server._request("POST", "/fault_tolerance/apply", body, 10.0)
        assert code == HTTPStatus.ACCEPTED, text


def wait_until(servers: list[EpServer], state: str) -> None:
    """Returns when all of them say so."""
    deadline = time.monotonic() + 90
    while [status(server)["status"] for server in servers] != [state] * len(servers):
        said = [status(server) for server in servers]
        assert time.monotonic() < deadline, f"not {state}: {said}"
        time.sleep(0.2)


@pytest.mark.long
def test_a_rank_that_has_stopped_for_a_while(requests: Requests, folder: Path) -> None:
    """Both engines notice; after `retry` the tokens are those of one rank again."""
    with tolerant(requests, folder, "external balancer") as servers:
        assert servers[0].differing(range(4), concurrency=4) == []
        worker = servers[0].stats(2)[1]["pid"]
        asking = [Asking(server) for server in servers]
        servers[0].wait_for_rounds(0, 100)
        send_signal(worker, signal.SIGSTOP)
        try:
            wait_until(servers[:1], "unhealthy")
        finally:
            send_signal(worker, signal.SIGCONT)
        wait_until(servers, "unhealthy")
        for one in asking:
            one.end()
        retry(servers)
        wait_until(servers, "healthy")
        for server in servers:
            assert server.differing(range(12), concurrency=6) == []


def kill_the_third(servers: list[EpServer]) -> list[dict[str, Any]]:
    """In the midst of requests; returns what all three had counted, which had answered before."""
    for server in servers:
        assert server.differing(range(2), concurrency=2) == []
    stats = servers[0].stats(3)
    asking = [Asking(server) for server in servers]
    servers[0].wait_for_rounds(0, stats[0]["rounds"] + 20)
    send_signal(stats[2]["pid"], signal.SIGKILL)
    wait_until(servers[:2], "unhealthy")
    for one in asking:
        one.end()
    return stats


def test_a_rank_that_has_died(requests: Requests, folder: Path) -> None:
    """The others serve on without its experts, and say which these are."""
    with tolerant(requests, folder, "external balancer of three") as servers:
        stats, alive = kill_the_third(servers), servers[:2]
        retry(alive, dead_ranks=[0])  # refused, and said so
        deadline = time.monotonic() + 30
        while not all("rank 0" in str(status(server).get("ft_error")) for server in alive):
            assert time.monotonic() < deadline
            time.sleep(0.2)
        retry(alive, dead_ranks=[2])
        wait_until(alive, "healthy")
        prompts, lengths = requests.prompts[:10], requests.lengths[:10]
        answers = []
        for server in alive:
            told = server.server.complete(prompts, max_tokens=lengths, concurrency=5)
            answers.append([answer.token_ids for answer in told])
            assert status(server)["dead_ranks"] == [2]
            assert status(server)["lost_experts"] == ["11-15"]
        assert answers[0] == answers[1]
        assert [len(tokens) for tokens in answers[0]] == lengths
        assert our_files(stats) == []


@pytest.mark.long
def test_experts_of_a_dead_rank_have_replicas(requests: Requests, folder: Path) -> None:
    """The balancer's redundant experts are those of the rank that dies: no token changes."""
    balancing = ("--enable-eplb", '--eplb-config={"num_redundant_experts": 8}')
    with tolerant(requests, folder, "external balancer of three", *balancing) as servers:
        kill_the_third(servers)
        alive = servers[:2]
        retry(alive, dead_ranks=[2])
        wait_until(alive, "healthy")
        for server in alive:
            assert status(server)["lost_experts"] == []
            assert server.differing(range(12), concurrency=6) == []
