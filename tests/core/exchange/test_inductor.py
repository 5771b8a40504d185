"""Inductor must not take the receive buffers for memory of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from moe_nvlink_plugin import AllToAllConfig, MoeAllToAll
from moe_nvlink_plugin.testing import ThreadGroup, random_inputs

pytestmark = pytest.mark.timeout(240)

CAPACITY, HIDDEN = 16, 24
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.fixture
def layer() -> Iterator[MoeAllToAll]:
    torch._dynamo.reset()
    (group,) = ThreadGroup.ranks(1)
    config = AllToAllConfig(
        ep_size=1,
        ep_rank=0,
        num_experts=8,
        top_k=2,
        hidden_size=HIDDEN,
        max_tokens_per_rank=CAPACITY,
        dtype=torch.float32,
        timeout_s=20,
        extra_payload_bytes=(HIDDEN * 4,),
    )
    # Code compiled before must not answer for what is compiled now.
    uncached = torch.compiler.config.patch(force_disable_caches=True)  # type: ignore[attr-defined]
    with MoeAllToAll.create(config, group) as exchange, uncached:
        yield exchange


def inputs(layer: MoeAllToAll, num_tokens: int = 5) -> Inputs:
    return random_inputs(layer.config, num_tokens, torch.Generator().manual_seed(3))


def test_received_rows_are_not_overwritten(layer: MoeAllToAll) -> None:
    """All that arrived is dead after one pointwise use of its shape: it invites an in-place one."""

    def double(hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        received = layer.dispatch(hidden, ids, weights, [hidden])
        rows = received.hidden_states * 2.0 + received.extra_payloads[0]
        return layer.combine(rows, received.metadata)

    hidden, ids, weights = inputs(layer)
    kept = layer.dispatch(hidden, ids, weights, [hidden])
    layer.combine(kept.hidden_states, kept.metadata)
    torch.compile(double, fullgraph=True)(hidden + 1.0, ids, weights)
    # `kept` looks at the same buffers, which hold what the compiled dispatch received.
    assert torch.equal(kept.hidden_states[:5], hidden + 1.0)
    assert torch.equal(kept.extra_payloads[0][:5], hidden + 1.0)


def test_empty_slots_are_marked_whatever_the_ids_were_overwritten_with(layer: MoeAllToAll) -> None:
    hidden, ids, weights = inputs(layer, 9)
    received = layer.dispatch(hidden, ids, weights, [hidden])
    received.topk_ids.zero_()  # as code compiled without our say would do
    layer.combine(received.hidden_states, received.metadata)
    again = layer.dispatch(hidden[:2], ids[:2], weights[:2], [hidden[:2]])
    assert torch.equal(again.topk_ids[:2], ids[:2])
    assert bool((again.topk_ids[2:] == -1).all())
    layer.combine(again.hidden_states, again.metadata)
