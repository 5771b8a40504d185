"""Compile into MOE_NVLINK_CACHE_DIR what the stages of on_gpu.sh will need on an sm_90a GPU.

    python -m tests.gpu.day.carried     # benchmarks/carry.sh calls this

No list of kernels is kept: the GPU tests and the benchmarks run here up to the place where they ask
for machine code, against the stand-in for the driver, and no further. What is missed all the same
is compiled on the GPU's machine, whose summary counts it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from benchmarks import bench_lm_head, bench_recipes, common, gpu_constants
from benchmarks.moe_comm import emulated as one_gpu
from benchmarks.moe_comm import options
from moe_nvlink_plugin import AllToAllConfig, HeadConfig, driver
from moe_nvlink_plugin.exchange import launches, survivors
from moe_nvlink_plugin.exchange.arguments import quantiser_code
from moe_nvlink_plugin.exchange.kernels import MEET
from moe_nvlink_plugin.exchange.launches import LayerLaunches
from moe_nvlink_plugin.exchange.sizes import payload_rows
from moe_nvlink_plugin.exchange.small_batches import with_small_tokens
from moe_nvlink_plugin.jit import nvrtc
from moe_nvlink_plugin.launch.base import Budget
from moe_nvlink_plugin.launch.cuda import CudaExecutor
from moe_nvlink_plugin.lm_head.launches import HeadLaunches
from moe_nvlink_plugin.plugins import find_recipe
from tests.gpu.day import stand_in
from tests.gpu.day.steps import STEPS
from tests.support import emulated, emulated_text, real_head, real_path, sanitized, users_form
from tests.support import ranks as processes

ROOT = Path(__file__).resolve().parents[3]
#: Of the stand-in, whose device 0 is an sm_90a GPU.
DEVICE = torch.device("cpu", 0)


class Compiled(Exception):  # noqa: N818 - it is what was wanted
    """Machine code is in the cache; nothing more is to be done."""


def layer(config: AllToAllConfig, *, pdl: bool = True, ranks_on_device: int = 1) -> None:
    """Ask for the kernels that the product launches for a layer."""
    recipe = find_recipe(config)
    row_bytes = {name: row.row_bytes for name, row in payload_rows(config, recipe).items()}
    quantiser = quantiser_code(recipe, config.hidden_size)
    executor = CudaExecutor(DEVICE)
    executor.pdl = executor.pdl and pdl
    resolved = with_small_tokens(config, recipe, executor.num_sms())
    LayerLaunches(executor, resolved, row_bytes, quantiser, ranks_on_device)
    budget = Budget(1, None, config.ep_size, config.num_channels, ranks_on_device)
    family = launches.variant(resolved, quantiser)
    executor.launcher(family, budget).load(MEET, survivors.MEETING_THREADS)


def head(config: HeadConfig) -> None:
    """Ask for the kernels that the product launches for a shared LM head."""
    HeadLaunches(CudaExecutor(DEVICE), config)


def _create_layer(case: Any, device: str, group: Any = None, **changes: Any) -> None:
    layer(dataclasses.replace(case.config(0), **changes))
    raise Compiled


def _create_head(device: str, **values: Any) -> None:
    head(real_head.config(**values))
    raise Compiled


def _lone_rank(self: object, device: str, dtype: torch.dtype) -> None:
    _create_head(device, dtype=dtype)


def _run_processes(size: int, body: Callable[..., Any], *_args: Any, **_options: Any) -> None:
    if body.__module__ == real_head.__name__:
        head(real_head.config(size, 0))
    else:
        of_users = body.__module__ == users_form.__name__
        case = (users_form if of_users else real_path).of_processes(size, small=True)
        layer(case.config(0), ranks_on_device=size)
    raise Compiled


@contextlib.contextmanager
def up_to_machine_code() -> Iterator[None]:
    """Raise Compiled inside whenever somebody asks for machine code."""
    compile_one, quantiser_rows = emulated.load_or_compile, real_path.quantiser_rows

    def compile_and_stop(text: str, architecture: str) -> bytes:
        compile_one(text, architecture)
        raise Compiled

    with contextlib.ExitStack() as stack:
        for holder, name, instead in (
            (emulated, "load_or_compile", compile_and_stop),
            (real_path, "create", _create_layer),
            (real_head, "create", _create_head),
            (real_head.LoneRank, "__init__", _lone_rank),
            (processes, "run_processes", _run_processes),
            (torch.cuda, "is_available", lambda: True),  # GPU tests are not skipped
            (torch.cuda, "Stream", lambda *args: None),
            (torch.cuda, "stream", contextlib.nullcontext),
            (real_path, "quantiser_rows", lambda device: quantiser_rows("cpu")),
        ):
            stack.enter_context(mock.patch.object(holder, name, instead))
        yield


class OfTests:
    """A plugin of pytest: a test passes if it has asked for machine code."""

    @pytest.hookimpl(wrapper=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> Iterator[None]:
        """Swallow Compiled, the only way to pass."""
        try:
            yield
        except Compiled:
            return True  # type: ignore[return-value]
        pytest.fail("this test has not asked for machine code: see tests/gpu/day/carried.py")


def of_tests(*selected: str) -> int:
    """pytest's exit status."""
    ours = ("-q", "-p", "no:cacheprovider", "-m", "gpu", "-rf", "--timeout=300")
    with up_to_machine_code():
        return int(pytest.main([*ours, *selected], plugins=[OfTests()]))


def asked(body: Callable[..., Any], *given: Any, **options: Any) -> None:
    """Run what will ask for machine code."""
    try:
        body(*given, **options)
    except Compiled:
        return
    raise AssertionError(f"{body} has not asked for machine code")


def of_benchmarks() -> None:
    """Run each command of the stages, by its own options; and the sanitizers' program."""
    for step in STEPS.values():
        program, *given = step.command
        with (
            mock.patch.object(sys, "argv", [*step.command]),
            mock.patch.dict(os.environ, dict(step.variables)),
        ):
            if program == "benchmarks/bench_moe_comm.py":
                made = options.parse("", given).options
                asked(one_gpu.make_backend, made)
                layer(one_gpu.config_of(made, 0, 1), pdl=False)  # of one_gpu.Branches
            elif program == "benchmarks/bench_recipes.py":
                _of_recipes(bench_recipes.parse())
            elif program == "benchmarks/bench_lm_head.py":
                _of_head(bench_lm_head.parse())
            elif program == "benchmarks/gpu_constants.py":
                text = gpu_constants.text(gpu_constants.Sizes())
                nvrtc.load_or_compile(text, driver.device(0).architecture)
    for case in sanitized.CASES:
        asked(emulated.make_backend, "cuda", case, ctas=2)
    with mock.patch.object(emulated_text, "device_source", emulated_text.device_source):
        sanitized.break_barrier()
        asked(emulated.make_backend, "cuda", sanitized.CASE, ctas=2)
    layer(options.Options(batches=(1,)).config(0, 64))  # bench_launch.py: one layer's size as any


def _of_recipes(arguments: Any) -> None:
    """Ask for what bench_recipes.Device makes."""
    plain = bench_recipes.options_of(arguments)
    for name in arguments.combines:
        asked(one_gpu.make_backend, dataclasses.replace(plain, combine=name))
    asked(one_gpu.make_backend, plain)
    for name in arguments.recipes:
        quantised = dataclasses.replace(plain, recipe=name)
        asked(one_gpu.make_backend, quantised)
        asked(one_gpu.make_backend, quantised, post_quant=True)
        asked(one_gpu.make_backend, dataclasses.replace(quantised, top_k=1), alone=True)


def _of_head(arguments: Any) -> None:
    made = common.options_from(bench_lm_head.Options, arguments)
    for size in made.groups:
        asked(bench_lm_head.make_backend, made, size)


def main() -> None:
    """End with status 1 if a test or a benchmark did not come as far as to ask."""
    with up_to_machine_code():
        of_benchmarks()
    # The sanitizers' tests start programs, whose kernels are compiled above. The others ask for
    # what real_path.py's tests ask for, the one after vLLM is loaded, the other on the GPU.
    left_out = ("--ignore=tests/gpu/test_sanitizers.py", "--ignore=tests/gpu/test_quantisers.py")
    bad_input = "--deselect=tests/gpu/test_real_path.py::test_bad_input"
    status = of_tests("tests/gpu", *left_out, bad_input)
    found = len(list(Path(os.environ["MOE_NVLINK_CACHE_DIR"]).glob("*.cubin")))
    print(f"{found} files of machine code", flush=True)
    raise SystemExit(status)


if __name__ == "__main__":
    if "FAKE_CUDA_KERNELS" in os.environ:
        main()
    else:  # the linker reads its path when a process starts
        with tempfile.TemporaryDirectory() as folder:
            variables = os.environ | stand_in.environment(Path(folder))
            again = [sys.executable, "-m", "tests.gpu.day.carried"]
            raise SystemExit(subprocess.run(again, env=variables, cwd=ROOT, check=False).returncode)
