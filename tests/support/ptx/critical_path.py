"""Reads the clock of a machine: how long launches take, and what their ends waited for.

    clock = Clock(machine, costs("gb200"))
    machine.launch(...)
    machine.run()
    for step in clock.launches()[-1].path: print(step)

All times are modelled, by the table in costs.py.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from .build import RawSite
from .machine import Machine


class Mirror(NamedTuple):
    """A place of a peer, and where the peer stores what this rank stores there; as in clock.h."""

    stored: int
    also: int
    bytes: int


class _Mirror(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in Mirror._fields]


class _Step(ctypes.Structure):
    """As in clock.h."""


_Step._fields_ = [
    ("before", ctypes.POINTER(_Step)),
    ("kind", ctypes.c_char_p),
    ("begin_ns", ctypes.c_double),
    ("end_ns", ctypes.c_double),
    ("site", ctypes.POINTER(RawSite)),
    ("rank", ctypes.c_int32),
    ("cta", ctypes.c_uint32),
    ("thread", ctypes.c_uint32),
]


class Step(NamedTuple):
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
    cta: int
    thread: int
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


class Launch(NamedTuple):
    """A launch that has ended, in ns since time began, and what its end waited for.

    Attributes:
        path: first to last; the times are contiguous.
    """

    rank: int
    end_ns: float
    path: list[Step]


class Clock:
    """The virtual time of a machine that was made with clock=True; it begins at 0 for every rank.

    Args:
        machine: its streams are empty.
        costs: of costs.py.
        mirrors: what is stored to these places is stored to this rank's too, at the same time. So
            one rank stands for all, where they do the same at the same time.
    """

    def __init__(
        self, machine: Machine, costs: Mapping[str, float], mirrors: Sequence[Mirror] = ()
    ) -> None:
        runtime, self._handle = machine._runtime, ctypes.c_void_p(machine._handle)
        runtime.ptx_clock_costs.restype = ctypes.c_char_p
        names = runtime.ptx_clock_costs().decode().split()
        if sorted(names) != sorted(costs):
            raise ValueError(f"clock.h and the table differ: {sorted(set(names) ^ set(costs))}")
        values = (ctypes.c_double * len(names))(*(costs[name] for name in names))
        places = (_Mirror * len(mirrors))(*(_Mirror(*each) for each in mirrors))
        runtime.ptx_clock_begin(self._handle, values, places, ctypes.c_uint64(len(mirrors)))
        self._end = runtime.ptx_clock_end
        self._end.restype = ctypes.POINTER(_Step)
        #: Kind of a step -> what it takes without a queue.
        self._alone_ns = {
            f"{place} {what}": costs[f"{cost}_ns"]
            for place, cost in (("local", "l2"), ("remote", "remote"))
            for what in ("load", "store acknowledged")
        }

    def launches(self) -> list[Launch]:
        """Return the launches that have ended, in the order of their ends."""
        found: list[Launch] = []
        while end := self._end(self._handle, ctypes.c_uint64(len(found))):
            raw = end.contents
            found.append(Launch(raw.rank, raw.end_ns, self._path(raw)))
        return found

    def _path(self, last: Any) -> list[Step]:
        found: list[Step] = []
        raw, until = last, last.end_ns
        while raw is not None:
            before = raw.before.contents if raw.before else None
            # The wait may have begun before what came last before it: what overlaps counts once.
            begin = max(raw.begin_ns, before.end_ns if before else 0.0)
            if until > raw.end_ns + 1e-9:
                found.append(_shown(raw, "instructions", raw.end_ns, until))
            if raw.end_ns > begin:
                kind = raw.kind.decode()
                queued = raw.end_ns - raw.begin_ns - self._alone_ns.get(kind, float("inf"))
                found.append(_shown(raw, kind, begin, raw.end_ns, max(0.0, queued), raw.site))
            raw, until = before, begin
        return found[::-1]


def _shown(
    raw: Any, kind: str, begin: float, end: float, queued: float = 0.0, site: Any = None
) -> Step:
    of = site.contents if site else RawSite(b"", 0, 0)
    return Step(
        kind=kind,
        begin_ns=begin,
        end_ns=end,
        queued_ns=min(queued, end - begin),
        rank=raw.rank,
        cta=raw.cta,
        thread=raw.thread,
        line=of.line,
        source_line=of.source_line,
        text=of.text.decode(),
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
