"""What the GPU compiler makes of the combine of small batches: compiled and read, not run."""

from __future__ import annotations

import functools
import re

import pytest

from moe_nvlink_plugin.exchange.kernels import SMALL_COMBINE, TOP_K
from moe_nvlink_plugin.jit import nvrtc
from moe_nvlink_plugin.launch import kernel
from moe_nvlink_plugin.launch.kernel import ELEMENT, PDL
from tests.kernels.test_nvrtc import (
    BF16,
    COMMON_TOP_K,
    FP16,
    FP32,
    Instruction,
    assert_waits_first,
    cuobjdump,
    disassemble,
    generic_accesses,
    loads_before_first_use,
)
from tests.support.delays import replace_once

pytestmark = pytest.mark.timeout(280)

ENTRY = "moe_nvlink_small_combine"
GEOMETRIES = ((1, BF16), (8, BF16), (8, FP32), (22, FP16), (32, BF16), (32, FP16), (32, FP32))
ARCHITECTURES = ("sm_90a", "sm_100a")
#: Three CTAs of 256 threads on an SM, so that the parts of a batch find their places at once; of
#: fp32, which few models have, two.
MAX_REGISTERS = {BF16: 80, FP16: 80, FP32: 96}
#: Words of a unit's data, the count, the epoch and the fault word.
LOADS_OF_A_SENDER = 3 + 1 + 1 + 1

#: The larger top_k take long to compile: `make test` reads those of one architecture.
each_build = pytest.mark.parametrize(
    ("top_k", "element", "architecture"),
    [
        pytest.param(
            *geometry,
            architecture,
            marks=[pytest.mark.long]
            if geometry[0] > COMMON_TOP_K and architecture != ARCHITECTURES[0]
            else [],
        )
        for geometry in GEOMETRIES
        for architecture in ARCHITECTURES
    ],
)
each_architecture = pytest.mark.parametrize("architecture", ARCHITECTURES)


def text_of(top_k: int, element: int, *, pdl: bool = True) -> str:
    values = {TOP_K: top_k, ELEMENT: element, PDL: int(pdl)}
    return kernel.gpu_source((SMALL_COMBINE,), values)


@functools.cache
def cubin(top_k: int, element: int, architecture: str) -> bytes:
    return nvrtc.compile_cubin(text_of(top_k, element), architecture)


@functools.cache
def listing(top_k: int, element: int, architecture: str) -> tuple[Instruction, ...]:
    return disassemble(cubin(top_k, element, architecture), ENTRY)


def names_of(code: tuple[Instruction, ...]) -> tuple[str, ...]:
    return tuple(one.name for one in code)


@each_build
def test_registers_and_no_spills(top_k: int, element: int, architecture: str) -> None:
    usage = cuobjdump(cubin(top_k, element, architecture), "-res-usage")
    line = re.search(rf"Function {ENTRY}:\n\s*(REG:.*)", usage)
    assert line is not None, usage
    numbers = {key: int(value) for key, value in re.findall(r"(\w+):(\d+)", line[1])}
    assert numbers["STACK"] == numbers["LOCAL"] == 0, line[1]
    if top_k <= COMMON_TOP_K:
        assert numbers["REG"] <= MAX_REGISTERS[element], line[1]
    names = names_of(listing(top_k, element, architecture))
    assert not [name for name in names if re.match(r"(LDL|STL)\b", name)]
    assert not generic_accesses(names)


@each_build
def test_all_looks_fly_together(top_k: int, element: int, architecture: str) -> None:
    """A thread looks at the units of all k by 16 bytes each before it waits for the first one."""
    code = listing(top_k, element, architecture)
    wide = [one.name for one in code if one.name.startswith("LDG.E.128")]
    assert wide == ["LDG.E.128.STRONG.SYS"] * top_k
    assert loads_before_first_use(code) == top_k


def test_looks_that_wait_for_one_another_are_noticed() -> None:
    """As soon as nothing stands between the looks and their use."""
    text = replace_once(text_of(6, FP32), "    if (unknown(missing) == 0) return 0;\n", "")
    code = disassemble(nvrtc.compile_cubin(text, "sm_100a"), ENTRY)
    assert loads_before_first_use(code) < 6


@each_architecture
def test_what_is_added_is_on_its_way_before_the_looks(architecture: str) -> None:
    """Three words of 4 bytes, which nothing touches until the units have arrived."""
    code = listing(COMMON_TOP_K, BF16, architecture)
    look = next(i for i, one in enumerate(code) if one.name == "LDG.E.128.STRONG.SYS")
    loads = [i for i in range(look) if code[i].name == "LDG.E"][-3:]
    assert loads[-1] - loads[0] < 8
    loaded = {int(code[i].operands.split(",")[0].strip().removeprefix("R")) for i in loads}
    assert len(loaded) == 3
    between = [code[i] for i in range(loads[0], look) if i not in loads]
    assert not [one for one in between if one.registers() & loaded]


def loads_before_first_unit(code: tuple[Instruction, ...]) -> int:
    """Loads in front of the first unit that are issued before one of them is waited for."""
    first_unit = next(i for i, one in enumerate(code) if one.name == "STG.E.128.STRONG.SYS")
    loaded: set[int] = set()
    count = 0
    for one in code[:first_unit]:
        if loaded & one.registers():
            break
        if re.fullmatch(r"LDG\.E(\.64\.STRONG\.SYS)?", one.name):
            first = next(iter(re.findall(r"R(\d+)", one.operands)))
            loaded |= {int(first), int(first) + (1 if ".64" in one.name else 0)}
            count += 1
    return count


@each_architecture
def test_a_sender_waits_for_memory_once(architecture: str) -> None:
    """Its row, the count that says whether there is such a row, epoch and fault fly together."""
    code = listing(COMMON_TOP_K, BF16, architecture)
    assert loads_before_first_unit(code) == LOADS_OF_A_SENDER


def test_a_second_wait_of_the_sender_is_noticed() -> None:
    text = replace_once(
        text_of(8, BF16),
        "  uint32_t data[kUnitWords];\n  load_data(plan, row,",
        "  uint32_t data[kUnitWords];\n"
        "  if (load_word(&rows_from(args)[sent.source]) == 0) return this_round(args);\n"
        "  load_data(plan, row,",
    )
    code = disassemble(nvrtc.compile_cubin(text, "sm_90a"), ENTRY)
    assert loads_before_first_unit(code) < LOADS_OF_A_SENDER


@each_architecture
def test_ordered_accesses(architecture: str) -> None:
    """P12's release and nothing else that waits for memory: units are relaxed."""
    names = names_of(listing(COMMON_TOP_K, BF16, architecture))
    barriers = [i for i, name in enumerate(names) if name.startswith("MEMBAR")]
    assert [names[i] for i in barriers] == ["MEMBAR.ALL.SYS"] or [names[i] for i in barriers] == [
        "MEMBAR.SC.SYS"
    ], [names[i] for i in barriers]
    stores = [i for i, name in enumerate(names) if name == "STG.E.64.STRONG.SYS"]
    assert len([i for i in stores if 0 < i - barriers[0] < 8]) == 1
    assert len(stores) == 3, "the cell and two fault words"
    assert "CCTL.IVALL" not in names
    assert not [name for name in names if re.match(r"(ATOMG|REDG|FENCE)\b", name)]


@each_architecture
def test_programmatic_dependent_launch(architecture: str) -> None:
    """Nothing of global memory is touched before the wait; where the first row lies is computed."""
    names = names_of(listing(COMMON_TOP_K, BF16, architecture))
    assert_waits_first(names)
    wait = names.index("ACQBULK")
    assert any(name.startswith("STS") for name in names[:wait])
    divisions = [i for i, name in enumerate(names) if name.startswith("MUFU.RCP")]
    first_load = next(i for i, name in enumerate(names) if name.startswith("LDG"))
    assert len([i for i in divisions if i < wait]) >= 2
    assert not [i for i in divisions if wait < i < first_load]


def test_without_programmatic_dependent_launch() -> None:
    code = nvrtc.compile_cubin(text_of(8, BF16, pdl=False), "sm_90a")
    assert not set(names_of(disassemble(code, ENTRY))) & {"ACQBULK", "PREEXIT"}
