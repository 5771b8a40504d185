"""Checks of one tensor that is handed to a verb: bad input never reaches memory."""

from __future__ import annotations

from collections.abc import Sequence

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


def check_dense(name: str, tensor: torch.Tensor) -> None:
    """A tensor whose rows lie in memory one after another: no sparse and no nested one.

    Raises:
        InputError: it is another one.
    """
    # A nested tensor may have the layout of a dense one.
    if tensor.is_nested:
        raise InputError(
            f"{name} is a nested tensor, a verb reads one dense tensor; pass "
            f"torch.cat({name}.unbind())"
        )
    if tensor.layout is not torch.strided:
        raise InputError(
            f"{name} has layout {tensor.layout}, a verb reads torch.strided; pass {name}.to_dense()"
        )


def check_memory(name: str, tensor: torch.Tensor) -> None:
    """A tensor with elements has memory: a kernel gets nothing but its address.

    Raises:
        InputError: its storage is empty, or it is a wrapper of another tensor.
    """
    if tensor.data_ptr() == 0 and tensor.numel():
        raise InputError(
            f"{name} of shape {list(tensor.shape)} has no memory: its storage was freed, or a "
            "wrapped tensor holds the numbers; pass a tensor that has them"
        )


def check_outside(window: range, names: Sequence[str], *tensors: torch.Tensor | None) -> None:
    """No tensor lies in symmetric memory, which peers write to while a verb runs.

    Args:
        window: addresses of all ranks' workspaces.
        names: of the tensors; the last one is that of all further tensors.
        *tensors: None: not given.

    Raises:
        InputError: a tensor begins there; names it.
    """
    start, stop = window.start, window.stop
    for place, tensor in enumerate(tensors):
        if tensor is None or not start <= tensor.data_ptr() < stop:
            continue
        name = names[min(place, len(names) - 1)]
        raise InputError(
            f"{name} lies at {tensor.data_ptr():#x}, in the exchange's workspace ({start:#x} up to "
            f"{stop:#x}), where peers write during the call; pass a copy, such as {name}.clone()"
        )


def check_no_gradient(names: Sequence[str], *tensors: torch.Tensor | None) -> None:
    """No gradient is wanted: the verbs are for inference, and autograd cannot pass them.

    Args:
        names: of the tensors; the last one is that of all further tensors.
        *tensors: None: not given.

    Raises:
        InputError: gradients are recorded and a tensor requires one; names it.
    """
    if not torch.is_grad_enabled():
        return
    for place, tensor in enumerate(tensors):
        if tensor is not None and tensor.requires_grad:
            name = names[min(place, len(names) - 1)]
            raise InputError(
                f"{name} requires a gradient, which cannot pass the exchange (it is for inference "
                "only); call it under torch.inference_mode() or torch.no_grad(), or pass "
                f"{name}.detach()"
            )


def check_tensor(
    name: str,
    tensor: object,
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
        isinstance(tensor, torch.Tensor)
        and tensor.shape == shape
        and tensor.dtype in dtypes
        and tensor.device == device
        and tensor.is_contiguous()
    ):
        return
    if not isinstance(tensor, torch.Tensor):
        raise InputError(f"{name}={tensor!r} is a {type(tensor).__name__}, not a tensor")
    check_dense(name, tensor)
    if tensor.shape != shape:
        raise InputError(f"{name} has shape {list(tensor.shape)}, expected {list(shape)}")
    if tensor.dtype not in dtypes:
        wanted = " or ".join(str(dtype) for dtype in dtypes)
        raise InputError(f"{name} has dtype {tensor.dtype}, expected {wanted}; convert it first")
    check_device(name, tensor, device)
    raise InputError(
        f"{name} is not contiguous (strides {list(tensor.stride())}); call .contiguous() first"
    )
