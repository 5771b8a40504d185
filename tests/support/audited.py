"""Ranks whose rounds are audited, on CPU ranks and on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from moe_nvlink_plugin import AllToAllConfig, MoeAllToAll
from moe_nvlink_plugin.integration.common.audit import AUDIT_BYTES, Audit
from moe_nvlink_plugin.integration.common.formats import Sent
from moe_nvlink_plugin.testing import ThreadGroup

SIZE, CAPACITY = 3, 12


def config_of(rank: int, **values: Any) -> AllToAllConfig:
    usual: dict[str, Any] = {
        "ep_size": SIZE,
        "ep_rank": rank,
        "num_experts": 9,
        "top_k": 4,
        "hidden_size": 256,
        "max_tokens_per_rank": CAPACITY,
        "dtype": torch.bfloat16,
        "extra_payload_bytes": (AUDIT_BYTES,),
        "timeout_s": 60.0,
        "first_timeout_s": 60.0,
    }
    return AllToAllConfig(**{**usual, **values})


class Rank:
    """A rank whose rounds are audited; `spoil` may change rows before they are compared."""

    def __init__(
        self, group: ThreadGroup, every: int = 1, device: str = "cpu", **values: Any
    ) -> None:
        self.exchange = MoeAllToAll.create(config_of(group.rank, **values), group, device)
        self.device, self.scale = torch.device(device), torch.tensor([0.5], device=device)
        self.audit = Audit(self.exchange, every, self.device)
        self.random = torch.Generator().manual_seed(group.rank)
        self.payloads: tuple[torch.Tensor, ...] = ()

    def round(
        self,
        num_tokens: int,
        spoil: Callable[[Any], object] = lambda received: None,
        *,
        given: Callable[[torch.Tensor], Sent] | None = None,
        to_all: bool = False,
    ) -> Any:
        hidden, *routing = self.inputs(num_tokens, to_all=to_all)
        return self.run(self.sent(hidden) if given is None else given(hidden), routing, spoil)

    def inputs(self, num_tokens: int, *, to_all: bool = False) -> tuple[torch.Tensor, ...]:
        """Rows, ids, weights and padding; with `to_all` each token goes to each of three ranks."""
        config, random = self.exchange.config, self.random
        hidden = torch.randn(num_tokens, config.hidden_size, generator=random).to(config.dtype)
        hidden[torch.rand(num_tokens, generator=random) < 0.1] = float("nan")
        ids = torch.randint(-2, 11, (num_tokens, config.top_k), generator=random).to(torch.int32)
        ids[torch.rand(num_tokens, generator=random) < 0.2] = -1
        weights = torch.rand(num_tokens, config.top_k, generator=random)
        padding = torch.rand(num_tokens, generator=random) < 0.2
        if to_all:
            ids[:] = torch.tensor([0, 3, 6, 1])
            padding[:] = False
        return tuple(tensor.to(self.device) for tensor in (hidden, ids, weights, padding))

    def sent(self, hidden: torch.Tensor) -> Sent:
        """Activations, which the kernels quantise if the recipe says so."""
        needs = getattr(self.exchange.recipe, "needs_global_scale", False)
        return Sent(hidden, None, self.scale if needs else None)

    def run(
        self,
        sent: Sent,
        routing: Sequence[torch.Tensor],
        spoil: Callable[[Any], object] = lambda received: None,
    ) -> Any:
        """A round; a CUDA graph can capture it. `routing`: ids, weights, padding."""
        ids, weights, padding = routing
        words = self.audit.words(sent, ids, weights, padding)
        received = self.exchange.dispatch(
            sent.rows,
            ids,
            weights,
            (words,),
            scales=sent.scales,
            global_scale=sent.global_scale,
            is_padding=padding,
        )
        spoil(received)
        words_here = received.extra_payloads[-1]
        received = self.audit.compared(received)
        for tensor in (received.hidden_states, received.topk_weights, words_here):
            tensor.view(torch.uint8).fill_(0xFF)  # what empty slots hold in the next round
        region = self.exchange.combine_input(metadata=received.metadata)
        region.zero_()
        self.exchange.combine(region, received.metadata)
        return received
