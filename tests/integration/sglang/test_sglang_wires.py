"""The formats that rows of SGLang's MoE layers travel in, there and back, against the recipes."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from moe_nvlink_plugin.errors import UnsupportedError
from moe_nvlink_plugin.integration.common.pool import ExchangePool
from moe_nvlink_plugin.recipes import FP8_BLOCK, MXFP8, NVFP4, combine_formats
from tests.integration.sglang.sglang_layer import (
    CAPACITY,
    HIDDEN_SIZE,
    NUM_EXPERTS,
    dense,
    dispatched,
    dispatcher_of,
    experts_of,
    layer,
    on_ranks,
    work_of,
)

E4M3 = torch.float8_e4m3fn
SCALE = torch.tensor(4.0)  # of nvfp4: activations are multiplied by it


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_NVLINK_TIMEOUT_S", "60")
    monkeypatch.setenv("MOE_NVLINK_FIRST_TIMEOUT_S", "60")


# Restored on arrival: every runner takes floats.


@pytest.mark.parametrize("runner", ["cpu", "triton", "flashinfer_cutlass", "deep_gemm"])
@pytest.mark.parametrize("recipe", [FP8_BLOCK, MXFP8, NVFP4], ids=lambda one: one.name)
def test_rows_of_a_recipe_that_a_user_names_are_restored(recipe: Any, runner: str) -> None:
    scale = torch.ones(1) if recipe.needs_global_scale else None

    def body(pool: ExchangePool) -> bool:
        subject = dispatcher_of(pool, runner)
        hidden, ids, weights = work_of(CAPACITY - pool.ranks.rank, pool.ranks.rank)
        rows, scales = recipe.quantise(hidden, scale)
        restored = recipe.dequantise(rows, scales, torch.float32, scale)
        expected = dense(restored, ids, weights)
        return torch.allclose(layer(subject, hidden, ids, weights), expected, atol=1e-5)

    assert on_ranks(2, body, dispatch=recipe.name) == [True, True]


# As they travel: what set_quant_config asks for, if the runner takes it.


def _dispatched(pool: ExchangePool, runner: str, quant_config: Any, **more: Any) -> Any:
    """What the runner of a configured layer is handed, and what was sent."""
    subject = dispatcher_of(pool, runner, params_dtype=torch.bfloat16, **more)
    subject.set_quant_config(quant_config)
    hidden, ids, weights = work_of(CAPACITY, 9)
    hidden, ids = hidden.bfloat16(), ids.abs()  # every token has an expert of the one rank
    return subject, hidden, dispatched(subject, (hidden, ids, weights))


@pytest.fixture
def interleave(monkeypatch: pytest.MonkeyPatch) -> None:
    """A FlashInfer whose interleaved layout is the linear one, upside down."""
    flashinfer = ModuleType("flashinfer")
    flashinfer.nvfp4_block_scale_interleave = lambda scales: scales.flip(0)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", flashinfer)


@pytest.mark.parametrize(
    "runner",
    ["flashinfer_cutlass", "flashinfer_cutedsl", "flashinfer_trtllm", "flashinfer_trtllm_routed"],
)
def test_nvfp4_rows_reach_the_runner_as_they_travelled(runner: str, interleave: None) -> None:
    def body(pool: ExchangePool) -> None:
        _, hidden, output = _dispatched(pool, runner, {"input_global_scale": SCALE})
        expected = NVFP4.quantise(hidden, SCALE.reshape(1))
        assert output.hidden_states.dtype == torch.uint8
        assert torch.equal(output.hidden_states, expected.rows)
        assert expected.scales is not None
        scales = expected.scales.view(torch.uint8)
        if runner == "flashinfer_cutlass":
            scales = scales.flip(0)
        assert output.hidden_states_scale.dtype == torch.uint8
        assert torch.equal(output.hidden_states_scale, scales)
        assert output.output_dtype == torch.bfloat16

    on_ranks(1, body)


@pytest.mark.parametrize("runner", ["flashinfer_trtllm", "flashinfer_trtllm_routed"])
def test_mxfp8_rows_reach_trtllm_as_they_travelled(runner: str) -> None:
    def body(pool: ExchangePool) -> None:
        config = {"weight_dtype": E4M3, "use_mxfp8": True}
        _, hidden, output = _dispatched(pool, runner, config)
        expected = MXFP8.quantise(hidden)
        assert expected.scales is not None
        assert output.hidden_states.dtype == E4M3
        assert torch.equal(output.hidden_states.view(torch.uint8), expected.rows.view(torch.uint8))
        assert output.hidden_states_scale.shape == (CAPACITY, HIDDEN_SIZE // 32)
        assert torch.equal(output.hidden_states_scale, expected.scales)

    on_ranks(1, body)


def test_fp8_blocks_reach_triton_beside_rows_of_the_output() -> None:
    def body(pool: ExchangePool) -> None:
        config = {"weight_dtype": E4M3, "use_mxfp8": False}
        subject, hidden, output = _dispatched(pool, "triton", config, block_shape=[128, 128])
        rows, scales = output.hidden_states_pre_quant
        expected = FP8_BLOCK.quantise(hidden)
        assert expected.scales is not None
        assert torch.equal(rows.view(torch.uint8), expected.rows.view(torch.uint8))
        assert torch.equal(scales, expected.scales)
        assert output.hidden_states_scale is None
        region = subject._exchange.combine_input()
        assert output.hidden_states.data_ptr() == region.data_ptr()
        assert output.hidden_states.dtype == torch.bfloat16

    on_ranks(1, body, dispatch="fp8_block")


@pytest.mark.parametrize(
    ("runner", "config", "more"),
    [
        # A draft's layer, or one of a mixed model.
        ("flashinfer_cutlass", {"input_global_scale": None}, {}),
        ("flashinfer_trtllm", {"weight_dtype": E4M3, "use_mxfp8": False}, {}),
        ("flashinfer_trtllm", {}, {}),
        # Runners that quantise for themselves.
        ("deep_gemm", {"weight_dtype": E4M3, "use_mxfp8": True}, {}),
        ("flashinfer_cutlass", {"weight_dtype": E4M3, "use_mxfp8": True}, {}),
        ("triton", {"weight_dtype": E4M3}, {"block_shape": [128, 128]}),
        # Rows that no block divides.
        ("flashinfer_trtllm", {"use_mxfp8": True}, {"hidden_size": HIDDEN_SIZE + 16}),
    ],
)
def test_other_layers_get_floats(runner: str, config: Any, more: dict[str, Any]) -> None:
    def body(pool: ExchangePool) -> None:
        subject = dispatcher_of(pool, runner, params_dtype=torch.bfloat16, **more)
        subject.set_quant_config(config)
        assert subject._exchange.config.recipe is None
        assert subject._experts.quant_dtype is None

    on_ranks(1, body)


def test_a_user_can_turn_quantised_rows_off() -> None:
    def body(pool: ExchangePool) -> None:
        subject, hidden, output = _dispatched(
            pool, "flashinfer_trtllm", {"input_global_scale": SCALE}
        )
        assert subject._exchange.config.recipe is None
        assert torch.equal(output.hidden_states, hidden)
        assert output.hidden_states_scale is None

    on_ranks(1, body, dispatch="bf16")


def test_a_layer_with_quantised_rows_is_the_dense_one_of_them() -> None:
    """Four ranks, rows of NVFP4, experts that dequantise what they are handed."""

    def body(pool: ExchangePool) -> float:
        subject = dispatcher_of(pool, "flashinfer_trtllm")
        subject.set_quant_config({"input_global_scale": SCALE})
        hidden, ids, weights = work_of(CAPACITY - pool.ranks.rank, pool.ranks.rank)
        output = dispatched(subject, (hidden, ids, weights))
        scale, scales = SCALE.reshape(1), output.hidden_states_scale.view(E4M3)
        floats = NVFP4.dequantise(output.hidden_states, scales, torch.float32, scale)
        partial = experts_of(
            subject, output._replace(hidden_states=floats, hidden_states_scale=None)
        )
        rows, row_scales = NVFP4.quantise(hidden, scale)
        seen = NVFP4.dequantise(rows, row_scales, torch.float32, scale)
        got = subject.combine(combine_input=partial)
        return float((got - dense(seen, ids, weights)).abs().max())

    assert max(on_ranks(4, body)) < 1e-5


# Agreement, and weights that are replaced.


def test_ranks_with_other_scales_are_refused() -> None:
    def body(pool: ExchangePool) -> str:
        subject = dispatcher_of(pool, "flashinfer_trtllm")
        with pytest.raises(UnsupportedError) as refused:
            subject.set_quant_config({"input_global_scale": SCALE + pool.ranks.rank})
        return str(refused.value)

    for message in on_ranks(2, body):
        assert "static activation scale of MoE layer 3 differs" in message


def test_new_weights_may_bring_another_scale_but_no_other_format() -> None:
    def body(pool: ExchangePool) -> None:
        subject = dispatcher_of(pool, "flashinfer_trtllm", params_dtype=torch.bfloat16)
        subject.set_quant_config({"input_global_scale": SCALE})
        if pool.ranks.rank == 0:  # without the other ranks
            subject.set_quant_config({"input_global_scale": SCALE * 2})
            scale = subject._experts.static_scale
            assert scale is not None
            assert torch.equal(scale, SCALE * 2)
            with pytest.raises(UnsupportedError, match="from nvfp4 to floats"):
                subject.set_quant_config({})

    on_ranks(2, body)


# On the way back.


@pytest.mark.parametrize("name", ["fp8_block", "nvfp4", "fp8_tensor"])
def test_partial_rows_travel_back_in_the_format_of_the_option(name: str) -> None:
    def body(pool: ExchangePool) -> bool:
        subject = dispatcher_of(pool)
        hidden, ids, weights = work_of(CAPACITY, pool.ranks.rank)
        got = layer(subject, hidden, ids, weights)
        share = NUM_EXPERTS // pool.ranks.size
        partial = torch.stack(
            [
                dense(hidden, torch.where(ids // share == owner, ids, -1), weights)
                for owner in range(pool.ranks.size)
            ],
            dim=1,
        )
        error = (got.double() - partial.double().sum(1)).abs()
        bound = combine_formats.error_bound(partial, name, torch.float32)
        inside = bool((error <= bound + 1e-5).all())
        return inside and float(error.max()) > 1e-4  # and something was rounded

    assert on_ranks(2, body, combine=name) == [True, True]
