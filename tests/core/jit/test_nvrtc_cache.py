"""GPU kernels through the cache: with a compiler, without one, and with one that says no."""

from __future__ import annotations

import builtins
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from moe_nvlink_plugin import driver
from moe_nvlink_plugin.errors import CompileError, UnsupportedError
from moe_nvlink_plugin.exchange.kernels import DISPATCH, LAYER
from moe_nvlink_plugin.jit import cache, header, nvrtc
from moe_nvlink_plugin.launch import machine_code
from moe_nvlink_plugin.launch.kernel import Build
from tests.support.programs import python
from tests.support.sass import disassemble

SMALL = 'extern "C" __global__ void f(int* p) { *p = 1; }'
#: 256 values live at once in a kernel that may use 32 registers.
SPILLING = (
    'extern "C" __global__ void __launch_bounds__(1024, 2) f(float* p) { float v[256]; '
    "for (int i = 0; i < 256; ++i) v[i] = p[i * 1024]; "
    "for (int i = 255; i >= 0; --i) p[i] = v[i] * v[255 - i]; }"
)


def build_of(top_k: int, dtype: str = "bf16", *, pdl: bool = True) -> Build:
    return LAYER.variant(top_k=top_k, dtype=dtype).build(DISPATCH, pdl=pdl)


def cubin_of(
    top_k: int, dtype: str = "bf16", architecture: str = "sm_90a", *, pdl: bool = True
) -> bytes:
    """Dispatch as a rank asks for it."""
    wanted = LAYER.variant(top_k=top_k, dtype=dtype)
    return machine_code.cubin_for(build_of(top_k, dtype, pdl=pdl), architecture, wanted)


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    monkeypatch.setenv("MOE_NVLINK_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def folder(gpu_compiler: Any, alone: Path) -> Path:
    """The same, beside a compiler."""
    return alone


@pytest.fixture
def no_bindings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine where cuda-bindings is not installed."""
    really = builtins.__import__

    def refuse(name: str, *arguments: Any, **named: Any) -> Any:
        if name.startswith("cuda"):
            raise ImportError(f"No module named {name!r}")
        return really(name, *arguments, **named)

    monkeypatch.setattr(builtins, "__import__", refuse)


def forbid_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "compile_cubin", mock.Mock(side_effect=AssertionError("compiled")))


def test_architectures_are_those_of_the_driver_table() -> None:
    assert tuple(driver.ARCHITECTURES.values()) == nvrtc.ARCHITECTURES


def test_compiled_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = nvrtc.load_or_compile(SMALL, "sm_90a")
    assert first == nvrtc.compile_cubin(SMALL, "sm_90a")
    forbid_compiling(monkeypatch)
    assert nvrtc.load_or_compile(SMALL, "sm_90a") == first


def test_what_the_key_is_made_of(
    gpu_compiler: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvrtc.load_or_compile(SMALL, "sm_90a")
    nvrtc.load_or_compile(SMALL, "sm_100a")
    nvrtc.load_or_compile(SMALL + "\n", "sm_90a")
    monkeypatch.setattr(nvrtc, "OPTIONS", (*nvrtc.OPTIONS, "--fmad=true"))
    nvrtc.load_or_compile(SMALL, "sm_90a")
    assert len(list(folder.glob("*.cubin"))) == 4
    # Another NVRTC finds what this one has made.
    monkeypatch.setattr(gpu_compiler, "nvrtcVersion", lambda: (gpu_compiler.nvrtcResult(0), 99, 9))
    assert nvrtc.version() == "99.9"
    forbid_compiling(monkeypatch)
    nvrtc.load_or_compile(SMALL, "sm_90a")


def test_geometries_have_kernels_of_their_own(folder: Path) -> None:
    kinds = [(dtype, pdl) for dtype in header.elements() for pdl in (False, True)]
    assert len({build_of(2, dtype, pdl=pdl).text() for dtype, pdl in kinds}) == 6
    assert cubin_of(2) != cubin_of(2, "fp16", pdl=False)
    assert len(list(folder.glob("*.cubin"))) == 2
    assert nvrtc.is_cached(build_of(2).text(), "sm_90a")
    assert not nvrtc.is_cached(build_of(3).text(), "sm_90a")


def names_lines_of(source: Path, cubin: bytes) -> bool:
    """Debug information has the folder and the name apart."""
    return all(f"{part}\0".encode() in cubin for part in (source.parent, source.name))


def test_lines_of_the_source(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same instructions with the lines of a file that lies beside them; another entry."""
    text = build_of(2).text()
    plain = nvrtc.load_or_compile(text, "sm_90a")
    assert b".debug_line" not in plain
    assert not list(folder.glob("*.cu"))
    (plain_path,) = folder.glob("*.cubin")

    monkeypatch.setenv("MOE_NVLINK_LINEINFO", "1")
    assert not nvrtc.is_cached(text, "sm_90a")
    lined = nvrtc.load_or_compile(text, "sm_90a")
    assert b".debug_line" in lined
    (source,) = folder.glob("*.cu")
    assert source.read_text() == text
    assert names_lines_of(source, lined)
    assert set(folder.glob("*.cubin")) == {plain_path, source.with_suffix(".cubin")}
    assert disassemble(lined, DISPATCH.entry) == disassemble(plain, DISPATCH.entry)

    forbid_compiling(monkeypatch)
    assert nvrtc.load_or_compile(text, "sm_90a") == lined
    monkeypatch.setenv("MOE_NVLINK_LINEINFO", "0")
    assert nvrtc.load_or_compile(text, "sm_90a") == plain


def test_a_source_that_cannot_be_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_NVLINK_LINEINFO", "1")
    nvrtc.load_or_compile(SMALL, "sm_90a")
    (source,) = folder.glob("*.cu")
    source.with_suffix(".cubin").unlink()
    source.unlink()
    source.mkdir()
    refusal = f"cannot write {source}: Is a directory; remove that directory, or set MOE_NVLINK_"
    with pytest.raises(CompileError, match=re.escape(refusal)):
        nvrtc.load_or_compile(SMALL, "sm_90a")
    source.rmdir()
    assert names_lines_of(source, nvrtc.load_or_compile(SMALL, "sm_90a"))


# What lies in the cache may be damaged: test_cache.py has the ways that the checksum tells.


def flip_a_bit(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


def of_another_machine(data: bytes) -> bytes:
    """A whole file with its checksum, but for x86-64: e_machine 62."""
    cubin = data[:18] + (62).to_bytes(2, "little") + data[20:-32]
    return cache._sealed(cubin)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: cache._sealed(b"not ELF"),
        flip_a_bit,
        of_another_machine,
    ],
    ids=["sealed text", "a bit", "x86"],
)
def test_a_damaged_file_is_compiled_anew(
    gpu_compiler: Any,
    folder: Path,
    damage: Callable[[bytes], bytes],
    caplog: pytest.LogCaptureFixture,
) -> None:
    cubin = nvrtc.load_or_compile(SMALL, "sm_90a")
    (path,) = folder.glob("*.cubin")
    whole = path.read_bytes()
    assert damage(whole) != whole
    path.write_bytes(damage(whole))
    assert nvrtc.load_or_compile(SMALL, "sm_90a") == cubin
    assert path.read_bytes() == whole
    assert f"{path} is not used: it is damaged" in caplog.text


# No gpu_compiler.


def test_a_hit_needs_no_compiler(folder: Path, request: pytest.FixtureRequest) -> None:
    cubin = cubin_of(2)
    request.getfixturevalue("no_bindings")
    assert cubin_of(2) == cubin
    with pytest.raises(UnsupportedError, match=r"pip install 'moe-nvlink-plugin\[cuda\]'"):
        nvrtc.load_or_compile(SMALL, "sm_90a")


def test_a_hit_loads_no_compiler(folder: Path) -> None:
    cubin_of(2)
    code = (
        "import sys; from moe_nvlink_plugin.exchange.kernels import DISPATCH, LAYER;"
        "from moe_nvlink_plugin.launch import machine_code;"
        "wanted = LAYER.variant(top_k=2); build = wanted.build(DISPATCH, pdl=True);"
        "machine_code.cubin_for(build, 'sm_90a', wanted);"
        "raise SystemExit('cuda.bindings.nvrtc' in sys.modules)"
    )
    assert python("-c", code).returncode == 0


def test_a_miss_without_a_compiler_says_what_to_run(alone: Path, no_bindings: None) -> None:
    with pytest.raises(UnsupportedError) as caught:
        cubin_of(6, "fp16", "sm_103a", pdl=False)
    text = str(caught.value)
    assert text.startswith(f"no compiled kernels for top_k=6, dtype=fp16 on sm_103a in {alone}")
    line = "moe-nvlink precompile --arch sm_103a --geometry top_k=6,dtype=fp16 --no-pdl"
    assert f"\n  {line} --cache-dir DIR\n" in text
    assert "MOE_NVLINK_CACHE_DIR=DIR" in text
    assert not list(alone.glob("*.cubin"))


@pytest.mark.parametrize("kind", [RuntimeError, AttributeError])
def test_bindings_without_the_library(
    kind: type[Exception], gpu_compiler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = 'Failure finding "libnvrtc.so.13": No such file\nand more'
    missing = mock.Mock(side_effect=kind(told))
    monkeypatch.setattr(gpu_compiler, "nvrtcVersion", missing)
    with pytest.raises(UnsupportedError, match=r"no NVRTC library \(.*libnvrtc.so.13.*pip install"):
        nvrtc.load_or_compile(SMALL, "sm_90a")


# A compiler that says no.


@pytest.mark.parametrize("architecture", ["sm_99a", "sm_30", "hopper"])
def test_an_architecture_this_nvrtc_does_not_know(folder: Path, architecture: str) -> None:
    with pytest.raises(UnsupportedError, match=f"does not know {architecture} .*sm_90.*install"):
        nvrtc.load_or_compile(SMALL, architecture)


def test_an_nvrtc_older_than_the_architecture(
    gpu_compiler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    success = gpu_compiler.nvrtcResult(0)
    monkeypatch.setattr(gpu_compiler, "nvrtcGetSupportedArchs", lambda: (success, [80, 90, 100]))
    with pytest.raises(
        UnsupportedError, match=r"does not know sm_103a \(it knows sm_80, sm_90, sm_100\)"
    ):
        cubin_of(2, architecture="sm_103a")
    assert cubin_of(2)


def test_an_nvrtc_that_torch_has_loaded_is_too_old(
    gpu_compiler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torch 2.9 does, which is built for CUDA 12.8; what is in the cache needs none."""
    made = cubin_of(2)
    success = gpu_compiler.nvrtcResult(0)
    monkeypatch.setattr(gpu_compiler, "nvrtcVersion", lambda: (success, 12, 8))
    words = r"NVRTC 12\.8 is loaded, .* 13\.0\.48 or newer: .*built for CUDA 13, .*precompile"
    with pytest.raises(UnsupportedError, match=words):
        nvrtc.version()
    with pytest.raises(UnsupportedError, match=words):
        cubin_of(3)
    assert cubin_of(2) == made


def test_a_failure_shows_the_log_and_what_to_do(folder: Path) -> None:
    with pytest.raises(CompileError) as caught:
        nvrtc.load_or_compile("no_such_type f();", "sm_90a")
    text = str(caught.value)
    assert re.search(r"NVRTC \d+\.\d+ failed for sm_90a:\n", text)
    for part in ("no_such_type", "report", "MOE_NVLINK_CACHE_DIR"):
        assert part in text
    oldest, newest = nvrtc.TRIED
    assert f"NVRTC {oldest} and {newest} have compiled every kernel" in text
    assert not list(folder.glob("*.cubin"))


def test_a_spill_is_compiled_for_the_user_and_logged(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(CompileError, match="spill"):
        nvrtc.compile_cubin(SPILLING, "sm_90a")
    caplog.set_level(logging.WARNING)
    cubin = nvrtc.load_or_compile(SPILLING, "sm_90a")
    assert cubin == nvrtc.compile_cubin(SPILLING, "sm_90a", strict=False)
    assert "slower than they should be" in caplog.text
    assert "spill" in caplog.text


def test_the_checksum_stands_behind_the_elf_file(folder: Path) -> None:
    """So that cuobjdump reads the file as it lies in the cache."""
    cubin = nvrtc.load_or_compile(build_of(2).text(), "sm_90a")
    (path,) = folder.glob("*.cubin")
    assert path.read_bytes()[: len(cubin)] == cubin
