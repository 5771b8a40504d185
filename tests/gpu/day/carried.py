"""Compile into MOE_NVLINK_CACHE_DIR what the stages of on_gpu.sh will need on an sm_90a GPU.

    python -m tests.gpu.day.carried     # benchmarks/carry.sh calls this

No list of kernels is kept. Of the product's kernels the plan of `moe-nvlink verify` says which, and
`precompile` compiles them. The GPU tests and the benchmarks run here up to the place where they ask
for machine code, against the stand-in for the driver, and no further. What is missed all the same
is compiled on the GPU's machine, whose summary counts it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
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
from moe_nvlink_plugin import AllToAllConfig, HeadConfig, HeadGroup, MoeAllToAll, driver
from moe_nvlink_plugin.config import ACTIVATION_DTYPES
from moe_nvlink_plugin.exchange import launches
from moe_nvlink_plugin.exchange.arguments import quantiser_code
from moe_nvlink_plugin.jit import nvrtc
from moe_nvlink_plugin.launch.arguments import element_code
from moe_nvlink_plugin.launch.kernel import Variant
from moe_nvlink_plugin.lm_head.kernels import HEAD
from moe_nvlink_plugin.plugins import find_recipe
from moe_nvlink_plugin.tools import precompile
from moe_nvlink_plugin.verify.cases import Case
from moe_nvlink_plugin.verify.checks import Head, Rounds
from moe_nvlink_plugin.verify.plan import Geometry, plan
from tests.gpu.day import stand_in
from tests.gpu.day.steps import STEPS, Step
from tests.support import (
    comings,
    emulated,
    emulated_text,
    real_head,
    real_path,
    sanitized,
    vllm_sizes,
)
from tests.support import ranks as processes

#: Machine code is in the cache, and nothing more is to be done. A test that raises it is skipped.
Compiled = pytest.skip.Exception


def product(geometry: Variant) -> None:
    """Compile what the product loads for a geometry. Ranks that share a GPU have no PDL."""
    architecture = driver.device(0).architecture
    for pdl in (True, False):
        for compilation in precompile.Task(architecture, geometry, pdl).compilations():
            if error := precompile.compiled(compilation).error:
                raise error


def of_config(config: AllToAllConfig | HeadConfig) -> None:
    """Compile what the product loads for a layer, or for a shared LM head."""
    if isinstance(config, HeadConfig):
        product(HEAD.variant(dtype=element_code(config.dtype)))
    else:
        code = quantiser_code(find_recipe(config), config.hidden_size)
        product(launches.variant(config, code))


def of_flashinfer() -> None:
    """Compile what the cases of tests/flashinfer take; FlashInfer itself may not be here."""
    for dtype, combine in itertools.product(ACTIVATION_DTYPES, ("bf16", "fp8_tensor", "fp8_block")):
        if combine == "bf16" or dtype is torch.bfloat16:
            case = Case(tokens=(0, 0), top_k=3, dtype=dtype, hidden_size=128, combine=combine)
            of_config(case.config(0))


def of_verify() -> None:
    """Compile for every check of the plan, and what the report's machine facts ask for."""
    geometry = Geometry(ep_size=2, num_experts=256, top_k=8, hidden_size=7168, max_tokens=128)
    for check in plan(geometry, torch.device("cuda"), quick=False):
        assert isinstance(check, Rounds | Head), check
        of_config(check.case.config(0) if isinstance(check, Rounds) else check.config)
    for kind in precompile.kinds("sm_90a"):
        product(kind)


def _created(config: AllToAllConfig | HeadConfig, *_given: Any, **_options: Any) -> None:
    of_config(config)
    raise Compiled("its machine code is there")


def _lone_rank(_self: object, _device: str, dtype: torch.dtype) -> None:
    _created(real_head.config(dtype=dtype))


def _first_of(size: int, body: Callable[..., Any], _folder: Path, *given: Any, **_: Any) -> None:
    body(0, size, *given)


@contextlib.contextmanager
def up_to_machine_code() -> Iterator[None]:
    """Raise Compiled inside whenever somebody asks for machine code."""
    compile_one, quantiser_rows = emulated.load_or_compile, real_path.quantiser_rows

    def compile_and_stop(text: str, architecture: str) -> bytes:
        compile_one(text, architecture)
        raise Compiled("its machine code is there")

    with contextlib.ExitStack() as stack:
        for holder, name, instead in (
            (emulated, "load_or_compile", compile_and_stop),
            (MoeAllToAll, "create", _created),
            (HeadGroup, "create", _created),
            (real_head.LoneRank, "__init__", _lone_rank),
            (processes, "run_processes", _first_of),
            (comings.Life, "group", lambda *args: None),
            (torch.cuda, "is_available", lambda: True),  # GPU tests are not skipped
            (torch.cuda, "Stream", lambda *args: None),
            (torch.cuda, "stream", contextlib.nullcontext),
            (real_path, "quantiser_rows", lambda device: quantiser_rows("cpu")),
        ):
            stack.enter_context(mock.patch.object(holder, name, instead))
        yield


def asked(body: Callable[..., Any], *given: Any, **options: Any) -> None:
    """Run what will ask for machine code."""
    with pytest.raises(Compiled):
        body(*given, **options)


def of_benchmark(step: Step) -> None:
    """Run what one command of the stages makes, by its own options, up to its machine code."""
    program, *given = step.command.split()
    if program == "benchmarks/bench_moe_comm.py":
        made = options.parse("", given).options
        if made.emulate_ranks:
            asked(one_gpu.make_backend, made)
        of_config(one_gpu.config_of(made, 0, 1))  # also of one_gpu.Branches
    elif program == "benchmarks/bench_recipes.py":
        of_recipes(bench_recipes.parse())
    elif program == "benchmarks/bench_lm_head.py":
        heads = common.options_from(bench_lm_head.Options, bench_lm_head.parse())
        for size in heads.groups:
            asked(bench_lm_head.make_backend, heads, size)
    elif program == "benchmarks/gpu_constants.py":
        text = gpu_constants.text(gpu_constants.Sizes())
        nvrtc.load_or_compile(text, driver.device(0).architecture)
    elif program == "benchmarks/bench_launch.py":
        of_config(options.Options(batches=(1,)).config(0, 64))  # a size as any


def of_recipes(arguments: Any) -> None:
    """Ask for what bench_recipes.Device makes."""
    plain = bench_recipes.options_of(arguments)
    for combine in (plain.combine, *arguments.combines):
        asked(one_gpu.make_backend, dataclasses.replace(plain, combine=combine))
    for name in arguments.recipes:
        quantised = dataclasses.replace(plain, recipe=name)
        asked(one_gpu.make_backend, quantised)
        asked(one_gpu.make_backend, quantised, post_quant=True)
        asked(one_gpu.make_backend, dataclasses.replace(quantised, top_k=1), alone=True)


def of_sanitizers() -> None:
    """Ask for what tests/support/sanitized.py makes, whose processes the tests start."""
    for case in sanitized.CASES:
        asked(emulated.make_backend, "cuda", case, ctas=2)
    with mock.patch.object(emulated_text, "device_source", emulated_text.device_source):
        sanitized.break_barrier()
        asked(emulated.make_backend, "cuda", sanitized.CASE, ctas=2)


class OfTests:
    """A plugin of pytest."""

    @pytest.hookimpl(wrapper=True)
    def pytest_pyfunc_call(self) -> Iterator[None]:
        """Let no test come to its end: Compiled was to stop it."""
        yield
        pytest.fail("this test has not asked for machine code: see tests/gpu/day/carried.py")


def of_tests(*selected: str) -> int:
    """Run the GPU tests. Return pytest's exit status: 0 if none fails and none comes to its end.

    Some are left out: test_sanitizers.py starts programs. The others ask for what real_path.py's
    tests ask for, one after vLLM is loaded, another on the GPU.
    """
    names = ("sanitizers", "quantisers", "vllm_experts")
    left_out = [f"--ignore=tests/gpu/test_{name}.py" for name in names]
    on_the_gpu = "--deselect=tests/gpu/test_real_path.py::test_bad_input"
    ours = ("-q", "-p", "no:cacheprovider", "-m", "gpu", "-rf", "--timeout=300")
    given = [*ours, *left_out, on_the_gpu, *(selected or ("tests/gpu",))]
    return int(pytest.main(given, plugins=[OfTests()]))


def main() -> int:
    """Return a status other than 0 if a test did not ask."""
    of_verify()
    of_flashinfer()
    for config in vllm_sizes.gpu_configs():
        of_config(config)
    with up_to_machine_code():
        for step in STEPS.values():
            with (
                mock.patch.object(sys, "argv", step.command.split()),
                mock.patch.dict(os.environ, step.environment),
            ):
                of_benchmark(step)
        of_sanitizers()
        return of_tests()


if __name__ == "__main__":
    if "FAKE_CUDA_KERNELS" in os.environ:
        raise SystemExit(main())
    with tempfile.TemporaryDirectory() as folder:
        # The linker reads its path when a process starts.
        variables = os.environ | stand_in.environment(Path(folder))
        again = [sys.executable, "-m", "tests.gpu.day.carried"]
        raise SystemExit(subprocess.run(again, env=variables, check=False).returncode)
