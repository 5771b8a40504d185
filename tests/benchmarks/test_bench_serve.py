"""benchmarks/bench_serve.py without a server: the peer's exchange, turns, checks and the result."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import json
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pandas as pd
import psutil
import pytest
import torch
import torch.distributed as dist

from benchmarks import bench_serve
from benchmarks.serving import gloo_plugin, measure, servers, sizes
from moe_nvlink_plugin import AllToAllConfig
from moe_nvlink_plugin.integration.common.agreement import Geometry, Ranks
from moe_nvlink_plugin.integration.common.options import Options
from moe_nvlink_plugin.integration.vllm.choices import WORDING
from moe_nvlink_plugin.testing import ThreadGroup
from tests.core.exchange import small_exchange
from tests.support.ranks import run_processes

EP_SIZE, HIDDEN, TOP_K, EXPERTS = 2, 32, 3, 8
#: Tokens of each rank, step by step: ragged, alike, none, and a size that came before.
STEPS = ([3, 1], [2, 2], [0, 4], [3, 1])


def config(rank: int) -> AllToAllConfig:
    sizes = {"hidden_size": HIDDEN, "num_experts": EXPERTS, "top_k": TOP_K}
    return small_exchange.config(EP_SIZE, rank, max_tokens_per_rank=64, **sizes)


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows, ids and weights of one rank in one step."""
    count, generator = STEPS[step][rank], torch.Generator().manual_seed(10 * step + rank)
    hidden = torch.randn(count, HIDDEN, generator=generator)
    ids = torch.randint(0, EXPERTS, (count, TOP_K), generator=generator, dtype=torch.int32)
    return hidden, ids, torch.rand(count, TOP_K, generator=generator)


def rounds_of_the_peer(rank: int, _ep_size: int) -> list[Any]:
    """All steps on one rank: what arrived by source, and what experts that scale by rank gave."""
    current = [0]
    made = gloo_plugin.GlooExchange(config(rank), dist.group.WORLD, lambda: STEPS[current[0]])
    found: list[Any] = []
    for step, counts in enumerate(STEPS):
        current[0] = step
        hidden, ids, weights = batch(rank, step)
        received = made.dispatch(hidden, ids, weights)
        assert received.recv_counts.tolist() == counts
        bound = received.metadata.max_tokens
        assert bound == max(counts)
        region = made.combine_input(torch.float32, hidden_size=None, metadata=received.metadata)
        arrived = []
        for source, count in enumerate(counts):
            filled = slice(source * bound, source * bound + count)
            whole = (received.hidden_states, received.topk_ids, received.topk_weights)
            arrived.append(tuple(tensor[filled].clone() for tensor in whole))
            region[filled] = received.hidden_states[filled] * (rank + 1)
        output = torch.empty(counts[rank], HIDDEN)
        # As vLLM's layer calls it.
        sent_back = made.combine(
            region, received.metadata, output=output, hidden_size=None, add=None, scale=1
        )
        found.append((arrived, sent_back))
    return [found, made.stats()]


@pytest.mark.long
def test_the_peer_gathers_and_reduces(tmp_path: Path) -> None:
    for rank, (found, stats) in enumerate(run_processes(EP_SIZE, rounds_of_the_peer, tmp_path)):
        for step, (arrived, output) in enumerate(found):
            for source in range(EP_SIZE):
                for mine, sent in zip(arrived[source], batch(source, step), strict=True):
                    assert torch.equal(mine, sent)
            torch.testing.assert_close(output, 3 * batch(rank, step)[0])
        row = HIDDEN * 4 + TOP_K * 8
        padded = sum(map(max, STEPS))
        expected = ("gloo_ag_rs", len(STEPS), sum(counts[rank] for counts in STEPS), padded)
        assert stats == (*expected, padded * row, padded * HIDDEN * 4)


def test_the_peer_refuses_a_batch_that_vllm_did_not_agree_on() -> None:
    made = gloo_plugin.GlooExchange(config(0), None, lambda: [2, 2])
    with pytest.raises(RuntimeError, match=r"agreed on \[2, 2\] tokens, and this rank has 3"):
        made.dispatch(*batch(0, 0))


def test_the_plugin_replaces_the_managers_exchange(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a worker's start to its end, the pool asks the peer for nothing that it lacks."""
    module: Any = importlib.import_module("moe_nvlink_plugin.integration.common.pool")
    monkeypatch.setattr(module, "MoeAllToAll", module.MoeAllToAll)
    gloo_plugin.register()
    monkeypatch.setenv("MOE_NVLINK_STATS_DIR", str(tmp_path))
    (group,) = ThreadGroup.ranks(1)
    ranks = Ranks(group, 0, 1, WORDING)
    pool = module.ExchangePool(ranks, torch.device("cpu"), Options(), holds_startup=True)
    made = pool.exchange(Geometry(EXPERTS, TOP_K, HIDDEN, 64, torch.float32))
    assert type(made) is gloo_plugin.GlooExchange
    pool.end_startup()
    pool.close()
    (written,) = tmp_path.iterdir()
    assert json.loads(written.read_text())["exchange"] == gloo_plugin.NAME


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The servers here have no processes that could come to rest."""
    monkeypatch.setattr(measure, "IDLE_WINDOW_S", 0.001)


class FakeServer:
    """Answers at once; remembers the turns."""

    def __init__(self, name: str, turns: list[tuple[str, int]], wrong_at: int = -1) -> None:
        self.name, self.turns, self.wrong_at = name, turns, wrong_at
        self.pids: list[int] = []

    def answer(self, prompts: Sequence[Sequence[int]], length: int) -> list[list[int]]:
        self.turns.append((self.name, len(prompts)))
        answers = [expected_of(prompt, length) for prompt in prompts]
        if len(self.turns) == self.wrong_at:
            answers[-1][-1] += 1
        return answers


def expected_of(prompt: Sequence[int], length: int) -> list[int]:
    return [sum(prompt) + number for number in range(length)]


PROMPTS = [[1, 2], [3, 4], [5, 6]]
ASKED = measure.Asked(PROMPTS, [expected_of(prompt, 4) for prompt in PROMPTS])


def test_servers_take_turns_and_the_first_wave_is_not_measured() -> None:
    turns: list[tuple[str, int]] = []
    pair = [FakeServer("a", turns), FakeServer("b", turns)]
    waves = measure.interleave(pair, ASKED, [1, 3], 2, lambda text: None)
    assert "".join(name for name, count in turns if count == 1) == "ababba"
    assert [count for _name, count in turns] == [1] * 6 + [3] * 6
    rows = measure.rows_of(waves)
    of_rows = [(row["backend"], row["concurrency"]) for row in rows]
    assert of_rows == [("a", 1), ("b", 1), ("a", 3), ("b", 3)]
    assert [row["tokens_checked"] for row in rows] == [8, 8, 24, 24]


@pytest.mark.parametrize("wrong_at", [1, 3])
def test_a_wrong_token_ends_everything(wrong_at: int) -> None:
    server = FakeServer("a", [], wrong_at)
    with pytest.raises(measure.WrongTokensError, match=r"a: request 1 .* token 4 of 4 on; with 2"):
        measure.interleave([server], ASKED, [2], 3, lambda text: None)
    assert len(server.turns) == wrong_at


def test_answers_are_compared_up_to_the_first_token_that_differs() -> None:
    with pytest.raises(measure.WrongTokensError, match="from token 3 of 4 on"):
        measure.check("a", [[1, 2]], [[1, 2, 3, 4]])
    expected = [[1, 2, 3, 4]] * 3
    assert measure.compare([[1, 2, 3, 4], [1, 9, 3, 9], [9, 2, 3, 4]], expected) == (4 + 2 + 1, 2)


#: Of four prompts, each answered with ten tokens.
OF_BF16 = measure.Asked(
    [[n] for n in range(4)], [expected_of([n], 10) for n in range(4)], is_exact=False
)


def test_bf16_may_choose_another_token_now_and_then() -> None:
    server = FakeServer("a", [], wrong_at=2)
    waves = measure.interleave([server], OF_BF16, [4], 2, lambda text: None)
    (row,) = measure.rows_of(waves)
    assert (row["tokens_checked"], row["tokens_different"]) == (80, 1)


def test_bf16_does_not_excuse_an_exchange_that_is_wrong() -> None:
    class Wrong(FakeServer):
        def answer(self, prompts: Sequence[Sequence[int]], length: int) -> list[list[int]]:
            return [expected_of([9], length) for _ in prompts]

    with pytest.raises(measure.WrongTokensError, match="wrong: 8 of 8 tokens differ .* 10% may"):
        measure.interleave(
            [FakeServer("right", []), Wrong("wrong", [])], OF_BF16, [4], 2, lambda text: None
        )


def test_ratios_pair_the_waves_of_a_round() -> None:
    rates = {"ours": (10, 30, 20), "peer": (5, 10, 20)}
    waves = pd.DataFrame(
        [
            measure.Wave(name, 4, number, rate, 1, 0, 1.5, 0.1)
            for name, of in rates.items()
            for number, rate in enumerate(of)
        ]
    )
    assert measure.ratios_of(waves, "ours") == {
        "peer": {"4": {"median": 2.0, "q25": 1.5, "q75": 2.5}}
    }
    assert measure.spread(pd.Series([7.0])) == {"median": 7.0, "q25": 7.0, "q75": 7.0}


def server_with_counters(
    folder: Path, backend: str, counters: Sequence[dict[str, Any]]
) -> servers.ExpertParallelServer:
    made = servers.ExpertParallelServer.__new__(servers.ExpertParallelServer)
    made.name, made._stats_folder, made.ep_size = backend, folder, 2
    for rank, one in enumerate(counters):
        (folder / f"rank{rank}.json").write_text(json.dumps(one))
    return made


OURS_COUNTED = [{"tokens": 6, "destinations": 8}, {"tokens": 4, "destinations": 5}]
PEER_COUNTED = [{"tokens": 5, "exchange": "gloo_ag_rs"}] * 2


@pytest.mark.parametrize(
    ("backend", "counters", "problem"),
    [
        ("moe_nvlink", OURS_COUNTED, None),
        ("gloo_ag_rs", PEER_COUNTED, None),
        ("gloo_ag_rs", OURS_COUNTED, "exchange was {None}"),
        ("moe_nvlink", PEER_COUNTED, "exchange was {'gloo_ag_rs'}"),
        ("moe_nvlink", OURS_COUNTED[:1], "1 of 2 ranks count"),
        ("moe_nvlink", OURS_COUNTED[1:] * 2, "saw 8 tokens, its MoE layers 10"),
    ],
)
def test_counters_must_show_the_exchange(
    backend: str,
    counters: Sequence[dict[str, Any]],
    problem: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(servers, "COUNTERS_PAUSE_S", 0.01)
    monkeypatch.setattr(servers, "COUNTERS_LIMIT_S", 0.1)
    made = server_with_counters(tmp_path, backend, counters)
    if problem is None:
        assert made.check_exchanged(10) == counters
    else:
        with pytest.raises(servers.NotExchangedError) as refused:
            made.check_exchanged(10)
        assert problem in str(refused.value)


CACHE = "--kv-cache-memory-bytes"
BOTH_OF_2 = ("--data-parallel-size=2", "--tensor-parallel-size=2")


def test_ranks_divide_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: set(range(6)))
    assert [servers.threads_of(ranks) for ranks in (1, 2, 4, 8)] == [6, 3, 1, 1]


@pytest.mark.parametrize(
    ("backend", "ranks", "places", "flags", "absent"),
    [
        ("moe_nvlink", 2, (2, 2, 2), {"--max-num-seqs=17", "--enable-expert-parallel"}, "--tensor"),
        ("gloo_ag_rs", 4, (4, 4, 4), {"--max-num-seqs=9", "--data-parallel-size=4"}, "--tensor"),
        ("moe_nvlink_tp2", 4, (4, 4, 2), {"--max-num-seqs=17", *BOTH_OF_2}, "--distributed-exec"),
        ("tensor_parallel", 2, (2, 1, 1), {"--max-num-seqs=33", BOTH_OF_2[1]}, "--data"),
        ("one_rank", 4, (1, 1, 1), {"--max-num-seqs=33", f"{CACHE}={256 << 20}"}, "--data"),
    ],
)
def test_how_a_server_is_started(
    backend: str,
    ranks: int,
    places: tuple[int, int, int],
    flags: set[str],
    absent: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`places`: num_ranks, ep_size and dp_size."""
    started = mock.Mock()
    monkeypatch.setattr(servers, "VllmServer", started)
    made = servers.ExpertParallelServer(backend, tmp_path, tmp_path, 33, ranks, "bfloat16")
    assert (made.num_ranks, made.ep_size, made.dp_size) == places
    given = started.call_args.kwargs
    assert "PYTHONSAFEPATH" not in given["environment"]
    assert given["with_plugins"] is (backend in ("moe_nvlink", "moe_nvlink_tp2", "gloo_ag_rs"))
    assert given["environment"]["OMP_NUM_THREADS"] == str(servers.threads_of(made.num_ranks))
    found = given["arguments"]
    assert flags | {"--dtype=bfloat16", "--enforce-eager"} <= set(found)
    assert not any(flag.startswith(absent) for flag in found)
    # Tensor-parallel ranks cannot be one process.
    has_one_process = any("UniProcExecutor" in flag for flag in found)
    assert has_one_process == (backend not in ("tensor_parallel", "moe_nvlink_tp2"))


def titled(title: str) -> subprocess.Popen[bytes]:
    """A process with a title as vLLM's have it: the first word of its command line."""
    process = subprocess.Popen([title, "60"], executable=shutil.which("sleep"))
    while not psutil.Process(process.pid).cmdline():  # for a moment after the exec
        time.sleep(0.01)
    return process


@pytest.mark.parametrize(
    ("titles", "expected"),
    [
        (["VLLM::EngineCore", "VLLM::Worker_TP1", "VLLM::Worker_TP0"], [2, 1]),
        (["VLLM::EngineCore_DP1", "VLLM::APIServer", "VLLM::EngineCore_DP0"], [2, 0]),
    ],
)
def test_workers_are_told_from_other_processes(titles: list[str], expected: list[int]) -> None:
    with contextlib.ExitStack() as stop:
        started = [stop.enter_context(titled(title)) for title in titles]
        for one in started:
            stop.callback(one.kill)
        found = servers.workers_among([one.pid for one in started])
        assert [one.pid for one in found] == [started[n].pid for n in expected]
        assert all(one.memory_full_info().pss > 0 for one in found)


class FakeExpertParallelServer(FakeServer):
    """What bench_serve starts, without vLLM."""

    threads = 1

    def __init__(
        self, backend: str, _model: Path, _folder: Path, most: int, num_ranks: int, dtype: str
    ) -> None:
        super().__init__(backend, [])
        self.given, self.stopped = (most, num_ranks, dtype), False
        STARTED.append(self)

    def memory_bytes(self) -> list[int]:
        return [3 << 29, 1 << 30]

    def wait_until_ready(self) -> float:
        return 1.0

    def check_exchanged(self, tokens: int) -> list[dict[str, Any]]:
        return [{"at_least": tokens}]

    def stop(self) -> None:
        self.stopped = True


STARTED: list[FakeExpertParallelServer] = []


@pytest.fixture
def no_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    STARTED.clear()
    monkeypatch.setattr(bench_serve, "ExpertParallelServer", FakeExpertParallelServer)

    def tokens(_checkpoint: Path, _folder: Path, prompts: Any, length: int, _dtype: str) -> Any:
        return [expected_of(prompt, length) for prompt in prompts]

    monkeypatch.setattr(bench_serve, "one_rank_tokens", tokens)


SMALL = ["--concurrency", "1", "3", "--tokens", "6", "--rounds", "2"]


@pytest.mark.usefixtures("no_servers")
def test_the_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "result.json"
    assert bench_serve.main([*SMALL, "--output_file", str(output)]) == 0
    result = json.loads(output.read_text())
    assert (result["kind"], result["schema"], result["ep_size"]) == ("serve", 1, 2)
    assert result["options"]["layers"] == 3
    rows = result["rows"]
    assert {row["backend"] for row in rows} == {"moe_nvlink", "gloo_ag_rs"}
    assert [row["tokens_checked"] for row in rows] == [12, 12, 36, 36]
    assert all(row["decode_tokens_per_s"]["q25"] > 0 for row in rows)
    assert set(result["ratio"]["gloo_ag_rs"]) == {"1", "3"}
    # 2 rounds of 1 and of 3 requests, of 4 + 6 - 1 tokens that pass 3 layers.
    assert result["exchanged"]["gloo_ag_rs"] == [{"at_least": 8 * 9 * 3}]
    assert [server.given for server in STARTED] == [(3, 2, "float32")] * 2
    assert (result["size"], result["dtype"]) == ("demo", "float32")
    assert result["memory_bytes"]["gloo_ag_rs"] == [3 << 29, 1 << 30]
    assert all(server.stopped for server in STARTED)
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 4 + len(result["options"]["concurrency"]) + 2
    ratio = result["ratio"]["gloo_ag_rs"]["3"]["median"]
    assert f"{ratio:.2f} (" in printed[-3]
    assert printed[-2] == "| compute threads of each rank | 1 | 1 |  |"
    assert printed[-1] == "| memory of each rank (PSS), GiB | 1.50, 1.00 | 1.50, 1.00 |  |"


@pytest.mark.parametrize("size", sizes.SIZES)
def test_the_options_of_a_size(size: str) -> None:
    options = bench_serve.options_of(bench_serve.parser().parse_args(["--size", size]))
    assert options.model == sizes.SIZES[size]
    assert sizes.name_of(options.model) == size
    given = bench_serve.parser().parse_args(["--layers", "2"])
    assert sizes.name_of(bench_serve.options_of(given).model) == "own"


@pytest.mark.parametrize(("size", "millions"), [("0.2B", 219), ("1.7B", 1680)])
def test_a_size_has_the_weights_that_it_names(size: str, millions: int) -> None:
    model = sizes.SIZES[size]
    experts = 3 * model.hidden_size * model.moe_intermediate_size * model.num_experts
    attention = 4 * model.hidden_size * model.num_heads * model.head_dim
    router, words = model.hidden_size * model.num_experts, 2 * model.vocab_size * model.hidden_size
    found = model.num_layers * (experts + attention + router) + words
    assert round(found / 1e6) == millions


@pytest.mark.usefixtures("no_servers")
def test_the_result_of_a_larger_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_serve, "write_checkpoint", lambda folder, _model: folder)
    output = tmp_path / "result.json"
    against = ["--size", "0.2B", "--against", "tensor_parallel", "one_rank"]
    assert bench_serve.main([*SMALL, *against, "--output_file", str(output)]) == 0
    result = json.loads(output.read_text())
    assert (result["size"], result["dtype"]) == ("0.2B", "bfloat16")
    assert {server.given for server in STARTED} == {(3, 2, "bfloat16")}
    assert set(result["ratio"]) == {"tensor_parallel", "one_rank"}
    assert result["exchanged"]["moe_nvlink"] == [{"at_least": 8 * 9 * 4}]
    printed = capsys.readouterr().out
    assert "32 experts, bfloat16; decode" in printed
    assert "| tokens that differ from one rank's after equal ones | 0.0% | 0.0% |  |" in printed


@pytest.mark.usefixtures("no_servers")
def test_nothing_is_written_after_a_wrong_token(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_serve, "one_rank_tokens", lambda *_: [[0] * 6] * 3)
    output = tmp_path / "result.json"
    assert bench_serve.main([*SMALL, "--output_file", str(output)]) == 1
    assert not output.exists()
    assert "nothing was measured" in capsys.readouterr().err
    assert all(server.stopped for server in STARTED)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--tokens 509", "not between 1 and 508"),
        ("--hidden_size 200", "no multiple of 128"),
        ("--top_k 17", "a top_k between 1 and their number"),
        ("--num_experts 18 --ep_size 4", "a multiple of 4 ranks"),
        ("--against moe_nvlink_tp2 --ep_size 3 --num_experts 18", "an even number"),
        ("--against nowhere", "one_rank, tensor_parallel, or the folder of a checkout"),
        ("--size 7B", "choose from"),
        ("--size 0.2B --layers 2", "--layers changes the demo's model"),
    ],
)
def test_bad_options_are_refused(
    given: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        bench_serve.main(given.split())
    assert message in capsys.readouterr().err
