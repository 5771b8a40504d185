"""vLLM's own Triton experts behind our dispatch, executed on CPU tensors by Triton's interpreter.

What they compute on a rank of several, with expert_map, ids of experts elsewhere, padding, and
empty slots that hold NaN, must be what they compute of the same tokens on one rank that has all
experts and no exchange. The kernels, the quantisers in Triton, and the classes around them are
vLLM's; stand-ins in plain torch are here for the operators that only vLLM's CUDA build has.

Triton is in the environment of `make vllm33-env`, with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm.triton_utils import HAS_TRITON

if not HAS_TRITON:
    pytest.skip(
        "Triton does not run here: make vllm33-env, TRITON_INTERPRET=1", allow_module_level=True
    )

import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm import _custom_ops as ops
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.fused_moe import config as vllm_config
from vllm.model_executor.layers.fused_moe import utils
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts
from vllm.model_executor.layers.fused_moe.prepare_finalize import MoEPrepareAndFinalizeNoDPEPModular

from moe_nvlink_plugin.config import local_expert_range
from moe_nvlink_plugin.testing import ThreadGroup, run_ranks
from tests.integration.vllm.moe.vllm_layer import (
    CAPACITY,
    HIDDEN_SIZE,
    NUM_EXPERTS,
    TOP_K,
    Layer,
    parallel_of,
    take_cuda_branches,
    work_of,
)

pytestmark = [pytest.mark.usefixtures("environment"), pytest.mark.timeout(600)]

INTERMEDIATE = 128
E4M3_MAX = 448.0
#: Of the activations here, up to about 5.
STATIC_SCALE = torch.tensor(0.0125)


def _draw(*shape: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(sum(shape))
    drawn: torch.Tensor = torch.randn(*shape, generator=random) * shape[-1] ** -0.5
    return drawn


#: Gate and up projection, and down projection, of all experts.
W1 = _draw(NUM_EXPERTS, 2 * INTERMEDIATE, HIDDEN_SIZE)
W2 = _draw(NUM_EXPERTS, HIDDEN_SIZE, INTERMEDIATE)


def _by_blocks(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    experts, rows, columns = weights.shape
    blocks = weights.view(experts, rows // 128, 128, columns // 128, 128)
    scales = blocks.abs().amax((2, 4)) / E4M3_MAX
    rows_of = (blocks / scales[:, :, None, :, None]).view_as(weights)
    return rows_of.to(torch.float8_e4m3fn), scales


def _by_channel(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scales = weights.abs().amax(2, keepdim=True) / E4M3_MAX
    return (weights / scales).to(torch.float8_e4m3fn), scales


def _by_tensor(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scales = weights.abs().amax((1, 2)) / E4M3_MAX
    return (weights / scales[:, None, None]).to(torch.float8_e4m3fn), scales


def _by_channel_int8(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scales = weights.abs().amax(2, keepdim=True) / 127
    return (weights / scales).round().to(torch.int8), scales


def _as_they_are(weights: torch.Tensor) -> tuple[torch.Tensor, None]:
    return weights, None


#: Name -> quantiser of weights, what vLLM's configuration makes of their scales, and the recipe by
#: which rows must travel.
SCHEMES: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any, Any], Any], str | None]] = {
    "unquantised": (_as_they_are, lambda _a, _b: vllm_config.FUSED_MOE_UNQUANTIZED_CONFIG, None),
    "fp8 by blocks": (
        _by_blocks,
        lambda a, b: vllm_config.fp8_w8a8_moe_quant_config(a, b, block_shape=[128, 128]),
        "fp8_block",
    ),
    "fp8 by token": (
        _by_channel,
        lambda a, b: vllm_config.fp8_w8a8_moe_quant_config(
            a, b, per_act_token_quant=True, per_out_ch_quant=True
        ),
        "fp8_token",
    ),
    "fp8 by tensor": (
        _by_tensor,
        lambda a, b: vllm_config.fp8_w8a8_moe_quant_config(
            a, b, a1_scale=STATIC_SCALE, a2_scale=STATIC_SCALE
        ),
        "fp8_tensor",
    ),
    "int8 by token": (
        _by_channel_int8,
        lambda a, b: vllm_config.int8_w8a8_moe_quant_config(
            a, b, a1_scale=None, a2_scale=None, per_act_token_quant=True
        ),
        None,
    ),
}


# Stand-ins for operators that vLLM's CPU build does not have.


def _moe_align_block_size(
    ids: torch.Tensor,
    num_experts: int,
    block_size: int,
    sorted_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    num_padded: torch.Tensor,
    expert_map: torch.Tensor | None = None,
    scatter_idx: torch.Tensor | None = None,
) -> None:
    """Places of all choices by expert, each expert's padded to whole blocks.

    Raises an error for ids that the CUDA kernel would write out of bounds with.
    """
    assert scatter_idx is None
    flat = ids.flatten()
    assert bool((flat < num_experts).all()), "vLLM's kernel counts beyond its array"
    order: list[int] = []
    experts: list[int] = []
    for expert in range(num_experts):
        local = expert if expert_map is None else int(expert_map[expert])
        places = (flat == expert).nonzero().flatten().tolist() if local >= 0 else []
        blocks = -(-len(places) // block_size)
        order += places + [flat.numel()] * (blocks * block_size - len(places))
        experts += [local] * blocks
    sorted_ids.fill_(flat.numel())
    sorted_ids[: len(order)] = torch.tensor(order, dtype=torch.int32)
    expert_ids.fill_(-1)
    expert_ids[: len(experts)] = torch.tensor(experts, dtype=torch.int32)
    num_padded.fill_(len(order))


def _moe_sum(
    rows: torch.Tensor,
    output: torch.Tensor,
    ids: torch.Tensor | None = None,
    expert_map: torch.Tensor | None = None,
) -> None:
    if ids is not None:
        is_computed = ids >= 0
        if expert_map is not None:
            is_computed &= expert_map[ids.clamp(min=0).long()] >= 0
        rows = torch.where(is_computed.unsqueeze(-1), rows, 0)
    output.copy_(rows.sum(1))


def _silu_and_mul_per_block_quant(
    rows: torch.Tensor, group_size: int, quant_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    gate, up = rows.float().chunk(2, dim=-1)
    return _quantise_by_group(torch.nn.functional.silu(gate) * up, group_size)


def _quantise_by_group(
    rows: torch.Tensor, group_size: int, **_options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    groups = rows.float().view(rows.shape[0], -1, group_size)
    scales = groups.abs().amax(-1).clamp(min=1e-10) / E4M3_MAX
    quantised = (groups / scales.unsqueeze(-1)).clamp(-E4M3_MAX, E4M3_MAX)
    return quantised.view_as(rows).to(torch.float8_e4m3fn), scales


def _scaled_fp8_quant(
    rows: torch.Tensor, scale: torch.Tensor | None = None, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    if scale is None:
        by_token = options["use_per_token_if_dynamic"]
        most = rows.float().abs().amax(1, keepdim=True) if by_token else rows.float().abs().max()
        scale = most.clamp(min=1e-10) / E4M3_MAX
    quantised = (rows.float() / scale).clamp(-E4M3_MAX, E4M3_MAX)
    return quantised.to(torch.float8_e4m3fn), scale


def _per_token_quant_int8(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """vLLM's Triton kernel rounds by a function of CUDA's libdevice, which is not interpreted."""
    scales = rows.float().abs().amax(1, keepdim=True).clamp(min=1e-10) / 127
    return (rows.float() / scales).round().to(torch.int8), scales


_IN_TURN = threading.Lock()


class Recording(TritonExperts):  # type: ignore[misc]
    """Keeps what each call was handed; Triton's interpreter takes one thread at a time."""

    calls: list[SimpleNamespace]

    def apply(self, *args: Any, **given: Any) -> None:
        self.calls.append(SimpleNamespace(**given))
        with _IN_TURN:
            super().apply(*args, **given)


def _experts(scheme: str, ep_size: int, ep_rank: int) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """One rank's experts, of all of a layer's, and their weights."""
    quantise, config_of_scales, _recipe = SCHEMES[scheme]
    first, end = local_expert_range(NUM_EXPERTS, ep_size, ep_rank)
    (w1, scales1), (w2, scales2) = quantise(W1[first:end]), quantise(W2[first:end])
    moe = vllm_config.FusedMoEConfig(
        num_experts=NUM_EXPERTS,
        experts_per_token=TOP_K,
        hidden_dim=HIDDEN_SIZE,
        intermediate_size=INTERMEDIATE,
        num_local_experts=end - first,
        num_logical_experts=NUM_EXPERTS,
        activation=MoEActivation.SILU,
        device="cpu",
        routing_method=vllm_config.RoutingMethodType.Renormalize,
        moe_parallel_config=parallel_of(ep_size, ep_rank),
        in_dtype=torch.float32,
        max_num_tokens=CAPACITY,
    )
    experts = Recording(moe, config_of_scales(scales1, scales2))
    experts.calls = []
    return experts, w1, w2


class TritonLayer(Layer):
    """A rank's layer with vLLM's Triton experts."""

    def __init__(self, group: Any, scheme: str) -> None:
        experts, self.w1, self.w2 = _experts(scheme, group.size, group.rank)
        super().__init__(group, experts=experts)

    def __call__(
        self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        return _computed(self.kernel, self.w1, self.w2, hidden, ids, weights, self.expert_map)


def _computed(
    kernel: Any,
    w1: torch.Tensor,
    w2: torch.Tensor,
    hidden: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    expert_map: torch.Tensor | None,
) -> torch.Tensor:
    result: torch.Tensor = kernel.impl.apply(
        hidden_states=hidden,
        w1=w1,
        w2=w2,
        topk_ids=ids,
        topk_weights=weights,
        activation=MoEActivation.SILU,
        global_num_experts=NUM_EXPERTS,
        expert_map=expert_map,
    )
    return result


def _on_one_rank(
    scheme: str, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    experts, w1, w2 = _experts(scheme, 1, 0)
    kernel = mk.FusedMoEKernel(MoEPrepareAndFinalizeNoDPEPModular(), experts)
    # Without expert_map the kernels take no -1.
    ids, weights = ids.clamp(min=0), torch.where(ids < 0, 0.0, weights)
    return _computed(kernel, w1, w2, hidden, ids, weights, None)


@pytest.fixture(autouse=True)
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    take_cuda_branches(monkeypatch.setattr)
    monkeypatch.setattr(ops, "moe_align_block_size", _moe_align_block_size)
    monkeypatch.setattr(ops, "moe_sum", _moe_sum)
    monkeypatch.setattr(ops, "scaled_fp8_quant", _scaled_fp8_quant)
    monkeypatch.setattr(ops, "silu_and_mul_per_block_quant", _silu_and_mul_per_block_quant)
    monkeypatch.setattr(utils, "per_token_group_quant_fp8", _quantise_by_group)
    monkeypatch.setattr(utils, "per_token_quant_int8", _per_token_quant_int8)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("ep_size", [2, pytest.param(3, marks=pytest.mark.long)])
def test_the_layer_is_that_of_one_rank(scheme: str, ep_size: int) -> None:
    """Ragged rounds, of no token and of many."""

    def rank_main(group: ThreadGroup) -> tuple[list[float], str | None, bool]:
        with set_current_vllm_config(VllmConfig()):
            layer = TritonLayer(group, scheme)
            errors = []
            for number in range(4):
                num_tokens = (number * (group.rank + 2) + 3 * group.rank) % (CAPACITY + 1)
                work = work_of(num_tokens, 100 * number + group.rank)
                got, expected = layer(*work), work[0]
                if num_tokens:
                    expected = _on_one_rank(scheme, *work)
                    error = (got - expected).abs().nan_to_num(nan=float("inf")).max()
                    # A reference that is nothing or NaN gives NaN, which is not small.
                    errors.append(float(error / expected.abs().max()))
                if got.shape != expected.shape:
                    errors.append(float("inf"))
                layer.poison()
            is_in_place = layer.experts.calls[-1].output is layer.exchange.combine_input()
            recipe = None if layer.format.recipe is None else layer.format.recipe.name
            layer.close()
            return errors, recipe, is_in_place

    for errors, recipe, is_in_place in run_ranks(ep_size, rank_main):
        assert errors
        assert all(error < 1e-5 for error in errors), errors
        assert recipe == SCHEMES[scheme][2]
        assert is_in_place
