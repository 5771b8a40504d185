"""CPU ranks: a launch is a call that returns when the kernel has run."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Mapping
from typing import Any

import torch

from moe_nvlink_plugin.config import AllToAllConfig
from moe_nvlink_plugin.jit import host
from moe_nvlink_plugin.jit.header import structs
from moe_nvlink_plugin.lm_head.config import HeadConfig


class _HostFaultWords:
    def __init__(self, count: int) -> None:
        self._words = (ctypes.c_uint64 * count)()

    def connect(self, channel: int, local_control: torch.Tensor) -> None:
        control: Any = structs()["LocalControl"].from_address(local_control.data_ptr())
        control.host_fault = ctypes.addressof(self._words) + 8 * channel

    def read(self, channel: int) -> int:
        return self._words[channel]

    def leak(self) -> None:
        """Nothing: no launch outlives its call."""


class _HostLauncher:
    def __init__(self, library: host.HostLibrary, num_threads: int) -> None:
        # Threads of its own: two channels may be in flight at the same time.
        self._grid = library.create_grid(num_threads)
        self._library = library
        weakref.finalize(self, library.destroy_grid, self._grid)

    def dispatch(self, args: Any) -> None:
        self._library.dispatch(args, self._grid)

    def combine(self, args: Any) -> None:
        self._library.combine(args, self._grid)


class _HostHeadLauncher:
    def __init__(self, library: host.HostLibrary, num_threads: int) -> None:
        self._grid = library.create_grid(num_threads)
        self._library = library
        weakref.finalize(self, library.destroy_grid, self._grid)

    def gather(self, args: Any) -> None:
        self._library.head("head_gather", args, self._grid)

    def argmax(self, args: Any) -> None:
        self._library.head("head_argmax", args, self._grid)

    def collect(self, args: Any) -> None:
        self._library.head("head_collect", args, self._grid)


class HostExecutor:
    """Runs the host build of the kernels on `config.num_threads` threads per channel."""

    asynchronous = False
    captured = False

    def is_capturing(self) -> bool:
        """Never: a CUDA graph cannot hold a host call."""
        return False

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def fault_words(self, count: int) -> _HostFaultWords:
        """Ordinary memory of this process."""
        return _HostFaultWords(count)

    def launcher(
        self,
        config: AllToAllConfig,
        row_bytes: Mapping[str, int],
        quantiser: int,
        ranks_on_device: int = 1,
    ) -> _HostLauncher:
        """See Executor. Compiles the host library on first use."""
        assert config.num_threads is not None
        return _HostLauncher(host.load(), config.num_threads)

    def head_launcher(self, config: HeadConfig, ranks_on_device: int = 1) -> _HostHeadLauncher:
        """See Executor. Compiles the host library on first use."""
        assert config.num_threads is not None
        return _HostHeadLauncher(host.load(), config.num_threads)
