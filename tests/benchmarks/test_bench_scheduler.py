"""benchmarks/bench_scheduler.py without a server: what it records, computes, reports and draws."""

from __future__ import annotations

import json
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import bench_scheduler
from benchmarks.moe_comm import plots
from benchmarks.serving import measure, steps_plugin, streams

SMALL = ["--rates", "3", "9", "--seconds", "2", "--rounds", "2"]


def step(*running: int, evicted: Sequence[int] = ()) -> dict[str, Any]:
    return {"running": [*running], "evicted": [*evicted], "known": 0, "kv_share": 0.5}


def answer(first_s: float, *gaps_s: float) -> streams.Answer:
    arrived = [10.0 + first_s]
    for gap in gaps_s:
        arrived.append(arrived[-1] + gap)
    return streams.Answer([7] * len(arrived), 10.0, arrived)


def test_the_plugin_writes_iterations_in_which_requests_run(tmp_path: Path) -> None:
    outputs: Iterator[Any] = iter(
        types.SimpleNamespace(num_scheduled_tokens=tokens, preempted_req_ids=evicted)
        for tokens, evicted in [
            ({"cmpl-numbered11-0-ab": 4, "cmpl-numbered2-0-cd": 1, "somebody": 1}, None),
            ({}, set()),
            ({"cmpl-numbered2-0-cd": 1}, {"cmpl-numbered11-0-ab"}),
        ]
    )
    record = steps_plugin.recording(lambda _self: next(outputs), tmp_path / "steps")
    scheduler = types.SimpleNamespace(
        get_request_counts=lambda: (2, 3), kv_cache_manager=types.SimpleNamespace(usage=0.25)
    )
    for _ in range(3):
        record(scheduler)
    lines = (tmp_path / "steps").read_text().splitlines()
    common = {"known": 5, "kv_share": 0.25}
    assert [json.loads(line) for line in lines] == [
        {"running": [2, 11], "evicted": [], **common},
        {"running": [2], "evicted": [11], **common},
    ]


def test_figures_of_a_run_with_an_eviction() -> None:
    steps = [step(0, 1), step(0, evicted=[1]), step(0), step(1)]
    run = bench_scheduler.Run([answer(0.5, 0.1, 0.1), answer(0.25, 2.0)], steps)
    assert run.spans() == [[[0, 2]], [[0, 0], [3, 3]]]
    found = run.figures()
    assert (found["iterations"], found["preemptions"], found["longest_pause"]) == (4, 1, 2)
    assert found["seconds"] == pytest.approx(2.25)
    assert found["tokens_per_s"] == pytest.approx(5 / 2.25)
    assert found["gap_p50_ms"] == pytest.approx(100)
    assert found["largest_gap_max_ms"] == pytest.approx(2000)
    assert found["first_p50_ms"] == pytest.approx(375)


class FakeServer:
    """Answers at once. Of a wave of many, vLLM's scheduler evicts the last; ours lets it wait."""

    wrong = False

    def __init__(self, policy: str, _model: Path, _folder: Path, _kv_blocks: int) -> None:
        self.name = policy
        self.pids: list[int] = []
        self.server = types.SimpleNamespace(
            wait_until_ready=lambda timeout_s: 1.0, stop=lambda: STOPPED.append(self.name)
        )

    def run(self, requests: Sequence[streams.Request], *, at_once: bool) -> bench_scheduler.Run:
        answers = [answer(0.01, 0.002, 0.002) for _ in requests]
        if self.wrong and self.name == "guaranteed_no_evict":
            answers[-1].token_ids[-1] += 1
        everyone, last = range(len(requests)), len(requests) - 1
        steps = [step(*everyone)] * 3
        if last > 10:
            steps = [step(*everyone), step(*everyone[:-1], evicted=[last]), step(last)]
            if self.name != "max_utilization":
                steps = [step(*everyone[:-1])] * 3 + [step(last)] * 3
        return bench_scheduler.Run(answers, steps)


STOPPED: list[str] = []


@pytest.fixture
def no_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    STOPPED.clear()
    monkeypatch.setattr(bench_scheduler, "ScheduledServer", FakeServer)
    monkeypatch.setattr(bench_scheduler, "write_checkpoint", lambda *_: None)
    monkeypatch.setattr(measure, "IDLE_WINDOW_S", 0.001)


@pytest.mark.usefixtures("no_servers")
def test_the_result_its_table_and_its_plots(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "result.json"
    assert bench_scheduler.main([*SMALL, "--output_file", str(output)]) == 0
    result = json.loads(output.read_text())
    policies = list(bench_scheduler.POLICIES)
    assert sorted(STOPPED) == sorted(policies)
    assert [(row["workload"], row["policy"]) for row in result["waves"]] == [
        (name, policy) for name in bench_scheduler.WORKLOADS for policy in policies
    ]
    assert [row["rate"] for row in result["rows"]] == [3.0] * 3 + [9.0] * 3
    evicting, not_evicting = (row["preemptions"]["median"] for row in result["waves"][:2])
    assert (evicting, not_evicting) == (1, 0)
    printed = capsys.readouterr().out
    assert "Schedules of 'long answers': not the same with all policies; the same in" in printed
    assert "Schedules of 'no pressure': the same with all policies; the same in" in printed
    figures = plots.figures_of(result)
    assert set(figures) == {"iterations", "requests", "waits"}
    running: Any = figures["iterations"].axes[0]
    assert [list(line.get_ydata()) for line in running.lines][:2] == [
        [24, 23, 1],
        [23] * 3 + [1] * 3,
    ]
    lines: Any = figures["requests"].axes[0].collections[-1]
    evicted = lines.get_segments()
    assert [segment[:, 0].tolist() for segment in evicted] == [[0, 1], [2, 3]]
    assert [axes.get_title() for axes in figures["waits"].axes][-1] == "preemptions"


@pytest.mark.usefixtures("no_servers")
def test_nothing_is_reported_if_a_policy_changes_a_token(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeServer, "wrong", True)
    output = tmp_path / "result.json"
    assert bench_scheduler.main([*SMALL, "--output_file", str(output)]) == 1
    assert not output.exists()
    assert "nothing was measured" in capsys.readouterr().err
    assert len(STOPPED) == len(bench_scheduler.POLICIES)
