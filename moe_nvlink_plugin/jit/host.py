"""The host executor: kernels/ compiled by the host compiler and loaded through ctypes."""

from __future__ import annotations

import ctypes
import functools
import platform
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moe_nvlink_plugin import env
from moe_nvlink_plugin.errors import CompileError

from . import cache
from .header import structs

# -ffp-contract=off: a fused multiply-add would round differently from machine to machine.
FLAGS = (
    "-std=c++20",
    "-Werror=switch",  # a switch over codes of config.h has a case for each
    "-O3",
    "-march=native",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fPIC",
    "-shared",
    "-pthread",
)

_COMPILE_TIMEOUT_S = 280.0

#: Structs that the executors and the kernels share, by the suffix of the exported function.
_CONTROL_STRUCTS = {"local_control": "LocalControl", "exchange_counters": "ExchangeCounters"}


def compile_text(text: str, target: Path, flags: tuple[str, ...] = FLAGS) -> None:
    """Compiles one translation unit with the host compiler into `target`.

    Raises:
        CompileError: no compiler, or it failed; its log is in the message.
    """
    command = [*shlex.split(env.cxx()), *flags, "-x", "c++", "-", "-o", str(target)]
    try:
        done = subprocess.run(
            command, input=text, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT_S
        )
    except FileNotFoundError as error:
        raise CompileError(
            f"no host compiler: {command[0]!r} not found; install g++ 11 or newer (apt-get install "
            "g++) or set MOE_NVLINK_CXX"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise CompileError(f"{command[0]} took over {_COMPILE_TIMEOUT_S:g} s; stopped") from error
    if done.returncode != 0:
        raise CompileError(f"{shlex.join(command)} failed:\n{done.stderr}")


@functools.cache
def _machine() -> str:
    # -march=native: a cache on a shared home directory must not serve another CPU's code.
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "features", "cpu part")
    return "\n".join(line for line in lines if line.lower().startswith(wanted))


def build(text: str, flags: tuple[str, ...] = FLAGS) -> Path:
    """The shared object of a translation unit, from the cache or freshly compiled."""
    key = "\0".join((text, *flags, env.cxx(), _machine()))
    return cache.get_or_build(key, ".so", lambda target: compile_text(text, target, flags))


class HostLibrary:
    """Launches the kernels of one shared object on CPU threads.

    Raises:
        CompileError: the library's control structs differ from the mirrors in Python.
    """

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        self._library.moe_nvlink_grid_create.restype = ctypes.c_void_p
        self._library.moe_nvlink_grid_create.argtypes = [ctypes.c_int]
        self._library.moe_nvlink_grid_destroy.argtypes = [ctypes.c_void_p]
        for name, struct in _CONTROL_STRUCTS.items():
            self._check_size(name, structs()[struct])

    def _check_size(self, name: str, struct: type[ctypes.Structure]) -> None:
        here = ctypes.sizeof(struct)
        there = getattr(self._library, f"moe_nvlink_sizeof_{name}")()
        if here != there:
            raise CompileError(
                f"{struct.__name__} has {there} bytes in the library, {here} in Python"
            )

    def kernel(self, name: str, struct: type[ctypes.Structure]) -> Callable[[Any, int], None]:
        """The kernel of that name as a function of (arguments, grid), where `struct` is the
        mirror of its arguments. The function returns when the kernel has finished; ctypes lets
        other Python threads run meanwhile.

        Raises:
            CompileError: the library's struct differs from the mirror.
        """
        self._check_size(f"{name}_args", struct)
        function = getattr(self._library, f"moe_nvlink_{name}")
        function.restype = None
        function.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        return lambda args, grid: function(ctypes.addressof(args), grid)

    def create_grid(self, num_threads: int) -> int:
        """Threads to launch on; destroy_grid gives them back."""
        grid = self._library.moe_nvlink_grid_create(num_threads)
        if not grid:
            raise CompileError(f"cannot start {num_threads} threads; lower num_threads")
        return int(grid)

    def destroy_grid(self, grid: int) -> None:
        """Ends the grid's threads; no launch may be running on it."""
        self._library.moe_nvlink_grid_destroy(grid)


@functools.cache
def load(text: str) -> HostLibrary:
    """The process's library of this text; compiled on first use (seconds), then from the cache."""
    return HostLibrary(build(text))
