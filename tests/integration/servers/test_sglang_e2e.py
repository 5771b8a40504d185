"""Real SGLang servers on CPU, expert parallel through our exchange, against the one-rank server.

Greedy tokens in float32 must be equal sequence by sequence, log-probabilities nearly so, and the
workers' counters must show that the MoE layers' rows went through the exchange: a backend that is
silently not used fails here.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest

from moe_nvlink_plugin.integration.demo import demo
from moe_nvlink_plugin.integration.demo.server import Server, ServerError
from moe_nvlink_plugin.integration.demo.sglang_server import interpreter
from moe_nvlink_plugin.integration.demo.tiny_checkpoint import (
    DEEPSEEK_V3,
    MODELS,
    QWEN2,
    TinyModel,
    write_checkpoint,
)
from tests.integration.servers import lost_rows
from tests.integration.servers.servers import (
    NO_WEIGHTS,
    Asking,
    Requests,
    our_files,
    without_weights,
    write_plugin,
)
from tests.integration.servers.sglang_servers import EpSglang, ForkedSglang
from tests.support import sglang_triton

pytestmark = pytest.mark.e2e

try:
    interpreter()
except ServerError as error:
    pytest.skip(str(error), allow_module_level=True)

#: Two layers tell whether a layer reads another's rows, and start sooner than three.
QWEN3 = dataclasses.replace(MODELS["qwen3_moe"], num_layers=2)
GLM4 = MODELS["glm4_moe"]
TP2 = ("--tp=2",)
ATTENTION_DP2 = ("--tp=2", "--attn-dp-size=2")
NUM_SEQUENCES = 12
#: Of float32, through a few layers whose sums are taken in another order.
LOGPROB_TOLERANCE = 1e-3


class Expected(NamedTuple):
    """What the one-rank server answers: tokens of the requests, log-probabilities of a sequence."""

    requests: Requests
    sequence: list[int]
    logprobs: list[float]


@pytest.fixture(scope="module")
def expected_of(folder: Path) -> Callable[[TinyModel], Expected]:
    """Requests and expected answers by model; one server each, without any plugin."""
    made: dict[TinyModel, Expected] = {}

    def get(model: TinyModel) -> Expected:
        if model not in made:
            made[model] = _ask_one_rank(model, folder)
        return made[model]

    return get


def _ask_one_rank(
    model: TinyModel,
    folder: Path,
    *,
    num_sequences: int = NUM_SEQUENCES,
    longest: tuple[int, int] = (60, 24),
    environment: Mapping[str, str] | None = None,
) -> Expected:
    """Its answers to prompts of at most `longest[0]` tokens, at most `longest[1]` long."""
    checkpoint = write_checkpoint(folder / model.architecture, model)
    requests = Requests.drawn(checkpoint, model.vocab_size, num_sequences, longest=longest)
    sequence = random.Random(8).choices(range(model.vocab_size), k=101)
    name = f"one rank {model.architecture}"
    with ForkedSglang(
        model=checkpoint, name=name, folder=folder, with_plugins=False, environment=environment
    ) as server:
        server.wait_until_ready()
        requests = requests._replace(expected=requests.ask(server))
        logprobs = server.logprobs(sequence)
        assert not environment or _computes_with_triton(server)
    return Expected(requests, sequence, logprobs)


def _computes_with_triton(server: Server) -> bool:
    """Whether the experts looked for block sizes; `interpreted` has the name of the device."""
    return "device_name=interpreter" in server.log_path.read_text("utf-8", errors="replace")


def _check_answers(server: EpSglang, expected: Expected) -> None:
    """Tokens one at a time, which leaves ranks empty, and many at a time; log-probabilities."""
    assert server.differing(range(2), concurrency=1) == []
    assert server.differing(range(2, NUM_SEQUENCES), concurrency=5) == []
    logprobs = server.server.logprobs(expected.sequence)
    assert logprobs == pytest.approx(expected.logprobs, abs=LOGPROB_TOLERANCE)


def _check(server: EpSglang, expected: Expected, ep_size: int, model: TinyModel) -> None:
    """The answers, and that the rows of all layers went through our exchange."""
    _check_answers(server, expected)
    server.check_traffic(ep_size, NUM_SEQUENCES, model.num_layers - model.num_dense_layers)


@pytest.fixture(scope="class")
def server(expected_of: Callable[[TinyModel], Expected], folder: Path) -> Iterator[EpSglang]:
    with EpSglang(expected_of(QWEN3).requests, folder, "qwen3 dp2", *ATTENTION_DP2) as server:
        yield server


class TestAttentionDataParallel:
    """One server of two attention-DP ranks for several questions; the last one breaks it."""

    def test_answers_equal_those_of_one_rank(
        self, server: EpSglang, expected_of: Callable[[TinyModel], Expected]
    ) -> None:
        _check(server, expected_of(QWEN3), 2, QWEN3)

    @pytest.mark.parametrize("rank", [0, 1])
    def test_a_rank_without_a_request_takes_part(self, server: EpSglang, rank: int) -> None:
        requests = server.requests
        (answer,) = server.server.complete(
            requests.prompts[:1], max_tokens=requests.lengths[:1], rank=rank
        )
        assert answer.token_ids == requests.expected[0]

    def test_a_killed_rank_ends_the_server_and_leaves_nothing(self, server: EpSglang) -> None:
        stats = server.stats(2)
        before = server.server.pids
        assert {counters["pid"] for counters in stats} < set(before)
        asking = Asking(server)
        server.wait_for_rounds(rank=1, more_than=stats[1]["rounds"])
        os.kill(stats[1]["pid"], signal.SIGKILL)  # in the midst of the answers, at whatever place
        asking.check_refused()
        deadline = time.monotonic() + 60
        while server.server.pids and time.monotonic() < deadline:
            time.sleep(0.2)
        assert server.server.pids == []
        assert our_files(stats) == []


def test_tensor_parallel_ranks_share_the_tokens(
    expected_of: Callable[[TinyModel], Expected], folder: Path
) -> None:
    expected = expected_of(QWEN3)
    with EpSglang(expected.requests, folder, "qwen3 tp2", *TP2) as server:
        _check(server, expected, 2, QWEN3)


def _with_lost_rows(
    folder: Path,
    name: str,
    requests: Requests,
    options: dict[str, str],
    *arguments: str,
    fault: str = lost_rows.LOST,
) -> EpSglang:
    """A server in whose exchange a fault is planted: every row is lost, or waited for in vain."""
    plugin = write_plugin(
        folder / f"plugin {name}", "lost_rows", lost_rows, ("sglang.srt.plugins",)
    )
    given = f"--json-model-override-args={json.dumps({'moe_nvlink': options})}"
    environment = {"PYTHONPATH": str(plugin), lost_rows.FAULT_VARIABLE: fault}
    if fault == lost_rows.STALE:
        environment["MOE_NVLINK_TIMEOUT_S"] = "5"  # no round of ours is to end well
    return EpSglang(requests, folder, name, *arguments, given, environment=environment)


def test_ranks_whose_rows_get_lost_do_not_serve(folder: Path) -> None:
    """The self-check finds it before weights are looked for, and every rank stops."""
    checkpoint = without_weights(write_checkpoint(folder / "lost", QWEN3))
    server = _with_lost_rows(folder, "lost", Requests(checkpoint, [], [], []), {}, *TP2)
    with pytest.raises(ServerError), server:
        pass
    told = server.server.log_path.read_text("utf-8", errors="replace")
    assert "--moe-a2a-backend moe_nvlink: the self-check (large batches) failed: rank 0: " in told
    assert "0 rows instead of" in told
    assert '{"moe_nvlink": {"fallback": "none"}}' in told
    assert NO_WEIGHTS not in told


@pytest.mark.parametrize(
    ("arguments", "fault", "why"),
    [
        pytest.param(TP2, lost_rows.LOST, "0 rows instead of", id="tp2"),
        pytest.param(
            *(ATTENTION_DP2, lost_rows.LOST, "0 rows instead of"), id="dp2", marks=pytest.mark.long
        ),
        pytest.param(
            *(TP2, lost_rows.STALE, "ExchangeTimeoutError"), id="stale", marks=pytest.mark.long
        ),
    ],
)
def test_a_server_whose_rows_get_lost_falls_back_and_answers_right(
    arguments: Sequence[str],
    fault: str,
    why: str,
    expected_of: Callable[[TinyModel], Expected],
    folder: Path,
) -> None:
    """With SGLang's own exchange; ours would not have brought a row to any expert elsewhere."""
    expected, name = expected_of(QWEN3), f"fallen back {arguments[-1]} {fault}"
    with _with_lost_rows(
        folder, name, expected.requests, {"fallback": "none"}, *arguments, fault=fault
    ) as server:
        _check_answers(server, expected)
    told = server.server.log_path.read_text("utf-8", errors="replace")
    warning = "All ranks go on with SGLang's own exchange (none), as"
    assert told.count(warning) == 1
    assert "the self-check (large batches) failed: rank 0: " in told
    assert why in told
    assert not list(server.stats_folder.glob("*")), "no exchange of ours has counted anything"


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "model", "ep_size", "arguments"),
    [
        ("qwen3 tp4", QWEN3, 4, ["--tp=4"]),
        ("qwen3 tp4 dp2", QWEN3, 4, ["--tp=4", "--attn-dp-size=2"]),
        ("glm4 tp2", GLM4, 2, TP2),
        ("glm4 dp2", GLM4, 2, ATTENTION_DP2),
        ("deepseek tp2", DEEPSEEK_V3, 2, TP2),
        ("deepseek dp2", DEEPSEEK_V3, 2, ATTENTION_DP2),
    ],
)
def test_other_models_and_four_ranks(
    name: str,
    model: TinyModel,
    ep_size: int,
    arguments: Sequence[str],
    expected_of: Callable[[TinyModel], Expected],
    folder: Path,
) -> None:
    expected = expected_of(model)
    with EpSglang(expected.requests, folder, name, *arguments) as server:
        _check(server, expected, ep_size, model)


@pytest.fixture(scope="module")
def with_triton(folder: Path) -> tuple[dict[str, str], Expected]:
    """Variables for Triton, and what one rank answers with it: a few tokens, for it is slow."""
    (folder / "triton").mkdir()
    variables = sglang_triton.variables(folder / "triton")
    few: Any = {"num_sequences": 3, "longest": (20, 8)}
    return variables, _ask_one_rank(QWEN2, folder, **few, environment=variables)


@pytest.mark.long
@pytest.mark.parametrize("arguments", [TP2, ATTENTION_DP2], ids=["tp2", "dp2"])
def test_experts_and_shared_expert_of_triton(
    arguments: Sequence[str], with_triton: tuple[dict[str, str], Expected], folder: Path
) -> None:
    """Qwen2-MoE, whose shared expert SGLang adds by a Triton kernel, with SGLang's Triton experts.

    On one rank and on two, in Triton's interpreter.
    """
    variables, expected = with_triton
    name, chunk = f"qwen2 {arguments[-1]}", "--chunked-prefill-size=32"
    with EpSglang(
        expected.requests, folder, name, *arguments, chunk, environment=variables
    ) as server:
        assert server.differing(range(3), concurrency=2) == []
        logprobs = server.server.logprobs(expected.sequence)
        assert logprobs == pytest.approx(expected.logprobs, abs=LOGPROB_TOLERANCE)
        server.check_traffic(2, 3, QWEN2.num_layers)
        assert _computes_with_triton(server.server)


@pytest.mark.long
def test_the_demonstration(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`make demo DEMO_ARGS="--framework sglang"`, with servers that are forks."""
    forked = demo.FRAMEWORKS["sglang"]._replace(server=ForkedSglang)
    with mock.patch.dict(demo.FRAMEWORKS, sglang=forked):
        status = demo.main(["--framework", "sglang", "--folder", str(folder / "demo")])
    said = capsys.readouterr().out
    assert status == 0, said
    assert "every answer equals the one-rank server's" in said


@pytest.mark.long
def test_a_model_of_another_type(
    folder: Path, expected_of: Callable[[TinyModel], Expected]
) -> None:
    """SGLang makes it torch's default while layers are built; so started no server of BF16."""
    requests = expected_of(QWEN3).requests
    with EpSglang(requests, folder, "bf16", *TP2, "--dtype=bfloat16") as server:
        lengths = requests.lengths[:2]
        answers = server.server.complete(requests.prompts[:2], max_tokens=lengths)
        assert [len(answer.token_ids) for answer in answers] == lengths
        server.check_traffic(2, 2, QWEN3.num_layers)


def test_a_refusal_ends_the_server_with_its_reason(folder: Path) -> None:
    checkpoint = write_checkpoint(folder / "refused", "qwen3_moe")
    arguments = [*TP2, "--moe-a2a-backend=moe_nvlink", "--enable-two-batch-overlap"]
    server = ForkedSglang(model=checkpoint, name="refused", folder=folder, arguments=arguments)
    with server, pytest.raises(ServerError, match="ended with exit code 1"):
        server.wait_until_ready()
    told = server.log_tail(5)
    assert "--moe-a2a-backend moe_nvlink cannot serve this configuration" in told
    assert "remove --enable-two-batch-overlap" in told
