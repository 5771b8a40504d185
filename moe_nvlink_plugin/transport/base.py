"""Protocols that a transport and its memory implement."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from moe_nvlink_plugin.groups import Group

#: A CPU's huge page. A region of at least these bytes starts at a multiple of them.
HUGE_PAGE_BYTES = 2**21


class Extent(NamedTuple):
    """Range of every rank's workspace for which `extend` provides memory.

    Attributes:
        offset: bytes from the start of a rank's workspace; a multiple of the transport's
            extent_alignment.
        size_bytes: any number above 0. The memory reaches up to the next multiple of
            extent_alignment, so an extent that starts there continues this one without a gap.
    """

    offset: int
    size_bytes: int


class SymmetricMemory(Protocol):
    """One window over all ranks' workspaces; that of rank r starts at base_ptr + r * rank_stride.

    Both numbers are fixed for the life of the object. They may differ between processes.
    """

    @property
    def base_ptr(self) -> int:
        """Address of rank 0's workspace in this process."""
        ...

    @property
    def rank_stride(self) -> int:
        """Bytes from one rank's workspace to the next: at least the reserved bytes."""
        ...

    @property
    def ranks_on_device(self) -> int:
        """Number of ranks, this rank included, whose kernels must fit on this rank's GPU together.

        They must fit because they wait for each other. It is 1 on CPUs, where a waiting thread does
        not keep another thread from running.
        """
        ...

    def extend(self, extents: Sequence[Extent]) -> None:
        """Map zeroed memory of every rank at these ranges. Collective; not capturable.

        Memory that is already mapped keeps its address and its content.

        Args:
            extents: ranges of every rank's workspace, equal on all ranks.

        Raises:
            TransportError, UnsupportedError, DriverError: this rank failed.
            PeerError: another rank failed. In both cases nothing of this call remains on any rank.
        """
        ...

    def renew(self, group: Group) -> None:
        """Unmap everything, and go on with the ranks of another group. Collective over these.

        Address and stride stay, and so do tensors over the window, which nobody may touch before
        `extend` has mapped memory at their places again. Ranks of the group that have no memory yet
        call `Transport.reserve` meanwhile, whose collective steps are the same. Ranks of the old
        group need not take part: they keep what they have mapped, which is no longer ours.

        Only `MoeAllToAll.renew` calls it. A third-party memory without it serves all else.

        Args:
            group: the ranks; its size and this rank are those of before. If it has `members`, only
                these places have a rank.

        Raises:
            MoeNvlinkError: on every rank, if one rank fails; what was mapped may be gone.
        """
        ...

    def release(self) -> None:
        """Unmap everything; nobody touches tensors over the window before a renewal. Local.

        Address and stride stay. The caller has met the other ranks: none of them uses the memory.
        Only `release` of a layer or of a head group calls it, and `renew` comes next, or `close`. A
        third-party memory without it serves all else.

        Raises:
            TransportError, DriverError: it is closed, or cannot be unmapped.
        """
        ...

    def local(self, offset: int, size_bytes: int) -> torch.Tensor:
        """Return bytes of this rank's workspace, `[size_bytes]` uint8. Local.

        The tensor keeps the memory mapped. Every call returns a storage of its own, because outputs
        of a torch op must not share a storage.

        Raises:
            TransportError: `extend` has not mapped the whole range, or the memory is closed.
        """
        ...

    def close(self) -> None:
        """Give up the memory; it is unmapped after the last tensor over it is gone. Local.

        Peers keep their mappings of this memory until they close too. While this runs, no kernel
        that uses the window may run or wait in a stream.
        """
        ...

    def leak(self) -> None:
        """Keep the window mapped until the process ends, even after `close`. Local.

        A window needs this if a CUDA graph has captured its addresses, because nobody knows when
        the last replay is over.
        """
        ...


class Transport(Protocol):
    """Way to share memory between ranks.

    The hook `moe_nvlink_transports` registers transports, our own and third-party ones.
    """

    @property
    def name(self) -> str:
        """Name by which AllToAllConfig.transport selects the transport."""
        ...

    @property
    def executor(self) -> str:
        """Name of the executor that runs the kernels on this memory: "host" or "cuda"."""
        ...

    @property
    def extent_alignment(self) -> int:
        """Bytes whose multiples extents start at: the smallest unit that the transport maps."""
        ...

    def serves(self, device: torch.device) -> bool:
        """Return whether ranks on `device` can use the transport. Local."""
        ...

    def reserve(self, group: Group, reserve_bytes: int, device: torch.device) -> SymmetricMemory:
        """Reserve a window of at least `reserve_bytes` per rank, with nothing mapped. Collective.

        The ranks reach all their agreements here.

        Raises:
            MoeNvlinkError: on every rank, if one rank fails; names that rank and the cause.
        """
        ...
