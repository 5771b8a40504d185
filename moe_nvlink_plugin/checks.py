"""Checks of the tensors handed to dispatch and combine: bad input never reaches memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .errors import InputError

if TYPE_CHECKING:
    from .exchange import LayerExchange


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


def dispatch_inputs(
    layer: LayerExchange,
    hidden_states: torch.Tensor,
    scales: torch.Tensor | None,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    extra_payloads: list[torch.Tensor],
) -> None:
    """All inputs of one dispatch.

    Raises:
        InputError: naming the tensor, what it is and what is expected.
    """
    config, rows, device = layer.config, layer.rows, layer.workspace.device
    num_tokens = hidden_states.shape[0] if hidden_states.dim() else 0
    if num_tokens > config.max_tokens_per_rank:
        raise InputError(
            f"{num_tokens} tokens exceed max_tokens_per_rank={config.max_tokens_per_rank}; "
            "dispatch in parts or create the exchange with a larger capacity"
        )
    hidden_row = rows["recv_hidden_states"]
    shape = (num_tokens, hidden_row.elements)
    _tensor("hidden_states", hidden_states, shape, (hidden_row.dtype,), device)
    routed = (num_tokens, config.top_k)
    _tensor("topk_ids", topk_ids, routed, (torch.int32, torch.int64), device)
    _tensor("topk_weights", topk_weights, routed, (torch.float32,), device)
    scales_row = rows.get("recv_scales")
    if (scales is None) != (scales_row is None):
        has = "needs" if scales is None else "has no"
        raise InputError(f"recipe {config.recipe or config.dtype} {has} scales")
    if scales is not None and scales_row is not None:
        shape = (num_tokens, scales_row.elements)
        _tensor("scales", scales, shape, (scales_row.dtype,), device)
    _extra_payloads(config.extra_payload_bytes, extra_payloads, num_tokens, device)


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
