"""A small exchange and good inputs for it, for the tests of what goes wrong."""

from __future__ import annotations

from typing import Any

import torch

from moe_nvlink_plugin import AllToAllConfig, Dispatched, MoeAllToAll

HIDDEN, TOP_K, CAPACITY = 8, 2, 4


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


def good(num_tokens: int = 3) -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(num_tokens, HIDDEN),
        "topk_ids": torch.zeros(num_tokens, TOP_K, dtype=torch.int32),
        "topk_weights": torch.rand(num_tokens, TOP_K),
        "extra_payloads": [torch.zeros(num_tokens, 3, dtype=torch.int16)],
    }


def assert_still_works(layer: MoeAllToAll) -> None:
    inputs = good()
    received = layer.dispatch(**inputs)
    combined = layer.combine(received.hidden_states.clone(), received.metadata)
    assert torch.equal(combined, inputs["hidden_states"])


def other_metadata(received: Dispatched, **changes: Any) -> Any:
    return received.metadata._replace(**changes)
