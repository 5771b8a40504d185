"""Both halves of prepare and finalize: through vLLM's modular kernel, beside shared experts and
between the threads of vLLM's two micro-batches.

vLLM's micro-batches keep their state in globals of the process, so each rank is a process. The
kernel takes its CUDA branch, on CPU tensors; what vLLM's threads ask of GPU streams has stand-ins.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm import forward_context
from vllm.v1.worker import ubatching

from moe_nvlink_plugin import InFlight, MoeAllToAll
from moe_nvlink_plugin.errors import InputError
from moe_nvlink_plugin.groups import as_group
from moe_nvlink_plugin.integration.common.options import Options
from moe_nvlink_plugin.recipes import FP8_BLOCK, NVFP4
from moe_nvlink_plugin.testing import ThreadGroup, run_ranks
from tests.integration.vllm import vllm_runner
from tests.integration.vllm.moe import vllm_experts
from tests.integration.vllm.moe.test_vllm_epilogue import SCALE, CpuLayer, of_one_rank
from tests.integration.vllm.moe.test_vllm_quantised import experts_of
from tests.integration.vllm.moe.vllm_layer import (
    CAPACITY,
    Layer,
    alone,
    take_cuda_branches,
    work_of,
)
from tests.support.ranks import run_processes

NUM_LAYERS = 3
#: How rows travel there and back.
FORMATS = ((None, Options()), (FP8_BLOCK, Options()), (NVFP4, Options(combine="fp8_block")))


# Two micro-batches.


def forward(layer: Layer, work: Any, compute: Callable[[], None]) -> torch.Tensor:
    """What a model does with a layer: other work, the layer, other work, ..."""
    hidden: torch.Tensor = work[0]
    for _ in range(NUM_LAYERS):
        compute()
        hidden = layer(hidden, *work[1:]) + 1
    return hidden


def _noted(log: list[str], layer: Layer) -> None:
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
    _noted(log, layer)
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


# Shared experts, on CPU ranks, whose layer is vLLM's from its runner to its experts.


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
        return bool(layer.routed.quant_method.mk_can_overlap_shared_experts)

    assert run_ranks(2, rank_main) == [True, True]
    assert "adds nothing, because the shared experts run beside it" in caplog.text
