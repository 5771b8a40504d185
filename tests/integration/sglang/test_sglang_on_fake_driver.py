"""The dispatchers of CUDA ranks between processes, on the stand-in driver.

Our dispatchers, the CUDA executor through unmodified cuda-python, and the nvlink transport with
descriptors between processes; kernels from the host build, or their PTX. SGLang's runners are stood
in for.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.support import kernel_texts

pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")

from moe_nvlink_plugin import AllToAllConfig
from moe_nvlink_plugin.exchange.kernels import LAYER
from moe_nvlink_plugin.groups import as_group
from moe_nvlink_plugin.integration.common.agreement import Geometry
from moe_nvlink_plugin.integration.common.pool import ExchangePool
from moe_nvlink_plugin.jit import host
from moe_nvlink_plugin.recipes import NVFP4
from tests.integration.sglang.sglang_layer import (
    CAPACITY,
    TOP_K,
    base,
    dense,
    dispatched,
    dispatcher_of,
    experts_of,
    pool_of,
    work_of,
    worst_of,
)
from tests.support import fake_cuda
from tests.support.fake_cuda import ptx
from tests.support.fake_cuda.transport import OnFakeDriver, install
from tests.support.ranks import run_processes

NUM_ROUNDS = 6
SCALE = torch.ones(1)


class Case(NamedTuple):
    """A runner, the formats there and back, and how far results may be off."""

    runner: str
    nvfp4: bool = False
    combine: str = "bf16"
    tolerance: float = 1e-5


#: Sums of at most top_k rows of experts that give at most 1, in e4m3: 3 * 1 / 28.
CASES = (
    Case("triton"),
    Case("flashinfer_cutlass"),
    Case("flashinfer_trtllm", nvfp4=True),
    Case("flashinfer_trtllm", nvfp4=True, combine="fp8_block", tolerance=0.11),
)


class _PoolOnFakeDriver(ExchangePool):
    def config(self, geometry: Geometry) -> AllToAllConfig:
        return dataclasses.replace(super().config(geometry), transport=OnFakeDriver.name)


def _count(number: int, rank: int) -> int:
    return (number * (rank + 2) + 3 * rank) % (CAPACITY + 1)


def _case_body(group: Any, case: Case) -> dict[str, Any]:
    before = fake_cuda.control().last_launch().count
    pool = pool_of(group, _PoolOnFakeDriver, combine=case.combine)
    subject = dispatcher_of(pool, case.runner, capacity=2 * CAPACITY)
    subject.set_quant_config({"input_global_scale": SCALE if case.nvfp4 else None})
    exchange = subject._exchange
    assert exchange._layer.workspace.executor.asynchronous
    errors, bounds = [], set()
    for number in range(NUM_ROUNDS):
        hidden, ids, weights = work_of(_count(number, group.rank), 100 * number + group.rank)
        # SGLang's number for this step: bounds alternate.
        most = 2 * CAPACITY if number % 2 else max(_count(number, rank) for rank in range(2))
        base.most_tokens_of_a_rank = lambda most=most: most  # type: ignore[misc]
        output = dispatched(subject, (hidden, ids, weights))
        bounds.add(output.hidden_states.shape[0] // 2)
        if case.nvfp4:
            scales = output.hidden_states_scale.view(torch.float8_e4m3fn)
            rows = NVFP4.dequantise(output.hidden_states, scales, torch.float32, SCALE)
            output = output._replace(hidden_states=rows, hidden_states_scale=None)
            hidden = NVFP4.dequantise(*NVFP4.quantise(hidden, SCALE), torch.float32, SCALE)
        got = subject.combine(combine_input=experts_of(subject, output))
        exchange.synchronize()
        errors.append(worst_of(got, dense(hidden, ids, weights)))
    launched = fake_cuda.control().last_launch()
    pool.close()
    return {"worst": max(errors), "launches": launched.count - before, "bounds": bounds}


def layer_body(rank: int, size: int) -> list[dict[str, Any]]:
    """One result for each of CASES."""
    install()
    group = as_group(torch.distributed.group.WORLD, 60)
    return [_case_body(group, case) for case in CASES]


def _units() -> list[ptx.Unit]:
    """What the layers of CASES load."""
    variants = [
        LAYER.variant(
            top_k=TOP_K,
            dtype="fp32",
            recipe="nvfp4" if case.nvfp4 else "none",
            combine=case.combine,
        )
        for case in CASES
    ]
    return ptx.of(*variants)


@pytest.mark.parametrize("on", [pytest.param("host", marks=pytest.mark.long), ptx.LONG])
def test_the_layer_between_processes_on_the_stand_in_driver(
    on: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: dict[str, Path] = (
        {"ptx": ptx.prepare(tmp_path / "ptx", _units())}
        if on == "ptx"
        else {"kernels": host.build(kernel_texts.host_source())}
    )
    variables = fake_cuda.environment(fake_cuda.build(tmp_path), **runs)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for results in run_processes(2, layer_body, tmp_path):
        for result, case in zip(results, CASES, strict=True):
            assert result["worst"] < case.tolerance, case
            assert result["launches"] == 2 * NUM_ROUNDS
            assert result["bounds"] == {8, 2 * CAPACITY}
