"""What the GPU compiler makes of the shared LM head's kernels: compiled and read, not run."""

from __future__ import annotations

import functools
import re

import pytest

from moe_nvlink_plugin.jit import nvrtc, source
from tests.kernels.test_nvrtc import (
    BF16,
    FP16,
    FP32,
    Instruction,
    assert_waits_first,
    cuobjdump,
    disassemble,
    generic_accesses,
    longest_run_of_loads,
)
from tests.support import kernel_texts
from tests.support.delays import replace_once

pytestmark = pytest.mark.timeout(280)

GATHER, ARGMAX, COLLECT = (f"moe_nvlink_{kernel}" for kernel in kernel_texts.HEAD_KERNELS)
KERNELS = (GATHER, ARGMAX, COLLECT)
#: 1024 threads, one for each vector of a row, can be launched with them.
MAX_REGISTERS = 64
#: A kernel that was written several times over (a loop that the compiler made seven of) has more.
MAX_INSTRUCTIONS = {GATHER: 900, ARGMAX: 1900, COLLECT: 700}

#: Every architecture, and every element type.
VARIANTS = (
    *((BF16, architecture) for architecture in nvrtc.ARCHITECTURES),
    (FP16, "sm_90a"),
    (FP32, "sm_100a"),
)
each_kernel = pytest.mark.parametrize("kernel", KERNELS)
each_architecture = pytest.mark.parametrize("architecture", nvrtc.ARCHITECTURES)
each_variant = pytest.mark.parametrize(("element", "architecture"), VARIANTS)


@functools.cache
def cubin(element: int, architecture: str) -> bytes:
    return nvrtc.compile_cubin(kernel_texts.head_source(element), architecture)


@functools.cache
def listing(element: int, architecture: str, kernel: str) -> tuple[Instruction, ...]:
    return disassemble(cubin(element, architecture), kernel)


def names_of(element: int, architecture: str, kernel: str) -> tuple[str, ...]:
    return tuple(one.name for one in listing(element, architecture, kernel))


def broken(line: str, instead: str, kernel: str) -> tuple[str, ...]:
    """Names of the instructions of a text in which something stands in the place of one line."""
    text = replace_once(kernel_texts.head_source(BF16), line, instead)
    code = nvrtc.compile_cubin(text, "sm_90a", strict=False)
    return tuple(one.name for one in disassemble(code, kernel))


def count_of(names: tuple[str, ...], pattern: str) -> int:
    return sum(re.match(pattern, name) is not None for name in names)


@each_variant
def test_registers_and_no_spills(element: int, architecture: str) -> None:
    """The order of eight logits is kept in registers; compile_cubin would refuse a spill."""
    usage = cuobjdump(cubin(element, architecture), "-res-usage")
    for kernel in KERNELS:
        line = re.search(rf"Function {kernel}:\n\s*(REG:.*)", usage)
        assert line is not None, usage
        numbers = {key: int(value) for key, value in re.findall(r"(\w+):(\d+)", line[1])}
        assert numbers["STACK"] == numbers["LOCAL"] == 0, f"{kernel}: {line[1]}"
        assert numbers["REG"] <= MAX_REGISTERS, f"{kernel}: {line[1]}"
        names = names_of(element, architecture, kernel)
        assert not count_of(names, r"(LDL|STL)\b"), kernel
        assert not generic_accesses(names), kernel
        assert len(names) <= MAX_INSTRUCTIONS[kernel], kernel


@each_variant
def test_rows_and_logits_move_wide(element: int, architecture: str) -> None:
    """Gather and collect have kVectorsInFlight loads of 16 bytes on their way before a store."""
    text = source.read_kernel_file("include/moe_nvlink/platform.h")
    in_flight, _on_host = map(int, re.findall(r"int kVectorsInFlight = (\d+);", text))
    for kernel in (GATHER, COLLECT):
        code = listing(element, architecture, kernel)
        assert longest_run_of_loads(code) == in_flight, kernel
        assert any(one.name == "STG.E.128" for one in code), kernel
    logits = [
        i for i, one in enumerate(listing(element, architecture, ARGMAX)) if "128" in one.name
    ]
    assert len(logits) == 1, "one load of 16 bytes, and no store of so many"


@each_variant
def test_logits_are_compared_without_memory(element: int, architecture: str) -> None:
    """A warp's largest word by its reductions, that of the threads of one row by shuffles."""
    names = names_of(element, architecture, ARGMAX)
    # Order and complement: of a thread's part, of the CTA's, for the two of a word.
    assert count_of(names, r"C?REDUX") >= 4
    # Three steps among eight threads, for the two halves of a word.
    assert count_of(names, r"SHFL\.BFLY") == 6
    assert not count_of(names, r"(ATOMS|RED\b|REDG)")


@each_kernel
@each_architecture
def test_ordered_accesses(architecture: str, kernel: str) -> None:
    """P6 and P7 in gather, P8 and P9 in argmax, each once, and nothing ordered beside them."""
    names = names_of(BF16, architecture, kernel)
    places = [i for i, name in enumerate(names) if re.match(r"MEMBAR|CCTL|ATOM|RED\b|REDG", name)]
    kinds = [names[i] for i in places]
    if kernel == COLLECT:
        assert not kinds, "it waits for nobody"
        return
    assert [kind.split(".")[0] for kind in kinds] == ["MEMBAR", "ATOMG", "CCTL", "MEMBAR", "CCTL"]
    # The arrival: GPU scope, acquire and release.
    assert "GPU" in kinds[0]
    assert re.match(r"ATOMG\.E\.ADD.*STRONG\.GPU", kinds[1])
    assert kinds[2] == kinds[4] == "CCTL.IVALL"
    assert 0 < places[1] - places[0] < 8
    assert places[2] - places[1] < 3
    # The cell: system scope, behind it the peers' by an acquire of the whole word.
    assert "SYS" in kinds[3]
    cell = next(i for i in range(places[3], len(names)) if names[i] == "STG.E.64.STRONG.SYS")
    assert cell - places[3] < 8
    assert names[places[4] - 1] == "LDG.E.64.STRONG.SYS"
    stores = count_of(names, r"STG\.E\.64\.STRONG\.SYS")
    assert stores == 3, "the cell, and the fault word in the workspace and in the host's memory"


@each_kernel
@each_architecture
def test_programmatic_dependent_launch(architecture: str, kernel: str) -> None:
    assert_waits_first(names_of(BF16, architecture, kernel))


def test_without_programmatic_dependent_launch() -> None:
    code = nvrtc.compile_cubin(kernel_texts.head_source(BF16, pdl=False), "sm_90a")
    for kernel in KERNELS:
        names = {one.name for one in disassemble(code, kernel)}
        assert not names & {"ACQBULK", "PREEXIT"}


# These checks can fail.


def test_an_order_in_local_memory_is_noticed() -> None:
    names = broken(
        "if (most <= best) continue;", "if (orders[best % Width] == 7) continue;", ARGMAX
    )
    assert count_of(names, r"(LDL|STL)\b")


def test_relaxed_cells_and_arrivals_are_told_apart() -> None:
    text = kernel_texts.head_source(BF16)
    relaxed = re.sub(r"(st\.release|ld\.acquire|atom\.acq_rel)", _relaxed, text)
    assert relaxed != text
    names = [
        one.name
        for kernel in KERNELS
        for one in disassemble(nvrtc.compile_cubin(relaxed, "sm_90a"), kernel)
    ]
    assert not [name for name in names if re.match(r"MEMBAR|CCTL", name)]


def _relaxed(match: re.Match[str]) -> str:
    return match[0].split(".")[0] + ".relaxed"


def test_a_generic_access_is_noticed() -> None:
    names = broken(
        "shared.epoch = load_word(&local->epoch) + 1;", "shared.epoch = local->epoch + 1;", GATHER
    )
    assert generic_accesses(names)
