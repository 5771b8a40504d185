"""The whole CUDA path below vLLM's experts, between processes, on the stand-in driver.

vLLM's modular kernel, our prepare and finalize for CUDA ranks, the CUDA executor through unmodified
cuda-python, and the nvlink transport with descriptors between processes; kernels from the host
build, or their PTX. What a GPU would add is the hardware and torch's own kernels.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import kernel_texts

pytest.importorskip("vllm", reason="vLLM is not installed")
pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")

from moe_nvlink_plugin.exchange.kernels import LAYER
from moe_nvlink_plugin.groups import as_group
from moe_nvlink_plugin.integration.common.options import Options
from moe_nvlink_plugin.jit import host
from moe_nvlink_plugin.recipes import FP8_BLOCK, MXFP8, NVFP4
from tests.support import fake_cuda
from tests.support.fake_cuda import ptx
from tests.support.fake_cuda.transport import OnFakeDriver, install
from tests.support.ranks import run_processes
from tests.unit.test_vllm_quantised import GLOBAL_SCALES, experts_of
from tests.unit.vllm_layer import (
    CAPACITY,
    LEFT_OPEN,
    TOP_K,
    Experts,
    Layer,
    dense,
    take_cuda_branches,
    work_of,
)

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("environment")]


NUM_ROUNDS = 6
#: What a round asks the driver beside its launches. None of them waits for a stream or makes one
#: wait, such as the stream of vLLM's shared experts.
QUESTIONS = {"cuCtxGetCurrent", "cuCtxPopCurrent", "cuCtxPushCurrent", "cuStreamIsCapturing"}


#: What travels: the recipe of quantised experts, or of a user who names one, and combine's format.
FORMATS = (
    (None, Options()),
    (FP8_BLOCK, Options()),
    (NVFP4, Options()),
    (MXFP8, Options(dispatch="mxfp8")),
    (NVFP4, Options(combine="fp8_block")),
)


def _experts(recipe: Any, options: Options) -> Experts:
    if recipe is None or options.dispatch != "auto":
        return Experts(LEFT_OPEN["NoOP"]())
    return experts_of(recipe)


def _format_body(group: Any, recipe: Any, options: Options) -> dict[str, Any]:
    """The largest error of ragged rounds, and how often the driver was asked to launch what."""
    before = fake_cuda.control().last_launch().count
    layer = Layer(
        group,
        experts=_experts(recipe, options),
        options=options,
        transport=OnFakeDriver.name,
    )
    assert layer.exchange._layer.workspace.executor.asynchronous
    worst, scale = 0.0, GLOBAL_SCALES.get(recipe.name) if recipe else None
    for number in range(NUM_ROUNDS):
        fake_cuda.control().fail()  # counts from here on
        num_tokens = (number * (group.rank + 2) + 3 * group.rank) % (CAPACITY + 1)
        hidden, ids, weights = work_of(num_tokens, 100 * number + group.rank)
        got = layer(hidden, ids, weights)
        if recipe:
            hidden = recipe.dequantise(*recipe.quantise(hidden, scale), torch.float32, scale)
        error = (got - dense(hidden, ids, weights)).abs().nan_to_num(nan=float("inf"))
        worst = max([worst, *error.flatten().tolist()])
        assert layer.experts.calls[-1].output is layer.exchange.combine_input()
        layer.poison()
    calls, launched = fake_cuda.control().calls(), fake_cuda.control().last_launch()
    layer.close()
    return {
        "worst": worst,
        "launches": launched.count - before,
        "last": launched.name.decode(),
        "calls": calls,
    }


def layer_body(rank: int, size: int) -> list[dict[str, Any]]:
    """One result for each of FORMATS."""
    install()
    take_cuda_branches(setattr)
    group = as_group(torch.distributed.group.WORLD, 60)
    return [_format_body(group, *one) for one in FORMATS]


def _units() -> list[ptx.Unit]:
    """What the layers of FORMATS load."""
    variants = [
        LAYER.variant(
            top_k=TOP_K,
            dtype="fp32",
            recipe="none" if recipe is None else recipe.name,
            combine=options.combine,
        )
        for recipe, options in FORMATS
    ]
    return ptx.of(*variants)


@pytest.mark.parametrize("on", ["host", ptx.LONG])
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
        for result, (_, options) in zip(results, FORMATS, strict=True):
            # Sums of at most top_k rows of experts that give at most 1, in e4m3: 3 * 1 / 28.
            assert result["worst"] < (1e-5 if options.combine == "bf16" else 0.11)
            # Units carry unquantised rows, so only these come back by the kernel for small batches.
            last = "small_combine" if options.combine == "bf16" else "combine"
            assert result["launches"] == 2 * NUM_ROUNDS
            assert result["last"] == f"moe_nvlink_{last}"
            assert result["calls"].pop("cuLaunchKernelEx") == 2
            assert result["calls"].keys() <= QUESTIONS
