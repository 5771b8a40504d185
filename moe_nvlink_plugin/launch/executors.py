"""Choice of the executor for a device."""

from __future__ import annotations

import torch

from moe_nvlink_plugin.errors import UnsupportedError

from .base import Executor
from .cpu import HostExecutor


def executor_for(name: str, device: torch.device) -> Executor:
    """Make the executor that a transport names. Local.

    Args:
        name: "host" or "cuda".
        device: where the tensors are.

    Raises:
        UnsupportedError: the GPU or its driver cannot run the kernels.
    """
    if name == "host":
        return HostExecutor()
    from .cuda import CudaExecutor

    assert name == "cuda", name
    return CudaExecutor(device)


def with_index(device: torch.device) -> torch.device:
    """Return the device as its tensors have it: "cuda" is the current GPU, "cpu:0" is "cpu". Local.

    Raises:
        UnsupportedError: torch sees no GPU.
    """
    if device.type != "cuda":
        return torch.device(device.type)
    if not torch.cuda.is_available():
        raise UnsupportedError(
            f"device {device}: torch {torch.__version__} sees no GPU; install its CUDA build "
            "(moe-nvlink doctor says what else is missing), or use device 'cpu'"
        )
    return torch.empty(0, device=device).device
