"""In which format a layer's rows travel, and what its experts are handed then.

vLLM's own FusedMoEQuantConfig objects choose; the experts are ours and make floats of what they
get. MXFP8 is quantised by vLLM's own quantiser here too, which runs on CPU; in the place of its
CUDA kernels stand the recipes, which tests/kernels compares with vLLM's references.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from vllm.model_executor.layers.fused_moe import config as vllm_config
from vllm.model_executor.layers.fused_moe.utils import moe_kernel_quantize_input
from vllm.model_executor.layers.quantization.utils.mxfp8_utils import swizzle_mxfp8_scale

from moe_nvlink_plugin.config import COMBINE_FORMATS
from moe_nvlink_plugin.errors import ConfigError, MoeNvlinkError, UnsupportedError
from moe_nvlink_plugin.integration.common import formats
from moe_nvlink_plugin.integration.common.formats import DispatchFormat, choose
from moe_nvlink_plugin.integration.common.options import Options
from moe_nvlink_plugin.integration.vllm.moe import experts_input
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
from moe_nvlink_plugin.testing import run_ranks
from tests.integration.vllm.moe.vllm_layer import (
    CAPACITY,
    GEOMETRY,
    HIDDEN_SIZE,
    LEFT_OPEN,
    NUM_EXPERTS,
    TOP_K,
    Experts,
    Layer,
    WithoutData,
    alone,
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
    # Experts that quantise for themselves get activations.
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


PADDED, UNSCALED = mxfp8(mx_alignment=256), nvfp4(None)


@pytest.mark.parametrize(
    ("experts", "dispatch", "error", "told"),
    [
        (Experts(PADDED), "auto", UnsupportedError, "padded to a multiple of 256.*=bf16"),
        (Experts(UNSCALED), "auto", UnsupportedError, "global scale.*MOE_NVLINK_DISPATCH=bf16"),
        (Experts(), "fp8_tensor", UnsupportedError, "dispatch_global_scale"),
        (Experts(), "fp32", UnsupportedError, "fp32 does not say how to quantise"),
        (Experts(), "fp7", ConfigError, "'fp7' is unknown"),
    ],
)
def test_formats_that_are_refused(experts: Any, dispatch: str, error: Any, told: str) -> None:
    with pytest.raises(error, match=told):
        format_of(experts, Options(dispatch))


def test_ways_out_and_padding_that_changes_nothing() -> None:
    for config in (PADDED, UNSCALED):
        chosen = format_of(Experts(config), Options("bf16"))
        assert (chosen.recipe, chosen.on_arrival) == (None, True)
    assert format_of(Experts(mxfp8(mx_alignment=64)), Options()).recipe is MXFP8


def test_the_global_scale_of_a_named_recipe() -> None:
    experts = Experts()
    usual = format_of(experts, Options("nvfp4"))
    given = format_of(experts, Options("nvfp4", dispatch_global_scale=16))
    assert torch.equal(usual.global_scale or ONE * 0, torch.tensor([1.0]))
    assert torch.equal(given.global_scale or ONE * 0, torch.tensor([16.0]))
    # A constant, not the checkpoint's.
    assert given.static_scale(VllmExpertsInput.of(experts)) is None
    # The one the model itself asks for comes with a scale.
    assert format_of(experts_of(FP8_TENSOR), Options("fp8_tensor")).global_scale is None
    with pytest.raises(UnsupportedError, match=r'mxfp8 takes no scale.*"dispatch_global_scale"'):
        format_of(experts, Options("mxfp8", dispatch_global_scale=2.0))


def test_a_hidden_size_that_the_models_recipe_cannot_do() -> None:
    with pytest.raises(ConfigError, match="hidden_size=100 is not a multiple of 128"):
        format_of(experts_of(FP8_BLOCK), Options(), hidden_size=100)


def test_gpus_are_warned_of_restoring(caplog: pytest.LogCaptureFixture) -> None:
    formats._warn_of_restoring.cache_clear()
    experts = VllmExpertsInput.of(Experts())
    gpu: Any = SimpleNamespace(type="cuda")
    choose(experts, 128, torch.float32, gpu, Options("mxfp8"), lambda name: MXFP8)
    assert "mxfp8 are dequantised to torch.float32" in caplog.text


# Through vLLM's modular kernel.


def restored(recipe: Any, hidden: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """Rows that have travelled by the recipe."""
    floats: torch.Tensor = recipe.dequantise(*recipe.quantise(hidden, scale), torch.float32, scale)
    return floats


class Ran(NamedTuple):
    """What became of ragged rounds on one rank.

    Attributes:
        error: the largest.
        seen: bytes of rows and scales that the experts were handed for this rank's choices.
        sent: bytes dispatched.
    """

    error: float
    seen: list[torch.Tensor]
    sent: int


def _run(
    group: Any,
    make: Callable[[], Experts],
    options: Options,
    on_their_way: Callable[[torch.Tensor], torch.Tensor],
    is_cpu_rank: bool,
) -> Ran:
    """on_their_way: what becomes of rows until experts have them as floats."""
    errors, seen = [], []
    with Layer(group, experts=make(), options=options, is_cpu_rank=is_cpu_rank) as layer:
        for hidden, ids, weights in ragged(group.rank, 4):
            got = layer(hidden, ids, weights)
            errors.append(worst_of(got, dense(on_their_way(hidden), ids, weights)))
            call = layer.experts.calls[-1]
            local = call.weights_then.any(1)
            seen.append(call.rows_then[local].view(torch.uint8))
            if call.scales_then is not None and call.scales_then.ndim:
                seen.append(call.scales_then[local].contiguous().view(torch.uint8))
            layer.poison()
        return Ran(max(errors), seen, layer.exchange.stats().bytes_dispatched)


ON_BOTH = pytest.mark.parametrize("is_cpu_rank", [False, True], ids=["cuda", "cpu"])


@ON_BOTH
@pytest.mark.parametrize("recipe", CONFIGS, ids=NAMES)
def test_experts_see_the_same_bits_whoever_quantises(
    recipe: Any, is_cpu_rank: bool, quantised: list[Any]
) -> None:
    """Our kernel, the framework before dispatch, or the framework on arrival."""

    def rank_main(group: Any, options: Options) -> Ran:
        def travel(hidden: torch.Tensor) -> torch.Tensor:
            return restored(recipe, hidden, GLOBAL_SCALES.get(recipe.name))

        return _run(group, lambda: experts_of(recipe), options, travel, is_cpu_rank)

    ours = run_ranks(2, functools.partial(rank_main, options=Options()))
    assert not quantised  # vLLM's quantiser had nothing to do
    for options in (Options(quantise="framework"), Options(dispatch="bf16")):
        theirs = run_ranks(2, functools.partial(rank_main, options=options))
        # On a CPU vLLM's quantiser has a kernel for MXFP8 alone; the recipe stands for the others.
        assert bool(quantised) == (not is_cpu_rank or recipe is MXFP8)
        quantised.clear()
        for mine, other in zip(ours, theirs, strict=True):
            assert mine.error < 1e-5
            assert other.error < 1e-5
            assert sum(part.numel() for part in mine.seen) > 0
            assert all(torch.equal(a, b) for a, b in zip(mine.seen, other.seen, strict=True))
            assert mine.sent == other.sent or mine.sent < 0.4 * other.sent
            assert (mine.sent == other.sent) == (options.dispatch == "auto")


@ON_BOTH
@pytest.mark.parametrize("recipe", CONFIGS, ids=NAMES)
@pytest.mark.parametrize("takes", ["floats", "mxfp8", "quantises"])
def test_a_named_recipe_is_undone_for_the_experts(
    recipe: Any, takes: str, is_cpu_rank: bool
) -> None:
    """Also where they take another format, which vLLM then makes of the restored rows."""
    factor = 0.0125 if recipe is FP8_TENSOR else None
    scale = torch.full((1,), factor or 1.0) if recipe.needs_global_scale else None
    makers: dict[str, Callable[[], Experts]] = {
        "floats": Experts,
        "mxfp8": lambda: experts_of(MXFP8),
        "quantises": lambda: experts_of(FP8_BLOCK, defers=True),
    }

    def travel(hidden: torch.Tensor) -> torch.Tensor:
        rows = restored(recipe, hidden, scale)
        return restored(MXFP8, rows, None) if takes == "mxfp8" else rows

    def rank_main(group: Any) -> float:
        options = Options(recipe.name, dispatch_global_scale=factor)
        return _run(group, makers[takes], options, travel, is_cpu_rank).error

    assert max(run_ranks(2, rank_main)) < 1e-5


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


# Layouts of scales.


def _interleaved(scales: torch.Tensor, groups: int) -> torch.Tensor:
    laid_out: torch.Tensor = swizzle_mxfp8_scale(
        scales.view(torch.uint8), M=CAPACITY, K=32 * groups
    )
    return laid_out


LAYOUTS: dict[str, tuple[Any, Any, Callable[[torch.Tensor], torch.Tensor]]] = {
    # As FlashInfer's function makes them, which is vLLM's of MXFP8 on other bytes.
    "nvfp4, interleaved": (
        nvfp4(is_scale_swizzled=True),
        NVFP4,
        lambda linear: _interleaved(linear, HIDDEN_SIZE // 16),
    ),
    "nvfp4": (nvfp4(), NVFP4, lambda linear: linear),
    # As vLLM's quantiser lays them out for the same experts on one rank.
    "mxfp8, interleaved": (
        mxfp8(is_scale_swizzled=True),
        MXFP8,
        lambda linear: _interleaved(linear, HIDDEN_SIZE // 32),
    ),
    "fp8_block": (CONFIGS[FP8_BLOCK](), FP8_BLOCK, lambda linear: linear),
    "fp8_block, column-major": (
        transposed(CONFIGS[FP8_BLOCK]()),
        FP8_BLOCK,
        lambda linear: linear.t().contiguous().t(),
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_dispatch_lays_scales_out(name: str) -> None:
    quant_config, recipe, laid_out = LAYOUTS[name]
    experts = Experts(quant_config, lambda rows, _: torch.zeros(len(rows), HIDDEN_SIZE))
    hidden, ids, weights = work_of(CAPACITY, 5)
    with alone(experts=experts) as layer:
        layer(hidden, ids.clamp(min=0), weights)
    (call,) = experts.calls
    wanted = laid_out(recipe.quantise(hidden, GLOBAL_SCALES.get(recipe.name)).scales)
    assert call.a1q_scale.dtype == wanted.dtype
    assert call.a1q_scale.is_contiguous() == wanted.is_contiguous()
    assert call.a1q_scale.t().is_contiguous() == wanted.t().is_contiguous()
    assert torch.equal(*(each.flatten().view(torch.uint8) for each in (call.scales_then, wanted)))


def test_the_framework_lays_scales_out_where_dispatch_does_not() -> None:
    """If vLLM quantises on arrival, or on CPU ranks."""
    config = transposed(CONFIGS[FP8_BLOCK]())
    for chosen in (
        format_of(experts_of(FP8_BLOCK, config), Options("bf16")),
        DispatchFormat(torch.float8_e4m3fn, FP8_BLOCK),
    ):
        assert chosen.scales_layout == "linear"
    scales, rows = torch.rand(CAPACITY, 3), torch.zeros(CAPACITY, 384, dtype=torch.float8_e4m3fn)
    _, laid_out = chosen.receive(rows, scales, torch.ones(CAPACITY, 1), VllmExpertsInput(config))
    assert laid_out is not None
    assert torch.equal(laid_out, scales)
    assert laid_out.stride() == (1, CAPACITY)


def test_which_layout_dispatch_makes() -> None:
    """None that the recipe's scales cannot have, and none for rows that are restored."""
    swizzled = mxfp8(is_scale_swizzled=True)
    assert format_of(experts_of(MXFP8, swizzled), Options("nvfp4")).scales_layout == "linear"
    by_tensor = experts_of(FP8_TENSOR, transposed(CONFIGS[FP8_TENSOR]()))
    assert format_of(by_tensor, Options()).scales_layout == "linear"
    taken = VllmExpertsInput.of(experts_of(MXFP8, swizzled))
    # CPU ranks hand out copies of the filled rows.
    for device, layout in (("cpu", "linear"), ("cuda", "interleaved")):
        here: Any = SimpleNamespace(type=device)
        chosen = choose(taken, HIDDEN_SIZE, torch.float32, here, Options(), lambda _: MXFP8)
        assert chosen.scales_layout == layout


# Static scales, and what ranks tell each other of a layer's set-up.


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


FLOATS = vllm_config.FUSED_MOE_UNQUANTIZED_CONFIG
DOUBLED = Options("nvfp4", dispatch_global_scale=2.0)
DIFFERENT_SCALES = "dispatch_global_scale 2.0.*dispatch_global_scale 1.0"


@pytest.mark.parametrize(
    ("configs", "names", "options", "told"),
    [
        ((nvfp4(), nvfp4()), "33", (), ("nvfp4", "nvfp4")),
        # As many values as a rank has experts, which may differ.
        ((nvfp4(), nvfp4(torch.full((2,), 500.0))), "33", (), ("nvfp4", "nvfp4")),
        ((FLOATS, FLOATS), "33", (DOUBLED, DOUBLED), ("nvfp4", "nvfp4")),
        (
            (nvfp4(torch.zeros(1)), nvfp4()),
            "33",
            (),
            (
                "UnsupportedError: --all2all-backend moe_nvlink: layer 3: the static",
                "PeerError: layer 3 cannot be set up on another rank; rank 0: "
                "UnsupportedError: the static",
            ),
        ),
        (
            (CONFIGS[FP8_BLOCK](), CONFIGS[FP8_TOKEN]()),
            "33",
            (),
            ("DisagreementError.*recipe='fp8_block'.*recipe='fp8_token'",) * 2,
        ),
        ((nvfp4(), nvfp4()), "34", (), ("DisagreementError",) * 2),
        # A row would be dequantised by another scale than it was quantised by, in silence.
        (
            (FLOATS, FLOATS),
            "33",
            (DOUBLED, Options("nvfp4")),
            (f"DisagreementError.*{DIFFERENT_SCALES}",) * 2,
        ),
    ],
)
def test_ranks_agree_on_the_format(
    configs: tuple[Any, Any], names: str, options: tuple[Options, ...], told: tuple[str, str]
) -> None:
    """Or each rank is told why not."""

    def rank_main(group: Any) -> str:
        experts = VllmExpertsInput.of(Experts(configs[group.rank]))
        mine = pool_of(group, options[group.rank] if options else Options())
        try:
            chosen = mine.agree_on_format(f"layer {names[group.rank]}", experts, GEOMETRY)
        except MoeNvlinkError as error:
            return f"{type(error).__name__}: {error}"
        return "" if chosen.recipe is None else chosen.recipe.name

    for said, pattern in zip(run_ranks(2, rank_main), told, strict=True):
        assert re.match(f"(?s){pattern}", said)


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


# Fit for a CUDA graph.

ON_META = torch.ones(1, device="meta")


def _restored_on_meta(experts: Experts, recipe: Any) -> DispatchFormat:
    return DispatchFormat(
        experts.quant_dtype,
        recipe,
        restored_to=torch.float32,
        on_arrival=True,
        global_scale=ON_META,
    )


WAYS: dict[str, Callable[[Experts, Any], DispatchFormat]] = {
    "fused": lambda experts, recipe: format_of(experts, Options()),
    "framework": lambda experts, recipe: format_of(experts, Options(quantise="framework")),
    "restored": _restored_on_meta,
    "on_arrival": lambda experts, recipe: format_of(experts, Options("bf16")),
}


def _without_data(experts: Experts, chosen: DispatchFormat, of_device: Any) -> torch.Tensor:
    """The rows that the experts would be handed in a round whose tensors have shapes only."""
    exchange: Any = WithoutData(chosen)
    subject = of_device(exchange, expert_map_of(exchange.config), chosen)
    hidden, ids, weights = (each.to("meta") for each in work_of(4, 0))
    rows, _, _, ids, weights = subject.prepare(
        hidden, weights, ids, NUM_EXPERTS, None, False, experts.quant_config, False
    )
    assert ids.shape == weights.shape == (exchange.slots, TOP_K)
    impl = experts.left_open
    shape = (exchange.slots, *([] if experts.sums else [TOP_K]), HIDDEN_SIZE)
    made = subject.allocate_fused_expert_output(shape, torch.float32, rows.device, impl)
    if made is None:
        made = torch.empty(shape, device="meta")
    subject.finalize(torch.empty_like(hidden), made, weights, ids, False, impl)
    assert exchange.combined == [exchange.region]
    handed: torch.Tensor = rows
    return handed


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("recipe", CONFIGS, ids=NAMES)
def test_no_value_is_read_and_no_shape_depends_on_one(
    recipe: Any, way: str, monkeypatch: pytest.MonkeyPatch, quantised: list[Any]
) -> None:
    interleaved = torch.empty(128, HIDDEN_SIZE // 16, dtype=torch.uint8, device="meta")
    monkeypatch.setattr(experts_input, "nvfp4_block_scale_interleave", lambda scales: interleaved)
    experts = experts_of(recipe)
    chosen = WAYS[way](experts, recipe)
    config = experts.quant_config
    config.is_scale_swizzled = config.is_scale_transposed = True
    for scale in ("scale", "alpha_or_gscale"):
        if getattr(config._a1, scale) is not None:
            setattr(config._a1, scale, ON_META)
    rows = _without_data(experts, chosen, CudaPrepareAndFinalize)
    row = recipe.hidden_row(HIDDEN_SIZE)
    assert (rows.shape, rows.dtype) == ((2 * CAPACITY, row.elements), row.dtype)


@pytest.mark.parametrize("left_open", LEFT_OPEN)
def test_nor_by_sums_or_padding(left_open: str, in_context: Callable[..., None]) -> None:
    in_context([4, 4], is_padding=torch.empty(4, dtype=torch.bool, device="meta"))
    experts = Experts(left_open=LEFT_OPEN[left_open]())
    _without_data(experts, DispatchFormat(), CudaPrepareAndFinalize)


def test_reading_a_value_would_be_noticed() -> None:
    """The CPU class waits for the counts."""
    with pytest.raises((NotImplementedError, RuntimeError), match=r"[Mm]eta"):
        _without_data(Experts(), DispatchFormat(), CpuPrepareAndFinalize)
