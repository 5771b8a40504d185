"""benchmarks/bench_recipes.py on emulated ranks: what it times are rounds."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from benchmarks import bench_recipes
from benchmarks.moe_comm import cuda_clock, emulated
from benchmarks.moe_comm.expected import WrongResult

OPTIONS = (
    *("--device", "rehearsal", "--ep-size", "2", "--hidden-size", "64", "--top-k", "2"),
    *("--num-experts", "4", "--tokens", "3"),
)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> bench_recipes.Device:
    monkeypatch.setattr(sys, "argv", ["bench_recipes.py", *OPTIONS])
    options = bench_recipes.options_of(bench_recipes.parse())
    return bench_recipes.Device(options, 3, cuda_clock.Clock("cpu", 2, 1))


def test_every_timed_dispatch_follows_a_combine(device: bench_recipes.Device) -> None:
    """The kernels refuse another one, and the benchmark would time the refusal."""
    names = [row["name"] for row in device.recipe("mxfp8")]
    assert names == ["bf16", "mxfp8 fused", "mxfp8 given rows", "mxfp8 quantiser alone"]
    assert [row["name"] for row in device.formats(["nvfp4"])] == ["bf16", "nvfp4"]


def test_a_fault_while_it_was_timed_ends_the_run(
    device: bench_recipes.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed = cuda_clock.Clock.flushed

    def without_combines(clock: Any, bodies: Any, _before: Any = None) -> Any:
        return timed(clock, bodies)

    monkeypatch.setattr(cuda_clock.Clock, "flushed", without_combines)
    # One CTA a rank, which does not wait for what a refused dispatch never sends.
    assert emulated.make_backend(device.options).ctas == 1
    with pytest.raises(WrongResult, match=r"bf16, 3 tokens: rank 0 has fault word 0x06"):
        device.recipe("mxfp8")
