"""The host library for aarch64, run by qemu-user: programs, calls, and ranks of an exchange.

qemu translates the program's instructions to those of this machine, and puts a barrier wherever an
access of aarch64 could be seen in another order. So it executes the NEON code, and it shows no
acquire or release that the kernels lack.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_nvlink_plugin import HeadConfig
from moe_nvlink_plugin.jit import host
from moe_nvlink_plugin.launch.shape import Shape
from tests.support import kernel_texts
from tests.support.emulated import CpuBackend
from tests.support.head_ranks import HeadRanksInStep
from tests.support.ptx.backend import tensors_of_kernel, windows_of

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
DISASSEMBLER = "aarch64-linux-gnu-objdump"  # the compiler's package asks for it
_PACKAGES = {COMPILER: "g++-aarch64-linux-gnu", EMULATOR: "qemu-user"}
_MISSING = [package for tool, package in _PACKAGES.items() if shutil.which(tool) is None]

IS_EMULATED = pytest.mark.skipif(
    bool(_MISSING), reason=f"not installed: {' '.join(_MISSING)} (Debian's packages)"
)

#: The product's, but for a program that needs no library of the other machine.
FLAGS = tuple(
    "-static" if flag == "-shared" else flag for flag in host.flags_of("aarch64") if flag != "-fPIC"
)

_ARENA_BYTES = 1 << 26
_ALIGNMENT = 256


def build(text: str, folder: Path, *flags: str) -> Path:
    """Compiles a program into a folder; with the flag -c, an object file."""
    program = folder / "program"
    command = [COMPILER, *FLAGS, "-Wno-psabi", *flags, "-x", "c++", "-", "-o", str(program)]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return program


def disassembly(built: Path) -> dict[str, str]:
    """Symbol -> code."""
    command = [DISASSEMBLER, "-d", "--no-show-raw-insn", "--demangle", str(built)]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return dict(re.findall(r"^[0-9a-f]+ <(.*)>:\n((?:.+\n)+)", listing, re.MULTILINE))


def build_library(folder: Path) -> Path:
    """The whole library with conversions.cpp, as a program that Calls talks to."""
    text = Path(__file__).with_suffix(".cpp").read_text(encoding="utf-8")
    return build(kernel_texts.host_source() + text, folder)


class Calls:
    """A running program of build_library. What a call reads and writes is copied there and back."""

    def __init__(self, process: subprocess.Popen[str], arena: mmap.mmap) -> None:
        self._process, self._arena, self._used = process, arena, 0
        self._here = ctypes.addressof(ctypes.c_char.from_buffer(arena))
        self._there = int(self._answer())
        self._placed: dict[int, tuple[int, int]] = {}  # address here -> offset, bytes

    def place(self, address: int, size: int) -> int:
        """Copies memory of this process; returns where the program finds it. Null stays null."""
        if not address:
            return 0
        if address not in self._placed:
            offset = self._used + address % _ALIGNMENT  # as far from a boundary as it is here
            self._used = -(-(offset + size) // _ALIGNMENT) * _ALIGNMENT
            assert self._used <= _ARENA_BYTES, f"the arena is too small for {self._used} bytes"
            ctypes.memmove(self._here + offset, address, size)
            self._placed[address] = offset, size
        return self._there + self._placed[address][0]

    def call(self, name: str, *words: int | torch.Tensor) -> None:
        """Calls a function; tensors stand for their addresses and have its results afterwards."""
        given = [
            self.place(word.data_ptr(), word.nbytes) if isinstance(word, torch.Tensor) else word
            for word in words
        ]
        assert self._process.stdin is not None
        print(name, len(given), *given, file=self._process.stdin, flush=True)
        assert self._answer() == "done"
        for address, (offset, size) in self._placed.items():
            ctypes.memmove(address, self._here + offset, size)
        self._placed, self._used = {}, 0

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        assert line, f"{EMULATOR} ended with status {self._process.wait(timeout=10)}"
        return line


@contextlib.contextmanager
def running(program: Path) -> Iterator[Calls]:
    """A program of build_library, ready for calls."""
    with tempfile.NamedTemporaryFile() as file:
        file.truncate(_ARENA_BYTES)
        arena = mmap.mmap(file.fileno(), _ARENA_BYTES)
        command = [EMULATOR, str(program), file.name, str(_ARENA_BYTES)]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            try:
                yield Calls(process, arena)
            finally:
                process.kill()


class Aarch64Backend(CpuBackend):
    """Ranks of tests/support/emulated.py, whose kernels the program runs."""

    def __init__(self, calls: Calls, ctas: int) -> None:
        self._calls, self.ctas = calls, ctas

    def prepare(
        self, verb: str, rank_arguments: Sequence[Any], shape: Shape | None = None
    ) -> Callable[[], None]:
        copies = [type(args).from_buffer_copy(args) for args in rank_arguments]

        def launch() -> None:
            made = [self._moved(verb, args) for args in copies]
            places = [
                self._calls.place(ctypes.addressof(args), ctypes.sizeof(args)) for args in made
            ]
            self._calls.call(verb, self.ctas, *places)

        return launch

    def _moved(self, verb: str, args: Any) -> Any:
        """Arguments with the program's addresses: each word that is in memory of theirs here."""
        windows = windows_of(args)
        spans = [(windows[0].address, sum(window.size_bytes for window in windows))]
        spans += [(address, size) for address, size, _name in tensors_of_kernel(verb, args)]
        moves = [(address, size, self._calls.place(address, size)) for address, size in spans]
        words = (ctypes.c_uint64 * (ctypes.sizeof(args) // 8)).from_buffer_copy(args)
        for index, word in enumerate(words):
            for address, size, place in moves:
                if address <= word < address + size:
                    words[index] = place + word - address
        return type(args).from_buffer_copy(words)

    def close(self) -> None:
        """The program goes on for other ranks."""


class Aarch64HeadRanks(HeadRanksInStep):
    """Ranks of tests/support/head_ranks.py, whose kernels the program runs."""

    def __init__(self, config: HeadConfig, calls: Calls, ctas: int) -> None:
        super().__init__(config, None)
        self._backend = Aarch64Backend(calls, ctas)

    def launch_all(self, kernel: str, ranks: Sequence[int], arguments: Sequence[Any]) -> None:
        self._backend.prepare(kernel, arguments)()
