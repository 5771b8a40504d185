"""What the GPU compiler makes of the dispatch of small batches: compiled and read, not run."""

from __future__ import annotations

import functools
import re

import pytest

from moe_nvlink_plugin.exchange.kernels import EXPERT_COUNTS, QUANTISER, SMALL_DISPATCH, TOP_K
from moe_nvlink_plugin.jit import nvrtc
from moe_nvlink_plugin.jit.header import quantisers, structs
from moe_nvlink_plugin.launch import kernel
from moe_nvlink_plugin.launch.kernel import ELEMENT, PDL
from tests.kernels.test_nvrtc import (
    BF16,
    COMMON_TOP_K,
    FP32,
    Instruction,
    assert_waits_first,
    cuobjdump,
    disassemble,
    generic_accesses,
    loads_in_flight,
)
from tests.support.delays import replace_once

pytestmark = pytest.mark.timeout(280)

ENTRY = "moe_nvlink_small_dispatch"
#: top_k, element, recipe, architecture: rows as they are, a scale for a block of a row, and blocks
#: whose codes and scales take the most instructions; the largest top_k.
BUILDS = (
    (8, BF16, "none", "sm_90a"),
    (8, BF16, "none", "sm_100a"),
    (32, BF16, "none", "sm_90a"),
    (8, BF16, "fp8_block", "sm_90a"),
    (8, BF16, "nvfp4", "sm_100a"),
)
#: The other recipes, and each of those on the other kind of GPU.
MORE_BUILDS = (
    (1, FP32, "none", "sm_90a"),
    (32, BF16, "none", "sm_100a"),
    (8, BF16, "fp8_token", "sm_100a"),
    (8, BF16, "fp8_tensor", "sm_90a"),
    (8, BF16, "mxfp8", "sm_100a"),
    (8, BF16, "nvfp4", "sm_90a"),
    (8, BF16, "fp8_block_pow2", "sm_100a"),
)
#: Three CTAs of 256 threads on an SM.
MAX_REGISTERS = 80
#: What a CTA may have without asking for more.
MAX_SHARED_BYTES = 48 * 1024

each_build = pytest.mark.parametrize(
    ("top_k", "element", "recipe", "architecture"),
    [*BUILDS, *(pytest.param(*build, marks=pytest.mark.long) for build in MORE_BUILDS)],
)
each_architecture = pytest.mark.parametrize("architecture", ["sm_90a", "sm_100a"])


def text_of(top_k: int, element: int, recipe: str = "none", *, pdl: bool = True) -> str:
    values = {TOP_K: top_k, ELEMENT: element, QUANTISER: quantisers()[recipe]}
    values |= {EXPERT_COUNTS: 0, PDL: int(pdl)}
    return kernel.gpu_source((SMALL_DISPATCH,), values)


@functools.cache
def cubin(top_k: int, element: int, recipe: str, architecture: str) -> bytes:
    return nvrtc.compile_cubin(text_of(top_k, element, recipe), architecture)


@functools.cache
def listing(top_k: int, element: int, recipe: str, architecture: str) -> tuple[Instruction, ...]:
    return disassemble(cubin(top_k, element, recipe, architecture), ENTRY)


def names_of(code: tuple[Instruction, ...]) -> tuple[str, ...]:
    return tuple(one.name for one in code)


@each_build
def test_registers_and_no_spills(top_k: int, element: int, recipe: str, architecture: str) -> None:
    usage = cuobjdump(cubin(top_k, element, recipe, architecture), "-res-usage")
    line = re.search(rf"Function {ENTRY}:\n\s*(REG:.*)", usage)
    assert line is not None, usage
    numbers = {key: int(value) for key, value in re.findall(r"(\w+):(\d+)", line[1])}
    assert numbers["STACK"] == numbers["LOCAL"] == 0, line[1]
    assert numbers["SHARED"] <= MAX_SHARED_BYTES, line[1]
    if top_k <= COMMON_TOP_K:
        assert numbers["REG"] <= MAX_REGISTERS, line[1]
    names = names_of(listing(top_k, element, recipe, architecture))
    assert not [name for name in names if re.match(r"(LDL|STL)\b", name)]
    assert not generic_accesses(names)


@each_build
def test_units_travel_by_16_bytes(top_k: int, element: int, recipe: str, architecture: str) -> None:
    """A store for each target, a look at a time, a clear: each word of a unit whole."""
    names = names_of(listing(top_k, element, recipe, architecture))
    # Of each target's unit, and of the zeros after it has been read.
    assert names.count("STG.E.128.STRONG.SYS") == top_k + 1
    assert names.count("LDG.E.128.STRONG.SYS") == 1


def membars(names: tuple[str, ...]) -> list[int]:
    return [i for i, name in enumerate(names) if name.startswith("MEMBAR")]


@each_build
def test_ordered_accesses(top_k: int, element: int, recipe: str, architecture: str) -> None:
    """One release, of P11, and no atomic: rows wait for no fence and no arrival."""
    names = names_of(listing(top_k, element, recipe, architecture))
    (fence,) = membars(names)
    assert names[fence] in ("MEMBAR.ALL.SYS", "MEMBAR.SC.SYS")
    assert "STG.E.64.STRONG.SYS" in names[fence : fence + 12], "the cell follows its fence"
    assert not [name for name in names if re.match(r"(ATOMG|ATOM|REDG|FENCE)\b", name)]


def test_a_release_of_each_unit_is_noticed() -> None:
    text = replace_once(
        text_of(2, BF16),
        "st.relaxed.sys.global.v2.u64",
        "fence.acq_rel.sys; st.relaxed.sys.global.v2.u64",
    )
    code = disassemble(nvrtc.compile_cubin(text, "sm_90a"), ENTRY)
    assert len(membars(names_of(code))) > 1


def sender_waits_once(code: tuple[Instruction, ...]) -> bool:
    """For a piece of the row, the ids of the token and of two before it, and the epoch. Warps that
    wait for peers look at the fault word after that, while the others find the route.
    """
    epoch = f"+{structs()['LocalControl'].combined_epoch.offset:#x}]"
    return any(
        [code[i].name for i in way].count("LDG.E.128") == 1 + 3 * COMMON_TOP_K * 4 // 16
        and any(code[i].operands.endswith(epoch) for i in way)
        for way in loads_in_flight(code)
    )


@each_architecture
def test_a_sender_waits_for_memory_once(architecture: str) -> None:
    """Its row and ids are on their way before it knows whether it may send."""
    assert sender_waits_once(listing(COMMON_TOP_K, BF16, "none", architecture))


def test_a_second_wait_of_the_sender_is_noticed() -> None:
    text = replace_once(
        text_of(8, BF16),
        "  if (role.sends()) {\n",
        "  if (!has_failed(args) && role.sends()) {\n",
    )
    code = disassemble(nvrtc.compile_cubin(text, "sm_90a"), ENTRY)
    assert not sender_waits_once(code)


@each_architecture
def test_programmatic_dependent_launch(architecture: str) -> None:
    assert_waits_first(names_of(listing(COMMON_TOP_K, BF16, "none", architecture)))


def test_without_programmatic_dependent_launch() -> None:
    code = nvrtc.compile_cubin(text_of(8, BF16, pdl=False), "sm_90a")
    assert not set(names_of(disassemble(code, ENTRY))) & {"ACQBULK", "PREEXIT"}
