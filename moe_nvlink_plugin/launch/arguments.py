"""The fields that the argument structs of all kernels have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from moe_nvlink_plugin.jit.header import constants, structs
from moe_nvlink_plugin.memory.layout import Region

from .kernel import Kernel

_ELEMENTS = {
    torch.bfloat16: "kElementBf16",
    torch.float16: "kElementFp16",
    torch.float32: "kElementFp32",
}


def element_code(dtype: torch.dtype) -> int:
    """Return kElement* of config.h for an activation type: bfloat16, float16 or float32."""
    return constants()[_ELEMENTS[dtype]]


class Window(NamedTuple):
    """Place of all ranks' workspaces in this process's address space.

    Attributes:
        base_ptr: address of rank 0's workspace.
        rank_stride: bytes from one rank's workspace to the next rank's.
    """

    base_ptr: int
    rank_stride: int


def new_arguments(
    kernel: Kernel[Any], regions: Mapping[str, Region], window: Window, timeout_s: float | None
) -> Any:
    """Make a kernel's arguments: window, control regions and timeout are set, all else is 0.

    Args:
        kernel: names the struct.
        regions: regions of the channel, by name.
        window: place of the workspaces.
        timeout_s: seconds that the kernel waits for a peer at most.
    """
    args: Any = kernel.args_type()()
    args.window_base, args.rank_stride = window
    assert timeout_s is not None
    args.timeout_ns = int(timeout_s * 1e9)
    for name, _type in structs()["ControlRegions"]._fields_:  # type: ignore[misc]
        setattr(args.control, name, regions[name].block)
    return args
