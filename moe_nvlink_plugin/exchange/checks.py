"""Checks of the tensors that callers pass to dispatch and combine, before a kernel reads them."""

from __future__ import annotations

import numbers
import reprlib
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

from moe_nvlink_plugin.errors import ConfigError, InputError
from moe_nvlink_plugin.memory.tensors import (
    check_dense,
    check_device,
    check_memory,
    check_no_gradient,
    check_outside,
    check_tensor,
)
from moe_nvlink_plugin.memory.workspace import Workspace
from moe_nvlink_plugin.recipes import check_global_scale, combine_formats

from . import calls, rank_masks
from .calls import Combine, Dispatch
from .formats import LayerFormat
from .sizes import widest_combine_row

# torch ships no types for it.
_unpack_dual: Callable[[torch.Tensor], Any] = forward_ad.unpack_dual


def channel(index: int, num_channels: int) -> None:
    """Check that the configuration has a channel.

    Raises:
        InputError: it has no such channel, or the number is no integer.
    """
    _integer("channel", index)
    if not 0 <= index < num_channels:
        raise InputError(
            f"channel={index} is not from 0 to {num_channels - 1}; raise "
            f"num_channels={num_channels}"
        )


def bound(max_tokens: int, capacity: int) -> None:
    """Check the bound of one call.

    Raises:
        InputError: it is no integer, or not in 1..capacity.
    """
    _integer("max_tokens", max_tokens)
    if not 1 <= max_tokens <= capacity:
        raise InputError(
            f"max_tokens={max_tokens} is not between 1 and max_tokens_per_rank={capacity}; pass "
            "the most tokens that a rank dispatches in this call, or create the exchange with a "
            "larger capacity"
        )


def _integer(name: str, value: object) -> None:
    if type(value) is int:
        return
    # A tensor has __index__ too, and on a GPU to read it means to wait.
    is_other = isinstance(value, (bool, torch.Tensor)) or not hasattr(value, "__index__")
    if is_other:
        raise InputError(f"{name}={value!r} is a {type(value).__name__}, it must be an integer")


def sequence_of(extra_payloads: object) -> list[torch.Tensor]:
    """Return the extra payloads as a list.

    Raises:
        InputError: it is no sequence; or it is one tensor, whose rows would pass as its elements.
    """
    if isinstance(extra_payloads, (list, tuple)):  # torch 2.9 cannot trace `list | tuple`
        return list(extra_payloads)
    raise InputError(
        f"extra_payloads is a {type(extra_payloads).__name__}, it must be a list or tuple of "
        "tensors; pass [tensor]"
    )


def named_tensors(call: Dispatch | Combine) -> list[tuple[str, Any]]:
    """Return name and value of each tensor of a call; None where none is given. Local."""
    kind = type(call)
    named = [(kind._fields[place], call[place]) for place in calls.TENSORS[kind]]
    if isinstance(call, Dispatch):
        named += [("an extra payload", payload) for payload in call.extra_payloads]
    return named


def tensors_given(call: Dispatch | Combine) -> None:
    """Check that arguments are tensors where torch would raise an error of its own, or none.

    Raises:
        InputError: one is something else, or torch.func.grad, jvp or forward-mode AD takes its
            derivative, which would come out as 0; names it.
    """
    required = calls.REQUIRED[type(call)]
    for name, value in named_tensors(call):
        if value is None and name in type(call)._fields and name not in required:
            continue
        if not isinstance(value, torch.Tensor):
            raise no_tensor(name, value)
        takes_gradient = torch._C._functorch.is_gradtrackingtensor(value)
        if takes_gradient or _unpack_dual(value).tangent is not None:
            raise InputError(
                f"torch takes a derivative of {name}, which cannot pass the exchange (it is for "
                f"inference only); pass {name} without it (torch.func: call the exchange outside "
                "of grad and jvp)"
            )


def no_tensor(name: str, value: object) -> InputError:
    """Return the error of an argument that is no tensor."""
    more = "; rank_mask(ranks, ep_size) makes one" if name == "active_ranks" else ""
    shown = reprlib.repr(value)  # an array's text may have thousands of lines
    return InputError(f"{name}={shown} is a {type(value).__name__}, not a tensor{more}")


def dense_tensors(call: Dispatch | Combine) -> None:
    """Check the tensors of a call in which torch raised an error of its own.

    The checks of each call do not ask for it: torch refuses a part of what they do ask.

    Raises:
        InputError: one is sparse or nested; names it.
    """
    for name, value in named_tensors(call):
        if isinstance(value, torch.Tensor):
            check_dense(name, value)


def no_gradient(call: Dispatch | Combine) -> None:
    """Check that autograd records nothing of a call.

    Raises:
        InputError: it would, for a tensor that requires a gradient; names it.
    """
    if not torch.is_grad_enabled():
        return
    given: list[Any] = [call[place] for place in calls.TENSORS[type(call)]]
    if isinstance(call, Dispatch):
        given += call.extra_payloads
    for tensor in given:
        if tensor is not None and tensor.requires_grad:
            named = named_tensors(call)
            check_no_gradient([name for name, _ in named], *(tensor for _, tensor in named))


def plain_tensors(call: Dispatch | Combine) -> None:
    """Check the tensors of a verb that runs without its op, which would see to all this.

    Raises:
        InputError: one is no tensor or requires a gradient; or its bytes are not its numbers,
            because it is a lazily conjugated or negated view or has no memory; or a mode would make
            the results without memory.
    """
    if type(torch.empty(0)) is not torch.Tensor:
        raise InputError(
            "a mode is active in which torch makes tensors without memory (FakeTensorMode), and "
            "nothing can arrive there; call dispatch and combine, or leave the mode"
        )
    tensors_given(call)
    no_gradient(call)
    for name, tensor in named_tensors(call):
        if tensor is not None:
            numbers_in_memory(name, tensor)


def numbers_in_memory(name: str, tensor: torch.Tensor) -> None:
    """Check that the bytes of a tensor are its numbers.

    Raises:
        InputError: it is a lazily conjugated or negated view, or of zeros without memory.
    """
    if tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor():
        raise InputError(
            f"{name} is a lazily conjugated or negated view, and "
            "its memory holds other numbers; pass it through .resolve_conj().resolve_neg()"
        )


def _num_tokens(layer: LayerFormat, call: Dispatch, max_tokens: int) -> int:
    num_tokens = call.hidden_states.shape[0] if call.hidden_states.dim() else 0
    if num_tokens <= max_tokens:
        return num_tokens
    capacity = layer.config.max_tokens_per_rank
    if max_tokens < capacity:
        raise InputError(
            f"{num_tokens} tokens exceed max_tokens={max_tokens} of this call; pass the most "
            f"tokens that any rank dispatches, at most max_tokens_per_rank={capacity}, and the "
            "same number on all ranks"
        )
    raise InputError(
        f"{num_tokens} tokens exceed max_tokens_per_rank={capacity}; "
        "dispatch in parts or create the exchange with a larger capacity"
    )


def global_scale(
    layer: LayerFormat, scale: torch.Tensor | None, *, needed: bool, read_value: bool = True
) -> None:
    """Check the scale of a whole tensor, which some recipes need.

    Args:
        layer: rows of the layer.
        scale: one float32 on the layer's device, or None.
        needed: whether the call needs a scale.
        read_value: whether to check the value too, which waits for a GPU.

    Raises:
        InputError: the scale is missing or not needed; its shape, dtype or device is wrong; or its
            value is outside 2^-126..2^126.
    """
    name = layer.recipe.name
    if scale is None:
        if needed:
            check_global_scale(name, scale)  # raises, and says what to do
        return
    if not needed:
        raise InputError(
            f"recipe {name} takes no global_scale here, only with activations that it quantises by "
            "one scale; leave it out (it does not travel; pass it to the experts yourself)"
        )
    check_device("global_scale", scale, layer.device)
    check_memory("global_scale", scale)
    check_global_scale(name, scale, read_value=read_value)


def dispatch(
    layer: LayerFormat, call: Dispatch, max_tokens: int, window: range, *, fused: bool
) -> tuple[int, ...]:
    """Check all tensors of one dispatch, apart from global_scale.

    Args:
        layer: rows of the layer.
        call: the call.
        max_tokens: its bound.
        window: addresses of all ranks' workspaces.
        fused: whether the hidden states are activations that are quantised.

    Returns:
        Bytes of a row of each extra payload.

    Raises:
        InputError: shape, dtype or device of a tensor is another one, or the bound does not hold
            (the message names both); or a tensor lies in the workspace, where a peer may overwrite
            it before it is read.
    """
    config, device = layer.config, layer.device
    start, stop = window.start, window.stop
    if type(max_tokens) is not int or not 1 <= max_tokens <= config.max_tokens_per_rank:
        bound(max_tokens, config.max_tokens_per_rank)
    num_tokens = _num_tokens(layer, call, max_tokens)
    if not fused and (layer.quantising is not None or call.scales is not None):
        _quantised_rows(layer, call)
    if config.num_expert_counts or call.expert_counts is not None:
        _expert_counts(layer, call.expert_counts)
    # Every eager call comes here, and a call of a function for each tensor would double the cost.
    for place, name, is_optional, has_tokens, sizes, dtypes in layer.expected[fused]:
        tensor: Any = call[place]
        if tensor is None and is_optional:
            continue
        shape = (num_tokens, *sizes) if has_tokens else sizes
        if not (
            isinstance(tensor, torch.Tensor)
            and tensor.shape == shape
            and tensor.dtype in dtypes
            and tensor.device == device
            and tensor.is_contiguous()
        ):
            check_tensor(name, tensor, shape, dtypes, device)
        address = tensor.data_ptr()
        if start <= address < stop:
            check_outside(window, [name], tensor)
        if address == 0:
            check_memory(name, tensor)
    if call.extra_payloads:
        return _extra_payloads(layer, call.extra_payloads, num_tokens, window)
    return ()


def may_be_masked(
    layer: LayerFormat, active_ranks: torch.Tensor, workspace: Workspace[Any]
) -> None:
    """Check that a round of this layer may have a mask. Local.

    Args:
        layer: the layer's rows.
        active_ranks: the mask.
        workspace: its mask of the ranks that `mask` has not left out is always allowed.

    Raises:
        InputError: it is another mask, and the configuration says that no rank leaves in this way.
    """
    if layer.config.ranks_may_leave and not workspace.is_elastic:
        return
    survivors = workspace.active_ranks
    if survivors is not None and active_ranks.data_ptr() == survivors.data_ptr():
        return
    if workspace.is_elastic:
        raise InputError(
            "active_ranks is given, but the exchange has places, of which some may have no memory; "
            "pass the attribute active_ranks or nothing, and call leave() or renew() to change it"
        )
    raise InputError(
        "active_ranks is given, but ranks_may_leave=False; create the layers of this workspace "
        "with ranks_may_leave=True, or pass the attribute active_ranks, which mask() changes"
    )


def names_itself(layer: LayerFormat, active_ranks: torch.Tensor) -> None:
    """Check that this rank takes part in its own round. On a GPU it waits for the device.

    Raises:
        InputError: the mask leaves this rank out.
    """
    ranks = rank_masks.ranks_in(active_ranks, layer.config.ep_size)
    if layer.config.ep_rank not in ranks:
        raise InputError(
            f"active_ranks names ranks {ranks} of 0 to {layer.config.ep_size - 1}, but this is "
            f"rank {layer.config.ep_rank}; a rank that dispatches names itself, and the others "
            "name it too"
        )


def _quantised_rows(layer: LayerFormat, call: Dispatch) -> None:
    """Check that rows that travel as they are have the type of the recipe, and scales if it has."""
    hidden_states, scales = call.hidden_states, call.scales
    row, scales_row = layer.rows["recv_hidden_states"], layer.rows.get("recv_scales")
    if layer.quantising is not None and hidden_states.dtype != row.dtype:
        raise InputError(
            f"hidden_states has dtype {hidden_states.dtype}; recipe {layer.recipe.name} takes "
            f"activations of {layer.config.dtype} without scales, or quantised rows of {row.dtype}"
        )
    if (scales is None) != (scales_row is None):
        has = "needs" if scales is None else "has no"
        raise InputError(
            f"recipe {layer.recipe.name} {has} scales for rows of {hidden_states.dtype}"
        )


def _expert_counts(layer: LayerFormat, counts: torch.Tensor | None) -> None:
    num_counts, num_experts = layer.config.num_expert_counts, layer.config.num_experts
    if counts is None:
        if num_counts in (0, num_experts):
            return
        raise InputError(
            f"no expert_counts, but num_expert_counts={num_counts}; pass {num_counts} int32, or "
            f"create the exchange with num_expert_counts={num_experts} (num_experts): then "
            "dispatch counts"
        )
    if not num_counts:
        raise InputError(
            f"expert_counts of {list(counts.shape)}, but num_expert_counts=0; create the exchange "
            "with the number of words that each rank sends"
        )


def _extra_payloads(
    layer: LayerFormat, given: list[torch.Tensor], num_tokens: int, window: range
) -> tuple[int, ...]:
    capacities, device = layer.config.extra_payload_bytes, layer.device
    if len(given) > len(capacities):
        raise InputError(
            f"{len(given)} extra payloads given, the configuration has room for {len(capacities)} "
            f"(extra_payload_bytes={capacities}); create the exchange with room for each"
        )
    row_bytes = []
    for index, (tensor, most_bytes) in enumerate(zip(given, capacities, strict=False)):
        name = f"extra_payloads[{index}]"
        rest, dtypes = getattr(tensor, "shape", ())[1:], (getattr(tensor, "dtype", torch.uint8),)
        check_tensor(name, tensor, (num_tokens, *rest), dtypes, device)
        has_bytes = tensor.dtype.itemsize * tensor.shape[1:].numel()
        if not 1 <= has_bytes <= most_bytes:
            raise InputError(
                f"{name} has rows of {has_bytes} bytes, not 1 to {most_bytes} "
                f"(extra_payload_bytes={capacities}); create the exchange with room for them"
            )
        if tensor.data_ptr() == 0:
            check_memory(name, tensor)
        row_bytes.append(has_bytes)
    check_outside(window, ["an extra payload"], *given)
    return tuple(row_bytes)


def ids_as_int32(topk_ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Return ids as int32. Capturable.

    An int64 id that is no expert stays one; a plain cast could turn it into an expert's id. On a
    GPU this takes two launches.
    """
    if topk_ids.dtype == torch.int32:
        return topk_ids
    return topk_ids.clamp(-1, num_experts).to(torch.int32)


def combine(layer: LayerFormat, call: Combine, max_tokens: int, window: range) -> None:
    """Check all tensors of one combine.

    Args:
        layer: rows of the layer.
        call: the call.
        max_tokens: bound of the dispatch.
        window: addresses of all ranks' workspaces.

    Raises:
        InputError: shape, dtype or device of a tensor is another one (the message names both); or
            output or add lies in the workspace; or add overlaps output.
    """
    config, device, start, stop = layer.config, layer.device, window.start, window.stop
    rows, slots, output, add = call.expert_output, call.send_slots, call.output, call.add
    if not isinstance(rows, torch.Tensor):
        raise no_tensor("expert_output", rows)
    hidden_size = call.hidden_size
    if hidden_size is None:
        hidden_size = config.hidden_size
    else:
        combine_width(layer, rows.dtype, hidden_size)
    num_tokens = slots.shape[0] if slots.dim() else 0
    if num_tokens > max_tokens:
        raise InputError(
            f"metadata of {num_tokens} tokens exceeds max_tokens={max_tokens} of the dispatch; "
            "pass the metadata dispatch returned"
        )
    sums, of_rows = (num_tokens, hidden_size), (rows.dtype,)
    for name, tensor, shape, dtypes in (
        ("expert_output", rows, (config.ep_size * max_tokens, hidden_size), layer.combine_dtypes),
        ("metadata.send_slots", slots, (num_tokens, config.top_k), (torch.int32,)),
        ("output", output, sums, of_rows),
        ("add", add, sums, of_rows),
    ):
        if tensor is None:
            continue
        if not (
            tensor.shape == shape
            and tensor.dtype in dtypes
            and tensor.device == device
            and tensor.is_contiguous()
        ):
            check_tensor(name, tensor, shape, dtypes, device)
        address = tensor.data_ptr()
        if name != "expert_output" and start <= address < stop:
            check_outside(window, [name], tensor)
        if address == 0:
            check_memory(name, tensor)
    if add is not None and output is not None:
        _apart(add, output)


def _apart(add: torch.Tensor, output: torch.Tensor) -> None:
    address, size = add.data_ptr(), add.numel() * add.itemsize
    if 0 < abs(output.data_ptr() - address) < size:
        raise InputError(
            f"add overlaps output, which begins {output.data_ptr() - address} bytes after it; pass "
            "the same memory or memory apart from it"
        )


def rows_elsewhere(expert_output: torch.Tensor, region: torch.Tensor) -> None:
    """Check that experts' rows which do not begin with the memory of combine_input() are apart.

    Raises:
        InputError: they begin elsewhere in that memory, so a copy there would overwrite them.
    """
    begin = expert_output.data_ptr() - region.data_ptr()
    if 0 < begin < region.numel() * region.itemsize:
        raise InputError(
            f"expert_output begins {begin} bytes after combine_input(), in the same memory; write "
            "the rows where combine_input() begins, or pass a copy"
        )


def largest_scale(combine_scale: float) -> float:
    """Return the largest factor of a combine's sums, which are also multiplied by this scale."""
    return float(torch.finfo(torch.float32).max) / max(1.0, combine_scale)


def scale(value: float, largest: float) -> None:
    """Check the factor of a combine's sums.

    Raises:
        InputError: it is no finite number of float32, or above `largest`.
    """
    given: object = value
    if type(given) not in (float, int) and (
        isinstance(given, bool) or not isinstance(given, numbers.Real)
    ):
        raise InputError(
            f"scale={given!r} is a {type(given).__name__}, it must be a real number of the host "
            "(of a tensor, pass scale.item())"
        )
    if not abs(value) <= largest:
        raise InputError(
            f"scale={value} is no finite number of float32 (at most {largest} in magnitude); "
            "pass a smaller one, and scale the rest in the experts' output"
        )


def combine_width(layer: LayerFormat, dtype: torch.dtype, hidden_size: int) -> None:
    """Check that rows of this type and width have room in the memory for the experts' output.

    Raises:
        InputError: they have not, or combine's format does not support the width.
    """
    config = layer.config
    _integer("hidden_size", hidden_size)
    row_bytes, most_bytes = hidden_size * dtype.itemsize, widest_combine_row(config)
    if not hidden_size >= 1 or row_bytes > most_bytes:
        raise InputError(
            f"hidden_size={hidden_size} of {dtype} makes rows of {row_bytes} bytes, not 1 to "
            f"{most_bytes}; create the exchange with a larger hidden_size, or name a wider type in "
            "combine_dtypes"
        )
    if config.combine == "bf16":
        return
    if hidden_size > config.hidden_size:
        raise InputError(
            f"hidden_size={hidden_size} exceeds the exchange's {config.hidden_size}, for which "
            f"combine={config.combine} has room; create the exchange with a larger hidden_size"
        )
    try:
        combine_formats.combine_rows(config.combine, hidden_size)
    except ConfigError as error:
        raise InputError(str(error)) from error


def all_tokens(num_tokens: int, dispatched: int) -> None:
    """Check that a combine is for the tokens of its dispatch.

    Raises:
        InputError: it is for fewer tokens, or for more.
    """
    if num_tokens != dispatched:
        raise InputError(
            f"metadata of {num_tokens} tokens, but the dispatch had {dispatched}; pass the "
            "metadata that dispatch returned, unchanged"
        )
