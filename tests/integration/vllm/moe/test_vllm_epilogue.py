"""Combine that ends a layer: it scales, and adds the shared experts' output.

Ranks are threads. On CPU ranks the layer is vLLM's from its runner to its experts. For CUDA ranks,
vLLM's shared experts run on recorded streams.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.fused_moe.fused_moe_modular_method import FusedMoEModularMethod
from vllm.model_executor.layers.fused_moe.runner import shared_experts

from moe_nvlink_plugin import MoeAllToAll
from moe_nvlink_plugin.integration.vllm.moe import layers, prepare_finalize
from moe_nvlink_plugin.integration.vllm.moe.method import MoeNvlinkFusedMoEMethod
from moe_nvlink_plugin.testing import ThreadGroup, run_ranks
from tests.integration.vllm import vllm_runner
from tests.integration.vllm.moe import vllm_experts
from tests.integration.vllm.moe.vllm_experts import HIDDEN_SIZE, NUM_EXPERTS, TOP_K, Weights, tokens
from tests.integration.vllm.moe.vllm_layer import (
    Experts,
    alone,
    dense,
    take_cuda_branches,
    work_of,
)

EP_SIZE, SCALE = 2, 2.5


# The decision.


def _runner(**changed: Any) -> Any:
    """A layer that combine can end, but for what is changed."""
    method = object.__new__(MoeNvlinkFusedMoEMethod)
    moe = {
        "hidden_dim": 128,
        "hidden_dim_unpadded": 128,
        "in_dtype": torch.bfloat16,
        "is_sequence_parallel": False,
    }
    runner = {
        "shared_experts": "some",
        "routed_scaling_factor": SCALE,
        "routed_output_transform": None,
        "routed_input_transform": None,
        "routed_experts": SimpleNamespace(quant_method=changed.pop("method", method)),
    }
    moe |= {name: changed.pop(name) for name in moe.keys() & changed.keys()}
    return SimpleNamespace(moe_config=SimpleNamespace(**moe), **(runner | changed))


UNSCALED: dict[str, Any] = {"routed_scaling_factor": 1.0}


@pytest.mark.parametrize(
    ("changed", "tp_size", "reason"),
    [
        ({}, 1, ""),
        ({"shared_experts": None}, 1, ""),
        (UNSCALED, 1, ""),
        (UNSCALED | {"shared_experts": None}, 1, "no shared experts and no routed scaling factor"),
        ({"method": 7}, 1, "its method is int"),
        ({"routed_output_transform": "one"}, 1, "a transform of the routed output"),
        ({"routed_input_transform": "one"}, 1, "other rows than the routed experts"),
        ({}, 2, "tensor-parallel ranks must sum"),
        ({"shared_experts": None}, 2, ""),
        ({"is_sequence_parallel": True}, 2, ""),
        ({"hidden_dim": 256}, 1, "rows of 128 elements are padded to 256"),
        ({"in_dtype": torch.float16}, 1, "in float16"),
        ({"in_dtype": torch.float16, "shared_experts": None}, 1, ""),
        (UNSCALED | {"in_dtype": torch.float16}, 1, ""),
    ],
)
def test_which_layers_combine_ends(
    changed: dict[str, Any], tp_size: int, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "get_tensor_model_parallel_world_size", lambda: tp_size)
    told = layers.why_not(_runner(**changed))
    assert reason in told
    assert bool(told) == bool(reason)


def test_the_op_writes_none_of_its_inputs() -> None:
    """torch.compile would copy inputs for an op that writes them, as vLLM's with one output."""
    named = (layers.OP_NAME, "moe_forward")
    ours, theirs = (getattr(torch.ops.vllm, name).default._schema for name in named)
    assert theirs.is_mutable
    assert not ours.is_mutable
    assert [a.name for a in ours.arguments] == [a.name for a in theirs.arguments]


# CPU ranks.


def shared_module(dtype: torch.dtype) -> torch.nn.Module:
    """Shared experts, equal on all ranks."""
    made = torch.nn.Linear(HIDDEN_SIZE, HIDDEN_SIZE, bias=False, dtype=dtype)
    random = torch.Generator().manual_seed(5)
    made.weight.data = torch.randn(HIDDEN_SIZE, HIDDEN_SIZE, generator=random).to(dtype) / 8
    return made


class CpuLayer:
    """One rank's layer of vLLM's classes and ours."""

    def __init__(
        self,
        group: ThreadGroup,
        dtype: torch.dtype = torch.float32,
        shared: bool = True,
        scale: float = SCALE,
    ) -> None:
        vllm_experts.join(group)
        self.routed = vllm_experts.make_layer(group.rank, group.size, dtype)
        self.shared = shared_module(dtype) if shared else None
        name = f"layer of rank {group.rank}"
        self.runner = vllm_runner.make_runner(self.routed, name, self.shared, scale)
        Weights(0, dtype).load(self.routed)
        self.routed.quant_method.process_weights_after_loading(self.routed)

    @property
    def op(self) -> str:
        """The op that a forward of the layer is."""
        return str(self.runner._forward_entry)


def of_one_rank(dtype: torch.dtype, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens whose experts are all on one rank: their sum is one row, and nothing rounds it."""
    hidden, _, weights = tokens(7, seed=rank, dtype=dtype)
    local = torch.arange(TOP_K, dtype=torch.int32)
    first = torch.arange(7, dtype=torch.int32) % EP_SIZE * (NUM_EXPERTS // EP_SIZE)
    return hidden, first[:, None] + local, weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("shared", "scale"), [(True, SCALE), (True, 1.0), (False, SCALE)])
def test_the_result_is_rounded_once(
    shared: bool, scale: float, dtype: torch.dtype, cpu_layers: None
) -> None:
    def rank_main(group: ThreadGroup) -> tuple[str, torch.Tensor, torch.Tensor]:
        layer = CpuLayer(group, dtype, shared, scale)
        work = of_one_rank(dtype, group.rank)
        routed = vllm_experts.run(layer.routed, *work)
        wanted = routed.float() * scale
        if layer.shared is not None:
            wanted = wanted + layer.shared(work[0]).float()
            if scale != 1.0 and dtype == torch.bfloat16:  # what vLLM's own steps make of it
                thrice = routed * scale + layer.shared(work[0])
                assert not torch.equal(thrice, wanted.to(dtype))
        before = [one.clone() for one in work]
        got = vllm_runner.forward(layer.runner, *work)
        # The op's schema says that it writes none of its inputs, and returns none of them.
        assert all(map(torch.equal, work, before))
        assert got.data_ptr() not in [one.data_ptr() for one in work]
        if layer.shared is not None:
            assert layer.runner.shared_experts._output == [None, None]
        return layer.op, got, wanted.to(dtype)

    for op, got, wanted in run_ranks(EP_SIZE, rank_main):
        assert op == "vllm.moe_nvlink_forward"
        assert torch.equal(got, wanted)


def test_a_layer_without_either_stays_as_it_is(
    cpu_layers: None, caplog: pytest.LogCaptureFixture
) -> None:
    def rank_main(group: ThreadGroup) -> None:
        layer, work = CpuLayer(group, shared=False, scale=1.0), tokens(3, seed=group.rank)
        got = vllm_runner.forward(layer.runner, *work)
        torch.testing.assert_close(got, Weights(0).dense(*work))

    with caplog.at_level(logging.DEBUG, "moe_nvlink_plugin"):
        run_ranks(EP_SIZE, rank_main)
    told = [record.message for record in caplog.records if "combine of" in record.message]
    assert sorted(told) == [
        f"combine of layer of rank {rank} only sums: there are no shared experts and no routed "
        "scaling factor"
        for rank in range(EP_SIZE)
    ]


def test_float16_goes_vllms_way(cpu_layers: None) -> None:
    """vLLM divides the shared experts' output; the decoder layer multiplies later."""

    def rank_main(group: ThreadGroup) -> tuple[str, torch.Tensor, torch.Tensor]:
        layer, work = CpuLayer(group, torch.float16), of_one_rank(torch.float16, group.rank)
        assert layer.shared is not None
        routed = vllm_experts.run(layer.routed, *work)
        wanted = layer.shared(work[0]) * (1 / SCALE) + routed
        return layer.op, vllm_runner.forward(layer.runner, *work), wanted

    for op, got, wanted in run_ranks(EP_SIZE, rank_main):
        assert op == "vllm.moe_forward_shared"
        torch.testing.assert_close(got, wanted)


def test_a_method_that_replaces_ours_ends_layers_itself(cpu_layers: None) -> None:
    """As vLLM's LoRA does it, around our kernel."""

    def rank_main(group: ThreadGroup) -> None:
        layer, work = CpuLayer(group), tokens(3, seed=group.rank)
        before = vllm_runner.forward(layer.runner, *work)
        method = layer.routed.quant_method
        layer.runner._replace_quant_method(FusedMoEModularMethod(method, method.moe_kernel))
        assert layer.op == "vllm.moe_forward_shared"
        torch.testing.assert_close(vllm_runner.forward(layer.runner, *work), before)
        layer.runner._replace_quant_method(method)
        assert layer.op == "vllm.moe_nvlink_forward"
        assert torch.equal(vllm_runner.forward(layer.runner, *work), before)

    run_ranks(EP_SIZE, rank_main)


def test_an_exception_leaves_nothing_to_the_next_forward(cpu_layers: None) -> None:
    def rank_main(group: ThreadGroup) -> None:
        layer, work = CpuLayer(group), tokens(3, seed=group.rank)
        before = vllm_runner.forward(layer.runner, *work)
        select = layer.runner.router.select_experts

        def fail(**_given: Any) -> Any:
            assert layer.runner.shared_experts._output[0] is not None  # already computed
            assert prepare_finalize.current_epilogue().scale == SCALE
            raise RuntimeError("no experts today")

        layer.runner.router.select_experts = fail
        with pytest.raises(RuntimeError, match="no experts today"):
            vllm_runner.forward(layer.runner, *work)
        assert layer.runner.shared_experts._output == [None, None]
        assert prepare_finalize.current_epilogue() is prepare_finalize.SUM_ONLY
        layer.runner.router.select_experts = select
        assert torch.equal(vllm_runner.forward(layer.runner, *work), before)

    run_ranks(EP_SIZE, rank_main)


# Streams of CUDA ranks.


class Stream:
    """A stream that does what it is told at once, and keeps a record."""

    current: Stream

    def __init__(self, name: str, done: list[str]) -> None:
        self.name, self.done = name, done

    def runs(self, what: str) -> None:
        self.done.append(f"{self.name}: {what}")


class Event:
    """One of vLLM's two events per micro-batch, in the order in which it makes them."""

    made = 0

    def __init__(self) -> None:
        self.name = ("input", "input", "output", "output")[Event.made % 4]
        Event.made += 1

    def record(self, stream: Stream) -> None:
        stream.runs(f"{self.name} is ready")

    def wait(self, stream: Stream) -> None:
        stream.runs(f"waits for {self.name}")


@contextlib.contextmanager
def _on(stream: Stream) -> Iterator[None]:
    before, Stream.current = Stream.current, stream
    yield
    Stream.current = before


class _Shared(torch.nn.Module):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        Stream.current.runs("shared experts")
        return rows + 1


class _Experts(Experts):
    def apply(self, **given: Any) -> None:
        Stream.current.runs("experts")
        super().apply(**given)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What the main stream and vLLM's stream for shared experts have done."""
    take_cuda_branches(monkeypatch.setattr)
    done: list[str] = []
    main, side = Stream("main", done), Stream("side", done)
    monkeypatch.setattr(Stream, "current", main, raising=False)
    cuda = SimpleNamespace(is_cuda_alike=lambda: True)
    monkeypatch.setattr(shared_experts, "current_platform", cuda)
    monkeypatch.setattr(shared_experts, "aux_stream", lambda: side)
    monkeypatch.setattr(shared_experts, "current_stream", lambda: Stream.current)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", _on)
    for verb in ("dispatch", "combine"):
        monkeypatch.setattr(MoeAllToAll, verb, _noted(verb, getattr(MoeAllToAll, verb)))
    with set_current_vllm_config(VllmConfig()), vllm_runner.forwards_of_vllm(monkeypatch):
        # vLLM's CPU platform has just set it.
        monkeypatch.setenv("VLLM_DISABLE_SHARED_EXPERTS_STREAM", "0")
        yield done


def _noted(verb: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def run(*given: Any, **more: Any) -> Any:
        Stream.current.runs(verb)
        return original(*given, **more)

    return run


def _one_forward(shared: bool = True) -> None:
    hidden, ids, weights = work_of(4, 0)
    with alone(experts=_Experts()) as layer:
        routed = vllm_runner.Routed(layer)
        runner = vllm_runner.make_runner(routed, "layer 3", _Shared() if shared else None, SCALE)
        routed.install()
        got = vllm_runner.forward(runner, hidden, ids, weights)
    wanted = dense(hidden, ids, weights) * SCALE + (hidden + 1 if shared else 0)
    torch.testing.assert_close(got, wanted)


def test_only_combine_waits_for_the_side_stream(streams: list[str]) -> None:
    """Dispatch and the experts are on their way while the shared experts run."""
    _one_forward()
    assert streams == [
        "main: input is ready",
        "side: waits for input",
        "side: shared experts",
        "side: output is ready",
        "main: dispatch",
        "main: experts",
        "main: waits for output",
        "main: combine",
    ]


def test_batches_above_vllms_threshold_need_no_side_stream(
    streams: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_SHARED_EXPERTS_STREAM_TOKEN_THRESHOLD", "3")
    _one_forward()
    assert streams == ["main: shared experts", "main: dispatch", "main: experts", "main: combine"]


def test_without_shared_experts_nobody_waits(streams: list[str]) -> None:
    _one_forward(shared=False)
    assert streams == ["main: dispatch", "main: experts", "main: combine"]
