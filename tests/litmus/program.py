"""Small PTX programs as text, and the question whether the memory model allows an outcome.

    program = Program('''
        gpu0.cta0.t0: st.weak row, 1; st.release.sys flag, 1
        gpu1.cta0.t0: ld.acquire.sys seen, flag; ld.weak copy, row
    ''')
    program.allows(seen=1, copy=0)  # False: the row comes before the flag

One line a thread, `gpuG.[kK.]ctaC.tT: instruction; instruction; ...`; lines of the same thread are
one thread. Kernels of a GPU run in one stream, in the order of K. Everything starts as 0.

    ld.ORDER.SCOPE register, place       weak has no scope
    st.ORDER.SCOPE place, value          a number or an earlier register
    atom.ORDER.SCOPE.add register, place, number
    fence.ORDER.SCOPE
    bar.sync                             all threads of the CTA named here take part
    bar.warp.sync                        those of the warp: threads 0-31, 32-63, ...
    griddepcontrol.wait                  what follows comes after the whole kernel K-1 of this GPU

`register=3` in a load or atom is a branch: only executions that go this way are looked at. A thread
that polls a flag is written as the turn of the loop that leaves it; the turns before it would only
add constraints, so nothing that is forbidden without them is allowed with them.

A place is one unit of memory, or several with `|` between them, read or written at once: `a|b` is
an 8-byte word, `a` and `b` its halves. Its value is then `1|2`, and a dash stands for any.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass

from tests.litmus.ptx_model import (
    Event,
    Execution,
    Kind,
    Place,
    Relation,
    Scope,
    Skeleton,
    bits,
    closure,
    empty,
)

THREAD = re.compile(r"gpu(\d+)(?:\.k(\d+))?\.cta(\d+)\.t(\d+)")
ACCESS = re.compile(
    r"(?P<operation>ld|st|atom)\.(?P<order>weak|relaxed|acquire|release|acq_rel)"
    r"(?:\.(?P<scope>cta|gpu|sys))?(?:\.add)?\s+(?P<operands>.+)"
)
FENCE = re.compile(r"fence\.(acquire|release|acq_rel|sc)\.(cta|gpu|sys)")
WARP = 32
HALVES: tuple[Kind, Kind] = ("arrive", "wait")
SCOPES: dict[str, Scope] = {"cta": "cta", "gpu": "gpu", "sys": "sys"}
KINDS: dict[str, Kind] = {"ld": "load", "st": "store", "atom": "add"}

#: A value per unit; None where anything will do.
Value = tuple[int | None, ...]


class ProgramError(ValueError):
    """The text of a program is not one."""


@dataclass(frozen=True)
class Step:
    """An event and what its instruction does with values."""

    event: Event
    register: str = ""
    expected: Value = ()
    written: tuple[str, ...] = ()  # per unit a number or a register


class Program:
    """Threads of one program, ready to be asked about outcomes."""

    def __init__(self, text: str) -> None:
        threads: dict[Place, list[Step]] = {}
        for line in filter(None, (line.strip() for line in text.splitlines())):
            place, instructions = _split_line(line)
            steps = threads.setdefault(place, [])
            for instruction in filter(None, (i.strip() for i in instructions.split(";"))):
                steps += _parse(instruction, place, steps)
        _close_kernels(threads)
        _check_barriers(threads)
        self.steps = _initial_writes(threads) + [s for t in threads.values() for s in t]
        events = [step.event for step in self.steps]
        self.skeleton = Skeleton(events, self._program_order(), self._dependencies())
        names = [step.register for step in self.steps if step.register]
        if len(names) != len(set(names)):
            raise ProgramError(f"a register is loaded twice: {sorted(names)}")
        self.registers = {step.register: i for i, step in enumerate(self.steps) if step.register}

    def allows(self, **outcome: int | str) -> bool:
        """True if some execution leaves these values: name=value of registers and of memory.

        Several units: cell="1|2". Of memory the value that no write comes behind is meant.
        """
        return any(True for _ in self._executions(self._wanted(outcome), outcome))

    def reachable(self) -> bool:
        """True if any execution takes the branches the text names; a question needs one."""
        return self.allows()

    def mixed_size_race(self) -> bool:
        """True if some execution has one; the model then promises nothing at all."""
        runs = self._executions(self._wanted({}), {})
        return any(run.mixed_size_race(base) for run, base, _ in runs)

    def race(self) -> bool:
        """True if some execution has a data race."""
        return any(run.race(base) for run, base, _ in self._executions(self._wanted({}), {}))

    def outcomes(self) -> set[tuple[Value, ...]]:
        """What the registers may hold, in the order of the text."""
        return {
            tuple(values.of_register(name) for name in self.registers)
            for _, _, values in self._executions(self._wanted({}), {})
        }

    def _wanted(self, outcome: dict[str, int | str]) -> dict[int, Value]:
        """Per event: what it must have read for the branches and for the outcome."""
        wanted = {i: step.expected for i, step in enumerate(self.steps) if step.expected}
        for name, value in outcome.items():
            if name in self.registers:
                event = self.registers[name]
                asked = _value(str(value), len(self.steps[event].event.units))
                before = wanted.get(event, (None,) * len(asked))
                if any(None not in (a, b) and a != b for a, b in zip(asked, before, strict=True)):
                    raise ProgramError(f"{name}={value} is asked of a branch that needs {before}")
                wanted[event] = tuple(
                    b if a is None else a for a, b in zip(asked, before, strict=True)
                )
            elif not any(name in step.event.units for step in self.steps):
                raise ProgramError(f"{name} is neither a register nor memory of this program")
        return wanted

    def _executions(
        self, wanted: dict[int, Value], outcome: dict[str, int | str]
    ) -> Iterator[tuple[Execution, Relation, _Values]]:
        """Executions with that outcome, each with its base causality and its values."""
        memory = {n: int(v) for n, v in outcome.items() if n not in self.registers}
        slots = [
            (i, unit) for i, s in enumerate(self.steps) if s.event.reads for unit in s.event.units
        ]
        choices = [self._candidates(event, unit, wanted) for event, unit in slots]
        for picked in itertools.product(*choices):
            sources = dict(zip(slots, picked, strict=True))
            values = _Values(self, sources)
            if not values.agree_with(wanted):
                continue
            run = Execution(self.skeleton, sources)
            for coherence, base in run.consistent():
                if all(self._may_end_as(u, v, coherence, values) for u, v in memory.items()):
                    yield run, base, values

    def _candidates(self, event: int, unit: str, wanted: dict[int, Value]) -> list[int]:
        """Writes this read may have taken the unit from, less those whose constant says no."""
        units = self.steps[event].event.units
        value = wanted[event][units.index(unit)] if event in wanted else None
        found = []
        for write, step in enumerate(self.steps):
            if not step.event.writes or unit not in step.event.units or write == event:
                continue
            if self.skeleton.program_order[event] >> write & 1:
                continue  # a read never takes the value of its own thread's later write
            constant = _constant(step, unit)
            if None in (value, constant) or value == constant:
                found.append(write)
        return found

    def _may_end_as(self, unit: str, value: int, coherence: Relation, values: _Values) -> bool:
        writes = [i for i, s in enumerate(self.steps) if s.event.writes and unit in s.event.units]
        return any(
            values.written(write, unit) == value
            for write in writes
            if not any(later in writes for later in bits(coherence[write]))
        )

    def _program_order(self) -> Relation:
        order = empty(len(self.steps))
        for (i, first), (j, second) in itertools.combinations(enumerate(self.steps), 2):
            if first.event.place is not None and first.event.place == second.event.place:
                order[i] |= 1 << j
        return closure(order)

    def _dependencies(self) -> Relation:
        """Load to store through a register, and load to all that comes behind its branch."""
        depends = empty(len(self.steps))
        for (i, first), (j, second) in itertools.combinations(enumerate(self.steps), 2):
            if first.event.place is None or first.event.place != second.event.place:
                continue
            data = first.register and first.register in second.written
            if data or first.expected:
                depends[i] |= 1 << j
        return depends


class _Values:
    """What every event read and wrote, given where the reads took their values from."""

    def __init__(self, program: Program, sources: dict[tuple[int, str], int]) -> None:
        self.program = program
        self.sources = sources
        self.known: dict[tuple[int, str], int | None] = {}

    def agree_with(self, wanted: dict[int, Value]) -> bool:
        for event, value in wanted.items():
            for unit, number in zip(self.program.steps[event].event.units, value, strict=True):
                if number is not None and self.read(event, unit) != number:
                    return False
        return True

    def of_register(self, name: str) -> Value:
        event = self.program.registers[name]
        return tuple(self.read(event, unit) for unit in self.program.steps[event].event.units)

    def read(self, event: int, unit: str) -> int | None:
        return self.written(self.sources[event, unit], unit)

    def written(self, event: int, unit: str) -> int | None:
        """None: the value hangs on itself, which No-thin-air forbids."""
        if (event, unit) not in self.known:
            self.known[event, unit] = None
            self.known[event, unit] = self._compute(event, unit)
        return self.known[event, unit]

    def _compute(self, event: int, unit: str) -> int | None:
        step = self.program.steps[event]
        constant = _constant(step, unit)
        if constant is not None:
            return constant
        if step.event.kind == "add":
            before = self.read(event, unit)
            return None if before is None else before + int(step.written[0])
        position = step.event.units.index(unit)
        source = self.program.registers[step.written[position]]
        return self.read(source, self.program.steps[source].event.units[0])


def _constant(step: Step, unit: str) -> int | None:
    if step.event.kind == "add":
        return None
    written = step.written[step.event.units.index(unit)]
    return int(written) if _is_number(written) else None


def _is_number(text: str) -> bool:
    return re.fullmatch(r"-?\d+", text) is not None


def _split_line(line: str) -> tuple[Place, str]:
    head, colon, instructions = line.partition(":")
    match = THREAD.fullmatch(head.strip())
    if not match or not colon:
        raise ProgramError(f"no thread of the form gpu0.cta0.t0: in {line!r}")
    gpu, kernel, cta, thread = (int(part or 0) for part in match.groups())
    return Place(gpu, kernel, cta, thread), instructions


def _parse(instruction: str, place: Place, before: list[Step]) -> list[Step]:
    if instruction in ("bar.sync", "bar.warp.sync"):
        barrier = "cta" if instruction == "bar.sync" else f"warp {place.thread // WARP}"
        turn = sum((s.event.kind, s.event.barrier) == ("arrive", barrier) for s in before)
        return [Step(Event(kind, place, barrier=barrier, turn=turn)) for kind in HALVES]
    if instruction == "griddepcontrol.wait":
        return [Step(Event("start", place))]
    fence = FENCE.fullmatch(instruction)
    if fence:
        return [Step(Event("fence", place, fence[1], _scope(fence[2])))]
    access = ACCESS.fullmatch(instruction)
    if not access or (access["order"] == "weak") != (access["scope"] is None):
        raise ProgramError(f"not an instruction: {instruction!r}")
    return [_access(access, place)]


def _scope(text: str | None) -> Scope | None:
    return None if text is None else SCOPES[text]


def _access(match: re.Match[str], place: Place) -> Step:
    operands = [operand.strip() for operand in match["operands"].split(",")]
    if len(operands) != (3 if match["operation"] == "atom" else 2):
        raise ProgramError(f"wrong number of operands: {match[0]!r}")
    register, expected = "", ""
    if match["operation"] != "st":
        register, _, expected = operands.pop(0).partition("=")
    units = tuple(operands[0].split("|"))
    event = Event(KINDS[match["operation"]], place, match["order"], _scope(match["scope"]), units)
    return Step(
        event,
        register,
        _value(expected, len(units)) if expected else (),
        tuple(operands[1].split("|")) if len(operands) > 1 else (),
    )


def _value(text: str, units: int) -> Value:
    parts = text.split("|")
    if len(parts) != units:
        raise ProgramError(f"{text!r} is not a value of {units} units")
    return tuple(None if part == "-" else int(part) for part in parts)


def _close_kernels(threads: dict[Place, list[Step]]) -> None:
    """An event behind the last instruction of every thread: what griddepcontrol.wait waits for."""
    for place, steps in threads.items():
        steps.append(Step(Event("end", place)))


def _check_barriers(threads: dict[Place, list[Step]]) -> None:
    """All threads of a CTA, and of a warp, come to its barrier equally often."""
    turns: dict[tuple[object, ...], set[int]] = {}
    for place, steps in threads.items():
        for barrier in ("cta", f"warp {place.thread // WARP}"):
            count = sum((s.event.kind, s.event.barrier) == ("arrive", barrier) for s in steps)
            key = (place.gpu, place.kernel, place.cta, barrier)
            turns.setdefault(key, set()).add(count)
    for where, counts in turns.items():
        if len(counts) > 1:
            raise ProgramError(f"threads of {where} meet at different barriers: {counts}")


def _initial_writes(threads: dict[Place, list[Step]]) -> list[Step]:
    units = dict.fromkeys(u for steps in threads.values() for s in steps for u in s.event.units)
    return [Step(Event("initial", None, units=(unit,)), written=("0",)) for unit in units]
