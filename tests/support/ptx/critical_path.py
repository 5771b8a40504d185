"""Reads the clock of a machine: how long launches take, and what their ends waited for.

    clock = Clock(machine, costs("gb200"))
    machine.launch(...)
    machine.run()
    for step in clock.path(clock.launches()[-1]): print(step)

All times are modelled, by the table in costs.py.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from .build import RawSite
from .machine import Machine

#: As in runtime/clock.h, enum StepKind.
KINDS = (
    "launch",
    "kernel before",
    "shared load",
    "local load",
    "remote load",
    "atomic",
    "local store acknowledged",
    "remote store acknowledged",
    "flight of a word",
    "poll",
    "fence",
    "acquire",
    "barrier",
    "warp meeting",
    "registers",
)


class _Step(ctypes.Structure):
    _fields_ = [
        ("before", ctypes.c_uint32),
        ("kind", ctypes.c_uint32),
        ("begin", ctypes.c_double),
        ("end", ctypes.c_double),
        ("queued", ctypes.c_double),
        ("site", ctypes.c_void_p),
        ("kernel", ctypes.c_char_p),
        ("rank", ctypes.c_int32),
        ("launch", ctypes.c_uint32),
        ("cta", ctypes.c_uint32),
        ("thread", ctypes.c_uint32),
    ]


class Launch(ctypes.Structure):
    """A launch that has ended; times in ns since the first launch was enqueued."""

    _fields_ = [
        ("rank", ctypes.c_int32),
        ("number", ctypes.c_uint32),
        ("begin_ns", ctypes.c_double),
        ("end_ns", ctypes.c_double),
        ("step", ctypes.c_uint32),
    ]


class Mirror(NamedTuple):
    """Places of peers, and where those store what this rank stores there; as in clock.h.

    Attributes:
        stored, stored_stride: address at the first peer, and bytes from one peer's to the next's.
        also, also_stride: the same of the places in this rank's memory.
        bytes: of each place.
        peers: how many.
    """

    stored: int
    stored_stride: int
    also: int
    also_stride: int
    bytes: int
    peers: int


@dataclass(frozen=True)
class Step:
    """A wait on the critical path, or the instructions between two waits (kind "instructions").

    Attributes:
        queued_ns: of the wait, spent behind others on a link or a port.
        line, source_line: in the PTX and in the text that NVRTC compiled; 0: none.
    """

    kind: str
    begin_ns: float
    end_ns: float
    queued_ns: float
    rank: int
    launch: int
    cta: int
    thread: int
    kernel: str
    line: int
    source_line: int
    text: str

    @property
    def ns(self) -> float:
        return self.end_ns - self.begin_ns

    def __str__(self) -> str:
        where = f"rank {self.rank} CTA {self.cta} thread {self.thread}"
        site = f"PTX line {self.line} (source line {self.source_line}): {self.text}"
        queued = f", {self.queued_ns:.0f} of it queued" if self.queued_ns > 0.5 else ""
        told = f"{self.ns:7.0f} ns  {self.kind}{queued}, {where}"
        return f"{told}, {site}" if self.line else told


class Clock:
    """The virtual time of a machine that was made with clock=True.

    Args:
        costs: of costs.py; before the machine's first run.
        keeps_steps: paths can be read; off for large batches, whose steps fill memory.
    """

    def __init__(
        self, machine: Machine, costs: Mapping[str, float], *, keeps_steps: bool = True
    ) -> None:
        self._runtime, self._handle = machine._runtime, machine._handle
        for name, result in (
            ("costs", ctypes.c_char_p),
            ("steps", ctypes.POINTER(_Step)),
            ("launches", ctypes.POINTER(Launch)),
        ):
            getattr(self._runtime, f"ptx_clock_{name}").restype = result
        names = self._runtime.ptx_clock_costs().decode().split()
        if sorted(names) != sorted(costs):
            raise ValueError(f"clock.h and the table differ: {sorted(set(names) ^ set(costs))}")
        values = (ctypes.c_double * len(names))(*(costs[name] for name in names))
        self._runtime.ptx_clock_set(ctypes.c_void_p(self._handle), values)
        self._runtime.ptx_clock_keep_steps(ctypes.c_void_p(self._handle), int(keeps_steps))

    def mirror(self, mirror: Mirror) -> None:
        """Let what is stored to peers' places be stored to this rank's too, at the same time.

        So one rank stands for all, where they do the same at the same time: what it stores to a
        peer's memory, the peer stores to this rank's.
        """
        self._runtime.ptx_clock_mirror(
            ctypes.c_void_p(self._handle), (ctypes.c_uint64 * len(mirror))(*mirror)
        )

    def restart(self) -> None:
        """Let time begin again, at 0 for every rank; all streams are empty."""
        self._runtime.ptx_clock_restart(ctypes.c_void_p(self._handle))

    def launches(self) -> list[Launch]:
        """Return the launches that have ended, in the order of their ends."""
        return [Launch.from_buffer_copy(each) for each in self._list("launches")]

    def path(self, launch: Launch) -> list[Step]:
        """Return what the end of a launch waited for, first to last; the times are contiguous."""
        steps = self._list("steps")
        found: list[Step] = []
        until, number = launch.end_ns, launch.step
        while number:
            raw = steps[number]
            # The wait may have begun before what came last before it: what overlaps counts once.
            before = steps[raw.before].end if raw.before else 0.0
            if until > raw.end + 1e-9:
                found.append(_decoded(raw, "instructions", raw.end, until, 0.0))
            begin = max(raw.begin, before)
            if raw.end > begin:
                found.append(_decoded(raw, KINDS[raw.kind], begin, raw.end, raw.queued))
            until, number = begin, raw.before
        return found[::-1]

    def _list(self, name: str) -> Any:
        count = ctypes.c_uint64()
        get = getattr(self._runtime, f"ptx_clock_{name}")
        first = get(ctypes.c_void_p(self._handle), ctypes.byref(count))
        kind = get.restype._type_
        return ctypes.cast(first, ctypes.POINTER(kind * count.value)).contents


def _decoded(raw: Any, kind: str, begin: float, end: float, queued: float) -> Step:
    site = RawSite.from_address(raw.site) if raw.site and kind != "instructions" else None
    return Step(
        kind=kind,
        begin_ns=begin,
        end_ns=end,
        queued_ns=min(queued, end - begin),
        rank=raw.rank,
        launch=raw.launch,
        cta=raw.cta,
        thread=raw.thread,
        kernel=(raw.kernel or b"").decode(),
        line=site.line if site else 0,
        source_line=site.source_line if site else 0,
        text=site.text.decode() if site else "",
    )


def totals(path: list[Step]) -> dict[str, float]:
    """Return kind -> ns of a path, largest first."""
    found: dict[str, float] = {}
    for step in path:
        found[step.kind] = found.get(step.kind, 0.0) + step.ns
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def round_trips(path: list[Step]) -> dict[str, int]:
    """Return kind -> number of waits of a path."""
    return dict(Counter(step.kind for step in path if step.kind != "instructions"))
