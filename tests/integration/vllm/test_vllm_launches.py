"""What a MoE layer launches in vLLM on CUDA ranks: dispatch, combine and experts, nothing else.

A launch is an op that writes memory. Ops that return views or allocate launch nothing. What our own
ops call is counted too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.fused_moe.runner import moe_runner

from moe_nvlink_plugin.exchange import layer as exchange_layer
from moe_nvlink_plugin.exchange import ops
from moe_nvlink_plugin.integration.vllm.moe import experts_input
from moe_nvlink_plugin.integration.vllm.moe.layers import OP_NAME
from moe_nvlink_plugin.testing import run_ranks
from tests.integration.vllm import vllm_runner
from tests.integration.vllm.moe.test_vllm_quantised import (
    TENSOR_SCALE,
    fp8,
    mxfp8,
    nvfp4,
    transposed,
)
from tests.integration.vllm.moe.vllm_layer import (
    HIDDEN_SIZE,
    NUM_EXPERTS,
    Experts,
    Layer,
    work_of,
)

ALLOCATIONS = ("aten::empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty")
#: Our ops, vLLM's ops that call them, and the functions behind all of them.
OURS: dict[Any, Callable[..., Any]] = {
    getattr(torch.ops.vllm, OP_NAME).default: moe_runner._moe_forward,
    torch.ops.vllm.moe_forward_shared.default: moe_runner._moe_forward_shared,
    ops.dispatch: ops._dispatch,
    ops.combine: ops._combine,
    ops.combine_out: ops._combine_out,
    ops.received: ops._received,
    ops.received_scales: ops._received_scales,
}
#: Ops that launch nothing themselves. The first two return views of the workspace.
QUIET = (
    *(ops.received, ops.received_scales),
    *(getattr(torch.ops.vllm, OP_NAME).default, torch.ops.vllm.moe_forward_shared.default),
)
TWO_LAUNCHES = ["moe_nvlink::dispatch", "moe_nvlink::combine_out"]


class Launches(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the names of ops that launch something."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _launches(func):
            self.names.append(func._schema.name)
        if func in OURS:
            with self:
                return OURS[func](*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _launches(func: Any) -> bool:
    aliases = [returned.alias_info for returned in func._schema.returns]
    is_view = any(alias is not None and not alias.is_write for alias in aliases)
    return not is_view and func not in QUIET and func._schema.name not in ALLOCATIONS


@pytest.fixture(autouse=True)
def as_on_cuda(cuda_branches: None, monkeypatch: pytest.MonkeyPatch) -> None:
    # A GPU looks at the value of a scale in the first call only.
    monkeypatch.setattr(exchange_layer.LayerExchange, "_may_look_at", lambda *_: False)


def launches_of(layer: Layer, num_tokens: int) -> list[str]:
    """What prepare, the place for the experts' rows, and finalize launch for one batch."""
    hidden, ids, weights = work_of(num_tokens, layer.group.rank)
    subject, experts = layer.subject, layer.experts
    impl = experts.finalize_weight_and_reduce_impl()
    output, recorded = torch.empty_like(hidden), Launches()
    with recorded:
        rows, _, _, sent_ids, sent_weights = subject.prepare(
            hidden, weights, ids, NUM_EXPERTS, None, False, experts.quant_config, experts.defers
        )
    shape = (len(rows), hidden.shape[1]) if experts.sums else (*sent_ids.shape, hidden.shape[1])
    with recorded:
        made = subject.allocate_fused_expert_output(shape, hidden.dtype, hidden.device, impl)
    if made is None:
        made = torch.empty(shape)
    made.zero_()
    with recorded:
        subject.finalize(output, made, sent_weights, sent_ids, False, impl)
    return recorded.names


def _of_rank(group: Any, **values: Any) -> list[str]:
    with Layer(group, **values) as layer:
        return launches_of(layer, 2 + group.rank)


def test_unquantised_rows_take_two_launches() -> None:
    assert run_ranks(2, _of_rank) == [TWO_LAUNCHES] * 2


#: vLLM's FusedMoEQuantConfig of experts: by format and by the layout in which they read scales.
QUANT_CONFIGS: dict[str, Callable[[], Any]] = {
    "fp8_block, DeepGEMM and Triton": lambda: fp8(block_shape=[128, 128]),
    "fp8_block, TRTLLM": lambda: transposed(fp8(block_shape=[128, 128])),
    "fp8_token": lambda: fp8(per_act_token_quant=True),
    "fp8_tensor": lambda: fp8(a1_scale=TENSOR_SCALE),
    "mxfp8, TRTLLM and DeepGEMM": mxfp8,
    "mxfp8, CUTLASS": lambda: mxfp8(is_scale_swizzled=True),
    "nvfp4, TRTLLM": nvfp4,
    "nvfp4, CUTLASS": lambda: nvfp4(is_scale_swizzled=True),
    "nvfp4, one scale for all experts": lambda: nvfp4(torch.tensor(500.0).expand(NUM_EXPERTS)),
}


def _zeros(rows: torch.Tensor, _scales: Any) -> torch.Tensor:
    return torch.zeros(len(rows), HIDDEN_SIZE)


@pytest.mark.parametrize("make", QUANT_CONFIGS.values(), ids=QUANT_CONFIGS)
def test_quantised_rows_take_two_launches(make: Callable[[], Any]) -> None:
    def rank_main(group: Any) -> list[str]:
        return _of_rank(group, experts=Experts(make(), _zeros))

    assert run_ranks(2, rank_main) == [TWO_LAUNCHES] * 2


def test_powers_of_two_for_deep_gemm_take_two_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts_input, "is_deep_gemm_e8m0_used", lambda: True)

    def rank_main(group: Any) -> list[str]:
        experts = Experts(fp8(block_shape=[128, 128]), _zeros)
        with Layer(group, experts=experts) as layer:
            assert layer.exchange.recipe.name == "fp8_block_pow2"
            return launches_of(layer, 2 + group.rank)

    assert run_ranks(2, rank_main) == [TWO_LAUNCHES] * 2


class _Unseen(Experts):
    """Experts whose own launches are not of interest."""

    def apply(self, **given: Any) -> None:
        with _disable_current_modes():
            super().apply(**given)


class _Shared(torch.nn.Module):
    """Shared experts of one launch."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.tanh(rows)


class _Scratch:
    """vLLM's workspace, which exists before the layer runs."""

    def get_simultaneous(self, *asked: Any) -> list[torch.Tensor]:
        return [torch.empty(shape, dtype=dtype) for shape, dtype in asked]


@pytest.fixture
def vllms_configuration(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(mk, "current_workspace_manager", _Scratch)
    with set_current_vllm_config(VllmConfig()), vllm_runner.forwards_of_vllm(monkeypatch):
        yield


def _of_runner(group: Any, shared: torch.nn.Module | None, ends_in_combine: bool) -> list[str]:
    layer = Layer(group, experts=_Unseen())
    routed = vllm_runner.Routed(layer)
    if not ends_in_combine:
        routed.moe_config.hidden_dim_unpadded = None
    runner = vllm_runner.make_runner(routed, f"layer of rank {group.rank}", shared, 2.5)
    routed.install()
    work, recorded = work_of(2 + group.rank, group.rank), Launches()
    with recorded:
        vllm_runner.forward(runner, *work)
    layer.close()
    return recorded.names


@pytest.mark.parametrize(
    ("shared", "launches"), [(_Shared(), ["aten::tanh", *TWO_LAUNCHES]), (None, TWO_LAUNCHES)]
)
def test_combine_ends_the_layer(
    shared: torch.nn.Module | None, launches: list[str], vllms_configuration: None
) -> None:
    assert run_ranks(2, lambda group: _of_runner(group, shared, True)) == [launches] * 2


def test_a_layer_that_vllm_ends_launches_more(vllms_configuration: None) -> None:
    wanted = ["aten::tanh", *TWO_LAUNCHES, "aten::mul_", "aten::add"]
    assert run_ranks(2, lambda group: _of_runner(group, _Shared(), False)) == [wanted] * 2
