"""vLLM's own engine on one GPU, data-parallel ranks that exchange rows by our backend.

`vllm.LLM` of the release whose Python files are here, with its V2 model runner, its attention and
its experts in Triton; plain torch stands in for the operators of its compiled libraries
(tests/support/vllm_engine.py), and gloo for NCCL, which takes no two ranks on one GPU. The greedy
tokens of all ranks must be those of one rank without our backend, in float32: they add the rows
of a token's experts in another order, which is 2**-24 of the sum, and the tokens' logits lie 0.001
and more apart.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from typing import Any

import pytest

from moe_nvlink_plugin.integration.demo.tiny_checkpoint import (
    DEEPSEEK_V3,
    MODELS,
    write_checkpoint,
)
from tests.integration.servers.lost_rows import LOST
from tests.support import vllm_files
from tests.support.vllm_engines import Engine, Requests

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(160),
    pytest.mark.skipif(bool(vllm_files.why_not()), reason=vllm_files.why_not()),
]

#: A layer of Qwen3 is an op of vLLM's when it is compiled, and a layer of DeepSeek an op of ours,
#: with a shared expert; its experts are in groups. Both models have two layers with experts.
QWEN3 = dataclasses.replace(MODELS["qwen3_moe"], num_layers=2)
DEEPSEEK = dataclasses.replace(DEEPSEEK_V3, num_layers=3, head_dim=48, rope_head_dim=16)
MOE_LAYERS = 2
NUM_REQUESTS = 12
#: Rank 1 of two has none left while rank 0 still works.
ONE, TWO = (range(NUM_REQUESTS),), (range(9), range(9, NUM_REQUESTS))
THREE = (range(6), range(6, 11), range(11, NUM_REQUESTS))
#: Seconds of all ranks, which start at the same time.
LIMIT_S = 140.0
PIECES = {"graphs": "FULL_AND_PIECEWISE", "compiled": True}
AUDITED = {"graphs": "FULL_DECODE_ONLY", "options": {"audit_every": 1}}
OWN = "allgather_reducescatter"
#: Name of an engine -> which requests its ranks answer, and what else it is started with.
ENGINES: dict[str, tuple[tuple[range, ...], dict[str, Any]]] = {
    "one": (ONE, {}),
    "one of DeepSeek": (ONE, {"model": DEEPSEEK}),
    "two": (TWO, {}),
    "two with graphs, audited": (TWO, AUDITED),
    "two, compiled, with graphs": (TWO, PIECES),
    "three": (THREE, {}),
    "two of DeepSeek, compiled, with graphs": (TWO, {"model": DEEPSEEK, **PIECES}),
    "two that lose rows": (TWO, {"fault": LOST}),
    "two that lose rows and may fall back": (TWO, {"fault": LOST, "options": {"fallback": OWN}}),
}
#: Those whose rows go through our exchange.
EXCHANGING = [name for name in ENGINES if "one" not in name and "lose" not in name]


def requests() -> Requests:
    """Ragged prompts and answers."""
    draw = random.Random(7)
    prompts = [
        draw.choices(range(QWEN3.vocab_size), k=draw.randint(1, 60)) for _ in range(NUM_REQUESTS)
    ]
    return Requests(prompts, [draw.randint(4, 24) for _ in prompts])


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Engine]]:
    """All engines, when they have ended."""
    folder = tmp_path_factory.mktemp("engines")
    started: dict[str, Engine] = {}
    checkpoints = {
        model: write_checkpoint(folder / model.architecture, model) for model in (QWEN3, DEEPSEEK)
    }
    try:
        for name, (shares, given) in ENGINES.items():
            options = {"model": QWEN3, "limit_s": LIMIT_S, **given}
            checkpoint = checkpoints[options.pop("model")]
            started[name] = Engine(name, folder, checkpoint, requests(), shares, **options)
        for engine in started.values():
            engine.join()
        for engine in started.values():
            engine.tell()
        yield started
    finally:
        for engine in started.values():
            engine.close()


def told(engine: Engine, words: str) -> list[bool]:
    """Whether each rank has said so."""
    return [words in engine.log(rank) for rank in range(len(engine.shares))]


def answers_of_one(name: str, engines: dict[str, Engine]) -> dict[int, list[int]]:
    """Those of the engine of one rank that has the same model."""
    answers = engines["one of DeepSeek" if "DeepSeek" in name else "one"].answers()
    assert [len(answers.get(n, ())) for n in range(NUM_REQUESTS)] == requests().lengths
    return answers


def check_answers(name: str, engines: dict[str, Engine]) -> None:
    expected, found = answers_of_one(name, engines), engines[name].answers()
    print(f"{name}: {sum(found.get(n) == e for n, e in expected.items())} equal answers")
    assert found == expected


def checked_stats(engine: Engine) -> Iterator[dict[str, Any]]:
    """Each rank's counters: the rows went through the exchange."""
    for rank in range(len(engine.shares)):
        stats = engine.stats(rank)
        print(f"{engine.name}, rank {rank}: {stats}")
        assert stats["rounds"] > 0
        assert stats["rounds"] % MOE_LAYERS == 0
        assert 0 < stats["bytes_combined_remote"] < stats["bytes_combined"]
        yield stats


@pytest.mark.parametrize("name", EXCHANGING)
def test_tokens(name: str, engines: dict[str, Engine]) -> None:
    """Graphs hold whole steps without prompts; compiled, also pieces of those with prompts."""
    engine = engines[name]
    assert all(told(engine, "Self-check of rank"))
    check_answers(name, engines)
    for stats in checked_stats(engine):
        if "audited" in name:
            assert min(stats["audited"]) > 0
            assert not any(stats["audit_faults"])
    graphs = engine.graphs  # the first rank says what it captures
    assert told(engine, "graphs (FULL)")[0] == bool(graphs)
    assert told(engine, "graphs (PIECEWISE)")[0] == ("PIECEWISE" in graphs)


def test_an_engine_that_loses_rows_does_not_start(engines: dict[str, Engine]) -> None:
    engine = engines["two that lose rows"]
    assert engine.answers() == {}
    assert all(told(engine, "--all2all-backend moe_nvlink: the self-check (large batches) failed"))
    assert all(told(engine, f'{{"fallback": "{OWN}"}}'))
    assert not any(told(engine, "the engine is built"))


def test_ranks_that_lose_rows_go_on_with_vllms_exchange(
    engines: dict[str, Engine],
) -> None:
    """Gloo stands for NCCL there."""
    name = "two that lose rows and may fall back"
    assert told(engines[name], f"All ranks go on with vLLM's own exchange ({OWN})") == [True, False]
    check_answers(name, engines)
