"""The parts of SGLang's dispatchers that need no exchange: routing, streams, runners, aliases."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_nvlink_plugin.errors import UnsupportedError
from moe_nvlink_plugin.integration.common.options import Options
from tests.integration.sglang import sglang_stand_in
from tests.integration.sglang.sglang_layer import WORDING, work_of

with sglang_stand_in.importable():
    from sglang.srt.layers.moe import topk as sglang_topk
    from sglang.srt.layers.moe.moe_runner.base import FusedOpPool, register_fused_func

    from moe_nvlink_plugin.integration.sglang import draft
    from moe_nvlink_plugin.integration.sglang.moe import forms, fused, routing, runners, streams


# Routing.


def test_sorted_routes_are_those_of_a_loop() -> None:
    _, ids, weights = work_of(23, 4)
    routes = routing.sorted_routes(ids, weights, 8)
    expected = sorted(
        (max(int(expert), 0), place) for place, expert in enumerate(ids.flatten().tolist())
    )
    assert routes.order.tolist() == [place for _, place in expected]
    counts = [sum(expert == e for expert, _ in expected) for e in range(8)]
    assert routes.counts.tolist() == counts
    for place, weight in zip(routes.order.tolist(), routes.weights.tolist(), strict=True):
        row, k = divmod(place, ids.shape[1])
        assert weight == (0.0 if ids[row, k] < 0 else float(weights[row, k]))


@pytest.mark.parametrize("num_padding", [0, 2])
def test_sorted_routes_are_read_back(num_padding: int) -> None:
    """Of a padded batch, entries after the last route hold anything."""
    _, ids, weights = work_of(7, 4)
    ids = ids.abs()
    sorted_ = routing.sorted_routes(ids, weights, 8)
    top_k = ids.shape[1]
    garbage = torch.full((num_padding * top_k,), -12345, dtype=torch.int32)
    order = torch.cat([sorted_.order, garbage])
    output = sglang_topk.TritonKernelTopKOutput(
        a_ragged_metadata=SimpleNamespace(slice_sizes=sorted_.counts),
        gather_indx=order // top_k,
        scatter_indx=order,
        gate_scal=torch.cat([sorted_.weights, garbage.float()]),
        n_expts_act=top_k,
    )
    read = routing.routing_of(output, 7 + num_padding)
    assert torch.equal(read.ids[:7], ids.to(read.ids.dtype))
    assert torch.equal(read.weights[:7], weights)
    assert bool((read.ids[7:] == -1).all())


def test_lazy_routing_is_asked_for_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    _, ids, weights = work_of(3, 1)
    made = sglang_topk.StandardTopKOutput(weights, ids, None)
    monkeypatch.setattr(
        sglang_topk.BypassedTopKOutput, "to_standard", lambda self, layer_id=None: made
    )
    lazy = sglang_topk.BypassedTopKOutput(torch.zeros(3, 4), torch.zeros(3, 8), None)
    read = routing.routing_of(lazy, 3)
    assert torch.equal(read.ids, ids)
    assert torch.equal(read.weights, weights)


def test_packed_routing_is_refused() -> None:
    packed = sglang_topk.PackedTopKOutput(torch.zeros(2, 2, dtype=torch.int32), None)
    with pytest.raises(UnsupportedError, match=r"PackedTopKOutput .*--moe-runner-backend"):
        routing.routing_of(packed, 2)


# Runners.


def test_deep_gemm_takes_global_ids_for_bf16_alone() -> None:
    assert runners.runner_of("deep_gemm", torch.bfloat16, "flag").global_ids
    assert not runners.runner_of("deep_gemm", torch.float16, "flag").global_ids


@pytest.mark.parametrize("name", [None, "marlin", "humming"])
def test_other_runners_are_refused(name: str | None) -> None:
    with pytest.raises(UnsupportedError, match=r"flag: .* one of triton, triton_kernel, deep_gemm"):
        runners.runner_of(name, torch.bfloat16, "flag")


def _of_layer(name: str, fused_func: Any = None, **method_has: Any) -> runners.Runner:
    config = SimpleNamespace(runner_backend=SimpleNamespace(value=name), params_dtype=None)
    method = SimpleNamespace(runner=SimpleNamespace(fused_func=fused_func), **method_has)
    return forms.runner_for(config, method, torch.device("cuda"), "flag")


def test_triton_gets_quantised_rows_only_where_its_fused_function_reads_them() -> None:
    assert _of_layer("triton", fused_func=print).wires == ("fp8_block",)
    assert _of_layer("triton").wires == ()
    assert _of_layer("flashinfer_cutlass").wires == ("nvfp4",)


def test_triton_gets_zeros_in_empty_slots_where_it_may_take_one_maximum_of_all_rows() -> None:
    whole = SimpleNamespace(weight_block_size=None)
    assert _of_layer("triton", quant_config=whole).clears_empty
    assert not _of_layer(
        "triton", quant_config=SimpleNamespace(weight_block_size=[128, 128])
    ).clears_empty
    assert not _of_layer("triton").clears_empty, "unquantised weights"
    assert not _of_layer("flashinfer_cutlass", quant_config=whole).clears_empty


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("triton", "StandardFormDispatcher"),
        ("triton_kernel", "StandardFormDispatcher"),
        ("deep_gemm", "StandardFormDispatcher"),  # the default type of torch is float32
        ("flashinfer_cutlass", "FlashinferFormDispatcher"),
        ("flashinfer_trtllm", "FlashinferFormDispatcher"),
    ],
)
def test_the_form_follows_from_the_runner(name: str, expected: str) -> None:
    assert forms.class_for(_of_layer(name)).__name__ == expected


def test_cpu_ranks_have_one_form_whatever_the_runner() -> None:
    config = SimpleNamespace(runner_backend=SimpleNamespace(value="triton"), params_dtype=None)
    chosen = forms.runner_for(config, None, torch.device("cpu"), "flag")
    assert forms.class_for(chosen).__name__ == "CpuDispatcher"


# Streams.


class _Gpu:
    """torch.cuda's streams and events, as far as an order of rounds uses them."""

    def __init__(self) -> None:
        self.stream, self.capturing = "main", False
        self.log: list[str] = []
        self._numbers = itertools.count()

    def is_current_stream_capturing(self) -> bool:
        return self.capturing

    def current_stream(self) -> Any:
        def wait(event: Any) -> None:
            self.log.append(f"{self.stream} waits for {event.recorded}")

        return SimpleNamespace(wait_event=wait)

    def Event(self) -> Any:  # noqa: N802
        event = SimpleNamespace(recorded="")

        def record() -> None:
            event.recorded = f"{self.stream} {next(self._numbers)}"

        event.record = record
        return event


def test_a_round_begins_after_the_round_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = _Gpu()
    monkeypatch.setattr(torch, "cuda", gpu)
    order = streams.StreamOrder()
    for stream in ("main", "prefill", "main"):
        gpu.stream = stream
        order.begins()
        order.ended()
    assert gpu.log == ["prefill waits for main 0", "main waits for prefill 1"]


def test_a_capture_has_no_edge_to_what_is_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = _Gpu()
    monkeypatch.setattr(torch, "cuda", gpu)
    order = streams.StreamOrder()
    order.begins()
    order.ended()
    gpu.capturing = True
    order.begins()
    order.ended()
    gpu.capturing = False
    assert gpu.log == []
    order.begins()
    assert gpu.log == ["main waits for main 0"]


def test_layers_of_a_pool_have_one_order() -> None:
    class Pool:
        device = torch.device("cuda")

    one, other = Pool(), Pool()
    assert streams.order_of(one) is streams.order_of(one)  # type: ignore[arg-type]
    assert streams.order_of(one) is not streams.order_of(other)  # type: ignore[arg-type]


# Fused functions.


def test_a_fused_function_is_registered_once_more_under_our_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(FusedOpPool, "_fused_funcs", {})

    def function() -> None: ...

    register_fused_func("flashinfer", "flashinfer_cutlass")(function)
    one = fused.Fused("flashinfer_cutlass", "flashinfer", "")
    with sglang_stand_in.importable():
        fused.alias(one)
        fused.alias(one)  # a second time changes nothing
    assert FusedOpPool.get_fused_func("customized", "flashinfer_cutlass") is function


def test_a_missing_fused_function_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(FusedOpPool, "_fused_funcs", {})
    with sglang_stand_in.importable():
        fused.alias(fused.Fused("flashinfer_cutedsl", "flashinfer", ""))
    assert FusedOpPool.get_fused_func("customized", "flashinfer_cutedsl") is None
    assert "cannot serve --moe-runner-backend flashinfer_cutedsl" in caplog.text


def test_every_flashinfer_runner_has_a_fused_function() -> None:
    """DeepGEMM and triton_kernel have permute functions by format instead."""
    named = {one.runner for one in fused.FUSED}
    assert {name for name in runners.NAMES if name.startswith("flashinfer_")} < named
    assert named <= set(runners.NAMES)


# The draft's LM head.


def test_a_shared_lm_head_is_refused_by_its_name() -> None:
    assert draft.refusal(Options()) is None
    refused = draft.refusal(Options(mtp_lm_head_tp_size="auto"))
    assert refused is not None
    assert "mtp_lm_head_tp_size='auto'" in refused
    assert WORDING.framework in refused
