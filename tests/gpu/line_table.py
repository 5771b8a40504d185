"""The source line of each instruction, out of machine code that was compiled with -lineinfo.

    lines_of(report.read_bytes())["moe_nvlink_emulated_dispatch"].at(0x1230)

`ncu --print-source cuda` prints the source alone. Its report holds the machine code as it is, with
DWARF's table of lines (version 2, which NVRTC writes), and its view of instructions has addresses.
Of inlined code the table names the innermost line.
"""

from __future__ import annotations

import bisect
import struct
from collections.abc import Iterator
from typing import NamedTuple

_ELF = b"\x7fELF"
#: Standard opcodes of a program for lines, and one extended opcode.
_COPY, _ADVANCE_PC, _ADVANCE_LINE = 1, 2, 3
_CONST_ADD_PC, _FIXED_ADVANCE_PC = 8, 9
_END_SEQUENCE, _SET_ADDRESS = 1, 2


class Lines(NamedTuple):
    """Of one function: offsets in ascending order, and the line from each of them on."""

    offsets: list[int]
    lines: list[int]

    def at(self, offset: int) -> int | None:
        """Return the line of the instruction at an offset from the function's begin."""
        place = bisect.bisect_right(self.offsets, offset) - 1
        return self.lines[place] if place >= 0 else None


class _Section(NamedTuple):
    name: str
    kind: int
    content: bytes


def lines_of(data: bytes) -> dict[str, Lines]:
    """Return name of a function -> its lines, of all machine code in `data`; {} where none has any.

    Raises:
        ValueError, struct.error, LookupError: a table of another version, or one that is cut.
    """
    found: dict[str, Lines] = {}
    start = data.find(_ELF)
    while start >= 0:
        found |= _lines_of_elf(data[start:])
        start = data.find(_ELF, start + 1)
    return found


def _lines_of_elf(elf: bytes) -> dict[str, Lines]:
    sections = list(_sections(elf))
    named = {section.name: section.content for section in sections}
    if ".debug_line" not in named or ".rela.debug_line" not in named:
        return {}
    # Where the table has an address of 0, the linker's entry says of which function it is.
    functions = {}
    for place, info, _addend in struct.iter_unpack("<QQq", named[".rela.debug_line"]):
        (index,) = struct.unpack_from("<H", named[".symtab"], (info >> 32) * 24 + 6)
        functions[place] = sections[index].name.removeprefix(".text.")
    found: dict[str, dict[int, int]] = {}
    for place, offset, line in _rows(named[".debug_line"]):
        # A later row of the same address is of what was inlined there.
        found.setdefault(functions[place], {})[offset] = line
    return {
        name: Lines(sorted(of), [of[offset] for offset in sorted(of)]) for name, of in found.items()
    }


def _sections(elf: bytes) -> Iterator[_Section]:
    (table,) = struct.unpack_from("<Q", elf, 40)
    size, count, names_index = struct.unpack_from("<HHH", elf, 58)
    heads = [struct.unpack_from("<IIQQQQ", elf, table + n * size) for n in range(count)]
    names_at = heads[names_index][4] if heads else 0
    for name, kind, _flags, _address, offset, length in heads:
        begin = names_at + name
        text = elf[begin : elf.index(b"\0", begin)].decode()
        yield _Section(text, kind, elf[offset : offset + length])


class _Reader:
    def __init__(self, data: bytes, place: int) -> None:
        self.data, self.place = data, place

    def take(self, form: str) -> int:
        (value,) = struct.unpack_from(f"<{form}", self.data, self.place)
        self.place += struct.calcsize(f"<{form}")
        return int(value)

    def number(self, *, signed: bool = False) -> int:
        """A number of as many bytes as it needs (LEB128)."""
        value = shift = 0
        while True:
            byte = self.take("B")
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value - (1 << shift) if signed and byte & 64 else value


def _rows(table: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield place of the function's address in the table, offset in the function, line."""
    read = _Reader(table, 0)
    while read.place < len(table):
        end = read.take("I") + read.place
        yield from _Program(read).rows(end)


class _Program:
    """One unit's program, which makes the rows."""

    def __init__(self, read: _Reader) -> None:
        self._read = read
        version, prologue = read.take("H"), read.take("I")
        begin = read.place + prologue
        if version != 2:
            raise ValueError(f"DWARF's table of lines has version {version}, not 2")
        self._unit, _is_stmt, self._base, self._range = (read.take(form) for form in "BBbB")
        self._opcode_base = read.take("B")
        self._arguments = [read.take("B") for _ in range(self._opcode_base - 1)]
        read.place = begin
        self._begin_sequence()

    def _begin_sequence(self) -> None:
        self._function, self._address, self._line = -1, 0, 1

    def rows(self, end: int) -> Iterator[tuple[int, int, int]]:
        while self._read.place < end:
            opcode = self._read.take("B")
            if opcode == 0:
                self._extended()
                continue
            if opcode >= self._opcode_base:
                step = opcode - self._opcode_base
                self._address += step // self._range * self._unit
                self._line += self._base + step % self._range
            elif opcode != _COPY:
                self._standard(opcode)
                continue
            yield self._function, self._address, self._line

    def _extended(self) -> None:
        """Run one that says its length, as NVIDIA's do: which function was inlined."""
        after = self._read.number() + self._read.place
        kind = self._read.take("B")
        if kind == _SET_ADDRESS:
            self._function = self._read.place
            self._address = self._read.take("Q")
        elif kind == _END_SEQUENCE:
            self._begin_sequence()
        self._read.place = after

    def _standard(self, opcode: int) -> None:
        read = self._read
        if opcode == _ADVANCE_PC:
            self._address += read.number() * self._unit
        elif opcode == _ADVANCE_LINE:
            self._line += read.number(signed=True)
        elif opcode == _CONST_ADD_PC:
            self._address += (255 - self._opcode_base) // self._range * self._unit
        elif opcode == _FIXED_ADVANCE_PC:
            self._address += read.take("H")
        else:
            for _ in range(self._arguments[opcode - 1]):
                read.number()
