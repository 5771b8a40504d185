"""benchmarks/bench_moe_comm.py: wrong results are refused, whoever has them; what a run leaves."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
import torch
import torch.distributed as dist

from benchmarks import bench_moe_comm
from benchmarks.moe_comm import backends, emulated_flashinfer, expected, ours, processes, timing
from benchmarks.moe_comm.backends import Context, Side, WrongResult
from benchmarks.moe_comm.options import OptionError, Options
from benchmarks.moe_comm.routers import tokens_of
from moe_nvlink_plugin import reference
from tests.support.programs import ROOT, python
from tests.support.ranks import run_processes

SMALL = Options(
    profile="custom", hidden_size=128, top_k=3, num_experts=8, ep_size=2, batches=(5,), iters=2
)
CPU_BACKENDS = (
    *("moe_nvlink", "moe_nvlink_audited", "moe_nvlink_audit_words"),
    *("gloo_gather", "gloo_gather_full", "all_to_all", "all_to_all_full"),
)


# What backends are held to.


@pytest.mark.parametrize("ep_size", [2, 5])
@pytest.mark.parametrize("top_k", [1, 3, 6])
def test_what_is_expected_is_the_reference(ep_size: int, top_k: int) -> None:
    options = dataclasses.replace(SMALL, ep_size=ep_size, top_k=top_k)
    mine = tokens_of(options, 7, 1)
    partial = [expected.expert_rows(options, rank, *mine) for rank in range(ep_size)]
    combined = reference.combine(options.config(1, 7), mine.topk_ids, partial)
    assert not bool((combined == 0).all(dim=1).any())
    for where, rows in expected.terms(options, mine):
        assert torch.equal(expected.expected_combined(options, rows), combined[where])
        total, bound = expected.sum_and_bound(rows)
        assert bool(((combined[where].double() - total).abs() <= bound).all())
        # Without one of several experts' rows the sum is out of its bound.
        if top_k > 1 and ep_size > 1:
            less = rows.clone()
            less[3, 0] = 0
            assert bool(((less.double().sum(1) - total).abs() > bound)[3].any())


def test_experts_tell_ranks_ids_and_weights_apart() -> None:
    mine = tokens_of(SMALL, 64, 0)
    rows = expected.expert_rows(SMALL, 0, *mine)
    assert not torch.equal(rows, expected.expert_rows(SMALL, 1, *mine))
    other = mine.topk_weights.clone()
    other[:, 0] += 0.5
    assert not torch.equal(rows, expected.expert_rows(SMALL, 0, mine.hidden, mine.topk_ids, other))
    # Where a rank has no expert of a token it adds nothing.
    none = ~(mine.topk_ids < 4).any(dim=1)
    assert bool(none.any())
    assert bool((rows[none] == 0).all())


# Right backends pass, wrong ones do not. All in one start of two processes.


def _context(options: Options, rank: int) -> Context:
    mine = tokens_of(options, options.batches[0], rank)
    return Context(options, rank, mine, dist.group.WORLD, torch.device("cpu"))


def _rows_of(side: Any, verb: str) -> Any:
    """What the verb has moved here."""
    if verb == "combine":
        return side.combined
    return side.received.hidden_states if hasattr(side, "received") else side.arrived


def _one_bit(rows: torch.Tensor) -> None:
    rows.view(torch.uint8)[1, 3] ^= 16


def _swap(rows: torch.Tensor) -> None:
    rows[:2] = rows[:2].flip(0)


def _drop(rows: torch.Tensor) -> None:
    rows[0] = 0


FAULTS = {"one bit": _one_bit, "two rows swapped": _swap, "a row dropped": _drop}


def _with_fault(side: Any, verb: str, spoil: Callable[[torch.Tensor], None]) -> None:
    right = getattr(side, verb)

    def faulty() -> None:
        right()
        spoil(_rows_of(side, verb))

    setattr(side, verb, faulty)


def _message(side: Side, context: Context) -> str:
    try:
        processes.check({"under test": side}, context)
    except WrongResult as error:
        return str(error)
    return ""


def _checks(rank: int, _size: int) -> dict[str, str]:
    """What the check says, by (backend, fault); rank 1 has the fault."""
    found = {}
    for name in CPU_BACKENDS:
        context = _context(SMALL, rank)
        for verb in ("dispatch", "combine"):
            for fault, spoil in {"nothing": None, **FAULTS}.items():
                side = backends.BACKENDS[name](context)
                if spoil is not None and rank == 1:
                    _with_fault(side, verb, spoil)
                found[f"{name} {verb} {fault}"] = _message(side, context)
                side.close()
    for recipe in ("fp8_block", "fp8_block_pow2", "fp8_token", "fp8_tensor", "mxfp8", "nvfp4"):
        for name in ("moe_nvlink", "gloo_gather_full", "all_to_all_full"):
            options = dataclasses.replace(SMALL, recipe=recipe, combine="fp8_block")
            context = _context(options, rank)
            side = backends.BACKENDS[name](context)
            found[f"{name} {recipe} nothing"] = _message(side, context)
            side.close()
    several: tuple[dict[str, Any], ...] = (
        {"max_tokens": 9, "combine": "nvfp4"},
        {"dtype": "float32", "recipe": "fp32"},
        {"combine": "fp8_tensor", "payload_in_workspace": False},
    )
    for changes in several:
        context = _context(dataclasses.replace(SMALL, **changes), rank)
        ours: Any = backends.BACKENDS["moe_nvlink"](context)
        is_there = ours._rows is ours._exchange.combine_input()
        assert is_there == context.options.payload_in_workspace
        found[f"moe_nvlink {changes} nothing"] = _message(ours, context)
        ours.close()
    dist.barrier()
    return found


@pytest.mark.long
def test_a_backend_that_loses_or_alters_a_row_is_refused(tmp_path: Path) -> None:
    of_ranks = run_processes(2, _checks, tmp_path)
    assert len(of_ranks[0]) == 7 * 2 * 4 + 6 * 3 + 3
    for found in of_ranks:
        for case, message in found.items():
            if case.endswith("nothing"):
                assert message == "", case
            else:
                assert "rank 1" in message, case
                assert case.split()[0] + ", 5 tokens per rank" in message, case


def test_a_wrong_result_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = mock.Mock(side_effect=WrongResult("gloo_gather, 5 tokens per rank, rank 1: rows"))
    file = tmp_path / "result.json"
    monkeypatch.setattr(processes, "run", wrong)
    monkeypatch.setattr(sys, "argv", ["bench_moe_comm.py", "--output_file", str(file)])
    with pytest.raises(SystemExit, match="1"):
        bench_moe_comm.main()
    assert not file.exists()
    assert "wrong result, nothing of its batch is reported" in capsys.readouterr().err


def test_a_peer_that_fails_ends_in_status_1_and_our_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command line of a machine whose FlashInfer does not load."""
    monkeypatch.setattr(emulated_flashinfer, "unavailable", lambda options: None)
    monkeypatch.setattr(emulated_flashinfer, "probe", lambda options: "does not load")
    file = tmp_path / "result.json"
    asked = command("--device", "rehearsal", "--emulate_ranks", "2", "--batches", "1")[1:]
    asked += ["--iters", "2", "--backend", "moe_nvlink", "flashinfer", "--output_file", str(file)]
    monkeypatch.setattr(sys, "argv", asked)
    with pytest.raises(SystemExit, match="1"):
        bench_moe_comm.main()
    said = capsys.readouterr()
    assert "failed: all but this was measured: flashinfer: does not load" in said.err
    assert f"written: {file}" in said.out
    result = json.loads(file.read_text())
    assert "incomplete" not in result
    assert [row["backend"] for row in result["rows"]] == ["moe_nvlink"]
    assert result["not_measured"].count("flashinfer: does not load") == 1


# A whole run.


def command(*options: str) -> list[str]:
    small = ["--ep_size", "2", "--hidden_size", "128", "--top_k", "3", "--num_experts", "8"]
    return [sys.executable, str(ROOT / "benchmarks/bench_moe_comm.py"), *small, *options]


@pytest.mark.long
def test_a_run(tmp_path: Path) -> None:
    file = tmp_path / "out" / "result.json"
    asked = ["--batches", "1", "6", "--iters", "4", "--warmup", "1", "--router", "hotspot"]
    told = ["--kernel_breakdown", "--iter_stats", "--output_file", str(file)]
    done = python(*command(*asked, *told)[1:])
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    result = json.loads(file.read_text())
    assert [(row["tokens"], row["backend"]) for row in result["rows"]] == [
        (tokens, name) for tokens in (1, 6) for name in ("moe_nvlink", "gloo_gather", "all_to_all")
    ]
    assert result["options"]["profile"] == "custom"
    command_line = result["machine"]["command"]
    assert command_line.startswith("python benchmarks/bench_moe_comm.py --ep_size 2")
    for row in result["rows"]:
        assert row["checked"]
        assert row["given"]
        for phase in ("dispatch", "combine", "both"):
            of = row[phase]
            assert 0 < of["q25_us"] <= of["median_us"] <= of["q75_us"]
            assert 0 < of["min_rank_us"] <= of["max_rank_us"]
            assert of["of_ceiling"] == pytest.approx(of["ceiling_us"] / of["median_us"])
            assert torch.tensor(row["samples"][phase]).shape == (4, 2)
        assert ("ratio_to_ours" in row) == (row["backend"] != "moe_nvlink")
        assert f"| {row['tokens']} | {row['backend']} | both |" in done.stdout
    for verb in ("dispatch", "combine"):
        parts = result["rows"][0]["kernels"][verb]
        # Medians of parts need not add up; those of one sample do: test_parts_of_a_verb.
        assert parts.keys() == {"whole_us", *PARTS}
        assert max(parts[part] for part in PARTS) <= parts["whole_us"]
    assert "gloo_gather is given: tokens are" in done.stdout
    assert "not measured: GPUs and NVLink" in done.stdout


PARTS = ("python_us", "kernel_us", "before_last_rank_us", "after_last_rank_us")


def test_parts_of_a_verb() -> None:
    """Rank 1 comes 2 us late to the first call, rank 0 after the other's end to the second."""
    us = 1e-6
    early, late = (10 * us, 17 * us, 8 * us), (12 * us, 16 * us, 9 * us)
    alone, after = (30 * us, 31 * us, 4 * us), (35 * us, 38 * us, 5 * us)
    told = {
        (early, late): [(1, 7, 2, 5), (5, 4, 0, 4)],
        (after, alone): [(2, 3, 0, 3), (3, 1, 1, 0)],
    }
    for of_ranks, expected_parts in told.items():
        # Of two ranks and one iteration, the median is the mean: parts add up.
        found = ours._told_apart([[one] for one in of_ranks])
        mean = [sum(of) / 2 for of in zip(*expected_parts, strict=True)]
        assert [found[part] for part in PARTS] == pytest.approx(mean)
        assert found["python_us"] + found["kernel_us"] == pytest.approx(found["whole_us"])
        assert found["before_last_rank_us"] + found["after_last_rank_us"] == pytest.approx(
            found["kernel_us"]
        )


@pytest.mark.long
def test_no_process_outlives_a_rank_that_dies(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    running = subprocess.Popen(
        command("--iters", "1000000", "--batches", "1", "--output_file", str(file)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    ours = psutil.Process(running.pid)
    ranks: list[psutil.Process] = []
    try:
        give_up = time.monotonic() + 100
        while not ranks and time.monotonic() < give_up:
            time.sleep(0.1)
            ranks = [process for process in ours.children(recursive=True) if _met(process)]
        everyone = ours.children(recursive=True)
        assert ranks, "no rank came up"
        ranks[0].send_signal(signal.SIGKILL)
        _out, errors = running.communicate(timeout=60)
        assert running.returncode == 1
        assert "bench_moe_comm: failed:" in errors
        _gone, alive = psutil.wait_procs(everyone, timeout=10)
        assert alive == []
        assert not file.exists()
    finally:
        running.kill()
        running.communicate()


def _met(process: psutil.Process) -> bool:
    """Whether a rank is so far that it has the barrier of its ranks."""
    with contextlib.suppress(psutil.Error):
        return any("barrier-1-" in part.path for part in process.memory_maps())
    return False


# Small parts.


def _cores_of_a_rank(rank: int, size: int, options: Options) -> Any:
    cores = mock.Mock(side_effect=lambda *_: os.sched_getaffinity(0))
    with mock.patch.object(processes, "rank_rows", cores):
        return processes._rank_main(rank, size, options, "", None)


@pytest.mark.long
def test_ranks_keep_to_their_cores_if_asked_to(tmp_path: Path) -> None:
    assert [processes.cores_of(r, 1, {5, 3}) for r in range(4)] == [{3}, {5}, {3}, {5}]
    assert [processes.cores_of(r, 2, range(4)) for r in range(3)] == [{0, 1}, {2, 3}, {0, 1}]
    assert processes.cores_of(1, 3, {0, 1}) == {0, 1}
    here = os.sched_getaffinity(0)
    for bind in (False, True):
        options, folder = dataclasses.replace(SMALL, bind=bind), tmp_path / str(bind)
        folder.mkdir()
        taken = run_processes(2, _cores_of_a_rank, folder, options, meets=False)
        assert taken == [processes.cores_of(r, 1, here) if bind else here for r in range(2)]
    with pytest.raises(OptionError, match="leave --bind out"):
        dataclasses.replace(SMALL, bind=True, device="cuda")


def test_who_started_this_rank() -> None:
    launch = processes.external_launch
    assert launch({}) is None
    assert launch({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}) is None, "a batch script, not srun"
    by_torchrun = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "a"}
    assert launch({**by_torchrun, "MASTER_PORT": "9"}) == (3, 8, 1, "tcp://a:9", None)
    by_srun = {"SLURM_STEP_NUM_TASKS": "72", "SLURM_PROCID": "5", "SLURM_LOCALID": "1"}
    found = launch({**by_srun, "SLURM_JOB_ID": "12345"})
    assert found == (5, 72, 1, "tcp://127.0.0.1:22345", None)
    with pytest.raises(OptionError, match="export MASTER_ADDR="):
        launch({**by_srun, "SLURM_STEP_NUM_NODES": "18"})


def test_backends_that_cannot_run_are_named_or_refused() -> None:
    asked = dataclasses.replace(SMALL, backends=("moe_nvlink", "nccl_gather"))
    left_out: list[str] = []
    assert processes.runnable(asked, explicit=False, not_measured=left_out) == ("moe_nvlink",)
    assert left_out[0].startswith("nccl_gather: ")
    with pytest.raises(OptionError, match="nccl_gather cannot run here"):
        processes.runnable(asked, explicit=True, not_measured=[])


def test_more_than_the_memory_is_refused() -> None:
    large = Options(ep_size=64, batches=(8192,))
    with pytest.raises(OptionError, match="take fewer tokens, ranks or backends"):
        processes.run(large)


class _Recorder(timing.RankClock):
    """A clock whose samples say what ran."""

    def __init__(self) -> None:
        super().__init__(SMALL, None, "cpu")
        self.ran: list[float] = []

    def time_together(self, body: Callable[[], None]) -> tuple[Any, Any]:
        self.ran.clear()
        body()
        return 0.0, sum(self.ran)

    def microseconds(self, start: float, end: float) -> float:
        return end - start


def test_samples_belong_to_what_ran() -> None:
    clock = _Recorder()

    class Known:
        def __init__(self, value: float) -> None:
            self._value = value

        def dispatch(self) -> None:
            clock.ran.append(self._value)

        def combine(self) -> None:
            clock.ran.append(self._value * 10)

    options = dataclasses.replace(SMALL, iters=5, warmup=2)
    sides = {"one": Known(1), "two": Known(2), "three": Known(3)}
    found = timing.take_turns(sides, options, clock, lambda: None)
    for value, name in enumerate(sides, start=1):
        for phase, factor in (("dispatch", 1), ("combine", 10), ("both", 11)):
            assert found[name][phase] == [value * factor] * 5, (name, phase)
