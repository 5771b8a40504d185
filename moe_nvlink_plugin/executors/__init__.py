"""How a kernel is launched: as a call on CPU threads, or by the CUDA driver on a stream."""

from __future__ import annotations

import torch

from .base import Executor, FaultWords, Launcher
from .host import HostExecutor

__all__ = ["Executor", "FaultWords", "Launcher", "executor_for"]


def executor_for(name: str, device: torch.device) -> Executor:
    """The executor a transport names, for tensors on `device`. Local.

    Raises:
        UnsupportedError: the GPU or its driver cannot run the kernels.
    """
    if name == "host":
        return HostExecutor()
    from .cuda import CudaExecutor

    assert name == "cuda", name
    return CudaExecutor(device)
