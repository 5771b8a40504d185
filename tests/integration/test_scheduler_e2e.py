"""Real servers under KV pressure: ours evicts nothing, and gives the tokens of vLLM's scheduler.

All requests are there before the first iteration, so the schedules depend on no clock. vLLM's own
scheduler must have evicted requests of the same load, or the comparison would say nothing.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import random
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.serving import streams
from moe_nvlink_plugin.integration.demo.server import Server
from moe_nvlink_plugin.integration.demo.tiny_checkpoint import MODELS, write_checkpoint
from tests.integration.servers import ForkedServer

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

MODEL = dataclasses.replace(MODELS["qwen3_moe"], num_layers=2)
OURS = "--scheduler-cls=moe_nvlink_plugin.integration.vllm.scheduler.GuaranteedNoEvictScheduler"
#: Less than --max-model-len, so that a request can be too long for the whole cache.
BLOCKS, BLOCK_SIZE = 14, 32
#: One more block, because vLLM keeps one for itself.
SMALL_CACHE = (f"--num-gpu-blocks-override={BLOCKS + 1}", f"--block-size={BLOCK_SIZE}")
LIMIT_S = 120.0


def drawn(seed: int, number: int = 12) -> list[streams.Request]:
    """Ragged prompts and answers: of the longest, two fit together."""
    draw, vocab = random.Random(seed), range(MODEL.vocab_size)
    return [
        streams.Request(draw.choices(vocab, k=draw.randint(4, 70)), draw.randint(30, 150))
        for _ in range(number)
    ]


@contextlib.contextmanager
def serving(folder: Path, name: str, checkpoint: Path, *flags: str) -> Iterator[Server]:
    """A server with few KV blocks that can be paused, still starting."""
    with ForkedServer(
        model=checkpoint,
        name=name,
        folder=folder,
        arguments=["--enforce-eager", *SMALL_CACHE, *flags],
        environment={"VLLM_SERVER_DEV_MODE": "1"},
    ) as server:
        yield server


def counters(server: Server) -> dict[str, float]:
    """The server's metrics by name, summed over engines and labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=30) as reply:
        text = reply.read().decode()
    found: dict[str, float] = collections.defaultdict(float)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name] += sample.value
    return found


def at_rest(server: Server) -> dict[str, float]:
    """The metrics, once nothing runs: vLLM counts an eviction when the request runs again."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        found = counters(server)
        if not found["vllm:num_requests_running"] + found["vllm:num_requests_waiting"]:
            return found
        assert time.monotonic() < deadline, "requests run after the last answer"
        time.sleep(0.05)


def tokens_of(server: Server, requests: list[streams.Request]) -> list[list[int]]:
    """Answers to requests that the scheduler sees at once."""
    return [answer.token_ids for answer in streams.wave(server.port, requests, LIMIT_S)]


def evictions(server: Server) -> float:
    """How many of all requests so far."""
    return at_rest(server)["vllm:num_preemptions_total"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scheduler")


class TestUnderPressure:
    """One rank, without our exchange."""

    @pytest.fixture(scope="class")
    def pair(self, folder: Path) -> Iterator[tuple[Server, Server]]:
        """vLLM's own scheduler, and ours; they start beside each other."""
        checkpoint = write_checkpoint(folder / "qwen3", MODEL)
        with (
            serving(folder, "theirs", checkpoint) as theirs,
            serving(folder, "ours", checkpoint, OURS) as ours,
        ):
            theirs.wait_until_ready()
            ours.wait_until_ready()
            yield theirs, ours

    @pytest.fixture(scope="class")
    def expected(self, pair: tuple[Server, Server]) -> list[list[int]]:
        theirs, _ours = pair
        tokens = tokens_of(theirs, drawn(1))
        assert evictions(theirs) > 0
        return tokens

    def test_same_tokens_without_evictions(
        self, pair: tuple[Server, Server], expected: list[list[int]]
    ) -> None:
        _theirs, ours = pair
        assert tokens_of(ours, drawn(1)) == expected
        assert evictions(ours) == 0

    def test_clients_that_hang_up(
        self, pair: tuple[Server, Server], expected: list[list[int]]
    ) -> None:
        """What they had reserved serves the others, also those who went while they waited."""
        _theirs, ours = pair
        requests = drawn(1)
        for number in range(0, len(requests), 3):
            requests[number] = requests[number]._replace(hangs_up_after=5)
        for found, whole, request in zip(
            tokens_of(ours, requests), expected, requests, strict=True
        ):
            assert found == whole[: len(found)]
            assert len(found) >= (request.hangs_up_after or request.max_tokens)
        found = at_rest(ours)
        assert found["vllm:kv_cache_usage_perc"] == found["vllm:num_preemptions_total"] == 0
        assert tokens_of(ours, drawn(1)) == expected
