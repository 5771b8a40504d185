"""Protocols of an executor, which launches kernels on one device, and of its parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeAlias

from moe_nvlink_plugin.memory.executor import WorkspaceExecutor

from .kernel import Kernel, S, Variant


class Budget(NamedTuple):
    """What the kernels of one caller may use of a device, and which kernels may wait beside them.

    Attributes:
        num_threads: threads of a CPU rank.
        max_sms: SMs that a launch may fill; None: all SMs of the GPU.
        num_ranks: ranks of the group.
        num_channels: channels of the exchange; a kernel of each may wait at the same time.
        ranks_on_device: ranks of the group on this device, as SymmetricMemory counts them.
        pdl: whether a kernel may start while the one before it in its stream ends.
    """

    num_threads: int
    max_sms: int | None
    num_ranks: int
    num_channels: int = 1
    ranks_on_device: int = 1
    pdl: bool = True


#: Launches one loaded kernel with a struct of arguments, and keeps no reference to the struct. On a
#: GPU it also sets the field that Kernel.splits names, and is capturable. One thread at a time may
#: call it. On CPU ranks it may raise Interrupted.
Launch: TypeAlias = Callable[[Any], None]


class Interrupted(BaseException):
    """A signal handler has raised during a launch, whose waits have then ended.

    Whoever counts rounds catches it, and raises `error` on.
    """

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


class Launcher(Protocol):
    """Loads the kernels of one caller on one channel. One thread at a time may use it."""

    def load(self, kernel: Kernel[S], sizes: S, **instead: int) -> Launch:
        """Load a kernel and all that its launches need, so the first launch may be captured. Local.

        Args:
            kernel: one of the launcher's family.
            sizes: what the kernel's launch shape depends on.
            instead: codes that replace values of the launcher's variant, by the names of the axes.

        Raises:
            CompileError: the kernel cannot be compiled or loaded.
            UnsupportedError: the kernel is not in the cache, and there is no compiler.
            ConfigError: an axis has no such value.
        """
        ...


class Executor(WorkspaceExecutor, Protocol):
    """Launches kernels on one device."""

    @property
    def asynchronous(self) -> bool:
        """Whether a launch returns before the kernel has run."""
        ...

    def num_sms(self) -> int:
        """Return how many SMs the kernels may use; 0 on CPU ranks. Local."""
        ...

    def synchronize(self) -> None:
        """Wait until this thread's stream has done all its work. Local; not capturable."""
        ...

    def synchronize_device(self) -> None:
        """Wait until all streams of the device have done their work. Local; not capturable."""
        ...

    def beside(self, channel: int, launch: Callable[[], None]) -> Callable[[], None]:
        """Run a launch beside the caller; return what waits for it. Local; capturable.

        What the caller's stream has done before is visible to the kernel. One launch of a channel
        at a time runs so.

        Args:
            channel: number of the channel. Launches of two channels do not wait for each other.
            launch: calls a Launch.

        Returns:
            A function for one call by any thread. On a GPU it makes the calling thread's stream
            wait for the kernel. On CPU ranks it waits for the kernel and raises what the launch
            has raised.
        """
        ...

    def launcher(self, variant: Variant, budget: Budget) -> Launcher:
        """Make the launcher for the kernels of one family. Local.

        Args:
            variant: the family and the values that its kernels are built for.
            budget: what the kernels may use.

        Raises:
            CompileError: the kernels cannot be compiled, or threads cannot be started.
            ConfigError: the device has no room for all kernels that may wait there at the same
                time.
        """
        ...
