"""The shape of a transport."""

from __future__ import annotations

from typing import Protocol

import torch

from moe_nvlink_plugin.groups import Group


class SymmetricMemory(Protocol):
    """One workspace per rank, all mapped here: rank r's starts at base_ptr + r * rank_stride."""

    @property
    def base_ptr(self) -> int:
        """Address of rank 0's workspace in this process."""
        ...

    @property
    def rank_stride(self) -> int:
        """Bytes from one rank's workspace to the next."""
        ...

    def local(self, offset: int, size_bytes: int) -> torch.Tensor:
        """Bytes of this rank's workspace, `[size_bytes] uint8`; the tensor keeps them mapped.

        Each call gives a storage of its own: outputs of a torch op must not share one.
        """
        ...

    def close(self) -> None:
        """Gives the memory up; it is unmapped when the last tensor over it is gone. Local."""
        ...


class Transport(Protocol):
    """Registered through the hook `moe_nvlink_transports`, ours as well as a stranger's."""

    @property
    def name(self) -> str:
        """What AllToAllConfig.transport says."""
        ...

    def serves(self, device: torch.device) -> bool:
        """Whether ranks on `device` can use it."""
        ...

    def allocate(self, group: Group, size_bytes: int, device: torch.device) -> SymmetricMemory:
        """Zeroed symmetric memory of `size_bytes` per rank. Collective.

        Raises, on every rank, TransportError where this rank failed and PeerError elsewhere.
        """
        ...
