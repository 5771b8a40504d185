"""A small exchange, good and bad inputs for it, and torch.library.opcheck of its op dispatch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from moe_nvlink_plugin import AllToAllConfig, MoeAllToAll
from moe_nvlink_plugin.exchange.calls import Combine, Dispatch
from moe_nvlink_plugin.exchange.channel import Channel
from moe_nvlink_plugin.testing import ThreadGroup, random_inputs

HIDDEN, TOP_K, CAPACITY = 8, 2, 4


#: Hidden states, ids and weights.
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def config(ep_size: int = 1, ep_rank: int = 0, **values: Any) -> AllToAllConfig:
    usual: dict[str, Any] = {
        "num_experts": 4,
        "top_k": TOP_K,
        "hidden_size": HIDDEN,
        "max_tokens_per_rank": CAPACITY,
        "dtype": torch.float32,
        "timeout_s": 30,
    }
    return AllToAllConfig(ep_size=ep_size, ep_rank=ep_rank, **{**usual, **values})


def sized(**sizes: Any) -> Callable[..., AllToAllConfig]:
    """`config` of a group's rank, with other sizes."""
    return lambda group, **values: config(group.size, group.rank, **{**sizes, **values})


def alone(**values: Any) -> MoeAllToAll:
    """The exchange of one rank, which is this process."""
    return MoeAllToAll.create(config(**values), ThreadGroup.ranks(1)[0])


def good(num_tokens: int = 3) -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(num_tokens, HIDDEN),
        "topk_ids": torch.zeros(num_tokens, TOP_K, dtype=torch.int32),
        "topk_weights": torch.rand(num_tokens, TOP_K),
        "extra_payloads": [torch.zeros(num_tokens, 3, dtype=torch.int16)],
    }


def plain(num_tokens: int = 3) -> dict[str, Any]:
    """The same without an extra payload, for which `config` has no room."""
    return {**good(num_tokens), "extra_payloads": ()}


def inputs_of(layer: MoeAllToAll, num_tokens: int, seed: int = 0) -> Inputs:
    """Random ones."""
    return random_inputs(layer.config, num_tokens, torch.Generator().manual_seed(seed))


def round_of(layer: MoeAllToAll, **inputs: Any) -> torch.Tensor:
    """What combine returns of the rows that dispatch brought."""
    received = layer.dispatch(**inputs)
    return layer.combine(received.hidden_states.clone(), received.metadata)


def assert_still_works(layer: MoeAllToAll, inputs: dict[str, Any] | None = None) -> None:
    given = good() if inputs is None else inputs
    assert torch.equal(round_of(layer, **given), given["hidden_states"])


def freed(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as FSDP leaves it between two layers: it has a shape, its storage has no bytes."""
    left = tensor.clone()
    left.untyped_storage().resize_(0)
    return left


def opcheck_dispatch(exchange: MoeAllToAll, arguments: tuple[Any, ...]) -> None:
    """Runs opcheck, which calls the op again and again, with a combine behind each dispatch.

    The kernel reports a dispatch that follows another without its combine.
    """
    layer = exchange._layer
    start = layer.start_dispatch

    def whole_round(call: Dispatch, pending: torch.Tensor) -> tuple[Channel, torch.Tensor]:
        channel, slots = start(call, pending)
        rows = channel.combine_input(
            channel.max_tokens, layer.config.dtype, layer.config.hidden_size
        )
        output = rows.new_empty(len(slots), layer.config.hidden_size)
        channel.combine(Combine(rows, slots, output, layer.handle, channel.index), output)
        return channel, slots

    with mock.patch.object(layer, "start_dispatch", whole_round):
        torch.library.opcheck(torch.ops.moe_nvlink.dispatch.default, arguments)
