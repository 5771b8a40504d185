"""benchmarks/collectivex.py against the interface that was recorded, on CPU ranks."""

from __future__ import annotations

import abc
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks import collectivex
from benchmarks.collectivex import RECORDED
from tests.support.ranks import run_processes

EP_SIZE, TOKENS, HIDDEN, TOP_K, EXPERTS = 2, 5, 256, 3, 8


def recorded_base(**changed: Any) -> type:
    """A base class with nothing but the recorded interface; `changed` members differ from it."""
    made: dict[str, Any] = dict.fromkeys(RECORDED.attributes)
    for name, parameters in {**RECORDED.abstract, **RECORDED.provided}.items():
        scope: dict[str, Any] = {}
        exec(f"def {name}({', '.join(('self', *parameters))}): return {parameters!r}", scope)
        abstract = name in RECORDED.abstract
        made[name] = abc.abstractmethod(scope[name]) if abstract else scope[name]
    made["__init__"] = _initialise
    made["finalize"] = lambda self, rc: rc
    return abc.ABCMeta("EPBackend", (), made | changed)


def _initialise(
    self: Any, args: Any, rank: int, world_size: int, local_rank: int, device: Any
) -> None:
    self.args, self.rank, self.world_size, self.device = args, rank, world_size, device
    self.precision = args.precision


def test_every_recorded_method_is_implemented_with_its_parameters() -> None:
    made = collectivex.backend_class(recorded_base())
    assert made.__abstractmethods__ == frozenset()  # type: ignore[attr-defined]
    # With the abstract ones left out of the base, what is there is ours alone.
    for name in (*RECORDED.abstract, "semantic_payload", "_topk_idx_dtype"):
        assert name in vars(collectivex.Transport)
    assert set(RECORDED.attributes) - {"dispatch_value_bytes"} - set(
        vars(collectivex.Transport)
    ) == {"dispatch_dtype", "dispatch_scale_bytes_per_copy"}  # bf16's are the base's


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"stage": lambda self, problem: None}, r"stage\('problem',\) instead of"),
        ({"flush": abc.abstractmethod(lambda self: None)}, "flush is abstract"),
    ],
)
def test_a_checkout_with_another_interface_is_refused(changed: Any, message: str) -> None:
    with pytest.raises(collectivex.InterfaceError, match=message) as refused:
        collectivex.backend_class(recorded_base(**changed))
    assert RECORDED.commit in str(refused.value)


def test_a_folder_without_the_benchmark_is_refused(tmp_path: Path) -> None:
    with pytest.raises(collectivex.InterfaceError, match=r"bench/ep_backend\.py"):
        collectivex.main(["--checkout", str(tmp_path)])


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows, ids and weights of all ranks; one token goes to rank 0 alone."""
    generator = torch.Generator().manual_seed(1)
    tokens = EP_SIZE * TOKENS
    ids = torch.stack([torch.randperm(EXPERTS, generator=generator) for _ in range(tokens)])
    ids[2, :TOP_K] = torch.arange(TOP_K)
    x = torch.randn(tokens, HIDDEN, generator=generator).to(torch.bfloat16)
    return x, ids[:, :TOP_K].contiguous(), torch.rand(tokens, TOP_K, generator=generator)


def one_case(rank: int, ep_size: int, precision: str) -> dict[str, Any]:
    """Their sequence on one rank: buffer, dispatch, inspect, combine; then a plain pair."""
    args = types.SimpleNamespace(hidden=HIDDEN, topk=TOP_K, experts=EXPERTS, precision=precision)
    made = collectivex.backend_class(recorded_base())
    backend: Any = made(args, rank, ep_size, rank, torch.device("cpu"))
    backend.create_buffer(types.SimpleNamespace(max_tokens_per_rank=TOKENS + 2))
    x, ids, weights = (
        tensor[rank * TOKENS : (rank + 1) * TOKENS].contiguous() for tensor in inputs()
    )
    problem = types.SimpleNamespace(
        dispatch_x=x, topk_idx=ids.to(backend._topk_idx_dtype()), topk_weights=weights
    )
    handle = backend.dispatch(problem)
    view = backend.inspect_dispatch(problem, handle)
    received = backend.recv_tokens(handle)
    weighted = view.payload * view.weights.sum(dim=1, keepdim=True).to(torch.bfloat16)
    transformed = backend.combine_transformed(problem, handle, weighted)
    again = backend.dispatch(problem)
    backend.stage(problem, again)
    pair = backend.combine(problem, again)
    semantic = backend.semantic_payload(x)
    code = backend.finalize(3)
    dist.barrier()
    return {
        "view": vars(view),
        "received": received,
        "transformed": transformed,
        "pair": pair,
        "semantic": semantic,
        "code": code,
        "bytes": getattr(backend, "dispatch_scale_bytes_per_copy", None),
    }


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_their_sequence_on_cpu_ranks(precision: str, tmp_path: Path) -> None:
    ranks = run_processes(EP_SIZE, one_case, tmp_path, precision)
    _x, ids, weights = inputs()
    semantic = torch.cat([rank["semantic"] for rank in ranks])
    owner = ids // (EXPERTS // EP_SIZE)
    sums = torch.zeros(EP_SIZE * TOKENS, HIDDEN)
    for number, rank in enumerate(ranks):
        local = owner == number
        sources = local.any(dim=1)
        view = rank["view"]
        assert rank["received"] == int(sources.sum())
        assert torch.equal(view["payload"], semantic[sources])  # sources stay in order
        expected = ids.masked_fill(~local, -1)[sources]
        assert torch.equal(view["expert_ids"], expected)
        share = weights.masked_fill(~local, 0.0)
        assert torch.equal(view["weights"], share[sources])
        counts = torch.bincount(ids[local], minlength=EXPERTS)
        first = number * (EXPERTS // EP_SIZE)
        assert torch.equal(view["local_expert_counts"], counts[first : first + EXPERTS // EP_SIZE])
        sums += (semantic * share.sum(dim=1, keepdim=True).to(torch.bfloat16)).float()
        assert rank["code"] == 3
        assert rank["bytes"] == (HIDDEN // 128 * 4 if precision == "fp8" else None)
    transformed = torch.cat([rank["transformed"] for rank in ranks])
    assert torch.equal(transformed, sums.to(torch.bfloat16))
    # Every rank that a token went to sends it back once.
    fanout = torch.stack([(owner == n).any(dim=1) for n in range(EP_SIZE)]).sum(dim=0)
    pair = torch.cat([rank["pair"] for rank in ranks])
    assert torch.equal(pair, (semantic.float() * fanout[:, None]).to(torch.bfloat16))
    assert set(fanout.tolist()) == {1, 2}


def test_what_arrives_in_fp8_differs_from_what_was_sent() -> None:
    """Else the case above would not show that anything was quantised."""
    args = types.SimpleNamespace(hidden=HIDDEN, topk=TOP_K, experts=EXPERTS, precision="fp8")
    made = collectivex.backend_class(recorded_base())
    backend: Any = made(args, 0, EP_SIZE, 0, torch.device("cpu"))
    x = inputs()[0]
    arrived = backend.semantic_payload(x)
    assert not torch.equal(arrived, x)
    assert torch.allclose(arrived.float(), x.float(), rtol=0.07, atol=0.02)
