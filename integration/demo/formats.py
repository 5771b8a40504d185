"""What a token weighs in dispatch, recipe by recipe, counted in a real exchange of two ranks.

The ranks are threads of this process, on the same kernels and the same shared memory as a server's
workers. The bytes are those of the exchange's counters.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch

from moe_nvlink_plugin import AllToAllConfig, ExchangeStats, MoeAllToAll, QuantisingRecipe
from moe_nvlink_plugin.testing import ThreadGroup, run_ranks

#: None is bfloat16 as it is, which the others are held against.
RECIPES = (None, "fp8_block", "fp8_token", "fp8_tensor", "mxfp8", "nvfp4")
HIDDEN_SIZE = 7168
TOP_K = 4
NUM_TOKENS = 256
EP_SIZE = 2


class RecipeBytes(NamedTuple):
    """What one recipe moved; `rows` are rows put to ranks, each to one.

    dispatched: bytes of all of them. choices: bytes of the ids and weights beside one row.
    stated: bytes of one row and its scales as the recipe has it.
    """

    name: str
    rows: int
    dispatched: int
    choices: int
    stated: int

    @property
    def per_token(self) -> float:
        """Bytes of a row and its scales, as counted."""
        return self.dispatched / self.rows - self.choices


def measure(hidden_size: int = HIDDEN_SIZE, num_tokens: int = NUM_TOKENS) -> list[RecipeBytes]:
    """One round with every recipe, the same activations and choices for all. CPU only."""
    return [_measure_one(recipe, hidden_size, num_tokens) for recipe in RECIPES]


def _measure_one(recipe: str | None, hidden_size: int, num_tokens: int) -> RecipeBytes:
    config = AllToAllConfig(
        ep_size=EP_SIZE,
        ep_rank=0,
        num_experts=16,
        top_k=TOP_K,
        hidden_size=hidden_size,
        max_tokens_per_rank=num_tokens,
        dtype=torch.bfloat16,
        recipe=recipe,
    )
    total = ExchangeStats()
    for counted in run_ranks(EP_SIZE, lambda group: _one_round(config, group)):
        total = total.plus(counted)
    found = MoeAllToAll.check(config)
    scales = found.scales_row(hidden_size)
    stated = found.hidden_row(hidden_size).row_bytes + (scales.row_bytes if scales else 0)
    return RecipeBytes(
        found.name, total.destinations, total.bytes_dispatched, TOP_K * (4 + 4), stated
    )


def _one_round(config: AllToAllConfig, group: ThreadGroup) -> ExchangeStats:
    exchange = MoeAllToAll.create(dataclasses.replace(config, ep_rank=group.rank), group)
    try:
        draw = torch.Generator().manual_seed(group.rank)
        shape = (config.max_tokens_per_rank, config.hidden_size)
        rows = torch.randn(shape, generator=draw).to(config.dtype)
        scores = torch.rand(shape[0], config.num_experts, generator=draw)
        weights, ids = scores.topk(config.top_k)
        given = isinstance(exchange.recipe, QuantisingRecipe) and exchange.recipe.needs_global_scale
        scale = torch.ones(1) if given else None
        received = exchange.dispatch(rows, ids.int(), weights, global_scale=scale)
        exchange.combine(exchange.combine_input(), received.metadata)
        return exchange.stats()
    finally:
        exchange.close()
