"""benchmarks/bench_lm_head.py, small: what it measures, refuses and says."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import bench_lm_head
from moe_nvlink_plugin.jit import host, nvrtc
from moe_nvlink_plugin.jit.header import elements
from moe_nvlink_plugin.lm_head import cost as head_cost
from tests.support import emulated, emulated_text, fake_cuda
from tests.support import ranks as processes
from tests.support.programs import python

SMALL = ["--vocab", "1000", "--hidden", "64", "--rows", "1", "5", "--iterations", "3"]

OPTIONS = bench_lm_head.Options(
    vocab=1000,
    hidden=64,
    rows=(1, 5),
    groups=(4,),
    dtype="bfloat16",
    iterations=2,
    seconds=1.0,
    threads=1,
    device="cpu",
)


def run(folder: Path, *options: str) -> tuple[str, dict[str, Any]]:
    """What is printed, and what is written."""
    output = folder / "result.json"
    command = ("benchmarks/bench_lm_head.py", *SMALL, *options, "--output_file", output)
    done = python(*command)
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(output.read_text())


@pytest.mark.long
def test_on_cpu_ranks(tmp_path: Path) -> None:
    printed, result = run(tmp_path, "--groups", "2", "3")
    command_line = result["machine"]["command"]
    assert command_line.startswith("python benchmarks/bench_lm_head.py --vocab 1000")
    assert all(result["machine"][name][0] >= 0 for name in ("load_before", "load_after"))
    assert result["options"]["dtype"] == "float32"
    assert "share the cores" in result["shows"]
    shape = head_cost.HeadShape(1000, 64, 4)
    assert [group["tp_size"] for group in result["groups"]] == [2, 3]
    for group in result["groups"]:
        assert group["exchange_us"] > 0
        assert [row["rows"] for row in group["rows"]] == [1, 5]
        for row in group["rows"]:
            assert row["ratio"] == pytest.approx(row["replicated_us"] / row["split_us"])
            assert row["ratio_least"] <= row["ratio_most"]
            work = row["replicated_work_us"] / row["split_work_us"]
            assert row["work_ratio"] == pytest.approx(work)
            # By the counters: what the rule counts, one word for each row of another rank.
            sent = head_cost.exchanged_bytes(shape, row["rows"], group["tp_size"])
            assert row["sent_bytes"] == sent
            assert 1 <= row["turns"] <= 3
        assert f"groups of {group['tp_size']}: faster up to" in printed


@pytest.mark.long
def test_rates_of_cpu_ranks(tmp_path: Path) -> None:
    """What is printed is what stands in cost.py."""
    printed, result = run(tmp_path, "--rates", "--groups", "2", "--seconds", "0.01")
    names: dict[str, Any] = {"Rates": head_cost.Rates}
    exec(printed.split("written")[0], names)
    measured = [head_cost.Rates(**result["rates"][dtype]) for dtype in ("bfloat16", "float32")]
    assert list(names["CPU_RATES"]) == [2, 4]
    for told, known in zip(names["CPU_RATES"].values(), measured, strict=True):
        assert told == pytest.approx(known, rel=0.05)
        assert min(told[:-1]) > 0
        assert not told.overlaps


@pytest.mark.long
def test_a_rehearsal_of_one_gpu(tmp_path: Path) -> None:
    printed, result = run(tmp_path, "--groups", "2", "8", "--device", "rehearsal")
    assert result["options"]["dtype"] == "bfloat16"
    assert "nothing of NVLink" in result["shows"]
    for group in result["groups"]:
        assert "exchange_us" not in group
        for row in group["rows"]:
            parts = sum(row[f"{name}_us"] for name in ("gather", "product", "argmax"))
            assert row["ratio"] == pytest.approx(row["replicated_us"] / parts)
            assert row["replicated_weight_bytes"] == 1000 * 64 * 2
            width = {2: 512, 8: 128}[group["tp_size"]]  # rounded up to 16
            assert row["split_weight_bytes"] == width * 64 * 2
    assert "product us" in printed


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_lm_head.py", "--device", "cuda"])
    with pytest.raises(SystemExit) as ended:
        bench_lm_head.main()
    assert not ended.value.code
    assert capsys.readouterr().out.startswith("not measured: no CUDA device")


def test_a_wrong_id_stops_the_run() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0], [5.0, 0.0, 5.0]])
    bench_lm_head.check(torch.tensor([1, 0]), logits)
    bench_lm_head.check(torch.tensor([1, 2]), logits)  # as large
    with pytest.raises(SystemExit, match="without the largest logit"):
        bench_lm_head.check(torch.tensor([2, 0]), logits)


def test_the_crossover_that_is_reported() -> None:
    def found(*ratios: float) -> tuple[int | None, int | None]:
        rows = [
            {"rows": 2**n, "ratio": ratio, "work_ratio": 1 / ratio}
            for n, ratio in enumerate(ratios)
        ]
        result = bench_lm_head.crossover(OPTIONS, 4, rows)
        assert result["tp_size"] == 4
        mirrored = [row["rows"] for row in rows if row["ratio"] < 1]
        assert result["by_work"]["faster_up_to"] == max(mirrored, default=None)
        return result["faster_up_to"], result["slower_from"]

    assert found(3.0, 2.0, 0.9) == (2, 4)
    assert found(3.0, 2.0) == (2, None)
    assert found(0.5, 0.6) == (None, 1)
    large = dataclasses.replace(OPTIONS, vocab=129280, hidden=7168, rows=(1, 4096))
    result = bench_lm_head.crossover(large, 4, [])
    expected = head_cost.crossover_rows(large.shape, 4, large.rates, 4096)
    assert result["expected_up_to"] == expected > 0


# What a GPU would be given.


@pytest.mark.parametrize("architecture", ["sm_90a", "sm_100a"])
def test_the_kernels_compile_for_a_gpu(architecture: str) -> None:
    text = emulated_text.device_source(0, elements()["bf16"], 8, head=True, as_product=True)
    code = nvrtc.compile_cubin(text, architecture)
    for kernel in emulated_text.verbs(head=True):
        assert f"moe_nvlink_emulated_{kernel}".encode() in code


@pytest.mark.long
def test_the_gpu_code_on_a_stand_in_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled, loaded, packed and launched by unmodified cuda-python, with a GPU's shapes."""
    kernels = host.build(emulated_text.stand_in_source(count=8), emulated.FLAGS)
    library = fake_cuda.build(tmp_path)
    for name, value in fake_cuda.environment(library, kernels, sms=132).items():
        monkeypatch.setenv(name, value)
    (result,) = processes.run_processes(1, _on_stand_in, tmp_path)
    name, grid, threads, attributes, modules = result
    assert name == b"moe_nvlink_emulated_head_argmax"
    assert grid[1:] == [4, 1], "ranks"
    assert 1 <= grid[0] <= 20, "CTAs of a rank, one for each of all ranks' rows"
    assert threads % 32 == 0
    assert attributes == 1, "cooperative"
    assert modules == 0, "a module is still loaded"


def _on_stand_in(_rank: int, _size: int) -> tuple[Any, ...]:
    head = bench_lm_head.make_head(OPTIONS)
    config = OPTIONS.config(4, 0, 5)
    backend = emulated.CudaBackend(4, 1, config, device="cpu", as_product=True)
    with contextlib.closing(backend):
        row = bench_lm_head.measure_emulated(OPTIONS, 4, 5, head, backend)
        last = fake_cuda.control().last_launch()
    assert row["argmax_us"] > 0
    modules = fake_cuda.control().modules()
    return last.name, list(last.grid), last.block[0], last.num_attributes, modules
