"""The whole CUDA path below vLLM's experts, between processes, on the stand-in driver.

vLLM's modular kernel, our prepare and finalize for CUDA ranks, the CUDA executor through unmodified
cuda-python, and the nvlink transport with descriptors between processes; kernels from the host
build. What a GPU would add is the hardware and torch's own kernels.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed")
pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")

from moe_nvlink_plugin.groups import as_group
from moe_nvlink_plugin.jit import host, source
from tests import fake_cuda
from tests.fake_cuda.transport import OnFakeDriver, install
from tests.kernels.processes import run_processes
from tests.unit.vllm_layer import CAPACITY, Layer, dense, take_cuda_branches, work_of

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("environment")]


NUM_ROUNDS = 6


def layer_body(rank: int, size: int) -> dict[str, Any]:
    """The largest error of ragged rounds, and how often the driver was asked to launch what."""
    install()
    take_cuda_branches(setattr)
    group = as_group(torch.distributed.group.WORLD, 60)
    layer = Layer(group, capacities=(2, CAPACITY), transport=OnFakeDriver.name)
    assert layer.exchanges[-1]._layer.workspace.executor.asynchronous
    worst = 0.0
    for number in range(NUM_ROUNDS):
        num_tokens = (number * (rank + 2) + 3 * rank) % (CAPACITY + 1)
        work = work_of(num_tokens, 100 * number + rank)
        error = (layer(*work) - dense(*work)).abs().nan_to_num(nan=float("inf"))
        worst = max([worst, *error.flatten().tolist()])
        assert layer.experts.calls[-1].output is layer.exchanges[-1].combine_input()
        layer.poison()
    launched = fake_cuda.control().last_launch()
    layer.close()
    return {"worst": worst, "launches": launched.count, "last": launched.name.decode()}


def test_the_layer_between_processes_on_the_stand_in_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = host.build(source.host_source())
    variables = fake_cuda.environment(fake_cuda.build(tmp_path), kernels)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for result in run_processes(2, layer_body, tmp_path):
        assert result["worst"] < 1e-5
        assert (result["launches"], result["last"]) == (2 * NUM_ROUNDS, "moe_nvlink_combine")
