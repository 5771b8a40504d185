"""Time work on a GPU by events and CUDA graphs, with nothing of ours in L2; and each kernel of it.

On a CPU the same calls give wall clock, so that code which measures GPUs can be rehearsed.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import statistics
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from benchmarks import common

# Of queues from the host to the GPU; with the default, 8, a graph's branches may stand behind one
# another. Read when the context is made.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

Body = Callable[[], None]
Key = TypeVar("Key", bound=Hashable)

#: Larger than any L2, so that writing it leaves nothing of ours there.
FLUSH_BYTES = 256 * 2**20
#: Bodies that the profiler sees for one breakdown.
PROFILED_ROUNDS = 20
#: Among the kernels of a breakdown: all of them together, by the GPU's clock.
SPAN = "first start to last end"
#: Streams that torch hands out before it gives one out again.
MOST_STREAMS = 32


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
        """Fill L2 with what nobody needs.

        The write keeps the GPU busy for longer than the host needs to enqueue what follows it. So
        two events around what follows have nothing else between them.
        """
        self._flush.fill_(value % 256)

    def flushed(
        self,
        bodies: Mapping[Key, Body],
        before: Mapping[Key, Body] | None = None,
        *,
        in_order: bool = False,
    ) -> dict[Key, list[float]]:
        """Time each body, L2 flushed before each call; each comes first in some iterations.

        Args:
            before: what some bodies need done first, which is not timed.
            in_order: the first body comes first always, because others need what it leaves.

        Returns:
            name -> microseconds, one per iteration; entry i of all names is of the same iteration.
        """
        names, prepare = list(bodies), before or {}
        samples: dict[Key, list[Any]] = {name: [] for name in names}
        for iteration in range(self._warmup + self._iterations):
            for name in names if in_order else common.order_of(names, iteration):
                prepare.get(name, _nothing)()
                self.flush(iteration)
                pair = self.time_once(bodies[name])
                if iteration >= self._warmup:
                    samples[name].append(pair)
        self.wait()
        return {name: [self.microseconds(*pair) for pair in of] for name, of in samples.items()}

    def time_once(self, body: Body) -> tuple[Any, Any]:
        """Run the body between two marks; on a GPU return before the work is done."""
        start = self.mark()
        body()
        return start, self.mark()

    def mark(self) -> Any:
        """Return what stands for now: a recorded event, or seconds."""
        if not self.on_gpu:
            return time.perf_counter()
        make: Any = torch.cuda.Event  # torch ships no types for it
        event = make(enable_timing=True)
        event.record()
        return event

    def microseconds(self, start: Any, end: Any) -> float:
        """Return the time between two marks; on a GPU both must have passed (wait)."""
        if self.on_gpu:
            return float(start.elapsed_time(end)) * 1e3
        return float(end - start) * 1e6

    def wait(self) -> None:
        """Wait until the device has done everything."""
        if self.on_gpu:
            torch.cuda.synchronize(self._device)

    def replay(self, body: Body) -> Body:
        """Return the body as one launch of a CUDA graph; itself on a CPU.

        Nothing that the body launches may be launched for the first time here, unless it needs no
        memory and no wait.
        """
        return captured(body) if self.on_gpu else body

    def kernels(self, body: Body, before: Body | None = None) -> dict[str, dict[str, float]]:
        """Return `breakdown` of the body's kernels, by torch.profiler; on a CPU nothing."""
        if not self.on_gpu:
            return {}
        prepare = before or _nothing
        with _profiled() as seen:
            self.flush()
            for _ in range(PROFILED_ROUNDS):
                prepare()
                self.flush()
                body()
                self.flush()
        return breakdown(seen, PROFILED_ROUNDS)


def captured(body: Body) -> Body:
    """Return the replay of a CUDA graph of `body`."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()

    def replay() -> None:
        graph.replay()

    return replay


def forked(streams: Sequence[Any], *verbs: Callable[[int], None]) -> Body:
    """Return a body to be captured: a branch per rank, each with all verbs, that start together."""

    def body() -> None:
        here = torch.cuda.current_stream()
        for stream in streams:
            stream.wait_stream(here)
        for rank, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                for verb in verbs:
                    verb(rank)
        for stream in streams:
            here.wait_stream(stream)

    return body


def on_branches(device: torch.device, ranks: int, *verbs: Callable[[int], None]) -> Body:
    """Return the verbs of so many ranks as one graph, a branch and a stream for each rank.

    One replay starts them all. So nothing is allocated while a rank waits for another, and the
    figure has none of the host's time for one launch after the other.
    """
    make: Any = torch.cuda.Stream  # torch ships no types for it
    return captured(forked([make(device) for _ in range(ranks)], *verbs))


class Seen(NamedTuple):
    """One kernel, as the profiler saw it: microseconds of the GPU's clock."""

    name: str
    start_us: float
    end_us: float


def breakdown(seen: Sequence[Seen], rounds: int) -> dict[str, dict[str, float]]:
    """Return what the kernels between every second and third flush take.

    Args:
        seen: a flush; then in every round what comes before, a flush, the body, a flush.

    Returns:
        SPAN -> quartiles over the rounds; then each kernel by its short name, the longest first ->
        {"median_us", "least_us", "per_round": launches in one round}. A kernel that waits for its
        peers has their lateness in its time; least_us is of a rank that came last.

    Raises:
        ValueError: the profiler has lost a flush, so nobody knows whose the kernels are.
    """
    kernels = sorted(seen, key=lambda one: one.start_us)
    flushes = [place for place, one in enumerate(kernels) if one.name == kernels[0].name]
    between = [kernels[one + 1 : next_one] for one, next_one in itertools.pairwise(flushes)]
    bodies = between[1::2]
    if len(flushes) != 2 * rounds + 1 or not all(bodies):
        raise ValueError(
            f"the profiler saw {len(flushes)} flushes and {sum(map(bool, bodies))} bodies of "
            f"{rounds}, which needs {2 * rounds + 1} and all; leave out --kernel_breakdown"
        )
    span = common.summary(max(one.end_us for one in of) - of[0].start_us for of in bodies)
    del span["min_us"]
    times: dict[str, list[float]] = {}
    for one in itertools.chain(*bodies):
        times.setdefault(short_name(one.name), []).append(one.end_us - one.start_us)
    found = [
        {"median_us": statistics.median(of), "least_us": min(of), "per_round": len(of) / rounds}
        for of in times.values()
    ]
    named = zip(times, found, strict=True)
    return {SPAN: span, **dict(sorted(named, key=lambda item: -item[1]["median_us"]))}


def short_name(kernel: str) -> str:
    """Strip return type, arguments of templates and functions, and namespaces."""
    plain = kernel.removeprefix("void ")
    while (shorter := re.sub(r"<[^<>]*>|\([^()]*\)", "", plain)) != plain:
        plain = shorter
    return plain.split("::")[-1].strip() or kernel


@contextlib.contextmanager
def _profiled() -> Iterator[list[Seen]]:
    """Yield a list, and fill it at the end with the kernels that the GPU ran inside."""
    from torch.profiler import ProfilerActivity, profile

    found: list[Seen] = []
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as taken:
        yield found
        torch.cuda.synchronize()
    events: Any = taken.events()
    found += [
        Seen(event.name, float(event.time_range.start), float(event.time_range.end))
        for event in events
        if event.device_type.name == "CUDA"
    ]


def _nothing() -> None:
    pass
