"""Machine code that NVRTC makes for GPUs, as cuobjdump reads it: instructions, registers, waits."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import pytest

from moe_nvlink_plugin.jit import nvrtc

#: From sm_70 on.
BYTES_OF_INSTRUCTION = 16
#: An access that touches global memory.
_TOUCHES = re.compile(r"(LDG|STG|ATOMG|REDG)\.")


class Instruction(NamedTuple):
    """One line of a disassembly."""

    name: str  # with its modifiers
    operands: str
    guard: str = ""  # predicate, if it is executed on a condition

    def registers(self) -> set[int]:
        return {int(number) for number in re.findall(r"\bR(\d+)\b", self.operands)}

    def loaded(self) -> set[int]:
        """Registers that a load fills."""
        first = re.match(r"R(\d+)", self.operands)
        assert first is not None, self
        words = next((w for w in (4, 2) if f".{32 * w}" in self.name), 1)
        return set(range(int(first[1]), int(first[1]) + words))

    def successors(self, place: int) -> list[int]:
        """Places of the instructions that may follow this one, which is at `place`."""
        if self.name.startswith("BRA"):
            target = int(self.operands.rsplit("0x", 1)[1], 16) // BYTES_OF_INSTRUCTION
            is_conditional = self.guard or "," in self.operands
            return [target, place + 1] if is_conditional else [target]
        return [] if self.name == "EXIT" and not self.guard else [place + 1]

    def touches(self, registers: set[int]) -> bool:
        """Whether it must wait for them, if it is executed on every way."""
        if self.name.startswith("LDG"):
            # What it fills may be what a load on the opposite condition fills.
            return (
                not Instruction("", self.operands.partition(",")[2])
                .registers()
                .isdisjoint(registers)
            )
        return not self.guard and not self.registers().isdisjoint(registers)


def cuobjdump(code: bytes, *options: str) -> str:
    """cuobjdump's output; the tools come from PyPI (cuobjdump calls nvdisasm)."""
    tools = _tools()
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        done = subprocess.run(
            [str(tools / "cuobjdump"), *options, file.name],
            capture_output=True,
            text=True,
            check=False,
            env={"PATH": f"{tools}:/usr/bin:/bin"},
        )
    assert done.returncode == 0, done.stderr
    return done.stdout


@functools.cache
def _tools() -> Path:
    spec = importlib.util.find_spec("nvidia")
    folders = spec.submodule_search_locations if spec is not None else None
    for folder in folders or ():
        for tool in Path(folder).glob("*/bin/cuobjdump"):
            return tool.parent
    installed = shutil.which("cuobjdump")
    if installed is None:
        pytest.skip("cuobjdump is not installed (pip install nvidia-cuda-cuobjdump)")
    return Path(installed).parent


def disassemble(code: bytes, kernel: str) -> tuple[Instruction, ...]:
    """The kernel's instructions in the order of the code."""
    sass = cuobjdump(code, "-sass", "-fun", kernel)
    found = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+ )?([A-Z][A-Z0-9_.]+)([^;]*);", sass)
    assert len(found) > 100, f"{kernel}: the disassembly has {len(found)} instructions"
    return tuple(Instruction(name, operands.strip(), guard) for guard, name, operands in found)


@dataclasses.dataclass(frozen=True)
class Code:
    """One kernel's machine code.

    Attributes:
        listing: the instructions in the order of the code.
        usage: what cuobjdump says of it: REG, STACK, SHARED, LOCAL and more.
    """

    listing: tuple[Instruction, ...]
    usage: dict[str, int]

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the instructions, with their modifiers, in the order of the code."""
        return tuple(one.name for one in self.listing)

    def count(self, pattern: str) -> int:
        """How many names begin so; a pattern with `$` is about whole names."""
        return sum(re.match(pattern, name) is not None for name in self.names)

    def places(self, pattern: str) -> list[int]:
        return [i for i, name in enumerate(self.names) if re.match(pattern, name)]


def compiled(text: str, architecture: str, entry: str, *, strict: bool = True) -> Code:
    """What NVRTC makes of a kernel of the text; strict: a warning such as a spill is an error."""
    cubin = nvrtc.compile_cubin(text, architecture, strict=strict)
    usage = cuobjdump(cubin, "-res-usage")
    line = re.search(rf"Function {entry}:\n\s*(REG:.*)", usage)
    assert line is not None, usage
    numbers = {key: int(value) for key, value in re.findall(r"(\w+):(\d+)", line[1])}
    return Code(disassemble(cubin, entry), numbers)


def loads_before_first_use(code: tuple[Instruction, ...]) -> int:
    """128-bit loads that are issued before anything touches what one of them loads."""
    wide = [i for i, one in enumerate(code) if one.name.startswith("LDG.E.128")]
    assert wide, "no 128-bit load"
    loaded = code[wide[0]].loaded()
    count = 1
    for one in code[wide[0] + 1 : wide[-1] + 1]:
        if one.registers() & loaded:
            break
        if one.name.startswith("LDG.E.128"):
            loaded |= one.loaded()
            count += 1
    return count


def loads_in_flight(code: tuple[Instruction, ...]) -> set[frozenset[int]]:
    """For each way from the kernel's wait on: the global loads (places in the code) that are issued
    before anything touches what one of them loads.
    """
    found, seen = set(), set()
    ways: list[tuple[int, frozenset[int]]]
    ways = [([one.name for one in code].index("ACQBULK"), frozenset())]
    while ways:
        place, loads = way = ways.pop()
        if way in seen:
            continue
        seen.add(way)
        here = code[place]
        following = here.successors(place)
        if not following or here.touches({r for load in loads for r in code[load].loaded()}):
            found.add(loads)
            continue
        if here.name.startswith("LDG"):
            loads |= {place}
        ways += [(successor, loads) for successor in following]
    return found


def longest_run_of_loads(code: tuple[Instruction, ...]) -> int:
    """128-bit loads without a 128-bit store between them."""
    order = "".join(
        one.name[0] for one in code if re.match(r"(LDG|STG)\.E\.128", one.name)
    )  # "L" and "S"
    return max(len(run) for run in order.split("S"))


def generic_accesses(names: tuple[str, ...]) -> list[str]:
    """They find out at run time which memory they mean."""
    return [name for name in names if re.match(r"(LD|ST|ATOM|RED|CCTL)\.E\b", name)]


#: An ordered access is followed, or preceded, by what it orders within so many instructions.
NEAR = 8


def order_of(code: Code) -> list[str]:
    """Ordered accesses in the order of the code.

    A release is a barrier and then the access, an acquire the access and then the emptying of L1.
    What belongs to neither is there by its name, and "store" and "poll" are relaxed words of the
    system.
    """
    found: list[tuple[int, str]] = []
    names, used = code.names, set[int]()
    for fence in code.places("MEMBAR"):
        scope = "sys" if "SYS" in names[fence] else "gpu"
        wanted = {"sys": r"STG\.E\.64\.STRONG\.SYS", "gpu": r"ATOMG\.E\.ADD.*STRONG\.GPU"}[scope]
        behind = range(fence + 1, min(fence + NEAR, len(names)))
        access = next((i for i in behind if re.match(wanted, names[i])), None)
        is_whole = access is not None and (scope == "sys" or names[access + 1] == "CCTL.IVALL")
        if access is None or not is_whole:
            found.append((fence, names[fence]))
            continue
        used |= {access} if scope == "sys" else {access, access + 1}
        found.append((fence, "release" if scope == "sys" else "arrival"))
    for i in code.places(r"LDG\.E(\.64)?\.STRONG\.SYS"):
        is_acquire = names[i + 1] == "CCTL.IVALL"
        used |= {i + 1} if is_acquire else set()
        found.append((i, "acquire" if is_acquire else "poll"))
    others = {"STG.E.64.STRONG.SYS": "store"}
    for i in code.places(r"CCTL|FENCE|ATOM|RED(G?\b)|STG\.E\.64\.STRONG\.SYS"):
        if i not in used:
            is_take = re.match(r"ATOMG\.E\.ADD.*STRONG\.GPU", names[i])
            found.append((i, "take" if is_take else others.get(names[i], names[i])))
    return [name for _place, name in sorted(found)]


def touches_before_wait(code: Code) -> bool:
    """Whether global memory is touched before the wait for the kernel before, or the signal."""
    assert code.names.count("ACQBULK") == code.names.count("PREEXIT") == 1
    wait, signal = code.names.index("ACQBULK"), code.names.index("PREEXIT")
    return not wait < signal < min(code.places(_TOUCHES.pattern))
