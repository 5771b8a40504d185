"""The shape of a transport."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from moe_nvlink_plugin.groups import Group


class Extent(NamedTuple):
    """A range of every rank's workspace that is to get memory.

    Attributes:
        offset: bytes from the start of a rank's workspace, a multiple of the transport's
            extent_alignment.
        size_bytes: any number above 0; memory comes up to the next such multiple, so that an
            extent which starts there continues this one without a hole.
    """

    offset: int
    size_bytes: int


class SymmetricMemory(Protocol):
    """One window over all ranks' workspaces; rank r's starts at base_ptr + r * rank_stride.

    Both numbers are fixed for the life of the object. They may differ from process to process.
    """

    @property
    def base_ptr(self) -> int:
        """Address of rank 0's workspace in this process."""
        ...

    @property
    def rank_stride(self) -> int:
        """Bytes from one rank's workspace to the next: as much as was reserved, or more."""
        ...

    @property
    def ranks_on_device(self) -> int:
        """Ranks of the group, this one included, whose kernels must fit on this rank's GPU together
        because they wait for each other there. 1 on CPUs, where a waiting thread keeps nobody out.
        """
        ...

    def extend(self, extents: Sequence[Extent]) -> None:
        """Puts zeroed memory of every rank behind these ranges. Collective, same on all ranks.

        What is mapped already keeps its address and its content.

        Raises:
            TransportError, UnsupportedError, DriverError: this rank failed.
            PeerError: another rank failed; either way nothing of this call remains on any rank.
        """
        ...

    def local(self, offset: int, size_bytes: int) -> torch.Tensor:
        """Bytes of this rank's workspace, `[size_bytes] uint8`; the tensor keeps them mapped.

        Each call gives a storage of its own: outputs of a torch op must not share one. Local.

        Raises:
            TransportError: the range is not wholly inside what `extend` mapped, or after `close`.
        """
        ...

    def close(self) -> None:
        """Gives the memory up; it is unmapped when the last tensor over it is gone. Local.

        Peers keep what they have mapped of it until they close it too. No kernel that uses the
        window may be running or waiting in a stream.
        """
        ...

    def leak(self) -> None:
        """From now on the window stays mapped until the process ends, also after `close`. Local.

        For a window whose addresses were written into a CUDA graph: nobody can tell when the last
        replay is over.
        """
        ...


class Transport(Protocol):
    """Registered through the hook `moe_nvlink_transports`, ours as well as a stranger's."""

    @property
    def name(self) -> str:
        """What AllToAllConfig.transport says."""
        ...

    @property
    def executor(self) -> str:
        """What runs the kernels on this memory: "host" or "cuda"."""
        ...

    @property
    def extent_alignment(self) -> int:
        """Extents start at multiples of this many bytes: the least the transport can map."""
        ...

    def serves(self, device: torch.device) -> bool:
        """Whether ranks on `device` can use it."""
        ...

    def reserve(self, group: Group, reserve_bytes: int, device: torch.device) -> SymmetricMemory:
        """A window with room for at least `reserve_bytes` per rank, nothing mapped. Collective.

        Whatever all ranks must agree about, they agree about here.

        Raises, on every rank, an error naming the rank it comes from and the cause.
        """
        ...
