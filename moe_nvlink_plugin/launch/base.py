"""The shape of an executor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from moe_nvlink_plugin.config import AllToAllConfig
from moe_nvlink_plugin.lm_head.config import HeadConfig


class Launcher(Protocol):
    """Both kernels of one layer on one channel. One thread at a time."""

    def dispatch(self, args: Any) -> None:
        """Launches dispatch with DispatchArgs, which it copies; num_tokens is read from them."""
        ...

    def combine(self, args: Any) -> None:
        """Launches combine with CombineArgs, which it copies; sets their hidden_splits."""
        ...


class HeadLauncher(Protocol):
    """The kernels of one shared LM head, all with HeadArgs, which they copy. One thread at a time.

    num_rows and row_bound are read from the arguments.
    """

    def gather(self, args: Any) -> None:
        """Launches gather."""
        ...

    def argmax(self, args: Any) -> None:
        """Launches argmax; sets row_splits."""
        ...

    def collect(self, args: Any) -> None:
        """Launches collect."""
        ...


class FaultWords(Protocol):
    """One word per channel that a kernel writes a fault into and the host reads at any time."""

    def connect(self, channel: int, local_control: torch.Tensor) -> None:
        """Tells the kernels of a channel, by its LocalControl bytes, where its word is."""
        ...

    def read(self, channel: int) -> int:
        """The word (epoch_flags.h, pack_fault), or 0. Waits for nothing."""
        ...

    def leak(self) -> None:
        """Keeps the words until the process ends."""
        ...


class Executor(Protocol):
    """What one workspace's kernels are launched with."""

    @property
    def asynchronous(self) -> bool:
        """Whether a launch returns before the kernel has run."""
        ...

    @property
    def captured(self) -> bool:
        """Whether a launch has been captured into a CUDA graph."""
        ...

    def is_capturing(self) -> bool:
        """Whether launches of this thread now go into a CUDA graph."""
        ...

    def synchronize(self) -> None:
        """Waits for what this thread's stream has been given."""
        ...

    def fault_words(self, count: int) -> FaultWords:
        """Words that are 0."""
        ...

    def launcher(
        self,
        config: AllToAllConfig,
        row_bytes: Mapping[str, int],
        quantiser: int,
        ranks_on_device: int = 1,
    ) -> Launcher:
        """For one layer and channel. All that a launch needs is loaded here, so that the first
        one may be captured.

        Args:
            row_bytes: bytes of one token's row, by payload.
            quantiser: kQuantiser* of config.h that dispatch may be launched with, beside None.
            ranks_on_device: as SymmetricMemory has it.

        Raises:
            CompileError: the kernels cannot be had, or threads cannot be started.
            ConfigError: the device has no room for what may wait there at the same time.
        """
        ...

    def head_launcher(self, config: HeadConfig, ranks_on_device: int = 1) -> HeadLauncher:
        """For one shared LM head; as `launcher`.

        Raises:
            CompileError: the kernels cannot be had, or threads cannot be started.
            ConfigError: the device has no room for what may wait there at the same time.
        """
        ...
