"""Servers whose ranks exchange quantised rows, against one rank that quantises the same values.

The one-rank server has a plugin of this test (`quantise_reference`) that applies the recipe and its
inverse to what the experts get, and adds the partial sums of the ranks' experts, each through the
format of combine. A row is quantised by itself, so the arithmetic is the same and greedy tokens
must be equal, in float32 and, since partial sums are rounded alike, in bfloat16.
That the rows were quantised at all shows in the log-probabilities, which must be away from those of
the model as it is, and in the bytes that the exchange counted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from moe_nvlink_plugin.integration.demo.server import Server
from moe_nvlink_plugin.integration.demo.tiny_checkpoint import Experts, TinyModel, write_checkpoint
from tests.integration.servers import quantise_reference
from tests.integration.servers.quantise_reference import Mode
from tests.integration.servers.servers import EpServer, ForkedServer, Requests, write_plugin

pytestmark = pytest.mark.e2e

#: Sizes of which 128 is a divisor, for blocks of FP8 weights.
MODEL = TinyModel(
    architecture="qwen3_moe",
    num_layers=3,
    num_experts=16,
    top_k=4,
    hidden_size=256,
    moe_intermediate_size=128,
)
NUM_SEQUENCES = 12
PLUGIN = "one_rank_that_quantises"
#: Mean |difference| of log-probabilities. Between servers that should be alike it was 0.0 here, all
#: bits alike; from the unquantised model it was 0.11 (fp8_block) to 0.38 (nvfp4).
SAME, OTHER = 1e-3, 0.05
#: Ids and weights of a token's choices travel with its row.
BYTES_OF_CHOICES = MODEL.top_k * (4 + 4)


class Answers(NamedTuple):
    """Tokens of each request, and the log-probabilities of the same given sequences everywhere."""

    tokens: list[list[int]]
    logprobs: list[list[float]]


class OneRank:
    """A one-rank server that computes what the ranks of a mode would."""

    def __init__(self, folder: Path, checkpoint: Path, dtype: str) -> None:
        plugin = write_plugin(folder / f"plugin-{dtype}", PLUGIN, quantise_reference)
        self._mode = plugin / quantise_reference.MODE_FILE
        self.requests = Requests.drawn(
            checkpoint, MODEL.vocab_size, NUM_SEQUENCES, longest=(40, 24)
        )
        self._set(Mode())
        self.server = ForkedServer(
            model=checkpoint,
            name=f"one rank {dtype}",
            folder=folder,
            arguments=["--enforce-eager", f"--dtype={dtype}"],
            environment={"VLLM_PLUGINS": PLUGIN, "PYTHONPATH": str(plugin)},
        )

    def __enter__(self) -> OneRank:
        try:
            self.server.wait_until_ready()
            requests = self.requests
            tokens = requests.ask(self.server)
            # The sequences whose log-probabilities are compared: what the model itself answers.
            self.sequences = [p + t for p, t in zip(requests.prompts, tokens, strict=True)]
            self.plain = Answers(tokens, _logprobs(self.server, self.sequences))
        except BaseException:
            self.server.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.server.stop()

    def answers(self, mode: Mode) -> Answers:
        self._set(mode)
        return self.answers_of(self.server)

    def answers_of(self, server: Server) -> Answers:
        return Answers(self.requests.ask(server), _logprobs(server, self.sequences))

    def _set(self, mode: Mode) -> None:
        self._mode.write_text(json.dumps(mode), "utf-8")


def _logprobs(server: Server, sequences: list[list[int]]) -> list[list[float]]:
    with ThreadPoolExecutor(max_workers=4) as pool:
        return list(pool.map(server.logprobs, sequences))


def mean_distance(one: Answers, other: Answers) -> float:
    """Mean |difference| of the log-probabilities of the same tokens."""
    differences = [
        abs(a - b)
        for mine, others in zip(one.logprobs, other.logprobs, strict=True)
        for a, b in zip(mine, others, strict=True)
    ]
    return sum(differences) / len(differences)


@pytest.fixture(scope="module")
def one_rank(folder: Path) -> Iterator[OneRank]:
    checkpoint = write_checkpoint(folder / "float", MODEL)
    with OneRank(folder, checkpoint, "float32") as server:
        yield server


class Case(NamedTuple):
    """A server's options, what one rank does instead, and the bytes of a row there and back."""

    arguments: tuple[str, ...]
    environment: dict[str, str]
    mode: Mode
    row: int
    row_back: int


#: The other cases are long tests.
FP8_BLOCK_ROW, MXFP8_ROW, NVFP4_ROW = 256 + 2 * 4, 256 + 8, 128 + 16
CASES = {
    "mxfp8, fp8_block back": Case(
        ('--additional-config={"moe_nvlink": {"combine": "fp8_block"}}',),
        {"MOE_NVLINK_DISPATCH": "mxfp8"},
        Mode("mxfp8", combine="fp8_block"),
        MXFP8_ROW,
        FP8_BLOCK_ROW,
    ),
    "nvfp4, nvfp4 back": Case(
        ('--additional-config={"moe_nvlink": {"dispatch": "nvfp4"}}',),
        {"MOE_NVLINK_COMBINE": "nvfp4"},
        Mode("nvfp4", global_scale=1.0, combine="nvfp4"),
        NVFP4_ROW,
        NVFP4_ROW + 4,
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_two_ranks_compute_what_one_rank_does_with_the_same_quantisers(
    name: str, one_rank: OneRank, folder: Path
) -> None:
    case = CASES[name]
    flags = ("--data-parallel-size=2", "--enforce-eager", *case.arguments)
    with EpServer(one_rank.requests, folder, name, *flags, environment=case.environment) as ranks:
        answers = one_rank.answers_of(ranks.server)
        stats = ranks.stats(2)
    _check_same(answers, one_rank.answers(case.mode), one_rank.plain)
    _check_bytes(stats, case.row, case.row_back)


@pytest.mark.skipif(
    torch.cpu._is_amx_tile_supported(), reason="with AMX vLLM has its own experts, of float rows"
)
def test_block_fp8_checkpoint(folder: Path) -> None:
    """Served in bfloat16, as vLLM wants it, against one rank on the same numbers as floats."""
    restored = write_checkpoint(folder / "restored", MODEL, experts=Experts.FP8_RESTORED)
    checkpoint = write_checkpoint(folder / "fp8", MODEL, experts=Experts.FP8)
    flags = ("--data-parallel-size=2", "--enforce-eager", "--dtype=bfloat16")
    with OneRank(folder, restored, "bfloat16") as one_rank:
        requests = one_rank.requests._replace(checkpoint=checkpoint)
        with EpServer(requests, folder, "fp8 checkpoint", *flags) as ranks:
            answers = one_rank.answers_of(ranks.server)
            stats = ranks.stats(2)
        _check_same(answers, one_rank.answers(Mode("fp8_block")), one_rank.plain)
    _check_bytes(stats, FP8_BLOCK_ROW, 256 * 2)


def _check_same(answers: Answers, expected: Answers, plain: Answers) -> None:
    """Equal tokens; log-probabilities apart by SAME on average, and by OTHER from the model's."""
    assert answers.tokens == expected.tokens
    assert mean_distance(answers, expected) < SAME
    assert mean_distance(answers, plain) > OTHER


def _check_bytes(stats: list[dict[str, int]], row: int, row_back: int) -> None:
    rows = sum(counters["destinations"] for counters in stats)
    assert rows > 0
    assert sum(s["bytes_dispatched"] for s in stats) == rows * (row + BYTES_OF_CHOICES)
    assert sum(s["bytes_combined"] for s in stats) == rows * row_back
