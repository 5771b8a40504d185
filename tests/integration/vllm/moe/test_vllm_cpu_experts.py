"""What vLLM's CPU experts compute behind our dispatch: each choice once, on one rank."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed")

from moe_nvlink_plugin.testing import ThreadGroup, run_ranks
from tests.integration.vllm.moe import vllm_experts
from tests.integration.vllm.moe.vllm_experts import NUM_EXPERTS, TOP_K, Weights, tokens

EP_SIZE = 2
#: Roundings to the type between the two products, of each choice and of each rank's sum.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_each_choice_is_computed_once(dtype: torch.dtype, cpu_ranks: list[torch.Tensor]) -> None:
    weights = Weights(0, dtype)
    mine = [tokens(5 - 2 * rank, rank, dtype) for rank in range(EP_SIZE)]

    def rank_main(group: ThreadGroup) -> torch.Tensor:
        vllm_experts.join(group)
        return vllm_experts.run(
            vllm_experts.loaded(group.rank, EP_SIZE, weights, dtype), *mine[group.rank]
        )

    for outputs, work in zip(run_ranks(EP_SIZE, rank_main), mine, strict=True):
        assert outputs.dtype == dtype
        expected, limit = weights.dense(*work), TOLERANCE[dtype]
        torch.testing.assert_close(outputs.float(), expected, rtol=limit, atol=limit)
    assert all(ids.shape[1] == 1 for ids in cpu_ranks)
    asked = torch.cat([ids.flatten() for _hidden, ids, _weights in mine])
    first_half = int((asked < NUM_EXPERTS // EP_SIZE).sum())
    assert sorted(map(len, cpu_ranks)) == sorted([first_half, len(asked) - first_half])


def test_choices_that_a_router_marked_are_not_computed(cpu_ranks: list[torch.Tensor]) -> None:
    """Of one token all three choices are padding, which is -1, and of another the first one."""
    hidden, ids, router = tokens(4, seed=0)
    expected = router.clone()
    for marked in ((0,), (2, 0)):
        ids[marked], expected[marked] = -1, 0.0
    weights = Weights(0)

    def rank_main(group: ThreadGroup) -> torch.Tensor:
        vllm_experts.join(group)
        return vllm_experts.run(
            vllm_experts.loaded(group.rank, EP_SIZE, weights), hidden, ids, router
        )

    for outputs in run_ranks(EP_SIZE, rank_main):
        torch.testing.assert_close(outputs, weights.dense(hidden, ids.clamp(min=0), expected))
    assert sum(map(len, cpu_ranks)) == EP_SIZE * (3 * TOP_K - 1)


def test_tokens_of_an_idle_rank_go_to_no_expert(cpu_ranks: list[torch.Tensor]) -> None:
    """The other rank's tokens are served meanwhile, and in the next round the idle rank's too."""
    weights = Weights(0)
    mine = [tokens(3, rank) for rank in range(EP_SIZE)]

    def rank_main(group: ThreadGroup) -> list[torch.Tensor]:
        pool = vllm_experts.join(group)
        layer = vllm_experts.loaded(group.rank, EP_SIZE, weights)
        work = mine[group.rank]
        if group.rank == 0:
            return [vllm_experts.run(layer, *work), vllm_experts.run(layer, *work)]
        with pool.idling():
            idle = vllm_experts.run(layer, *work)
        return [idle, vllm_experts.run(layer, *work)]

    (first, again), (idle, served) = run_ranks(EP_SIZE, rank_main)
    for outputs in (first, again):
        torch.testing.assert_close(outputs, weights.dense(*mine[0]))
    assert not idle.any()
    torch.testing.assert_close(served, weights.dense(*mine[1]))
    assert sum(map(len, cpu_ranks)) == 3 * mine[0][1].numel()
