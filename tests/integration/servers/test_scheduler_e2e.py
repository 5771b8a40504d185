"""Real servers under KV pressure: ours evicts nothing, and gives the tokens of vLLM's scheduler.

All requests are there before the first iteration, so the schedules depend on no clock. vLLM's own
scheduler must have evicted requests of the same load, or the comparison would say nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import random
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from safetensors.torch import load_file

from benchmarks.serving import streams
from moe_nvlink_plugin.integration.demo.server import Server
from moe_nvlink_plugin.integration.demo.tiny_checkpoint import (
    MODELS,
    MTP_MODEL,
    TinyModel,
    write_checkpoint,
)
from tests.integration.servers.servers import ForkedServer, metrics
from tests.integration.servers.test_lora_e2e import EXPERTS, _write_adapter
from tests.upstream import models as upstream_models

pytestmark = pytest.mark.e2e

MODEL = dataclasses.replace(MODELS["qwen3_moe"], num_layers=2)
OURS = "--scheduler-cls=moe_nvlink_plugin.integration.vllm.scheduler.GuaranteedNoEvictScheduler"
#: Of ten blocks, the longest request takes seven. vLLM keeps one more for itself.
SMALL_CACHE = ("--num-gpu-blocks-override=11", "--block-size=32", "--max-model-len=256")
LIMIT_S = 240.0
CAPACITY = "moe_nvlink_capacity"


def drawn(seed: int, number: int = 12, model: TinyModel = MODEL) -> list[streams.Request]:
    """Ragged prompts and answers. vLLM refuses prompts with tokens that the model does not have."""
    draw, vocab = random.Random(seed), range(model.vocab_size)
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


def at_rest(server: Server) -> dict[str, float]:
    """The metrics, once nothing runs: vLLM counts an eviction when the request runs again."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        found = metrics(server)
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


class Pair(NamedTuple):
    """Two servers that differ in the scheduler alone."""

    theirs: Server
    ours: Server


@pytest.fixture(scope="module")
def pair(folder: Path) -> Iterator[Pair]:
    """One rank each, without our exchange."""
    checkpoint = write_checkpoint(folder / "qwen3", MODEL)
    with (
        serving(folder, "theirs", checkpoint) as theirs,
        serving(folder, "ours", checkpoint, OURS) as ours,
    ):
        theirs.wait_until_ready()
        ours.wait_until_ready()
        yield Pair(theirs, ours)


@pytest.fixture(scope="module")
def expected(pair: Pair) -> list[list[int]]:
    """Tokens of vLLM's scheduler, which evicted requests meanwhile."""
    tokens = tokens_of(pair.theirs, drawn(1))
    assert evictions(pair.theirs) > 0
    return tokens


def test_same_tokens_without_evictions(pair: Pair, expected: list[list[int]]) -> None:
    assert tokens_of(pair.ours, drawn(1)) == expected
    assert evictions(pair.ours) == 0


def test_clients_that_hang_up(pair: Pair, expected: list[list[int]]) -> None:
    """What they had reserved serves the others; three go while they run or wait, three before."""
    requests = drawn(1)
    for number in range(0, len(requests), 2):
        requests[number] = requests[number]._replace(hangs_up_after=5 * (number % 4 // 2))
    answers = tokens_of(pair.ours, requests)
    for tokens, whole, request in zip(answers, expected, requests, strict=True):
        assert tokens == whole[: len(tokens)]
        least = request.max_tokens if request.hangs_up_after is None else request.hangs_up_after
        assert len(tokens) >= least
    found = at_rest(pair.ours)
    assert found["vllm:kv_cache_usage_perc"] == found["vllm:num_preemptions_total"] == 0
    assert found["vllm:request_success_total"] > 0
    assert tokens_of(pair.ours, drawn(1)) == expected


def test_metrics_tell_who_waits(pair: Pair) -> None:
    """Reports are a second apart, and a wave may be shorter: waves follow until one is seen.

    A scrape may come between the two gauges of a report.
    """
    names = [f"{CAPACITY}_waiting_requests", f"{CAPACITY}_reserved_blocks"]
    end = time.monotonic() + 120
    with ThreadPoolExecutor() as pool:
        answers = pool.submit(tokens_of, pair.ours, drawn(2, number=40))
        while not all(map(metrics(pair.ours).get, names)):
            if answers.done():
                assert time.monotonic() < end, "nobody waited"
                answers = pool.submit(tokens_of, pair.ours, drawn(2, number=40))
        answers.result()
    found = at_rest(pair.ours)
    assert {name: value for name, value in found.items() if name.startswith(CAPACITY)} == {
        f"{CAPACITY}_waiting_requests": 0,
        f"{CAPACITY}_reserved_blocks": 0,
        f"{CAPACITY}_refused_requests_total": 0,
    }
    assert not any(name.startswith(CAPACITY) for name in metrics(pair.theirs))


#: With our exchange, over two ranks.
EXPERT_PARALLEL = (
    *("--data-parallel-size=2", "--enable-expert-parallel", "--all2all-backend=moe_nvlink"),
)


class Case(NamedTuple):
    """A feature that the scheduler has to count right, or leave alone."""

    flags: tuple[str, ...] = ()
    model: TinyModel = MODEL
    #: Fields of every second request.
    more: Mapping[str, Any] = {}
    requests: int = 24


def _speculating(method: str, **more: int) -> tuple[str, str]:
    config = {"method": method, "num_speculative_tokens": 3, **more}
    return "--speculative-config", json.dumps(config)


CASES = {
    "expert parallel": Case(EXPERT_PARALLEL),
    # Few requests: test_vllm33.py has the V2 runner's kernels interpreted.
    "drafts": Case(_speculating("mtp"), MTP_MODEL, requests=8),
    "ngram drafts": Case(
        _speculating("ngram", prompt_lookup_min=1, prompt_lookup_max=3), requests=6
    ),
    "structured output": Case(
        ("--no-skip-tokenizer-init",), more={"structured_outputs": {"regex": "[0-9]+"}}
    ),
    "adapters": Case((*EXPERT_PARALLEL, "--enable-lora", "--max-lora-rank=8"), more={"model": "a"}),
    "prefix caching, chunks": Case(("--enable-prefix-caching", "--max-num-batched-tokens=32")),
}


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_beside(name: str, tmp_path: Path) -> None:
    """The same with what else vLLM can do."""
    case = CASES[name]
    checkpoint = write_checkpoint(tmp_path / "model", case.model)
    flags = [*case.flags]
    if "structured_outputs" in case.more:
        upstream_models._tokenizer().save_pretrained(checkpoint)
    if "model" in case.more:
        weights = load_file(checkpoint / "model.safetensors")
        _write_adapter(tmp_path / "adapter", weights, EXPERTS, 1)
        flags.append(f"--lora-modules=a={tmp_path / 'adapter'}")
    requests = drawn(3, case.requests, case.model)
    requests[::2] = [one._replace(more=case.more) for one in requests[::2]]
    found, evicted = [], []
    for number, scheduler in enumerate(([], [OURS])):
        with serving(tmp_path, f"{name} {number}", checkpoint, *flags, *scheduler) as server:
            server.wait_until_ready()
            found.append(tokens_of(server, requests))
            evicted.append(evictions(server))
            if "--speculative-config" in flags:
                assert metrics(server)["vllm:spec_decode_num_accepted_tokens_total"] > 0
    assert found[0] == found[1]
    assert evicted[0] > evicted[1] == 0
