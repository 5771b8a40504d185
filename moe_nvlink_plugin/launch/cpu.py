"""CPU ranks: a launch is a call, which returns after the kernel has run.

A launch that runs beside its caller is such a call on another thread.

A framework gives a rank its cores through the OpenMP runtime: it sets GOMP_CPU_AFFINITY or
KMP_AFFINITY (or OMP_PLACES). The runtime then binds its first thread, which is the program's main
thread, to the first of these cores. Every thread inherits the binding of the thread that starts it.
So without spread() all threads of our kernels would share that one core with the main thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import torch

from moe_nvlink_plugin.jit import host
from moe_nvlink_plugin.jit.header import structs

from . import signals
from .base import Budget, Interrupted
from .kernel import Kernel, S, Variant


@functools.cache
def places() -> tuple[frozenset[int], ...]:
    """Return the sets of cores to which OpenMP binds its threads; none if it binds none. Local."""
    runtime = ctypes.CDLL(None)  # torch has loaded OpenMP, or the linker (LD_PRELOAD)
    found = []
    try:
        if not runtime.omp_get_proc_bind():  # Intel's runtime has places then, too
            return ()
        for place in range(runtime.omp_get_num_places()):
            ids = (ctypes.c_int * runtime.omp_get_place_num_procs(place))()
            runtime.omp_get_place_proc_ids(place, ids)
            found.append(frozenset(ids))
    except AttributeError:  # a torch without OpenMP, or an OpenMP older than 4.5
        return ()
    return tuple(found)


def spread() -> None:
    """Let the calling thread, and threads that it will start, use all bound cores. Local.

    A thread whose cores are not a place of OpenMP's keeps them: somebody else has chosen them. So
    does a thread to which Linux refuses the others.
    """
    if os.sched_getaffinity(0) in places():
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, frozenset[int]().union(*places()))


@contextlib.contextmanager
def spreading() -> Iterator[None]:
    """Let threads that the calling thread starts in this block use all bound cores. Local."""
    before = os.sched_getaffinity(0)
    spread()
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, before)


class _HostFaultWords:
    def __init__(self, count: int) -> None:
        self.words = (ctypes.c_uint64 * count)()

    def connect(self, channel: int, local_control: torch.Tensor) -> None:
        control: Any = structs()["LocalControl"].from_address(local_control.data_ptr())
        control.host_fault = ctypes.addressof(self.words) + 8 * channel

    def clear(self, channel: int) -> None:
        self.words[channel] = 0

    def leak(self) -> None:
        """Do nothing: no launch outlives its call."""


class _HostWordReader:
    def read(self, address: int, count: int) -> list[int]:
        return list((ctypes.c_uint64 * count).from_address(address))


class _HostLauncher:
    def __init__(self, library: host.HostLibrary, num_threads: int) -> None:
        # Each launcher has its own threads, because two channels may be in flight at the same time.
        with spreading():
            self.grid = library.create_grid(num_threads)
        self._library = library
        library.serve_signals_by(signals.SERVE, signals.IS_GIVEN_UP)
        self.end_threads = weakref.finalize(self, library.destroy_grid, self.grid)
        _launchers.add(self)

    def load(self, kernel: Kernel[S], sizes: S, **instead: int) -> _HostLaunch:
        """See Launcher. The library serves all values; `sizes` and `instead` have no effect."""
        return _HostLaunch(self, self._library.kernel(kernel.name, kernel.args_type()))


_launchers: weakref.WeakSet[_HostLauncher] = weakref.WeakSet()


def _forget_threads() -> None:
    """Wait for no thread of the parent, after a fork: none of them is here."""
    for launcher in list(_launchers):
        launcher.end_threads.detach()


os.register_at_fork(after_in_child=_forget_threads)


class _HostLaunch:
    def __init__(self, launcher: _HostLauncher, run: Callable[[Any, int], None]) -> None:
        self._launcher = launcher  # keeps the threads alive
        self._run = run

    def __call__(self, args: Any) -> None:
        self._run(args, self._launcher.grid)
        if signals.raised:
            signals.raise_in_main_thread()


class HostExecutor:
    """Runs the host build of the kernels. The kernels of each caller have their own threads."""

    asynchronous = False

    def num_sms(self) -> int:
        """Return 0."""
        return 0

    captured = False

    def is_capturing(self) -> bool:
        """Return False: a CUDA graph cannot hold a call on the host."""
        return False

    def synchronize(self) -> None:
        """Do nothing: a launch has finished when it returns."""

    def synchronize_device(self) -> None:
        """Do nothing, as synchronize; a thread that runs beside its caller is joined."""

    def beside(self, channel: int, launch: Callable[[], None]) -> Callable[[], None]:
        """See Executor. The launch runs on a thread, which ends with it."""
        done: Future[None] = Future()
        given_up = threading.Event()

        def run() -> None:
            signals.end_waits_when(given_up)
            spread()
            try:
                launch()
            except BaseException as error:
                done.set_exception(error)
            else:
                done.set_result(None)

        # No daemon: at its end the interpreter waits for the thread, which uses shared memory.
        thread = threading.Thread(target=run, name=f"moe_nvlink channel {channel}")
        thread.start()

        def wait() -> None:
            try:
                thread.join()
            except BaseException as error:  # a handler's: of any type, but never the launch's
                given_up.set()
                raise Interrupted(error) from None
            done.result()

        return wait

    def is_in_handler(self) -> bool:
        """See WorkspaceExecutor. Handlers of signals run while a launch of their thread waits."""
        return signals.is_in_handler()

    def fault_words(self, count: int) -> _HostFaultWords:
        """See WorkspaceExecutor. The words lie in ordinary memory of this process."""
        return _HostFaultWords(count)

    def word_reader(self, most: int) -> _HostWordReader:
        """See WorkspaceExecutor. Kernels run on this process's threads and its peers' processes."""
        return _HostWordReader()

    def launcher(self, variant: Variant, budget: Budget) -> _HostLauncher:
        """See Executor. Compiles the family's host library on first use."""
        return _HostLauncher(host.load(variant.family.host_source()), budget.num_threads)
