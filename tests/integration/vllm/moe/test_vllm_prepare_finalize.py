"""On CPU ranks: what vLLM's experts get from prepare, and what finalize makes of their output."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm import forward_context
from vllm.model_executor.layers.fused_moe import modular_kernel as mk
from vllm.model_executor.layers.fused_moe import topk_weight_and_reduce

from moe_nvlink_plugin import MoeAllToAll
from moe_nvlink_plugin.errors import ExchangeStateError, UnsupportedError
from moe_nvlink_plugin.integration.common.agreement import Geometry, Ranks
from moe_nvlink_plugin.integration.common.options import Options
from moe_nvlink_plugin.integration.common.pool import ExchangePool
from moe_nvlink_plugin.integration.vllm.choices import WORDING
from moe_nvlink_plugin.integration.vllm.moe.cpu_prepare_finalize import CpuPrepareAndFinalize
from moe_nvlink_plugin.testing import ThreadGroup
from tests.integration.vllm.moe.vllm_layer import (
    CAPACITY,
    GEOMETRY,
    NUM_EXPERTS,
    TOP_K,
    Experts,
    config_of,
    dense,
    expert_map_of,
    ragged,
    work_of,
    worst_of,
)
from tests.support.ranks import run_processes

NO_OP = topk_weight_and_reduce.TopKWeightAndReduceNoOP()

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
        subject.post_init_setup(
            Experts(left_open=topk_weight_and_reduce.TopKWeightAndReduceDelegate())
        )


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


# Two processes, started once: importing vLLM takes longer than all they do.


def _ragged_rounds(ep_rank: int, ep_size: int) -> list[float]:
    """Largest error per round, of two layers of one geometry in turn."""
    config = config_of(ep_size, ep_rank)
    errors = []
    with MoeAllToAll.create(config, dist.group.WORLD) as exchange:
        layers = [CpuPrepareAndFinalize(exchange, expert_map_of(config)) for _ in range(2)]
        for work in ragged(ep_rank, 20):
            errors += [worst_of(_layer(layer, work), dense(*work)) for layer in layers]
    return errors


def _geometries_and_stats(ep_rank: int, ep_size: int) -> dict[str, Any]:
    """What the pool's counters say after rounds of one of its two geometries."""
    ranks = Ranks(dist.group.WORLD, ep_rank, ep_size, WORDING)
    pool = ExchangePool(ranks, torch.device("cpu"), Options())
    large = Geometry(11, 2, 64, 2 * CAPACITY, torch.float32)
    first = pool.exchange(GEOMETRY)
    assert pool.exchange(GEOMETRY) is first
    second = pool.exchange(large)
    assert second is not first
    assert second.workspace_bytes == first.workspace_bytes
    layer = CpuPrepareAndFinalize(first, None)
    for number in range(3):
        _layer(layer, work_of(CAPACITY, number + 10 * ep_rank))
    pool.close()
    pool.close()
    path = Path(os.environ["MOE_NVLINK_STATS_DIR"], f"rank{ep_rank}.json")
    written: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return written


def _rounds_with_sizes(ep_rank: int, ep_size: int) -> tuple[list[float], list[int]]:
    """Error and bound of each round, if vLLM's ranks have agreed on the sizes of the batches."""
    config = config_of(ep_size, ep_rank, max_tokens_per_rank=20)
    errors: list[float] = []
    bounds: list[int] = []
    with MoeAllToAll.create(config, dist.group.WORLD) as exchange:

        def spied(*arguments: Any, **more: Any) -> Any:
            bounds.append(more["max_tokens"])
            return MoeAllToAll.dispatch(exchange, *arguments, **more)

        exchange.dispatch = spied  # type: ignore[method-assign]
        layer = CpuPrepareAndFinalize(exchange, expert_map_of(config))
        for number, sizes in enumerate(([3, 9], [1, 0], [20, 0], [16, 16])):
            metadata = forward_context.DPMetadata(torch.tensor(sizes), local_sizes=sizes)
            context = forward_context.ForwardContext({}, {}, {}, metadata)
            work = work_of(sizes[ep_rank], 100 * number + ep_rank)
            with forward_context.override_forward_context(context):
                got = _layer(layer, work)
            errors.append(worst_of(got, dense(*work)))
    return errors, bounds


SCENARIOS = (_ragged_rounds, _rounds_with_sizes, _geometries_and_stats)


def _process(ep_rank: int, ep_size: int, folder: str) -> dict[str, Any]:
    os.environ["MOE_NVLINK_STATS_DIR"] = f"{folder}/stats"
    return {scenario.__name__: scenario(ep_rank, ep_size) for scenario in SCENARIOS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("two_processes")


@pytest.fixture(scope="module")
def results(folder: Path) -> list[dict[str, Any]]:
    """By rank and scenario."""
    return run_processes(2, _process, folder, str(folder))


def test_two_processes_with_ragged_and_empty_batches(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert len(result["_ragged_rounds"]) == 40
        assert max(result["_ragged_rounds"]) < 1e-5


def test_a_step_has_slots_for_the_largest_batch(results: list[dict[str, Any]]) -> None:
    for result in results:
        errors, bounds = result["_rounds_with_sizes"]
        assert max(errors) < 1e-5
        assert bounds == [16, 8, 20, 16]


def test_a_pool_shares_a_workspace_and_writes_stats(
    results: list[dict[str, Any]], folder: Path
) -> None:
    for rank, result in enumerate(results):
        stats = result["_geometries_and_stats"]
        assert (stats["ep_rank"], stats["ep_size"], stats["rounds"]) == (rank, 2, 3)
        assert stats["tokens"] == 3 * CAPACITY
        assert 0 < stats["bytes_dispatched_remote"] < stats["bytes_dispatched"]
        assert 0 < stats["bytes_combined_remote"] < stats["bytes_combined"]
    assert sorted(p.name for p in (folder / "stats").iterdir()) == ["rank0.json", "rank1.json"]
