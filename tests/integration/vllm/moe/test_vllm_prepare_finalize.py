"""On CPU ranks: what vLLM's experts get from prepare, and what finalize makes of their output.

And audits of the rows, here and by the classes of CUDA ranks.
"""

from __future__ import annotations

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

from moe_nvlink_plugin import MoeAllToAll
from moe_nvlink_plugin.errors import ExchangeStateError, UnsupportedError
from moe_nvlink_plugin.integration.common.agreement import Geometry
from moe_nvlink_plugin.integration.common.audit import AUDIT_BYTES, Audit
from moe_nvlink_plugin.integration.common.options import Options
from moe_nvlink_plugin.integration.common.pool import ExchangePool
from moe_nvlink_plugin.integration.vllm import metrics
from moe_nvlink_plugin.integration.vllm.lora.adapters import AdapterNumbers
from moe_nvlink_plugin.integration.vllm.moe import method
from moe_nvlink_plugin.integration.vllm.moe.cpu_prepare_finalize import CpuPrepareAndFinalize
from moe_nvlink_plugin.integration.vllm.moe.features import NUMBER_BYTES
from moe_nvlink_plugin.integration.vllm.moe.prepare_finalize import UNQUANTISED
from moe_nvlink_plugin.testing import ThreadGroup, run_ranks
from tests.integration.vllm.moe.vllm_layer import (
    CAPACITY,
    GEOMETRY,
    LEFT_OPEN,
    NO_OP,
    NUM_EXPERTS,
    TOP_K,
    Experts,
    Layer,
    config_of,
    dense,
    expert_map_of,
    pool_of,
    ragged,
    ranks_of,
    work_of,
    worst_of,
)

ROUNDS = 20

#: One rank's input of one call: rows, ids and weights.
Work = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _one_of_each(work: Work) -> Work:
    """The same tokens with one choice each, an expert."""
    hidden, ids, weights = work
    return hidden, ids[:, :1].clamp(min=0), weights[:, :1].contiguous()


def _alone(**values: Any) -> MoeAllToAll:
    (group,) = ThreadGroup.ranks(1)
    return MoeAllToAll.create(config_of(1, 0, **values), group)


def _local_experts(first: int, num_local: int, rows: Any, ids: Any, weights: Any) -> torch.Tensor:
    """Like vLLM's CPU experts: local ids only, no bounds check to save a wrong one."""
    assert ids.dtype == torch.int32
    assert weights.dtype == torch.float32
    assert ids.is_contiguous()
    assert weights.is_contiguous()
    assert rows.is_contiguous()
    assert rows.shape[0] == ids.shape[0] == weights.shape[0]
    assert bool(((ids >= 0) & (ids < num_local)).all())
    return dense(rows, ids + first, weights)


def _prepare(subject: Any, work: Work, **values: Any) -> Any:
    hidden, ids, weights = work
    arguments = {
        "a1": hidden,
        "topk_weights": weights,
        "topk_ids": ids,
        "num_experts": NUM_EXPERTS,
        "expert_map": None,
        "apply_router_weight_on_input": False,
        "quant_config": SimpleNamespace(quant_dtype=None),
        "defer_input_quant": True,
        **values,
    }
    return subject.prepare(**arguments)


def _layer(subject: Any, work: Work, *, alias: bool = False) -> torch.Tensor:
    """One MoE layer as vLLM's modular kernel runs it."""
    rows, scales, tokens_meta, ids, weights = _prepare(subject, work)
    assert scales is None
    assert tokens_meta is None
    first, num_local = subject._first, subject._end - subject._first
    experts_output = _local_experts(first, num_local, rows, ids, weights)
    output = torch.full_like(work[0], float("nan"))
    if alias:  # with as many pairs as tokens the kernel lets the experts write into output
        assert experts_output.shape == output.shape
        output.copy_(experts_output)
        experts_output = output
    subject.finalize(output, experts_output, weights, ids, False, NO_OP)
    return output


@pytest.fixture
def one_rank() -> Iterator[MoeAllToAll]:
    with _alone() as exchange:
        yield exchange


@pytest.mark.parametrize("num_tokens", [0, 1, CAPACITY])
@pytest.mark.parametrize(("top_k", "alias"), [(TOP_K, False), (1, False), (1, True)])
def test_one_rank(num_tokens: int, top_k: int, alias: bool) -> None:
    with _alone(top_k=top_k) as exchange:
        subject = CpuPrepareAndFinalize(exchange, None)
        for seed in range(3):
            work = work_of(num_tokens, seed)
            work = work if top_k == TOP_K else _one_of_each(work)
            got = _layer(subject, work, alias=alias)
            torch.testing.assert_close(got, dense(*work), rtol=1e-6, atol=1e-6)


def test_rows_do_not_change_under_the_experts(one_rank: MoeAllToAll) -> None:
    """The workspace belongs to the peers again at the next dispatch."""
    subject = CpuPrepareAndFinalize(one_rank, None)
    work = work_of(CAPACITY, 0)
    rows, _, _, ids, weights = _prepare(subject, work)
    kept = rows.clone(), ids.clone(), weights.clone()
    subject.finalize(torch.empty_like(work[0]), rows, weights, ids, False, NO_OP)
    _prepare(subject, work_of(CAPACITY, 1))
    for now, before in zip((rows, ids, weights), kept, strict=True):
        assert torch.equal(now, before)


def test_router_weights_on_the_input() -> None:
    hidden, _, weights = work = _one_of_each(work_of(4, 0))
    with _alone(top_k=1) as exchange:
        subject = CpuPrepareAndFinalize(exchange, None)
        rows, *_ = _prepare(subject, work, apply_router_weight_on_input=True)
    torch.testing.assert_close(rows, hidden * weights)


def test_router_weights_on_the_input_need_top_k_1(one_rank: MoeAllToAll) -> None:
    subject = CpuPrepareAndFinalize(one_rank, None)
    with pytest.raises(UnsupportedError, match="top_k 1, this layer has 3"):
        _prepare(subject, work_of(4, 0), apply_router_weight_on_input=True)


def test_a_format_that_was_not_agreed_is_refused(one_rank: MoeAllToAll) -> None:
    subject = CpuPrepareAndFinalize(one_rank, None)
    quantised = SimpleNamespace(quant_dtype=torch.float8_e4m3fn)
    with pytest.raises(UnsupportedError, match="float8_e4m3fn"):
        _prepare(subject, work_of(4, 0), quant_config=quantised, defer_input_quant=False)


def test_experts_that_leave_the_reduction_open_are_refused(one_rank: MoeAllToAll) -> None:
    subject = CpuPrepareAndFinalize(one_rank, None)
    subject.post_init_setup(Experts())
    with pytest.raises(UnsupportedError, match="TopKWeightAndReduceDelegate"):
        subject.post_init_setup(Experts(left_open=LEFT_OPEN["Delegate"]()))


def test_one_prepare_serves_one_finalize(one_rank: MoeAllToAll) -> None:
    subject = CpuPrepareAndFinalize(one_rank, None)
    work = work_of(2, 0)
    rows, _, _, ids, weights = _prepare(subject, work)
    output = torch.empty_like(work[0])
    subject.finalize(output, rows, weights, ids, False, NO_OP)
    with pytest.raises(ExchangeStateError, match="finalize without a prepare"):
        subject.finalize(output, rows, weights, ids, False, NO_OP)


def test_what_vllm_asks(one_rank: MoeAllToAll) -> None:
    subject = CpuPrepareAndFinalize(one_rank, None)
    assert subject.activation_format is mk.FusedMoEActivationFormat.Standard
    assert subject.topk_indices_dtype() is torch.int32
    assert subject.max_num_tokens_per_rank() is None
    assert subject.num_dispatchers() == 1
    assert subject.output_is_reduced()
    assert not subject.supports_async()


def test_another_placement_is_refused() -> None:
    round_robin = torch.tensor([0, -1, 1, -1, 2, -1, 3], dtype=torch.int32)
    exchange: Any = SimpleNamespace(config=config_of(2, 0))
    with pytest.raises(UnsupportedError, match="--expert-placement-strategy"):
        CpuPrepareAndFinalize(exchange, round_robin)


# Ranks that are threads.


def test_a_round_has_slots_for_the_largest_batch(in_context: Callable[..., None]) -> None:
    def rank_main(group: ThreadGroup) -> None:
        config = config_of(2, group.rank, max_tokens_per_rank=20)
        with MoeAllToAll.create(config, group) as exchange:
            layer = CpuPrepareAndFinalize(exchange, expert_map_of(config))
            for number, sizes in enumerate(([3, 9], [1, 0], [20, 0], [16, 16])):
                if group.rank == 0:
                    in_context(sizes)
                group.all_gather_object(None)
                work = work_of(sizes[group.rank], 100 * number + group.rank)
                torch.testing.assert_close(_layer(layer, work), dense(*work), rtol=0, atol=1e-5)
                group.all_gather_object(None)

    run_ranks(2, rank_main)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where each rank writes its counters."""
    monkeypatch.setenv("MOE_NVLINK_STATS_DIR", str(tmp_path))
    return tmp_path


def stats_of(folder: Path, rank: int) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / f"rank{rank}.json").read_text("utf-8"))
    return content


def test_a_pool_shares_a_workspace_and_writes_stats(folder: Path) -> None:
    def rank_main(group: ThreadGroup) -> None:
        pool = pool_of(group)
        first, again, second = map(
            pool.exchange, (GEOMETRY, GEOMETRY, Geometry(11, 2, 64, 2 * CAPACITY, torch.float32))
        )
        assert first is again is not second
        assert second.workspace_bytes == first.workspace_bytes
        layer = CpuPrepareAndFinalize(first, None)
        for number in range(3):
            _layer(layer, work_of(CAPACITY, number + 10 * group.rank))
        pool.close()
        pool.close()

    run_ranks(2, rank_main)
    assert sorted(path.name for path in folder.iterdir()) == ["rank0.json", "rank1.json"]
    for rank in range(2):
        stats = stats_of(folder, rank)
        assert (stats["ep_rank"], stats["ep_size"], stats["rounds"]) == (rank, 2, 3)
        assert stats["tokens"] == 3 * CAPACITY
        assert 0 < stats["bytes_dispatched_remote"] < stats["bytes_dispatched"]
        assert 0 < stats["bytes_combined_remote"] < stats["bytes_combined"]


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


def served(group: ThreadGroup, folder: Path, *, every: int, is_spoilt: bool = False) -> float:
    """The largest error of a rank's rounds, in a layer as `method` makes it."""
    kept, options = Kept(folder / "metrics"), Options(audit_every=every)
    pool = ExchangePool(ranks_of(group), torch.device("cpu"), options, publication=kept)
    try:
        exchange = pool.exchange(GEOMETRY)
        subject = method._prepare_finalize(
            pool, exchange, expert_map_of(exchange.config), UNQUANTISED
        )
        if is_spoilt and group.rank == 1:
            spoil(exchange)
        works = ragged(group.rank, ROUNDS)
        return max(worst_of(_layer(subject, work), dense(*work)) for work in works)
    finally:
        pool.close()


@pytest.mark.usefixtures("turns_from_one")
def test_a_wrong_bit_is_counted_and_logged_once(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        _, error = run_ranks(2, lambda group: served(group, folder, every=2, is_spoilt=True))
    assert error < 1e-5, "of rank 1's own tokens"
    healthy, spoilt = stats_of(folder, 0), stats_of(folder, 1)
    assert 0 < min(healthy["audited"]) <= max(healthy["audited"]) <= ROUNDS // 2
    assert healthy["audit_faults"] == [0, 0]
    assert spoilt["audit_faults"] == [spoilt["audited"][0], 0]
    assert spoilt["audited"][0] > 2
    (record,) = caplog.records
    assert "of rank 1 found wrong rows" in record.getMessage()
    assert "rows from rank 0" in record.getMessage()
    registry = CollectorRegistry()
    registry.register(metrics.RanksCollector([folder / "metrics"]))
    text = generate_latest(registry).decode()
    count = float(spoilt["audit_faults"][0])
    assert f'moe_nvlink_audit_faults_total{{ep_rank="1",source="0"}} {count}' in text
    assert 'moe_nvlink_audit_faults_total{ep_rank="0",source="0"} 0.0' in text
    assert f'moe_nvlink_audited_total{{ep_rank="1",source="0"}} {count}' in text


def test_ragged_and_empty_batches_without_an_audit(folder: Path) -> None:
    assert max(run_ranks(2, lambda group: served(group, folder, every=0))) < 1e-5
    assert "audited" not in stats_of(folder, 0)


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
        for number in range(ROUNDS):
            work = work_of(CAPACITY, 100 * number + group.rank)
            if adapters:
                numbers.update([7] * CAPACITY, [None, 7])
            torch.testing.assert_close(layer(*work), dense(*work))
            if adapters:
                assert set(context.local_token_lora_mapping.tolist()) <= {-1, 1}
        layer.close()
        return audit.found()

    for found in run_ranks(2, body):
        assert min(found.rows) > ROUNDS // 4
        assert found.wrong == found.stale == [0, 0]
