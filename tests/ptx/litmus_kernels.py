"""Litmus programs (tests/litmus/program.py) as kernels of PTX, for the software GPU to run."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterable, Iterator, Mapping

from tests.litmus.program import Program, Step
from tests.litmus.ptx_model import Event, Place
from tests.support.ptx.build import Library, Site
from tests.support.ptx.machine import Machine, RaceError

#: Bytes from one place of memory to the next.
STRIDE = 256

_HEAD = ".version 8.8\n.target sm_90a\n.address_size 64\n"
_INSTRUCTIONS = {
    "load": "ld.{order}.global.u32 {register}, {place};",
    "store": "st.{order}.global.u32 {place}, {value};",
    "add": "atom.{order}.global.add.u32 {register}, {place}, {value};",
    "start": "griddepcontrol.wait;",
}


class LitmusKernels:
    """The kernels of one program; those of a GPU are numbered along its stream."""

    def __init__(self, name: str, text: str) -> None:
        self.program = Program(text)
        self.name = name
        self.threads: dict[Place, list[Step]] = {}
        for step in self.program.steps:
            if step.event.place is not None:
                self.threads.setdefault(step.event.place, []).append(step)
        #: (gpu, kernel), in the order of the streams -> its threads.
        self.kernels: dict[tuple[int, int], list[Place]] = {}
        for place in sorted(self.threads, key=lambda place: (place.gpu, place.kernel)):
            self.kernels.setdefault((place.gpu, place.kernel), []).append(place)
        units = dict.fromkeys(unit for step in self.program.steps for unit in step.event.units)
        self.offsets = {unit: number * STRIDE for number, unit in enumerate(units)}

    def entry(self, gpu: int, kernel: int) -> str:
        """Name of a kernel's entry."""
        return f"{self.name}_gpu{gpu}_k{kernel}"

    def ptx(self) -> str:
        """Entries of all kernels."""
        return "".join(self._entry(*each) for each in self.kernels)

    def _entry(self, gpu: int, kernel: int) -> str:
        ctas: dict[int, list[Place]] = {}
        for place in self.kernels[gpu, kernel]:
            ctas.setdefault(place.cta, []).append(place)
        numbers = itertools.count(4)
        body = "\n".join(line for each in ctas.values() for line in self._cta(each, numbers))
        name = self.entry(gpu, kernel)
        return (
            f".visible .entry {name}(.param .u64 {name}_param_0)\n{{\n"
            f".reg .pred %p<2>;\n.reg .b32 %r<{next(numbers)}>;\n.reg .b64 %rd<3>;\n"
            f"ld.param.u64 %rd1, [{name}_param_0];\ncvta.to.global.u64 %rd2, %rd1;\n"
            f"mov.u32 %r1, %ctaid.x;\nmov.u32 %r2, %tid.x;\nshr.u32 %r3, %r2, 5;\n"
            f"griddepcontrol.launch_dependents;\n{body}\nret;\n}}\n"
        )

    def _cta(self, places: list[Place], numbers: Iterator[int]) -> Iterator[str]:
        """Each thread's instructions up to its barrier, the barrier, and so on: lanes of a warp
        meet at one instruction.
        """
        registers: dict[Place, dict[str, str]] = {place: {} for place in places}
        yield from _unless("%r1", places[0].cta, cta := f"$cta_{next(numbers)}")
        named = {place.thread for place in places}
        for thread in set(range(max(named))) - named:
            yield f"setp.eq.u32 %p1, %r2, {thread};\n@%p1 ret;"
        left = {place: list(self.threads[place]) for place in places}
        while any(left.values()):
            for place, steps in left.items():
                yield from _unless("%r2", place.thread, end := f"$thread_{next(numbers)}")
                barrier = next((n for n, s in enumerate(steps) if s.event.kind == "arrive"), None)
                for step in steps[:barrier]:
                    polls = barrier is not None
                    yield from self._instruction(step, registers[place], numbers, polls)
                yield "ret;" if barrier is None else ""
                yield f"{end}:"
            arrivals = [steps[n] for steps in left.values() for n in self._arrival(steps)]
            yield from _barriers([step.event for step in arrivals], numbers)
            left = {p: steps[n + 1 :] for p, steps in left.items() for n in self._arrival(steps)}
        yield f"{cta}:"

    @staticmethod
    def _arrival(steps: list[Step]) -> list[int]:
        """Where the next barrier is, if there is one."""
        return [n for n, step in enumerate(steps) if step.event.kind == "arrive"][:1]

    def _instruction(
        self, step: Step, registers: dict[str, str], numbers: Iterator[int], polls: bool
    ) -> Iterator[str]:
        """polls: a branch that is not taken goes back to the load, else it ends the thread."""
        event = step.event
        if event.kind not in _INSTRUCTIONS:
            return
        target = f"%r{next(numbers)}"
        written = step.written[0] if step.written else ""
        if step.expected and polls:
            yield f"$poll_{target[2:]}:"
        yield _INSTRUCTIONS[event.kind].format(
            order=event.order if event.scope is None else f"{event.order}.{event.scope}",
            register=target,
            place=f"[%rd2+{self.offsets[event.units[0]]}]" if event.units else "",
            value=registers.get(written, written),
        )
        if step.register:
            registers[step.register] = target
        if step.expected:
            otherwise = f"bra $poll_{target[2:]}" if polls else "ret"
            yield f"setp.ne.u32 %p1, {target}, {step.expected[0]};\n@%p1 {otherwise};"

    def sites(self, library: Library) -> list[Site]:
        """Of all kernels of this program."""
        return [site for each in self.kernels for site in library[self.entry(*each)].sites]

    def run(self, library: Library, seed: int) -> None:
        """One run of all GPUs' streams. Raises what the machine finds."""
        memory = (ctypes.c_uint32 * (STRIDE // 4 * (len(self.offsets) + 1)))()
        address = -(-ctypes.addressof(memory) // STRIDE) * STRIDE
        gpus = 1 + max(place.gpu for place in self.threads)
        with Machine(gpus, seed=seed, races=True) as machine:
            for unit, offset in self.offsets.items():
                machine.allocate(0, address + offset, 4, unit)
            for (gpu, kernel), places in self.kernels.items():
                machine.launch(
                    gpu,
                    library[self.entry(gpu, kernel)],
                    1 + max(place.cta for place in places),
                    1 + max(place.thread for place in places),
                    address.to_bytes(8, "little"),
                    pdl=kernel > 0,
                )
            machine.run()

    def race(self, library: Library, seeds: Iterable[int]) -> RaceError | None:
        """The race of the first of these schedules that has one."""
        for seed in seeds:
            try:
                self.run(library, seed)
            except RaceError as race:
                return race
        return None


def _unless(register: str, value: int, label: str) -> Iterator[str]:
    """Jumps to the label where the register has another value."""
    yield f"setp.ne.u32 %p1, {register}, {value};\n@%p1 bra {label};"


def _barriers(arrivals: list[Event], numbers: Iterator[int]) -> Iterator[str]:
    """The barrier of a CTA, or one of each warp."""
    threads = [event.place.thread for event in arrivals if event.place is not None]
    if arrivals and arrivals[0].barrier == "cta":
        yield "bar.sync 0;"
        return
    for warp in sorted({thread // 32 for thread in threads}):
        mask = sum(1 << thread % 32 for thread in threads if thread // 32 == warp)
        yield from _unless("%r3", warp, end := f"$warp_{next(numbers)}")
        yield f"bar.warp.sync {mask};\n{end}:"


def module(kernels: Iterable[LitmusKernels]) -> str:
    """PTX of several programs."""
    return _HEAD + "".join(each.ptx() for each in kernels)


def named(texts: Mapping[str, str]) -> list[LitmusKernels]:
    """The programs of a table."""
    return [LitmusKernels(name, text) for name, text in texts.items()]
