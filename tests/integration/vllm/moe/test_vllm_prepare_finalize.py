"""On CPU ranks: what vLLM's experts get from prepare, and what finalize makes of their output."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("vllm", reason="vLLM is not installed")

from moe_nvlink_plugin import AllToAllConfig, MoeAllToAll
from moe_nvlink_plugin.errors import (
    ExchangeStateError,
    ExchangeTimeoutError,
    MoeNvlinkError,
    UnsupportedError,
)
from moe_nvlink_plugin.integration.common.agreement import Geometry, Proposal, Ranks
from moe_nvlink_plugin.integration.common.options import Options
from moe_nvlink_plugin.integration.common.pool import ExchangePool
from moe_nvlink_plugin.integration.vllm.choices import WORDING
from moe_nvlink_plugin.integration.vllm.draft.draft_head import DraftHeads
from tests.support.ranks import run_processes

NUM_EXPERTS, TOP_K, HIDDEN_SIZE, CAPACITY = 7, 3, 32, 5
VOCAB = 100


pytestmark = pytest.mark.usefixtures("environment")


class OneRank:
    """A group of one, as the core takes it."""

    rank, size = 0, 1

    def all_gather_object(self, value: Any) -> list[Any]:
        return [value]


class Work(NamedTuple):
    """One rank's input of one call."""

    hidden: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor


def _config(ep_size: int, ep_rank: int, **values: Any) -> AllToAllConfig:
    defaults: dict[str, Any] = {
        "num_experts": NUM_EXPERTS,
        "top_k": TOP_K,
        "hidden_size": HIDDEN_SIZE,
        "max_tokens_per_rank": CAPACITY,
        "dtype": torch.float32,
        "timeout_s": 30.0,
    }
    return AllToAllConfig(ep_size=ep_size, ep_rank=ep_rank, **{**defaults, **values})


def _work(num_tokens: int, seed: int, top_k: int = TOP_K) -> Work:
    random = torch.Generator().manual_seed(seed)
    choices = [torch.randperm(NUM_EXPERTS, generator=random)[:top_k] for _ in range(num_tokens)]
    ids = torch.stack(choices) if choices else torch.empty(0, top_k, dtype=torch.long)
    return Work(
        torch.randn(num_tokens, HIDDEN_SIZE, generator=random),
        ids.to(torch.int32),
        torch.rand(num_tokens, top_k, generator=random),
    )


def _expert(expert: int, rows: torch.Tensor) -> torch.Tensor:
    """Any function that tells experts apart; the weights come from the expert's global id."""
    random = torch.Generator().manual_seed(1000 + expert)
    return torch.tanh(rows @ torch.randn(HIDDEN_SIZE, HIDDEN_SIZE, generator=random))


def _expected(work: Work) -> torch.Tensor:
    """The layer on one process, without any exchange."""
    out = torch.zeros_like(work.hidden)
    for token, (ids, weights) in enumerate(zip(work.ids, work.weights, strict=True)):
        for expert, weight in zip(ids.tolist(), weights, strict=True):
            out[token] += weight * _expert(expert, work.hidden[token : token + 1])[0]
    return out


def _local_experts(first: int, num_local: int, rows: Any, ids: Any, weights: Any) -> torch.Tensor:
    """Like vLLM's CPU experts: local ids only, no bounds check to save a wrong one."""
    assert ids.dtype == torch.int32
    assert weights.dtype == torch.float32
    assert ids.is_contiguous()
    assert weights.is_contiguous()
    assert rows.is_contiguous()
    assert rows.shape[0] == ids.shape[0] == weights.shape[0]
    assert bool(((ids >= 0) & (ids < num_local)).all())
    out = torch.zeros_like(rows)
    for row in range(rows.shape[0]):
        for local, weight in zip(ids[row].tolist(), weights[row], strict=True):
            if weight != 0:
                out[row] += weight * _expert(first + local, rows[row : row + 1])[0]
    return out


def _expert_map(config: AllToAllConfig) -> torch.Tensor:
    """As vLLM places experts: contiguous, the first ranks one more."""
    from vllm.model_executor.layers.fused_moe.expert_map_manager import determine_expert_map

    placed: torch.Tensor = determine_expert_map(config.ep_size, config.ep_rank, config.num_experts)[
        1
    ]
    return placed


def _prepare_finalize(exchange: MoeAllToAll, expert_map: torch.Tensor | None = None) -> Any:
    from moe_nvlink_plugin.integration.vllm.moe.cpu_prepare_finalize import CpuPrepareAndFinalize

    return CpuPrepareAndFinalize(exchange, expert_map)


def _prepare(subject: Any, work: Work, **values: Any) -> Any:
    arguments = {
        "a1": work.hidden,
        "topk_weights": work.weights,
        "topk_ids": work.ids,
        "num_experts": NUM_EXPERTS,
        "expert_map": None,
        "apply_router_weight_on_input": False,
        "quant_config": SimpleNamespace(quant_dtype=None),
        "defer_input_quant": True,
        **values,
    }
    return subject.prepare(**arguments)


def _no_op() -> Any:
    from vllm.model_executor.layers.fused_moe import topk_weight_and_reduce

    return topk_weight_and_reduce.TopKWeightAndReduceNoOP()


def _layer(
    subject: Any, config: AllToAllConfig, work: Work, *, alias: bool = False
) -> torch.Tensor:
    """One MoE layer as vLLM's modular kernel runs it."""
    rows, scales, tokens_meta, ids, weights = _prepare(subject, work)
    assert scales is None
    assert tokens_meta is None
    first, num_local = subject._first, subject._end - subject._first
    experts_output = _local_experts(first, num_local, rows, ids, weights)
    output = torch.full_like(work.hidden, float("nan"))
    if alias:  # with as many pairs as tokens the kernel lets the experts write into output
        assert experts_output.shape == output.shape
        output.copy_(experts_output)
        experts_output = output
    subject.finalize(output, experts_output, weights, ids, False, _no_op())
    return output


@pytest.fixture
def one_rank() -> Iterator[MoeAllToAll]:
    with MoeAllToAll.create(_config(1, 0), OneRank()) as exchange:
        yield exchange


@pytest.mark.parametrize("num_tokens", [0, 1, CAPACITY])
@pytest.mark.parametrize(("top_k", "alias"), [(TOP_K, False), (1, False), (1, True)])
def test_one_rank(num_tokens: int, top_k: int, alias: bool) -> None:
    with MoeAllToAll.create(_config(1, 0, top_k=top_k), OneRank()) as exchange:
        subject = _prepare_finalize(exchange)
        for seed in range(3):
            work = _work(num_tokens, seed, top_k)
            got = _layer(subject, exchange.config, work, alias=alias)
            torch.testing.assert_close(got, _expected(work), rtol=1e-6, atol=1e-6)


def test_rows_do_not_change_under_the_experts(one_rank: MoeAllToAll) -> None:
    """The workspace belongs to the peers again at the next dispatch."""
    subject = _prepare_finalize(one_rank)
    work = _work(CAPACITY, 0)
    rows, _, _, ids, weights = _prepare(subject, work)
    kept = rows.clone(), ids.clone(), weights.clone()
    subject.finalize(torch.empty_like(work.hidden), rows, weights, ids, False, _no_op())
    _prepare(subject, _work(CAPACITY, 1))
    for now, before in zip((rows, ids, weights), kept, strict=True):
        assert torch.equal(now, before)


def test_router_weights_on_the_input() -> None:
    work = _work(4, 0, top_k=1)
    with MoeAllToAll.create(_config(1, 0, top_k=1), OneRank()) as exchange:
        rows, *_ = _prepare(_prepare_finalize(exchange), work, apply_router_weight_on_input=True)
    torch.testing.assert_close(rows, work.hidden * work.weights)


def test_router_weights_on_the_input_need_top_k_1(one_rank: MoeAllToAll) -> None:
    with pytest.raises(UnsupportedError, match="top_k 1, this layer has 3"):
        _prepare(_prepare_finalize(one_rank), _work(4, 0), apply_router_weight_on_input=True)


def test_a_format_that_was_not_agreed_is_refused(one_rank: MoeAllToAll) -> None:
    quantised = SimpleNamespace(quant_dtype=torch.float8_e4m3fn)
    with pytest.raises(UnsupportedError, match="float8_e4m3fn"):
        _prepare(
            _prepare_finalize(one_rank),
            _work(4, 0),
            quant_config=quantised,
            defer_input_quant=False,
        )


def test_experts_that_leave_the_reduction_open_are_refused(one_rank: MoeAllToAll) -> None:
    from vllm.model_executor.layers.fused_moe import topk_weight_and_reduce

    subject = _prepare_finalize(one_rank)
    delegate = topk_weight_and_reduce.TopKWeightAndReduceDelegate()
    for left_open in (_no_op(), delegate):
        experts: Any = SimpleNamespace(
            finalize_weight_and_reduce_impl=lambda impl=left_open: impl,
            workspace_dtype=lambda dtype: dtype,
        )
        if left_open is delegate:
            with pytest.raises(UnsupportedError, match="TopKWeightAndReduceDelegate"):
                subject.post_init_setup(experts)
        else:
            subject.post_init_setup(experts)


def test_finalize_without_prepare(one_rank: MoeAllToAll) -> None:
    rows = torch.zeros(1, HIDDEN_SIZE)
    with pytest.raises(ExchangeStateError, match="without a prepare"):
        _prepare_finalize(one_rank).finalize(rows, rows, None, None, False, _no_op())


def test_one_prepare_serves_one_finalize(one_rank: MoeAllToAll) -> None:
    subject = _prepare_finalize(one_rank)
    work = _work(2, 0)
    rows, _, _, ids, weights = _prepare(subject, work)
    output = torch.empty_like(work.hidden)
    subject.finalize(output, rows, weights, ids, False, _no_op())
    with pytest.raises(ExchangeStateError, match="finalize without a prepare"):
        subject.finalize(output, rows, weights, ids, False, _no_op())


def test_what_vllm_asks(one_rank: MoeAllToAll) -> None:
    import vllm.model_executor.layers.fused_moe.modular_kernel as mk

    subject = _prepare_finalize(one_rank)
    assert subject.activation_format is mk.FusedMoEActivationFormat.Standard
    assert subject.topk_indices_dtype() is torch.int32
    assert subject.max_num_tokens_per_rank() is None
    assert subject.num_dispatchers() == 1
    assert subject.output_is_reduced()
    assert not subject.supports_async()


@pytest.mark.parametrize("ep_size", [1, 2, 3, 4, 7])
def test_placement_is_vllms_own(ep_size: int) -> None:
    for ep_rank in range(ep_size):
        exchange: Any = SimpleNamespace(config=_config(ep_size, ep_rank))
        subject = _prepare_finalize(exchange, _expert_map(exchange.config))
        assert 0 <= subject._first < subject._end <= NUM_EXPERTS


def test_another_placement_is_refused() -> None:
    round_robin = torch.tensor([0, -1, 1, -1, 2, -1, 3], dtype=torch.int32)
    exchange: Any = SimpleNamespace(config=_config(2, 0))
    with pytest.raises(UnsupportedError, match="--expert-placement-strategy"):
        _prepare_finalize(exchange, round_robin)


# Two processes, started once: importing vLLM takes longer than all they do.


def _ragged_rounds(ep_rank: int, ep_size: int) -> list[float]:
    """Largest error per round, of two layers of one geometry in turn."""
    config = _config(ep_size, ep_rank)
    errors = []
    with MoeAllToAll.create(config, dist.group.WORLD) as exchange:
        layers = [_prepare_finalize(exchange, _expert_map(config)) for _ in range(2)]
        for number in range(20):
            # Each rank its own size, none and full included.
            num_tokens = (number * (ep_rank + 2) + 3 * ep_rank) % (CAPACITY + 1)
            work = _work(num_tokens, 100 * number + ep_rank)
            for layer in layers:
                got = _layer(layer, config, work)
                error = (got - _expected(work)).abs().max() if num_tokens else torch.tensor(0.0)
                errors.append(float(error))
    return errors


def _ranks(group: Any) -> Ranks:
    return Ranks(group, group.rank(), group.size(), WORDING)


def _pool(group: Any) -> ExchangePool:
    """A worker's, without vLLM's parallel state behind it."""
    return ExchangePool(_ranks(group), torch.device("cpu"), Options())


def _geometries_and_stats(ep_rank: int, ep_size: int) -> dict[str, Any]:
    """What the pool's counters say after rounds of one of its two geometries."""
    pool = _pool(dist.group.WORLD)
    small = Geometry(NUM_EXPERTS, TOP_K, HIDDEN_SIZE, CAPACITY, torch.float32)
    large = Geometry(11, 2, 64, 2 * CAPACITY, torch.float32)
    first = pool.exchange(small)
    assert pool.exchange(small) is first
    second = pool.exchange(large)
    assert second is not first
    assert second.workspace_bytes == first.workspace_bytes
    layer = _prepare_finalize(first)
    for number in range(3):
        _layer(layer, first.config, _work(CAPACITY, number + 10 * ep_rank))
    pool.close()
    pool.close()
    path = Path(os.environ["MOE_NVLINK_STATS_DIR"], f"rank{ep_rank}.json")
    written: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return written


def _rounds_with_sizes(ep_rank: int, ep_size: int) -> tuple[list[float], list[int]]:
    """Error and bound of each round, if vLLM's ranks have agreed on the sizes of the batches."""
    from vllm import forward_context

    config = _config(ep_size, ep_rank, max_tokens_per_rank=20)
    errors: list[float] = []
    bounds: list[int] = []
    with MoeAllToAll.create(config, dist.group.WORLD) as exchange:

        def spied(*arguments: Any, **more: Any) -> Any:
            bounds.append(more["max_tokens"])
            return MoeAllToAll.dispatch(exchange, *arguments, **more)

        exchange.dispatch = spied  # type: ignore[method-assign]
        layer = _prepare_finalize(exchange, _expert_map(config))
        for number, sizes in enumerate(([3, 9], [1, 0], [20, 0], [16, 16])):
            metadata = forward_context.DPMetadata(torch.tensor(sizes), local_sizes=sizes)
            context = forward_context.ForwardContext({}, {}, {}, metadata)
            work = _work(sizes[ep_rank], 100 * number + ep_rank)
            with forward_context.override_forward_context(context):
                got = _layer(layer, config, work)
            error = (got - _expected(work)).abs()
            errors.append(float(error.max()) if sizes[ep_rank] else 0.0)
    return errors, bounds


def _agreement(ep_rank: int, ep_size: int) -> list[str]:
    """What ranks are told that propose the same, then different scales, then one problem."""
    ranks = _ranks(dist.group.WORLD)
    geometry = Geometry(NUM_EXPERTS, TOP_K, HIDDEN_SIZE, CAPACITY, torch.float32, "nvfp4")
    same = Proposal("layer 5", geometry, 500.0)
    told = []
    for mine in (
        same,
        same._replace(static_scale=500.0 + ep_rank),
        same._replace(problem="no such scale" if ep_rank else None),
    ):
        try:
            ranks.agree(mine)
            told.append("")
        except MoeNvlinkError as error:
            told.append(f"{type(error).__name__}: {error}")
    return told


def _shared_lm_head(ep_rank: int, ep_size: int) -> tuple[list[int], list[int], str, int]:
    """Tokens of a head that two processes share, as they should be, a refusal, and the rounds."""
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    from moe_nvlink_plugin.integration.vllm.draft.logits_processor import plan_of, refuse_unfit

    here = torch.device("cpu")
    heads = DraftHeads(_ranks(dist.group.WORLD), here)
    head = heads.head(lambda: plan_of(_drafting(ep_size), VOCAB, ep_size, here), refuse_unfit)
    assert head is not None
    random = torch.Generator().manual_seed(5)
    weight = torch.randn(VOCAB + 28, HIDDEN_SIZE, generator=random)
    lm_head = SimpleNamespace(weight=weight, quant_method=UnquantizedEmbeddingMethod())
    found, wanted = [], []
    for step in range(6):
        busy = step % 3 != ep_rank  # both, one, the other
        head.forward_ran(CAPACITY)
        if not busy:
            head.serve_idle(lm_head)
            continue
        rows = torch.randn(1 + step % CAPACITY, HIDDEN_SIZE, generator=random)
        bound = head.next_bound()
        assert bound is not None
        found += head.tokens(lm_head, rows, None, bound, soft_cap=None, scale=1.0).tolist()
        wanted += (rows @ weight[:VOCAB].T).argmax(dim=-1).tolist()
    rounds = head.stats()["rounds"]
    told = ""
    try:
        other = _drafting(ep_size, CAPACITY + ep_rank)
        heads.head(lambda: plan_of(other, VOCAB, ep_size, here), refuse_unfit)
    except MoeNvlinkError as error:
        told = f"{type(error).__name__}: {error}"
    heads.close()
    return found, wanted, told, rounds


def _drafting(size: int, most_rows: int = CAPACITY) -> Any:
    """As much of vLLM's configuration as a draft's head is planned from."""
    return SimpleNamespace(
        additional_config={"moe_nvlink": {"mtp_lm_head_tp_size": size}},
        model_config=SimpleNamespace(dtype=torch.float32),
        scheduler_config=SimpleNamespace(max_num_seqs=most_rows),
        speculative_config=SimpleNamespace(
            method="mtp",
            draft_sample_method="greedy",
            use_local_argmax_reduction=True,
            draft_model_config=SimpleNamespace(get_hidden_size=lambda: HIDDEN_SIZE),
        ),
    )


def _absent_peer(ep_rank: int, ep_size: int) -> tuple[str, float]:
    """What rank 0 is told when rank 1 skips a round, and after how long."""
    config = _config(ep_size, ep_rank, timeout_s=2.0)
    exchange = MoeAllToAll.create(config, dist.group.WORLD)
    layer = _prepare_finalize(exchange)
    _layer(layer, config, _work(2, ep_rank))
    message, started = "", time.monotonic()
    if ep_rank == 0:
        try:
            _layer(layer, config, _work(2, 7))
        except ExchangeTimeoutError as error:
            message = str(error)
    waited = time.monotonic() - started
    dist.barrier()
    exchange.close()
    return message, waited


SCENARIOS = (
    *(_ragged_rounds, _rounds_with_sizes, _geometries_and_stats, _agreement, _shared_lm_head),
    _absent_peer,
)


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


def test_ranks_set_a_layer_up_alike_or_not_at_all(results: list[dict[str, Any]]) -> None:
    for rank, result in enumerate(results):
        same, scales, problem = result["_agreement"]
        assert same == ""
        assert scales.startswith("UnsupportedError")
        assert "rank 0 has 500.0, rank 1 has 501.0" in scales
        # The rank that has it raises its own, outside.
        assert problem == "" if rank else "PeerError: layer 5" in problem
        assert rank or "rank 1: no such scale" in problem


def test_processes_share_a_drafts_lm_head(results: list[dict[str, Any]]) -> None:
    for result in results:
        found, wanted, told, rounds = result["_shared_lm_head"]
        assert found == wanted != []
        assert rounds == 6
        assert told.startswith("DisagreementError: the ranks would share the draft's LM head")
        assert "rank 0: Plan(size=2" in told
        assert "rank 1: Plan(size=2" in told


def test_a_rank_that_does_not_come_is_named(results: list[dict[str, Any]]) -> None:
    message, waited = results[0]["_absent_peer"]
    assert "for rank(s) 1;" in message
    assert 1.5 < waited < 10
