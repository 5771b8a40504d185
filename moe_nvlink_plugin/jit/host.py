"""The host compiler: kernels/ to a shared object for CPU ranks, which ctypes loads."""

from __future__ import annotations

import ctypes
import errno
import functools
import itertools
import os
import platform
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

from moe_nvlink_plugin import env
from moe_nvlink_plugin.errors import CompileError

from . import cache
from .header import structs


def flags_of(machine: str) -> tuple[str, ...]:
    """Return the compiler's arguments for a machine, which platform.machine() names. Local."""
    # Every aarch64 processor has NEON, and `native` would add SVE where the processor has it. With
    # SVE g++ 12 makes scalar code of the kernels' vectors (tests/kernels/test_aarch64.py).
    march = "-march=armv8-a" if machine == "aarch64" else "-march=native"
    return (
        "-std=c++20",
        "-Werror=switch",  # a switch over codes of config.h must have a case for each code
        "-O3",
        march,
        "-ffp-contract=off",  # with fused multiply-add, results would differ between machines
        "-fno-math-errno",
        "-fPIC",
        "-shared",
        "-pthread",
    )


T = TypeVar("T")

FLAGS = flags_of(platform.machine())

_COMPILE_TIMEOUT_S = 280.0
#: What g++ says if memory runs out: itself, its assembler and linker, or Linux's killer.
_NO_MEMORY = ("out of memory", "memory exhausted", "Cannot allocate memory", "Killed signal")

#: Suffix of the exported function that returns a struct's size -> name of the struct.
_CONTROL_STRUCTS = {"local_control": "LocalControl", "exchange_counters": "ExchangeCounters"}


def compile_text(text: str, target: Path, flags: tuple[str, ...] = FLAGS) -> None:
    """Compile one translation unit with the host compiler. Local; seconds.

    Args:
        text: the translation unit.
        target: file to write.
        flags: arguments of the compiler.

    Raises:
        CompileError: there is no compiler, it failed, or it took over 280 s. The message has its
            log.
        ConfigError: MOE_NVLINK_CXX is no command.
    """
    command = [*env.cxx_words(), *flags, "-x", "c++", "-", "-o", str(target)]
    try:
        done = subprocess.run(
            command,
            input=text,
            capture_output=True,
            encoding="utf-8",  # whatever the locale
            errors="replace",
            timeout=_COMPILE_TIMEOUT_S,
        )
    except FileNotFoundError as error:
        raise CompileError(f"no host compiler: {not_found(command[0])}") from error
    except OSError as error:
        raise CompileError(f"cannot start {command[0]!r}: {_remedied(error)}") from error
    except subprocess.TimeoutExpired as error:
        raise CompileError(
            f"{command[0]} took over {_COMPILE_TIMEOUT_S:g} s and was stopped; try again when the "
            "machine is less busy"
        ) from error
    if done.returncode != 0:
        log = done.stderr.strip() or f"no message, exit code {done.returncode}"
        raise CompileError(f"{shlex.join(command)} failed:\n{log}{_hint(log)}")


def not_found(name: str) -> str:
    """Return what to say and to do if the host compiler's command does not exist. Local."""
    if env.cxx() != "g++":
        return f"{name!r} not found (MOE_NVLINK_CXX={env.cxx()!r}); correct it, or unset it for g++"
    return "'g++' not found; install g++ 11 or newer (apt-get install g++) or set MOE_NVLINK_CXX"


def _remedied(error: OSError) -> str:
    if error.errno in (errno.ENOMEM, errno.EAGAIN):
        return f"{error.strerror}; memory or processes are limited (ulimit -v, ulimit -u)"
    return f"{error.strerror}; set MOE_NVLINK_CXX to a C++ compiler, or unset it for g++"


def _hint(log: str) -> str:
    """Return what to do about a log that does not say it; "" if there is nothing to say."""
    if any(words in log for words in _NO_MEMORY):
        return "\nThe compiler had too little memory: raise the limit (ulimit -v) or free some"
    if env.cxx() != "g++":
        return f"\nMOE_NVLINK_CXX={env.cxx()!r} must be g++ 11 or newer; unset it for g++"
    return ""


@functools.cache
def _machine() -> str:
    # Part of the key because of -march=native: machines with other CPUs may share a home directory.
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "features", "cpu part")
    return "\n".join(line for line in lines if line.lower().startswith(wanted))


def build(text: str, flags: tuple[str, ...] = FLAGS) -> Path:
    """Return the shared object of a translation unit; compile it if the cache lacks it. Local.

    Raises:
        CompileError: as compile_text, or the cache directory cannot be used.
    """
    return _built(text, flags, lambda entry: entry.path)


def _built(text: str, flags: tuple[str, ...], read: cache.Read[T]) -> T:
    def build(target: Path) -> None:
        compile_text(text, target, flags)
        if not target.exists():
            raise CompileError(
                f"MOE_NVLINK_CXX={env.cxx()!r} wrote no file: it must be a C++ compiler; unset it "
                "for g++"
            )

    key = "\0".join((text, *flags, env.cxx(), _machine()))
    return cache.load_or_build(key, ".so", build, read)


class HostLibrary:
    """One loaded shared object, whose kernels run on CPU threads.

    Raises:
        CompileError: it cannot be loaded, or a control struct of the library has another size than
            its mirror in Python.
    """

    def __init__(self, path: Path, spelling: str = "") -> None:
        try:
            self._library = ctypes.CDLL(f"{path.parent}/{spelling}{path.name}")
        except OSError as error:
            raise CompileError(
                f"cannot load {os.path.realpath(path)}: {error}; if its file system is mounted "
                "noexec, set MOE_NVLINK_CACHE_DIR to a directory on another one; if memory is "
                "short, see `ulimit -v`"
            ) from error
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
                f"{struct.__name__} has {there} bytes in the library, {here} in Python; the cache "
                "or the installation is damaged: install moe-nvlink-plugin again and empty the "
                "cache directory"
            )

    def kernel(self, name: str, struct: type[ctypes.Structure]) -> Callable[[Any, int], None]:
        """Return a kernel as a function of (arguments, grid). Local.

        The function returns after the kernel has finished. Other Python threads run meanwhile.

        Args:
            name: the kernel's name.
            struct: mirror of the kernel's arguments.

        Raises:
            CompileError: the library's struct has another size than the mirror.
        """
        self._check_size(f"{name}_args", struct)
        function = getattr(self._library, f"moe_nvlink_{name}")
        function.restype = None
        function.argtypes = [ctypes.POINTER(struct), ctypes.c_void_p]
        return cast("Callable[[Any, int], None]", function)

    def serve_signals_by(self, main: Callable[[], int], others: Callable[[], int]) -> None:
        """Have waits call these ctypes functions every 50 ms: in the main thread, in others. Local.

        If one returns another number than 0, the launch is given up: it ends as if all its waits
        had reached their limits.
        """
        self._library.moe_nvlink_serve_signals_by(main, others)

    def create_grid(self, num_threads: int) -> int:
        """Start threads to launch on; return their handle, which destroy_grid takes. Local.

        Raises:
            CompileError: the threads cannot be started.
        """
        grid = self._library.moe_nvlink_grid_create(num_threads)
        if not grid:
            raise CompileError(f"cannot start {num_threads} threads; lower num_threads")
        return int(grid)

    def destroy_grid(self, grid: int) -> None:
        """End the grid's threads. Local. No launch may run on the grid."""
        self._library.moe_nvlink_grid_destroy(grid)


@functools.cache
def load(text: str) -> HostLibrary:
    """Return this process's library of a text. Local; the first use may compile for seconds.

    Raises:
        CompileError: as `build`, or the library's structs differ from the mirrors in Python.
    """
    return _built(text, FLAGS, _loaded)


_loads = itertools.count()


def _loaded(entry: cache.Entry) -> HostLibrary:
    # glibc takes two libraries of one name for one, and a program may close descriptors: so each
    # load spells the path in another way. Debuggers find the file as long as ours is open.
    descriptor = os.dup(entry.descriptor)
    try:
        return HostLibrary(Path(f"/proc/self/fd/{descriptor}"), "./" * next(_loads))
    except BaseException:
        os.close(descriptor)
        raise
