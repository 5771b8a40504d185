"""Times of work on a GPU: events, CUDA graphs, nothing of ours in L2; and what single kernels take.

On a CPU device the same calls give wall clock, so that code which measures GPUs can be rehearsed.
Nothing here has run on a GPU yet.
"""

from __future__ import annotations

import contextlib
import re
import statistics
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch

Body = Callable[[], None]
Key = TypeVar("Key", bound=Hashable)

#: Larger than any L2, so that writing it leaves nothing of ours there.
FLUSH_BYTES = 256 * 2**20
#: Rounds in one graph of Clock.back_to_back.
ROUNDS_PER_GRAPH = 20
#: Bodies that the profiler sees for one breakdown.
PROFILED_ROUNDS = 20


class Clock:
    """Microseconds of work on one device.

    Args:
        device: "cuda", or "cpu" for a rehearsal in wall clock.
        iterations: samples of each body.
        warmup: calls of each body before the first sample.
    """

    def __init__(self, device: str | torch.device, iterations: int, warmup: int) -> None:
        self._device = torch.device(device)
        self.on_gpu = self._device.type == "cuda"
        self._iterations, self._warmup = iterations, warmup
        size = FLUSH_BYTES if self.on_gpu else 1
        self._flush = torch.empty(size, dtype=torch.uint8, device=self._device)

    def flush(self, value: int = 0) -> None:
        """Fills L2 with what nobody needs.

        The write keeps the GPU busy for longer than the host needs to enqueue what follows it, so
        that between two events around that there is that alone.
        """
        self._flush.fill_(value % 256)

    def flushed(
        self,
        bodies: Mapping[Key, Body],
        before: Mapping[Key, Body] | None = None,
        *,
        in_order: bool = False,
    ) -> dict[Key, list[float]]:
        """Samples of each body, L2 flushed before each call; each comes first in some iterations.

        Args:
            before: what some bodies need done first, which is not timed.
            in_order: the same one comes first always, because bodies need those before them.

        Returns:
            name -> microseconds, one per iteration; entry i of all names is of the same iteration.
        """
        names, prepare = list(bodies), before or {}
        samples: dict[Key, list[Any]] = {name: [] for name in names}
        for iteration in range(self._warmup + self._iterations):
            for turn in range(len(names)):
                name = names[turn if in_order else (turn + iteration) % len(names)]
                prepare.get(name, _nothing)()
                self.flush(iteration)
                pair = self.time_once(bodies[name])
                if iteration >= self._warmup:
                    samples[name].append(pair)
        self.wait()
        return {name: [self.microseconds(*pair) for pair in of] for name, of in samples.items()}

    def time_once(self, body: Body) -> tuple[Any, Any]:
        """Runs the body between two marks; on a GPU it returns before the work is done."""
        start = self.mark()
        body()
        return start, self.mark()

    def mark(self) -> Any:
        """Now: a recorded event, or seconds."""
        if not self.on_gpu:
            return time.perf_counter()
        make: Any = torch.cuda.Event  # torch ships no types for it
        event = make(enable_timing=True)
        event.record()
        return event

    def microseconds(self, start: Any, end: Any) -> float:
        """Between two marks; on a GPU both must have passed (wait)."""
        if self.on_gpu:
            return float(start.elapsed_time(end)) * 1e3
        return float(end - start) * 1e6

    def wait(self) -> None:
        """Until the device has done everything."""
        if self.on_gpu:
            torch.cuda.synchronize(self._device)

    def replay(self, body: Body) -> Body:
        """The body as one launch of a CUDA graph; itself on a CPU.

        Nothing that the body launches may be launched for the first time here, unless it needs no
        memory and no wait.
        """
        return captured(body) if self.on_gpu else body

    def back_to_back(self, body: Body) -> float | None:
        """Microseconds of one body's share of a graph of many, L2 as they leave it; a GPU's alone.

        No gap that the host could make, and no flush: nearer to a decode step than `flushed`.
        """
        if not self.on_gpu:
            return None

        def rounds() -> None:
            for _ in range(ROUNDS_PER_GRAPH):
                body()

        replay = captured(rounds)
        replay()
        samples: list[float] = []
        for _ in range(max(self._iterations // ROUNDS_PER_GRAPH, 5)):
            pair = self.time_once(replay)
            self.wait()
            samples.append(self.microseconds(*pair) / ROUNDS_PER_GRAPH)
        return statistics.median(samples)

    def kernels(self, body: Body, before: Body | None = None) -> dict[str, dict[str, float]]:
        """What each kernel of the body takes, by torch.profiler; empty on a CPU.

        Returns:
            kernel -> {"median_us", "per_round": launches in one call of the body}.
        """
        if not self.on_gpu:
            return {}
        prepare = before or _nothing
        with _profiled() as nothing_of_ours:
            prepare()
            self.flush()
        with _profiled() as seen:
            for _ in range(PROFILED_ROUNDS):
                prepare()
                self.flush()
                body()
        return breakdown(seen, {name for name, _us in nothing_of_ours}, PROFILED_ROUNDS)


def captured(body: Body) -> Body:
    """`body` as a CUDA graph's replay."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()

    def replay() -> None:
        graph.replay()

    return replay


def breakdown(
    seen: Iterable[tuple[str, float]], unwanted: set[str], rounds: int
) -> dict[str, dict[str, float]]:
    """Kernels of so many rounds by their short names, the longest first; without the unwanted."""
    times: dict[str, list[float]] = {}
    for name, us in seen:
        if name not in unwanted:
            times.setdefault(short_name(name), []).append(us)
    found = {
        name: {"median_us": statistics.median(of), "per_round": len(of) / rounds}
        for name, of in times.items()
    }
    return dict(sorted(found.items(), key=lambda item: -item[1]["median_us"]))


def short_name(kernel: str) -> str:
    """Without return type, arguments of templates and functions, and namespaces."""
    plain = kernel.removeprefix("void ")
    while (shorter := re.sub(r"<[^<>]*>|\([^()]*\)", "", plain)) != plain:
        plain = shorter
    return plain.split("::")[-1].strip() or kernel


@contextlib.contextmanager
def _profiled() -> Iterator[list[tuple[str, float]]]:
    """Kernels that the GPU ran inside: filled in (name, microseconds) at the end."""
    from torch.profiler import ProfilerActivity, profile

    found: list[tuple[str, float]] = []
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as taken:
        yield found
        torch.cuda.synchronize()
    events: Any = taken.events()
    found += [
        (event.name, float(event.time_range.elapsed_us()))
        for event in events
        if event.device_type.name == "CUDA"
    ]


def _nothing() -> None:
    pass
