"""The parts of the demonstration that need no server: checkpoints, verdicts, clean-up."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing import shared_memory
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from moe_nvlink_plugin.integration.demo import (
    death,
    demo,
    formats,
    processes,
    report,
    server,
    sglang_server,
)
from moe_nvlink_plugin.integration.demo.tiny_checkpoint import MODELS, write_checkpoint

PROMPTS = [[1, 2, 3], [4]]
ANSWERS = report.Answers([[10, 11, 12, 13], [20, 21]], 0.5)
#: 2 ranks and 3 MoE layers, which read (3 + 4 - 1) + (1 + 2 - 1) = 8 tokens each.
RANKS = [
    report.RankStats(0, 9, 14, 20, 8, 4096, 2048, 9000, 8000),
    report.RankStats(1, 9, 10, 15, 5, 2560, 1280, 9000, 8000),
]


def failures(
    ours: report.Answers = ANSWERS, ranks: list[report.RankStats] | None = None
) -> list[str]:
    return report.failures(
        PROMPTS, ours, ANSWERS, RANKS if ranks is None else ranks, ep_size=2, num_moe_layers=3
    )


@pytest.mark.parametrize("architecture", sorted(MODELS))
def test_checkpoint_has_distinct_experts_repeats_and_is_rounded(
    tmp_path: Path, architecture: str
) -> None:
    model = MODELS[architecture]
    tensors = load_file(write_checkpoint(tmp_path / "a", architecture) / "model.safetensors")
    of_experts = f"model.layers.{model.num_layers - 1}.mlp.experts"
    if architecture == "gpt_oss":  # all in one tensor, transposed
        experts = [expert.t() for expert in tensors[f"{of_experts}.down_proj"]]
    else:
        experts = [
            tensors[f"{of_experts}.{expert}.down_proj.weight"]
            for expert in range(model.num_experts)
        ]
    assert len(experts) == model.num_experts
    for number, expert in enumerate(experts):
        assert expert.shape == (model.hidden_size, model.moe_intermediate_size)
        assert not any(torch.equal(expert, other) for other in experts[:number])
    write_checkpoint(tmp_path / "b", architecture)
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    other = write_checkpoint(tmp_path / "c", architecture, seed=1) / "model.safetensors"
    assert other.read_bytes() != (tmp_path / "a" / "model.safetensors").read_bytes()
    narrow = dataclasses.replace(model, dtype=torch.bfloat16)
    assert narrow.config()["torch_dtype"] == "bfloat16"
    rounded = load_file(write_checkpoint(tmp_path / "d", narrow) / "model.safetensors")
    assert rounded.keys() == tensors.keys()
    for name, tensor in rounded.items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, tensors[name].to(torch.bfloat16))


def test_verdict_is_good_when_all_is_equal_and_counted() -> None:
    assert failures() == []
    assert demo.conclude([], Path(), "all is equal.") == 0


def test_verdict_names_a_wrong_token() -> None:
    wrong = ANSWERS._replace(token_ids=[[10, 11, 99, 13], [20, 21]])
    (text,) = failures(wrong)
    assert "1 of 2 answers differ" in text
    assert demo.conclude([text], Path(), "") == 1
    table = report.answers_table(PROMPTS, wrong, ANSWERS)
    assert "DIFFERENT from token 3" in table
    assert "99" in table


def test_verdict_notices_layers_that_took_another_way() -> None:
    (text,) = failures(ranks=[RANKS[0], RANKS[1]._replace(tokens=9)])
    assert "saw 23 tokens, fewer than the 24" in text


def test_verdict_notices_that_nothing_moved() -> None:
    assert len(failures(ranks=[])) == 3
    still = [rank._replace(bytes_dispatched_remote=0) for rank in RANKS]
    assert failures(ranks=still) == ["Nothing moved from one rank to another."]


def test_stats_are_read_by_rank(tmp_path: Path) -> None:
    for rank in reversed(RANKS):
        path = tmp_path / f"rank{rank.ep_rank}.json"
        path.write_text(json.dumps(rank._asdict() | {"pid": 1, "ep_size": 2}))
    assert report.read_stats(tmp_path) == RANKS
    table = report.exchange_table(RANKS)
    assert table.splitlines()[-1].split()[:5] == ["all", "9", "24", "35", "13"]
    assert "6.5 KiB" in table


def test_stats_are_waited_for_until_they_are_quiet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        if (turn := round(now * 10)) % 5 == 0 and turn <= 35:
            rank = RANKS[0]._replace(tokens=turn)
            (tmp_path / "rank0.json").write_text(json.dumps(rank._asdict()))

    monkeypatch.setattr(report, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    (rank,) = report.wait_for_stats(tmp_path, quiet_s=0.6, limit_s=10.0)
    assert rank.tokens == 35
    assert now == pytest.approx(3.5 + 0.6, abs=0.15)
    assert report.wait_for_stats(tmp_path / "empty", quiet_s=0.2, limit_s=0.4) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--kill --framework sglang", "--kill needs --framework vllm, not sglang"),
        ("--kill --framework vllm33", "--kill needs --framework vllm, not vllm33"),
        ("--replicas", "--replicas needs --kill"),
    ],
)
def test_options_that_make_no_sense_together(
    arguments: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        demo.main(arguments.split())
    assert said in capsys.readouterr().err


OF_SURVIVORS: dict[str, object] = {"status": "healthy", "dead_ranks": [2], "lost_experts": []}
OTHERS = ANSWERS._replace(token_ids=[[10, 11, 99, 13], [20, 21]])


@pytest.mark.parametrize(
    ("after", "status", "told"),
    [
        ([ANSWERS, ANSWERS], {}, []),
        ([ANSWERS, OTHERS], {}, ["After the death the survivors gave different tokens"]),
        ([OTHERS, OTHERS], {}, ["The tokens after the death are not those before it"]),
        ([ANSWERS, ANSWERS], {"lost_experts": ["3"]}, ["Rank 1 has lost experts"]),
        ([ANSWERS, ANSWERS], {"dead_ranks": []}, ["Rank 1 does not go on without rank 2"]),
    ],
)
def test_verdict_of_a_death(
    after: list[report.Answers], status: dict[str, object], told: list[str]
) -> None:
    statuses = [OF_SURVIVORS, {**OF_SURVIVORS, **status}]
    found = death.failures([ANSWERS] * 3, after, statuses, replicas=True)
    assert len(found) == len(told)
    assert all(one.startswith(text) for one, text in zip(found, told, strict=True))


def test_verdict_of_a_death_without_replicas() -> None:
    """Lost experts change tokens, but not from one survivor to the other."""
    statuses = [{**OF_SURVIVORS, "lost_experts": ["11-15"]}] * 2
    assert death.failures([ANSWERS] * 3, [OTHERS, OTHERS], statuses, replicas=False) == []
    assert death.failures([ANSWERS, OTHERS], [OTHERS, OTHERS], statuses, replicas=False) == [
        "Before the death the ranks gave different tokens."
    ]


def test_a_watcher_that_ends_is_noticed(capsys: pytest.CaptureFixture[str]) -> None:
    with (
        death.Watcher(["no-url"]) as watcher,
        pytest.raises(server.ServerError, match="watch has ended"),
    ):
        watcher.wait_until_it_watches()
    assert "'no-url' is no URL of a server" in capsys.readouterr().out


class Flaky:
    """A server that cuts the first requests off after its rank's death."""

    name = "flaky"

    def __init__(self) -> None:
        self.cuts = 3

    def complete(self, *_: object, **__: object) -> None:
        if self.cuts:
            self.cuts -= 1
            raise server.ServerError("answered 0 tokens instead of 1")


def test_a_client_waits_for_the_first_token() -> None:
    asking = death.Client(Flaky(), [1])  # type: ignore[arg-type]
    since = time.monotonic()
    assert since <= asking.first_token(since) <= time.monotonic()
    asking.end()
    asking.join()
    assert asking.cut == 3


@pytest.fixture
def handlers() -> Iterator[None]:
    """Restores those of the signals that the demonstration takes."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {one: signal.getsignal(one) for one in numbers}
    yield
    for one, handler in before.items():
        signal.signal(one, handler)


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_end_the_demo_in_order(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "run", lambda *_: signal.raise_signal(number))
    # As a script's background job has it; and no nohup.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    assert demo.main([]) == demo.EXIT_INTERRUPTED


@pytest.mark.usefixtures("handlers")
def test_the_demo_outlives_a_hangup_under_nohup(monkeypatch: pytest.MonkeyPatch) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def run(*_arguments: object) -> list[str]:
        signal.raise_signal(signal.SIGHUP)
        return []

    monkeypatch.setattr(demo, "run", run)
    assert demo.main([]) == 0


# A stand-in for a server: a leader that ignores SIGTERM, a child, and shared memory of the child.
STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = "from multiprocessing import resource_tracker, shared_memory; import os, time;"
child += "resource_tracker.register = lambda *a: None;"
child += "m = shared_memory.SharedMemory(create=True, size=4096); print(m.name, flush=True);"
child += "time.sleep(600)"
subprocess.Popen([sys.executable, "-c", child])
time.sleep(600)
"""


@pytest.fixture
def stubborn() -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, "-c", STUBBORN]
    started = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert started.stdout is not None
    yield started, started.stdout.readline().strip()
    for pid in processes.processes_of_session(started.pid):
        os.kill(pid, signal.SIGKILL)
    started.wait()


def test_a_stubborn_session_ends_with_its_shared_memory(
    stubborn: tuple[subprocess.Popen[str], str],
) -> None:
    leader, segment = stubborn
    assert len(processes.processes_of_session(leader.pid)) == 2
    assert (processes.SHARED_MEMORY / segment).exists()
    assert processes.end_session(leader.pid, grace_s=0.3) == []
    assert processes.processes_of_session(leader.pid) == []
    assert not (processes.SHARED_MEMORY / segment).exists()


def test_the_watchdog_ends_the_session_when_its_owner_is_gone(
    stubborn: tuple[subprocess.Popen[str], str],
) -> None:
    leader, segment = stubborn
    owner_code = (
        "import time; from moe_nvlink_plugin.integration.demo import processes;"
        f"w = processes.start_watchdog({leader.pid}); print(w.pid, flush=True); time.sleep(600)"
    )
    owner = subprocess.Popen([sys.executable, "-c", owner_code], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    owner.stdout.readline()
    owner.kill()
    owner.wait()
    deadline = time.monotonic() + 40.0
    while (processes.SHARED_MEMORY / segment).exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert processes.processes_of_session(leader.pid) == []
    assert not (processes.SHARED_MEMORY / segment).exists()


def test_shared_memory_of_sees_only_what_has_a_name() -> None:
    segment = shared_memory.SharedMemory(create=True, size=4096)
    path = processes.SHARED_MEMORY / segment.name
    try:
        assert path in processes.shared_memory_of([os.getpid()])
    finally:
        segment.unlink()
    assert path not in processes.shared_memory_of([os.getpid()])
    segment.close()


def test_shared_memory_of_sees_semaphores() -> None:
    """glibc maps a new semaphore under a scratch name; vLLM's processes start with such ones."""
    before = set(os.listdir(processes.SHARED_MEMORY))
    semaphore = multiprocessing.get_context("spawn").Semaphore()
    found = {path.name for path in processes.shared_memory_of([os.getpid()])}
    assert [name for name in found - before if name.startswith("sem.mp-")]
    del semaphore


def test_what_a_killed_process_held_is_removed(
    stubborn: tuple[subprocess.Popen[str], str],
) -> None:
    leader, segment = stubborn
    path = processes.SHARED_MEMORY / segment
    held = processes.shared_memory_of(processes.processes_of_session(leader.pid))
    assert path in held
    for pid in processes.processes_of_session(leader.pid):
        os.kill(pid, signal.SIGKILL)
    leader.wait()
    assert path.exists()
    assert processes.end_session(leader.pid, also_held=held) == []
    assert not path.exists()


def test_a_server_that_dies_is_reported_with_its_first_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As vLLM's die: a worker raises, and every parent reports that one has died."""
    worker = "(Worker pid=7) ERROR 11-21 01:31:39 [worker.py:5] ValueError: no such layer"
    parents = "RuntimeError: a worker died\n" * 50
    end = "sys.exit(f'not {sys.argv[-5:]}')"
    program = f"import sys; print({worker!r}); print({parents!r}); {end}"
    monkeypatch.setattr(server.VllmServer, "program", ("-c", program))
    one = server.VllmServer(
        model=tmp_path / "missing", name="doomed", folder=tmp_path, arguments=["--no-such-flag"]
    )
    with one, pytest.raises(server.ServerError) as caught:
        one.wait_until_ready(timeout_s=120.0)
    told = str(caught.value)
    assert told.startswith("the doomed server ended with exit code 1 before it was ready.\n")
    assert "not ['--no-such-flag', '--host', '127.0.0.1', '--port', " in told
    assert told.endswith(f"Its first error:\n{worker}")
    assert one.pids == []
    one.stop()


@pytest.mark.parametrize(
    ("variable", "target", "interpreter"),
    [
        (sglang_server.PYTHON_VARIABLE, "sglang-env", sglang_server.interpreter),
        (server.VLLM33_VARIABLE, "vllm33-env", server.Vllm33Server.interpreter),
    ],
)
def test_without_an_environment_one_learns_how_to_get_it(
    variable: str,
    target: str,
    interpreter: Callable[[], object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    missing = tmp_path / "python"
    monkeypatch.setenv(variable, str(missing))
    with pytest.raises(server.ServerError, match=f"(?s)python does not exist.*make {target}"):
        interpreter()
    missing.touch()
    assert str(interpreter()) == str(missing)


def test_verdict_names_a_recipe_that_moved_more_than_it_says() -> None:
    heavy = formats.RecipeBytes("mxfp8", rows=10, dispatched=10 * 7500, choices=32, stated=7392)
    assert report.formats_failures([heavy]) == [
        "With mxfp8 a token weighed 7,468 bytes instead of 7,392."
    ]
