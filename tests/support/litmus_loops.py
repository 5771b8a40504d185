"""Litmus programs (tests/litmus/program.py) as CUDA kernels that run them over and over on a GPU.

Each CTA of a program is a CTA here, each of its threads a warp whose lanes are 32 runs of the
program at once, each on places of its own. Before every turn the CTAs of a program meet; then each
warp waits for a random time, so that one comes to the same places now before, now after another.
What a program has on another GPU runs on this one: what is forbidden there is forbidden here.

That an outcome was not seen says something only of runs that could have had it: of message passing,
those whose reader saw the flag. Loop.telling counts them, and demand_telling wants some.

A launch ends within a second whatever becomes of its CTAs: who waits in vain says so and leaves.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from tests.litmus.program import Program, Step
from tests.litmus.ptx_model import Place

LANES = 32
#: What a register holds that a run has not come to, behind a branch that it did not take.
UNREAD = 99
#: What a register holds that no kernel has written: all must be.
UNWRITTEN = -1
#: Values that a register may hold, so that an outcome is one number.
BASE = 100
#: Of all runs of a program so many must tell, or what they did not show means nothing.
LEAST_SHARE = 0.001

_INSTRUCTIONS = {
    "load": 'asm volatile("ld.{order}.global.u32 %0, [%1];" : "=r"({target}) : '
    '"l"(here + {unit} * args.unit_stride) : "memory");',
    "store": 'asm volatile("st.{order}.global.u32 [%0], %1;" : : '
    '"l"(here + {unit} * args.unit_stride), "r"({value}) : "memory");',
    "add": 'asm volatile("atom.{order}.global.add.u32 %0, [%1], %2;" : "=r"({target}) : '
    '"l"(here + {unit} * args.unit_stride), "r"({value}) : "memory");',
    "fence": 'asm volatile("fence.{order};" : : : "memory");',
}

_HEAD = """
struct Args {
  unsigned* memory;    // zeros
  unsigned* results;   // [registers][turns][instances]
  unsigned* meetings;  // zeros, one of each group
  unsigned* failed;    // zero
  unsigned long long turn_stride, instance_stride, unit_stride;
  unsigned turns, seed, most_delay, reserved;
};

__device__ unsigned long long now() {
  unsigned long long time;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
  return time;
}

__device__ unsigned long long cycle() {
  unsigned long long count;
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(count));
  return count;
}

// All CTAs of a group, for at most half a second.
__device__ bool meet(const Args& args, unsigned group, unsigned expected) {
  __shared__ unsigned gone;
  __syncthreads();
  if (threadIdx.x == 0) {
    gone = 0;
    unsigned* counter = args.meetings + group;
    unsigned seen;
    asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], 1;" : "=r"(seen) : "l"(counter)
                 : "memory");
    const unsigned long long end = now() + 500000000ull;
    for (;;) {
      asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
      if (seen >= expected) break;
      if (now() > end) {
        gone = 1;
        asm volatile("st.relaxed.gpu.global.u32 [%0], 1;" : : "l"(args.failed) : "memory");
        break;
      }
    }
  }
  __syncthreads();
  return gone == 0;
}

// A random number of the SM's cycles below most_delay, another one for each warp and turn. Reads of
// the clock stay where they are; a loop without them ptxas removes.
__device__ void delay(const Args& args, unsigned turn) {
  if (args.most_delay == 0) return;
  unsigned state = args.seed * 374761393u + turn * 2654435761u + blockIdx.x * 40503u +
                   threadIdx.x / 32 * 977u;
  state = (state ^ state >> 16) * 2246822519u;
  state = (state ^ state >> 13) * 3266489917u;
  state ^= state >> 16;
  const unsigned cycles = state % args.most_delay;
  const unsigned long long begun = cycle();
  for (unsigned i = 0; i < cycles && cycle() - begun < cycles; ++i) continue;
}
"""

_KERNEL = """
extern "C" __global__ void litmus_{name}(const __grid_constant__ Args args) {{
  const unsigned role = blockIdx.x % {roles}u, group = blockIdx.x / {roles}u;
  const unsigned warp = threadIdx.x / 32;
  const unsigned instances = gridDim.x / {roles}u * 32u;
  const unsigned instance = group * 32u + threadIdx.x % 32u;
  for (unsigned turn = 0; turn < args.turns; ++turn) {{
    if (!meet(args, group, {roles}u * (turn + 1))) return;
    delay(args, turn);
    unsigned* here = args.memory + turn * args.turn_stride + instance * args.instance_stride;
    unsigned* out = args.results + (unsigned long long)turn * instances + instance;
    const unsigned long long next = (unsigned long long)args.turns * instances;
{body}
  }}
}}
"""


class Parameters(ctypes.Structure):
    """struct Args of _HEAD."""

    _fields_ = (
        ("memory", ctypes.c_uint64),
        ("results", ctypes.c_uint64),
        ("meetings", ctypes.c_uint64),
        ("failed", ctypes.c_uint64),
        ("turn_stride", ctypes.c_uint64),
        ("instance_stride", ctypes.c_uint64),
        ("unit_stride", ctypes.c_uint64),
        ("turns", ctypes.c_uint32),
        ("seed", ctypes.c_uint32),
        ("most_delay", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
    )


class Loop:
    """The kernel of one program, all of whose places are one unit.

    Args:
        name: of the kernel, behind "litmus_".
        text: the program.
        outcome: what its registers hold in the execution that is asked for.

    Attributes:
        forbidden: whether the memory model forbids the outcome.
        allowed: all that registers may hold where the branches go as the text says.
    """

    def __init__(self, name: str, text: str, outcome: dict[str, int]) -> None:
        program = Program(text)
        self.name, self.outcome = name, dict(outcome)
        self.forbidden = not program.allows(**outcome)
        self.registers = list(program.registers)
        self.allowed = {tuple(value[0] for value in each) for each in program.outcomes()}
        self._branches = {
            step.register: step.expected[0] for step in program.steps if step.expected
        }
        if unknown := outcome.keys() - set(self.registers):
            raise ValueError(
                f"{name}: {sorted(unknown)} are no registers; what memory holds in the end is not "
                "looked at, so load it"
            )
        self._roles: dict[tuple[int, int], dict[Place, list[Step]]] = {}
        for step in program.steps:
            place = step.event.place
            if place is not None:
                role = self._roles.setdefault((place.gpu, place.cta), {})
                role.setdefault(place, []).append(step)
            if step.expected:
                self.outcome[step.register] = step.expected[0] or 0
        units = dict.fromkeys(unit for step in program.steps for unit in step.event.units)
        self.units = {unit: number for number, unit in enumerate(units)}

    @property
    def roles(self) -> int:
        """CTAs of one group."""
        return len(self._roles)

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return LANES * max(len(threads) for threads in self._roles.values())

    def source(self) -> str:
        """The kernel."""
        lines = []
        for role, threads in enumerate(self._roles.values()):
            for warp, steps in enumerate(threads.values()):
                lines.append(f"    if (role == {role}u && warp == {warp}u) {{")
                lines += [f"      {line}" for line in self._thread(steps, LANES * len(threads))]
                lines.append("    }")
        return _KERNEL.format(name=self.name, roles=self.roles, body="\n".join(lines))

    def _thread(self, steps: Sequence[Step], of_cta: int) -> Iterator[str]:
        mine = [step.register for step in steps if step.register]
        yield "bool goes_on = true;"
        for register in mine:
            yield f"unsigned {register} = {UNREAD}u;"
        for step in steps:
            event = step.event
            if event.kind == "arrive":
                yield f'__syncwarp(); asm volatile("bar.sync 1, {of_cta};" : : : "memory");'
            if event.kind not in _INSTRUCTIONS:
                continue
            instruction = _INSTRUCTIONS[event.kind].format(
                order=event.order if event.scope is None else f"{event.order}.{event.scope}",
                target=step.register,
                unit=self.units[event.units[0]] if event.units else "",
                value=f"{step.written[0]}" if step.written else "",
            )
            yield f"if (goes_on) {instruction}"
            if step.expected:
                yield f"goes_on = goes_on && {step.register} == {step.expected[0]}u;"
        for register in mine:
            yield f"out[{self.registers.index(register)} * next] = {register};"

    def values(self, code: int) -> dict[str, int]:
        """What registers held in an outcome."""
        return {name: code // BASE**n % BASE for n, name in enumerate(self.registers)}

    def count(self, outcomes: Counter[int]) -> int:
        """How many runs had the outcome that is asked for."""
        return sum(
            times
            for code, times in outcomes.items()
            if self.outcome.items() <= self.values(code).items()
        )

    def telling(self, outcomes: Counter[int]) -> dict[str, int]:
        """For a register of the outcome: the runs that had all the rest of it.

        Registers that decide a branch have no entry, nor have those without which the rest is
        forbidden, too.
        """
        found = {}
        for left_out in (name for name in self.outcome if name not in self._branches):
            rest = {name: held for name, held in self.outcome.items() if name != left_out}
            if any(
                rest.items() <= dict(zip(self.registers, each, strict=True)).items()
                for each in self.allowed
            ):
                found[left_out] = sum(
                    times
                    for code, times in outcomes.items()
                    if rest.items() <= self.values(code).items()
                )
        return found

    def impossible(self, outcomes: Counter[int]) -> list[dict[str, int]]:
        """What was seen and the memory model forbids, whether it was asked for or not."""
        seen = [self.values(code) for code in outcomes]
        return [
            each
            for each in seen
            if self._branches.items() <= each.items() and tuple(each.values()) not in self.allowed
        ]


def codes(results: torch.Tensor) -> Counter[int]:
    """Outcomes of `[registers, ...]`, two decimal digits each, and how often they were seen."""
    flat = results.flatten(1).long()
    number: Any = sum(flat[n] * BASE**n for n in range(len(flat)))
    values, counts = number.unique(return_counts=True)
    return Counter(dict(zip(values.tolist(), counts.tolist(), strict=True)))


@dataclasses.dataclass
class Memory:
    """What one launch works on.

    Args:
        loop: whose.
        groups: how many run side by side.
        turns: of each.
        device: where.
        together: places of one run's turns lie side by side, as do those of a warp otherwise: a
            stale line of L1 then holds places of the next turns.
    """

    loop: Loop
    groups: int
    turns: int
    device: torch.device
    together: bool

    def __post_init__(self) -> None:
        instances = self.groups * LANES
        self._strides = (1, self.turns) if self.together else (8 * instances, 8)
        words = self.turns * instances * (1 if self.together else 8)
        # Two units of one run do not fall on one line, nor on one slice of L2.
        self._unit_stride = words + 4096 + 32

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=self.device)

        self.memory = zeros(len(self.loop.units) * self._unit_stride)
        shape = (len(self.loop.registers), self.turns, instances)
        self.results = torch.full(shape, UNWRITTEN, dtype=torch.int32, device=self.device)
        self.meetings, self.failed = zeros(self.groups), zeros(1)

    def tensors(self) -> list[torch.Tensor]:
        """All of them."""
        return [self.memory, self.results, self.meetings, self.failed]

    def parameters(self, seed: int, most_delay: int) -> Parameters:
        """Of a launch."""
        turn, instance = self._strides
        return Parameters(
            *(tensor.data_ptr() for tensor in self.tensors()),
            *(turn, instance, self._unit_stride),
            *(self.turns, seed, most_delay, 0),
        )

    def outcomes(self) -> Counter[int]:
        """What the runs have seen."""
        assert not self.failed.item(), f"{self.loop.name}: a CTA has waited in vain for another"
        missing = int((self.results == UNWRITTEN).sum())
        assert not missing, f"{self.loop.name}: {missing} registers of runs have not been written"
        return codes(self.results)


def source(loops: Sequence[Loop]) -> str:
    """One text of several kernels."""
    return _HEAD + "".join(loop.source() for loop in loops)


def judge(loop: Loop, outcomes: Counter[int]) -> str:
    """A line on what was seen; AssertionError where the memory model forbids any of it."""
    seen, runs = loop.count(outcomes), outcomes.total()
    told = ", ".join(
        f"{' '.join(map(str, loop.values(code).values()))}: {times}"
        for code, times in sorted(outcomes.items())
    )
    telling = f"   could tell: {loop.telling(outcomes)}" if loop.forbidden else ""
    line = (
        f"{loop.name:32} {'forbidden' if loop.forbidden else 'allowed':9} {seen:>8} of {runs}"
        f"   [{' '.join(loop.registers)}] {told}{telling}"
    )
    assert not (loop.forbidden and seen), f"the PTX model forbids this outcome: {line}"
    impossible = loop.impossible(outcomes)
    assert not impossible, f"the PTX model forbids {impossible}: {line}"
    return line


def demand_telling(loop: Loop, outcomes: Counter[int]) -> None:
    """AssertionError where a forbidden outcome was not seen because hardly a run could have it."""
    if not loop.forbidden:
        return
    told, needed = loop.telling(outcomes), LEAST_SHARE * outcomes.total()
    assert told, f"{loop.name}: the outcome leaves no register to look at"
    few = {name: times for name, times in told.items() if times < needed}
    assert not few, (
        f"{loop.name} shows nothing: of {outcomes.total()} runs at least {needed:.0f} must have "
        f"all of the outcome {loop.outcome} but one register, whichever; but for a register so "
        f"many have: {few}; delay the warps by more, or by less"
    )
