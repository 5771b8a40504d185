"""vLLM's own engine on one GPU, two data-parallel ranks that exchange rows by our backend.

`vllm.LLM` of the release whose Python files are here, with its V2 model runner, its attention and
its experts in Triton; plain torch stands in for the operators of its compiled libraries
(tests/support/vllm_engine.py), and gloo for NCCL, which takes no two ranks on one GPU. The greedy
tokens of both ranks must be those of one rank without our backend, in float32: the two add the rows
of a token's experts in another order, which is 2**-24 of the sum, and the tokens' logits lie 0.001
and more apart.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator

import pytest

from moe_nvlink_plugin.integration.demo.tiny_checkpoint import MODELS, write_checkpoint
from tests.support import vllm_files
from tests.support.vllm_engines import Engine, Requests

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(100),
    pytest.mark.skipif(bool(vllm_files.why_not()), reason=vllm_files.why_not()),
]

MODEL = dataclasses.replace(MODELS["qwen3_moe"], num_layers=2)
NUM_REQUESTS = 12
#: Rank 1 has none left while rank 0 still works.
SHARES = (range(9), range(9, NUM_REQUESTS))
#: Seconds of the first ranks, which also compile, and of the later ones.
FIRST_LIMIT_S, LIMIT_S = 82.0, 60.0


def requests() -> Requests:
    """Ragged prompts and answers."""
    draw = random.Random(7)
    prompts = [
        draw.choices(range(MODEL.vocab_size), k=draw.randint(1, 60)) for _ in range(NUM_REQUESTS)
    ]
    return Requests(prompts, [draw.randint(4, 24) for _ in prompts])


Start = Callable[..., Engine]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Starts engines, which end with the tests."""
    folder = tmp_path_factory.mktemp("engines")
    checkpoint = write_checkpoint(folder / "model", MODEL)
    engines: list[Engine] = []

    def started(name: str, limit_s: float, *shares: range, **options: object) -> Engine:
        engine = Engine(name, folder, checkpoint, requests(), shares, limit_s=limit_s, **options)  # type: ignore[arg-type]
        engines.append(engine)
        return engine

    yield started
    for engine in engines:
        engine.close()


@pytest.fixture(scope="module")
def both(start: Start) -> tuple[Engine, Engine]:
    """One rank, and two; both without graphs, at the same time."""
    engines = start("one", FIRST_LIMIT_S, range(NUM_REQUESTS)), start("two", FIRST_LIMIT_S, *SHARES)
    for engine in engines:
        engine.join()
    for engine in engines:
        engine.tell()
    return engines


def check(engine: Engine, one: Engine) -> None:
    """All answers are those of one rank, and their rows went through the exchange."""
    expected, found = one.answers(), engine.answers()
    assert len(expected) == NUM_REQUESTS, "one rank without our backend has not answered"
    print(f"{engine.name}: {sum(found.get(n) == e for n, e in expected.items())} equal answers")
    for rank in range(len(engine.shares)):
        assert "Self-check of rank" in engine.log(rank)
    assert found == expected
    for rank in range(len(engine.shares)):
        stats = engine.stats(rank)
        print(f"{engine.name}, rank {rank}: {stats}")
        assert stats["rounds"] > 0
        assert stats["rounds"] % MODEL.num_layers == 0
        assert 0 < stats["bytes_combined_remote"] < stats["bytes_combined"]


def test_one_rank_answers(both: tuple[Engine, Engine]) -> None:
    """What the others are compared with; without our backend."""
    assert len(both[0].answers()) == NUM_REQUESTS


def test_two_ranks(both: tuple[Engine, Engine]) -> None:
    check(both[1], both[0])


def test_two_ranks_with_cuda_graphs(start: Start, both: tuple[Engine, Engine]) -> None:
    """Steps without prompts are replays of graphs that hold the whole model."""
    engine = start("two with graphs", LIMIT_S, *SHARES, graphs="FULL_DECODE_ONLY")
    engine.join()
    engine.tell()
    check(engine, both[0])
