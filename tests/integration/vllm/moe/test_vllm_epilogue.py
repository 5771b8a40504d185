"""Combine that ends a layer: it scales, and adds the shared experts' output. What runs beside it.

On CPU ranks, which are threads, the layer is vLLM's from its runner to its experts. For CUDA ranks,
vLLM's shared experts run on recorded streams.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import forward_context
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.fused_moe.fused_moe_modular_method import FusedMoEModularMethod
from vllm.model_executor.layers.fused_moe.runner import shared_experts
from vllm.v1.worker import ubatching

from moe_nvlink_plugin import InFlight, MoeAllToAll
from moe_nvlink_plugin.errors import InputError
from moe_nvlink_plugin.groups import as_group
from moe_nvlink_plugin.integration.common.options import Options
from moe_nvlink_plugin.integration.vllm.moe import layers, prepare_finalize
from moe_nvlink_plugin.integration.vllm.moe.method import MoeNvlinkFusedMoEMethod
from moe_nvlink_plugin.recipes import FP8_BLOCK, NVFP4
from moe_nvlink_plugin.testing import ThreadGroup, run_ranks
from tests.integration.vllm import vllm_runner
from tests.integration.vllm.moe import vllm_experts
from tests.integration.vllm.moe.test_vllm_quantised import experts_of
from tests.integration.vllm.moe.vllm_experts import HIDDEN_SIZE, NUM_EXPERTS, TOP_K, Weights, tokens
from tests.integration.vllm.moe.vllm_layer import (
    CAPACITY,
    Experts,
    Layer,
    alone,
    dense,
    take_cuda_branches,
    work_of,
)
from tests.support.ranks import run_processes

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
        assert layer.op == "vllm.moe_forward"  # opaque here too, where vLLM's own is traced into
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


# Shared experts beside combine.


@pytest.mark.parametrize("scale", [SCALE, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shared_experts_run_beside_combine(
    dtype: torch.dtype, scale: float, cpu_layers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Combine rounds the scaled sum, and the receiver rounds again when it adds their output."""
    logs: dict[int, list[str]] = {0: [], 1: []}
    start = MoeAllToAll.combine_async

    def noted(self: MoeAllToAll, *given: Any, **more: Any) -> InFlight[torch.Tensor]:
        log = logs[self.config.ep_rank]
        in_flight = start(self, *given, **more)
        log.append("combine")

        def wait() -> torch.Tensor:
            log.append("wait")
            return in_flight.wait()

        return InFlight(wait)

    monkeypatch.setattr(MoeAllToAll, "combine_async", noted)

    def rank_main(group: ThreadGroup) -> tuple[torch.Tensor, torch.Tensor]:
        layer = CpuLayer(group, dtype, True, scale)
        assert layer.shared is not None
        work = of_one_rank(dtype, group.rank)
        routed = vllm_experts.run(layer.routed, *work)  # a sum of one row, which nothing rounds
        wanted = (routed.float() * scale).to(dtype) + layer.shared(work[0])
        assert not logs[group.rank]
        method = layer.routed.quant_method
        method.moe_kernel.prepare_finalize.overlaps_shared_experts = True
        layer.shared.register_forward_hook(lambda *_: logs[group.rank].append("shared"))
        got = vllm_runner.forward(layer.runner, *work)
        assert layer.runner.shared_experts._output == [None, None]
        return got, wanted

    for got, wanted in run_ranks(2, rank_main):
        assert torch.equal(got, wanted)
    assert list(logs.values()) == [["combine", "shared", "wait"]] * 2


def test_the_option_reaches_the_layers(
    cpu_layers: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(vllm_experts, "Options", lambda: Options(overlap_shared_experts=True))
    caplog.set_level("DEBUG", "moe_nvlink_plugin")

    def rank_main(group: ThreadGroup) -> bool:
        layer = CpuLayer(group)
        method = layer.routed.quant_method
        assert method.moe_kernel.prepare_finalize._exchange.config.leave_sms
        return bool(method.mk_can_overlap_shared_experts)

    assert run_ranks(2, rank_main) == [True, True]
    assert "adds nothing, because the shared experts run beside it" in caplog.text


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


# Between the threads of vLLM's two micro-batches. They keep their state in globals of the process,
# so each rank is one. The kernel takes its CUDA branch, on CPU tensors; what vLLM's threads ask of
# GPU streams has stand-ins.

NUM_LAYERS = 3
#: How rows travel there and back.
FORMATS = ((None, Options()), (FP8_BLOCK, Options()), (NVFP4, Options(combine="fp8_block")))


def forward(layer: Layer, work: Any, compute: Callable[[], None]) -> torch.Tensor:
    """What a model does with a layer: other work, the layer, other work, ..."""
    hidden: torch.Tensor = work[0]
    for _ in range(NUM_LAYERS):
        compute()
        hidden = layer(hidden, *work[1:]) + 1
    return hidden


def _note_verbs(log: list[str], layer: Layer) -> None:
    """Notes when verbs start and end, by channel."""
    exchange, experts = layer.exchange, layer.experts
    starts = {verb: getattr(exchange, f"{verb}_async") for verb in ("dispatch", "combine")}

    def note(verb: str) -> Callable[..., Any]:
        def start(*given: Any, **more: Any) -> InFlight[Any]:
            channel = ubatching.dbo_current_ubatch_id()
            in_flight = starts[verb](*given, **more)
            log.append(f"{verb} {channel}")

            def wait() -> Any:
                result = in_flight.wait()
                log.append(f"{verb} {channel} done")
                return result

            return InFlight(wait)

        return start

    for verb in starts:
        setattr(exchange, f"{verb}_async", note(verb))
    apply = experts.apply

    def noted_apply(**given: Any) -> None:
        log.append(f"compute {ubatching.dbo_current_ubatch_id()}")
        apply(**given)

    setattr(experts, "apply", noted_apply)  # noqa: B010 - to the type checker it is no variable


def _contexts(sizes: list[list[int]]) -> tuple[list[Any], threading.Barrier]:
    """vLLM's contexts of two micro-batches; sizes: of every rank, by micro-batch."""
    stream, ready = object(), threading.Barrier(3)
    ubatching.current_stream = lambda: stream
    setattr(torch, "Event", object)  # noqa: B010 - to the type checker it is no variable
    known = [
        SimpleNamespace(
            dp_metadata=SimpleNamespace(local_sizes=one), is_padding=None, all_moe_layers=None
        )
        for one in sizes
    ]
    return ubatching.make_ubatch_contexts(2, stream, object(), known, ready), ready


def _run_both(layer: Layer, works: list[Any], sizes: list[list[int]], log: list[str]) -> list[Any]:
    """As vLLM's UBatchWrapper does it: a thread for each micro-batch."""
    contexts, ready = _contexts(sizes)

    def main(context: Any, work: Any) -> torch.Tensor:
        with context:
            return forward(layer, work, lambda: log.append(f"compute {context.id}"))

    with ThreadPoolExecutor(2) as pool:
        outputs = pool.map(main, contexts, works)
        ready.wait(60)
        contexts[0].cpu_wait_event.set()
    forward_context._forward_context = None
    return list(outputs)


def _format_body(group: Any, recipe: Any, options: Options) -> tuple[list[bool], list[str]]:
    experts = None if recipe is None else experts_of(recipe)
    # One thread: slots in the order of tokens, so that the experts add in the same order twice.
    values: dict[str, Any] = {"num_channels": 2, "num_threads": 1}
    layer = Layer(group, experts=experts, options=options, **values)
    sizes = [[CAPACITY, 3], [2, CAPACITY - 1]]
    works = [work_of(sizes[batch][group.rank], 10 * batch + group.rank) for batch in range(2)]
    alone = [forward(layer, work, lambda: None) for work in works]
    log: list[str] = []
    _note_verbs(log, layer)
    together = _run_both(layer, works, sizes, log)
    same = [torch.equal(one, two) for one, two in zip(alone, together, strict=True)]
    again = [
        torch.equal(forward(layer, w, lambda: None), o) for w, o in zip(works, alone, strict=True)
    ]
    layer.close()
    return [*same, *again], log


def micro_batches_body(rank: int, size: int) -> list[tuple[list[bool], list[str]]]:
    take_cuda_branches(setattr)
    group = as_group(torch.distributed.group.WORLD, 60)
    return [_format_body(group, *one) for one in FORMATS]


def test_micro_batches_hide_each_others_verbs(tmp_path: Path) -> None:
    """Bits as of one batch after the other; between start and end of a verb the other works."""
    for results in run_processes(2, micro_batches_body, tmp_path):
        for same, log in results:
            assert all(same)
            for verb in ("dispatch", "combine"):
                for channel in (0, 1):
                    _check_hidden(log, verb, channel)


def _check_hidden(log: list[str], verb: str, channel: int) -> None:
    starts = [at for at, what in enumerate(log) if what == f"{verb} {channel}"]
    ends = [at for at, what in enumerate(log) if what == f"{verb} {channel} done"]
    assert len(starts) == len(ends) == NUM_LAYERS
    for number, (start, end) in enumerate(zip(starts, ends, strict=True)):
        assert start < end
        is_last = channel == 1 and verb == "combine" and number == NUM_LAYERS - 1
        assert is_last or f"compute {1 - channel}" in log[start:end], (start, end, log)


def test_a_micro_batch_needs_its_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    take_cuda_branches(monkeypatch.setattr)
    monkeypatch.setattr(ubatching, "_THREAD_ID_TO_CONTEXT", {threading.get_ident(): 1})
    contexts = [None, SimpleNamespace(recv_hook=None)]
    monkeypatch.setattr(ubatching, "_CURRENT_CONTEXTS", contexts)
    with alone() as layer, pytest.raises(InputError, match="channel"):
        layer(*work_of(3, 0))
