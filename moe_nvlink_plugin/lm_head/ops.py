"""The ops torch.ops.moe_nvlink.head_argmax and .head_logits, each beside its fake.

`pending` is the workspace's state tensor. Both ops declare that they write to it, so a compiled
graph neither reorders nor drops them; the peers take part in each call. `handle` is the number of
the group (exchange.find).
"""

from __future__ import annotations

from typing import Any

import torch

from .exchange import HeadCall, HeadExchange, find

# The ops exist as long as this object. torch ships no types for Library.
_library: Any = torch.library.Library("moe_nvlink", "FRAGMENT")  # type: ignore[no-untyped-call]

# pending, then the fields of HeadCall in their order, then handle.
_ARGUMENTS = (
    "(Tensor(a!) pending, Tensor hidden, Tensor head_weight, Tensor? bias, float? soft_cap, "
    "float scale, int row_bound, int handle) -> Tensor"
)
_library.define("head_argmax" + _ARGUMENTS)
_library.define("head_logits" + _ARGUMENTS)


def _head_argmax(pending: torch.Tensor, *arguments: Any) -> torch.Tensor:
    *call, handle = arguments
    return find(handle).argmax(HeadCall(*call))


def _head_argmax_fake(pending: torch.Tensor, *arguments: Any) -> torch.Tensor:
    _head, call = _checked(arguments)
    return call.hidden.new_empty((call.hidden.shape[0],), dtype=torch.int64)


def _head_logits(pending: torch.Tensor, *arguments: Any) -> torch.Tensor:
    *call, handle = arguments
    return find(handle).logits(HeadCall(*call))


def _head_logits_fake(pending: torch.Tensor, *arguments: Any) -> torch.Tensor:
    head, call = _checked(arguments)
    return call.hidden.new_empty((call.hidden.shape[0], head.config.vocab_size))


def _checked(arguments: tuple[Any, ...]) -> tuple[HeadExchange, HeadCall]:
    """Return the group and the call of a fake's arguments; check the devices of the tensors."""
    *values, handle = arguments
    head, call = find(handle), HeadCall(*values)
    head.check_device(call.hidden, call.weight, call.bias)
    return head, call


for _name, _implementation, _fake in (
    ("head_argmax", _head_argmax, _head_argmax_fake),
    ("head_logits", _head_logits, _head_logits_fake),
):
    for _key in ("CPU", "CUDA"):
        _library.impl(_name, _implementation, _key)
    torch.library.register_fake(f"moe_nvlink::{_name}", _fake, lib=_library)

head_argmax = torch.ops.moe_nvlink.head_argmax.default
head_logits = torch.ops.moe_nvlink.head_logits.default
