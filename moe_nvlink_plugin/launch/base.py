"""The shape of an executor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeAlias

from moe_nvlink_plugin.memory import executor

from .kernel import Kernel, S, Variant


class Budget(NamedTuple):
    """What the kernels of one caller may use, and beside whom they wait.

    Attributes:
        num_threads: of a CPU rank.
        max_sms: SMs that a launch may fill; None: all of a GPU.
        num_ranks: ranks of the group.
        num_channels: of the exchange; a kernel of each may wait at the same time.
        ranks_on_device: as SymmetricMemory has it.
    """

    num_threads: int
    max_sms: int | None
    num_ranks: int
    num_channels: int = 1
    ranks_on_device: int = 1


#: One loaded kernel, for one thread at a time: launches it with these arguments, which it copies,
#: and sets the field of Kernel.splits.
Launch: TypeAlias = Callable[[Any], None]


class Launcher(Protocol):
    """Loads the kernels of one caller on one channel. One thread at a time."""

    def load(self, kernel: Kernel[S], sizes: S, **instead: int) -> Launch:
        """All that a launch needs is loaded here, so that the first one may be captured.

        Args:
            sizes: for the kernel's launch shape.
            instead: of some values of the variant, by the names of their axes.

        Raises:
            CompileError: the kernel cannot be had.
            ConfigError: the device has no room for what may wait there at the same time.
        """
        ...


class Executor(executor.Executor, Protocol):
    """Launches kernels on one device."""

    @property
    def asynchronous(self) -> bool:
        """Whether a launch returns before the kernel has run."""
        ...

    def synchronize(self) -> None:
        """Waits for what this thread's stream has been given."""
        ...

    def launcher(self, variant: Variant, budget: Budget) -> Launcher:
        """For the kernels of one family.

        Raises:
            CompileError: the kernels cannot be had, or threads cannot be started.
            ConfigError: the device has no room for what may wait there at the same time.
        """
        ...
