"""benchmarks/on_gpu.sh without a GPU: rehearsed, and told that there is none."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import common
from benchmarks.moe_comm import flashinfer_api
from moe_nvlink_plugin.doctor import inquiry

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.timeout(540)


def run(folder: Path, *options: str, **variables: str) -> tuple[int, str]:
    """Exit status and the report."""
    done = subprocess.run(
        ["bash", str(ROOT / "benchmarks/on_gpu.sh"), *options],
        env=os.environ | {"OUT": str(folder), "PYTHON": sys.executable} | variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=520,
    )
    (report,) = folder.glob("*.txt")
    assert done.stdout == report.read_text(), "the report is what was printed"
    return done.returncode, done.stdout


def test_rehearsal(tmp_path: Path) -> None:
    status, report = run(tmp_path, "--rehearse", BENCH_COMMIT="0123abc")
    assert status == 0, report
    assert re.search(r"^date     \d{4}-\d\d-\d\d$", report, re.MULTILINE)
    assert "commit   0123abc\n" in report
    assert "command  benchmarks/on_gpu.sh --rehearse\n" in report
    assert "== doctor: exit status 0" in report
    assert "CPU ranks: will work" in report
    assert re.search(r"\d+ passed", report)
    (emulated,) = tmp_path.glob("*-rehearsal-moe-comm.json")
    (launch,) = tmp_path.glob("*-rehearsal-launch.json")
    (recipes,) = tmp_path.glob("*-rehearsal-recipes.json")
    (lm_head,) = tmp_path.glob("*-rehearsal-lm-head.json")
    result = json.loads(emulated.read_text())
    assert [row["tokens"] for row in result["rows"]] == [1, 4]
    assert result["options"]["router"] == "perfect"
    for row in result["rows"]:
        both = (row["both"], row["plain_launches"]["both"])
        assert all(times["median_us"] > 0 for times in both)
        logical = row["tokens"] * 2 * 64 * 2  # two ranks, rows of 64 bf16
        dispatch = row["dispatch"]
        assert dispatch["logical_gb_s"] == pytest.approx(logical / dispatch["median_us"] / 1e3)
    assert any("NVLink" in text for text in result["not_measured"])
    found = {row["name"]: row for row in json.loads(recipes.read_text())["rows"]}
    per_row = {name: row["wire_bytes_per_token"] for name, row in found.items()}
    # Of 256 elements with 8 ids and weights; in nvfp4 half a byte each, and 16 scales.
    assert per_row["nvfp4 fused"] / per_row["fp8_tensor fused"] == (128 + 16 + 64) / (256 + 64)
    assert found["mxfp8 fused"]["over_quantiser"]["ratio"] > 0
    (group,) = json.loads(lm_head.read_text())["groups"]
    weights = {row["split_weight_bytes"] / row["replicated_weight_bytes"] for row in group["rows"]}
    assert weights == {512 / 1000}, "half of the vocabulary, rounded up to 16"
    rows = json.loads(launch.read_text())["rows"]
    by_hand, by_op = (
        rows[name]["median_us"]
        for name in ("driver: cuLaunchKernelEx by cuda.bindings", "dispatch: MoeAllToAll, torch op")
    )
    assert 0 < by_hand < by_op


def test_a_failed_step_is_named_and_the_others_run(tmp_path: Path) -> None:
    """A benchmark's compiler that is not there; the other steps do not need it."""
    options = ("--rehearse", "--no-tests")
    status, report = run(tmp_path, *options, MOE_NVLINK_CXX="no-such-compiler")
    assert status == 1, report
    assert re.search(r"FAILED after \d+ s: .*benchmark: launch \(exit status 1\)", report)
    assert "== benchmark: launch: exit status 1" in report
    assert "== benchmark: LM head: exit status" in report
    assert "== tests" not in report


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu(tmp_path: Path) -> None:
    status, report = run(tmp_path)
    assert status == 1
    assert "no CUDA device: nothing was run" in report


def test_a_bare_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither git nor an installed package: figures and doctor's report are there all the same."""

    def no_such_distribution(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("BENCH_COMMIT", "0123abc")
    monkeypatch.setattr("importlib.metadata.version", no_such_distribution)
    assert common.commit() == "0123abc"
    assert inquiry._own_version() == "not installed"


def wheels(*options: str, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(ROOT / "benchmarks/carry_wheels.sh"), *options],
        env=os.environ | {"PYTHON": python},
        capture_output=True,
        text=True,
        check=False,
    )


def test_wheels_to_carry(tmp_path: Path) -> None:
    command = wheels().stdout
    assert "pip download" in command
    assert "platformdirs" in command
    assert "://" not in command, "a host is the caller's choice"
    here = wheels("--missing")
    assert (here.returncode, here.stdout) == (0, "")
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o700)
    there = wheels("--missing", python=str(bare))
    assert there.returncode == 1
    assert {"platformdirs", "torch", "cuda-bindings"} <= set(there.stdout.split())


def test_wheels_of_the_peer() -> None:
    """Those of the release whose interface the adapter was read from."""
    listed = wheels("--list", "flashinfer").stdout.split()
    assert listed[0] == f"flashinfer-python=={flashinfer_api.READ_FROM}"
    assert "apache-tvm-ffi" in listed
    refused = wheels("--list", "other")
    assert refused.returncode == 2
    assert "not 'other'" in refused.stderr


def test_limits_of_the_steps_leave_room_for_the_last() -> None:
    """With FlashInfer, and without: what all steps may take at most is what there is."""
    text = (ROOT / "benchmarks/on_gpu.sh").read_text()
    of_all = int(re.findall(r"left=\$\(\((\d+)", text)[0])
    assert of_all <= 8 * 60
    measured = text[text.index("measure_all() {") : text.index("has_flashinfer() {")]
    steps = {name: int(limit) for name, limit in re.findall(r'step "([^"]+)" (\d+)', measured)}
    without, with_peer = (int(limit) for limit in re.findall(r"tests_limit=(\d+)", measured))
    doctor = 30
    alone = doctor + without + sum(steps.values()) - steps["benchmark: FlashInfer"]
    assert alone <= of_all
    assert doctor + with_peer + sum(steps.values()) <= of_all
