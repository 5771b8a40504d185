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

from moe_nvlink_plugin.integration.demo.tiny_checkpoint import MODELS, write_checkpoint
from tests.integration.servers.lost_rows import LOST
from tests.support import vllm_files
from tests.support.vllm_engines import Engine, Requests

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(150),
    pytest.mark.skipif(bool(vllm_files.why_not()), reason=vllm_files.why_not()),
]

MODEL = dataclasses.replace(MODELS["qwen3_moe"], num_layers=2)
NUM_REQUESTS = 12
#: Rank 1 of two has none left while rank 0 still works.
ONE, TWO = (range(NUM_REQUESTS),), (range(9), range(9, NUM_REQUESTS))
THREE = (range(6), range(6, 11), range(11, NUM_REQUESTS))
#: Seconds of all ranks, which start at the same time.
LIMIT_S = 130.0
PIECES = {"graphs": "FULL_AND_PIECEWISE", "compiled": True}
AUDITED = {"graphs": "FULL_DECODE_ONLY", "options": {"audit_every": 1}}
OWN = "allgather_reducescatter"
#: Name of an engine -> which requests its ranks answer, and what else it is started with.
ENGINES: dict[str, tuple[tuple[range, ...], dict[str, Any]]] = {
    "one": (ONE, {}),
    "two": (TWO, {}),
    "two with graphs, audited": (TWO, AUDITED),
    "two, compiled, with graphs": (TWO, PIECES),
    "three": (THREE, {}),
    "two that lose rows": (TWO, {"fault": LOST}),
    "two that lose rows and may fall back": (TWO, {"fault": LOST, "options": {"fallback": OWN}}),
}


def requests() -> Requests:
    """Ragged prompts and answers."""
    draw = random.Random(7)
    prompts = [
        draw.choices(range(MODEL.vocab_size), k=draw.randint(1, 60)) for _ in range(NUM_REQUESTS)
    ]
    return Requests(prompts, [draw.randint(4, 24) for _ in prompts])


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Engine]]:
    """All engines, when they have ended."""
    folder = tmp_path_factory.mktemp("engines")
    checkpoint = write_checkpoint(folder / "model", MODEL)
    started: dict[str, Engine] = {}
    try:
        for name, (shares, options) in ENGINES.items():
            started[name] = Engine(
                name, folder, checkpoint, requests(), shares, limit_s=LIMIT_S, **options
            )
        for engine in started.values():
            engine.join()
        for engine in started.values():
            engine.tell()
        yield started
    finally:
        for engine in started.values():
            engine.close()


@pytest.fixture
def expected(engines: dict[str, Engine]) -> dict[int, list[int]]:
    """The answers of one rank."""
    answers = engines["one"].answers()
    assert len(answers) == NUM_REQUESTS, "one rank without our backend has not answered"
    return answers


def told(engine: Engine, words: str) -> list[bool]:
    """Whether each rank has said so."""
    return [words in engine.log(rank) for rank in range(len(engine.shares))]


def check_answers(engine: Engine, expected: dict[int, list[int]]) -> None:
    found = engine.answers()
    print(f"{engine.name}: {sum(found.get(n) == e for n, e in expected.items())} equal answers")
    assert found == expected


def checked_stats(engine: Engine) -> Iterator[dict[str, Any]]:
    """Each rank's counters: the rows went through the exchange."""
    for rank in range(len(engine.shares)):
        stats = engine.stats(rank)
        print(f"{engine.name}, rank {rank}: {stats}")
        assert stats["rounds"] > 0
        assert stats["rounds"] % MODEL.num_layers == 0
        assert 0 < stats["bytes_combined_remote"] < stats["bytes_combined"]
        yield stats


def test_one_rank_answers(expected: dict[int, list[int]]) -> None:
    """What the others are compared with; without our backend."""
    assert [len(answer) for answer in expected.values()] == requests().lengths


@pytest.mark.parametrize("name", [name for name in ENGINES if name != "one" and "lose" not in name])
def test_tokens(name: str, engines: dict[str, Engine], expected: dict[int, list[int]]) -> None:
    """Graphs hold whole steps without prompts; compiled, also pieces of those with prompts."""
    engine = engines[name]
    assert all(told(engine, "Self-check of rank"))
    check_answers(engine, expected)
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
    engines: dict[str, Engine], expected: dict[int, list[int]]
) -> None:
    """Gloo stands for NCCL there."""
    engine = engines["two that lose rows and may fall back"]
    assert told(engine, f"All ranks go on with vLLM's own exchange ({OWN})") == [True, False]
    check_answers(engine, expected)
