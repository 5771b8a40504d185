"""What the GPU compiler makes of the kernels: it takes them without a driver, and in the machine
code stand the wide accesses and the ordered ones that the text asks for.

This is all that is known of the GPU path in this release: compiled and read, not run.
"""

from __future__ import annotations

import functools
import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from moe_nvlink_plugin.errors import CompileError
from moe_nvlink_plugin.jit import nvrtc, source
from moe_nvlink_plugin.jit.header import constants

pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings is not installed")
pytestmark = pytest.mark.timeout(280)

BF16, FP16, FP32 = (constants()[f"kElement{name}"] for name in ("Bf16", "Fp16", "Fp32"))
GEOMETRIES = ((1, BF16), (6, FP16), (8, BF16), (22, BF16), (22, FP32), (32, FP32))
KERNELS = ("moe_nvlink_dispatch", "moe_nvlink_combine")

#: So many registers leave room for two CTAs of 256 threads on an SM; asked of common top_k only.
MAX_REGISTERS = 128
COMMON_TOP_K = 8


@functools.cache
def cubin(top_k: int, element: int, architecture: str) -> bytes:
    return nvrtc.compile_cubin(source.specialised_source(top_k, element), architecture)


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


@functools.cache
def instructions(top_k: int, element: int, architecture: str, kernel: str) -> tuple[str, ...]:
    """Names of the instructions, with their modifiers, in the order of the code."""
    sass = cuobjdump(cubin(top_k, element, architecture), "-sass", "-fun", kernel)
    found = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9_.]+)", sass)
    assert len(found) > 100, f"{kernel}: the disassembly has {len(found)} instructions"
    return tuple(found)


each_kernel = pytest.mark.parametrize("kernel", KERNELS)
each_architecture = pytest.mark.parametrize("architecture", nvrtc.ARCHITECTURES)
each_geometry = pytest.mark.parametrize(("top_k", "element"), GEOMETRIES)


@each_architecture
@each_geometry
def test_compiles_without_spills(top_k: int, element: int, architecture: str) -> None:
    usage = cuobjdump(cubin(top_k, element, architecture), "-res-usage")
    for kernel in KERNELS:
        line = re.search(rf"Function {kernel}:\n\s*(REG:.*)", usage)
        assert line is not None, usage
        numbers = {key: int(value) for key, value in re.findall(r"(\w+):(\d+)", line[1])}
        assert numbers["STACK"] == numbers["LOCAL"] == 0, f"{kernel}: {line[1]}"
        if top_k <= COMMON_TOP_K:
            assert numbers["REG"] <= MAX_REGISTERS, f"{kernel}: {line[1]}"
        # Local memory would be a spilled register or an array that did not unroll.
        local = re.compile(r"(LDL|STL)\b")
        names = instructions(top_k, element, architecture, kernel)
        assert not [name for name in names if local.match(name)], kernel


@each_kernel
@each_architecture
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
    # Generic accesses (LD, ST) find out at run time where they point.
    assert not [name for name in names if re.match(r"(LD|ST)\.E.*\.128", name)]


@each_kernel
@each_architecture
def test_ordered_accesses(architecture: str, kernel: str) -> None:
    names = instructions(8, BF16, architecture, kernel)
    release = [i for i, name in enumerate(names) if name == "STG.E.64.STRONG.SYS"]
    assert release, "no system-scope store of a cell"
    barriers = [i for i, name in enumerate(names) if name.startswith("MEMBAR") and "SYS" in name]
    # P1 / P3 release: what came before is put in order for the whole system, then the cell.
    assert any(0 < i - barrier < 8 for i in release for barrier in barriers)
    # The poll and, as an instruction of its own, the acquiring load behind it; then L1 is emptied.
    loads = [i for i, name in enumerate(names) if re.match(r"LDG\.E(\.64)?\.STRONG\.SYS", name)]
    assert len(loads) >= 2, f"the acquiring load is missing: {[names[i] for i in loads]}"
    empties = [i for i, name in enumerate(names) if name == "CCTL.IVALL"]
    assert any(0 < empty - loads[-1] < 8 for empty in empties)
    # Nothing ordered through a generic address.
    assert not [
        name
        for name in names
        if "STRONG" in name and name[:3] in {"LD.", "ST.", "ATO"} and not name.startswith("ATOMG")
    ]


@each_architecture
def test_cell_is_loaded_whole(architecture: str) -> None:
    """Count and epoch of a cell come from one load, or they could belong to two rounds."""
    assert "LDG.E.64.STRONG.SYS" in instructions(8, BF16, architecture, "moe_nvlink_dispatch")


@each_architecture
def test_arrival(architecture: str) -> None:
    """P2: a GPU-scope atomic behind this CTA's rows and before what reads the others'."""
    names = instructions(8, BF16, architecture, "moe_nvlink_dispatch")
    atomics = [i for i, name in enumerate(names) if re.match(r"ATOMG\.E\.ADD.*STRONG\.GPU", name)]
    assert len(atomics) >= 2, "one takes a slot (relaxed), one arrives (acq_rel)"
    arrival = atomics[-1]
    before, after = names[max(arrival - 10, 0) : arrival], names[arrival : arrival + 10]
    assert any(name.startswith("MEMBAR") and "GPU" in name for name in before), before
    assert "CCTL.IVALL" in after, after


@each_kernel
@each_architecture
def test_programmatic_dependent_launch(architecture: str, kernel: str) -> None:
    names = instructions(8, BF16, architecture, kernel)
    assert names.count("ACQBULK") == names.count("PREEXIT") == 1
    touches = [i for i, name in enumerate(names) if re.match(r"(LDG|STG|ATOMG|LD|ST)\.", name)]
    assert names.index("ACQBULK") < min(touches), "memory is touched before the wait"


def test_relaxed_text_is_told_apart() -> None:
    """These checks would notice: without the release no store waits for what came before it."""
    text = source.specialised_source(8, BF16)
    relaxed = text.replace("st.release.sys", "st.relaxed.sys").replace("ld.acquire", "ld.relaxed")
    assert relaxed != text
    sass = cuobjdump(nvrtc.compile_cubin(relaxed, "sm_90a"), "-sass", "-fun", KERNELS[1])
    assert "MEMBAR" not in sass
    assert "CCTL.IVALL" not in sass


def test_no_driver_is_needed() -> None:
    code = (
        "from moe_nvlink_plugin.jit import nvrtc, source;"
        "assert nvrtc.compile_cubin(source.specialised_source(2, 0), 'sm_90a')[:4] == b'\\x7fELF';"
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
