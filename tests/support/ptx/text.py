"""Reads PTX: a module's variables and entries, with labels, scopes and source lines resolved.

Only what NVRTC writes for kernels is read; whatever else stands there is an error that names it.
Registers of a nested block `{ .reg .b32 x; ... }` get names of their own, so that an entry is one
flat list of statements.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

#: Bytes of a value of each fundamental type.
TYPE_BYTES = {f"{kind}{bits}": bits // 8 for kind in "bus" for bits in (8, 16, 32, 64)} | {
    "pred": 1,
    "b128": 16,
    "f16": 2,
    "f32": 4,
    "bf16": 2,
}
#: Directives that say nothing about what a program computes.
_IGNORED = (".pragma", ".maxntid", ".reqntid", ".minnctapersm", ".maxnreg", ".noreturn", ".weak")

_LABEL = re.compile(r"\s*([$%\w]+):(?!:)")
_NAME = r"[$%_a-zA-Z][$\w]*"
_VARIABLE = re.compile(
    rf"\.(?P<space>shared|global|const|param)\s+(?:\.(?:attribute|ptr)\S*\s+)?"
    rf"(?:\.align\s+(?P<align>\d+)\s+)?\.(?P<type>\w+)\s+"
    # What a pointer points to says nothing about the parameter itself.
    r"(?:\.ptr\s+(?:\.(?:global|shared|const|local)\s+)?(?:\.align\s+\d+\s+)?)?"
    rf"(?P<name>{_NAME})"
    rf"(?:\[(?P<count>\d*)\])?(?:\s*=\s*(?P<initial>.*))?$",
    re.DOTALL,
)
_REGISTERS = re.compile(r"\.reg\s+\.(\w+)\s+(.*)$", re.DOTALL)
_LINE = (".loc ", ".loc\t")
_LOC = re.compile(r"\.loc\s+\d+\s+(\d+)")
_INSTRUCTION = re.compile(r"(?:@(!?)([%$\w]+)\s+)?([a-z][\w.:]*)\s*(.*)$", re.DOTALL)


class UnknownPtxError(ValueError):
    """PTX that this reader or the table of opcodes does not know; the message names it."""

    def __init__(self, what: str, line: int, text: str) -> None:
        super().__init__(f"PTX line {line}: {what}: {' '.join(text.split())}")


@dataclass(frozen=True)
class Variable:
    """A variable of a state space.

    Attributes:
        size: bytes; 0 where the launch says how many (`extern .shared x[]`).
        initial: the text after `=`, or "".
    """

    space: str
    name: str
    size: int
    align: int
    type: str
    initial: str = ""


@dataclass(frozen=True)
class Instruction:
    """One instruction of an entry.

    Attributes:
        opcode: without modifiers, such as "ld".
        modifiers: in their order, such as ("global", "v4", "u32").
        guard: the register of its predicate, or "".
        negated: of the guard.
        line: in the PTX text.
        source_line: in the text that NVRTC compiled, by -lineinfo; 0: not known.
    """

    opcode: str
    modifiers: tuple[str, ...]
    operands: tuple[str, ...]
    guard: str
    negated: bool
    line: int
    source_line: int
    text: str


@dataclass(frozen=True)
class Label:
    name: str


@dataclass
class Entry:
    """One kernel; `registers`: name -> type, such as "b32"."""

    name: str
    params: list[Variable]
    registers: dict[str, str] = field(default_factory=dict)
    variables: list[Variable] = field(default_factory=list)
    body: list[Instruction | Label] = field(default_factory=list)


@dataclass
class Module:
    variables: list[Variable] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)


def parse(ptx: str) -> Module:
    """Read a module.

    Raises:
        UnknownPtxError: a directive or a form of statement that the reader does not know.
    """
    return _Parser(ptx).module()


@dataclass(frozen=True)
class _Statement:
    kind: str  # "text" (without its semicolon), "{", "}", "label", "loc"
    text: str
    line: int


def _statements(ptx: str) -> Iterator[_Statement]:
    """Split into statements. Braces are blocks at the beginning of a statement only."""
    ptx = re.sub(r"/\*.*?\*/", lambda found: "\n" * found[0].count("\n"), ptx, flags=re.DOTALL)
    ptx = re.sub(r"//[^\n]*", "", ptx)
    position, line = 0, 1
    while True:
        blank = re.compile(r"\s*").match(ptx, position)
        assert blank is not None
        line += blank[0].count("\n")
        position = blank.end()
        if position == len(ptx):
            return
        start = line
        if ptx[position] in "{}":
            yield _Statement(ptx[position], "", start)
            position += 1
            continue
        label = _LABEL.match(ptx, position)
        if label is not None:
            yield _Statement("label", label[1], start)
            position = label.end()
            continue
        end = _end_of_statement(ptx, position)
        text = ptx[position:end]
        line += text.count("\n")
        position = end + (ptx[end : end + 1] == ";")
        yield _Statement("loc" if text.startswith(_LINE) else "text", text.strip(), start)


def _end_of_statement(ptx: str, start: int) -> int:
    """Return where a statement ends: its semicolon, its line, or the brace of what it opens."""
    if ptx.startswith((".version", ".target", ".address_size", *_LINE, ".file"), start):
        return ptx.find("\n", start)
    if ptx.startswith(".section", start):
        return ptx.index("}", start) + 1
    if re.compile(r"(\.visible\s+|\.weak\s+|\.extern\s+)*\.(entry|func)\b").match(ptx, start):
        return min(found for found in (ptx.find("{", start), ptx.find(";", start)) if found >= 0)
    end = ptx.find(";", start)
    return len(ptx) if end < 0 else end


class _Parser:
    def __init__(self, ptx: str) -> None:
        self._statements = _statements(ptx)
        self._module = Module()
        self._scopes: list[dict[str, str]] = []
        self._blocks = 0
        self._source_line = 0

    def module(self) -> Module:
        for statement in self._statements:
            text = statement.text
            if statement.kind != "text":
                raise UnknownPtxError("outside of an entry", statement.line, statement.kind)
            if re.match(r"(\.visible\s+|\.weak\s+)*\.entry\b", text):
                self._entry(statement)
            elif text.startswith((".version", ".target", ".address_size", ".file", ".section")):
                pass
            elif re.match(r"(\.extern\s+)?\.func\b", text):
                self._skip_function(text)
            else:
                self._module.variables.append(_variable(text, statement.line))
        return self._module

    def _skip_function(self, text: str) -> None:
        """A declaration: an error only if somebody calls it."""
        if not text.startswith(".extern"):
            raise UnknownPtxError("a function that is no entry", 0, text[:60])

    def _entry(self, head: _Statement) -> None:
        found = re.search(rf"\.entry\s+({_NAME})\s*(?:\((.*)\))?(.*)$", head.text, re.DOTALL)
        if found is None:
            raise UnknownPtxError("an entry without a name", head.line, head.text)
        listed = [text for text in re.split(r",\s*(?=\.param)", found[2] or "") if text.strip()]
        params = [_variable(text.strip(), head.line) for text in listed]
        for directive in re.findall(r"\.\w+", found[3]):
            if directive not in _IGNORED:
                raise UnknownPtxError("unknown directive", head.line, directive)
        entry = Entry(found[1], params)
        self._scopes, self._source_line = [], 0
        for statement in self._statements:
            self._inside(entry, statement)
            if not self._scopes:
                break
        self._module.entries.append(entry)

    def _inside(self, entry: Entry, statement: _Statement) -> None:
        text, line = statement.text, statement.line
        if statement.kind == "{":
            self._scopes.append({})
            self._blocks += 1
        elif statement.kind == "}":
            self._scopes.pop()
        elif statement.kind == "label":
            entry.body.append(Label(text))
        elif statement.kind == "loc":
            found = _LOC.match(text)
            self._source_line = int(found[1]) if found else 0
        elif text.startswith(".reg"):
            self._declare(entry, text, line)
        elif text.startswith((".shared", ".param")):
            entry.variables.append(_variable(text, line))
        elif text.startswith("."):
            if text.split()[0] not in _IGNORED:
                raise UnknownPtxError("unknown directive", line, text)
        else:
            entry.body.append(self._instruction(text, line))

    def _declare(self, entry: Entry, text: str, line: int) -> None:
        found = _REGISTERS.match(text)
        if found is None or found[1] not in TYPE_BYTES:
            raise UnknownPtxError("unknown registers", line, text)
        for name in re.split(r"\s*,\s*", found[2].strip()):
            many = re.fullmatch(r"([%$\w]+)<(\d+)>", name)
            names = [f"{many[1]}{n}" for n in range(int(many[2]))] if many else [name]
            for each in names:
                unique = each if len(self._scopes) == 1 else f"{each}@{self._blocks}"
                self._scopes[-1][each] = unique
                entry.registers[unique] = found[1]

    def _instruction(self, text: str, line: int) -> Instruction:
        found = _INSTRUCTION.match(text)
        if found is None:
            raise UnknownPtxError("no instruction", line, text)
        opcode, *modifiers = found[3].split(".")
        operands = tuple(self._resolved(operand) for operand in _split(found[4]))
        guard = self._resolved(found[2]) if found[2] else ""
        return Instruction(
            opcode,
            tuple(modifiers),
            operands,
            guard,
            found[1] == "!",
            line,
            self._source_line,
            text,
        )

    def _resolved(self, operand: str) -> str:
        """The operand, with registers of nested blocks renamed."""

        def rename(found: re.Match[str]) -> str:
            for scope in reversed(self._scopes):
                if found[0] in scope:
                    return scope[found[0]]
            return found[0]

        return re.sub(r"(?<![\w.$%])[%$_a-zA-Z][\w$]*", rename, operand)


def _split(operands: str) -> list[str]:
    """Split at commas outside of braces and brackets."""
    parts, depth, current = [], 0, ""
    for character in operands:
        depth += (character in "{[(") - (character in "}])")
        if character == "," and depth == 0:
            parts.append(current.strip())
            current = ""
        else:
            current += character
    return [*parts, current.strip()] if current.strip() else parts


def _variable(text: str, line: int) -> Variable:
    text = re.sub(r"^(\.visible|\.extern|\.weak|\.common)\s+", "", text)
    found = _VARIABLE.match(text)
    if found is None or found["type"] not in TYPE_BYTES:
        raise UnknownPtxError("unknown declaration", line, text[:120])
    element = TYPE_BYTES[found["type"]]
    count = 1 if found["count"] is None else int(found["count"] or 0)
    align = int(found["align"] or element)
    initial = (found["initial"] or "").strip()
    return Variable(found["space"], found["name"], element * count, align, found["type"], initial)
