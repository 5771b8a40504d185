"""benchmarks/bench_launch.py on a stand-in driver whose launches run the kernels."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.programs import python


@pytest.mark.long
def test_every_dispatch_has_its_combine(tmp_path: Path) -> None:
    """Kernels report one that has not, and the next call raises it: bare launches count too."""
    written = tmp_path / "launch.json"
    options = ("--driver", "emulated", "--batches", "2", "--tokens", "4")
    done = python("benchmarks/bench_launch.py", *options, "--output_file", written)
    assert done.returncode == 0, done.stderr
    found = json.loads(written.read_text())
    assert found["driver"].startswith("stand-in, runs the kernels")
    assert len(found["rows"]) == 8
    assert all(row["median_us"] > 0 for row in found["rows"].values())
