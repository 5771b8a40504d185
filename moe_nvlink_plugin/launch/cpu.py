"""CPU ranks: a launch is a call, which returns after the kernel has run.

A launch that runs beside its caller is such a call on another thread.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch

from moe_nvlink_plugin.jit import host
from moe_nvlink_plugin.jit.header import structs

from . import cores, signals
from .base import Budget, Interrupted
from .kernel import Kernel, S, Variant


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
        with cores.spreading():
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

        def run() -> None:
            cores.spread()
            try:
                launch()
            except BaseException as error:
                done.set_exception(error)
            else:
                done.set_result(None)
            finally:
                signals.forget_thread()

        # No daemon: at its end the interpreter waits for the thread, which uses shared memory.
        thread = threading.Thread(target=run, name=f"moe_nvlink channel {channel}")
        thread.start()

        def wait() -> None:
            try:
                thread.join()
            except BaseException as error:  # a handler's: of any type, but never the launch's
                signals.give_up(thread)
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
