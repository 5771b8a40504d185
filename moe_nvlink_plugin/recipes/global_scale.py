"""The one scale of a whole tensor that some recipes are given."""

from __future__ import annotations

import torch

from moe_nvlink_plugin.errors import InputError

#: Between these a scale and its reciprocal are both normal fp32 numbers. Beyond them a GPU's
#: approximate reciprocal makes 0 or infinity where a CPU still has a subnormal number.
SMALLEST, LARGEST = 2.0**-126, 2.0**126


def check_global_scale(
    recipe: str, scale: torch.Tensor | None, *, read_value: bool = True
) -> torch.Tensor:
    """The scale of one recipe as a 0-d fp32 tensor. Local; without `read_value`, capturable.

    Args:
        recipe: its name, for the message.
        scale: one fp32 element on any device, of any shape.
        read_value: look at the number too, which waits for the device of a tensor on a GPU.

    Raises:
        InputError: missing, of another type or size; with `read_value` also zero, negative, NaN,
            infinite, or so small or large that its reciprocal is no normal fp32 number.
    """
    if scale is None:
        raise InputError(
            f"recipe {recipe} needs global_scale, one fp32 number for the whole tensor; take it "
            "from the calibrated checkpoint, or use a recipe that scales by itself (fp8_token)"
        )
    if scale.dtype != torch.float32:
        raise InputError(
            f"global_scale of recipe {recipe} has dtype {scale.dtype}, expected torch.float32; "
            "convert it first"
        )
    if scale.numel() != 1:
        raise InputError(
            f"global_scale of recipe {recipe} has shape {list(scale.shape)}, expected one element; "
            "where every expert has its own, pass the one that the activations were calibrated with"
        )
    if read_value and not SMALLEST <= (value := float(scale)) <= LARGEST:
        raise InputError(
            f"global_scale={value} of recipe {recipe} must be from 2^-126 to 2^126; take it from a "
            "calibrated checkpoint"
        )
    return scale.reshape(())
