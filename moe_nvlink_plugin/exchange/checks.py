"""Checks of the tensors handed to dispatch and combine: bad input never reaches memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moe_nvlink_plugin.errors import InputError
from moe_nvlink_plugin.recipes import check_global_scale

if TYPE_CHECKING:
    from moe_nvlink_plugin.lm_head.exchange import HeadCall, HeadExchange

    from .layer import Activations, LayerExchange


def channel(index: int, num_channels: int) -> None:
    """A channel the configuration has."""
    if not 0 <= index < num_channels:
        raise InputError(
            f"channel={index} is not below num_channels={num_channels}; raise num_channels"
        )


def on_device(name: str, tensor: torch.Tensor, expected: torch.device) -> None:
    """A tensor where the exchange works."""
    if tensor.device != expected:
        raise InputError(
            f"{name} is on {tensor.device}, this exchange works on {expected}; move it there"
        )


def _tensor(
    name: str,
    tensor: torch.Tensor,
    shape: tuple[int, ...],
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
) -> None:
    if tuple(tensor.shape) != shape:
        raise InputError(f"{name} has shape {list(tensor.shape)}, expected {list(shape)}")
    if tensor.dtype not in dtypes:
        wanted = " or ".join(str(dtype) for dtype in dtypes)
        raise InputError(f"{name} has dtype {tensor.dtype}, expected {wanted}; convert it first")
    on_device(name, tensor, device)
    if not tensor.is_contiguous():
        raise InputError(
            f"{name} is not contiguous (strides {list(tensor.stride())}); call .contiguous() first"
        )


def activations(layer: LayerExchange, hidden_states: torch.Tensor) -> int:
    """Activations to be quantised. Returns how many tokens they are.

    Raises:
        InputError: naming the tensor, what it is and what is expected.
    """
    config = layer.config
    num_tokens = _num_tokens(config.max_tokens_per_rank, hidden_states)
    shape = (num_tokens, config.hidden_size)
    _tensor("hidden_states", hidden_states, shape, (config.dtype,), layer.workspace.device)
    return num_tokens


def _num_tokens(capacity: int, hidden_states: torch.Tensor) -> int:
    num_tokens = hidden_states.shape[0] if hidden_states.dim() else 0
    if num_tokens > capacity:
        raise InputError(
            f"{num_tokens} tokens exceed max_tokens_per_rank={capacity}; "
            "dispatch in parts or create the exchange with a larger capacity"
        )
    return num_tokens


def global_scale(layer: LayerExchange, scale: torch.Tensor | None, *, needed: bool) -> None:
    """The scale of a whole tensor, for recipes that take one.

    Raises:
        InputError: missing, not asked for, of another shape, type or device, or a value that no
            scale has.
    """
    name = layer.recipe.name
    if scale is None:
        if needed:
            check_global_scale(name, scale)  # says what to do
        return
    if not needed:
        raise InputError(
            f"recipe {name} takes no global_scale here, only with activations that it quantises by "
            "one scale; leave it out (the experts get it from you, it does not travel)"
        )
    on_device("global_scale", scale, layer.workspace.device)
    executor = layer.workspace.executor
    # To look at a number on a GPU waits for it, which a capture forbids.
    unseen = not executor.asynchronous or (not executor.is_capturing() and layer.first_sight(scale))
    check_global_scale(name, scale, read_value=unseen)


def dispatch_inputs(
    layer: LayerExchange,
    given: Activations,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    extra_payloads: list[torch.Tensor],
    *,
    fused: bool,
) -> None:
    """All inputs of one dispatch; `fused`: given are activations that the kernel quantises.

    Raises:
        InputError: naming the tensor, what it is and what is expected.
    """
    config, device = layer.config, layer.workspace.device
    if fused:
        num_tokens = activations(layer, given.hidden_states)
    else:
        num_tokens = _quantised_rows(layer, given.hidden_states, given.scales)
    routed = (num_tokens, config.top_k)
    _tensor("topk_ids", topk_ids, routed, (torch.int32, torch.int64), device)
    _tensor("topk_weights", topk_weights, routed, (torch.float32,), device)
    _extra_payloads(config.extra_payload_bytes, extra_payloads, num_tokens, device)


def _quantised_rows(
    layer: LayerExchange, hidden_states: torch.Tensor, scales: torch.Tensor | None
) -> int:
    """Rows that travel as they are, with the scales their recipe has."""
    config, device = layer.config, layer.workspace.device
    row, scales_row = layer.rows["recv_hidden_states"], layer.rows.get("recv_scales")
    num_tokens = _num_tokens(config.max_tokens_per_rank, hidden_states)
    if layer.quantising is not None and hidden_states.dtype != row.dtype:
        raise InputError(
            f"hidden_states has dtype {hidden_states.dtype}; recipe {layer.recipe.name} takes "
            f"activations of {config.dtype} without scales, or quantised rows of {row.dtype}"
        )
    _tensor("hidden_states", hidden_states, (num_tokens, row.elements), (row.dtype,), device)
    if (scales is None) != (scales_row is None):
        has = "needs" if scales is None else "has no"
        raise InputError(
            f"recipe {layer.recipe.name} {has} scales for rows of {hidden_states.dtype}"
        )
    if scales is not None and scales_row is not None:
        shape = (num_tokens, scales_row.elements)
        _tensor("scales", scales, shape, (scales_row.dtype,), device)
    return num_tokens


def _extra_payloads(
    expected: tuple[int, ...], given: list[torch.Tensor], num_tokens: int, device: torch.device
) -> None:
    if len(given) != len(expected):
        raise InputError(
            f"{len(given)} extra payloads given, the configuration names {len(expected)} "
            f"(extra_payload_bytes={expected})"
        )
    for index, (tensor, row_bytes) in enumerate(zip(given, expected, strict=True)):
        name = f"extra_payloads[{index}]"
        _tensor(name, tensor, (num_tokens, *tensor.shape[1:]), (tensor.dtype,), device)
        has_bytes = tensor.dtype.itemsize
        for size in tensor.shape[1:]:
            has_bytes *= size
        if has_bytes != row_bytes:
            raise InputError(f"{name} has rows of {has_bytes} bytes, configured are {row_bytes}")


def ids_as_int32(topk_ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    """int64 ids as int32; what no expert can have still is none, which a plain cast would not keep.

    Two launches on a GPU, and nothing to copy there: it may be captured.
    """
    if topk_ids.dtype == torch.int32:
        return topk_ids
    return topk_ids.clamp(-1, num_experts).to(torch.int32)


def combine_inputs(
    layer: LayerExchange,
    expert_output: torch.Tensor,
    send_slots: torch.Tensor,
    output: torch.Tensor | None,
) -> None:
    """All inputs of one combine.

    Raises:
        InputError: naming the tensor, what it is and what is expected.
    """
    config, device = layer.config, layer.workspace.device
    shape = (layer.num_slots, config.hidden_size)
    _tensor("expert_output", expert_output, shape, (config.dtype,), device)
    num_tokens = send_slots.shape[0] if send_slots.dim() else 0
    if num_tokens > config.max_tokens_per_rank:
        raise InputError(
            f"metadata of {num_tokens} tokens exceeds max_tokens_per_rank="
            f"{config.max_tokens_per_rank}; pass the metadata dispatch returned"
        )
    _tensor("metadata.send_slots", send_slots, (num_tokens, config.top_k), (torch.int32,), device)
    if output is not None:
        _tensor("output", output, (num_tokens, config.hidden_size), (config.dtype,), device)


def head_inputs(head: HeadExchange, call: HeadCall) -> None:
    """All inputs of one call of a shared LM head.

    Raises:
        InputError: naming the argument, what it is and what is expected.
    """
    config, device = head.config, head.workspace.device
    bound = call.row_bound
    if not 0 < bound <= config.max_rows_per_rank:
        raise InputError(
            f"row_bound={bound} must be from 1 to max_rows_per_rank={config.max_rows_per_rank}; "
            "create the group with a larger capacity"
        )
    num_rows = call.hidden.shape[0] if call.hidden.dim() else 0
    _tensor("hidden", call.hidden, (num_rows, config.hidden_size), (config.dtype,), device)
    if num_rows > bound:
        raise InputError(
            f"{num_rows} rows exceed row_bound={bound} (max_rows_per_rank="
            f"{config.max_rows_per_rank}); call in parts, on all ranks, or raise the bound"
        )
    weight = call.weight
    rows = weight.shape[0] if weight.dim() else 0
    _tensor(
        "head_weight",
        weight,
        (max(rows, config.vocab_size), config.hidden_size),
        (config.dtype,),
        device,
    )
    if call.bias is not None:
        rows = call.bias.shape[0] if call.bias.dim() else 0
        _tensor("bias", call.bias, (max(rows, config.vocab_size),), (config.dtype,), device)
    _head_function(call)


def _head_function(call: HeadCall) -> None:
    # The kernel has them in float32, where a smaller cap would be 0, which is none.
    numbers = torch.finfo(torch.float32)
    if call.soft_cap is not None and not numbers.tiny <= call.soft_cap <= numbers.max:
        raise InputError(
            f"soft_cap={call.soft_cap} must be from {numbers.tiny} to {numbers.max}; None is no cap"
        )
    if not abs(call.scale) <= numbers.max:
        raise InputError(f"scale={call.scale} must be from {numbers.min} to {numbers.max}")
