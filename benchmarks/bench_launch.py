"""What a launch costs the host: from the bare driver call up to MoeAllToAll.dispatch.

    python benchmarks/bench_launch.py                  # against a driver whose launches do nothing
    python benchmarks/bench_launch.py --driver real    # on a GPU: enqueuing alone

One rank, because the host does the same for any number. Each level contains the one above it; the
difference is what it adds. Against the stand-in driver (tests/support/fake_cuda) the first row is
that driver's own cost, which a real one replaces by its own; the differences are ours on any
machine.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))

from benchmarks.common import describe_gpu, describe_run, write_json
from moe_nvlink_plugin import AllToAllConfig, MoeAllToAll, driver, env
from moe_nvlink_plugin.exchange import layer as exchange
from moe_nvlink_plugin.exchange.formats import Activations
from moe_nvlink_plugin.exchange.kernels import DISPATCH
from moe_nvlink_plugin.exchange.launches import LayerLaunches, variant
from moe_nvlink_plugin.jit import host
from moe_nvlink_plugin.jit.header import structs
from moe_nvlink_plugin.launch import machine_code
from moe_nvlink_plugin.launch.cuda import CudaExecutor
from moe_nvlink_plugin.testing import ThreadGroup, random_inputs
from tests.support import fake_cuda
from tests.support.fake_cuda.transport import LaunchedByDriver, install

#: What the stand-in driver calls at a launch: nothing, so that only the way there is timed.
NO_KERNELS = """
extern "C" {
void* moe_nvlink_grid_create(int) { static int grid; return &grid; }
void moe_nvlink_grid_destroy(void*) {}
int moe_nvlink_sizeof_dispatch_args() { return DISPATCH_BYTES; }
int moe_nvlink_sizeof_combine_args() { return COMBINE_BYTES; }
void moe_nvlink_dispatch(const void*, void*) {}
void moe_nvlink_combine(const void*, void*) {}
}
"""

#: The driver's call in a loop of machine code.
LOOP = """
extern "C" void launch_often(int (*launch)(const void*, void*, void**, void**), const void* config,
                             void* function, void** parameters, long count) {
  while (count-- > 0) launch(config, function, parameters, nullptr);
}
"""


def bare_launch(config: AllToAllConfig) -> tuple[Any, Any]:
    """A launch configuration of dispatch for one CTA, and the function."""
    api = driver.api()
    wanted = variant(config, 0)
    build = wanted.build(DISPATCH, pdl=env.pdl())
    cubin = machine_code.cubin_for(build, driver.device(0).architecture, wanted)
    with driver.on_device(0):
        module = driver.call("cuModuleLoadData", cubin)
        function = driver.call("cuModuleGetFunction", module, b"moe_nvlink_dispatch")
    prepared = api.CUlaunchConfig()
    prepared.gridDimX = prepared.gridDimY = prepared.gridDimZ = 1
    prepared.blockDimX, prepared.blockDimY, prepared.blockDimZ = 256, 1, 1
    if env.pdl():
        attribute = api.CUlaunchAttribute()
        attribute.id = api.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        prepared.attrs, prepared.numAttrs = [attribute], 1
    return prepared, function


def microseconds(body: Callable[[], Any], batches: int, calls: int = 50) -> dict[str, float]:
    """Host time of one call: median and 95th percentile of the batches' means."""
    samples = []
    for _ in range(batches):
        start = time.perf_counter()
        for _ in range(calls):
            body()
        samples.append((time.perf_counter() - start) / calls * 1e6)
        drain()
    return summary(samples)


def summary(samples: list[float]) -> dict[str, float]:
    ordered = sorted(samples)
    return {
        "median_us": statistics.median(ordered),
        "min_us": ordered[0],
        "p95_us": ordered[int(0.95 * (len(ordered) - 1))],
    }


def drain() -> None:
    """A full queue would make the host wait for the GPU."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class Levels:
    """One layer of one rank, called at every level."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._batches = arguments.batches
        device = "cuda" if arguments.driver == "real" else "cpu"
        transport = None if arguments.driver == "real" else LaunchedByDriver.name
        config = AllToAllConfig(
            ep_size=1,
            ep_rank=0,
            num_experts=256,
            top_k=8,
            hidden_size=7168,
            max_tokens_per_rank=arguments.tokens,
            timeout_s=60,
            transport=transport,
        )
        inputs = random_inputs(config, arguments.tokens, torch.Generator().manual_seed(1))
        hidden, ids, weights = (tensor.to(device) for tensor in inputs)
        self.inputs = (hidden, ids, weights)
        self.output = torch.empty_like(hidden)
        self.layer = MoeAllToAll.create(config, ThreadGroup.ranks(1)[0], device)
        self.inner = exchange.find(self.layer._handle)
        executor = self.inner.workspace.executor
        assert isinstance(executor, CudaExecutor)
        row_bytes = {name: row.row_bytes for name, row in self.inner.rows.items()}
        self.launcher = LayerLaunches(executor, config, row_bytes, 0)
        self.received = self.layer.dispatch(*self.inputs)
        self.layer.combine(self.layer.combine_input(), self.received.metadata, output=self.output)
        drain()

    def arguments(self) -> Any:
        """DispatchArgs of a call without tokens: with them nothing else changes for the host."""
        args = self.inner.channel(0)._dispatch_args
        copy = type(args).from_buffer_copy(args)
        copy.geometry.num_tokens = 0
        return copy

    def bare(self, loop: Any) -> dict[str, dict[str, float]]:
        """cuLaunchKernelEx with everything prepared: called from C, then by cuda.bindings."""
        args = self.arguments()
        config, function = bare_launch(self.layer.config)
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(args))
        address, count = ctypes.addressof(pointers), 50
        launch = driver.api().cuLaunchKernelEx
        symbol = ctypes.cast(ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx, ctypes.c_void_p)
        handle = (config.getPtr(), int(function), address, count)
        with driver.on_device(0):
            from_c = microseconds(lambda: loop(symbol, *handle), self._batches, calls=1)
            bindings = microseconds(lambda: launch(config, function, address, 0), self._batches)
        return {
            "driver: cuLaunchKernelEx from C": {k: v / count for k, v in from_c.items()},
            "driver: cuLaunchKernelEx by cuda.bindings": bindings,
        }

    def executor(self) -> dict[str, float]:
        """The launcher: shape by token count, stream, context, status."""
        args = self.arguments()
        return microseconds(lambda: self.launcher.dispatch(args), self._batches)

    def verbs(self) -> dict[str, dict[str, float]]:
        """LayerExchange's methods, then MoeAllToAll's through the torch op; by turns."""
        hidden, ids, weights = self.inputs
        pending = self.inner.workspace.pending
        region = self.layer.combine_input()

        def checked_dispatch() -> Any:
            given = Activations(hidden, None, None)
            return self.inner.dispatch(pending, given, ids, weights, [], 0)

        def checked_combine(received: Any) -> None:
            self.inner.combine(pending, region, received[4], self.output, 0)

        def dispatch() -> Any:
            return self.layer.dispatch(hidden, ids, weights)

        def combine(received: Any) -> None:
            self.layer.combine(region, received.metadata, output=self.output)

        found = {}
        for level, first, second in (
            ("checks and arguments", checked_dispatch, checked_combine),
            ("MoeAllToAll, torch op", dispatch, combine),
        ):
            samples: tuple[list[float], list[float]] = ([], [])
            for number in range(self._batches * 10):
                start = time.perf_counter()
                received = first()
                middle = time.perf_counter()
                second(received)
                samples[0].append((middle - start) * 1e6)
                samples[1].append((time.perf_counter() - middle) * 1e6)
                if number % 50 == 0:
                    drain()
            found[f"dispatch: {level}"] = summary(samples[0])
            found[f"combine: {level}"] = summary(samples[1])
        return found


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """All levels, in this process, on whatever driver it finds."""
    torch.set_num_threads(1)
    install()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "loop.so")
        host.compile_text(LOOP, path, ("-std=c++20", "-O2", "-fPIC", "-shared"))
        loop = ctypes.CDLL(str(path)).launch_often
        loop.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_long]
        loop.restype = None
        levels = Levels(arguments)
        rows = {
            **levels.bare(loop),
            "dispatch: CUDA executor": levels.executor(),
            **levels.verbs(),
        }
    gpu = describe_gpu() if arguments.driver == "real" else {}
    return {"gpu": gpu, "pdl": env.pdl(), "rows": rows}


def measure_on_fake(arguments: argparse.Namespace) -> dict[str, Any]:
    """In a process of its own, which finds the stand-in before any real driver."""
    with tempfile.TemporaryDirectory() as folder:
        kernels = Path(folder, "kernels.so")
        text = NO_KERNELS
        for name in ("Dispatch", "Combine"):
            size = ctypes.sizeof(structs()[f"{name}Args"])
            text = text.replace(f"{name.upper()}_BYTES", str(size))
        host.compile_text(text, kernels, ("-std=c++20", "-O2", "-fPIC", "-shared"))
        library = fake_cuda.build(Path(folder))
        done = subprocess.run(
            [sys.executable, __file__, *sys.argv[1:], "--inside"],
            env=os.environ | fake_cuda.environment(library, kernels, sms=132),
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


#: Level -> the level it contains.
WITHIN = {
    "driver: cuLaunchKernelEx by cuda.bindings": "driver: cuLaunchKernelEx from C",
    "dispatch: CUDA executor": "driver: cuLaunchKernelEx by cuda.bindings",
    "dispatch: checks and arguments": "dispatch: CUDA executor",
    "dispatch: MoeAllToAll, torch op": "dispatch: checks and arguments",
    "combine: MoeAllToAll, torch op": "combine: checks and arguments",
}


def print_table(rows: dict[str, dict[str, float]]) -> None:
    print("| level | us, median | of it added here | min | p95 |")
    print("|---|---|---|---|---|")
    for name, row in rows.items():
        inner = WITHIN.get(name)
        added = f"{row['median_us'] - rows[inner]['median_us']:.2f}" if inner else ""
        cells = [f"{row['median_us']:.2f}", added, f"{row['min_us']:.2f}", f"{row['p95_us']:.2f}"]
        print(f"| {name} | {' | '.join(cells)} |")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--driver", default="fake", choices=["fake", "real"])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--output", type=Path, help="write rows and machine as JSON")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    if arguments.inside:
        print(json.dumps(measure(arguments)))
        return
    if arguments.driver == "real" and not torch.cuda.is_available():
        print(f"not measured: no CUDA device ({driver.unavailable() or 'torch sees none'})")
        return
    found = measure(arguments) if arguments.driver == "real" else measure_on_fake(arguments)
    print_table(found["rows"])
    if arguments.output:
        machine = describe_run() | found["gpu"]
        write_json(
            arguments.output,
            {
                "machine": machine,
                "driver": "stand-in, does nothing" if arguments.driver == "fake" else "real",
                "pdl": found["pdl"],
                "tokens": arguments.tokens,
                "rows": found["rows"],
            },
        )


if __name__ == "__main__":
    main()
