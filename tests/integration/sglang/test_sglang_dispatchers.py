"""SGLang's dispatchers on CPU ranks, against the dense layer.

The cases of ragged and empty ranks are those of SGLang's own dispatcher tests
(test/manual/ep/test_nccl_dispatcher.py, test_flashinfer_dispatcher.py), written anew. The classes
for CUDA ranks run on CPU tensors here. Of SGLang's GPU runners Triton's alone has run with them:
tests/sglang/test_triton_runner.py.
"""

from __future__ import annotations

import contextlib
import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moe_nvlink_plugin.errors import ExchangeStateError, UnsupportedError
from moe_nvlink_plugin.integration.common.pool import ExchangePool
from moe_nvlink_plugin.testing import ThreadGroup, run_ranks, try_ranks
from tests.integration.sglang.sglang_layer import (
    CAPACITY,
    HIDDEN_SIZE,
    NUM_EXPERTS,
    RUNNERS,
    TOP_K,
    StandardCombineInput,
    StandardFormDispatcher,
    StandardTopKOutput,
    base,
    cuda,
    dense,
    dispatched,
    dispatcher_of,
    experts_of,
    layer,
    named,
    on_ranks,
    pool_of,
    routing_of,
    run_experts,
    runner_config,
    with_pool,
    work_of,
    worst_of,
)


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that waits for one that has failed ends with the test."""
    monkeypatch.setenv("MOE_NVLINK_TIMEOUT_S", "60")
    monkeypatch.setenv("MOE_NVLINK_FIRST_TIMEOUT_S", "60")


# Against the dense layer.


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("ep_size", [1, 2, 4])
def test_the_layer_is_the_dense_one(ep_size: int, runner: str) -> None:
    def body(pool: ExchangePool) -> float:
        subject, rank = dispatcher_of(pool, runner), pool.ranks.rank
        errors = []
        for number in range(8):  # ragged rounds, empty and full ones among them
            num_tokens = (number * (rank + 2) + 3 * rank) % (CAPACITY + 1)
            work = work_of(num_tokens, 100 * number + rank)
            errors.append(worst_of(layer(subject, *work), dense(*work)))
        return max(errors)

    assert max(on_ranks(ep_size, body)) < 1e-5


@pytest.mark.parametrize("runner", ["cpu", "triton", "flashinfer_cutlass"])
@pytest.mark.parametrize("counts", [(257, 0, 31, 120), (0, 1, 0, 0), (0, 0, 0, 0)], ids=str)
def test_uneven_ranks_are_served_and_give_the_same_bits_again(
    runner: str, counts: tuple[int, ...]
) -> None:
    def body(pool: ExchangePool) -> float:
        subject = dispatcher_of(pool, runner, capacity=257)
        work = work_of(counts[pool.ranks.rank], pool.ranks.rank)
        first, second = layer(subject, *work), layer(subject, *work)
        return worst_of(first, dense(*work)) if torch.equal(first, second) else float("inf")

    assert max(on_ranks(4, body)) < 1e-5


@pytest.mark.usefixtures("turns_from_one")
@pytest.mark.parametrize("runner", ["cpu", "triton", "flashinfer_cutlass"])
def test_rows_are_compared_while_serving(runner: str) -> None:
    """The option audit_every; a wrong bit in what comes from rank 0 is counted by its receiver."""

    def body(pool: ExchangePool) -> Any:
        subject, rank = dispatcher_of(pool, runner), pool.ranks.rank
        exchange = subject._exchange
        dispatch = exchange.dispatch

        def spoil(*given: Any, **named: Any) -> Any:
            received = dispatch(*given, **named)
            count = int(received.recv_counts[0])
            received.hidden_states.view(torch.uint8)[:count, 5] ^= 1
            return received

        if rank == 1:
            exchange.dispatch = spoil  # type: ignore[method-assign]
        errors = []
        for number in range(24):
            work = work_of((number + 3 * rank) % (CAPACITY + 1), 100 * number + rank)
            errors.append(worst_of(layer(subject, *work), dense(*work)))
        audit = pool.audit_of(exchange)
        assert audit is not None
        return max(errors), audit.found()

    (_, first), (worst, second) = on_ranks(2, body, audit_every=2)
    assert min(*first.rows, *second.rows) > 3
    assert first.wrong == first.stale == second.stale == [0, 0]
    assert second.wrong == [second.rows[0], 0]
    assert worst < 1e-5, "of the rows that nobody spoils"


@pytest.mark.parametrize("runner", RUNNERS)
def test_an_expert_may_be_chosen_twice(runner: str) -> None:
    def body(pool: ExchangePool) -> float:
        hidden, ids, weights = work_of(CAPACITY, 6)
        work = hidden, ids[:, :1].expand_as(ids).contiguous(), weights
        return worst_of(layer(dispatcher_of(pool, runner), *work), dense(*work))

    assert max(on_ranks(2, body)) < 1e-5


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_of_either_type_are_taken(dtype: torch.dtype) -> None:
    def body(pool: ExchangePool) -> float:
        hidden, ids, weights = work_of(4, 7)
        got = layer(dispatcher_of(pool), hidden, ids.to(dtype), weights.to(torch.bfloat16))
        return worst_of(got, dense(hidden, ids, weights.to(torch.bfloat16).float()))

    assert max(on_ranks(2, body)) < 1e-5


def test_redundant_experts_are_experts_like_others() -> None:
    """EPLB hands dispatch physical ids: here 8 of them for 6 logical experts."""
    logical = torch.tensor([0, 1, 2, 3, 4, 5, 0, 3])

    def body(pool: ExchangePool) -> float:
        hidden, ids, weights = work_of(CAPACITY, pool.ranks.rank)
        subject = dispatcher_of(pool, "triton")
        handed = dispatched(subject, (hidden, ids, weights))
        # The replica computes as its original does, on whichever rank it is.
        own = handed.topk_output.topk_ids
        placed = torch.where(own < 0, -1, logical[own.clamp(min=0) + subject._first])
        rows = dense(handed.hidden_states, placed, handed.topk_output.topk_weights)
        expected = dense(hidden, torch.where(ids < 0, -1, logical[ids.clamp(min=0)]), weights)
        return worst_of(subject.combine(combine_input=StandardCombineInput(rows)), expected)

    assert max(on_ranks(4, body)) < 1e-5


# FlashInfer's form, as SGLang's own dispatcher gives it.


@pytest.mark.parametrize(
    ("runner", "padding", "in_region"),
    [
        ("flashinfer_cutlass", NUM_EXPERTS, True),
        ("flashinfer_cutedsl", NUM_EXPERTS, True),
        ("flashinfer_trtllm", -1, False),
        ("flashinfer_trtllm_routed", -1, False),
        ("deep_gemm", -1, False),
    ],
)
def test_flashinfers_form(runner: str, padding: int, in_region: bool) -> None:
    """The expected values stand in FlashinferDispatcher of SGLang 0.5.23."""
    counts = (2, CAPACITY)

    def body(pool: ExchangePool) -> None:
        subject = dispatcher_of(pool, runner, params_dtype=torch.bfloat16)
        mine = pool.ranks.rank
        works = [work_of(n, seed) for seed, n in enumerate(counts)]
        works = [(hidden.bfloat16(), ids.abs(), weights) for hidden, ids, weights in works]
        hidden, ids, weights = works[mine]
        topk = StandardTopKOutput(weights, ids, torch.zeros(1))
        output = subject.dispatch(hidden_states=hidden, topk_output=topk)
        region = subject._exchange.combine_input()
        assert (output.moe_output is not None) is in_region
        if in_region:
            assert output.moe_output.data_ptr() == region.data_ptr()
        assert output.output_dtype == output.hidden_states.dtype == torch.bfloat16
        assert output.hidden_states_scale is None
        assert output.hidden_states.shape == (2 * CAPACITY, HIDDEN_SIZE)
        assert output.topk_output.topk_ids.shape == (2 * CAPACITY, TOP_K)
        assert output.topk_output.router_logits is topk.router_logits
        for source, (theirs, their_ids, their_weights) in enumerate(works):
            here = ((their_ids >= subject._first) & (their_ids < subject._end)).any(1)
            start, count = source * CAPACITY, int(here.sum())
            filled = slice(start, start + count)
            assert torch.equal(output.hidden_states[filled], theirs[here])
            assert torch.equal(output.topk_output.topk_ids[filled], their_ids[here])
            assert torch.equal(output.topk_output.topk_weights[filled], their_weights[here])
            empty = output.topk_output.topk_ids[start + count : start + CAPACITY]
            assert bool((empty == padding).all())
        rows = run_experts(output, subject._first, subject._end, padding)
        subject.combine(combine_input=rows)

    on_ranks(2, body)


def test_views_are_handed_out_and_nothing_of_the_buffer_is_written() -> None:
    """The receive buffer's ids and weights are the peers' and combine's."""

    def body(pool: ExchangePool) -> None:
        subject = dispatcher_of(pool, "flashinfer_cutlass")
        output = dispatched(subject, work_of(CAPACITY, 1))
        assert subject._round is not None
        received = subject._round.received
        assert output.hidden_states.data_ptr() == received.hidden_states.data_ptr()
        before = received.topk_ids.clone(), received.topk_weights.clone()
        output.topk_output.topk_ids.fill_(7)
        output.topk_output.topk_weights.fill_(7.0)
        assert torch.equal(received.topk_ids, before[0])
        assert torch.equal(received.topk_weights, before[1])

    on_ranks(1, body)


# One round at a time, and rounds side by side.


def test_target_and_draft_may_be_in_flight_together() -> None:
    def body(group: Any) -> float:
        target_pool, draft_pool = pool_of(group), pool_of(group)
        target, draft = dispatcher_of(target_pool), dispatcher_of(draft_pool, "triton")
        regions = [one._exchange.combine_input() for one in (target, draft)]
        work, draft_work = work_of(5, group.rank), work_of(3, 50 + group.rank)
        handed = dispatched(target, work)
        worst = worst_of(layer(draft, *draft_work), dense(*draft_work))
        got = target.combine(combine_input=experts_of(target, handed))
        worst = max(worst, worst_of(got, dense(*work)))
        apart = regions[0].data_ptr() != regions[1].data_ptr()
        target_pool.close()
        draft_pool.close()
        return worst if apart else float("inf")

    assert max(run_ranks(2, body)) < 1e-5


def test_layers_of_one_pool_share_the_exchange() -> None:
    def body(pool: ExchangePool) -> None:
        first, second = dispatcher_of(pool), dispatcher_of(pool, layer_id=4)
        other = dispatcher_of(pool, top_k=2)
        assert first._exchange is second._exchange
        assert other._exchange is not first._exchange

    on_ranks(2, body)


def test_a_second_dispatch_needs_the_combine_of_the_first() -> None:
    def body(pool: ExchangePool) -> None:
        subject, work = dispatcher_of(pool, "triton"), work_of(2, 1)
        with pytest.raises(ExchangeStateError, match="without a dispatch"):
            subject.combine(combine_input=StandardCombineInput(work[0]))
        dispatched(subject, work)
        with pytest.raises(ExchangeStateError, match="combine"):
            dispatched(subject, work)

    on_ranks(1, body)


def test_combine_takes_the_format_of_dispatch_alone() -> None:
    def body(pool: ExchangePool) -> None:
        subject = dispatcher_of(pool, "flashinfer_trtllm")
        rows = dispatched(subject, work_of(2, 1)).hidden_states
        told = "format flashinfer, its runner returns standard"
        with pytest.raises(UnsupportedError, match=told):
            subject.combine(combine_input=StandardCombineInput(rows))

    on_ranks(1, body)


# The bound of a step.


@pytest.mark.parametrize(
    ("counts", "bound"), [((3, 1), 8), ((30, 40), 40), ((0, 0), 8), ((8, 9), 16)], ids=str
)
def test_a_step_has_slots_for_the_largest_batch(
    monkeypatch: pytest.MonkeyPatch, counts: tuple[int, int], bound: int
) -> None:
    monkeypatch.setattr(base, "get_forward", lambda: SimpleNamespace(sp_active=False))
    monkeypatch.setattr(base, "get_parallel", lambda: SimpleNamespace(attn_tp_size=1))
    monkeypatch.setattr(base, "get_dp_global_num_tokens", lambda: list(counts))

    def body(pool: ExchangePool) -> float:
        work = work_of(counts[pool.ranks.rank], pool.ranks.rank)
        subject = dispatcher_of(pool, "triton", capacity=40)
        handed = dispatched(subject, work)
        assert len(handed.hidden_states) == 2 * bound
        got = subject.combine(combine_input=experts_of(subject, handed))
        return worst_of(got, dense(*work))

    assert max(on_ranks(2, body)) < 1e-5


@pytest.mark.parametrize(
    ("batches", "ranks", "sp_active", "most"),
    [
        ([5, 9], 1, False, 9),
        ([5, 9], 2, False, 5),  # two ranks share the nine tokens out
        ([12], 4, False, 3),
        ([0, 0], 1, False, 0),
        (None, 2, False, None),
        ([5, 9], 1, True, None),
    ],
)
def test_the_most_tokens_of_a_rank(
    monkeypatch: pytest.MonkeyPatch, batches: Any, ranks: int, sp_active: bool, most: int | None
) -> None:
    monkeypatch.setattr(base, "get_forward", lambda: SimpleNamespace(sp_active=sp_active))
    monkeypatch.setattr(base, "get_parallel", lambda: SimpleNamespace(attn_tp_size=ranks))
    monkeypatch.setattr(base, "get_dp_global_num_tokens", lambda: batches)
    assert base.most_tokens_of_a_rank() == most


# CUDA graphs: the host learns nothing of the data.


class _NoReads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses operators whose result, or the shape of it, needs a value on the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        by_mask = name in ("index", "index_put_") and any(
            one is not None and one.dtype == torch.bool for one in args[1]
        )
        assert not by_mask, name
        assert name not in ("_local_scalar_dense", "nonzero", "masked_select", "equal"), name
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("runner", "reads"),
    [(name, name == "cpu") for name in RUNNERS] + [("triton_kernel", False)],
)
def test_only_cpu_ranks_read_what_arrived(
    runner: str, reads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the adapter does around the exchange's two operators may be captured."""
    if runner == "triton_kernel":
        monkeypatch.setattr(cuda, "triton_kernel_output", lambda routes, top_k: routes)

    def body(pool: ExchangePool) -> None:
        subject = dispatcher_of(pool, runner)
        hidden, ids, weights = work_of(CAPACITY, 1)
        routing = routing_of(StandardTopKOutput(weights, ids, None), CAPACITY)
        exchange = subject._exchange
        received = exchange.dispatch(hidden, routing.ids, routing.weights)
        current = base.Round(received, routing)
        with pytest.raises(AssertionError) if reads else contextlib.nullcontext(), _NoReads():  # type: ignore[no-untyped-call]
            subject._hand_out(current)
            subject._partial_rows(hidden, current)

    with_pool(body, *ThreadGroup.ranks(1))


# Refusals: of all ranks.


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_fused_shared_experts": 1}, "--disable-shared-experts-fusion"),
        ({"no_combine": True}, "no_combine"),
        ({"layer": SimpleNamespace(reduce_results=True)}, "would sum a second time what our"),
        ({"num_local_experts": 3}, "holds 3 of 8 experts"),
        ({"apply_router_weight_on_input": True}, "apply_router_weight_on_input"),
    ],
)
def test_layers_that_would_be_misplaced_are_refused(values: Any, message: str) -> None:
    making = functools.partial(with_pool, lambda pool: dispatcher_of(pool, **values))
    outcomes = try_ranks(2, making)
    for outcome in outcomes:
        assert isinstance(outcome, UnsupportedError)
        assert message in str(outcome)


@pytest.mark.parametrize("clears", [True, False])
def test_old_bytes_of_empty_slots_reach_only_runners_that_look_at_filled_rows(clears: bool) -> None:
    def round_of(subject: Any, hidden: torch.Tensor) -> torch.Tensor:
        num_tokens = hidden.shape[0]
        ids = torch.arange(TOP_K, dtype=torch.int32).expand(num_tokens, -1).contiguous()
        routing = StandardTopKOutput(torch.ones(num_tokens, TOP_K), ids, None)
        rows: torch.Tensor = subject.dispatch(
            hidden_states=hidden, topk_output=routing
        ).hidden_states
        handed_out = rows.clone()
        subject.combine(StandardCombineInput(torch.zeros_like(rows)))
        return handed_out

    def body(pool: ExchangePool) -> tuple[bool, int]:
        runner = named("triton")._replace(clears_empty=clears)
        subject = StandardFormDispatcher(runner_config(2), pool, CAPACITY, runner, None)
        for _ in range(2):
            round_of(subject, torch.full((CAPACITY, HIDDEN_SIZE), float("nan")))
        rows = round_of(subject, torch.ones(1, HIDDEN_SIZE))
        return bool(rows.isfinite().all()), int((rows == 1).all(1).sum())

    # Experts 0 to 2 are rank 0's: it has a row of each rank, and rank 1 never has one.
    assert on_ranks(2, body) == [(clears, 2), (True, 0)]
