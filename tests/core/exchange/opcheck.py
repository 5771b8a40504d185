"""torch.library.opcheck of the op dispatch."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch

from moe_nvlink_plugin import MoeAllToAll
from moe_nvlink_plugin.exchange.calls import Combine, Dispatch
from moe_nvlink_plugin.exchange.channel import Channel


def opcheck_dispatch(exchange: MoeAllToAll, arguments: tuple[Any, ...]) -> None:
    """Run opcheck, which calls the op again and again, with a combine behind each dispatch.

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
