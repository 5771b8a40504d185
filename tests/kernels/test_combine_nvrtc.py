"""What the GPU compiler makes of a combine that quantises: compiled and read, not run."""

from __future__ import annotations

import functools
import re

import pytest

from moe_nvlink_plugin.jit import nvrtc
from moe_nvlink_plugin.jit.header import constants
from tests.kernels.test_nvrtc import (
    BF16,
    Instruction,
    assert_waits_first,
    cuobjdump,
    disassemble,
    generic_accesses,
)
from tests.support import kernel_texts
from tests.support.delays import replace_once

pytestmark = pytest.mark.timeout(280)

COMBINE = "moe_nvlink_combine"
TOP_K = 8
#: Two CTAs of 256 threads on an SM, as without a format.
MAX_REGISTERS = 128
#: What a thread loads of one partial row: codes of 8 elements, a block's scale, a row's.
LOADS = {
    "Fp8Block": {"LDG.E.64": 1, "LDG.E": 1},
    "Nvfp4": {"LDG.E": 2, "LDG.E.U8": 1},
    "Fp8Tensor": {"LDG.E.64": 1},
}
#: Formats and architectures; sm_90a has no conversions of e2m1.
VARIANTS = (
    ("Fp8Block", "sm_90a"),
    ("Nvfp4", "sm_90a"),
    ("Nvfp4", "sm_100a"),
    ("Fp8Tensor", "sm_90a"),
)
each_variant = pytest.mark.parametrize(("name", "architecture"), VARIANTS)


def text_of(name: str, top_k: int = TOP_K) -> str:
    return kernel_texts.specialised_source(top_k, BF16, combine=constants()[f"kCombine{name}"])


@functools.cache
def cubin(name: str, architecture: str) -> bytes:
    return nvrtc.compile_cubin(text_of(name), architecture)


@functools.cache
def listing(name: str, architecture: str) -> tuple[Instruction, ...]:
    return disassemble(cubin(name, architecture), COMBINE)


def pulls(code: tuple[Instruction, ...]) -> dict[str, int]:
    """Loads of the stretch of code with the most of them that are issued before anything touches
    what one of them loads, or a branch comes.
    """
    best: list[str] = []
    names: list[str] = []
    loaded: set[int] = set()
    for one in code:
        is_load = re.fullmatch(r"LDG\.E(\.64|\.U8)?", one.name) is not None
        used = set(re.findall(r"\bR(\d+)\b", one.operands))
        if re.match(r"BRA|BAR|EXIT|CALL|RET", one.name) or {int(r) for r in used} & loaded:
            names, loaded = [], set()
        if is_load:
            first = int(one.operands.split(",")[0].strip().removeprefix("R"))
            loaded |= {first, first + 1} if one.name.endswith("64") else {first}
            names.append(one.name)
        best = max(best, names, key=len).copy()
    return {name: best.count(name) for name in best}


@each_variant
def test_registers_and_no_spills(name: str, architecture: str) -> None:
    usage = cuobjdump(cubin(name, architecture), "-res-usage")
    line = re.search(rf"Function {COMBINE}:\n\s*(REG:.*)", usage)
    assert line is not None, usage
    numbers = {key: int(value) for key, value in re.findall(r"(\w+):(\d+)", line[1])}
    assert numbers["STACK"] == numbers["LOCAL"] == 0, line[1]
    assert numbers["REG"] <= MAX_REGISTERS, line[1]
    names = [one.name for one in listing(name, architecture)]
    assert not [one for one in names if re.match(r"(LDL|STL)\b", one)]
    assert not generic_accesses(tuple(names))


@pytest.mark.parametrize("name", ["Nvfp4", "Fp8Tensor"])
def test_no_spills_with_many_experts(name: str) -> None:
    """compile_cubin is strict; three addresses for each of 32 rows would not fit at once."""
    assert nvrtc.compile_cubin(text_of(name, top_k=32), "sm_90a")


@each_variant
def test_rows_and_scales_fly_together(name: str, architecture: str) -> None:
    """One trip to the peers for the codes and both scales of all top_k rows."""
    expected = {load: count * TOP_K for load, count in LOADS[name].items()}
    assert pulls(listing(name, architecture)) == expected


def test_loads_that_wait_for_sums_are_noticed() -> None:
    text = replace_once(text_of("Nvfp4"), "    if (element >= last) return;\n", "")
    text = replace_once(
        text,
        "    const int place = element < last ? element : first;\n",
        "    if (element >= last) return;\n    const int place = element;\n",
    )
    code = disassemble(nvrtc.compile_cubin(text, "sm_90a"), COMBINE)
    assert sum(pulls(code).values()) < 3 * TOP_K


@each_variant
def test_rows_move_wide(name: str, architecture: str) -> None:
    """16 elements of the experts' row in two loads, their codes in one store, sums in one; the row
    that is added in one load.
    """
    names = [one.name for one in listing(name, architecture)]
    assert names.count("LDG.E.128") == {"Nvfp4": 4}.get(name, 2) + 1  # nvfp4: for amax too
    assert names.count("STG.E.128") == {"Nvfp4": 1}.get(name, 2)
    assert "STG.E.64" in names


@each_variant
def test_conversions_of_the_hardware(name: str, architecture: str) -> None:
    names = [one.name for one in listing(name, architecture)]

    def count(kind: str, way: str) -> int:
        return sum(kind in one and way in one for one in names if one.startswith("F2FP"))

    unpacked = TOP_K * 8 // 2  # two at a time
    assert count("E4M3", "UNPACK") == (0 if name == "Nvfp4" else unpacked)
    # Nvfp4: the scale. Fp8Tensor: beside 16 elements one, for rows of sizes that combine never has.
    assert count("E4M3", "SATFINITE") == {"Fp8Block": 8, "Nvfp4": 1, "Fp8Tensor": 8 + 1}[name]
    has_e2m1 = (name, architecture) == ("Nvfp4", "sm_100a")
    assert count("E2M1", "UNPACK") == (unpacked if has_e2m1 else 0)
    assert count("E2M1", "SATFINITE") == (8 if has_e2m1 else 0)


@each_variant
def test_nothing_is_touched_before_the_wait(name: str, architecture: str) -> None:
    assert_waits_first(tuple(one.name for one in listing(name, architecture)))


@each_variant
def test_ordered_accesses(name: str, architecture: str) -> None:
    """P5 before P3's release, P3's acquire behind it, then P14's arrival and release, and nothing
    ordered beside them. Before that rows are taken, the first and every next one, by an atomic that
    has no barrier.
    """
    names = [one.name for one in listing(name, architecture)]
    places = [i for i, one in enumerate(names) if re.match(r"MEMBAR|CCTL|ATOMG|REDG", one)]
    takes, places = places[:2], places[2:]
    places, ends = places[:5], places[5:]
    assert [names[i].split(".")[0] for i in ends] == ["MEMBAR", "ATOMG", "CCTL", "MEMBAR"]
    assert "GPU" in names[ends[0]]
    assert "SYS" in names[ends[3]]
    assert all(re.match(r"ATOMG\.E\.ADD.*STRONG\.GPU", names[take]) for take in takes)
    kinds = [names[i] for i in places]
    assert [kind.split(".")[0] for kind in kinds] == ["MEMBAR", "ATOMG", "CCTL", "MEMBAR", "CCTL"]
    assert "GPU" in kinds[0]
    assert re.match(r"ATOMG\.E\.ADD.*STRONG\.GPU", kinds[1])
    assert kinds[2] == kinds[4] == "CCTL.IVALL"
    assert "SYS" in kinds[3]
    # The arrival is what its barrier is for, and L1 is emptied right behind it.
    assert places[1] - places[0] < 8
    assert places[2] == places[1] + 1
    signal = names.index("STG.E.64.STRONG.SYS")
    assert 0 < signal - places[3] < 8
    # The rows are stored before, and the peers' are pulled behind.
    stores = [i for i, one in enumerate(names) if one == "STG.E.64" or one == "STG.E.128"]
    assert min(stores) < places[0]
