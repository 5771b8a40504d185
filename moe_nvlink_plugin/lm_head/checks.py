"""Checks of what callers pass to the verbs of a shared LM head, before a kernel reads it."""

from __future__ import annotations

from typing import NamedTuple

import torch

from moe_nvlink_plugin.errors import InputError
from moe_nvlink_plugin.memory.tensors import check_tensor

from .config import HeadConfig


class HeadCall(NamedTuple):
    """Arguments of one call of a verb: see sharded_argmax."""

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    soft_cap: float | None
    scale: float
    row_bound: int


def head_inputs(config: HeadConfig, device: torch.device, call: HeadCall) -> None:
    """Check all arguments of one call. sharded_argmax documents their shapes.

    Raises:
        InputError: an argument has another shape, dtype, device or value. The message names both.
    """
    bound = call.row_bound
    if not 0 < bound <= config.max_rows_per_rank:
        raise InputError(
            f"row_bound={bound} must be from 1 to max_rows_per_rank={config.max_rows_per_rank}; "
            "create the group with a larger capacity"
        )
    num_rows = call.hidden.shape[0] if call.hidden.dim() else 0
    check_tensor("hidden", call.hidden, (num_rows, config.hidden_size), (config.dtype,), device)
    if num_rows > bound:
        raise InputError(
            f"{num_rows} rows exceed row_bound={bound} (max_rows_per_rank="
            f"{config.max_rows_per_rank}); call in parts, on all ranks, or raise the bound"
        )
    weight = call.weight
    rows = weight.shape[0] if weight.dim() else 0
    check_tensor(
        "head_weight",
        weight,
        (max(rows, config.vocab_size), config.hidden_size),
        (config.dtype,),
        device,
    )
    if call.bias is not None:
        rows = call.bias.shape[0] if call.bias.dim() else 0
        check_tensor("bias", call.bias, (max(rows, config.vocab_size),), (config.dtype,), device)
    _head_function(call)


def _head_function(call: HeadCall) -> None:
    # The kernel takes both as float32. There a smaller cap would become 0, which means no cap.
    numbers = torch.finfo(torch.float32)
    if call.soft_cap is not None and not numbers.tiny <= call.soft_cap <= numbers.max:
        raise InputError(
            f"soft_cap={call.soft_cap} must be from {numbers.tiny} to {numbers.max}; None is no cap"
        )
    if not abs(call.scale) <= numbers.max:
        raise InputError(f"scale={call.scale} must be from {numbers.min} to {numbers.max}")
