"""Check of global_scale: the one scale of a whole tensor that some recipes need."""

from __future__ import annotations

import torch

from moe_nvlink_plugin.errors import InputError

#: Between these limits a scale and its reciprocal are both normal fp32 numbers. Beyond them, a
#: GPU's approximate reciprocal is 0 or infinity, where a CPU still computes a subnormal number.
SMALLEST, LARGEST = 2.0**-126, 2.0**126


def check_global_scale(
    recipe: str, scale: torch.Tensor | None, *, read_value: bool = True
) -> torch.Tensor:
    """Return the recipe's global scale as a 0-d fp32 tensor. Local; capturable without read_value.

    Args:
        recipe: name of the recipe, for the message.
        scale: one fp32 element on any device, in any shape.
        read_value: also check the number. If the tensor is on a GPU, this waits for the GPU.

    Raises:
        InputError: the scale is missing, or of another type or size. With `read_value` also: it is
            below 2^-126 (zero and negative numbers too), above 2^126, or NaN.
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
