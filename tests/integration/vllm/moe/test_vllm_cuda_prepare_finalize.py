"""The CUDA ranks' prepare and finalize, on CPU tensors, inside vLLM's own modular kernel.

vLLM's kernel takes the CUDA branch of its buffer allocation here, so that the zero-copy hook is
called as it is on GPUs. The exchange between the ranks is the real one: threads that share memory
here, processes on the stand-in driver in test_vllm_on_fake_driver.py.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.fused_moe import topk_weight_and_reduce

from moe_nvlink_plugin import Dispatched, MoeAllToAll
from moe_nvlink_plugin.errors import UnsupportedError
from moe_nvlink_plugin.integration.common.options import Options
from moe_nvlink_plugin.integration.vllm.moe import cuda_prepare_finalize
from moe_nvlink_plugin.integration.vllm.moe.cpu_prepare_finalize import CpuPrepareAndFinalize
from moe_nvlink_plugin.integration.vllm.moe.cuda_prepare_finalize import CudaPrepareAndFinalize
from moe_nvlink_plugin.testing import run_ranks
from tests.integration.vllm.moe.vllm_layer import (
    CAPACITY,
    HIDDEN_SIZE,
    LEFT_OPEN,
    NO_OP,
    NUM_EXPERTS,
    TOP_K,
    Experts,
    Layer,
    WithoutData,
    alone,
    config_of,
    dense,
    expert_map_of,
    ragged,
    work_of,
    worst_of,
)

pytestmark = pytest.mark.usefixtures("cuda_branches")


@pytest.fixture
def layer() -> Iterator[Layer]:
    with alone() as made:
        yield made


# Against the dense layer.


def _rounds(group: Any, left_open: str) -> float:
    """Largest error of one rank over ragged rounds."""
    errors = []
    with Layer(group, left_open) as layer:
        for work in ragged(group.rank, 8):
            errors.append(worst_of(layer(*work), dense(*work)))
            layer.poison()
    return max(errors)


@pytest.mark.parametrize("left_open", LEFT_OPEN)
@pytest.mark.parametrize("ep_size", [1, 2, 3, 4])
def test_the_layer_is_the_dense_one(ep_size: int, left_open: str) -> None:
    assert max(run_ranks(ep_size, lambda group: _rounds(group, left_open))) < 1e-5


# In place.


def _handed_out(group: Any) -> None:
    layer = Layer(group)
    exchange, taken = layer.exchange, list[Dispatched]()

    def spied(*arguments: Any, **more: Any) -> Dispatched:
        taken.append(MoeAllToAll.dispatch(exchange, *arguments, **more))
        return taken[0]

    exchange.dispatch = spied  # type: ignore[method-assign]
    layer(*work_of(3 + group.rank, group.rank))
    (call,), (received,) = layer.experts.calls, taken
    first, end = layer.subject._first, layer.subject._end
    mine = (received.topk_ids >= first) & (received.topk_ids < end)
    assert bool(mine.any())
    assert not bool(mine.all())
    assert torch.equal(call.ids_then[mine], received.topk_ids[mine])
    assert torch.equal(call.weights_then[mine], received.topk_weights[mine])
    assert layer.expert_map is not None
    assert bool((layer.expert_map[call.ids_then[~mine].long()] == -1).all())
    assert not call.weights_then[~mine].any()
    # As dispatch wrote them, where it wrote them; and the output where combine reads it.
    assert call.output is exchange.combine_input()
    assert call.hidden_states.shape == (CAPACITY * group.size, HIDDEN_SIZE)
    for handed, buffer in (
        (call.hidden_states, received.hidden_states),
        (call.topk_ids, received.topk_ids),
        (call.topk_weights, received.topk_weights),
    ):
        assert handed.data_ptr() == buffer.data_ptr()
    empty = CAPACITY * group.size - int(received.recv_counts.sum())
    assert int((~mine).all(1).sum()) >= empty > 0
    layer.close()


def test_ids_of_other_ranks_and_of_empty_slots_weigh_nothing() -> None:
    run_ranks(3, _handed_out)


def test_one_rank_with_all_experts(layer: Layer) -> None:
    """There is no expert elsewhere: the empty slots' ids are an expert's here, with weight 0."""
    assert layer.expert_map is None
    layer(*work_of(2, 0))
    (call,) = layer.experts.calls
    assert not call.ids_then[2:].any()
    assert not call.weights_then[2:].any()


def test_no_expert_map_although_there_are_other_ranks() -> None:
    exchange: Any = SimpleNamespace(config=config_of(2, 0))
    with pytest.raises(UnsupportedError, match="2 ranks share its 7 experts"):
        CudaPrepareAndFinalize(exchange, None)


def test_the_region_is_handed_out_only_where_it_fits(layer: Layer) -> None:
    subject = layer.subject
    hidden, ids, weights = work_of(2, 0)
    here, shape = torch.device("cpu"), (CAPACITY, HIDDEN_SIZE)
    ask = subject.allocate_fused_expert_output
    assert ask(shape, torch.float32, here, NO_OP) is None  # outside a round
    layer.kernel.impl._prepare(hidden, weights, ids, NUM_EXPERTS, None, False)
    assert ask(shape, torch.float32, here, NO_OP) is layer.exchange.combine_input()
    assert ask((*shape, 1), torch.float32, here, NO_OP) is None
    assert ask(shape, torch.bfloat16, here, NO_OP) is None
    assert ask(shape, torch.float32, torch.device("meta"), NO_OP) is None
    for other in ("Delegate", "Contiguous"):
        assert ask(shape, torch.float32, here, LEFT_OPEN[other]()) is None


def test_output_may_be_the_experts_output(layer: Layer) -> None:
    hidden, ids, weights = work = work_of(CAPACITY, 3)
    rows, _, _, sent_ids, sent_weights = layer.subject.prepare(
        hidden, weights, ids, NUM_EXPERTS, None, False, layer.experts.quant_config, True
    )
    output = torch.empty(CAPACITY, HIDDEN_SIZE)
    layer.experts.apply(
        output=output,
        hidden_states=rows,
        topk_ids=sent_ids,
        topk_weights=sent_weights,
        expert_map=None,
    )
    layer.subject.finalize(output, output, sent_weights, sent_ids, False, NO_OP)
    torch.testing.assert_close(output, dense(*work), rtol=1e-5, atol=1e-5)


# What a step's forward context says.


def test_a_small_batch_takes_a_small_part_of_the_buffer(in_context: Callable[..., None]) -> None:
    sizes = [(0, 1), (8, 3), (9, 4), (0, 17), (20, 20), (1, 2)]

    def rank_main(group: Any) -> list[int]:
        with Layer(group, max_tokens_per_rank=20) as layer:
            for number, both in enumerate(sizes):
                if group.rank == 0:
                    in_context(list(both))
                group.all_gather_object(None)
                work = work_of(both[group.rank], 10 * number + group.rank)
                torch.testing.assert_close(layer(*work), dense(*work), rtol=1e-5, atol=1e-5)
                group.all_gather_object(None)
            return [call.hidden_states.shape[0] for call in layer.experts.calls]

    for slots in run_ranks(2, rank_main):
        assert slots == [16, 16, 32, 40, 40, 16]


def test_without_sizes_the_whole_buffer_is_handed_out(
    layer: Layer, in_context: Callable[..., None]
) -> None:
    layer(*work_of(1, 0))
    in_context()
    layer(*work_of(1, 0))
    assert [call.hidden_states.shape[0] for call in layer.experts.calls] == [CAPACITY] * 2


@pytest.mark.parametrize(
    ("batch", "filled", "sent"),
    [
        (4, 2, (2,)),
        (8, 6, (4, 2)),  # a graph's size
        (8, 3, (3, 0)),
        (7, 7, (4, 3)),  # vLLM adds a row, so that both have as many
        (5, 3, (3, 0)),
        (1, 1, (1, 0)),
        (8, 0, (0, 0)),  # the dummy batch of a rank without requests
        (1, 0, (0, 0)),
    ],
)
def test_padding_rows_are_not_sent(
    batch: int,
    filled: int,
    sent: tuple[int, int],
    layer: Layer,
    in_context: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each of two tensor-parallel ranks dispatches the rows of its slice that are tokens."""
    slices = len(sent)
    share = -(-batch // slices)
    is_padding = torch.arange(batch) >= filled
    before = 0
    for rank, rows in enumerate(sent):
        monkeypatch.setattr(
            cuda_prepare_finalize, "get_tensor_model_parallel_rank", functools.partial(int, rank)
        )
        in_context([batch] if slices > 1 else None, is_padding, slices)
        hidden, _, weights = work_of(share, rank)
        ids = torch.tensor([[0, 1, 2]] * share, dtype=torch.int32)
        got = layer(hidden, ids, weights)
        expected = dense(hidden, ids, weights)
        torch.testing.assert_close(got[:rows], expected[:rows], rtol=1e-5, atol=1e-5)
        assert not got[rows:].any()
        now = layer.exchange.stats().destinations
        assert now - before == rows
        before = now
        assert ids.min() == 0  # the router's own tensor is left alone


def test_a_mask_of_other_rows_is_not_used(layer: Layer, in_context: Callable[..., None]) -> None:
    hidden, _, weights = work_of(4, 0)
    ids = torch.tensor([[0, 1, 2]] * 4, dtype=torch.int32)
    in_context([4], is_padding=torch.ones(8, dtype=torch.bool))
    torch.testing.assert_close(
        layer(hidden, ids, weights), dense(hidden, ids, weights), rtol=1e-5, atol=1e-5
    )


# Fit for a CUDA graph.


def _without_data(subject: Any, exchange: WithoutData, left_open: str) -> None:
    meta: dict[str, Any] = {"device": "meta"}
    hidden = torch.empty(4, HIDDEN_SIZE, **meta)
    ids, weights = torch.empty(4, TOP_K, dtype=torch.int32, **meta), torch.empty(4, TOP_K, **meta)
    no_quant, impl = SimpleNamespace(quant_dtype=None), LEFT_OPEN[left_open]()
    rows, _, _, ids, weights = subject.prepare(
        hidden, weights, ids, NUM_EXPERTS, None, False, no_quant, True
    )
    assert ids.shape == weights.shape == (exchange.slots, TOP_K)
    shape = (exchange.slots, HIDDEN_SIZE) if left_open == "NoOP" else (*ids.shape, HIDDEN_SIZE)
    experts_output = subject.allocate_fused_expert_output(shape, rows.dtype, rows.device, impl)
    if experts_output is None:
        experts_output = torch.empty(shape, **meta)
    subject.finalize(torch.empty_like(hidden), experts_output, weights, ids, False, impl)
    assert exchange.combined == [exchange.region]


@pytest.mark.parametrize("left_open", LEFT_OPEN)
def test_no_value_is_read_and_no_shape_depends_on_one(
    left_open: str, in_context: Callable[..., None]
) -> None:
    exchange: Any = WithoutData()
    in_context([4, 4], is_padding=torch.empty(4, dtype=torch.bool, device="meta"))
    subject = CudaPrepareAndFinalize(exchange, expert_map_of(exchange.config))
    _without_data(subject, exchange, left_open)


def test_reading_a_value_would_be_noticed() -> None:
    """The CPU class waits for the counts."""
    exchange: Any = WithoutData()
    subject = CpuPrepareAndFinalize(exchange, expert_map_of(exchange.config))
    with pytest.raises((NotImplementedError, RuntimeError), match=r"[Mm]eta"):
        _without_data(subject, exchange, "NoOP")


# Which experts are served.


def test_experts_that_leave_batched_rows_are_refused(layer: Layer) -> None:
    batched = Experts(left_open=topk_weight_and_reduce.TopKWeightAndReduceNaiveBatched(0))
    with pytest.raises(UnsupportedError, match="TopKWeightAndReduceNaiveBatched.*--moe-backend"):
        layer.subject.post_init_setup(batched)


class _Narrow(Experts):
    """Leaves out the last columns, by which vLLM has padded rows."""

    made = HIDDEN_SIZE - 8

    def output_hidden_dim(self, hidden_dim: int) -> int:
        return self.made


def _narrow_rounds(group: Any, left_open: str) -> float:
    """Largest error of one rank, whose rows are as narrow when they are sent."""
    impl = LEFT_OPEN[left_open]()
    layer = Layer(group, experts=_Narrow(left_open=impl))
    subject, errors = layer.subject, [0.0]
    for number in range(3):
        hidden, ids, weights = work_of((number + group.rank) % CAPACITY, number)
        hidden[:, _Narrow.made :] = 0.0
        rows, _, _, sent_ids, sent_weights = subject.prepare(
            *(hidden[:, : _Narrow.made], weights, ids, NUM_EXPERTS, layer.expert_map, False),
            *(layer.experts.quant_config, True),
        )
        shape = (len(rows),) if layer.experts.sums else (len(rows), TOP_K)
        wide = torch.empty(*shape, HIDDEN_SIZE)
        layer.experts.apply(
            output=wide,
            hidden_states=rows,
            a1q_scale=None,
            topk_ids=sent_ids,
            topk_weights=sent_weights,
            expert_map=layer.expert_map,
        )
        made = wide[..., : _Narrow.made].contiguous()
        asked = (tuple(made.shape), made.dtype, made.device, impl)
        region = subject.allocate_fused_expert_output(*asked)
        if layer.experts.sums:
            assert region is not None
            made = region.copy_(made)
        output = torch.full((len(hidden), _Narrow.made), float("nan"))
        subject.finalize(output, made, sent_weights, sent_ids, False, impl)
        errors.append(worst_of(output, dense(hidden, ids, weights)[:, : _Narrow.made]))
        layer.poison()
    layer.close()
    return max(errors)


@pytest.mark.parametrize("left_open", LEFT_OPEN)
def test_experts_that_leave_padding_columns_out(left_open: str) -> None:
    """Combine fetches rows of that width, in place as others."""
    assert max(run_ranks(2, lambda group: _narrow_rounds(group, left_open))) < 1e-5


def test_widths_that_combine_cannot_fetch_are_refused(layer: Layer) -> None:
    experts = _Narrow()
    layer.subject.post_init_setup(experts)
    experts.made = HIDDEN_SIZE + 8
    with pytest.raises(UnsupportedError, match="rows of 136 out of rows of 128.*--moe-backend"):
        layer.subject.post_init_setup(experts)
    experts.made = HIDDEN_SIZE - 8
    with (
        alone(options=Options(combine="fp8_block")) as in_blocks,
        pytest.raises(UnsupportedError, match="rows of 120 out of rows of 128"),
    ):
        in_blocks.subject.post_init_setup(experts)


def test_experts_that_count_by_rank_need_equal_shares() -> None:
    class ByRank(Experts):
        ep_rank = 1

    for num_experts, refused in ((6, False), (7, True)):
        exchange: Any = WithoutData(num_experts=num_experts)
        subject = CudaPrepareAndFinalize(exchange, expert_map_of(exchange.config))
        subject.post_init_setup(Experts())
        told = pytest.raises(UnsupportedError, match="7 experts on 2 ranks")
        with told if refused else contextlib.nullcontext():
            subject.post_init_setup(ByRank())
