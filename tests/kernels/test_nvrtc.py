"""What the GPU compiler makes of the kernels: it takes them without a driver, and in the machine
code stand the wide accesses and the ordered ones that the text asks for.

Compiled and read, not run: tests/gpu runs them.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from moe_nvlink_plugin.errors import CompileError
from moe_nvlink_plugin.jit import nvrtc, source
from moe_nvlink_plugin.jit.header import constants
from tests.support import kernel_texts
from tests.support.delays import replace_once

pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings is not installed")
pytestmark = pytest.mark.timeout(280)

BF16, FP16, FP32 = (constants()[f"kElement{name}"] for name in ("Bf16", "Fp16", "Fp32"))
GEOMETRIES = ((1, BF16), (6, FP16), (8, BF16), (22, BF16), (22, FP32), (32, FP32))
COMMON = (8, BF16)
KERNELS = ("moe_nvlink_dispatch", "moe_nvlink_combine")

#: Asked of common top_k only. 64: dispatch may run in CTAs of 1024 threads, one for each vector of
#: a row. 128: two CTAs of 256 threads on an SM.
MAX_REGISTERS = {"moe_nvlink_dispatch": 64, "moe_nvlink_combine": 128}
COMMON_TOP_K = 8

#: Ordered accesses of a kernel. Every release is a barrier and then the access, every acquire the
#: access and then the emptying of L1.
SYSTEM_RELEASES = {"moe_nvlink_dispatch": 1, "moe_nvlink_combine": 2}  # P1; P3 and P14
#: P1, P14, and P12 before the first token and in a CTA without tokens; P3. ptxas may unroll the
#: looks of P12 and P14, which are in loops.
SYSTEM_ACQUIRES = {"moe_nvlink_dispatch": (4, 5, 6, 7), "moe_nvlink_combine": (1,)}
GPU_ARRIVALS = {"moe_nvlink_dispatch": 1, "moe_nvlink_combine": 1}  # P2; P14
#: Fault words of each wait, of a mask without oneself and of a dispatch behind another one: stored
#: relaxed, in the workspace and in the host's memory.
FAULT_STORES = {"moe_nvlink_dispatch": 12, "moe_nvlink_combine": 2}


#: From sm_70 on.
BYTES_OF_INSTRUCTION = 16


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


@functools.cache
def cubin(top_k: int, element: int, architecture: str) -> bytes:
    return nvrtc.compile_cubin(kernel_texts.specialised_source(top_k, element), architecture)


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


@functools.cache
def listing(top_k: int, element: int, architecture: str, kernel: str) -> tuple[Instruction, ...]:
    return disassemble(cubin(top_k, element, architecture), kernel)


def instructions(top_k: int, element: int, architecture: str, kernel: str) -> tuple[str, ...]:
    """Names of the instructions, with their modifiers, in the order of the code."""
    return tuple(one.name for one in listing(top_k, element, architecture, kernel))


each_kernel = pytest.mark.parametrize("kernel", KERNELS)
each_architecture = pytest.mark.parametrize("architecture", nvrtc.ARCHITECTURES)


def _geometries() -> Iterator[Any]:
    """A common geometry for every architecture, and each other one for one of them. The rest are
    behind the marker `long`: test_every_nvrtc.py notices what spills.
    """
    turns = dict(zip(GEOMETRIES, itertools.cycle(nvrtc.ARCHITECTURES), strict=False))
    for geometry, architecture in itertools.product(GEOMETRIES, nvrtc.ARCHITECTURES):
        is_long = geometry != COMMON and architecture != turns[geometry]
        yield pytest.param(*geometry, architecture, marks=[pytest.mark.long] if is_long else [])


each_geometry = pytest.mark.parametrize(("top_k", "element", "architecture"), [*_geometries()])


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


@each_geometry
def test_compiles_without_spills(top_k: int, element: int, architecture: str) -> None:
    usage = cuobjdump(cubin(top_k, element, architecture), "-res-usage")
    for kernel in KERNELS:
        line = re.search(rf"Function {kernel}:\n\s*(REG:.*)", usage)
        assert line is not None, usage
        numbers = {key: int(value) for key, value in re.findall(r"(\w+):(\d+)", line[1])}
        assert numbers["STACK"] == numbers["LOCAL"] == 0, f"{kernel}: {line[1]}"
        if top_k <= COMMON_TOP_K:
            assert numbers["REG"] <= MAX_REGISTERS[kernel], f"{kernel}: {line[1]}"
        # Local memory would be a spilled register or an array that did not unroll.
        local = re.compile(r"(LDL|STL)\b")
        names = instructions(top_k, element, architecture, kernel)
        assert not [name for name in names if local.match(name)], kernel


@each_kernel
@each_geometry
def test_wide_accesses(top_k: int, element: int, architecture: str, kernel: str) -> None:
    """Dispatch loads a vector once and stores it up to top_k times; combine the other way round."""
    names = instructions(top_k, element, architecture, kernel)
    wide_loads, wide_stores = (
        sum(name.startswith(f"{verb}.E") and ".128" in name for name in names)
        for verb in ("LDG", "STG")
    )
    if kernel == "moe_nvlink_dispatch":
        assert wide_loads >= 1
        assert wide_stores >= top_k
    else:
        assert wide_loads >= top_k
        assert wide_stores >= 1
    assert not generic_accesses(names)


@each_geometry
def test_all_loads_fly_together(top_k: int, element: int, architecture: str) -> None:
    """Combine has top_k loads, and that of the row which it adds, on their way before it waits for
    the first one.
    """
    code = listing(top_k, element, architecture, "moe_nvlink_combine")
    assert loads_before_first_use(code) == top_k + 1


@each_architecture
def test_no_operation_is_fused(architecture: str) -> None:
    """scale * sum + add is rounded twice, as on CPU ranks."""
    names = instructions(8, BF16, architecture, "moe_nvlink_combine")
    assert any(name.startswith("FMUL") for name in names)
    assert not [name for name in names if re.match(r"FFMA|HFMA2\.BF16", name)]


@each_architecture
def test_a_long_row_has_several_loads_in_flight(architecture: str) -> None:
    in_flight, on_host = (
        int(re.findall(r"int kVectorsInFlight = (\d+);", source.read_kernel_file(path))[0])
        for path in ("include/moe_nvlink/platform_gpu.h", "include/moe_nvlink/platform_host.h")
    )
    assert in_flight > on_host
    assert longest_run_of_loads(listing(8, BF16, architecture, KERNELS[0])) == in_flight


@each_kernel
@each_architecture
def test_ordered_accesses(architecture: str, kernel: str) -> None:
    """Each numbered pair, and nothing ordered beside them."""
    names = instructions(8, BF16, architecture, kernel)
    barriers = [i for i, name in enumerate(names) if name.startswith("MEMBAR")]
    empties = [i for i, name in enumerate(names) if name == "CCTL.IVALL"]
    stores = [i for i, name in enumerate(names) if name == "STG.E.64.STRONG.SYS"]
    loads = [i for i, name in enumerate(names) if re.match(r"LDG\.E(\.64)?\.STRONG\.SYS", name)]
    # P1 / P3 release: what came before is put in order for the whole system, then the cell.
    releases = [i for i in stores if any(0 < i - barrier < 8 for barrier in barriers)]
    assert len(releases) == SYSTEM_RELEASES[kernel]
    assert len(stores) - len(releases) == FAULT_STORES[kernel]
    assert sum("SYS" in names[i] for i in barriers) == SYSTEM_RELEASES[kernel]
    # The poll and, as an instruction of its own, the acquiring load behind it; then L1 is emptied.
    acquires = [i for i in loads if names[i + 1] == "CCTL.IVALL"]
    assert len(acquires) in SYSTEM_ACQUIRES[kernel]
    assert len(loads) > len(acquires), "no relaxed poll"
    # P2: a GPU-scope atomic behind this CTA's rows and before what reads the others'.
    atomics = [i for i, name in enumerate(names) if re.match(r"ATOMG\.E\.ADD.*STRONG\.GPU", name)]
    arrivals = [i for i in atomics if any(0 < i - barrier < 8 for barrier in barriers)]
    assert len(arrivals) == GPU_ARRIVALS[kernel]
    assert all("GPU" in names[i] for i in barriers if "SYS" not in names[i])
    assert all(names[i + 1] == "CCTL.IVALL" for i in arrivals)
    # No barrier and no emptied L1 that does not belong to one of them.
    assert len(barriers) == len(releases) + len(arrivals)
    assert len(empties) == len(acquires) + len(arrivals)
    if kernel == "moe_nvlink_dispatch":
        assert len(atomics) == 2, "one takes a slot (relaxed), one arrives (acq_rel)"


#: Of the first warp of dispatch: fault word, mask, the token's byte of padding, an id.
LOADS_OF_A_ROUTE = {"LDG.E.64.STRONG.SYS", "LDG.E.64", "LDG.E.U8", "LDG.E"}


def route_waits_once(code: tuple[Instruction, ...]) -> bool:
    return any({code[i].name for i in way} >= LOADS_OF_A_ROUTE for way in loads_in_flight(code))


@each_architecture
def test_a_route_waits_for_memory_once(architecture: str) -> None:
    """What says whether the rank may send at all does not delay the load of the ids."""
    assert route_waits_once(listing(*COMMON, architecture, "moe_nvlink_dispatch"))


def test_a_mask_that_waits_for_the_fault_word_is_noticed() -> None:
    text = replace_once(
        kernel_texts.specialised_source(*COMMON),
        "  if (args.active_ranks != 0) {\n    const uint64_t* words =",
        "  if (exclusion.fault == 0 && args.active_ranks != 0) {\n    const uint64_t* words =",
    )
    code = disassemble(nvrtc.compile_cubin(text, "sm_90a"), "moe_nvlink_dispatch")
    assert not route_waits_once(code)


@each_architecture
def test_cell_is_loaded_whole(architecture: str) -> None:
    """Count and epoch of a cell come from one load, or they could belong to two rounds."""
    assert "LDG.E.64.STRONG.SYS" in instructions(8, BF16, architecture, "moe_nvlink_dispatch")


def assert_waits_first(names: tuple[str, ...]) -> None:
    """Global memory is touched behind the wait for the kernel before, and behind the signal."""
    assert names.count("ACQBULK") == names.count("PREEXIT") == 1
    wait, signal = names.index("ACQBULK"), names.index("PREEXIT")
    touches = [i for i, name in enumerate(names) if re.match(r"(LDG|STG|ATOMG|REDG)\.", name)]
    assert wait < signal < min(touches)


@each_kernel
@each_architecture
def test_programmatic_dependent_launch(architecture: str, kernel: str) -> None:
    """Nothing of global memory is touched before the wait; shared memory is."""
    names = instructions(8, BF16, architecture, kernel)
    assert_waits_first(names)
    assert any(name.startswith("STS") for name in names[: names.index("ACQBULK")])


@each_kernel
@each_architecture
def test_without_programmatic_dependent_launch(architecture: str, kernel: str) -> None:
    code = nvrtc.compile_cubin(kernel_texts.specialised_source(8, BF16, pdl=False), architecture)
    names = {one.name for one in disassemble(code, kernel)}
    assert not names & {"ACQBULK", "PREEXIT"}


# Quantisation fused into dispatch. Every recipe on one architecture, nvfp4 with and without the
# hardware's conversions.

ELEMENTS_OF_A_LANE = 16

QUANTISING = (
    ("Fp8Block", "sm_90a"),
    ("Fp8Token", "sm_100a"),
    ("Fp8Tensor", "sm_90a"),
    ("Mxfp8", "sm_100a"),
    ("Nvfp4", "sm_90a"),
    ("Nvfp4", "sm_100a"),
    ("Fp8BlockPow2", "sm_100a"),
)
each_quantiser = pytest.mark.parametrize(("quantiser", "architecture"), QUANTISING)

#: What lanes exchange a block's largest magnitude with: 8 lanes, a whole warp, 2, or none.
EXCHANGES = {
    "Fp8Block": "SHFL",
    "Fp8BlockPow2": "SHFL",
    "Fp8Token": "REDUX",
    "Fp8Tensor": "",
    "Mxfp8": "SHFL",
    "Nvfp4": "",
}


@functools.cache
def quantising_cubin(quantiser: str, architecture: str) -> bytes:
    code = constants()[f"kQuantiser{quantiser}"]
    text = kernel_texts.specialised_source(COMMON_TOP_K, BF16, quantiser=code)
    return nvrtc.compile_cubin(text, architecture)


@functools.cache
def quantising_listing(quantiser: str, architecture: str) -> tuple[Instruction, ...]:
    return disassemble(quantising_cubin(quantiser, architecture), KERNELS[0])


def quantising_names(quantiser: str, architecture: str) -> tuple[str, ...]:
    return tuple(one.name for one in quantising_listing(quantiser, architecture))


def count_of(names: tuple[str, ...], pattern: str) -> int:
    return sum(re.match(pattern, name) is not None for name in names)


@each_quantiser
def test_quantising_costs_no_registers(quantiser: str, architecture: str) -> None:
    """As many as dispatch of rows as they come may have, though a thread holds 16 elements."""
    usage = cuobjdump(quantising_cubin(quantiser, architecture), "-res-usage")
    line = re.search(rf"Function {KERNELS[0]}:\n\s*(REG:.*)", usage)
    assert line is not None, usage
    numbers = {key: int(value) for key, value in re.findall(r"(\w+):(\d+)", line[1])}
    assert numbers["STACK"] == numbers["LOCAL"] == 0, line[1]
    assert numbers["REG"] <= MAX_REGISTERS[KERNELS[0]], line[1]
    names = quantising_names(quantiser, architecture)
    assert not count_of(names, r"(LDL|STL)\b")
    assert not generic_accesses(names)


@each_quantiser
def test_quantised_rows_are_moved_wide(quantiser: str, architecture: str) -> None:
    """16 elements of bf16 are two loads of 16 bytes, both on their way before either is waited for;
    their codes are one store to each target, of 16 bytes or (e2m1) of 8.
    """
    plain = instructions(COMMON_TOP_K, BF16, architecture, KERNELS[0])
    names = quantising_names(quantiser, architecture)
    loads = [i for i, name in enumerate(names) if name.startswith("LDG.E.128")]
    assert len(loads) - count_of(plain, r"LDG\.E\.128") >= 2
    converts = [i for i, name in enumerate(names) if name.startswith("F2FP")]
    first, second = [i for i in loads if i < converts[0]][-2:]
    code = quantising_listing(quantiser, architecture)
    assert not any(one.registers() & code[first].loaded() for one in code[first + 1 : second])
    store = r"STG\.E\.64$" if quantiser == "Nvfp4" else r"STG\.E\.128"
    stores = [i for i, name in enumerate(names) if re.match(store, name)]
    assert len(stores) - count_of(plain, store) == COMMON_TOP_K
    assert sum(i > converts[0] for i in stores) >= COMMON_TOP_K


@each_quantiser
def test_conversions_of_the_hardware(quantiser: str, architecture: str) -> None:
    """Two elements an instruction. sm_90a has none to e2m1; nvfp4's scales are e4m3."""
    names = quantising_names(quantiser, architecture)
    e4m3, e2m1 = (count_of(names, rf"F2FP\.SATFINITE\.{name}\.F32") for name in ("E4M3", "E2M1"))
    pairs = ELEMENTS_OF_A_LANE // 2
    assert (e4m3 >= 1) if quantiser == "Nvfp4" else (e4m3 >= pairs)
    assert e2m1 == (pairs if (quantiser, architecture) == ("Nvfp4", "sm_100a") else 0)


@each_quantiser
def test_lanes_exchange_without_memory(quantiser: str, architecture: str) -> None:
    names = quantising_names(quantiser, architecture)
    for exchange in ("SHFL", "REDUX"):
        assert bool(count_of(names, f"C?{exchange}")) == (EXCHANGES[quantiser] == exchange)


@each_quantiser
def test_quantising_adds_no_barrier(quantiser: str, architecture: str) -> None:
    """Nor an ordered access: a row's amax is published by the barrier that ends its routing."""
    ordered = re.compile(r"BAR\.|MEMBAR|CCTL|ATOMG|REDG|ACQBULK|PREEXIT|.*\.STRONG\.")
    plain = instructions(COMMON_TOP_K, BF16, architecture, KERNELS[0])
    names = quantising_names(quantiser, architecture)
    assert sorted(filter(ordered.match, names)) == sorted(filter(ordered.match, plain))


@each_quantiser
def test_a_quantising_dispatch_touches_nothing_before_its_wait(
    quantiser: str, architecture: str
) -> None:
    assert_waits_first(quantising_names(quantiser, architecture))


# These checks can fail.


def test_arithmetic_instead_of_a_conversion_is_noticed() -> None:
    code = constants()["kQuantiserMxfp8"]
    text = kernel_texts.specialised_source(COMMON_TOP_K, BF16, quantiser=code)
    text = text.replace(
        "constexpr bool kHasFp8Conversions = true;", "constexpr bool kHasFp8Conversions = false;"
    )
    names = {one.name for one in disassemble(nvrtc.compile_cubin(text, "sm_90a"), KERNELS[0])}
    assert not any(name.startswith("F2FP.SATFINITE") for name in names)


@each_architecture
def test_loads_that_wait_for_sums_are_noticed(architecture: str) -> None:
    text = kernel_texts.specialised_source(8, BF16)
    text = replace_once(text, "    if (element >= last) return;\n", "")
    text = replace_once(
        text,
        "    const int place = element < last ? element : first;\n",
        "    if (element >= last) return;\n    const int place = element;\n",
    )
    code = disassemble(nvrtc.compile_cubin(text, architecture), "moe_nvlink_combine")
    assert loads_before_first_use(code) < 8


def test_a_generic_access_is_noticed() -> None:
    text = kernel_texts.specialised_source(8, BF16)
    plain = text.replace("load_word(&local_control(args)->epoch)", "local_control(args)->epoch")
    assert plain != text
    for kernel in KERNELS:
        code = disassemble(nvrtc.compile_cubin(plain, "sm_90a"), kernel)
        assert generic_accesses(tuple(one.name for one in code))


def test_relaxed_text_is_told_apart() -> None:
    """These checks would notice: without the release no store waits for what came before it."""
    text = kernel_texts.specialised_source(8, BF16)
    relaxed = text.replace("st.release.sys", "st.relaxed.sys").replace("ld.acquire", "ld.relaxed")
    relaxed = relaxed.replace("atom.acq_rel", "atom.relaxed")
    assert relaxed != text
    sass = cuobjdump(nvrtc.compile_cubin(relaxed, "sm_90a"), "-sass", "-fun", KERNELS[1])
    assert "MEMBAR" not in sass
    assert "CCTL.IVALL" not in sass


def test_no_driver_is_needed() -> None:
    code = (
        "from moe_nvlink_plugin.jit import nvrtc; from tests.support import kernel_texts;"
        "text = kernel_texts.specialised_source(2, 0);"
        "assert nvrtc.compile_cubin(text, 'sm_90a')[:4] == b'\\x7fELF';"
        "raise SystemExit('libcuda.so' in open('/proc/self/maps').read())"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, timeout=120)
    assert done.returncode == 0


def test_refused_text_shows_the_log() -> None:
    with pytest.raises(
        CompileError, match=r"NVRTC \d+\.\d+ failed for sm_90a:\n[^\0]*no_such_type"
    ):
        nvrtc.compile_cubin('extern "C" __global__ void f(no_such_type x) {}', "sm_90a")


def test_a_spill_is_an_error() -> None:
    """256 values live at once in a kernel that may use 32 registers."""
    body = "float v[256]; for (int i = 0; i < 256; ++i) v[i] = p[i * 1024];"
    total = "for (int i = 255; i >= 0; --i) p[i] = v[i] * v[255 - i];"
    text = f'extern "C" __global__ void __launch_bounds__(1024, 2) f(float* p) {{ {body} {total} }}'
    with pytest.raises(CompileError, match="spill"):
        nvrtc.compile_cubin(text, "sm_90a")
