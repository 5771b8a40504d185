"""MoE layers of two ranks as vLLM makes, loads and runs them on CPU: its classes, our method.

Ranks are threads. The layer, its quant method, its loader, its packing and its experts are vLLM's.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.fused_moe import all2all_utils
from vllm.model_executor.layers.fused_moe.expert_map_manager import ExpertMapManager
from vllm.model_executor.layers.fused_moe.experts import cpu_moe

from moe_nvlink_plugin.integration.common.agreement import Ranks
from moe_nvlink_plugin.integration.common.options import Options
from moe_nvlink_plugin.integration.common.pool import ExchangePool
from moe_nvlink_plugin.integration.vllm.backend import BACKEND, CARRIER, KEY
from moe_nvlink_plugin.integration.vllm.moe import layers, method
from moe_nvlink_plugin.testing import ThreadGroup
from tests.integration.vllm.moe.vllm_layer import moe_config_of, parallel_of, ranks_of

NUM_EXPERTS, TOP_K, HIDDEN_SIZE, INTERMEDIATE_SIZE, CAPACITY = 6, 3, 64, 32, 16


@contextlib.contextmanager
def ranks_of_vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.Tensor]]:
    """vLLM's configuration with our flag; each thread has the pool that `join` gave it.

    Yields the `[rows, top_k]` ids of every call of vLLM's kernel.

    vLLM makes a prepare/finalize of its own before ours, for which it looks at its manager. Its
    kernel has one scratchpad per process, so the threads take turns in it.
    """
    asked = VllmConfig()
    asked.additional_config = {KEY: BACKEND}  # no platform has looked at it
    monkeypatch.setattr(method, "_pool", lambda: _OF_THREAD.pool)
    manager = SimpleNamespace(world_size=2)
    monkeypatch.setattr(all2all_utils, "get_ep_all2all_manager", lambda: manager)
    kernel, turn = cpu_moe.cpu_fused_moe, threading.Lock()

    calls: list[torch.Tensor] = []

    def one_at_a_time(*given: Any) -> None:
        with turn:
            calls.append(given[7])
            kernel(*given)

    monkeypatch.setattr(cpu_moe, "cpu_fused_moe", one_at_a_time)
    with set_current_vllm_config(asked):
        yield calls


_OF_THREAD = threading.local()


def join(group: ThreadGroup) -> ExchangePool:
    """Gives this thread's layers a pool of exchanges with the group's other ranks."""
    return join_as(ranks_of(group))


def join_as(ranks: Ranks) -> ExchangePool:
    """The same for ranks of any group."""
    pool = _OF_THREAD.pool = ExchangePool(ranks, torch.device("cpu"), Options())
    return pool


class Weights:
    """Weights of all experts, `[experts, rows, columns]`, as a checkpoint has them."""

    def __init__(self, seed: int, dtype: torch.dtype = torch.float32) -> None:
        random = torch.Generator().manual_seed(seed)

        def draw(rows: int, columns: int) -> torch.Tensor:
            drawn = torch.randn(NUM_EXPERTS, rows, columns, generator=random)
            scaled: torch.Tensor = drawn * columns**-0.5
            return scaled.to(dtype)

        self.w1 = draw(INTERMEDIATE_SIZE, HIDDEN_SIZE)
        self.w3 = draw(INTERMEDIATE_SIZE, HIDDEN_SIZE)
        self.w2 = draw(HIDDEN_SIZE, INTERMEDIATE_SIZE)

    def load(self, layer: Any) -> None:
        """Gives every weight to the loader of the layer's parameter, as a model does.

        Redundant experts are copies of the first ones, as vLLM's balancer places them at the start.
        """
        for shard, name in (("w1", "w13_weight"), ("w3", "w13_weight"), ("w2", "w2_weight")):
            for expert in range(layer.global_num_experts):
                parameter, weight = getattr(layer, name), getattr(self, shard)[expert % NUM_EXPERTS]
                parameter.weight_loader(parameter, weight, name, shard, expert)

    def dense(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The layer on one process in float32, without vLLM and without any exchange."""
        rows = hidden.float()
        gate = torch.einsum("nh,eih->nei", rows, self.w1.float())
        up = torch.einsum("nh,eih->nei", rows, self.w3.float())
        middle = torch.nn.functional.silu(gate) * up
        every = torch.einsum("nei,ehi->neh", middle, self.w2.float())
        chosen = every.gather(1, ids.long().unsqueeze(-1).expand(-1, -1, HIDDEN_SIZE))
        summed: torch.Tensor = (chosen * weights.unsqueeze(-1)).sum(1)
        return summed


def tokens(
    count: int, seed: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, int32 ids and float32 weights of one rank's tokens."""
    random = torch.Generator().manual_seed(seed)
    scores = torch.rand(count, NUM_EXPERTS, generator=random)
    return (
        torch.randn(count, HIDDEN_SIZE, generator=random).to(dtype),
        scores.topk(TOP_K, dim=1).indices.to(torch.int32),
        torch.rand(count, TOP_K, generator=random),
    )


def make_layer(
    rank: int,
    ep_size: int,
    dtype: torch.dtype = torch.float32,
    *,
    redundant: int | None = None,
    name: str = "layer 3",
    backend: str = CARRIER,
) -> Any:
    """The rank's routed experts, of our class, not loaded; `redundant`: with load balancing."""
    balances = redundant is not None
    physical = NUM_EXPERTS + (redundant or 0)
    parallel = parallel_of(ep_size, rank, balances=balances)
    parallel.all2all_backend = backend
    placed = ExpertMapManager(
        max_num_batched_tokens=CAPACITY,
        top_k=TOP_K,
        global_num_experts=physical,
        num_redundant_experts=redundant or 0,
        num_expert_group=None,
        moe_parallel_config=parallel,
        placement_strategy="linear",
        enable_eplb=balances,
    )
    config = moe_config_of(
        ep_size,
        rank,
        placed.local_num_experts,
        num_experts=physical,
        num_logical_experts=NUM_EXPERTS,
        experts_per_token=TOP_K,
        hidden_dim=HIDDEN_SIZE,
        intermediate_size=INTERMEDIATE_SIZE,
        moe_parallel_config=parallel,
        in_dtype=dtype,
        max_num_tokens=CAPACITY,
    )
    return layers.MoeNvlinkRoutedExperts(
        layer_name=name,
        params_dtype=dtype,
        moe_config=config,
        quant_config=None,
        expert_map_manager=placed,
    )


def loaded(
    rank: int, ep_size: int, weights: Weights, dtype: torch.dtype = torch.float32, **values: Any
) -> Any:
    """The rank's layer, once vLLM has loaded it. values: of `make_layer`."""
    layer = make_layer(rank, ep_size, dtype, **values)
    weights.load(layer)
    layer.quant_method.process_weights_after_loading(layer)
    return layer


def run(layer: Any, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """One round of the layer, as vLLM's runner asks for it. Collective."""
    made: torch.Tensor = layer.quant_method.apply(layer, hidden, weights, ids, None, None)
    return made


def check_rows(layer: Any, rank: int, weights: Weights) -> torch.Tensor:
    """A round with tokens of this rank's own, as a dense layer computes it. Collective."""
    mine = tokens(5 - 2 * rank, seed=rank)
    got = run(layer, *mine)
    torch.testing.assert_close(got, weights.dense(*mine))
    return got
