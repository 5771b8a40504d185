"""One MoE layer as SGLang runs it: our dispatcher, and experts that stand for SGLang's runners.

The experts check what they are handed, and answer with NaN where a runner leaves memory as it is.
Everything runs on CPU tensors; the exchange between the ranks is the real one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from moe_nvlink_plugin.integration.common.agreement import Ranks
from moe_nvlink_plugin.integration.common.options import Options, Wording
from moe_nvlink_plugin.integration.common.pool import ExchangePool
from moe_nvlink_plugin.testing import run_ranks
from tests.integration.sglang import sglang_stand_in
from tests.support.dense_layer import dense_of
from tests.support.dense_layer import experts_of as experts_of_layer
from tests.support.dense_layer import worst_of as worst_of

with sglang_stand_in.importable():
    from sglang.srt.layers.moe.token_dispatcher.flashinfer import FlashinferCombineInput
    from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    from moe_nvlink_plugin.integration.sglang.moe import base, cuda, forms
    from moe_nvlink_plugin.integration.sglang.moe.base import MoeNvlinkDispatcher
    from moe_nvlink_plugin.integration.sglang.moe.cpu import CpuDispatcher
    from moe_nvlink_plugin.integration.sglang.moe.cuda import StandardFormDispatcher
    from moe_nvlink_plugin.integration.sglang.moe.routing import routing_of
    from moe_nvlink_plugin.integration.sglang.moe.runners import CPU, Runner, runner_of

NUM_EXPERTS, TOP_K, HIDDEN_SIZE, CAPACITY = 8, 3, 128, 6
#: A token goes to three experts; two ranks and four hold equally many of the eight.
WORDING = Wording("SGLang", "--moe-a2a-backend moe_nvlink", "the options", "say bf16")
#: Of hidden states, ids and weights.
dense = functools.partial(dense_of, experts_of_layer(NUM_EXPERTS, HIDDEN_SIZE))
#: Runners whose dispatchers these tests drive; CPU is not SGLang's name for one.
RUNNERS = ("cpu", "triton", "deep_gemm", "flashinfer_cutlass", "flashinfer_trtllm")


def runner_config(ep_size: int, **values: Any) -> Any:
    """As much of SGLang's MoeRunnerConfig as a dispatcher reads."""
    usual = {
        "layer_id": 3,
        "num_experts": NUM_EXPERTS,
        "num_local_experts": NUM_EXPERTS // ep_size,
        "hidden_size": HIDDEN_SIZE,
        "top_k": TOP_K,
        "params_dtype": torch.float32,
        "runner_backend": None,
        "num_fused_shared_experts": 0,
        "no_combine": False,
        "apply_router_weight_on_input": False,
        "layer": SimpleNamespace(reduce_results=False),
    }
    return SimpleNamespace(**{**usual, **values})


def pool_of(group: Any, kind: type[ExchangePool] = ExchangePool, **options: Any) -> ExchangePool:
    ranks = Ranks(group, group.rank, group.size, WORDING)
    return kind(ranks, torch.device("cpu"), Options(**options))


def named(name: str) -> Runner:
    return CPU if name == "cpu" else runner_of(name, torch.bfloat16, WORDING.flag)


def dispatcher_of(
    pool: ExchangePool,
    runner: str = "cpu",
    *,
    capacity: int = CAPACITY,
    block_shape: Sequence[int] | None = None,
    **values: Any,
) -> MoeNvlinkDispatcher:
    chosen = named(runner)
    config = runner_config(pool.ranks.size, **values)
    return forms.class_for(chosen)(config, pool, capacity, chosen, block_shape)


def work_of(num_tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """hidden states, int32 ids (some -1, as SGLang marks padded rows), weights."""
    random = torch.Generator().manual_seed(seed)
    scores = torch.rand(num_tokens, NUM_EXPERTS, generator=random)
    ids = scores.topk(TOP_K, dim=1).indices.to(torch.int32)
    ids = torch.where(torch.rand(ids.shape, generator=random) < 0.1, -1, ids)
    ids = torch.where(torch.rand(num_tokens, 1, generator=random) < 0.1, -1, ids)
    return (
        torch.randn(num_tokens, HIDDEN_SIZE, generator=random),
        ids,
        torch.rand(num_tokens, TOP_K, generator=random),
    )


def run_experts(dispatched: Any, first: int, end: int, padding: int | None = None) -> Any:
    """What a runner of the rank with experts first..end-1 makes of what dispatch returned."""
    weights, ids, _ = dispatched.topk_output
    assert weights.dtype == torch.float32
    assert ids.dtype == torch.int32
    assert ids.shape == weights.shape == (dispatched.hidden_states.shape[0], ids.shape[1])
    if dispatched.format.value == "standard":
        assert bool(((ids >= -1) & (ids < end - first)).all()), "ids must be local, or -1"
        rows = _computed(dispatched.hidden_states, torch.where(ids < 0, -1, ids + first), weights)
        return StandardCombineInput(rows)
    known = (ids >= 0) & (ids < NUM_EXPERTS)
    assert bool((known | (ids == padding)).all()), "ids must be global, or the padding id"
    mine = (ids >= first) & (ids < end)
    rows = _computed(dispatched.hidden_states, torch.where(mine, ids, -1), weights)
    if dispatched.moe_output is not None:
        dispatched.moe_output.copy_(rows)
        rows = dispatched.moe_output
    return FlashinferCombineInput(rows)


def run_native(dispatched: Any, first: int) -> Any:
    """SGLang's native experts on a CPU, with what breaks them."""
    weights, ids, _ = dispatched.topk_output
    assert len(ids), "a batch without rows"
    assert bool((ids >= 0).all()), "an id of no expert"
    assert all(len(set(row)) == len(row) for row in ids.tolist()), "an expert named twice"
    rows = dense(dispatched.hidden_states, ids + first, weights)
    return StandardCombineInput(rows.to(dispatched.hidden_states.dtype))


def _computed(hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    rows = dense(hidden, ids, weights).to(hidden.dtype)
    return rows.masked_fill((ids < 0).all(1, keepdim=True), float("nan"))


def dispatched(
    subject: MoeNvlinkDispatcher, work: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
) -> Any:
    """What the runner is handed of hidden states, ids and weights."""
    hidden, ids, weights = work
    topk_output = StandardTopKOutput(weights, ids, None)
    return subject.dispatch(hidden_states=hidden, topk_output=topk_output)


def on_ranks(ep_size: int, body: Callable[[ExchangePool], Any], **options: Any) -> list[Any]:
    """What `body` returns on each rank, which closes its pool after it."""
    return run_ranks(ep_size, functools.partial(with_pool, body, **options))


def with_pool(body: Callable[[ExchangePool], Any], group: Any, **options: Any) -> Any:
    """What `body` returns for a pool of this rank, which is closed after it."""
    pool = pool_of(group, **options)
    try:
        return body(pool)
    finally:
        pool.close()


def layer(
    subject: MoeNvlinkDispatcher, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """One forward of a MoE layer, called as SGLang's FusedMoE calls it."""
    output = dispatched(subject, (hidden, ids, weights))
    result: torch.Tensor = subject.combine(combine_input=experts_of(subject, output))
    return result


def experts_of(subject: MoeNvlinkDispatcher, dispatched: Any) -> Any:
    first, end = subject._first, subject._end
    if isinstance(subject, CpuDispatcher):
        return run_native(dispatched, first)
    padding = NUM_EXPERTS if subject._runner.padding == "num_experts" else -1
    return run_experts(dispatched, first, end, padding)


__all__ = [
    "MoeNvlinkDispatcher",
    "StandardCombineInput",
    "StandardFormDispatcher",
    "StandardTopKOutput",
    "base",
    "cuda",
    "routing_of",
]
