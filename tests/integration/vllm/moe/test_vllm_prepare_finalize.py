"""What vLLM's experts get from prepare, and what finalize makes of their output.

The classes for CPU and for CUDA ranks work inside vLLM's own modular kernel, on CPU tensors. The
kernel goes as on CUDA, so that the zero-copy hook is called as it is on GPUs. The exchange between
the ranks is the real one: threads that share memory here, processes on the stand-in driver in
test_vllm_on_fake_driver.py.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry, generate_latest
from vllm.model_executor.layers.fused_moe import modular_kernel as mk
from vllm.model_executor.layers.fused_moe import topk_weight_and_reduce

from moe_nvlink_plugin import Dispatched, MoeAllToAll
from moe_nvlink_plugin.errors import ExchangeStateError, UnsupportedError
from moe_nvlink_plugin.integration.common.audit import AUDIT_BYTES, Audit
from moe_nvlink_plugin.integration.common.options import Options
from moe_nvlink_plugin.integration.common.pool import ExchangePool
from moe_nvlink_plugin.integration.vllm import metrics
from moe_nvlink_plugin.integration.vllm.lora.adapters import AdapterNumbers
from moe_nvlink_plugin.integration.vllm.moe import cuda_prepare_finalize, method
from moe_nvlink_plugin.integration.vllm.moe.cpu_prepare_finalize import CpuPrepareAndFinalize
from moe_nvlink_plugin.integration.vllm.moe.cuda_prepare_finalize import CudaPrepareAndFinalize
from moe_nvlink_plugin.integration.vllm.moe.features import NUMBER_BYTES
from moe_nvlink_plugin.integration.vllm.moe.prepare_finalize import UNQUANTISED
from moe_nvlink_plugin.testing import ThreadGroup, run_ranks
from tests.integration.vllm.moe.vllm_layer import (
    CAPACITY,
    EXPERTS,
    GEOMETRY,
    HIDDEN_SIZE,
    LEFT_OPEN,
    NO_OP,
    NUM_EXPERTS,
    Experts,
    Layer,
    WithoutData,
    alone,
    dense,
    expert_map_of,
    ragged,
    ranks_of,
    work_of,
    worst_of,
)

pytestmark = pytest.mark.usefixtures("cuda_branches")

NARROW = HIDDEN_SIZE - 8
ON_BOTH = pytest.mark.parametrize("is_cpu_rank", [False, True], ids=["cuda", "cpu"])
CHOICES = torch.tensor([[0, 1, 2]], dtype=torch.int32)


@pytest.fixture
def layer() -> Iterator[Layer]:
    with alone() as made:
        yield made


@pytest.fixture
def of_cpu() -> Iterator[Layer]:
    with alone(is_cpu_rank=True) as made:
        yield made


# Against the dense layer.


def _rounds(group: ThreadGroup, experts: Experts, **values: Any) -> tuple[float, bool]:
    """Largest error of one rank over ragged rounds; whether experts wrote where combine reads."""
    errors, made = [], experts.made
    with Layer(group, experts=experts, **values) as layer:
        for hidden, ids, weights in ragged(group.rank, 8):
            hidden[:, made:] = 0.0
            got = layer(hidden[:, :made], ids, weights)
            errors.append(worst_of(got, dense(hidden, ids, weights)[:, :made]))
            layer.poison()
        region = layer.exchange.combine_input()
        return max(errors), experts.calls[-1].output.data_ptr() == region.data_ptr()


@pytest.mark.parametrize(
    ("is_cpu_rank", "left_open", "made"),
    [
        (True, "NoOP", HIDDEN_SIZE),
        *((False, name, made) for name in LEFT_OPEN for made in (HIDDEN_SIZE, NARROW)),
    ],
)
@pytest.mark.parametrize("ep_size", [1, 2, 3, 4])
def test_the_layer_is_the_dense_one(
    ep_size: int, is_cpu_rank: bool, left_open: str, made: int
) -> None:
    """Experts may leave padding columns out; combine fetches rows of that width."""

    def rank_main(group: ThreadGroup) -> tuple[float, bool]:
        experts = Experts(left_open=LEFT_OPEN[left_open](), made=made)
        return _rounds(group, experts, is_cpu_rank=is_cpu_rank)

    for error, is_in_place in run_ranks(ep_size, rank_main):
        assert error < 1e-5
        assert is_in_place == (left_open == "NoOP" and not is_cpu_rank)


@pytest.mark.parametrize("num_tokens", [0, 1, CAPACITY])
def test_one_choice_per_token(num_tokens: int) -> None:
    """With as many pairs as tokens, vLLM's kernel lets the experts write into the output."""
    hidden, ids, weights = work_of(num_tokens, 0)
    work = hidden, ids[:, :1].clamp(min=0), weights[:, :1].contiguous()
    with alone(is_cpu_rank=True, top_k=1) as layer:
        got = layer(*work)
        torch.testing.assert_close(got, dense(*work), rtol=1e-6, atol=1e-6)
        assert [call.output.data_ptr() for call in layer.experts.calls] == (
            [got.data_ptr()] if num_tokens else []
        )
        if num_tokens:
            prepare = layer.kernel.impl._prepare
            rows, *_ = prepare(hidden, work[2], work[1], NUM_EXPERTS, None, True)
            torch.testing.assert_close(rows, hidden * work[2])


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
        w1=EXPERTS,
        expert_map=None,
    )
    layer.subject.finalize(output, output, sent_weights, sent_ids, False, NO_OP)
    torch.testing.assert_close(output, dense(*work), rtol=1e-5, atol=1e-5)


# What is handed out.


def test_rows_on_cpu_ranks_do_not_change_under_the_experts(of_cpu: Layer) -> None:
    """The workspace belongs to the peers again at the next dispatch."""
    for seed in range(2):
        of_cpu(*work_of(CAPACITY, seed))
    call = of_cpu.experts.calls[0]
    assert torch.equal(call.hidden_states, call.rows_then)
    assert torch.equal(call.topk_ids, call.ids_then)
    assert torch.equal(call.topk_weights, call.weights_then)


def _handed_out(group: ThreadGroup) -> None:
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
    # As dispatch wrote them, where it wrote them.
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


def test_the_region_is_handed_out_only_where_it_fits(layer: Layer) -> None:
    hidden, ids, weights = work_of(2, 0)
    here, shape = torch.device("cpu"), (CAPACITY, HIDDEN_SIZE)
    ask = layer.subject.allocate_fused_expert_output
    assert ask(shape, torch.float32, here, NO_OP) is None  # outside a round
    layer.kernel.impl._prepare(hidden, weights, ids, NUM_EXPERTS, None, False)
    assert ask(shape, torch.float32, here, NO_OP) is layer.exchange.combine_input()
    assert ask((*shape, 1), torch.float32, here, NO_OP) is None
    assert ask(shape, torch.bfloat16, here, NO_OP) is None
    assert ask(shape, torch.float32, torch.device("meta"), NO_OP) is None
    for other in ("Delegate", "Contiguous"):
        assert ask(shape, torch.float32, here, LEFT_OPEN[other]()) is None


def test_what_vllm_asks(of_cpu: Layer) -> None:
    subject = of_cpu.subject
    assert subject.activation_format is mk.FusedMoEActivationFormat.Standard
    assert subject.topk_indices_dtype() is torch.int32
    assert subject.max_num_tokens_per_rank() is None
    assert subject.num_dispatchers() == 1
    assert subject.output_is_reduced()
    assert not subject.supports_async()


# What a step's forward context says.


@ON_BOTH
def test_a_round_has_slots_for_the_largest_batch(
    is_cpu_rank: bool, in_context: Callable[..., None]
) -> None:
    """So CUDA ranks' experts get a small part of the buffer in a small step."""
    sizes = [(0, 1), (8, 3), (9, 4), (0, 17), (20, 20), (1, 2)]

    def rank_main(group: ThreadGroup) -> list[int]:
        with Layer(group, is_cpu_rank=is_cpu_rank, max_tokens_per_rank=20) as layer:
            for number, both in enumerate(sizes):
                if group.rank == 0:
                    in_context(list(both))
                group.all_gather_object(None)
                work = work_of(both[group.rank], 10 * number + group.rank)
                torch.testing.assert_close(layer(*work), dense(*work), rtol=1e-5, atol=1e-5)
                group.all_gather_object(None)
            return [call.hidden_states.shape[0] for call in layer.experts.calls]

    for slots in run_ranks(2, rank_main):
        assert is_cpu_rank or slots == [16, 16, 32, 40, 40, 16]


def test_without_sizes_the_whole_buffer_is_handed_out(
    layer: Layer, in_context: Callable[..., None]
) -> None:
    """To a rank with all experts: the empty slots' ids are of an expert here, with weight 0."""
    layer(*work_of(1, 0))
    in_context()
    layer(*work_of(1, 0))
    for call in layer.experts.calls:
        assert call.hidden_states.shape[0] == CAPACITY
        assert not call.ids_then[1:].any()
        assert not call.weights_then[1:].any()


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
        ids = CHOICES.repeat(share, 1)
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
    work = hidden, CHOICES.repeat(4, 1), weights
    in_context([4], is_padding=torch.ones(8, dtype=torch.bool))
    torch.testing.assert_close(layer(*work), dense(*work), rtol=1e-5, atol=1e-5)


# What is refused.


class ByRank(Experts):
    """Finds its first expert by its rank, without expert_map."""

    ep_rank = 1


class InBfloat16(Experts):
    def workspace_dtype(self, act_dtype: torch.dtype) -> torch.dtype:
        return torch.bfloat16


BATCHED = topk_weight_and_reduce.TopKWeightAndReduceNaiveBatched(0)


@pytest.mark.parametrize(
    ("is_cpu_rank", "experts", "values", "told"),
    [
        (True, Experts(), {}, ""),
        (False, Experts(), {}, ""),
        (True, Experts(left_open=LEFT_OPEN["Delegate"]()), {}, "TopKWeightAndReduceDelegate"),
        (False, Experts(left_open=BATCHED), {}, "NaiveBatched.*--moe-backend"),
        (True, InBfloat16(), {"combine": "fp8_block"}, "rows into torch.bfloat16.*fp8_block"),
        (False, ByRank(), {}, "7 experts on 2 ranks"),
        (False, ByRank(), {"num_experts": 6}, ""),
    ],
)
def test_experts_that_are_refused(
    is_cpu_rank: bool, experts: Experts, values: dict[str, Any], told: str
) -> None:
    exchange: Any = WithoutData(**values)
    of_device = CpuPrepareAndFinalize if is_cpu_rank else CudaPrepareAndFinalize
    subject = of_device(exchange, expert_map_of(exchange.config))
    refused = pytest.raises(UnsupportedError, match=told) if told else contextlib.nullcontext()
    with refused:
        subject.post_init_setup(experts)


def test_widths_that_combine_cannot_fetch_are_refused(layer: Layer) -> None:
    with pytest.raises(UnsupportedError, match="rows of 136 out of rows of 128.*--moe-backend"):
        layer.subject.post_init_setup(Experts(made=HIDDEN_SIZE + 8))
    with pytest.raises(UnsupportedError, match="rows of 120 out of rows of 128"):
        alone(experts=Experts(made=NARROW), options=Options(combine="fp8_block"))


@pytest.mark.parametrize(
    ("of_device", "expert_map", "told"),
    [
        (CudaPrepareAndFinalize, None, "2 ranks share its 7 experts"),
        (CpuPrepareAndFinalize, [0, -1, 1, -1, 2, -1, 3], "--expert-placement-strategy"),
    ],
)
def test_placements_that_are_refused(of_device: Any, expert_map: Any, told: str) -> None:
    placed = None if expert_map is None else torch.tensor(expert_map, dtype=torch.int32)
    with pytest.raises(UnsupportedError, match=told):
        of_device(WithoutData(), placed)


def test_calls_that_are_refused(of_cpu: Layer) -> None:
    hidden, ids, weights = work = work_of(2, 0)
    of_cpu(*work)
    with pytest.raises(ExchangeStateError, match="finalize without a prepare"):
        of_cpu.subject.finalize(hidden, hidden, weights, ids, False, NO_OP)
    with pytest.raises(UnsupportedError, match="top_k 1, this layer has 3"):
        of_cpu.kernel.impl._prepare(hidden, weights, ids, NUM_EXPERTS, None, True)
    of_cpu.experts.quant_config = SimpleNamespace(quant_dtype=torch.float8_e4m3fn)
    with pytest.raises(UnsupportedError, match=r"rows of torch.float8_e4m3fn.*set up for None"):
        of_cpu(*work)


# Audits.


class Kept(metrics.RankFile):
    """A rank's metrics, which the test reads after the worker's end."""

    def close(self) -> None:
        pass


def spoil(exchange: MoeAllToAll) -> None:
    """Let a link bring one wrong bit in each row of rank 0."""
    dispatch = exchange.dispatch

    def spoilt(*given: Any, **named: Any) -> Any:
        received = dispatch(*given, **named)
        count = int(received.recv_counts[0])
        received.hidden_states.view(torch.uint8)[:count, 5] ^= 1
        return received

    exchange.dispatch = spoilt  # type: ignore[method-assign]


def served(group: ThreadGroup, folder: Path) -> float:
    """The largest error of a rank's audited rounds, of a pool and a class as `method` makes it."""
    kept, options = Kept(folder / "metrics"), Options(audit_every=2)
    pool = ExchangePool(ranks_of(group), torch.device("cpu"), options, publication=kept)
    try:
        exchange, layer = pool.exchange(GEOMETRY), Layer(group, is_cpu_rank=True)
        placed = layer.expert_map
        layer.kernel = mk.FusedMoEKernel(
            method._prepare_finalize(pool, exchange, placed, UNQUANTISED), layer.experts
        )
        if group.rank == 1:
            spoil(exchange)
        return max(worst_of(layer(*work), dense(*work)) for work in ragged(group.rank, 20))
    finally:
        pool.close()
        layer.close()


@pytest.mark.usefixtures("turns_from_one")
def test_a_wrong_bit_is_counted_and_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOE_NVLINK_STATS_DIR", str(tmp_path))
    with caplog.at_level(logging.ERROR):
        _, error = run_ranks(2, lambda group: served(group, tmp_path))
    assert error < 1e-5, "of rank 1's own tokens"
    healthy, spoilt = (json.loads((tmp_path / f"rank{r}.json").read_text("utf-8")) for r in (0, 1))
    assert 0 < min(healthy["audited"]) <= max(healthy["audited"]) <= 10
    assert healthy["audit_faults"] == [0, 0]
    assert spoilt["audit_faults"] == [spoilt["audited"][0], 0]
    assert spoilt["audited"][0] > 2
    (record,) = caplog.records
    assert "of rank 1 found wrong rows" in record.getMessage()
    assert "rows from rank 0" in record.getMessage()
    registry = CollectorRegistry()
    registry.register(metrics.RanksCollector([tmp_path / "metrics"]))
    text = generate_latest(registry).decode()
    count = float(spoilt["audit_faults"][0])
    assert f'moe_nvlink_audit_faults_total{{ep_rank="1",source="0"}} {count}' in text
    assert 'moe_nvlink_audit_faults_total{ep_rank="0",source="0"} 0.0' in text
    assert f'moe_nvlink_audited_total{{ep_rank="1",source="0"}} {count}' in text


@pytest.mark.usefixtures("turns_from_one")
@pytest.mark.parametrize("adapters", [False, True])
def test_audits_by_the_classes_of_cuda_ranks(adapters: bool) -> None:
    """With ids of "elsewhere", and beside the numbers of adapters (LoRA)."""

    def body(group: ThreadGroup) -> Any:
        payloads = (NUMBER_BYTES, AUDIT_BYTES) if adapters else (AUDIT_BYTES,)
        layer = Layer(group, extra_payload_bytes=payloads)
        layer.subject.audit = audit = Audit(layer.exchange, 2, torch.device("cpu"))
        numbers = AdapterNumbers(CAPACITY, 2, torch.device("cpu"))
        context = SimpleNamespace(punica_wrapper=SimpleNamespace(adapter_numbers=numbers))
        if adapters:
            layer.subject.set_lora_context(context)
        for number in range(20):
            work = work_of(CAPACITY, 100 * number + group.rank)
            if adapters:
                numbers.update([7] * CAPACITY, [None, 7])
            torch.testing.assert_close(layer(*work), dense(*work))
            if adapters:
                assert set(context.local_token_lora_mapping.tolist()) <= {-1, 1}
        layer.close()
        return audit.found()

    for found in run_ranks(2, body):
        assert min(found.rows) > 5
        assert found.wrong == found.stale == [0, 0]
