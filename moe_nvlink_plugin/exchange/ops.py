"""The ops torch.ops.moe_nvlink.dispatch and .combine, each beside its fake.

`pending` is the workspace's state tensor. Both ops write to it, so a compiled graph neither
reorders nor drops them. `handle` is the number of the layer (layer.find). The ops are registered by
Library.define and Library.impl, because a call through torch.library.custom_op costs several times
as much. MoeAllToAll calls the layer without them where nobody would see the op (are_seen).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from moe_nvlink_plugin.memory.tensors import check_no_gradient

from . import inductor, scales_layout
from .formats import Activations
from .layer import Five, find

# The ops exist as long as this object. torch ships no types for Library.
_library: Any = torch.library.Library("moe_nvlink", "DEF")  # type: ignore[no-untyped-call]

_library.define(
    "dispatch(Tensor(a!) pending, Tensor hidden_states, Tensor? scales, Tensor topk_ids, "
    "Tensor topk_weights, Tensor[] extra_payloads, Tensor? global_scale, int handle, int channel, "
    "Tensor? is_padding=None, SymInt? max_tokens=None, Tensor? active_ranks=None, "
    "Tensor? expert_counts=None) -> "
    "(Tensor topk_ids, Tensor topk_weights, Tensor hidden_states, Tensor recv_counts, "
    "Tensor send_slots)"
)
# One op per further payload: torch cannot compile an op that writes to an argument, as dispatch
# does, and also returns a list.
_library.define(
    "received_scales(Tensor recv_counts, int handle, int channel, SymInt? max_tokens=None)"
    " -> Tensor"
)
_library.define(
    "received(Tensor recv_counts, Tensor like, int index, int handle, int channel, "
    "SymInt? max_tokens=None) -> Tensor"
)
_library.define("received_expert_counts(Tensor recv_counts, int handle, int channel) -> Tensor")
_library.define(
    "combine(Tensor(a!) pending, Tensor expert_output, Tensor send_slots, int handle, int channel, "
    "SymInt? hidden_size=None, Tensor? add=None, float scale=1.0) -> Tensor"
)
_library.define(
    "combine_out(Tensor(a!) pending, Tensor expert_output, Tensor send_slots, "
    "Tensor(b!) output, int handle, int channel, SymInt? hidden_size=None, Tensor? add=None, "
    "float scale=1.0) -> ()"
)

_ADDED_UP = ("expert_output", "add", "output")


def _refuse_gradients(
    hidden_states: torch.Tensor,
    scales: torch.Tensor | None,
    topk_weights: torch.Tensor,
    global_scale: torch.Tensor | None,
    extra_payloads: list[torch.Tensor],
) -> None:
    names = ("hidden_states", "scales", "topk_weights", "global_scale", "an extra payload")
    check_no_gradient(names, hidden_states, scales, topk_weights, global_scale, *extra_payloads)


def _dispatch(
    pending: torch.Tensor,
    hidden_states: torch.Tensor,
    scales: torch.Tensor | None,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    extra_payloads: list[torch.Tensor],
    global_scale: torch.Tensor | None,
    handle: int,
    channel: int,
    is_padding: torch.Tensor | None = None,
    max_tokens: int | None = None,
    active_ranks: torch.Tensor | None = None,
    expert_counts: torch.Tensor | None = None,
) -> Five:
    _refuse_gradients(hidden_states, scales, topk_weights, global_scale, extra_payloads)
    return find(handle).dispatch(
        pending,
        Activations(hidden_states, scales, global_scale, is_padding, active_ranks, expert_counts),
        topk_ids,
        topk_weights,
        extra_payloads,
        channel,
        max_tokens,
    )


def _dispatch_fake(
    pending: torch.Tensor,
    hidden_states: torch.Tensor,
    scales: torch.Tensor | None,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    extra_payloads: list[torch.Tensor],
    global_scale: torch.Tensor | None,
    handle: int,
    channel: int,
    is_padding: torch.Tensor | None = None,
    max_tokens: int | None = None,
    active_ranks: torch.Tensor | None = None,
    expert_counts: torch.Tensor | None = None,
) -> Five:
    inductor.keep_outputs(torch.ops.moe_nvlink.dispatch.default)
    _refuse_gradients(hidden_states, scales, topk_weights, global_scale, extra_payloads)
    layer = find(handle)
    optional = (scales, global_scale, is_padding, active_ranks, expert_counts)
    given = [tensor for tensor in optional if tensor is not None]
    layer.check_device(hidden_states, topk_ids, topk_weights, *extra_payloads, *given)
    ids, weights, hidden = (
        hidden_states.new_empty((layer.slots_of(max_tokens), row.elements), dtype=row.dtype)
        for row in list(layer.rows.values())[:3]
    )
    counts = hidden_states.new_empty((layer.config.ep_size,), dtype=torch.int32)
    slots = hidden_states.new_empty((hidden_states.shape[0], layer.config.top_k), dtype=torch.int32)
    return ids, weights, hidden, counts, slots


def _received_scales(
    recv_counts: torch.Tensor, handle: int, channel: int, max_tokens: int | None = None
) -> torch.Tensor:
    """Return the received scales; recv_counts as for `received`."""
    layer = find(handle)
    return layer.channel(channel).received_scales(layer.slots_of(max_tokens))


def _received_scales_fake(
    recv_counts: torch.Tensor, handle: int, channel: int, max_tokens: int | None = None
) -> torch.Tensor:
    inductor.keep_outputs(torch.ops.moe_nvlink.received_scales.default)
    layer = find(handle)
    row = layer.rows["recv_scales"]
    size, strides = scales_layout.strides(layer.config, row, layer.slots_of(max_tokens))
    dtype = scales_layout.dtype_of(layer.config, row)
    return recv_counts.new_empty_strided(size, strides, dtype=dtype)


def _received(
    recv_counts: torch.Tensor,
    like: torch.Tensor,
    index: int,
    handle: int,
    channel: int,
    max_tokens: int | None = None,
) -> torch.Tensor:
    """Return the received extra payload `index`, in the dtype and row shape of `like`.

    recv_counts is an output of the dispatch. It is an argument only so that a compiled graph runs
    this op after the dispatch.
    """
    layer = find(handle)
    return layer.channel(channel).received(index, like, layer.slots_of(max_tokens))


def _received_fake(
    recv_counts: torch.Tensor,
    like: torch.Tensor,
    index: int,
    handle: int,
    channel: int,
    max_tokens: int | None = None,
) -> torch.Tensor:
    inductor.keep_outputs(torch.ops.moe_nvlink.received.default)
    return like.new_empty((find(handle).slots_of(max_tokens), *like.shape[1:]))


def _received_expert_counts(recv_counts: torch.Tensor, handle: int, channel: int) -> torch.Tensor:
    """Return the counts per expert of all ranks; recv_counts as for `received`."""
    return find(handle).channel(channel).expert_counts.detach()


def _received_expert_counts_fake(
    recv_counts: torch.Tensor, handle: int, channel: int
) -> torch.Tensor:
    inductor.keep_outputs(torch.ops.moe_nvlink.received_expert_counts.default)
    config = find(handle).config
    shape = (config.ep_size, config.num_expert_counts)
    return recv_counts.new_empty(shape, dtype=torch.int32)


def _combine(
    pending: torch.Tensor,
    expert_output: torch.Tensor,
    send_slots: torch.Tensor,
    handle: int,
    channel: int,
    hidden_size: int | None = None,
    add: torch.Tensor | None = None,
    scale: float = 1.0,
) -> torch.Tensor:
    check_no_gradient(_ADDED_UP, expert_output, add)
    return find(handle).combine(
        pending, expert_output, send_slots, None, channel, hidden_size, add, scale
    )


def _combine_fake(
    pending: torch.Tensor,
    expert_output: torch.Tensor,
    send_slots: torch.Tensor,
    handle: int,
    channel: int,
    hidden_size: int | None = None,
    add: torch.Tensor | None = None,
    scale: float = 1.0,
) -> torch.Tensor:
    check_no_gradient(_ADDED_UP, expert_output, add)
    layer = find(handle)
    optional = [] if add is None else [add]
    layer.check_device(expert_output, send_slots, *optional)
    width = layer.config.hidden_size if hidden_size is None else hidden_size
    return expert_output.new_empty((send_slots.shape[0], width))


def _combine_out(
    pending: torch.Tensor,
    expert_output: torch.Tensor,
    send_slots: torch.Tensor,
    output: torch.Tensor,
    handle: int,
    channel: int,
    hidden_size: int | None = None,
    add: torch.Tensor | None = None,
    scale: float = 1.0,
) -> None:
    check_no_gradient(_ADDED_UP, expert_output, add, output)
    find(handle).combine(
        pending, expert_output, send_slots, output, channel, hidden_size, add, scale
    )


def _combine_out_fake(
    pending: torch.Tensor,
    expert_output: torch.Tensor,
    send_slots: torch.Tensor,
    output: torch.Tensor,
    handle: int,
    channel: int,
    hidden_size: int | None = None,
    add: torch.Tensor | None = None,
    scale: float = 1.0,
) -> None:
    check_no_gradient(_ADDED_UP, expert_output, add, output)
    optional = [] if add is None else [add]
    find(handle).check_device(expert_output, send_slots, output, *optional)


for _name, _implementation, _fake in (
    ("dispatch", _dispatch, _dispatch_fake),
    ("received_scales", _received_scales, _received_scales_fake),
    ("received", _received, _received_fake),
    ("received_expert_counts", _received_expert_counts, _received_expert_counts_fake),
    ("combine", _combine, _combine_fake),
    ("combine_out", _combine_out, _combine_out_fake),
):
    for _key in ("CPU", "CUDA"):
        _library.impl(_name, _implementation, _key)
    torch.library.register_fake(f"moe_nvlink::{_name}", _fake, lib=_library)


#: Each returns something true if somebody looks on.
_WATCHERS: tuple[Callable[[], Any], ...] = (
    torch._C._len_torch_dispatch_stack,
    torch._C._len_torch_function_stack,
    torch._ops._len_torch_dispatch_stack_pre_dispatch,
    torch._C._functorch.peek_interpreter_stack,
    torch._C._autograd._profiler_enabled,
)


def are_seen(*tensors: torch.Tensor | None) -> bool:
    """Return whether anybody would notice that a verb runs without its op. Local.

    An op costs several microseconds, and an eager call needs none. It needs one if a mode, a
    tracer, a profiler or a transform of torch.func looks on, if a tensor is of a subclass, if its
    bytes are not its numbers (negated or conjugated views, zero tensors), or if autograd would
    record the call. A verb that torch.compile traces always needs its op; the caller asks for that
    first. Without a profiler, torch.profiler.ExecutionTraceObserver is not noticed.
    """
    for watcher in _WATCHERS:  # any() of a generator takes longer, and each verb comes here
        if watcher():
            return True
    if torch._C._get_tracing_state() is not None:
        return True
    records = torch.is_grad_enabled()
    for tensor in tensors:
        if tensor is None:
            continue
        if type(tensor) is not torch.Tensor or (records and tensor.requires_grad):
            return True
        if tensor.is_neg() or tensor.is_conj() or tensor._is_zerotensor():
            return True
    return False


dispatch = torch.ops.moe_nvlink.dispatch.default
received_scales = torch.ops.moe_nvlink.received_scales.default
received = torch.ops.moe_nvlink.received.default
received_expert_counts = torch.ops.moe_nvlink.received_expert_counts.default
combine = torch.ops.moe_nvlink.combine.default
combine_out = torch.ops.moe_nvlink.combine_out.default
