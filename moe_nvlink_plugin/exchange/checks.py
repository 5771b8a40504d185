"""Checks of the tensors that callers pass to dispatch and combine, before a kernel reads them."""

from __future__ import annotations

import numbers
from collections.abc import Sequence

import torch

from moe_nvlink_plugin.errors import ConfigError, InputError
from moe_nvlink_plugin.memory.tensors import (
    check_device,
    check_no_gradient,
    check_outside,
    check_tensor,
)
from moe_nvlink_plugin.recipes import check_global_scale, combine_formats

from . import rank_masks
from .formats import Activations, LayerFormat
from .sizes import widest_combine_row

#: Of combine: the largest number of float32.
LARGEST_SCALE = torch.finfo(torch.float32).max

_READ_BY_DISPATCH = ("topk_ids", "topk_weights", *Activations._fields, "an extra payload")


def channel(index: int, num_channels: int) -> None:
    """Check that the configuration has a channel.

    Raises:
        InputError: it has no such channel, or the number is no integer.
    """
    _integer("channel", index)
    if not 0 <= index < num_channels:
        raise InputError(
            f"channel={index} is not below num_channels={num_channels}; raise num_channels"
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
    is_other = isinstance(value, bool | torch.Tensor) or not hasattr(value, "__index__")
    if is_other:
        raise InputError(f"{name}={value!r} is a {type(value).__name__}, it must be an integer")


def sequence_of(extra_payloads: object) -> list[torch.Tensor]:
    """Return the extra payloads as a list.

    Raises:
        InputError: it is no sequence; or it is one tensor, whose rows would pass as its elements.
    """
    if isinstance(extra_payloads, list | tuple):
        return list(extra_payloads)
    raise InputError(
        f"extra_payloads is a {type(extra_payloads).__name__}, it must be a list or tuple of "
        "tensors; pass [tensor]"
    )


def tensors_given(names: Sequence[str], *values: object) -> None:
    """Check that arguments are tensors where torch would raise an error of its own.

    Args:
        names: of the arguments; the last one is that of all further arguments.
        *values: None: not given; the first one is always given.

    Raises:
        InputError: one is something else; names it.
    """
    for place, value in enumerate(values):
        if (value is None and place > 0) or isinstance(value, torch.Tensor):
            continue
        name = names[min(place, len(names) - 1)]
        more = "; rank_mask(ranks, ep_size) makes one" if name == "active_ranks" else ""
        raise InputError(f"{name}={value!r} is a {type(value).__name__}, not a tensor{more}")


def plain_tensors(names: Sequence[str], *values: torch.Tensor | None) -> None:
    """Check the tensors of a verb that runs without its op, which would see to all this.

    Args:
        names: as for tensors_given.
        *values: as for tensors_given.

    Raises:
        InputError: one is no tensor or requires a gradient; or its bytes are not its numbers,
            because it is a lazily conjugated or negated view or has no memory.
    """
    tensors_given(names, *values)
    check_no_gradient(names, *values)
    for place, tensor in enumerate(values):
        if tensor is None:
            continue
        if tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor():
            raise InputError(
                f"{names[min(place, len(names) - 1)]} is a lazily conjugated or negated view, and "
                "its memory holds other numbers; pass it through .resolve_conj().resolve_neg()"
            )


def activations(layer: LayerFormat, hidden_states: torch.Tensor, max_tokens: int) -> int:
    """Check activations that dispatch quantises; return the number of tokens.

    Args:
        layer: rows of the layer.
        hidden_states: `[num_tokens, hidden_size]` config.dtype.
        max_tokens: bound of the call.

    Raises:
        InputError: shape, dtype or device is another one. The message names both.
    """
    config = layer.config
    num_tokens = _num_tokens(layer, hidden_states, max_tokens)
    shape = (num_tokens, config.hidden_size)
    check_tensor("hidden_states", hidden_states, shape, (config.dtype,), layer.device)
    return num_tokens


def _num_tokens(layer: LayerFormat, hidden_states: torch.Tensor, max_tokens: int) -> int:
    num_tokens = hidden_states.shape[0] if hidden_states.dim() else 0
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
    check_global_scale(name, scale, read_value=read_value)


def dispatch_inputs(
    layer: LayerFormat,
    given: Activations,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    extra_payloads: list[torch.Tensor],
    *,
    fused: bool,
    max_tokens: int,
    window: range,
) -> tuple[int, ...]:
    """Check all tensors of one dispatch. MoeAllToAll.dispatch documents their shapes.

    Args:
        layer: rows of the layer.
        given: hidden states, scales, global scale, and masks of padding and of ranks.
        topk_ids: expert ids.
        topk_weights: router weights.
        extra_payloads: further payloads.
        fused: whether the hidden states are activations that the kernel quantises.
        max_tokens: bound of the call.
        window: addresses of all ranks' workspaces.

    Returns:
        Bytes of a row of each extra payload.

    Raises:
        InputError: shape, dtype or device of a tensor is another one, or the bound does not hold
            (the message names both); or a tensor lies in the workspace.
    """
    config, device = layer.config, layer.device
    bound(max_tokens, config.max_tokens_per_rank)
    if fused:
        num_tokens = activations(layer, given.hidden_states, max_tokens)
    else:
        num_tokens = _quantised_rows(layer, given, max_tokens)
    routed = (num_tokens, config.top_k)
    check_tensor("topk_ids", topk_ids, routed, (torch.int32, torch.int64), device)
    check_tensor("topk_weights", topk_weights, routed, (torch.float32,), device)
    if given.is_padding is not None:
        check_tensor("is_padding", given.is_padding, (num_tokens,), (torch.bool,), device)
    if given.active_ranks is not None:
        shape = (rank_masks.num_words(config.ep_size),)
        check_tensor("active_ranks", given.active_ranks, shape, (torch.int64,), device)
    _expert_counts(layer, given.expert_counts)
    # Rows of an earlier round among them: a peer may overwrite them before they are read.
    check_outside(window, _READ_BY_DISPATCH, topk_ids, topk_weights, *given, *extra_payloads)
    return _extra_payloads(config.extra_payload_bytes, extra_payloads, num_tokens, device)


def may_be_masked(
    layer: LayerFormat, active_ranks: torch.Tensor, survivors: torch.Tensor | None
) -> None:
    """Check that a round of this layer may have a mask. Local.

    Args:
        layer: the layer's rows.
        active_ranks: the mask.
        survivors: the workspace's mask of the ranks that `mask` has not left out, always allowed.

    Raises:
        InputError: it is another mask, and the configuration says that no rank leaves.
    """
    if layer.config.ranks_may_leave:
        return
    if survivors is None or active_ranks.data_ptr() != survivors.data_ptr():
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


def _quantised_rows(layer: LayerFormat, given: Activations, max_tokens: int) -> int:
    """Check rows that travel as they are, and their scales; return the number of rows."""
    config, device = layer.config, layer.device
    hidden_states, scales = given.hidden_states, given.scales
    row, scales_row = layer.rows["recv_hidden_states"], layer.rows.get("recv_scales")
    num_tokens = _num_tokens(layer, hidden_states, max_tokens)
    if layer.quantising is not None and hidden_states.dtype != row.dtype:
        raise InputError(
            f"hidden_states has dtype {hidden_states.dtype}; recipe {layer.recipe.name} takes "
            f"activations of {config.dtype} without scales, or quantised rows of {row.dtype}"
        )
    check_tensor("hidden_states", hidden_states, (num_tokens, row.elements), (row.dtype,), device)
    if (scales is None) != (scales_row is None):
        has = "needs" if scales is None else "has no"
        raise InputError(
            f"recipe {layer.recipe.name} {has} scales for rows of {hidden_states.dtype}"
        )
    if scales is not None and scales_row is not None:
        shape = (num_tokens, scales_row.elements)
        check_tensor("scales", scales, shape, (scales_row.dtype,), device)
    return num_tokens


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
    check_tensor("expert_counts", counts, (num_counts,), (torch.int32,), layer.device)


def _extra_payloads(
    capacities: tuple[int, ...], given: list[torch.Tensor], num_tokens: int, device: torch.device
) -> tuple[int, ...]:
    if len(given) > len(capacities):
        raise InputError(
            f"{len(given)} extra payloads given, the configuration has room for {len(capacities)} "
            f"(extra_payload_bytes={capacities}); create the exchange with room for each"
        )
    row_bytes = []
    for index, (tensor, most_bytes) in enumerate(zip(given, capacities, strict=False)):
        name = f"extra_payloads[{index}]"
        check_tensor(name, tensor, (num_tokens, *tensor.shape[1:]), (tensor.dtype,), device)
        has_bytes = tensor.dtype.itemsize * tensor.shape[1:].numel()
        if not 1 <= has_bytes <= most_bytes:
            raise InputError(
                f"{name} has rows of {has_bytes} bytes, not 1 to {most_bytes} "
                f"(extra_payload_bytes={capacities}); create the exchange with room for them"
            )
        row_bytes.append(has_bytes)
    return tuple(row_bytes)


def ids_as_int32(topk_ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Return ids as int32. Capturable.

    An int64 id that is no expert stays one; a plain cast could turn it into an expert's id. On a
    GPU this takes two launches.
    """
    if topk_ids.dtype == torch.int32:
        return topk_ids
    return topk_ids.clamp(-1, num_experts).to(torch.int32)


def combine_inputs(
    layer: LayerFormat,
    expert_output: torch.Tensor,
    send_slots: torch.Tensor,
    output: torch.Tensor | None,
    max_tokens: int,
    hidden_size: int | None,
    window: range,
) -> None:
    """Check all tensors of one combine. MoeAllToAll.combine documents their shapes.

    Args:
        layer: rows of the layer.
        expert_output: the experts' rows.
        send_slots: of the metadata.
        output: where the sums go, or None.
        max_tokens: bound of the dispatch.
        hidden_size: width of the rows of this call; None: that of the configuration.
        window: addresses of all ranks' workspaces.

    Raises:
        InputError: shape, dtype or device of a tensor is another one (the message names both); or
            output lies in the workspace.
    """
    config, device = layer.config, layer.device
    if hidden_size is None:
        hidden_size = config.hidden_size
    else:
        combine_width(layer, expert_output.dtype, hidden_size)
    shape = (layer.slots_of(max_tokens), hidden_size)
    check_tensor("expert_output", expert_output, shape, layer.combine_dtypes, device)
    num_tokens = send_slots.shape[0] if send_slots.dim() else 0
    if num_tokens > max_tokens:
        raise InputError(
            f"metadata of {num_tokens} tokens exceeds max_tokens={max_tokens} of the dispatch; "
            "pass the metadata dispatch returned"
        )
    routed = (num_tokens, config.top_k)
    check_tensor("metadata.send_slots", send_slots, routed, (torch.int32,), device)
    if output is not None:
        shape = (num_tokens, hidden_size)
        check_tensor("output", output, shape, (expert_output.dtype,), device)
        check_outside(window, ["output"], output)


def rows_in_place(expert_output: torch.Tensor, region: torch.Tensor) -> bool:
    """Return whether the experts' rows are the memory of combine_input().

    Raises:
        InputError: they begin elsewhere in that memory, so a copy there would overwrite them.
    """
    begin = expert_output.data_ptr() - region.data_ptr()
    if begin == 0:
        return True
    if 0 < begin < region.numel() * region.itemsize:
        raise InputError(
            f"expert_output begins {begin} bytes after combine_input(), in the same memory; write "
            "the rows where combine_input() begins, or pass a copy"
        )
    return False


def scale(value: float, combine_scale: float) -> None:
    """Check the factor of a combine's sums, which are multiplied by value * combine_scale at once.

    Raises:
        InputError: it is no finite number of float32.
    """
    given: object = value
    if type(given) not in (float, int) and (
        isinstance(given, bool) or not isinstance(given, numbers.Real)
    ):
        raise InputError(
            f"scale={given!r} is a {type(given).__name__}, it must be a real number of the host "
            "(of a tensor, pass scale.item())"
        )
    largest = LARGEST_SCALE / max(1.0, combine_scale)
    if not abs(value) <= largest:
        raise InputError(
            f"scale={value} is no finite number of float32 (at most {largest} in magnitude); "
            "pass a smaller one, and scale the rest in the experts' output"
        )


def added_rows(
    layer: LayerFormat,
    add: torch.Tensor,
    expert_output: torch.Tensor,
    num_tokens: int,
    output: torch.Tensor | None,
    window: range,
) -> None:
    """Check the rows that a combine adds to its sums. MoeAllToAll.combine documents them.

    Args:
        layer: rows of the layer.
        add: the rows.
        expert_output: the experts' rows, which have been checked.
        num_tokens: tokens of the call.
        output: where the sums go, or None.
        window: addresses of all ranks' workspaces.

    Raises:
        InputError: shape, dtype or device is another one; or the rows overlap the workspace, or
            overlap `output` without being the same memory.
    """
    shape = (num_tokens, expert_output.shape[1])
    check_tensor("add", add, shape, (expert_output.dtype,), layer.device)
    check_outside(window, ["add"], add)
    address, size = add.data_ptr(), add.numel() * add.itemsize
    if output is not None and 0 < abs(output.data_ptr() - address) < size:
        raise InputError(
            f"add overlaps output, which begins {output.data_ptr() - address} bytes after it; pass "
            "the same memory or memory apart from it"
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
