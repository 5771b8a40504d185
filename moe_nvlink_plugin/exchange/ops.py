"""The torch ops torch.ops.moe_nvlink.dispatch and .combine, each beside its fake.

An op gets the fields of a call (calls.py) behind `pending`, the workspace's state tensor. Both ops
write to it, so a compiled graph neither reorders nor drops them. The ops are registered by
Library.define and Library.impl, because a call through torch.library.custom_op costs several times
as much. MoeAllToAll calls the layer without them where nobody would see the op (are_seen).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.autograd.graph import increment_version

from . import calls, checks, inductor, scales_layout
from .calls import Combine, Dispatch, Dispatched, DispatchMetadata
from .layer import LayerExchange, find
from .ordinary import is_watched

#: topk_ids, topk_weights, hidden_states, recv_counts, send_slots: what the op dispatch returns.
Five = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]

# The ops exist as long as this object. torch ships no types for Library.
_library: Any = torch.library.Library("moe_nvlink", "DEF")  # type: ignore[no-untyped-call]

_PENDING = "Tensor(a!) pending"

_library.define(
    f"dispatch({_PENDING}, {calls.schema(Dispatch)}) -> (Tensor topk_ids, Tensor topk_weights, "
    "Tensor hidden_states, Tensor recv_counts, Tensor send_slots)"
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
_library.define(f"combine({_PENDING}, {calls.schema(Combine, leaves_out='output')}) -> Tensor")
_library.define(f"combine_out({_PENDING}, {calls.schema(Combine, writes='output')}) -> ()")


def _dispatch(pending: torch.Tensor, *given: Any, **named: Any) -> Five:
    call = Dispatch(*given, **named)
    checks.no_gradient(call)
    channel, slots = find(call.handle).start_dispatch(call, pending)
    return (*channel.rows_and_counts(), slots)


def _dispatch_fake(_pending: torch.Tensor, *given: Any, **named: Any) -> Five:
    inductor.keep_outputs(torch.ops.moe_nvlink.dispatch.default)
    call = Dispatch(*given, **named)
    layer = _seen_by_fake(call)
    num_slots = layer.slots_of(call.max_tokens)
    ids, weights, hidden = (
        call.hidden_states.new_empty((num_slots, row.elements), dtype=row.dtype)
        for row in list(layer.rows.values())[:3]
    )
    counts = ids.new_empty((layer.config.ep_size,), dtype=torch.int32)
    slots = ids.new_empty((call.hidden_states.shape[0], layer.config.top_k), dtype=torch.int32)
    return ids, weights, hidden, counts, slots


def _seen_by_fake(call: Dispatch | Combine) -> LayerExchange:
    """Return the layer of a call whose fake runs, after what the op itself would refuse."""
    checks.no_gradient(call)
    layer = find(call.handle)
    layer.check_device(*(tensor for _, tensor in checks.named_tensors(call) if tensor is not None))
    return layer


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
    return layer.channel(channel).received_payload(index, like, layer.slots_of(max_tokens))


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
    pending: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, *given: Any, **named: Any
) -> torch.Tensor:
    call = Combine(rows, slots, None, *given, **named)
    checks.no_gradient(call)
    return find(call.handle).combine(call, pending)


def _combine_fake(
    _pending: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, *given: Any, **named: Any
) -> torch.Tensor:
    call = Combine(rows, slots, None, *given, **named)
    layer = _seen_by_fake(call)
    width = layer.config.hidden_size if call.hidden_size is None else call.hidden_size
    return rows.new_empty((slots.shape[0], width))


def _combine_out(pending: torch.Tensor, *given: Any, **named: Any) -> None:
    call = Combine(*given, **named)
    checks.no_gradient(call)
    find(call.handle).combine(call, pending)


def _combine_out_fake(_pending: torch.Tensor, *given: Any, **named: Any) -> None:
    _seen_by_fake(Combine(*given, **named))


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


#: Kind of call -> function that returns its tensors, lists of them apart.
_TENSORS: Mapping[Any, Callable[[Any], tuple[Any, ...]]] = {
    kind: operator.itemgetter(*places) for kind, places in calls.TENSORS.items()
}


def are_seen(call: Dispatch | Combine) -> bool:
    """Return whether anybody would notice that a verb runs without its op. Local.

    An op costs several microseconds, and an eager call needs none. It needs one if somebody looks
    on (is_watched), if a tensor is of a subclass, if its bytes are not its numbers (negated or
    conjugated views, zero tensors), or if autograd would record the call. A verb that torch.compile
    traces always needs its op; the caller asks for that first. Nobody sees an ordinary call.
    """
    if is_watched():
        return True
    given = _TENSORS[type(call)](call)
    if type(call) is Dispatch and call.extra_payloads:
        given += tuple(call.extra_payloads)
    records = torch.is_grad_enabled()
    for tensor in given:
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


def dispatched(layer: LayerExchange, call: Dispatch, max_tokens: int) -> Dispatched:
    """Run dispatch by its ops; return what MoeAllToAll.dispatch does. Collective; capturable."""
    is_compiling = torch.compiler.is_compiling()
    if not is_compiling:
        checks.tensors_given(call)
    ids, weights, hidden, counts, slots = dispatch(layer.workspace.pending, *call)
    handle, channel = call.handle, call.channel
    more = [
        received(counts, like, index, handle, channel, max_tokens)
        for index, like in enumerate(call.extra_payloads)
    ]
    scales = expert_counts = None
    if "recv_scales" in layer.rows:
        scales = received_scales(counts, handle, channel, max_tokens)
    if layer.config.num_expert_counts:
        expert_counts = received_expert_counts(counts, handle, channel)
    # With a number that grows, torch.compile would compile the code again at every call.
    round_number = -1 if is_compiling else layer.channel(channel).rounds
    metadata = DispatchMetadata(slots, channel, handle, round_number, max_tokens)
    return Dispatched(hidden, scales, ids, weights, tuple(more), counts, metadata, expert_counts)


def combined(layer: LayerExchange, call: Combine) -> torch.Tensor:
    """Run combine by its op; return output. Collective; capturable."""
    if not torch.compiler.is_compiling():
        checks.tensors_given(call)
        if call.output is not None:  # torch would run the op, and then not find what to negate
            checks.numbers_in_memory("output", call.output)
    pending = layer.workspace.pending
    if call.output is not None:
        combine_out(pending, *call)
        if not torch.compiler.is_compiling():
            increment_version(call.output)  # no key of the op's does
        return call.output
    rows, slots, _output, *others = call
    result: torch.Tensor = combine(pending, rows, slots, *others)
    return result
