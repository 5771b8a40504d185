"""Share what the scripts that time one operation need: a device, CPU ranks, turns under a clock."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from benchmarks import common
from moe_nvlink_plugin import driver
from tests.support.ranks import run_processes

#: After which ranks that are stuck end a run.
LONGEST_S = 3600.0


def add_options(parser: argparse.ArgumentParser, iterations: int) -> None:
    parser.add_argument(
        "--device",
        default="cpu",
        choices=["cpu", "cuda", "rehearsal"],
        help="cuda: ranks emulated on one GPU; rehearsal: the same on CPU threads, whose times "
        "mean nothing",
    )
    parser.add_argument("--iterations", type=int, default=iterations, help="at most")
    parser.add_argument("--threads", type=int, default=1, help="CPU: our host threads per rank")
    parser.add_argument("--output_file", type=Path, help="JSON file, written after every batch")


def machine(device: str) -> dict[str, Any]:
    """Describe this machine and its GPU. If the GPU is missing, the program ends."""
    if device != "cuda":
        return common.describe_run()
    if not torch.cuda.is_available():
        print(f"not measured: no CUDA device ({driver.unavailable() or 'torch sees none'})")
        raise SystemExit
    return common.describe_run() | common.describe_gpu()


def on_ranks(size: int, body: Callable[..., Any], *given: Any) -> Any:
    """Return what rank 0 of `size` processes returns from body(rank, size, *given)."""
    with tempfile.TemporaryDirectory() as folder:
        return run_processes(size, body, Path(folder), *given, timeout_s=LONGEST_S)[0]


class Taken(NamedTuple):
    """Microseconds of one body: by the slowest rank's clock, and on a core, of all ranks."""

    wall_us: float
    work_us: float


class Clock:
    """`with clock:` around what is timed, from a barrier on. Collective."""

    def __enter__(self) -> None:
        dist.barrier()
        self._start = time.perf_counter(), time.process_time()

    def __exit__(self, *_error: object) -> None:
        self.wall_us, self.work_us = (
            1e6 * (now - start)
            for now, start in zip(
                (time.perf_counter(), time.process_time()), self._start, strict=True
            )
        )


#: Makes its own preparations and times the rest.
Body = Callable[[Clock], Any]


def in_turns(
    bodies: Mapping[str, Body], iterations: int, warmup: int = 0
) -> dict[str, list[Taken]]:
    """Time each body; entry i of all names is of one iteration, in which all took their turn.

    Each body comes first in some iterations. Collective.
    """
    names, clock = list(bodies), Clock()
    samples = torch.zeros((2, len(names), warmup + iterations), dtype=torch.float64)
    for iteration in range(warmup + iterations):
        for turn in range(len(names)):
            index = (turn + iteration) % len(names)
            bodies[names[index]](clock)
            samples[:, index, iteration] = torch.tensor([clock.wall_us, clock.work_us])
    dist.all_reduce(samples[0], op=dist.ReduceOp.MAX)
    dist.all_reduce(samples[1])
    wall, work = samples[:, :, warmup:].tolist()
    return {
        name: [Taken(*pair) for pair in zip(wall[index], work[index], strict=True)]
        for index, name in enumerate(names)
    }
