"""Time what ranks do together: in turns, from a common start, as often as a limit allows."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from .ways import Way

LEAST_ITERATIONS = 5

#: Ranks begin together this long after they have met: a barrier lets them go one after the other,
#: and the threads of gloo still work then.
_PAUSE_S = 300e-6
#: Cleared before every verb on a GPU: nothing of the rows is left in L2, and the host is ahead.
_FLUSHED_BYTES = 256 * 2**20


class Clock:
    """Times bodies from a common start: by events on a GPU, else by the host's clock."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._device, self._on_gpu = group, device, device.type == "cuda"
        size = _FLUSHED_BYTES if self._on_gpu else 0
        self._flushed = torch.empty(size, dtype=torch.uint8, device=device)

    def time(self, body: Callable[[], Any]) -> tuple[Any, Any]:
        """Run the body between two marks, after a meeting of all ranks. Collective."""
        self.wait()
        start = agreed(self._group, dist.ReduceOp.MAX, time.monotonic())[0] + _PAUSE_S
        latest = time.monotonic() + _PAUSE_S  # another host's clock shows another time
        while time.monotonic() < min(start, latest):
            os.sched_yield()
        self._flushed.zero_()
        begin = self._mark()
        body()
        return begin, self._mark()

    def microseconds(self, begin: Any, end: Any) -> float:
        """Return the time between two marks; on a GPU after `wait`."""
        return float(begin.elapsed_time(end) * 1e3 if self._on_gpu else (end - begin) * 1e6)

    def wait(self) -> None:
        """Wait until the device has done everything. Local."""
        if self._on_gpu:
            torch.cuda.synchronize(self._device)

    def _mark(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        make: Any = torch.cuda.Event  # torch ships no types for it
        event = make(enable_timing=True)
        event.record()
        return event


def iterations(ways: Mapping[str, Way], clock: Clock, group: dist.ProcessGroup, due: float) -> int:
    """Return how often each way can run until `due`, equal on all ranks. Collective.

    It runs each once, to see how long that takes.
    """
    started = time.monotonic()
    in_turns(ways, clock, 1)
    now = time.monotonic()
    left, cost = agreed(group, dist.ReduceOp.MIN, due - now, started - now)
    return max(LEAST_ITERATIONS, int(left / -cost))


def in_turns(ways: Mapping[str, Way], clock: Clock, iterations: int) -> torch.Tensor:
    """Return this rank's microseconds, `[ways, phases, iterations]` float64. Collective."""
    names = list(ways)
    marks: list[list[Any]] = [[] for _ in names]
    for iteration in range(iterations):
        for turn in range(len(names)):
            place = (turn + iteration) % len(names)
            way = ways[names[place]]
            marks[place].append([clock.time(way.dispatch), clock.time(way.combine)])
    clock.wait()
    times = [[[clock.microseconds(*pair) for pair in pairs] for pairs in of] for of in marks]
    return torch.tensor(times, dtype=torch.float64).transpose(1, 2).contiguous()


def agreed(group: dist.ProcessGroup, op: Any, *values: float) -> list[float]:
    """Return all ranks' values reduced, one by one. Collective."""
    word = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(word, op=op, group=group)
    found: list[float] = word.tolist()
    return found
