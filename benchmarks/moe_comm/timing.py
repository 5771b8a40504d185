"""Time process ranks: the backends and the plain copy take turns under one clock."""

from __future__ import annotations

import functools
import mmap
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from benchmarks import common

from .accounting import Traffic
from .cuda_clock import Body, Clock
from .options import Options
from .rows import PHASES

#: The plain copy, among the names of backends.
CEILING = "copy"


class Verbs(Protocol):
    """What is timed: a backend's side, or the plain copy."""

    def dispatch(self) -> None: ...

    def combine(self) -> None: ...


class SharedBarrier:
    """Let the ranks of one machine go on within a few microseconds of each other.

    Each rank writes one word of shared memory and reads all others. A waiting rank yields its core.
    """

    STRIDE = 8  # words of a cache line

    def __init__(self, file: Path, rank: int, size: int, timeout_s: float) -> None:
        length = size * self.STRIDE * 8
        with file.open("ab") as made:
            made.truncate(length)
        with file.open("r+b") as made:
            self._map = mmap.mmap(made.fileno(), length)
        self._words = memoryview(self._map).cast("q")
        self._mine, self._round, self._timeout_s = rank * self.STRIDE, 0, timeout_s

    def wait(self) -> None:
        """Return when all ranks have called this. Collective.

        Raises:
            TimeoutError: a rank did not come in time.
        """
        self._round += 1
        self._words[self._mine] = self._round
        everyone = self._words[:: self.STRIDE]
        give_up = time.monotonic() + self._timeout_s
        while min(everyone.tolist()) < self._round:
            os.sched_yield()
            if time.monotonic() > give_up:
                late = [r for r, done in enumerate(everyone.tolist()) if done < self._round]
                raise TimeoutError(f"ranks {late} did not come within {self._timeout_s:.0f} s")


class RankClock(Clock):
    """Times of one rank: wall clock on a CPU; on a GPU events, with nothing of ours in L2.

    CPU ranks leave the shared barrier together. gloo's barrier lets them go one after the other and
    leaves its threads at work: on 2 cores, 4 ranks of ours with 1 token then took 1.5 ms instead of
    0.7. On GPUs (not run yet) the ranks pass gloo's barrier, then each flushes its L2; how far
    apart the barrier leaves the ranks is in the times, but not in those of the last rank.
    """

    def __init__(
        self,
        options: Options,
        group: Any,
        device: torch.device | str,
        shared: SharedBarrier | None = None,
    ) -> None:
        super().__init__(device, options.iters, options.warmup)
        self._graph, self._group, self._shared = options.cuda_graph, group, shared
        self._word = torch.zeros(1)

    def prepare(self, body: Body) -> Body:
        """Return what to time in the place of a body: perhaps the replay of its graph."""
        if not self._graph:
            return body
        self.meet()
        return self.replay(body)  # the check has run it, so nothing is made here

    def meet(self) -> None:
        """Return on all ranks at once, as far as that can be. Collective."""
        self.wait()
        if self._shared is not None:
            self._shared.wait()
        else:
            dist.all_reduce(self._word, group=self._group)  # a CPU tensor: gloo's

    def time_together(self, body: Body) -> tuple[Any, Any]:
        """Run the body between two marks, after a meeting of all ranks. Collective."""
        self.meet()
        if self.on_gpu:
            self.flush()
        return self.time_once(body)

    def kernels_of(self, side: Verbs, iterations: int) -> dict[str, Any]:
        """Say what the verbs' time is made of, as far as it can be told, or nothing. Collective."""
        if self.on_gpu:
            return {"both": self.kernels(bodies_of(side)[2])}
        tell: Any = getattr(side, "kernel_times", None)
        return {} if tell is None else tell(self.meet, iterations)


class PlainCopy:
    """The ceiling: as many bytes as these ranks' put rows have, copied once, private to private."""

    def __init__(self, traffic: Traffic, ranks: range, device: torch.device | str) -> None:
        sizes = [sum(traffic.put_bytes(phase, rank) for rank in ranks) for phase in PHASES]
        self.source = torch.randint(0, 255, (max(1, *sizes),), dtype=torch.uint8, device=device)
        self._target = torch.zeros_like(self.source)
        self.dispatch, self.combine, self.both = (
            functools.partial(self._copy, size) for size in sizes
        )

    def _copy(self, size: int) -> None:
        self._target[:size].copy_(self.source[:size])


def take_turns(
    sides: Mapping[str, Verbs], options: Options, clock: RankClock, progress: Callable[[], Any]
) -> dict[str, dict[str, list[float]]]:
    """Return this rank's microseconds by side and phase, one per iteration. Collective.

    In every iteration each side does dispatch, combine and both. Each comes first in some.
    """
    # In the order of a layer's calls: a graph's capture runs the Python of the body.
    bodies = {name: _prepared(side, clock) for name, side in sides.items()}
    taken: dict[str, list[list[Any]]] = {name: [[] for _ in PHASES] for name in sides}
    for iteration in range(-options.warmup, options.iters):
        for name in common.order_of(list(bodies), iteration):
            for body, marks in zip(bodies[name], taken[name], strict=True):
                marks.append(clock.time_together(body))
        progress()
    clock.wait()
    return {
        name: {
            phase: [clock.microseconds(*pair) for pair in marks[options.warmup :]]
            for phase, marks in zip(PHASES, of_side, strict=True)
        }
        for name, of_side in taken.items()
    }


def bodies_of(side: Verbs) -> list[Body]:
    """Return a body for each of PHASES; `both` of a backend is its two verbs."""

    def both() -> None:
        side.dispatch()
        side.combine()

    return [side.dispatch, side.combine, getattr(side, "both", both)]


def _prepared(side: Verbs, clock: RankClock) -> list[Body]:
    bodies = bodies_of(side)
    return [clock.prepare(b) for b in bodies] if getattr(side, "capturable", True) else bodies
