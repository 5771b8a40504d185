"""SGLang's own Triton runner behind our dispatch, executed on CPU tensors by Triton's interpreter.

The runner, its permutes, its kernels, and the quantiser of blocks are SGLang's; `interpreted` has
the rest. The runner is handed local ids with -1, padding, and empty slots that hold NaN, and the
layer must be the product of dense matrices.

Triton comes from the environment of `make vllm33-env`, with TRITON_INTERPRET=1:
`tests/integration/sglang/test_sglang_environment.py` runs this file so.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("sglang", reason="SGLang is not installed in this environment")

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("Triton does not run here: TRITON_INTERPRET=1", allow_module_level=True)

from sglang.srt import runtime_context
from sglang.srt.layers.moe.moe_runner.base import FusedOpPool, MoeRunnerConfig
from sglang.srt.layers.moe.moe_runner.runner import MoeRunner
from sglang.srt.layers.moe.moe_runner.triton import TritonMoeQuantInfo
from sglang.srt.layers.moe.utils import MoeA2ABackend, MoeRunnerBackend

from moe_nvlink_plugin.config import local_expert_range
from moe_nvlink_plugin.integration.sglang.moe import forms, fused
from moe_nvlink_plugin.testing import ThreadGroup, run_ranks
from tests.integration.sglang.sglang_layer import (
    CAPACITY,
    HIDDEN_SIZE,
    NUM_EXPERTS,
    TOP_K,
    WORDING,
    StandardCombineInput,
    StandardTopKOutput,
    pool_of,
    work_of,
)
from tests.sglang import interpreted

INTERMEDIATE = 128
BLOCK = [128, 128]
E4M3 = torch.float8_e4m3fn


def _draw(*shape: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(sum(shape))
    drawn: torch.Tensor = torch.randn(*shape, generator=random) * shape[-1] ** -0.5
    return drawn


#: Gate and up projection, and down projection, of all experts.
W13 = _draw(NUM_EXPERTS, 2 * INTERMEDIATE, HIDDEN_SIZE)
W2 = _draw(NUM_EXPERTS, HIDDEN_SIZE, INTERMEDIATE)


class Scheme(NamedTuple):
    """How a layer computes.

    Attributes:
        dtype: of the activations.
        tolerance: largest difference from the dense product, of its largest value.
        group: rows and columns of weights that share a scale, 0 for all; None: unquantised.
        travels: recipe of rows that the runner takes as they travelled.
    """

    dtype: torch.dtype
    tolerance: float
    group: tuple[int, int] | None = None
    travels: str | None = None


SCHEMES = {
    "float32": Scheme(torch.float32, 1e-5),
    "bf16": Scheme(torch.bfloat16, 2e-2),
    "fp8 by blocks": Scheme(torch.bfloat16, 8e-2, (128, 128)),
    "fp8 blocks that travelled": Scheme(torch.bfloat16, 8e-2, (128, 128), "fp8_block"),
    "fp8 by channel": Scheme(torch.bfloat16, 8e-2, (1, 0)),
    # One scale of the rows that a rank gets, where the product has one of a rank's tokens.
    "fp8 by tensor": Scheme(torch.bfloat16, 0.15, (0, 0)),
}


def _quantised(weights: torch.Tensor, group: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    experts, rows, columns = weights.shape
    high, wide = group[0] or rows, group[1] or columns
    blocks = weights.view(experts, rows // high, high, columns // wide, wide)
    scales = blocks.abs().amax((2, 4)) / interpreted.E4M3_MAX
    return (blocks / scales[:, :, None, :, None]).view_as(weights).to(E4M3), scales


def _weights_of(scheme: Scheme, first: int, end: int) -> Any:
    """What the runner reads of the experts first..end-1."""
    w13, w2 = W13[first:end], W2[first:end]
    if scheme.group is None:
        return TritonMoeQuantInfo(w13_weight=w13.to(scheme.dtype), w2_weight=w2.to(scheme.dtype))
    (w13, w13_scale), (w2, w2_scale) = (_quantised(w, scheme.group) for w in (w13, w2))
    if scheme.group == (0, 0):
        w13_scale, w2_scale = w13_scale.flatten(), w2_scale.flatten()
    return TritonMoeQuantInfo(
        w13_weight=w13,
        w2_weight=w2,
        use_fp8_w8a8=True,
        per_channel_quant=scheme.group == (1, 0),
        w13_scale=w13_scale,
        w2_scale=w2_scale,
        block_shape=BLOCK if scheme.group == (128, 128) else None,
    )


def _restored(weights: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """Weights as the kernels see them, in float32."""
    if scheme.group is None:
        return weights.to(scheme.dtype).float()
    quantised, scales = _quantised(weights, scheme.group)
    _, high, wide = scales.shape
    _, rows, columns = weights.shape
    scales = scales.repeat_interleave(rows // high, 1).repeat_interleave(columns // wide, 2)
    return quantised.float() * scales


def _seen(rows: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """Rows as the kernels see them, in float32; a row is one block wide."""
    rows = rows.to(scheme.dtype).float()
    if scheme.group is None:
        return rows
    most = rows.abs().amax(-1, keepdim=True) if scheme.group != (0, 0) else rows.abs().max()
    scale = most.clamp(min=1e-10) / interpreted.E4M3_MAX
    return (rows / scale).to(E4M3).float() * scale


def _dense(
    hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, scheme: Scheme
) -> torch.Tensor:
    """The layer of one process, of all experts and without Triton; ids of -1 add nothing."""
    if not len(hidden):
        return hidden.float()
    both = torch.einsum("nh,eih->nei", _seen(hidden, scheme), _restored(W13, scheme))
    gate, up = both.to(scheme.dtype).float().chunk(2, dim=-1)
    inner = _seen(torch.nn.functional.silu(gate) * up, scheme)
    every = torch.einsum("nei,ehi->neh", inner, _restored(W2, scheme))
    index = ids.clamp(min=0).long().unsqueeze(-1).expand(-1, -1, HIDDEN_SIZE)
    return (every.gather(1, index) * torch.where(ids < 0, 0.0, weights).unsqueeze(-1)).sum(1)


class Layer:
    """A rank's layer: our dispatcher as SGLang gets it on CUDA ranks, and SGLang's runner."""

    def __init__(self, group: Any, scheme: Scheme, inplace: bool) -> None:
        first, end = local_expert_range(NUM_EXPERTS, group.size, group.rank)
        config = MoeRunnerConfig(
            num_experts=NUM_EXPERTS,
            num_local_experts=end - first,
            hidden_size=HIDDEN_SIZE,
            intermediate_size_per_partition=INTERMEDIATE,
            layer_id=0,
            top_k=TOP_K,
            num_fused_shared_experts=0,
            params_dtype=scheme.dtype,
            runner_backend=MoeRunnerBackend.TRITON,
            inplace=inplace,
            layer=SimpleNamespace(reduce_results=False),
        )
        self.weights = _weights_of(scheme, first, end)
        self.runner = MoeRunner(MoeRunnerBackend.TRITON, config)
        quantised = SimpleNamespace(weight_block_size=self.weights.block_shape)
        method = SimpleNamespace(
            runner=self.runner, quant_config=None if scheme.group is None else quantised
        )
        assert (self.runner.fused_func is not None) == inplace
        self.pool = pool_of(group, dispatch=scheme.travels or "auto")
        chosen = forms.runner_for(config, method, torch.device("cuda"), WORDING.flag)
        self.subject = forms.class_for(chosen)(
            config, self.pool, CAPACITY, chosen, self.weights.block_shape
        )
        self.subject.set_quant_config({"weight_dtype": self.weights.w13_weight.dtype})
        assert self.subject._exchange.config.recipe == scheme.travels

    def __call__(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> Any:
        """The layer's output, and whether a slot that the runner must not read held NaN."""
        given = StandardTopKOutput(weights, ids, None)
        dispatched = self.subject.dispatch(hidden_states=hidden, topk_output=given)
        empty = (dispatched.topk_output.topk_ids < 0).all(1)
        rows, quantised = dispatched.hidden_states, dispatched.hidden_states_pre_quant
        assert (quantised is not None) == (self.subject._experts.quant_dtype is not None)
        seen = rows if quantised is None else quantised[1]
        held_nan = bool(seen[empty].isnan().any())
        with interpreted.IN_TURN, torch.no_grad():
            output = self.runner.run(dispatched, self.weights)
        is_in_place = output.hidden_states.data_ptr() == rows.data_ptr()
        assert is_in_place == self.runner.config.inplace
        return self.subject.combine(combine_input=output), held_nan

    def poison(self) -> None:
        """Leave NaN in every slot, of both buffers."""
        hidden = torch.full((CAPACITY, HIDDEN_SIZE), float("nan"))
        hidden = hidden.to(self.runner.config.params_dtype)
        weights = torch.ones(CAPACITY, TOP_K)
        for experts in ([0, 2, 4], [0, 2, 4], [6, -1, -1], [6, -1, -1]):
            ids = torch.tensor(experts, dtype=torch.int32).expand(CAPACITY, -1).contiguous()
            given = StandardTopKOutput(weights, ids, None)
            rows = self.subject.dispatch(hidden_states=hidden, topk_output=given).hidden_states
            self.subject.combine(combine_input=StandardCombineInput(torch.zeros_like(rows)))


@pytest.fixture(autouse=True)
def on_cuda(monkeypatch: pytest.MonkeyPatch, resolved: Callable[..., Any]) -> Iterator[None]:
    """SGLang's context of a server with our flag, and what the runner lacks on CPU tensors."""
    monkeypatch.setenv("MOE_NVLINK_TIMEOUT_S", "60")
    monkeypatch.setenv("MOE_NVLINK_FIRST_TIMEOUT_S", "300")
    interpreted.install(functools.partial(monkeypatch.setattr, raising=False))
    monkeypatch.setattr(FusedOpPool, "_fused_funcs", dict(FusedOpPool._fused_funcs))
    context = runtime_context.create_context(resolved(), role="scheduler")
    with runtime_context.use_context(context):
        context.flags.moe.a2a_backend = MoeA2ABackend.CUSTOMIZED
        with runtime_context.get_parallel().override(tp_group=object()):
            yield


def _ragged(scheme: Scheme, inplace: bool) -> Callable[[ThreadGroup], Any]:
    """A rank's rounds of no token, of some and of all that fit, each into slots that hold NaN."""

    def rank_main(group: ThreadGroup) -> tuple[list[float], list[bool]]:
        layer = Layer(group, scheme, inplace)
        errors, nans = [], []
        for number in range(4):
            layer.poison()
            num_tokens = (number * (group.rank + 2) + 3 * group.rank) % (CAPACITY + 1)
            hidden, ids, weights = work_of(num_tokens, 100 * number + group.rank)
            hidden = hidden.to(scheme.dtype)
            got, held_nan = layer(hidden, ids, weights)
            expected = _dense(hidden, ids, weights, scheme)
            nans.append(held_nan)
            if got.shape != expected.shape or got.dtype != scheme.dtype:
                errors.append(float("inf"))
            elif num_tokens:
                error = (got.float() - expected).abs().nan_to_num(nan=float("inf")).max()
                # A reference that is nothing gives NaN, which is not small.
                errors.append(float(error / expected.abs().max()))
        layer.pool.close()
        return errors, nans

    return rank_main


def _check(scheme: Scheme, ep_size: int, inplace: bool, holds_nan: bool) -> None:
    for errors, nans in run_ranks(ep_size, _ragged(scheme, inplace)):
        assert errors
        assert all(error < scheme.tolerance for error in errors), errors
        assert any(nans) == holds_nan, nans


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("ep_size", [2, pytest.param(4, marks=pytest.mark.long)])
def test_the_layer_is_the_dense_one(name: str, ep_size: int) -> None:
    """By the fused function that we register; rows that may enter a maximum are zeros, not NaN."""
    fused.alias(fused.FUSED[0])
    _check(SCHEMES[name], ep_size, True, name not in ("fp8 by channel", "fp8 by tensor"))


@pytest.mark.parametrize("name", ["bf16", "fp8 by blocks"])
def test_so_is_it_by_the_permutes_of_the_runner(name: str) -> None:
    """SGLang's way without a fused function, into a new tensor: `TritonRunnerCore` in between."""
    _check(SCHEMES[name], 2, False, True)
