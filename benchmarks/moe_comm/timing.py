"""Clocks of process ranks, and the turns that backends and the plain copy take under them."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from benchmarks import common

from . import cuda_clock
from .accounting import Traffic
from .options import Options
from .rows import PHASES, Samples

Body = Callable[[], None]

#: The plain copy, among the names of backends.
CEILING = "copy"


class RankError(RuntimeError):
    """This rank cannot go on: in words for whoever started the run."""


class Verbs(Protocol):
    """What is timed: a backend's side, or the plain copy."""

    def dispatch(self) -> None: ...

    def combine(self) -> None: ...


class SharedBarrier:
    """Ranks of one machine, that are about to arrive, meet in a few microseconds.

    A word of shared memory for each rank, which it alone writes. Waits by yielding the core.
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
        """Collective.

        Raises:
            RankError: a rank did not come in time.
        """
        self._round += 1
        self._words[self._mine] = self._round
        everyone = self._words[:: self.STRIDE]
        give_up = time.monotonic() + self._timeout_s
        while min(everyone.tolist()) < self._round:
            os.sched_yield()
            if time.monotonic() > give_up:
                late = [r for r, done in enumerate(everyone.tolist()) if done < self._round]
                raise RankError(f"ranks {late} did not come within {self._timeout_s:.0f} s")


class CpuClock:
    """Wall clock of a CPU rank, in microseconds.

    Ranks leave the shared barrier together. gloo's, where there is no other, lets them go one after
    the other and leaves its threads at work: on 2 cores what followed took all backends longer,
    4 ranks of ours with 1 token 1.5 ms instead of 0.7.
    """

    def __init__(self, group: Any, shared: SharedBarrier | None) -> None:
        self._group, self._shared = group, shared
        self._samples: list[float] = []

    def prepare(self, body: Body) -> Body:
        """What to time in the place of a body: on a GPU perhaps the replay of its graph."""
        return body

    def align(self) -> None:
        """Returns on all ranks at once, as far as that can be. Collective."""
        if self._shared is not None:
            self._shared.wait()
        else:
            dist.barrier(self._group)

    def time(self, body: Body) -> None:
        """One sample; it may be known only at the end."""
        start = time.perf_counter()
        body()
        self._samples.append((time.perf_counter() - start) * 1e6)

    def finish(self) -> list[float]:
        """Of all samples since the last call, in their order."""
        samples, self._samples = self._samples, []
        return samples

    def kernels(self, side: Verbs, iterations: int) -> dict[str, Any]:
        """What the verbs' time is made of, as far as it can be told; or empty. Collective."""
        tell: Any = getattr(side, "kernel_times", None)
        return {} if tell is None else tell(self.align, iterations)


class GpuClock(CpuClock):
    """Events of a GPU rank, nothing of ours in L2, graphs where the options say so. Not run yet.

    Ranks pass gloo's barrier, then each flushes its L2. How far apart the barrier leaves them is in
    the times, and the last rank's time has none of it.
    """

    def __init__(self, options: Options, group: Any, device: torch.device) -> None:
        super().__init__(group, None)
        self._clock = cuda_clock.Clock(device, options.iters, options.warmup)
        self._graph, self._word = options.cuda_graph, torch.zeros(1)
        self._pairs: list[tuple[Any, Any]] = []

    def prepare(self, body: Body) -> Body:
        if not self._graph:
            return body
        self._meet()
        return self._clock.replay(body)  # the check has run it, so nothing is made here

    def _meet(self) -> None:
        self._clock.wait()
        dist.all_reduce(self._word, group=self._group)  # of CPU tensors: gloo's

    def align(self) -> None:
        self._meet()
        self._clock.flush()

    def time(self, body: Body) -> None:
        self._pairs.append(self._clock.time_once(body))

    def finish(self) -> list[float]:
        self._clock.wait()
        pairs, self._pairs = self._pairs, []
        return [self._clock.microseconds(*pair) for pair in pairs]

    def kernels(self, side: Verbs, iterations: int) -> dict[str, Any]:
        return {"both": self._clock.kernels(_bodies(side)[2])}


class PlainCopy:
    """The ceiling: as many bytes as these ranks' put rows have, copied once, private to private."""

    def __init__(self, traffic: Traffic, ranks: range, device: torch.device | str) -> None:
        self._sizes = {p: sum(traffic.put_bytes(p, rank) for rank in ranks) for p in PHASES}
        most = max(1, *self._sizes.values())
        self._source = torch.randint(0, 255, (most,), dtype=torch.uint8, device=device)
        self._target = torch.zeros_like(self._source)

    def _copy(self, phase: str) -> None:
        size = self._sizes[phase]
        self._target[:size].copy_(self._source[:size])

    def dispatch(self) -> None:
        self._copy("dispatch")

    def combine(self) -> None:
        self._copy("combine")

    def both(self) -> None:
        self._copy("both")


def take_turns(
    sides: Mapping[str, Verbs], options: Options, clock: CpuClock, progress: Callable[[], Any]
) -> dict[str, Samples]:
    """Samples of every side, `[iterations, 1]` of this rank. Collective.

    In every iteration each side does dispatch, combine, and both; each comes first in some.
    """
    # In the order of a layer's calls: a graph's capture runs the Python of the body.
    bodies = {name: _prepared(side, clock) for name, side in sides.items()}
    names, order = list(bodies), list[str]()
    for iteration in range(-options.warmup, options.iters):
        if iteration == 0:
            clock.finish()  # the warm-up's
            order.clear()
        turns = common.order_of(names, iteration)
        order += turns
        for name in turns:
            for body in bodies[name]:
                clock.align()
                clock.time(body)
        progress()
    times = torch.tensor(clock.finish(), dtype=torch.float64).view(len(order), len(PHASES), 1)
    found: dict[str, Samples] = {}
    for name in names:
        mine = times[[turn for turn, who in enumerate(order) if who == name]]
        found[name] = dict(zip(PHASES, mine.unbind(1), strict=True))
    return found


def _bodies(side: Verbs) -> list[Body]:
    """One for each of PHASES."""

    def both() -> None:
        side.dispatch()
        side.combine()

    return [side.dispatch, side.combine, both]


def _prepared(side: Verbs, clock: CpuClock) -> list[Body]:
    bodies = _bodies(side)
    return [clock.prepare(b) for b in bodies] if getattr(side, "capturable", True) else bodies


def all_ranks(samples: Samples, ep_size: int, group: Any) -> Samples:
    """Samples of this rank as those of all, `[iterations, ranks]`. Collective."""
    found: Samples = {}
    for phase, mine in samples.items():
        everyone = [torch.empty_like(mine) for _ in range(ep_size)]
        dist.all_gather(everyone, mine.contiguous(), group=group)
        found[phase] = torch.cat(everyone, dim=1)
    return found
