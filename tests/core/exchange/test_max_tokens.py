"""The bound of a call: slots of a round are `[ep_size, max_tokens]`, in memory that never moves."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from moe_nvlink_plugin import Dispatched, MoeAllToAll
from moe_nvlink_plugin.config import local_expert_range
from moe_nvlink_plugin.errors import DisagreementError
from moe_nvlink_plugin.testing import ThreadGroup, run_ranks, try_ranks
from tests.core.exchange.small_exchange import Inputs, inputs_of, opcheck_dispatch, sized
from tests.kernels.exchange.test_received import filled_places, laid_out

CAPACITY, NUM_EXPERTS, HIDDEN = 6, 7, 128
#: Bounds of successive rounds: up, down, the capacity, and the same twice.
BOUNDS = (1, 4, CAPACITY, 2, 2, 5, CAPACITY, 1)
#: What slots hold that no rank may write to.
UNTOUCHED = 77


config = sized(num_experts=NUM_EXPERTS, top_k=3, hidden_size=HIDDEN, max_tokens_per_rank=CAPACITY)


def dense(inputs: Inputs) -> torch.Tensor:
    """Expert e multiplies by e + 1."""
    hidden, ids, weights = inputs
    return ((ids + 1) * weights).sum(1, keepdim=True) * hidden


def experts(layer: MoeAllToAll, received: Dispatched) -> torch.Tensor:
    """Partial rows; NaN in empty slots, which combine must not read."""
    first, end = local_expert_range(
        layer.config.num_experts, layer.config.ep_size, layer.config.ep_rank
    )
    ids = received.topk_ids
    mine = (ids >= first) & (ids < end)
    factors = torch.where(mine, (ids + 1) * received.topk_weights, 0.0).sum(1, keepdim=True)
    empty = (ids < 0).all(1, keepdim=True)
    return torch.where(empty, torch.nan, factors * received.hidden_states)


def check_combine(
    layer: MoeAllToAll, received: Dispatched, inputs: Inputs, *, zero_copy: bool = False
) -> None:
    rows = experts(layer, received)
    if zero_copy:
        rows = layer.combine_input(metadata=received.metadata).copy_(rows)
    combined = layer.combine(rows, received.metadata)
    torch.testing.assert_close(combined, dense(inputs), rtol=1e-5, atol=1e-5)


def tokens_of(rank: int, number: int, bound: int) -> int:
    """A rank has the bound's number of tokens; the others have any, and sometimes none."""
    return bound if rank == number % 2 else (3 * rank + number) % (bound + 1)


def check_slots(received: Dispatched, ep_size: int, bound: int) -> None:
    slots = ep_size * bound
    assert {len(one) for one in received[:4] if isinstance(one, torch.Tensor)} == {slots}
    filled = (received.topk_ids >= 0).any(1).view(ep_size, bound)
    counts = received.recv_counts
    assert torch.equal(filled, torch.arange(bound)[None, :] < counts[:, None])
    assert received.metadata.max_tokens == bound


@pytest.mark.parametrize("ep_size", [1, 2, 4])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_bounds_that_change_from_round_to_round(ep_size: int, num_threads: int) -> None:
    def rank_main(group: ThreadGroup) -> None:
        with MoeAllToAll.create(config(group, num_threads=num_threads), group) as layer:
            everything = layer._layer.channel(0)._views[0]
            place = everything.data_ptr()
            for number, bound in enumerate(BOUNDS):
                tokens = tokens_of(group.rank, number, bound)
                inputs = inputs_of(layer, tokens, 10 * number + group.rank)
                everything.fill_(UNTOUCHED)
                group.all_gather_object(None)  # no peer puts before the fill
                received = layer.dispatch(*inputs, max_tokens=bound)
                check_slots(received, ep_size, bound)
                assert received.topk_ids.data_ptr() == place
                assert bool((everything[ep_size * bound :] == UNTOUCHED).all())
                slots = received.metadata.send_slots
                assert bool((slots < ep_size * bound).all())
                check_combine(layer, received, inputs, zero_copy=bool(number % 2))

    run_ranks(ep_size, rank_main)


@pytest.mark.parametrize(
    ("recipe", "layout"),
    [("fp8_block", "column_major"), ("mxfp8", "interleaved")],
)
def test_scales_lie_in_the_slots_of_the_call(recipe: str, layout: str) -> None:
    """Column-major strides and tiles follow the bound."""

    def rank_main(group: ThreadGroup) -> None:
        values = {"recipe": recipe, "num_threads": 1}
        with (
            MoeAllToAll.create(config(group, **values), group) as linear,
            MoeAllToAll.create(
                config(group, **values, scales_layout=layout), group, share_with=linear
            ) as layer,
        ):
            for number, bound in enumerate(BOUNDS):
                tokens = tokens_of(group.rank, number, bound)
                inputs = inputs_of(layer, tokens, 10 * number + group.rank)
                scales = []
                for one in (linear, layer):
                    received = one.dispatch(*inputs, max_tokens=bound)
                    assert received.scales is not None
                    scales.append(received.scales.clone(memory_format=torch.preserve_format))
                    filled = (received.topk_ids >= 0).any(1)
                    one.combine(one.combine_input(metadata=received.metadata), received.metadata)
                expected = laid_out(layout, scales[0])
                assert scales[1].shape == expected.shape
                assert scales[1].stride() == expected.stride() or expected.shape[-1] == 1
                here = filled_places(layout, filled, scales[0].shape[1])
                found, wanted = (
                    one[here].contiguous().view(torch.uint8) for one in (scales[1], expected)
                )
                assert torch.equal(found, wanted)

    run_ranks(2, rank_main)


def test_layers_of_another_geometry_on_the_same_workspace() -> None:
    """Each layer has its own bound in each round; the rounds of both alternate."""

    def rank_main(group: ThreadGroup) -> None:
        mine = config(group)
        wide = dataclasses.replace(
            mine, hidden_size=2 * HIDDEN, num_experts=5, max_tokens_per_rank=3
        )
        with (
            MoeAllToAll.create(mine, group) as first,
            MoeAllToAll.create(wide, group, share_with=first) as second,
        ):
            for number, bound in enumerate(BOUNDS):
                for layer in (first, second):
                    most = min(bound, layer.config.max_tokens_per_rank)
                    tokens = tokens_of(group.rank, number, most)
                    inputs = inputs_of(layer, tokens, 10 * number + group.rank)
                    received = layer.dispatch(*inputs, max_tokens=most)
                    check_slots(received, group.size, most)
                    check_combine(layer, received, inputs)

    run_ranks(2, rank_main)


# What is refused.


@pytest.fixture
def alone() -> Any:
    (group,) = ThreadGroup.ranks(1)
    with MoeAllToAll.create(config(group), group) as layer:
        yield layer


def test_the_memory_for_the_experts_output(alone: MoeAllToAll) -> None:
    """Until a call has another bound, it is one tensor, which a caller knows again."""
    whole = alone.combine_input()
    assert whole.shape == (CAPACITY, HIDDEN)
    received = alone.dispatch(*inputs_of(alone, 2), max_tokens=2)
    region = alone.combine_input(metadata=received.metadata)
    assert region.shape == (2, HIDDEN)
    assert region.data_ptr() == whole.data_ptr()
    assert alone.combine_input(metadata=received.metadata) is region
    alone.combine(region, received.metadata)
    _still_works(alone)


def _still_works(layer: MoeAllToAll) -> None:
    inputs = inputs_of(layer, 3)
    check_combine(layer, layer.dispatch(*inputs, max_tokens=3), inputs)


def test_ranks_that_pass_different_bounds() -> None:
    def rank_main(group: ThreadGroup) -> None:
        with MoeAllToAll.create(config(group, timeout_s=20, num_threads=3), group) as layer:
            layer.dispatch(*inputs_of(layer, 1), max_tokens=(3, 4)[group.rank])

    for rank, outcome in enumerate(try_ranks(2, rank_main)):
        assert isinstance(outcome, DisagreementError), repr(outcome)
        assert f"rank {1 - rank} passed another max_tokens" in str(outcome)
        mine = f"than rank {rank} (layer number 0 of its workspace, max_tokens={3 + rank}, max_tok"
        assert mine in str(outcome)


# Compiled.


def test_compiled_with_any_bound(alone: MoeAllToAll) -> None:
    """One graph serves every bound and every token count."""
    counter = CompileCounterWithBackend("aot_eager")

    def layer(
        hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, bound: int
    ) -> torch.Tensor:
        received = alone.dispatch(hidden, ids, weights, max_tokens=bound)
        return alone.combine(experts(alone, received), received.metadata)

    torch._dynamo.reset()
    compiled = torch.compile(layer, backend=counter, fullgraph=True, dynamic=True)
    for number, (tokens, bound) in enumerate(((4, 5), (2, 6), (5, 5), (3, 4), (2, 3))):
        inputs = inputs_of(alone, tokens, number)
        expected = layer(*inputs, bound)
        torch.testing.assert_close(compiled(*inputs, bound), expected, rtol=0, atol=0)
    assert counter.frame_count == 1


@pytest.mark.parametrize("layout", ["linear", "column_major"])
def test_opcheck(layout: str) -> None:
    (group,) = ThreadGroup.ranks(1)
    values = {"recipe": "fp8_block", "scales_layout": layout, "extra_payload_bytes": (4,)}
    ops = torch.ops.moe_nvlink
    with MoeAllToAll.create(config(group, **values), group) as layer:
        hidden, ids, weights = inputs_of(layer, 2)
        extra = torch.zeros(2, dtype=torch.float32)
        pending = torch.zeros_like(layer._layer.workspace.pending)
        handle = layer._layer.handle
        given = (pending, hidden, None, ids, weights, [extra], None, handle, 0, None, 3)
        opcheck_dispatch(layer, given)
        counts = ops.dispatch.default(*given)[3]
        torch.library.opcheck(ops.received_scales.default, (counts, handle, 0, 3))
        torch.library.opcheck(ops.received.default, (counts, extra, 0, handle, 0, 3))
