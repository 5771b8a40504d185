"""Mutants of PTX: one order or scope weakened, one barrier or one wait for the kernel before taken
away, in the table of sites.

A table is changed in place, so nothing is compiled for a mutant. The machine checks every address
that a kernel uses, so no mutant takes the process down with it.
"""

from __future__ import annotations

import bisect
import collections
import contextlib
import re
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from moe_nvlink_plugin.launch.kernel import Build
from tests.support import cpp
from tests.support.ptx import build
from tests.support.ptx.build import Kernel, Site

#: What each order is weakened to.
WEAKER = {
    "release": ("relaxed",),
    "acquire": ("relaxed",),
    "acq_rel": ("relaxed", "acquire", "release"),
}
NARROWER = {"sys": "gpu", "gpu": "cta"}
MEETINGS = ("barrier", "warp_barrier", "grid_wait", "proxy_fence")

#: A function with one of these is an instruction to its callers.
_INSTRUCTION = re.compile(r"asm volatile|__syncthreads|__syncwarp")
_LOC = re.compile(r"\.loc\s+\d+ (\d+ \d+)(?:.*inlined_at \d+ (\d+ \d+))?")


class Mutant(NamedTuple):
    """One change of one site.

    Attributes:
        kernel: of a library; several mutants share it.
        site: what is changed.
        attribute, value: of the site; `removed` is True.
        where: the functions from the kernel's body to the instruction, the statement of the last
            one, and which of the instructions that all this holds for.
    """

    kernel: Kernel
    site: Site
    attribute: str
    value: str | bool
    where: str

    def __str__(self) -> str:
        change = "removed" if self.attribute == "removed" else f"{self.attribute} {self.value}"
        return f"{self.kernel.name}: {self.where}: {change}"

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """The site as the mutant has it, for as long as the block lasts."""
        setattr(self.site, self.attribute, self.value)
        try:
            yield
        finally:
            self.site.reset()


class Finding(NamedTuple):
    """What a mutant was reported as."""

    kind: str
    message: str


def mutants_of(made: Build, architecture: str, change: Callable[[str], str] = str) -> list[Mutant]:
    """Every mutant of a build's kernel, as a machine that checks races runs it.

    change: made to the kernel's text before.
    """
    text = change(made.text())
    ptx = build.ptx_of(text, architecture)
    kernel = build.load(ptx, races=True)[made.kernel.entry]
    source = _Source(text, ptx)
    places = _numbered([source.where(site) for site in kernel.sites])
    return [
        Mutant(kernel, site, attribute, value, where)
        for site, where in zip(kernel.sites, places, strict=True)
        for attribute, value in _changes(site)
    ]


def _numbered(places: list[str]) -> list[str]:
    """The same, told apart where they are equal."""
    count = collections.Counter(places)
    seen: collections.Counter[str] = collections.Counter()
    numbered = []
    for place in places:
        seen[place] += 1
        which = f" ({seen[place]} of {count[place]})" if count[place] > 1 else ""
        numbered.append(place + which)
    return numbered


def _changes(site: Site) -> Iterator[tuple[str, str | bool]]:
    if site.kind in MEETINGS:
        yield "removed", True
    for order in WEAKER.get(site.order, ()):
        yield "order", order
    if site.scope in NARROWER:
        yield "scope", NARROWER[site.scope]


def find(mutant: Mutant, runs: Iterable[Callable[[], None]]) -> Finding | None:
    """What the runs report of a mutant."""
    with mutant.applied():
        return report_of(runs)


def report_of(runs: Iterable[Callable[[], None]]) -> Finding | None:
    """What the first of the runs reports that reports anything.

    A run raises what the machine finds, or AssertionError for a wrong result. It may also raise
    what torch does with indices that a mutant has spoilt.
    """
    for run in runs:
        try:
            run()
        except Exception as error:
            return Finding(type(error).__name__, str(error))
    return None


class _Source:
    """Where instructions come from, by -lineinfo: functions that NVRTC inlined into each other."""

    def __init__(self, text: str, ptx: str) -> None:
        self._lines = text.split("\n")
        plain = cpp.plain(text)
        functions = list(cpp.functions(plain))
        starts = [plain.count("\n", 0, each.start) + 1 for each in functions]
        self._functions = list(zip(starts, (each.name for each in functions), strict=True))
        self._instructions = {
            each.name for each in functions if _INSTRUCTION.search(plain, each.start, each.end)
        }
        self._chains: list[tuple[int, list[int]]] = [(0, [])]  # (line of the PTX, source lines)
        caller: dict[str, str | None] = {}
        for number, line in enumerate(ptx.split("\n"), 1):
            if found := _LOC.search(line):
                caller[found[1]] = found[2]
                self._chains.append((number, list(_chain(found[1], caller))))

    def where(self, site: Site) -> str:
        at = bisect.bisect(self._chains, site.line, key=lambda each: each[0]) - 1
        frames = [
            (name, line)
            for line in self._chains[at][1]
            if (name := self._function_at(line)) not in self._instructions
        ]
        names = dict.fromkeys(name for name, _ in reversed(frames))
        statement = cpp.COMMENT.sub("", self._lines[frames[0][1] - 1]).strip() if frames else ""
        return f"{' > '.join(names)}: {statement}"

    def _function_at(self, line: int) -> str:
        at = bisect.bisect(self._functions, line, key=lambda each: each[0]) - 1
        return self._functions[at][1] if at >= 0 else ""


def _chain(place: str | None, caller: dict[str, str | None]) -> Iterator[int]:
    """Source lines from an instruction to the kernel's body."""
    while place is not None:
        yield int(place.split()[0])
        place = caller.get(place)
