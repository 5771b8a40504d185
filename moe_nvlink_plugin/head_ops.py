"""torch.ops.moe_nvlink.head_argmax and .head_logits with their fakes.

`pending` is the workspace's state tensor, written by both, so that a compiled graph neither drops
nor reorders them: the peers take part in each. `handle` is the group (head_exchange.find).
"""

from __future__ import annotations

from typing import Any

import torch

from . import head_exchange
from .head_exchange import HeadCall

# Lives as long as the process. torch ships no types for Library.
_library: Any = torch.library.Library("moe_nvlink", "FRAGMENT")  # type: ignore[no-untyped-call]

_ARGUMENTS = (
    "(Tensor(a!) pending, Tensor hidden, Tensor head_weight, Tensor? bias, float? soft_cap, "
    "float scale, int row_bound, int handle) -> Tensor"
)
_library.define("head_argmax" + _ARGUMENTS)
_library.define("head_logits" + _ARGUMENTS)


def _head_argmax(
    pending: torch.Tensor,
    hidden: torch.Tensor,
    head_weight: torch.Tensor,
    bias: torch.Tensor | None,
    soft_cap: float | None,
    scale: float,
    row_bound: int,
    handle: int,
) -> torch.Tensor:
    call = HeadCall(hidden, head_weight, bias, soft_cap, scale, row_bound)
    return head_exchange.find(handle).argmax(call)


def _head_argmax_fake(
    pending: torch.Tensor,
    hidden: torch.Tensor,
    head_weight: torch.Tensor,
    bias: torch.Tensor | None,
    soft_cap: float | None,
    scale: float,
    row_bound: int,
    handle: int,
) -> torch.Tensor:
    head_exchange.find(handle).check_device(hidden, head_weight, bias)
    return hidden.new_empty((hidden.shape[0],), dtype=torch.int64)


def _head_logits(
    pending: torch.Tensor,
    hidden: torch.Tensor,
    head_weight: torch.Tensor,
    bias: torch.Tensor | None,
    soft_cap: float | None,
    scale: float,
    row_bound: int,
    handle: int,
) -> torch.Tensor:
    call = HeadCall(hidden, head_weight, bias, soft_cap, scale, row_bound)
    return head_exchange.find(handle).logits(call)


def _head_logits_fake(
    pending: torch.Tensor,
    hidden: torch.Tensor,
    head_weight: torch.Tensor,
    bias: torch.Tensor | None,
    soft_cap: float | None,
    scale: float,
    row_bound: int,
    handle: int,
) -> torch.Tensor:
    head = head_exchange.find(handle)
    head.check_device(hidden, head_weight, bias)
    return hidden.new_empty((hidden.shape[0], head.config.vocab_size))


for _name, _implementation, _fake in (
    ("head_argmax", _head_argmax, _head_argmax_fake),
    ("head_logits", _head_logits, _head_logits_fake),
):
    for _key in ("CPU", "CUDA"):
        _library.impl(_name, _implementation, _key)
    torch.library.register_fake(f"moe_nvlink::{_name}", _fake, lib=_library)

head_argmax = torch.ops.moe_nvlink.head_argmax.default
head_logits = torch.ops.moe_nvlink.head_logits.default
