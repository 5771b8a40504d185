"""Time what a launch costs the host, from the bare driver call up to MoeAllToAll.dispatch.

    python benchmarks/bench_launch.py                  # against a driver whose launches do nothing
    python benchmarks/bench_launch.py --driver real    # on a GPU: enqueuing alone
    python benchmarks/bench_launch.py --driver emulated  # a rehearsal: kernels run, on the CPU

One rank, because the host does the same for any number. WITHIN names the level that each level
contains; the difference is what it adds. An eager call of MoeAllToAll calls no torch op; a compiled
graph calls the op instead, which also checks each argument for itself. Against the stand-in driver
(tests/support/fake_cuda) the first row is that driver's own cost, which a real one replaces by its
own; the differences are ours on any machine. After every dispatch comes its combine: kernels report
a dispatch that is run again without one. Only one of the two is timed, and it alone counts.
"""

from __future__ import annotations

import argparse
import cProfile
import ctypes
import os
import pstats
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))

from benchmarks import harness
from benchmarks.columns import print_headings, print_row
from benchmarks.common import summary, write_json
from moe_nvlink_plugin import AllToAllConfig, MoeAllToAll, env
from moe_nvlink_plugin.exchange import ops
from moe_nvlink_plugin.exchange.calls import Combine, Dispatch
from moe_nvlink_plugin.exchange.launches import LayerLaunches
from moe_nvlink_plugin.jit import host
from moe_nvlink_plugin.jit.header import structs
from moe_nvlink_plugin.launch.cuda import CudaExecutor
from moe_nvlink_plugin.testing import ThreadGroup, random_inputs
from tests.gpu.day import stand_in
from tests.support import fake_cuda
from tests.support.fake_cuda.transport import LaunchedByDriver, install

#: The innermost level.
BARE = "driver: cuLaunchKernelEx by cuda.bindings"
#: Calls of one mean, and rounds between two waits for the GPU.
CALLS = 50
_FLAGS = ("-std=c++20", "-O2", "-fPIC", "-shared")

#: What the stand-in driver calls at a launch: nothing, so that only the way there is timed.
NO_KERNELS = """
extern "C" {
void* moe_nvlink_grid_create(int) { static int grid; return &grid; }
void moe_nvlink_grid_destroy(void*) {}
int moe_nvlink_sizeof_dispatch_args() { return DISPATCH_BYTES; }
int moe_nvlink_sizeof_combine_args() { return COMBINE_BYTES; }
int moe_nvlink_sizeof_small_dispatch_args() { return DISPATCH_BYTES; }
int moe_nvlink_sizeof_small_combine_args() { return COMBINE_BYTES; }
int moe_nvlink_sizeof_meet_args() { return MEET_BYTES; }
void moe_nvlink_dispatch(const void*, void*) {}
void moe_nvlink_combine(const void*, void*) {}
void moe_nvlink_small_dispatch(const void*, void*) {}
void moe_nvlink_small_combine(const void*, void*) {}
void moe_nvlink_meet(const void*, void*) {}
}
"""


def microseconds(
    body: Callable[[], Any], after: Callable[[], Any], batches: int
) -> dict[str, float]:
    """Time one call on the host: summary of the means of batches of CALLS calls.

    Args:
        body: what is timed.
        after: what ends its round, and is not timed.
        batches: how many means are taken.
    """
    samples = []
    for _ in range(batches):
        spent = 0.0
        for _ in range(CALLS):
            start = time.perf_counter()
            body()
            spent += time.perf_counter() - start
            after()
        samples.append(spent / CALLS * 1e6)
        drain()
    return summary(samples)


def drain() -> None:
    """Wait for the GPU: a full queue would make the host wait inside a call.

    A queue takes about a thousand launches, and between two waits come two for each of CALLS calls.
    """
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
        self.inner = self.layer._layer
        executor = self.inner.workspace.executor
        assert isinstance(executor, CudaExecutor)
        row_bytes = {name: row.row_bytes for name, row in self.inner.rows.items()}
        self.launcher = LayerLaunches(executor, self.inner.config, row_bytes, 0)
        self.region = self.layer.combine_input()
        self._combine(self._dispatch())
        drain()

    def arguments(self) -> tuple[Any, Any]:
        """Return DispatchArgs and CombineArgs of a round without tokens.

        The host does the same with tokens.
        """
        channel = self.inner.channel(0)
        made = []
        for args in (channel._dispatch_args, channel._combine_args):
            copy = type(args).from_buffer_copy(args)
            copy.geometry.num_tokens = 0
            made.append(copy)
        dispatch, combine = made
        return dispatch, combine

    def rows(self) -> dict[str, dict[str, float]]:
        """Time all levels, innermost first."""
        return {
            BARE: self.bare(),
            "dispatch: CUDA executor": self.executor(),
            **self.verbs("checks and arguments", self._checked_dispatch, self._checked_combine),
            **self.verbs("MoeAllToAll", self._dispatch, self._combine),
            **self.verbs("torch op", self._dispatch_op, self._combine_op),
        }

    def bare(self) -> dict[str, float]:
        """Time cuLaunchKernelEx alone, with what the launcher has prepared for it."""
        (args, of_combine), of = self.arguments(), self.launcher
        is_small = args.geometry.max_tokens_per_rank <= of._most_small
        launched: Any = (of._small_dispatches if is_small else of._dispatches)[0]
        with launched._executor.context():
            launched(args)
            of.combine(of_combine)
            config = launched._prepare(0).config
            given = (config, launched._function, launched._pointers_address, 0)
            return microseconds(
                lambda: launched._launch(*given), lambda: of.combine(of_combine), self._batches
            )

    def executor(self) -> dict[str, float]:
        """Time the launcher: shape by token count, stream, context, status."""
        (args, of_combine), of = self.arguments(), self.launcher
        return microseconds(
            lambda: of.dispatch(args), lambda: of.combine(of_combine), self._batches
        )

    def verbs(
        self, level: str, dispatch: Callable[[], Any], combine: Callable[[Any], None]
    ) -> dict[str, dict[str, float]]:
        """Time dispatch, then combine of what dispatch returned, call by call."""
        samples: tuple[list[float], list[float]] = ([], [])
        for number in range(self._batches * 10):
            start = time.perf_counter()
            received = dispatch()
            middle = time.perf_counter()
            combine(received)
            samples[0].append((middle - start) * 1e6)
            samples[1].append((time.perf_counter() - middle) * 1e6)
            if number % CALLS == 0:
                drain()
        return {
            f"{verb}: {level}": summary(of)
            for verb, of in zip(("dispatch", "combine"), samples, strict=True)
        }

    def _checked_dispatch(self) -> Any:
        """Ask the layer whether the call is ordinary, then call its method, as MoeAllToAll does."""
        hidden, ids, weights = self.inputs
        handle, bound = self.inner.handle, self.inner.config.max_tokens_per_rank
        call = Dispatch(hidden, None, ids, weights, [], None, handle, 0, None, bound)
        return self.inner.dispatch(call, self.inner.ordinary.quantiser_of(call))

    def _checked_combine(self, received: Any) -> None:
        slots, handle = received.metadata.send_slots, self.inner.handle
        call = Combine(self.region, slots, self.output, handle, 0)
        self.inner.combine(call, is_ordinary=self.inner.ordinary.is_combine(call))

    def _dispatch(self) -> Any:
        return self.layer.dispatch(*self.inputs)

    def _combine(self, received: Any) -> None:
        self.layer.combine(self.region, received.metadata, output=self.output)

    def finish(self) -> None:
        """Run one more round: its calls raise what the kernels before it have reported.

        Raises:
            ExchangeStateError: the rounds that were timed were not rounds.
        """
        drain()
        self._combine(self._dispatch())

    def _dispatch_op(self) -> Any:
        """Call what a compiled graph calls."""
        hidden, ids, weights = self.inputs
        pending, handle = self.inner.workspace.pending, self.layer._layer.handle
        return ops.dispatch(pending, hidden, None, ids, weights, [], None, handle, 0)

    def _combine_op(self, received: Any) -> None:
        pending, handle = self.inner.workspace.pending, self.layer._layer.handle
        ops.combine_out(pending, self.region, received[4], self.output, handle, 0)


def print_profile(levels: Levels) -> None:
    """Print in which functions the host's time of eager rounds goes; the profiler adds to it."""
    profiler = cProfile.Profile()
    for _ in range(10):
        with profiler:
            for _ in range(CALLS):
                levels._combine(levels._dispatch())
        drain()
    print(f"profile of {10 * CALLS} rounds:")
    pstats.Stats(profiler).sort_stats("tottime").print_stats(40)


def measure(_rank: int, _size: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Time all levels, in this process, on whatever driver it finds."""
    torch.set_num_threads(1)
    install()
    levels = Levels(arguments)
    # As torch leaves it in a thread that has used the GPU; the stand-in's tensors are the CPU's.
    executor = levels.inner.workspace.executor
    assert isinstance(executor, CudaExecutor)
    with executor.context():
        rows = levels.rows()
        if arguments.profile:
            print_profile(levels)
        levels.finish()
    for name, inner in WITHIN.items():
        rows[name]["added_us"] = rows[name]["median_us"] - rows[inner]["median_us"]
    return {"pdl": env.pdl(), "rows": rows}


def measure_on_fake(arguments: argparse.Namespace) -> dict[str, Any]:
    """Time all levels in a process of its own, which finds the stand-in before any real driver."""
    if arguments.driver == "emulated":
        with tempfile.TemporaryDirectory() as folder:
            variables = stand_in.environment(Path(folder))
            with mock.patch.dict(os.environ, variables):
                executed: dict[str, Any] = harness.on_ranks(1, measure, arguments)
        return executed
    text = NO_KERNELS
    for name in ("Dispatch", "Combine", "Meet"):
        size = ctypes.sizeof(structs()[f"{name}Args"])
        text = text.replace(f"{name.upper()}_BYTES", str(size))
    with tempfile.TemporaryDirectory() as folder:
        kernels = Path(folder, "kernels.so")
        host.compile_text(text, kernels, _FLAGS)
        variables = fake_cuda.environment(fake_cuda.build(Path(folder)), kernels, sms=132)
        with mock.patch.dict(os.environ, variables):
            found: dict[str, Any] = harness.on_ranks(1, measure, arguments)
    return found


#: Value of --driver -> what the result file says of it.
DRIVERS = {
    "fake": "stand-in, does nothing",
    "real": "real",
    "emulated": "stand-in, runs the kernels on the CPU: no time means anything",
}


#: Level -> the level it contains.
WITHIN = {
    "dispatch: CUDA executor": BARE,
    "dispatch: checks and arguments": "dispatch: CUDA executor",
    "dispatch: MoeAllToAll": "dispatch: checks and arguments",
    "combine: MoeAllToAll": "combine: checks and arguments",
    "dispatch: torch op": "dispatch: checks and arguments",
    "combine: torch op": "combine: checks and arguments",
}


COLUMNS = {
    "level": "{level}",
    "us, median": "{median_us:.2f}",
    "of it added here": "{added_us:.2f}",
    "min": "{min_us:.2f}",
    "p95": "{p95_us:.2f}",
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--driver", default="fake", choices=list(DRIVERS))
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--profile", action="store_true", help="of eager rounds, by functions")
    parser.add_argument("--output_file", type=Path, help="write rows and machine as JSON")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    is_real = arguments.driver == "real"
    about = {
        "machine": harness.machine("cuda" if is_real else "cpu"),
        "driver": DRIVERS[arguments.driver],
        "tokens": arguments.tokens,
    }
    found = measure(0, 1, arguments) if is_real else measure_on_fake(arguments)
    print_headings(COLUMNS)
    for level, row in found["rows"].items():
        print_row(COLUMNS, row | {"level": level})
    if arguments.output_file:
        write_json(arguments.output_file, about | found)


if __name__ == "__main__":
    main()
