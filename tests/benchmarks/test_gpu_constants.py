"""benchmarks/gpu_constants.py on the software GPU: rows, errors of single rows, machine code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu_constants
from moe_nvlink_plugin import driver
from moe_nvlink_plugin.jit import nvrtc
from tests.support.programs import python
from tests.support.ptx import costs

pytestmark = pytest.mark.long


def run(folder: Path, *options: str, **variables: str) -> tuple[int, dict[str, Any]]:
    """Exit status, and the rows by their names."""
    file = folder / "constants.json"
    command = ("--device", "rehearsal", "--limit_s", "300", "--output_file", file, *options)
    done = python(gpu_constants.__file__, *command, variables=variables)
    assert file.exists(), done.stdout + done.stderr
    result = json.loads(file.read_text())
    assert "incomplete" not in result
    return done.returncode, {row["name"]: row for row in result["rows"]}


def test_every_row(tmp_path: Path) -> None:
    status, rows = run(tmp_path)
    assert not {name: row["error"] for name, row in rows.items() if "error" in row}
    assert status == 0
    named = {row["cost"] for row in rows.values()} - {None}
    assert named == {
        *("l1_ns", "l2_ns", "shared_ns", "acquire_ns", "fence_gpu_ns", "fence_sys_ns"),
        *("atomic_ns", "atomic_gap_ns", "barrier_ns", "warp_barrier_ns", "shuffle_ns"),
        *("launch_ns", "pdl_ns"),
    }
    assert named <= set(costs.costs("h200"))
    # A dependent kernel starts before the end that it would be timed from.
    assert not [name for name in rows if "start with PDL" in name]
    for name, row in rows.items():
        if row.get("samples"):
            assert row["min"] <= row["median"], name
            assert row["min"] <= row["p90"], name
    # On the software GPU both clocks are one.
    assert rows["SM clock"]["median"] == pytest.approx(1, abs=0.2)


def test_an_error_is_its_rows_alone(tmp_path: Path) -> None:
    status, rows = run(tmp_path, FAKE_CUDA_FAIL="cuStreamBeginCapture:1:CUDA_ERROR_UNKNOWN")
    assert status == 1
    errors = {name: row["error"] for name, row in rows.items() if "error" in row}
    assert errors == {
        "end to start, 1 CTAs, graph": "DriverError: cuStreamBeginCapture: CUDA_ERROR_UNKNOWN"
    }


def test_no_row_begins_after_the_limit(tmp_path: Path) -> None:
    status, rows = run(tmp_path, "--limit_s", "0")
    assert status == 1
    assert all("error" in row for row in rows.values())


@pytest.mark.parametrize("left", [gpu_constants.GAVE_UP, gpu_constants.UNWRITTEN])
def test_what_a_kernel_did_not_measure_is_no_sample(
    left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = gpu_constants.Gpu.__new__(gpu_constants.Gpu)
    gpu.stream, gpu.out = None, torch.tensor([5, left])
    monkeypatch.setattr(driver, "call", lambda *_given: None)
    assert gpu.words(1) == [5]
    with pytest.raises(RuntimeError, match="word 1$"):
        gpu.words(2)


@pytest.mark.parametrize("architecture", ["sm_90a", "sm_100a"])
def test_it_compiles_without_a_warning(architecture: str) -> None:
    nvrtc.compile_cubin(gpu_constants.text(gpu_constants.Sizes()), architecture)
