"""Gives the registers of an entry places in a small file: those that live at one time differ.

A thread's registers lie in memory, and a launch has many threads: NVRTC's PTX has a register for
each value, some thousands of which at most a hundred live at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
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
    """Linear scan over the hulls of live ranges, which are found by data flow."""
    numbers = {name: number for number, name in enumerate(entry.registers)}
    first, last = _hulls(entry, numbers)
    places: dict[str, tuple[int, int]] = {}
    counts: dict[int, int] = {}
    free: dict[int, list[int]] = {}
    ending: dict[int, list[str]] = {}
    by_start: dict[int, list[str]] = {}
    for name in first:
        by_start.setdefault(first[name], []).append(name)
        ending.setdefault(last[name], []).append(name)
    for position in range(len(entry.body)):
        for name in by_start.get(position, []):
            width = max(1, TYPE_BYTES[entry.registers[name]])
            width = 2 if width == 1 and entry.registers[name] != "pred" else width
            spare = free.setdefault(width, [])
            if not spare:
                spare.append(counts.get(width, 0))
                counts[width] = counts.get(width, 0) + 1
            places[name] = (width, spare.pop())
        # What ends here is free from the next position on: an instruction's own registers differ.
        for name in ending.get(position, []):
            width, index = places[name]
            free[width].append(index)
    return Allocation(places, dict(sorted(counts.items(), reverse=True)))


def _hulls(entry: Entry, numbers: dict[str, int]) -> tuple[dict[str, int], dict[str, int]]:
    """First and last position at which each register lives."""
    touched = [
        _touched(each, entry.registers) if isinstance(each, Instruction) else ([], [])
        for each in entry.body
    ]
    blocks = list(_blocks(entry))
    live_in = _live_in(entry, blocks, touched, numbers)
    first: dict[str, int] = {}
    last: dict[str, int] = {}

    def live(name: str, position: int) -> None:
        first[name] = min(first.get(name, position), position)
        last[name] = max(last.get(name, position), position)

    names = list(numbers)
    for number, (start, end, successors) in enumerate(blocks):
        out = 0
        for successor in successors:
            out |= live_in[successor]
        for mask, position in ((live_in[number], start), (out, end - 1)):
            while mask:
                lowest = mask & -mask
                live(names[lowest.bit_length() - 1], position)
                mask ^= lowest
        for position in range(start, end):
            for name in (*touched[position][0], *touched[position][1]):
                live(name, position)
    return first, last


def _blocks(entry: Entry) -> Iterator[tuple[int, int, list[int]]]:
    """(begin, end, successors) of the basic blocks, in order."""
    body = entry.body
    starts = {0} | {n for n, each in enumerate(body) if isinstance(each, Label)}
    starts |= {
        n + 1
        for n, each in enumerate(body)
        if isinstance(each, Instruction) and each.opcode in ("bra", "ret", "exit")
    }
    ordered = sorted(start for start in starts if start < len(body))
    number_at = {start: number for number, start in enumerate(ordered)}
    labels = {each.name: number_at[n] for n, each in enumerate(body) if isinstance(each, Label)}
    for number, start in enumerate(ordered):
        end = ordered[number + 1] if number + 1 < len(ordered) else len(body)
        final = body[end - 1]
        successors = []
        falls_through = True
        if isinstance(final, Instruction) and final.opcode in ("bra", "ret", "exit"):
            falls_through = bool(final.guard)
            if final.opcode == "bra":
                successors.append(labels[final.operands[0]])
        if falls_through and end < len(body):
            successors.append(number + 1)
        yield start, end, successors


def _live_in(
    entry: Entry,
    blocks: list[tuple[int, int, list[int]]],
    touched: list[tuple[list[str], list[str]]],
    numbers: dict[str, int],
) -> list[int]:
    """The registers that live at the begin of each block, as bits."""
    reads, kills = [0] * len(blocks), [0] * len(blocks)
    for number, (start, end, _) in enumerate(blocks):
        for position in range(start, end):
            for name in touched[position][0]:
                bit = 1 << numbers[name]
                reads[number] |= bit & ~kills[number]
            for name in touched[position][1]:
                kills[number] |= 1 << numbers[name]
    live = list(reads)
    changed = True
    while changed:
        changed = False
        for number in reversed(range(len(blocks))):
            out = 0
            for successor in blocks[number][2]:
                out |= live[successor]
            now = reads[number] | (out & ~kills[number])
            if now != live[number]:
                live[number], changed = now, True
    return live
