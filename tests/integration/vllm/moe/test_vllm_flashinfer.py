"""vLLM's experts that call FlashInfer, after our dispatch: what reaches FlashInfer is in place.

The classes are those of the installed vLLM, made and called as vLLM does it on CUDA ranks, and the
exchange between the ranks is the real one. In the place of FlashInfer's functions stand recorders.
Each binds the arguments to the function's own signature, and compares addresses with those of the
receive buffer and of the combine region. What the recorders write shows that combine reads it.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.fused_moe import config as moe_config

from moe_nvlink_plugin.config import local_expert_range
from moe_nvlink_plugin.testing import run_ranks
from tests.integration.common.framework_wheels import left_out
from tests.integration.vllm.moe import vllm_layer
from tests.integration.vllm.moe.test_vllm_quantised import (
    ONE,
    TENSOR_SCALE,
    fp8,
    mxfp8,
    nvfp4,
    transposed,
)
from tests.integration.vllm.moe.vllm_layer import moe_config_of, parallel_of
from tests.support import flashinfer_wheel, wheels

NUM_EXPERTS, TOP_K, HIDDEN_SIZE, INTERMEDIATE_SIZE, CAPACITY = 8, 4, 256, 128, 8
EP_SIZE = 2
EXPERTS = "vllm.model_executor.layers.fused_moe.experts"
CUTLASS = f"{EXPERTS}.flashinfer_cutlass_moe"
CUTEDSL = f"{EXPERTS}.flashinfer_cutedsl_moe"
_OF_THREAD = threading.local()


class Case(NamedTuple):
    """Experts as vLLM makes them for one `--moe-backend` and one format.

    Attributes:
        experts: module and class below vLLM's experts.
        quant_config: what vLLM's oracle gives these experts, as far as this test needs it.
        recipe: recipe that must travel.
        function: module and name that the experts call.
        copied: whether vLLM copies the scales.
    """

    experts: str
    quant_config: Callable[[], Any]
    recipe: str
    function: str
    copied: bool = False

    @property
    def name(self) -> str:
        return f"{self.experts.split(':')[1]} {self.recipe}{' copied' * self.copied}"


def mxfp8_by_blocks() -> Any:
    return moe_config.FusedMoEQuantConfig.make(
        "mxfp8", w1_scale=ONE, w2_scale=ONE, block_shape=[1, 32], is_scale_swizzled=False
    )


def mxfp4_weights() -> Any:
    return moe_config.mxfp4_w4a16_moe_quant_config(w1_scale=ONE, w2_scale=ONE)


CUTLASS_CLASS = "flashinfer_cutlass_moe:FlashInferExperts"
CUTLASS_CALL = f"{CUTLASS}:flashinfer_cutlass_fused_moe"
FP8_CLASS = "trtllm_fp8_moe:TrtLlmFp8ExpertsModular"
FP8_CALL = "flashinfer.fused_moe:trtllm_fp8_block_scale_routed_moe"
FP4_CLASS = "trtllm_nvfp4_moe:TrtLlmNvFp4ExpertsModular"
FP4_CALL = "flashinfer.fused_moe:trtllm_fp4_block_scale_routed_moe"
MXFP4_CLASS = "trtllm_mxfp4_moe:TrtLlmMxfp4ExpertsModular"
MXFP4_CALL = "flashinfer:trtllm_fp4_block_scale_routed_moe"
UNQUANTISED = moe_config.FUSED_MOE_UNQUANTIZED_CONFIG
CASES = (
    Case(CUTLASS_CLASS, lambda: UNQUANTISED, "unquantised", CUTLASS_CALL),
    Case(CUTLASS_CLASS, mxfp4_weights, "unquantised", CUTLASS_CALL),
    Case(CUTLASS_CLASS, lambda: fp8(block_shape=[128, 128]), "unquantised", CUTLASS_CALL),
    Case(CUTLASS_CLASS, lambda: fp8(a1_scale=TENSOR_SCALE), "fp8_tensor", CUTLASS_CALL),
    Case(CUTLASS_CLASS, lambda: nvfp4(is_scale_swizzled=True), "nvfp4", CUTLASS_CALL),
    Case(CUTLASS_CLASS, lambda: mxfp8(is_scale_swizzled=True), "mxfp8", CUTLASS_CALL),
    Case(FP8_CLASS, lambda: transposed(fp8(block_shape=[128, 128])), "fp8_block", FP8_CALL),
    # vLLM 0.32 says nothing of the layout, and transposes.
    Case(FP8_CLASS, lambda: fp8(block_shape=[128, 128]), "fp8_block", FP8_CALL, copied=True),
    Case(FP8_CLASS, mxfp8_by_blocks, "mxfp8", FP8_CALL),
    Case(FP4_CLASS, nvfp4, "nvfp4", FP4_CALL),
    Case(MXFP4_CLASS, mxfp4_weights, "unquantised", MXFP4_CALL),
    Case(MXFP4_CLASS, mxfp8, "mxfp8", MXFP4_CALL),
    Case(
        "flashinfer_cutedsl_moe:FlashInferCuteDSLExperts",
        nvfp4,
        "nvfp4",
        f"{CUTEDSL}:flashinfer_cute_dsl_fused_moe_nvfp4",
    ),
)


@pytest.fixture(scope="module")
def flashinfer() -> Iterator[Any]:
    try:
        with flashinfer_wheel.importable():
            import flashinfer.fused_moe

            yield flashinfer
    except wheels.FetchError as error:
        left_out(error)


@pytest.fixture(autouse=True)
def as_on_cuda(cuda_branches: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: "cpu")
    with set_current_vllm_config(VllmConfig()):
        yield


def experts_of(case: Case, rank: int) -> Any:
    module, name = case.experts.split(":")
    config = moe_config_of(
        EP_SIZE,
        rank,
        NUM_EXPERTS // EP_SIZE,
        num_experts=NUM_EXPERTS,
        experts_per_token=TOP_K,
        hidden_dim=HIDDEN_SIZE,
        intermediate_size=INTERMEDIATE_SIZE,
        in_dtype=torch.bfloat16,
        max_num_tokens=CAPACITY,
    )
    made = getattr(importlib.import_module(f"{EXPERTS}.{module}"), name)
    return made(moe_config=config, quant_config=case.quant_config())


def parameters_of(flashinfer: Any, name: str) -> Callable[..., Any]:
    """What binds arguments to the signature of FlashInfer's function."""
    name = name.removeprefix("flashinfer_")
    found = getattr(flashinfer.fused_moe, name, None)
    if found is not None:
        return inspect.signature(found).bind
    # It imports only where CUTLASS' DSL is installed.
    source = flashinfer_wheel.folder() / "flashinfer" / "fused_moe" / "cute_dsl" / "fused_moe.py"
    (function,) = (
        node
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name == name
    )
    arguments = function.args
    names = [each.arg for each in (*arguments.args, *arguments.kwonlyargs)]
    kinds = inspect.Parameter
    optional = [kinds(each, kinds.KEYWORD_ONLY, default=None) for each in names]
    assert len(names) > 10
    return inspect.Signature(optional).bind


class Recorder:
    """A function of FlashInfer. It writes 1 into each row that has a local expert, else NaN."""

    def __init__(self, bind: Callable[..., Any]) -> None:
        self._bind = bind

    def __call__(self, *given: Any, **named: Any) -> Any:
        arguments = dict(self._bind(*given, **named).arguments)
        layer: Layer = _OF_THREAD.layer
        received = layer.subject._received.get(0)
        assert received is not None
        region = layer.exchange.combine_input(metadata=received.metadata)
        rows = _first(arguments, "input", "hidden_states", "x")
        scales = _first(arguments, "input_sf", "hidden_states_scale", "x_sf")
        output = _first(arguments, "output", "moe_output")
        ids, weights = arguments.get("topk_ids") or (
            arguments["token_selected_experts"],
            arguments["token_final_scales"],
        )
        layer.seen = {
            "rows": _same(rows, received.hidden_states),
            "scales": None if scales is None else _same(scales, received.scales),
            "ids": _same(ids, received.topk_ids),
            "weights": _same(weights, received.topk_weights),
            "output": _same(output, region),
        }
        layer.arguments = arguments
        first, end = local_expert_range(NUM_EXPERTS, EP_SIZE, layer.exchange.config.ep_rank)
        is_used = ((ids >= first) & (ids < end)).any(1, keepdim=True)
        output.copy_(torch.where(is_used, 1.0, float("nan")).expand_as(output))
        return [output]


def _first(arguments: dict[str, Any], *names: str) -> Any:
    return next((arguments[name] for name in names if name in arguments), None)


def _same(given: torch.Tensor, ours: torch.Tensor | None) -> bool:
    return ours is not None and given.data_ptr() == ours.data_ptr() and given.nbytes == ours.nbytes


class Layer(vllm_layer.Layer):
    """One rank's layer in vLLM's modular kernel, as `method.install` makes it on CUDA ranks."""

    def __init__(self, group: Any, case: Case) -> None:
        super().__init__(
            group,
            experts=experts_of(case, group.rank),
            num_experts=NUM_EXPERTS,
            top_k=TOP_K,
            hidden_size=HIDDEN_SIZE,
            max_tokens_per_rank=CAPACITY,
            dtype=torch.bfloat16,
        )
        assert (self.exchange.config.recipe or "unquantised") == case.recipe
        self.seen: dict[str, Any] = {}
        self.arguments: dict[str, Any] = {}

    def __call__(
        self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        _OF_THREAD.layer = self
        local = NUM_EXPERTS // EP_SIZE
        w1 = torch.zeros(local, 2 * INTERMEDIATE_SIZE, HIDDEN_SIZE // 2, dtype=torch.uint8)
        w2 = torch.zeros(local, HIDDEN_SIZE, INTERMEDIATE_SIZE // 2, dtype=torch.uint8)
        work = hidden, ids, weights
        return vllm_layer.computed(
            self.kernel, w1, w2, work, self.expert_map, num_experts=NUM_EXPERTS
        )


def _run(group: Any, case: Case) -> tuple[Layer, torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(group.rank)
    count = 2 + 3 * group.rank
    ids = torch.rand(count, NUM_EXPERTS, generator=random).topk(TOP_K).indices.to(torch.int32)
    hidden = torch.randn(count, HIDDEN_SIZE, generator=random).bfloat16()
    with Layer(group, case) as layer:
        return layer, ids, layer(hidden, ids, torch.ones(ids.shape))


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_experts_work_in_place(
    flashinfer: Any, monkeypatch: pytest.MonkeyPatch, case: Case
) -> None:
    module, name = case.function.split(":")
    recorder = Recorder(parameters_of(flashinfer, name))
    monkeypatch.setattr(importlib.import_module(module), name, recorder)
    for layer, ids, result in run_ranks(EP_SIZE, lambda group: _run(group, case)):
        has_scales = case.recipe in ("fp8_block", "mxfp8", "nvfp4")
        assert layer.seen == {
            "rows": True,
            "scales": not case.copied if has_scales else None,
            "ids": True,
            "weights": True,
            "output": True,
        }
        owners = [(ids // (NUM_EXPERTS // EP_SIZE) == rank).any(1) for rank in range(EP_SIZE)]
        expected = torch.stack(owners).sum(0, dtype=torch.bfloat16)
        assert torch.equal(result, expected[:, None].expand_as(result))


# What vLLM itself offers with the flag.

#: Classes of vLLM that call FlashInfer -> whether vLLM offers them to ranks like ours.
OFFERED = {
    CUTLASS_CLASS: True,
    FP8_CLASS: True,
    FP4_CLASS: True,
    MXFP4_CLASS: True,
    "flashinfer_cutedsl_moe:FlashInferCuteDSLExperts": True,
    "trtllm_bf16_moe:TrtLlmBf16ExpertsModular": False,
    "flashinfer_b12x_moe:FlashInferB12xExperts": False,
}


@pytest.mark.parametrize("experts", OFFERED)
def test_what_vllm_offers_to_our_ranks(experts: str) -> None:
    """vLLM knows our ranks as ranks of its all-gather (CARRIER)."""
    module, name = experts.split(":")
    found = getattr(importlib.import_module(f"{EXPERTS}.{module}"), name)
    assert bool(found._supports_parallel_config(parallel_of(EP_SIZE, 0))) is OFFERED[experts]
    assert not found.is_monolithic()
