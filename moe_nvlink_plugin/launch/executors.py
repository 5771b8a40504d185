"""The choice of an executor."""

from __future__ import annotations

import torch

from moe_nvlink_plugin.errors import UnsupportedError

from .base import Executor
from .host import HostExecutor


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


def with_index(device: torch.device) -> torch.device:
    """The device as tensors name it: "cuda" is the current GPU. Local.

    Raises:
        UnsupportedError: torch sees no GPU.
    """
    if device.type != "cuda":
        return device
    if not torch.cuda.is_available():
        raise UnsupportedError(
            f"device {device}: torch {torch.__version__} sees no GPU; install its CUDA build "
            "(moe-nvlink doctor tells what else is missing), or use device 'cpu'"
        )
    return torch.empty(0, device=device).device
