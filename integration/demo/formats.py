"""What a token weighs in dispatch, recipe by recipe, counted in a real exchange of two ranks.

The ranks are threads of this process, on the same kernels and the same shared memory as a server's
workers. The bytes are those of the exchange's counters.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch

from moe_nvlink_plugin import AllToAllConfig, ExchangeStats, MoeAllToAll, QuantisingRecipe

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
    for counted in _as_ranks(EP_SIZE, lambda group: _one_round(config, group)):
        total = total.plus(counted)
    found = MoeAllToAll.check(config)
    scales = found.scales_row(hidden_size)
    stated = found.hidden_row(hidden_size).row_bytes + (scales.row_bytes if scales else 0)
    return RecipeBytes(
        found.name, total.destinations, total.bytes_dispatched, TOP_K * (4 + 4), stated
    )


def _one_round(config: AllToAllConfig, group: _Rank) -> ExchangeStats:
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


class _Rank:
    """A group of threads, as far as the exchange asks for one."""

    def __init__(self, rank: int, slots: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size = rank, len(slots)
        self._slots, self._barrier = slots, barrier

    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order. Collective."""
        self._slots[self.rank] = value
        self._barrier.wait()
        values = list(self._slots)
        self._barrier.wait()
        return values


def _as_ranks(size: int, body: Callable[[_Rank], ExchangeStats]) -> list[ExchangeStats]:
    slots: list[Any] = [None] * size
    barrier = threading.Barrier(size, timeout=60)
    ranks = [_Rank(rank, slots, barrier) for rank in range(size)]
    with ThreadPoolExecutor(max_workers=size) as pool:
        return list(pool.map(body, ranks))
