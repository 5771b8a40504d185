"""Compiles: the text of kernels to PTX by NVRTC, PTX to C++, and that by g++ to a library.

library = build.load(build.ptx_of(text, "sm_90a"), races=True)
library["moe_nvlink_dispatch"].sites
"""

from __future__ import annotations

import ctypes
import functools
import shlex
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from moe_nvlink_plugin import env
from moe_nvlink_plugin.jit import cache, host, nvrtc

from . import translate

RUNTIME = Path(__file__).parent / "runtime"
FLAGS = (
    "-std=c++20",
    "-O1",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-strict-aliasing",  # registers and memory are bits of any type
    "-fno-gnu-unique",  # libraries of several modes lie in one process
    "-fwrapv",
    "-w",
    "-fPIC",
    "-shared",
    "-pthread",
)
ORDERS = ("weak", "relaxed", "acquire", "release", "acq_rel", "sc")
SCOPES = ("none", "cta", "gpu", "sys")
KINDS = (
    "load",
    "store",
    "async_store",
    "atomic",
    "fence",
    "barrier",
    "warp_barrier",
    "warp",
    "grid_wait",
    "proxy_fence",
)


@functools.cache
def ptx_of(text: str, architecture: str) -> str:
    """PTX of a text, with the product's options and with source lines.

    Raises:
        UnsupportedError: no NVRTC.
        CompileError: NVRTC refused the text.
    """
    library = nvrtc._nvrtc()
    options = [f"--gpu-architecture={architecture}", *nvrtc.OPTIONS, "-lineinfo"]

    def check(result: tuple[Any, ...]) -> Any:
        return nvrtc._check(library, result)

    program = check(library.nvrtcCreateProgram(text.encode(), b"moe_nvlink.cu", 0, [], []))
    try:
        check(library.nvrtcCompileProgram(program, len(options), [o.encode() for o in options]))
        made: bytes = b" " * check(library.nvrtcGetPTXSize(program))
        check(library.nvrtcGetPTX(program, made))
        return made.decode().rstrip("\0")
    finally:
        library.nvrtcDestroyProgram(program)


class RawSite(ctypes.Structure):
    _fields_ = [
        ("text", ctypes.c_char_p),
        ("line", ctypes.c_uint32),
        ("source_line", ctypes.c_uint32),
        ("kind", ctypes.c_uint8),
        ("order", ctypes.c_uint8),
        ("scope", ctypes.c_uint8),
        ("removed", ctypes.c_uint8),
    ]


class _Kernel(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("run", ctypes.c_void_p),
        ("sites", ctypes.POINTER(RawSite)),
        ("resume_lines", ctypes.c_void_p),
        ("num_sites", ctypes.c_uint32),
        ("register_bytes", ctypes.c_uint32),
        ("num_registers", ctypes.c_uint32),
        ("param_bytes", ctypes.c_uint32),
        ("shared_bytes", ctypes.c_uint32),
    ]


class _ModuleMemory(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
        ("bytes", ctypes.c_uint64),
    ]


class Site:
    """One instruction that touches memory or meets other threads; order, scope and removed can be
    changed, which is what a mutant of the PTX is.
    """

    def __init__(self, raw: RawSite) -> None:
        self._raw = raw
        self._original = (raw.order, raw.scope)
        self.text: str = raw.text.decode()
        self.line: int = raw.line
        self.source_line: int = raw.source_line
        self.kind = KINDS[raw.kind]

    @property
    def order(self) -> str:
        return ORDERS[self._raw.order]

    @order.setter
    def order(self, value: str) -> None:
        self._raw.order = ORDERS.index(value)

    @property
    def scope(self) -> str:
        return SCOPES[self._raw.scope]

    @scope.setter
    def scope(self, value: str) -> None:
        self._raw.scope = SCOPES.index(value)

    @property
    def removed(self) -> bool:
        return bool(self._raw.removed)

    @removed.setter
    def removed(self, value: bool) -> None:
        self._raw.removed = value

    def reset(self) -> None:
        """As the PTX has it."""
        self._raw.order, self._raw.scope = self._original
        self._raw.removed = 0

    def __repr__(self) -> str:
        return f"<PTX line {self.line}: {self.text}>"


class Kernel(NamedTuple):
    """One entry of a library; `raw` is what a machine takes that has its mode (races, clock)."""

    name: str
    raw: Any
    sites: list[Site]
    param_bytes: int
    mode: tuple[bool, bool]


class Library(Mapping[str, Kernel]):
    """The kernels of one module of PTX, for machines of one mode."""

    def __init__(self, path: Path, mode: tuple[bool, bool]) -> None:
        self.path = path
        self._library = ctypes.CDLL(str(path))
        count = ctypes.c_uint32.in_dll(self._library, "num_kernels").value
        raw = (_Kernel * count).in_dll(self._library, "kernels")
        self._kernels = {each.name.decode(): _kernel(each, mode) for each in raw}

    def variables(self) -> Iterator[tuple[str, int, int]]:
        """(name, address, bytes) of the module's own memory."""
        first = ctypes.pointer(_ModuleMemory.in_dll(self._library, "variables"))
        index = 0
        while first[index].name is not None:
            yield first[index].name.decode(), first[index].address, first[index].bytes
            index += 1

    def reset(self) -> None:
        """Every site as the PTX has it."""
        for kernel in self._kernels.values():
            for site in kernel.sites:
                site.reset()

    def __getitem__(self, name: str) -> Kernel:
        return self._kernels[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._kernels)

    def __len__(self) -> int:
        return len(self._kernels)


def _kernel(raw: _Kernel, mode: tuple[bool, bool]) -> Kernel:
    sites = [Site(raw.sites[number]) for number in range(raw.num_sites)]
    return Kernel(raw.name.decode(), raw, sites, raw.param_bytes, mode)


def load(ptx: str, *, races: bool = False, clock: bool = False) -> Library:
    """Kernels of a module for a machine of the same mode. Seconds, unless it is in the cache.

    Raises:
        UnknownPtxError: see translate.to_cpp.
        CompileError: there is no g++, or it failed.
    """
    return Library(library_path(ptx, races=races, clock=clock), (races, clock))


@functools.cache
def library_path(ptx: str, *, races: bool = False, clock: bool = False) -> Path:
    """The file that `load` loads."""
    runtime = runtime_path(races=races, clock=clock)
    # Without races and clock, code runs no slower for -Og and compiles twice as fast.
    flags = (*FLAGS, *_mode_flags(races, clock), *(() if races or clock else ("-Og",)))
    text = translate.to_cpp(ptx)

    def build(target: Path) -> None:
        header = str(_precompiled_header(flags)).removesuffix(".gch")
        # The library names the runtime that it needs by its path. Words of 16 bytes need libatomic.
        needs = ("-include", header, "-Wl,--no-as-needed", str(runtime), "-latomic")
        host.compile_text(text, target, (*flags, *needs))

    key = "\0".join(("ptx", _compiler(), str(runtime), *flags, text))
    return cache.get_or_build(key, ".so", build)


@functools.cache
def _precompiled_header(flags: tuple[str, ...]) -> Path:
    """generated.h, whose parsing would take half of the time of each library."""

    def build(target: Path) -> None:
        header = str(RUNTIME / "generated.h")
        command = [*shlex.split(env.cxx()), *flags, "-x", "c++-header", header, "-o", str(target)]
        subprocess.run(command, check=True)

    key = "\0".join(("ptx header", _compiler(), *flags, *_headers()))
    return cache.get_or_build(key, ".h.gch", build)


@functools.cache
def _compiler() -> str:
    """Which one, and its version: a precompiled header is of use to no other."""
    command = [*shlex.split(env.cxx()), "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return " ".join(command) + done.stdout


def _headers() -> list[str]:
    return [path.read_text(encoding="utf-8") for path in sorted(RUNTIME.glob("*.h"))]


@functools.cache
def runtime_path(*, races: bool = False, clock: bool = False) -> Path:
    """The machine of a mode."""
    flags = (*FLAGS[:1], "-O2", *FLAGS[2:], *_mode_flags(races, clock), f"-I{RUNTIME}")
    text = (RUNTIME / "machine.cpp").read_text(encoding="utf-8")

    def build(target: Path) -> None:
        host.compile_text(text, target, flags)

    key = "\0".join(("ptx runtime", *FLAGS, *_mode_flags(races, clock), text, *_headers()))
    return cache.get_or_build(key, ".so", build)


def _mode_flags(races: bool, clock: bool) -> tuple[str, str]:
    return f"-DPTX_RACES={int(races)}", f"-DPTX_CLOCK={int(clock)}"
