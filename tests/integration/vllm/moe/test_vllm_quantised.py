"""In which format a layer's rows travel, and what its experts are handed then.

vLLM's own FusedMoEQuantConfig objects choose; the experts are ours and make floats of what they
get. MXFP8 is quantised by vLLM's own quantiser here too, which runs on CPU; in the place of its
CUDA kernels stand the recipes, which tests/kernels compares with vLLM's references.
"""

from __future__ import annotations

import functools
import math
import re
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.fused_moe import config as vllm_config
from vllm.model_executor.layers.fused_moe.utils import moe_kernel_quantize_input
from vllm.model_executor.layers.quantization.utils.mxfp8_utils import (
    mxfp8_e4m3_quantize,
    swizzle_mxfp8_scale,
)

from moe_nvlink_plugin import MoeAllToAll
from moe_nvlink_plugin.config import COMBINE_FORMATS
from moe_nvlink_plugin.errors import (
    ConfigError,
    DisagreementError,
    PeerError,
    UnsupportedError,
)
from moe_nvlink_plugin.integration.common import formats
from moe_nvlink_plugin.integration.common.formats import DispatchFormat, choose
from moe_nvlink_plugin.integration.common.options import Options
from moe_nvlink_plugin.integration.vllm.moe import experts_input, method
from moe_nvlink_plugin.integration.vllm.moe.cpu_prepare_finalize import CpuPrepareAndFinalize
from moe_nvlink_plugin.integration.vllm.moe.cuda_prepare_finalize import CudaPrepareAndFinalize
from moe_nvlink_plugin.integration.vllm.moe.experts_input import VllmExpertsInput
from moe_nvlink_plugin.recipes import (
    FP8_BLOCK,
    FP8_BLOCK_POW2,
    FP8_TENSOR,
    FP8_TOKEN,
    MXFP8,
    NVFP4,
)
from moe_nvlink_plugin.recipes.combine_formats import error_bound
from moe_nvlink_plugin.testing import run_ranks, try_ranks
from tests.integration.vllm.moe.vllm_layer import (
    CAPACITY,
    GEOMETRY,
    HIDDEN_SIZE,
    NO_OP,
    NUM_EXPERTS,
    TOP_K,
    Experts,
    Layer,
    WithoutData,
    alone,
    config_of,
    dense,
    expert_map_of,
    format_of,
    pool_of,
    ragged,
    work_of,
    worst_of,
)

pytestmark = pytest.mark.usefixtures("cuda_branches")

ONE = torch.ones(1)
#: Of activations up to about 5.
TENSOR_SCALE, GLOBAL_SCALE = torch.tensor(0.0125), torch.full((NUM_EXPERTS,), 500.0)


def fp8(**values: Any) -> Any:
    return vllm_config.fp8_w8a8_moe_quant_config(ONE, ONE, **values)


def mxfp8(**values: Any) -> Any:
    return vllm_config.mxfp4_mxfp8_moe_quant_config(
        ONE, ONE, **{"is_scale_swizzled": False, **values}
    )


def nvfp4(gscale: torch.Tensor | None = GLOBAL_SCALE, **values: Any) -> Any:
    given = {"is_scale_swizzled": False, **values}
    return vllm_config.nvfp4_moe_quant_config(ONE, ONE, gscale, ONE, ONE, ONE, **given)


def transposed(config: Any) -> Any:
    """As vLLM 0.33 says it of TRTLLM's FP8 blocks."""
    config.is_scale_transposed = True
    return config


#: By recipe: what vLLM's experts that take it are configured with.
CONFIGS: dict[Any, Callable[..., Any]] = {
    FP8_BLOCK: lambda: fp8(block_shape=[128, 128]),
    FP8_TOKEN: lambda: fp8(per_act_token_quant=True),
    FP8_TENSOR: lambda: fp8(a1_scale=TENSOR_SCALE),
    MXFP8: mxfp8,
    NVFP4: nvfp4,
}
GLOBAL_SCALES = {"fp8_tensor": TENSOR_SCALE, "nvfp4": GLOBAL_SCALE[:1]}
NAMES = [recipe.name for recipe in CONFIGS]


def floats_by(recipe: Any) -> Callable[[torch.Tensor, Any], torch.Tensor]:
    """What experts of that format make of their rows."""
    scale = GLOBAL_SCALES.get(recipe.name)

    def floats_of(rows: torch.Tensor, scales: Any) -> torch.Tensor:
        if recipe is FP8_TENSOR:
            assert scales is TENSOR_SCALE  # vLLM's scalar, not one per row
            scales = None
        floats: torch.Tensor = recipe.dequantise(rows, scales, torch.float32, scale)
        return floats

    return floats_of


def experts_of(recipe: Any, quant_config: Any = None, *, defers: bool = False) -> Experts:
    config = quant_config or CONFIGS[recipe]()
    takes = (lambda rows, scales: rows) if defers else floats_by(recipe)
    return Experts(config, takes, defers=defers)


@pytest.fixture
def quantised(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Calls of vLLM's quantiser, whose CUDA kernels the recipes stand for."""
    calls, original = list[Any](), moe_kernel_quantize_input

    def quantise(**given: Any) -> Any:
        calls.append(SimpleNamespace(**given))
        assert given["is_scale_swizzled"] is False  # rows would not be rows any more
        if given["quant_dtype"] == "mxfp8":
            return original(**given)
        (recipe,) = (
            r for r, config in CONFIGS.items() if _same_format(config(), SimpleNamespace(**given))
        )
        scale = None if given["A_scale"] is None else given["A_scale"].flatten()[:1]
        rows, scales = recipe.quantise(given["A"], scale)
        return rows, given["A_scale"] if recipe is FP8_TENSOR else scales

    monkeypatch.setattr(experts_input, "moe_kernel_quantize_input", quantise)
    return calls


def _same_format(config: Any, given: Any) -> bool:
    has_scale = (config.a1_gscale if given.quant_dtype == "nvfp4" else config.a1_scale) is not None
    return (
        config.quant_dtype == given.quant_dtype
        and config.block_shape == given.block_shape
        and config.per_act_token_quant == given.per_act_token_quant
        and has_scale == (given.A_scale is not None)
    )


# Which format.


@pytest.mark.parametrize("recipe", CONFIGS, ids=NAMES)
def test_the_model_chooses_the_recipe(recipe: Any) -> None:
    chosen = format_of(experts_of(recipe), Options())
    assert chosen.recipe == recipe
    assert (chosen.by_framework, chosen.restored_to, chosen.on_arrival) == (False, None, False)
    assert format_of(experts_of(recipe), Options(quantise="framework")).by_framework
    named = format_of(experts_of(recipe), Options(dispatch=recipe.name))
    assert named == chosen  # nothing is restored when it is what they take anyway


@pytest.mark.parametrize("recipe", CONFIGS, ids=NAMES)
def test_experts_that_quantise_for_themselves_get_activations(recipe: Any) -> None:
    assert format_of(experts_of(recipe, defers=True), Options()) == DispatchFormat()


def test_unquantised_experts_get_activations() -> None:
    experts = Experts(vllm_config.FUSED_MOE_UNQUANTIZED_CONFIG)
    for name in ("auto", "bf16"):
        assert format_of(experts, Options(dispatch=name)) == DispatchFormat()


@pytest.mark.parametrize(
    ("quant_config", "words"),
    [
        (fp8(), "one dynamic scale per tensor"),
        (fp8(block_shape=[128, 64]), "blocks of 64"),
        (vllm_config.int8_w8a8_moe_quant_config(ONE, ONE, None, None), "torch.int8"),
    ],
)
def test_fp8_and_int8_of_no_recipe_are_quantised_on_arrival(
    quant_config: Any, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    """By default, with one warning per process; by a user who asks for it, without."""
    formats._warn_of_activations.cache_clear()
    experts = Experts(quant_config)
    on_arrival = DispatchFormat(experts.quant_dtype, on_arrival=True)
    assert format_of(experts, Options(dispatch="bf16")) == on_arrival
    assert not caplog.records
    assert [format_of(experts, Options()) for _ in range(2)] == [on_arrival] * 2
    (record,) = caplog.records
    assert words in record.getMessage()
    assert "rows travel in torch.float32" in record.getMessage()


@pytest.mark.parametrize(
    ("quant_config", "words"),
    [
        (mxfp8(mx_alignment=256), "padded to a multiple of 256"),
        (nvfp4(None), "without a static global scale"),
    ],
)
def test_what_no_recipe_is_names_the_way_out(quant_config: Any, words: str) -> None:
    experts = Experts(quant_config)
    with pytest.raises(UnsupportedError, match=words) as caught:
        format_of(experts, Options())
    assert "MOE_NVLINK_DISPATCH=bf16" in str(caught.value)
    after = format_of(experts, Options(dispatch="bf16"))
    assert (after.recipe, after.on_arrival) == (None, True)


def test_padding_that_changes_nothing_is_no_padding() -> None:
    experts = Experts(mxfp8(mx_alignment=64))
    assert format_of(experts, Options()).recipe is MXFP8


def test_a_hidden_size_that_the_models_recipe_cannot_do() -> None:
    def find_recipe(name: str) -> Any:
        return MoeAllToAll.check(config_of(2, 0, recipe=name, hidden_size=100))

    taken = VllmExpertsInput.of(experts_of(FP8_BLOCK))
    with pytest.raises(ConfigError, match="hidden_size=100 is not a multiple of 128"):
        choose(taken, 100, torch.float32, torch.device("cpu"), Options(), find_recipe)


# Through vLLM's modular kernel.


def restored(recipe: Any, hidden: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """Rows that have travelled by the recipe."""
    floats: torch.Tensor = recipe.dequantise(*recipe.quantise(hidden, scale), torch.float32, scale)
    return floats


def _run(group: Any, recipe: Any, options: Options) -> Any:
    """Of one rank: largest error of its rounds, what its experts got, bytes dispatched."""
    errors, seen = [], []
    with Layer(group, experts=experts_of(recipe), options=options) as layer:
        for hidden, ids, weights in ragged(group.rank, 4):
            got = layer(hidden, ids, weights)
            there_and_back = restored(recipe, hidden, GLOBAL_SCALES.get(recipe.name))
            errors.append(worst_of(got, dense(there_and_back, ids, weights)))
            call = layer.experts.calls[-1]
            local = call.weights_then.any(1)
            seen.append(call.rows_then[local].view(torch.uint8))
            if call.scales_then is not None and call.scales_then.ndim:
                seen.append(call.scales_then[local].contiguous().view(torch.uint8))
            layer.poison()
        return max(errors), seen, layer.exchange.stats().bytes_dispatched


@pytest.mark.parametrize("recipe", CONFIGS, ids=NAMES)
def test_fused_and_framework_quantised_dispatch_are_the_same_bits(
    recipe: Any, quantised: list[Any]
) -> None:
    fused = run_ranks(2, lambda group: _run(group, recipe, Options()))
    assert not quantised  # vLLM's quantiser had nothing to do
    framework = run_ranks(2, lambda group: _run(group, recipe, Options(quantise="framework")))
    assert quantised
    for ours, theirs in zip(fused, framework, strict=True):
        assert ours[0] < 1e-5
        assert theirs[0] < 1e-5
        assert sum(part.numel() for part in ours[1]) > 0
        assert all(torch.equal(a, b) for a, b in zip(ours[1], theirs[1], strict=True))
        assert ours[2] == theirs[2]


def test_rows_that_vllm_quantises_on_arrival(quantised: list[Any]) -> None:
    """The experts see the same rows, whoever quantised them where; the bytes tell which it was."""
    (worst, seen, sent), (_, before, fewer) = (
        run_ranks(1, functools.partial(_run, recipe=MXFP8, options=options))[0]
        for options in (Options(dispatch="bf16"), Options())
    )
    assert worst < 1e-5
    assert len(quantised) == 4
    assert all(torch.equal(a, b) for a, b in zip(seen, before, strict=True))
    assert fewer < 0.4 * sent


@pytest.mark.parametrize("name", ["auto", "fp8_block", "fp8_block_pow2"])
def test_scales_that_are_powers_of_two_are_made_by_our_kernel(
    name: str, quantised: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If DeepGEMM wants them: rows and scales of the recipe, and vLLM's quantiser is not asked."""
    options = Options(dispatch=name)
    if name != "fp8_block_pow2":
        assert format_of(experts_of(FP8_BLOCK), options).recipe == FP8_BLOCK
    monkeypatch.setattr(experts_input, "is_deep_gemm_e8m0_used", lambda: True)
    chosen = format_of(experts_of(FP8_BLOCK), options)
    assert chosen.recipe == FP8_BLOCK_POW2
    assert not chosen.by_framework
    assert chosen.restored_to is None
    assert format_of(experts_of(FP8_TOKEN), Options()).recipe == FP8_TOKEN
    framework = Options(dispatch=name, quantise="framework")
    assert format_of(experts_of(FP8_BLOCK), framework).by_framework
    hidden, ids, weights = work_of(4, 0)
    with alone(experts=experts_of(FP8_BLOCK), options=options) as layer:
        layer(hidden, ids.clamp(min=0), weights)
    (call,) = layer.experts.calls
    rows, scales = FP8_BLOCK_POW2.quantise(hidden)
    assert scales is not None
    assert torch.equal(call.rows_then[:4].view(torch.uint8), rows.view(torch.uint8))
    assert torch.equal(call.scales_then[:4], scales)
    assert not quantised


@pytest.mark.parametrize("dispatch", ["auto", "bf16"])
def test_one_dynamic_scale_of_what_arrived(dispatch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Old bytes of empty slots do not enter the maximum."""

    def quantise(**given: Any) -> Any:
        scale = (given["A"].abs().max() / 448.0).reshape(1)
        return FP8_TENSOR.quantise(given["A"], scale).rows, scale

    monkeypatch.setattr(experts_input, "moe_kernel_quantize_input", quantise)

    def floats_of(rows: torch.Tensor, scales: Any) -> torch.Tensor:
        assert scales.shape == (1,)
        return FP8_TENSOR.dequantise(rows, None, torch.float32, scales)

    experts = Experts(fp8(), floats_of)
    with alone(experts=experts, options=Options(dispatch=dispatch)) as layer:
        for number in (1, 2):
            hidden, ids, weights = work_of(3 - number, number)
            ids = ids.clamp(min=0)
            expected = dense(floats_of(*quantise(A=hidden)), ids, weights)
            torch.testing.assert_close(layer(hidden, ids, weights), expected, rtol=1e-5, atol=1e-5)
            layer.exchange._layer.channel(0)._views[2].fill_(math.inf)


# A recipe that a user names.


def _named(group: Any, recipe: Any, experts: Experts, options: Options, factor: float) -> float:
    """Largest error against experts that get the rows as the recipe left them."""
    errors = []
    scale = torch.full((1,), factor) if recipe.needs_global_scale else None
    with Layer(group, experts=experts, options=options) as layer:
        for number in range(3):
            hidden, ids, weights = work_of((number + 3 * group.rank) % CAPACITY, number)
            rows = restored(recipe, hidden, scale)
            handed = MXFP8.quantise(rows) if experts.quant_dtype == "mxfp8" else (rows, None)
            expected = dense(experts.floats_of(*handed), ids, weights)
            errors.append(worst_of(layer(hidden, ids, weights), expected))
            layer.poison()
    return max(errors)


@pytest.mark.parametrize("recipe", CONFIGS, ids=NAMES)
@pytest.mark.parametrize("takes", ["floats", "mxfp8", "quantises"])
def test_a_named_recipe_is_undone_for_the_experts(recipe: Any, takes: str) -> None:
    """Also where they take another format, which vLLM then makes of the restored rows."""
    options = Options(dispatch=recipe.name)
    factor = 1.0
    if recipe is FP8_TENSOR:
        factor = 0.0125
        options = options._replace(dispatch_global_scale=factor)

    def rank_main(group: Any) -> float:
        experts = {
            "floats": lambda: Experts(),
            "mxfp8": lambda: experts_of(MXFP8),
            "quantises": lambda: experts_of(FP8_BLOCK, defers=True),
        }[takes]()
        return _named(group, recipe, experts, options, factor)

    assert max(run_ranks(2, rank_main)) < 1e-5


def test_the_global_scale_of_a_named_recipe() -> None:
    experts = Experts()
    usual = format_of(experts, Options(dispatch="nvfp4"))
    given = format_of(experts, Options(dispatch="nvfp4", dispatch_global_scale=16))
    assert torch.equal(usual.global_scale or ONE * 0, torch.tensor([1.0]))
    assert torch.equal(given.global_scale or ONE * 0, torch.tensor([16.0]))
    # A constant, not the checkpoint's.
    assert given.static_scale(VllmExpertsInput.of(experts)) is None
    with pytest.raises(UnsupportedError, match="dispatch_global_scale"):
        format_of(experts, Options(dispatch="fp8_tensor"))
    with pytest.raises(UnsupportedError, match=r'mxfp8 takes no scale.*"dispatch_global_scale"'):
        format_of(experts, Options(dispatch="mxfp8", dispatch_global_scale=2.0))
    # The one the model itself asks for comes with a scale.
    own = format_of(experts_of(FP8_TENSOR), Options(dispatch="fp8_tensor"))
    assert own.global_scale is None


def test_names_that_cannot_be_dispatched_in() -> None:
    experts = Experts()
    with pytest.raises(ConfigError, match="'fp7' is unknown"):
        format_of(experts, Options(dispatch="fp7"))
    with pytest.raises(UnsupportedError, match="fp32 does not say how to quantise"):
        format_of(experts, Options(dispatch="fp32"))


def test_gpus_are_warned_of_restoring(caplog: pytest.LogCaptureFixture) -> None:
    formats._warn_of_restoring.cache_clear()
    experts = VllmExpertsInput.of(Experts())
    meta: Any = SimpleNamespace(type="cuda")
    choose(experts, 128, torch.float32, meta, Options(dispatch="mxfp8"), lambda name: MXFP8)
    assert "mxfp8 are dequantised to torch.float32" in caplog.text


# On CPU ranks.


def _on_cpu(
    group: Any, recipe: Any, options: Options, experts: Experts, *, stand_in: bool = False
) -> Any:
    """The error of one round, and the dtype of the rows that the experts are handed."""
    chosen = format_of(experts, options)
    if stand_in:
        taken = VllmExpertsInput.of(experts)
        chosen = pool_of(group, options).agree_on_format("layer 1", taken, GEOMETRY)
    values = {"recipe": None if chosen.recipe is None else chosen.recipe.name}
    exchange = MoeAllToAll.create(config_of(group.size, group.rank, **values), group)
    subject = CpuPrepareAndFinalize(exchange, expert_map_of(exchange.config), chosen)
    hidden, ids, weights = work_of(2 + group.rank, group.rank)
    rows, scales, _, local_ids, sent_weights = subject.prepare(
        hidden, weights, ids, NUM_EXPERTS, None, False, experts.quant_config, experts.defers
    )
    assert rows.is_contiguous()
    assert local_ids.shape == sent_weights.shape == (rows.shape[0], 1)  # a row for each choice
    assert rows.shape[0] >= int(exchange._layer.channel(0).recv_counts.sum())
    floats = experts.floats_of(rows, scales)
    global_ids = local_ids + subject._first
    output = torch.empty_like(hidden)
    made = dense(floats, global_ids, sent_weights)
    subject.finalize(output, made, sent_weights, local_ids, False, NO_OP)
    exchange.close()
    scale = GLOBAL_SCALES.get(recipe.name) if chosen.restored_to is None else torch.ones(1)
    return worst_of(output, dense(restored(recipe, hidden, scale), ids, weights)), rows.dtype


@pytest.mark.parametrize("recipe", [FP8_BLOCK, FP8_TOKEN, MXFP8, NVFP4], ids=lambda r: r.name)
def test_cpu_ranks_restore_filled_rows_only(recipe: Any) -> None:
    options, floats = Options(dispatch=recipe.name), Experts()
    for error, dtype in run_ranks(2, lambda group: _on_cpu(group, recipe, options, floats)):
        assert error < 1e-5
        assert dtype == torch.float32


@pytest.mark.parametrize("recipe", CONFIGS, ids=NAMES)
@pytest.mark.parametrize(
    "options", [Options(), Options(quantise="framework"), Options(dispatch="bf16")]
)
def test_cpu_ranks_hand_out_filled_rows_only(recipe: Any, options: Options) -> None:
    """Quantised, for experts that take them; none of vLLM 0.32's for CPU do.

    The recipe stands for vLLM's CUDA kernels; MXFP8 is quantised by vLLM itself.
    """
    by_vllm = options != Options()

    def rank_main(group: Any) -> Any:
        return _on_cpu(group, recipe, options, experts_of(recipe), stand_in=by_vllm)

    for error, dtype in run_ranks(2, rank_main):
        assert error < 1e-5
        assert dtype == recipe.hidden_row(HIDDEN_SIZE).dtype


# Layouts of scales.


def _scales_of_a_round(quant_config: Any, recipe: Any) -> tuple[Any, torch.Tensor, int]:
    """What the experts are handed, the linear scales of the filled slots, the number of slots."""
    experts = Experts(quant_config, lambda rows, _: torch.zeros(len(rows), HIDDEN_SIZE))
    hidden, ids, weights = work_of(CAPACITY, 5)
    with alone(experts=experts) as layer:
        layer(hidden, ids.clamp(min=0), weights)
    (call,) = experts.calls
    linear = recipe.quantise(hidden, GLOBAL_SCALES.get(recipe.name)).scales
    return call.scales_then, linear, CAPACITY


def test_nvfp4_scales_are_interleaved_by_dispatch(monkeypatch: pytest.MonkeyPatch) -> None:
    """As FlashInfer's function for it makes them, which is vLLM's of MXFP8 on other bytes."""

    def interleave(scales: torch.Tensor) -> torch.Tensor:
        raise AssertionError("a launch of its own")

    monkeypatch.setattr(experts_input, "nvfp4_block_scale_interleave", interleave)
    handed, linear, slots = _scales_of_a_round(nvfp4(is_scale_swizzled=True), NVFP4)
    assert (handed.dtype, handed.dim()) == (torch.uint8, 1)
    expected = swizzle_mxfp8_scale(linear.view(torch.uint8), M=slots, K=2 * HIDDEN_SIZE)
    assert torch.equal(handed, expected)
    handed, linear, _ = _scales_of_a_round(nvfp4(), NVFP4)
    assert handed.dtype == torch.float8_e4m3fn
    assert torch.equal(handed.view(torch.uint8), linear.view(torch.uint8))


def test_mxfp8_scales_are_interleaved_by_dispatch() -> None:
    handed, linear, slots = _scales_of_a_round(mxfp8(is_scale_swizzled=True), MXFP8)
    assert torch.equal(handed, swizzle_mxfp8_scale(linear, M=slots, K=HIDDEN_SIZE))
    # As vLLM's quantiser lays them out for the same experts on one rank.
    hidden, _, _ = work_of(CAPACITY, 5)
    assert torch.equal(handed, mxfp8_e4m3_quantize(hidden, is_sf_swizzled_layout=True)[1])


def test_block_scales_become_column_major_where_asked() -> None:
    config = CONFIGS[FP8_BLOCK]()
    handed, linear, _ = _scales_of_a_round(config, FP8_BLOCK)
    assert handed.is_contiguous()
    assert torch.equal(handed, linear)
    config = transposed(config)
    handed, linear, slots = _scales_of_a_round(config, FP8_BLOCK)
    assert torch.equal(handed, linear)
    assert handed.t().is_contiguous()
    # If vLLM quantises on arrival, or on CPU ranks, the framework's op does it.
    for chosen in (
        format_of(experts_of(FP8_BLOCK, config), Options(dispatch="bf16")),
        DispatchFormat(torch.float8_e4m3fn, FP8_BLOCK),
    ):
        assert chosen.scales_layout == "linear"
    scales, rows = torch.rand(slots, 3), torch.zeros(slots, 384, dtype=torch.float8_e4m3fn)
    _, laid_out = chosen.receive(rows, scales, torch.ones(slots, 1), VllmExpertsInput(config))
    assert laid_out is not None
    assert torch.equal(laid_out, scales)
    assert laid_out.stride() == (1, slots)


def test_which_layout_dispatch_makes() -> None:
    """None that the recipe's scales cannot have, and none for rows that are restored."""
    swizzled = mxfp8(is_scale_swizzled=True)
    assert format_of(experts_of(MXFP8, swizzled), Options()).scales_layout == "interleaved"
    assert format_of(experts_of(MXFP8), Options()).scales_layout == "linear"
    restored = format_of(experts_of(MXFP8, swizzled), Options(dispatch="nvfp4"))
    assert restored.scales_layout == "linear"
    by_tensor = experts_of(FP8_TENSOR, transposed(CONFIGS[FP8_TENSOR]()))
    assert format_of(by_tensor, Options()).scales_layout == "linear"
    here = torch.device("cpu")
    taken = VllmExpertsInput.of(experts_of(MXFP8, swizzled))
    chosen = choose(taken, HIDDEN_SIZE, torch.float32, here, Options(), lambda _: MXFP8)
    assert chosen.scales_layout == "linear"  # CPU ranks hand out copies of the filled rows
    cuda: Any = SimpleNamespace(type="cuda")
    chosen = choose(taken, HIDDEN_SIZE, torch.float32, cuda, Options(), lambda _: MXFP8)
    assert chosen.scales_layout == "interleaved"


# Static scales.


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
@pytest.mark.parametrize("recipe", [FP8_TENSOR, NVFP4], ids=lambda r: r.name)
def test_a_static_scale_that_is_none(recipe: Any, bad: float) -> None:
    given = torch.full((3,), bad)
    config = nvfp4(given) if recipe is NVFP4 else fp8(a1_scale=given)
    chosen = format_of(experts_of(recipe, config), Options())
    with pytest.raises(UnsupportedError, match=f"the checkpoint is {bad:g}, "):
        chosen.static_scale(VllmExpertsInput(config))


def test_a_static_scale_for_each_expert() -> None:
    config = nvfp4(torch.tensor([2.0, 3.0]))
    chosen = format_of(experts_of(NVFP4, config), Options())
    with pytest.raises(UnsupportedError, match=r"of its own \(2, 3\).*MOE_NVLINK_DISPATCH=bf16"):
        chosen.static_scale(VllmExpertsInput(config))
    assert format_of(experts_of(NVFP4), Options()).static_scale(VllmExpertsInput(nvfp4())) == 500.0
    assert format_of(experts_of(FP8_BLOCK), Options()).static_scale(VllmExpertsInput(None)) is None


def _set_up(
    configs: list[Any],
    names: tuple[str, str] = ("layer 3", "layer 3"),
    options: tuple[Options, Options] = (Options(), Options()),
) -> list[str]:
    """What each rank is told when the ranks' experts have these configurations."""

    def rank_main(group: Any) -> str:
        experts = VllmExpertsInput.of(Experts(configs[group.rank]))
        mine = pool_of(group, options[group.rank])
        try:
            chosen = mine.agree_on_format(names[group.rank], experts, GEOMETRY)
        except (ConfigError, DisagreementError, MemoryError, PeerError, UnsupportedError) as error:
            return f"{type(error).__name__}: {error}"
        return "" if chosen.recipe is None else chosen.recipe.name

    return run_ranks(2, rank_main)


def test_ranks_agree_on_the_format() -> None:
    assert _set_up([nvfp4(), nvfp4()]) == ["nvfp4", "nvfp4"]
    same = torch.full((2,), 500.0)  # as many as this rank has experts, which may differ
    assert _set_up([nvfp4(), nvfp4(same)]) == ["nvfp4", "nvfp4"]


def test_one_ranks_problem_is_told_to_all() -> None:
    own, others = _set_up([nvfp4(torch.zeros(1)), nvfp4()])
    assert own.startswith("UnsupportedError: --all2all-backend moe_nvlink: layer 3: the static")
    said = "rank 0: UnsupportedError: the static"
    assert others.startswith(f"PeerError: layer 3 cannot be set up on another rank; {said}")


class LoadedLayer:
    """As much of a layer, its quant method and vLLM's kernel as is looked at; a step may fail."""

    layer_name, expert_map, moe_quant_config = "layer 3", None, None
    moe_config = SimpleNamespace(
        num_experts=NUM_EXPERTS,
        experts_per_token=TOP_K,
        hidden_dim=HIDDEN_SIZE,
        max_num_tokens=CAPACITY,
        sp_size=1,
        in_dtype=torch.float32,
        moe_parallel_config=SimpleNamespace(enable_eplb=False),
    )

    def __init__(self, step: str) -> None:
        self.step = step
        self.moe_kernel: Any = None
        self.quant_method: Any = self
        self.w13_weight, self.w2_weight = "loaded", "loaded"

    def process_weights_after_loading(self, layer: Any) -> None:
        if self.step == "weights":
            raise MemoryError("no room for weights")
        if self.step == "no experts":
            return
        self.moe_kernel = SimpleNamespace(
            is_monolithic=self.step == "monolithic",
            prepare_finalize=None,
            fused_experts=Experts(),
        )
        if self.step == "sums":  # the model says it after it has made the layer
            self.moe_config = SimpleNamespace(
                **vars(type(self).moe_config), skip_final_all_reduce=True
            )
        if self.step == "placement":
            self.expert_map = torch.tensor([-1, 0, -1, 1, -1, 2, 3])
        if self.step == "packed":
            del layer.w2_weight

    def _replace_quant_method(self, quant_method: Any) -> None:
        self.quant_method = quant_method


def _load(steps: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What becomes of two ranks whose layers fail in these steps: the method of each."""
    pools = threading.local()
    monkeypatch.setattr(method, "_pool", lambda: pools.mine)

    def rank_main(group: Any) -> Any:
        pools.mine = pool_of(group, Options())
        layer = LoadedLayer(steps[group.rank])
        method.install_after_loading(layer)
        layer.process_weights_after_loading(layer)
        return type(layer.quant_method)

    with set_current_vllm_config(VllmConfig()):
        return try_ranks(2, rank_main)


def test_ranks_that_set_a_layer_up_have_our_method(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _load(("", ""), monkeypatch) == [method.MoeNvlinkFusedMoEMethod] * 2


@pytest.mark.parametrize(
    ("step", "told"),
    [
        ("weights", "MemoryError: no room for weights"),
        ("monolithic", "UnsupportedError: .*without vLLM's modular kernel"),
        ("no experts", "UnsupportedError: .*without vLLM's modular kernel"),
        ("packed", "UnsupportedError: .*reads w2_weight, and LoadedLayer keeps the weights of"),
        ("sums", r"UnsupportedError: .*\(Inkling is one\) sums the output of layer 3"),
        ("placement", "UnsupportedError: vLLM placed experts"),
    ],
)
def test_no_rank_waits_for_one_that_has_failed(
    step: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever step of a layer's set-up it was: each rank raises, and names the rank that did."""
    others, own = _load(("", step), monkeypatch)
    assert re.match(told, f"{type(own).__name__}: {own}")
    assert isinstance(others, PeerError), repr(others)
    assert re.search(f"layer 3 cannot be set up on another rank; rank 1: {told}", str(others))


def test_ranks_with_different_formats_or_layers() -> None:
    for told in _set_up([CONFIGS[FP8_BLOCK](), CONFIGS[FP8_TOKEN]()]):
        assert re.match("(?s)DisagreementError.*recipe='fp8_block'.*recipe='fp8_token'", told)
    for told in _set_up([nvfp4(), nvfp4()], ("layer 3", "layer 4")):
        assert told.startswith("DisagreementError")


def test_scales_of_a_named_recipe_that_differ_between_ranks() -> None:
    """A row would be dequantised by another scale than it was quantised by, in silence."""
    mine, others = Options("nvfp4", dispatch_global_scale=2.0), Options("nvfp4")
    floats = [vllm_config.FUSED_MOE_UNQUANTIZED_CONFIG] * 2
    assert _set_up(floats, options=(mine, mine)) == ["nvfp4", "nvfp4"]
    for told in _set_up(floats, options=(mine, others)):
        scales = "dispatch_global_scale 2.0.*dispatch_global_scale 1.0"
        assert re.match(f"(?s)DisagreementError.*{scales}", told)


# Combine.


def _combined(group: Any, name: str) -> Any:
    """Result, dense result, what they may differ by, and the bytes that came back."""
    hidden, ids, weights = work_of(CAPACITY, group.rank)
    with Layer(group, options=Options(combine=name)) as layer:
        got, expected = layer(hidden, ids, weights), dense(hidden, ids, weights)
        subject, moved = layer.subject, layer.exchange.stats().bytes_combined_remote
    owners = (ids >= subject._end if group.rank == 0 else ids < subject._first).long()
    partial = [dense(hidden, torch.where(owners == owner, ids, -1), weights) for owner in (0, 1)]
    bound = error_bound(torch.stack(partial, 1), name) if name != "bf16" else torch.zeros(1)
    return got, expected, bound, moved


def test_rows_come_back_in_the_format_that_was_asked_for() -> None:
    moved = {}
    for name in COMBINE_FORMATS:
        for got, expected, bound, remote in run_ranks(2, functools.partial(_combined, name=name)):
            moved[name] = remote
            error = (got - expected).abs()
            assert bool((error <= bound + 1e-5).all())
            assert (float(error.max()) > 1e-4) == (name != "bf16")
    assert 3 * moved["fp8_block"] < moved["bf16"]
    assert 6 * moved["nvfp4"] < moved["bf16"]
    assert 4 * moved["fp8_tensor"] == moved["bf16"]


def test_experts_that_reduce_into_another_type_are_refused() -> None:
    class InFloat(Experts):
        def workspace_dtype(self, act_dtype: torch.dtype) -> torch.dtype:
            return torch.bfloat16

    exchange: Any = SimpleNamespace(config=config_of(1, 0, combine="fp8_block"))
    subject = CpuPrepareAndFinalize(exchange, None)
    with pytest.raises(UnsupportedError, match=r"reduces its rows into torch.bfloat16.*fp8_block"):
        subject.post_init_setup(InFloat())


# Fit for a CUDA graph.


@pytest.mark.parametrize("way", ["fused", "framework", "restored", "on_arrival"])
@pytest.mark.parametrize("recipe", CONFIGS, ids=NAMES)
def test_no_value_is_read_and_no_shape_depends_on_one(
    recipe: Any, way: str, quantised: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    interleaved = torch.empty(128, HIDDEN_SIZE // 16, dtype=torch.uint8, device="meta")
    monkeypatch.setattr(experts_input, "nvfp4_block_scale_interleave", lambda scales: interleaved)
    experts = experts_of(recipe)
    chosen = {
        "fused": lambda: format_of(experts, Options()),
        "framework": lambda: format_of(experts, Options(quantise="framework")),
        "restored": lambda: DispatchFormat(
            experts.quant_dtype,
            recipe,
            restored_to=torch.float32,
            on_arrival=True,
            global_scale=torch.ones(1, device="meta"),
        ),
        "on_arrival": lambda: format_of(experts, Options(dispatch="bf16")),
    }[way]()
    exchange: Any = WithoutData(chosen)
    subject = CudaPrepareAndFinalize(exchange, expert_map_of(exchange.config), chosen)
    config = experts.quant_config
    config.is_scale_swizzled = config.is_scale_transposed = True
    for scale in ("scale", "alpha_or_gscale"):
        if getattr(config._a1, scale) is not None:
            setattr(config._a1, scale, torch.ones(1, device="meta"))
    hidden, ids, weights = (each.to("meta") for each in work_of(4, 0))
    rows, *_ = subject.prepare(hidden, weights, ids, NUM_EXPERTS, None, False, config, False)
    assert rows.shape == (2 * CAPACITY, recipe.hidden_row(HIDDEN_SIZE).elements)
    assert rows.dtype == recipe.hidden_row(HIDDEN_SIZE).dtype
