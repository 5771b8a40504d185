"""FlashInfer's communicators as groups of ours: at start-up alone, to meet and compare."""

from __future__ import annotations

from typing import Any

import torch.distributed

from moe_nvlink_plugin.errors import ConfigError


class CommunicatorGroup:
    """Group over an object with `Get_rank`, `Get_size` and `allgather`, as MPI spells them."""

    def __init__(self, communicator: Any) -> None:
        self.communicator = communicator
        self.rank: int = communicator.Get_rank()
        self.size: int = communicator.Get_size()

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return every rank's value, in rank order. Collective."""
        return list(self.communicator.allgather(value))


def group_of(communicator: Any, process_group: Any, hint: str) -> Any:
    """Return the group of an exchange, as `MoeAllToAll.create` takes it. Local.

    Args:
        communicator: an object as CommunicatorGroup takes it, or None.
        process_group: what to take without a communicator; None: all ranks of torch.distributed.
        hint: what a caller can pass, for the message.

    Raises:
        ConfigError: there is neither a communicator nor a process group.
    """
    if communicator is not None:
        return CommunicatorGroup(communicator)
    if process_group is not None:
        return process_group
    if not torch.distributed.is_initialized():
        raise ConfigError(
            f"torch.distributed is not initialised; call init_process_group() first, or pass {hint}"
        )
    return torch.distributed.group.WORLD


def default_device(index: int | None = None) -> torch.device:
    """Return the GPU of this rank; without CUDA, the CPU. Local."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device() if index is None else index)
