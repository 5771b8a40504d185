"""Gives the registers of an entry places in a small file: those that live at one time differ.

A thread's registers lie in memory, and a launch has many threads: NVRTC's PTX has a register for
each value, some thousands of which at most a few hundred live at once.
"""

from __future__ import annotations

import heapq
import re
from dataclasses import dataclass

from .text import TYPE_BYTES, Entry, Instruction, Label

#: Opcodes whose first operand is read, or that have no operand that is written.
_NO_TARGET = {"st", "red", "bra", "bar", "fence", "ret", "exit", "trap"} | {
    "griddepcontrol",
    "nanosleep",
}


@dataclass(frozen=True)
class Allocation:
    """Places: name -> (bytes, index in the file of that width); counts: bytes -> registers."""

    places: dict[str, tuple[int, int]]
    counts: dict[int, int]

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def used_by(self, instruction: Instruction) -> tuple[list[int], list[int]]:
        """Numbers of the registers that an instruction reads and writes, over all files."""
        reads, writes = _touched(instruction, self.places)
        return [self._number(each) for each in reads], [self._number(each) for each in writes]

    def _number(self, name: str) -> int:
        width, index = self.places[name]
        return index + sum(count for other, count in self.counts.items() if other > width)


def _touched(
    instruction: Instruction, known: dict[str, tuple[int, int]] | dict[str, str]
) -> tuple[list[str], list[str]]:
    """Registers that are read, and written; a guarded write leaves what was there, so it reads."""

    def names(text: str) -> list[str]:
        return [name for name in re.findall(r"[%$\w@]+", text) if name in known]

    operands = instruction.operands
    is_address = operands and operands[0].startswith("[")
    has_target = instruction.opcode not in _NO_TARGET and operands and not is_address
    writes = names(instruction.operands[0]) if has_target else []
    sources = instruction.operands[1:] if has_target else instruction.operands
    reads = [name for operand in sources for name in names(operand)]
    if instruction.guard:
        reads += [instruction.guard, *writes]
    return list(dict.fromkeys(reads)), writes


def allocate(entry: Entry) -> Allocation:
    """A linear scan: registers whose spans do not overlap may have one place."""
    places: dict[str, tuple[int, int]] = {}
    counts: dict[int, int] = {}
    free: dict[int, list[int]] = {}
    running: list[tuple[int, str]] = []  # (its last position, name), a heap
    spans = _spans(entry)
    for name in sorted(spans, key=lambda name: spans[name]):
        first, last = spans[name]
        # What ends here is free from the next position on: an instruction's own registers differ.
        while running and running[0][0] < first:
            width, index = places[heapq.heappop(running)[1]]
            free[width].append(index)
        kind = entry.registers[name]
        width = 1 if kind == "pred" else max(2, TYPE_BYTES[kind])
        spare = free.setdefault(width, [])
        if not spare:
            spare.append(counts.get(width, 0))
            counts[width] = counts.get(width, 0) + 1
        places[name] = (width, spare.pop())
        heapq.heappush(running, (last, name))
    return Allocation(places, dict(sorted(counts.items(), reverse=True)))


def _spans(entry: Entry) -> dict[str, tuple[int, int]]:
    """Positions from one on to another one between which each register may hold what is needed.

    From where it stands first in the text to where it stands last, and all of each loop that this
    has a part of; but of no loop if it is written and read without a label or a branch between.
    """
    found: dict[str, tuple[int, int]] = {}
    passing: set[str] = set()  # across labels or branches
    labels: dict[str, int] = {}
    loops: list[tuple[int, int]] = []
    since = 0  # the last label or branch
    for position, each in enumerate(entry.body):
        if isinstance(each, Label):
            labels[each.name] = since = position
            continue
        reads, writes = _touched(each, entry.registers)
        passing |= {name for name in reads if name not in found}
        for name in (*reads, *writes):
            first = found.get(name, (position, position))[0]
            found[name] = (first, position)
            if first < since:
                passing.add(name)
        if each.opcode in ("bra", "ret", "exit"):
            since = position + 1
        if each.opcode == "bra" and each.operands[0] in labels:
            loops.append((labels[each.operands[0]], position))
    for name in passing:
        found[name] = _over(loops, *found[name])
    return found


def _over(loops: list[tuple[int, int]], first: int, last: int) -> tuple[int, int]:
    """The span with every loop that it, or what it then is, has a part of."""
    grown = (first, last)
    for begin, end in loops:
        if begin <= last and first <= end:
            grown = (min(grown[0], begin), max(grown[1], end))
    return grown if grown == (first, last) else _over(loops, *grown)
