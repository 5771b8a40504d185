"""torch.ops.moe_nvlink.dispatch and .combine with their fakes, side by side.

`pending` is the workspace's state tensor: both ops write it, so a compiled graph neither reorders
nor drops them. `handle` is the layer (exchange.find). Registered with Library.define/impl, which
costs 6-9 us a call where torch.library.custom_op costs 42-69 (TOOLCHAIN notes of the project, CPU).
"""

from __future__ import annotations

from typing import Any

import torch

from . import exchange

# Lives as long as the process. torch ships no types for Library.
_library: Any = torch.library.Library("moe_nvlink", "DEF")  # type: ignore[no-untyped-call]

_library.define(
    "dispatch(Tensor(a!) pending, Tensor hidden_states, Tensor? scales, Tensor topk_ids, "
    "Tensor topk_weights, Tensor[] extra_payloads, int handle, int channel) -> Tensor[]"
)
_library.define(
    "combine(Tensor(a!) pending, Tensor expert_output, Tensor send_slots, int handle, int channel)"
    " -> Tensor"
)
_library.define(
    "combine_out(Tensor(a!) pending, Tensor expert_output, Tensor send_slots, "
    "Tensor(b!) output, int handle, int channel) -> ()"
)


def _dispatch(
    pending: torch.Tensor,
    hidden_states: torch.Tensor,
    scales: torch.Tensor | None,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    extra_payloads: list[torch.Tensor],
    handle: int,
    channel: int,
) -> list[torch.Tensor]:
    return exchange.find(handle).dispatch(
        pending, hidden_states, scales, topk_ids, topk_weights, extra_payloads, channel
    )


def _dispatch_fake(
    pending: torch.Tensor,
    hidden_states: torch.Tensor,
    scales: torch.Tensor | None,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    extra_payloads: list[torch.Tensor],
    handle: int,
    channel: int,
) -> list[torch.Tensor]:
    layer = exchange.find(handle)
    received = []
    extras = iter(extra_payloads)
    for name, row in layer.rows.items():
        if name.startswith("recv_extra"):
            like = next(extras)
            received.append(like.new_empty((layer.num_slots, *like.shape[1:])))
        else:
            shape = (layer.num_slots, row.elements)
            received.append(hidden_states.new_empty(shape, dtype=row.dtype))
    counts = hidden_states.new_empty((layer.config.ep_size,), dtype=torch.int32)
    slots = hidden_states.new_empty((hidden_states.shape[0], layer.config.top_k), dtype=torch.int32)
    return [*received, counts, slots]


def _combine(
    pending: torch.Tensor,
    expert_output: torch.Tensor,
    send_slots: torch.Tensor,
    handle: int,
    channel: int,
) -> torch.Tensor:
    return exchange.find(handle).combine(pending, expert_output, send_slots, None, channel)


def _combine_fake(
    pending: torch.Tensor,
    expert_output: torch.Tensor,
    send_slots: torch.Tensor,
    handle: int,
    channel: int,
) -> torch.Tensor:
    config = exchange.find(handle).config
    return expert_output.new_empty((send_slots.shape[0], config.hidden_size), dtype=config.dtype)


def _combine_out(
    pending: torch.Tensor,
    expert_output: torch.Tensor,
    send_slots: torch.Tensor,
    output: torch.Tensor,
    handle: int,
    channel: int,
) -> None:
    exchange.find(handle).combine(pending, expert_output, send_slots, output, channel)


def _combine_out_fake(
    pending: torch.Tensor,
    expert_output: torch.Tensor,
    send_slots: torch.Tensor,
    output: torch.Tensor,
    handle: int,
    channel: int,
) -> None:
    return None


for _name, _implementation, _fake in (
    ("dispatch", _dispatch, _dispatch_fake),
    ("combine", _combine, _combine_fake),
    ("combine_out", _combine_out, _combine_out_fake),
):
    for _key in ("CPU", "CUDA"):
        _library.impl(_name, _implementation, _key)
    torch.library.register_fake(f"moe_nvlink::{_name}", _fake, lib=_library)

dispatch = torch.ops.moe_nvlink.dispatch.default
combine = torch.ops.moe_nvlink.combine.default
combine_out = torch.ops.moe_nvlink.combine_out.default
