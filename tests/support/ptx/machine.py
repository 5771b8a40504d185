"""A machine of ranks that execute kernels made of PTX; see runtime/machine.h.

with Machine(ranks=2, seed=1) as machine:
    machine.allocate(0, tensor.data_ptr(), tensor.nbytes, "workspace")
    machine.launch(0, library["moe_nvlink_dispatch"], grid=4, block=128, params=bytes(args))
    machine.run()
"""

from __future__ import annotations

import ctypes
import functools
from types import TracebackType
from typing import Any

from . import build
from .build import Kernel, Library


class PtxError(AssertionError):
    """What the machine found; the message names rank, launch, CTA, thread, PTX and source line."""


class OutOfBoundsError(PtxError): ...


class MisalignedError(PtxError): ...


class UninitialisedError(PtxError):
    """Shared memory that no thread of the CTA has written."""


class DivergenceError(PtxError):
    """Threads that should meet are elsewhere, or have ended."""


class DeadlockError(PtxError): ...


class RaceError(PtxError):
    """Two accesses, one of them a write, that nothing orders."""


class TrapError(PtxError): ...


_FAULTS = {each.__name__.removesuffix("Error"): each for each in PtxError.__subclasses__()}


@functools.cache
def _runtime(races: bool, clock: bool) -> Any:
    library = ctypes.CDLL(str(build.runtime_path(races=races, clock=clock)))
    pointer, text = ctypes.c_void_p, ctypes.c_char_p
    u32, u64, whole = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_int
    triple = ctypes.POINTER(u32)
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "create": (pointer, [whole, u64, whole]),
        "destroy": (None, [pointer]),
        "limit_ctas": (None, [pointer, u32]),
        "make_late": (None, [pointer, whole, u32]),
        "allocate": (None, [pointer, whole, u64, u64, text]),
        "release": (None, [pointer, u64]),
        "launch": (None, [pointer, whole, pointer, triple, triple, text, u64, u32, whole]),
        "run": (text, [pointer]),
        "message": (text, [pointer]),
        "host": (text, [pointer, whole, u64, u64, whole]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, f"ptx_{name}")
        function.restype, function.argtypes = result, arguments
    return library


class Machine:
    """Ranks with a stream and memory each. One thread of the host runs them all.

    Args:
        seed: decides the order in which threads run.
        races: report accesses that nothing orders; libraries must be loaded so too.
        clock: count virtual time; the same.
    """

    def __init__(
        self, ranks: int, *, seed: int = 0, races: bool = False, clock: bool = False
    ) -> None:
        self.mode = (races, clock)
        self._runtime = _runtime(races, clock)
        self._handle = self._runtime.ptx_create(ranks, seed, 0)

    def allocate(self, rank: int, address: int, size_bytes: int, name: str) -> None:
        """Memory that kernels of every rank may touch; it is local for `rank`."""
        if size_bytes:
            self._runtime.ptx_allocate(self._handle, rank, address, size_bytes, name.encode())

    def release(self, address: int) -> None:
        """Memory that kernels may no longer touch. All streams are empty."""
        self._runtime.ptx_release(self._handle, address)

    def use(self, library: Library) -> None:
        """Lets kernels touch the variables of their module."""
        for name, address, size in library.variables():
            self.allocate(0, address, size, name)

    def limit_ctas(self, most: int) -> None:
        """How many CTAs of a launch from now on a rank holds, in the grid's order, if of no other
        launch; 0: any number.
        """
        self._runtime.ptx_limit_ctas(self._handle, most)

    def make_late(self, rank: int, cta: int) -> None:
        """From now on this CTA of the rank's launches runs when all other threads wait or poll."""
        self._runtime.ptx_make_late(self._handle, rank, cta)

    def launch(
        self,
        rank: int,
        kernel: Kernel,
        grid: int | tuple[int, ...],
        block: int | tuple[int, ...],
        params: bytes,
        *,
        shared_bytes: int = 0,
        pdl: bool = False,
    ) -> None:
        """Enqueue a launch in the rank's stream.

        Args:
            params: as the entry lays them out.
            shared_bytes: of dynamic shared memory.
            pdl: it may begin when the launch before it lets dependents start.

        Raises:
            ValueError: the parameters have another size than the entry's, or the library another
                mode than the machine.
        """
        if kernel.mode != self.mode:
            raise ValueError(
                f"{kernel.name} was loaded with (races, clock) = {kernel.mode}, this machine has "
                f"{self.mode}; load it with the machine's"
            )
        if len(params) != kernel.param_bytes:
            raise ValueError(
                f"{kernel.name} takes {kernel.param_bytes} bytes of parameters, not {len(params)}"
            )
        self._runtime.ptx_launch(
            self._handle,
            rank,
            ctypes.addressof(kernel.raw),
            _three(grid),
            _three(block),
            params,
            len(params),
            shared_bytes,
            pdl,
        )

    def run(self) -> None:
        """Run until all streams are empty.

        Raises:
            PtxError: the first finding; the streams are then empty too.
        """
        self._raise(self._runtime.ptx_run(self._handle))

    def host_read(self, rank: int, address: int, size_bytes: int) -> None:
        """The host of a rank reads, after the rank's stream. Raises RaceError."""
        self._raise(self._runtime.ptx_host(self._handle, rank, address, size_bytes, 0))

    def host_write(self, rank: int, address: int, size_bytes: int) -> None:
        """The host of a rank writes, after the rank's stream. Raises RaceError."""
        self._raise(self._runtime.ptx_host(self._handle, rank, address, size_bytes, 1))

    def _raise(self, kind: bytes | None) -> None:
        if kind is not None:
            message = self._runtime.ptx_message(self._handle)
            raise _FAULTS[kind.decode()](message.decode())

    def close(self) -> None:
        if self._handle:
            self._runtime.ptx_destroy(self._handle)
        self._handle = None

    def __enter__(self) -> Machine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _three(sizes: int | tuple[int, ...]) -> Any:
    given = (sizes,) if isinstance(sizes, int) else sizes
    return (ctypes.c_uint32 * 3)(*given, *([1] * (3 - len(given))))
