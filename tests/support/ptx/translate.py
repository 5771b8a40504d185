"""Makes C++ of a PTX module: a resumable function and a table of sites for each entry."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from . import opcodes
from .registers import Allocation, allocate
from .text import TYPE_BYTES, Entry, Instruction, Label, Module, UnknownPtxError, Variable, parse

_SPECIAL = {
    **{f"%tid.{axis}": f"t.tid[{n}]" for n, axis in enumerate("xyz")},
    **{f"%ntid.{axis}": f"t.launch->block[{n}]" for n, axis in enumerate("xyz")},
    **{f"%ctaid.{axis}": f"t.cta->id[{n}]" for n, axis in enumerate("xyz")},
    **{f"%nctaid.{axis}": f"t.launch->grid[{n}]" for n, axis in enumerate("xyz")},
    "%smid": "t.cta->number",
    "%dynamic_smem_size": "(t.launch->shared_bytes - t.launch->kernel->shared_bytes)",
    "%globaltimer": "timer_ns(t)",
    "%clock64": "timer_ns(t)",
    "WARP_SZ": "32u",
}
_REGISTER_FILES = {16: "q", 8: "d", 4: "w", 2: "h", 1: "p"}
_CLASSES = {
    "kMemory": ("ld", "st", "atom", "red", "mbarrier", "cp"),
    "kMeeting": ("bar", "shfl", "redux", "vote", "match", "elect", "griddepcontrol"),
    "kFence": ("fence",),
    "kBranch": ("bra", "ret", "exit"),
    "kSlow": ("div", "rem"),
}


def to_cpp(ptx: str) -> str:
    """C++ of a module, to follow generated.h; build.py compiles it.

    Raises:
        UnknownPtxError: the text has what the parser or the table of opcodes does not know.
    """
    module = parse(ptx)
    used = set(re.findall(r"[$%_a-zA-Z][$\w]*", " ".join(_operands(module))))
    variables = {each.name: each for each in module.variables if each.name in used}
    parts = [_initialised(each) for each in variables.values()]
    parts += [Context(entry, variables).text() for entry in module.entries]
    kernels = ",\n".join(f"    kernel_{_safe(entry.name)}" for entry in module.entries)
    memory = "".join(
        f'    {{"{each.name}", {_safe(each.name)}, {max(1, each.size)}}},\n'
        for each in variables.values()
        if each.space != "shared"
    )
    parts.append(
        f"PTX_EXPORT Kernel kernels[] = {{\n{kernels}}};\n"
        f"PTX_EXPORT uint32_t num_kernels = {len(module.entries)};\n"
        f"PTX_EXPORT ModuleMemory variables[] = {{\n{memory}    {{nullptr, nullptr, 0}}}};\n"
    )
    return "".join(parts)


def _operands(module: Module) -> Iterable[str]:
    for entry in module.entries:
        for each in entry.body:
            if isinstance(each, Instruction):
                yield " ".join(each.operands)


def _safe(name: str) -> str:
    return "s_" + re.sub(r"\W", "_", name)


def _initialised(variable: Variable) -> str:
    """A variable of the module in the host's memory; shared ones have none."""
    if variable.space == "shared":
        return ""
    width = TYPE_BYTES[variable.type]
    listed = re.findall(r"[^\s,{}]+", variable.initial)
    data = b"".join(_immediate(each).to_bytes(8, "little")[:width] for each in listed)
    data = data.ljust(max(1, variable.size), b"\0")
    values = ", ".join(str(byte) for byte in data)
    align = max(16, variable.align)
    return f"alignas({align}) static unsigned char {_safe(variable.name)}[] = {{{values}}};\n"


def _immediate(text: str) -> int:
    """The bits of a number; floating ones are 0f and eight hexadecimal digits."""
    text = text.rstrip("U")
    if re.fullmatch(r"0[fF][0-9a-fA-F]+", text):
        return int(text[2:], 16)
    return int(text, 0) & (2**64 - 1)


@dataclass
class Context:
    """One entry: its text, and what emitters (opcodes.py) ask of it."""

    entry: Entry
    module_variables: dict[str, Variable]
    sites: list[str] = field(default_factory=list)
    resume_lines: list[int] = field(default_factory=lambda: [0])
    backward: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.registers: Allocation = allocate(self.entry)
        self.offsets, self.param_bytes = _laid_out(self.entry.params)
        shared = [each for each in self.module_variables.values() if each.space == "shared"]
        mine = [each for each in self.entry.variables if each.space == "shared"]
        # Those without a size come last: the launch's bytes.
        ordered = sorted([*shared, *mine], key=lambda each: each.size == 0)
        offsets, self.shared_bytes = _laid_out(ordered)
        self.offsets |= offsets
        self._now: Instruction | None = None
        self._find_backward_branches()

    # ---- for emitters

    def value(self, operand: str, kind: str) -> str:
        """C++ that reads an operand as a type; floating types are float or double."""
        if operand.startswith("!"):
            return f"!{self.value(operand[1:], kind)}"
        if operand in _SPECIAL:
            return _cast(kind, _SPECIAL[operand])
        if operand in self.entry.registers:
            raw = self._register(operand)
            if kind == "pred":
                return raw
            narrow = f"static_cast<{opcodes.unsigned(kind)}>({raw})"
            return opcodes.as_value(kind, narrow)
        if operand in self.offsets:
            return _cast(kind, f"{self.offsets[operand]}ull")
        if operand in self.module_variables:
            return f"reinterpret_cast<uint64_t>({_safe(operand)})"
        return self._constant(operand, kind)

    def _constant(self, operand: str, kind: str) -> str:
        try:
            bits = _immediate(operand)
        except ValueError as error:
            now = self._now
            assert now is not None
            raise UnknownPtxError(f"unknown operand {operand}", now.line, now.text) from error
        width = 1 if kind == "pred" else opcodes.bits(kind)
        text = f"{bits & (2**width - 1):#x}{'ull' if width == 64 else 'u'}"
        if opcodes.is_float(kind):
            return f"{kind}({text})"
        return f"({text} != 0)" if kind == "pred" else _cast(kind, text)

    def assign(self, operand: str, kind: str, value: str) -> str:
        """A C++ statement that writes to a register; a narrower value is extended by its type."""
        if operand == "_":
            return f"static_cast<void>({value});"
        if kind == "pred":
            return f"{self._register(operand)} = {value};"
        if opcodes.is_float(kind):
            value = f"bits_of({value})" if kind == "f32" else f"{kind}_of({value})"
            kind = f"b{opcodes.bits(kind)}"
        container = opcodes.unsigned(self._kind_of(operand))
        narrow = f"static_cast<{opcodes.signed_type(kind)}>({value})"
        return f"{self._register(operand)} = static_cast<{container}>({narrow});"

    def address(self, operand: str) -> str:
        """C++ of `[register + offset]` or `[symbol + offset]`, as 64 bits."""
        found = re.fullmatch(r"\[\s*([^+\]]+?)\s*(?:\+\s*(-?\w+))?\s*\]", operand)
        if found is None:
            now = self._now
            assert now is not None
            raise UnknownPtxError(f"unknown address {operand}", now.line, now.text)
        base = self.value(found[1], "u32" if self._is_narrow(found[1]) else "u64")
        text = f"static_cast<uint64_t>({base})"
        if found[2] and _immediate(found[2]):
            text = f"({text} + {_immediate(found[2])}ull)"
            if self._is_narrow(found[1]):
                text = f"static_cast<uint32_t>{text}"
        return text

    def _is_narrow(self, operand: str) -> bool:
        return operand in self.entry.registers and self._kind_of(operand).endswith("32")

    def site(self, kind: str, order: str = "kWeak", scope: str = "kNone") -> str:
        """C++ of a new entry in the table of sites."""
        now = self._now
        assert now is not None
        text = re.sub(r"\s+", " ", now.text).replace("\\", "").replace('"', "'")
        self.sites.append(
            f'    {{"{text}", {now.line}, {now.source_line}, Kind::{kind}, Order::{order}, '
            f"Scope::{scope}, 0}},\n"
        )
        return f"S[{len(self.sites) - 1}]"

    def pause(self, status: str) -> str:
        """A place at which the thread stops and goes on: always, or when it is tired."""
        number = self._resume()
        stop = f"t.pc = {number}; return Status::{status};"
        if status == "kPaused":
            stop = f"if (tired(t)) {{ {stop} }}"
        return f"{stop} case {number}:;"

    def block(self, meets: str) -> str:
        """Waits unless `meets` says that nobody is missing; the thread goes on after it."""
        number = self._resume()
        return f"t.pc = {number}; if (!{meets}) return Status::kBlocked; case {number}:;"

    def branch(self, label: str) -> str:
        jump = f"goto {_safe(label)};"
        now = self._now
        assert now is not None
        if label in self.backward and now.line in self._backward_lines:
            return (
                f"if (tired(t)) {{ t.pc = {self.backward[label]}; return Status::kPaused; }} {jump}"
            )
        return jump

    # ---- text

    def text(self) -> str:
        body = "".join(self._statement(each) for each in self.entry.body)
        name = _safe(self.entry.name)
        files = "".join(
            f"  {opcodes.unsigned(f'b{8 * width}')} {letter}[{count}];\n"
            for width, letter in _REGISTER_FILES.items()
            if (count := self.registers.counts.get(width, 0))
        )
        sites = "".join(self.sites) or "    {},\n"
        lines = ", ".join(map(str, self.resume_lines))
        return (
            f"struct Registers_{name} {{\n{files}}};\n"
            f"static Site sites_{name}[] = {{\n{sites}}};\n"
            f"static const uint32_t resume_lines_{name}[] = {{{lines}}};\n"
            f"static Status run_{name}(Thread& t) {{\n"
            f"  auto& R = *reinterpret_cast<Registers_{name}*>(t.registers);\n"
            f"  Site* const S = sites_{name};\n"
            "  (void)R;\n  (void)S;\n"
            f"  switch (t.pc) {{\n  case 0:;\n{body}  }}\n  return Status::kEnded;\n}}\n"
            f"static const Kernel kernel_{name} = {{\n"
            f'    "{self.entry.name}", run_{name}, sites_{name}, resume_lines_{name}, '
            f"{len(self.sites)},\n    (sizeof(Registers_{name}) + 15) / 16 * 16, "
            f"{self.registers.total}, {self.param_bytes}, {self.shared_bytes}}};\n"
        )

    def _statement(self, each: Instruction | Label) -> str:
        if isinstance(each, Label):
            resume = f"case {self.backward[each.name]}: " if each.name in self.backward else ""
            return f"  {resume}{_safe(each.name)}:;\n"
        self._now = each
        text = opcodes.emit(self, each)
        if each.guard:
            sign = "!" if each.negated else ""
            text = f"if ({sign}{self.value(each.guard, 'pred')}) {{ {text} }}"
        return f"  {self._issue(each)}{text}\n"

    def _issue(self, instruction: Instruction) -> str:
        """What the clock is told: the class, the registers it reads and those it writes."""
        kind = next((name for name, of in _CLASSES.items() if instruction.opcode in of), "kAlu")
        reads, writes = self.registers.used_by(instruction)
        numbers = ", ".join(map(str, [*reads, *writes, 0]))
        return f"ISSUE({kind}, {len(reads)}, {len(writes)}, {numbers}) "

    def _register(self, name: str) -> str:
        width, index = self.registers.places[name]
        return f"R.{_REGISTER_FILES[width]}[{index}]"

    def _kind_of(self, name: str) -> str:
        return f"b{8 * self.registers.places[name][0]}"

    def _resume(self) -> int:
        assert self._now is not None
        self.resume_lines.append(self._now.line)
        return len(self.resume_lines) - 1

    def _find_backward_branches(self) -> None:
        seen: set[str] = set()
        self._backward_lines: set[int] = set()
        for each in self.entry.body:
            if isinstance(each, Label):
                seen.add(each.name)
            elif each.opcode == "bra" and each.operands[0] in seen:
                self._backward_lines.add(each.line)
                if each.operands[0] not in self.backward:
                    self.resume_lines.append(each.line)
                    self.backward[each.operands[0]] = len(self.resume_lines) - 1


def _cast(kind: str, value: str) -> str:
    return f"static_cast<{opcodes.signed_type(kind)}>({value})"


def _laid_out(variables: Iterable[Variable]) -> tuple[dict[str, int], int]:
    """Offsets of variables in their window, and its bytes."""
    offsets, end = {}, 0
    for each in variables:
        end = -(-end // each.align) * each.align
        offsets[each.name] = end
        end += each.size
    return offsets, end
