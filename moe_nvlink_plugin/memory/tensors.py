"""Checks of one tensor that is handed to a verb: bad input never reaches memory."""

from __future__ import annotations

import torch

from moe_nvlink_plugin.errors import InputError


def check_device(name: str, tensor: torch.Tensor, expected: torch.device) -> None:
    """A tensor where the workspace is.

    Raises:
        InputError: it is elsewhere.
    """
    if tensor.device != expected:
        raise InputError(
            f"{name} is on {tensor.device}, this exchange works on {expected}; move it there"
        )


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    shape: tuple[int, ...],
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
) -> None:
    """A contiguous tensor of this shape and one of these types, where the workspace is.

    Raises:
        InputError: naming the tensor, what it is and what is expected.
    """
    # All that a good tensor costs: a verb checks up to seven of them.
    if (
        tensor.shape == shape
        and tensor.dtype in dtypes
        and tensor.device == device
        and tensor.is_contiguous()
    ):
        return
    if tensor.shape != shape:
        raise InputError(f"{name} has shape {list(tensor.shape)}, expected {list(shape)}")
    if tensor.dtype not in dtypes:
        wanted = " or ".join(str(dtype) for dtype in dtypes)
        raise InputError(f"{name} has dtype {tensor.dtype}, expected {wanted}; convert it first")
    check_device(name, tensor, device)
    raise InputError(
        f"{name} is not contiguous (strides {list(tensor.stride())}); call .contiguous() first"
    )
