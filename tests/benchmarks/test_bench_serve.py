"""benchmarks/bench_serve.py without a server: the peer's exchange, turns, checks and the result."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import torch.distributed as dist

from benchmarks import bench_serve
from benchmarks.serving import gloo_plugin, measure, servers
from moe_nvlink_plugin import AllToAllConfig
from moe_nvlink_plugin.integration.common.agreement import Geometry, Ranks
from moe_nvlink_plugin.integration.common.options import Options
from moe_nvlink_plugin.integration.vllm.choices import WORDING
from moe_nvlink_plugin.testing import ThreadGroup
from tests.support.ranks import run_processes

EP_SIZE, HIDDEN, TOP_K, EXPERTS = 2, 32, 3, 8
#: Tokens of each rank, step by step: ragged, alike, none, and a size that came before.
STEPS = ([3, 1], [2, 2], [0, 4], [3, 1])


def config(rank: int) -> AllToAllConfig:
    return AllToAllConfig(
        ep_size=EP_SIZE,
        ep_rank=rank,
        max_tokens_per_rank=64,
        hidden_size=HIDDEN,
        num_experts=EXPERTS,
        top_k=TOP_K,
        dtype=torch.float32,
    )


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
        region = made.combine_input(torch.float32)
        arrived = []
        for source, count in enumerate(counts):
            filled = slice(source * bound, source * bound + count)
            whole = (received.hidden_states, received.topk_ids, received.topk_weights)
            arrived.append(tuple(tensor[filled].clone() for tensor in whole))
            region[filled] = received.hidden_states[filled] * (rank + 1)
        output = torch.empty(counts[rank], HIDDEN)
        found.append((arrived, made.combine(region, received.metadata, output=output)))
    return [found, made.stats()]


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
    assert [(row["backend"], row["concurrency"]) for row in rows] == [
        *(("a", 1), ("b", 1), ("a", 3), ("b", 3))
    ]
    assert [row["tokens_checked"] for row in rows] == [8, 8, 24, 24]


@pytest.mark.parametrize("wrong_at", [1, 3])
def test_a_wrong_token_ends_everything(wrong_at: int) -> None:
    server = FakeServer("a", [], wrong_at)
    with pytest.raises(measure.WrongTokensError, match=r"a: request 1 .* token 4 of 4 on; with 2"):
        measure.interleave([server], ASKED, [2], 3, lambda text: None)
    assert len(server.turns) == wrong_at


def test_an_answer_that_is_too_short_is_wrong() -> None:
    with pytest.raises(measure.WrongTokensError, match="from token 3 of 4 on"):
        measure.check("a", [[1, 2]], [[1, 2, 3, 4]])


def test_ratios_pair_the_waves_of_a_round() -> None:
    rates = {"ours": (10, 30, 20), "peer": (5, 10, 20)}
    waves = pd.DataFrame(
        [
            measure.Wave(name, 4, number, rate, 1, 1.5, 0.1)
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


class FakeExpertParallelServer(FakeServer):
    """What bench_serve starts, without vLLM."""

    def __init__(
        self, backend: str, _model: Path, _folder: Path, max_num_seqs: int, ep_size: int
    ) -> None:
        super().__init__(backend, [])
        self.max_num_seqs, self.ep_size, self.stopped = max_num_seqs, ep_size, False
        STARTED.append(self)

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
    monkeypatch.setattr(
        bench_serve,
        "one_rank_tokens",
        lambda _checkpoint, _folder, prompts, length: [expected_of(p, length) for p in prompts],
    )


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
    assert [server.max_num_seqs for server in STARTED] == [2, 2]
    assert all(server.stopped for server in STARTED)
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 4 + len(result["options"]["concurrency"])
    ratio = result["ratio"]["gloo_ag_rs"]["3"]["median"]
    assert f"{ratio:.2f} (" in printed[-1]


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
        (["--tokens", "509"], "not between 1 and 508"),
        (["--hidden_size", "200"], "no multiple of 128"),
        (["--top_k", "17"], "a top_k between 1 and their number"),
        (["--num_experts", "18", "--ep_size", "4"], "a multiple of 4 ranks"),
        (["--against", "nowhere"], "gloo_ag_rs, one_rank, or the folder of a checkout"),
    ],
)
def test_bad_options_are_refused(
    given: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        bench_serve.main(given)
    assert message in capsys.readouterr().err
