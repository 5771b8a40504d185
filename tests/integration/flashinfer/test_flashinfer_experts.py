"""FlashInfer's fused experts after our dispatch: what they are called with, and what comes of it.

FlashInfer's CUDA kernels do not run here. A stand-in takes the place of each function: it binds the
arguments to the function's own signature, checks what its launcher checks, and computes with the
torch references that FlashInfer ships in its wheel (flashinfer/trace/templates/moe.py).
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from moe_nvlink_plugin import AllToAllConfig, MoeAllToAll, recipes
from moe_nvlink_plugin.config import local_expert_range
from moe_nvlink_plugin.errors import ConfigError, InputError, UnsupportedError
from moe_nvlink_plugin.integration.flashinfer import experts
from moe_nvlink_plugin.integration.flashinfer.experts import (
    CUTLASS,
    TRTLLM_FP4,
    TRTLLM_FP8,
    FusedExperts,
    check,
    settings_for,
)
from moe_nvlink_plugin.testing import run_ranks
from tests.integration.common.framework_wheels import left_out
from tests.support import flashinfer_wheel, wheels

#: bfloat16 and top_k 4: the cases of tests/support have the same kernels.
NUM_EXPERTS, TOP_K, HIDDEN_SIZE, INTERMEDIATE_SIZE, CAPACITY = 8, 4, 256, 128, 6
#: SwigluStep: with it alone FlashInfer's reference of the FP8 function decodes MXFP8.
SWIGLU, STEP = 3, 7
ONE = torch.ones(1)


@pytest.fixture(scope="module")
def flashinfer() -> Iterator[Any]:
    """The modules of FlashInfer that the tests use."""
    try:
        with flashinfer_wheel.importable():
            import flashinfer.fused_moe
            import flashinfer.testing.utils
            import flashinfer.tllm_enums
            import flashinfer.trace.templates.gemm
            import flashinfer.trace.templates.moe

            yield flashinfer
    except wheels.FetchError as error:
        left_out(error)


def config_of(
    function: str, recipe: str | None, ep_size: int, ep_rank: int, **values: Any
) -> AllToAllConfig:
    usual: dict[str, Any] = {
        "num_experts": NUM_EXPERTS,
        "top_k": TOP_K,
        "hidden_size": HIDDEN_SIZE,
        "max_tokens_per_rank": CAPACITY,
        "timeout_s": 60.0,
        **settings_for(function, recipe, num_experts=values.get("num_experts", NUM_EXPERTS)),
    }
    return AllToAllConfig(ep_size=ep_size, ep_rank=ep_rank, **{**usual, **values})


# What cannot be is refused by name.


@pytest.mark.parametrize(
    ("function", "recipe", "values", "activation", "told"),
    [
        (CUTLASS, None, {"num_experts": 9}, SWIGLU, "equally many experts.*9 experts on 2 ranks"),
        (CUTLASS, None, {"dtype": torch.float32}, SWIGLU, "bfloat16 or float16.*torch.float32"),
        (CUTLASS, None, {"hidden_size": 260}, SWIGLU, "multiple of 8, not 260"),
        (CUTLASS, "nvfp4", {}, 12, "activation_type 12.*0 (Gelu).*10 (Situ)"),
        (TRTLLM_FP4, "nvfp4", {"hidden_size": 192}, SWIGLU, "multiple of 128, not 192"),
        (TRTLLM_FP4, "mxfp8", {}, STEP, "recipe mxfp8 does not take activation_type 7"),
        (TRTLLM_FP4, None, {"dtype": torch.float16}, SWIGLU, "bfloat16.*torch.float16"),
        (TRTLLM_FP4, "nvfp4", {"num_experts": 2}, SWIGLU, "top_k.*not 4 of 2"),
        (TRTLLM_FP4, "nvfp4", {"num_experts": 4096}, SWIGLU, "at most 2048 experts, not 4096"),
        (TRTLLM_FP8, "fp8_block", {}, 4, "activation_type 4; it takes 3 (Swiglu)"),
        (TRTLLM_FP8, "mxfp8", {"num_experts": 10}, SWIGLU, "multiple of 4.*not 10"),
        (TRTLLM_FP8, "mxfp8", {"num_experts": 4, "top_k": 4}, SWIGLU, "above top_k"),
    ],
)
def test_what_a_function_does_not_take(
    function: str, recipe: str | None, values: dict[str, Any], activation: int, told: str
) -> None:
    config = config_of(function, recipe, 2, 0, **values)
    literal = re.escape(told).replace(r"\.\*", ".*").replace(r"\ ", " ")
    with pytest.raises(UnsupportedError, match=f"{function}.*{literal}"):
        check(function, config, activation)


def test_functions_and_recipes_outside_of_the_table() -> None:
    with pytest.raises(UnsupportedError, match="'b12x_fused_moe' is none of .*cutlass_fused_moe"):
        settings_for("b12x_fused_moe", None, num_experts=8)
    with pytest.raises(UnsupportedError, match="cutlass_fused_moe takes no rows of recipe fp8_blo"):
        settings_for(CUTLASS, "fp8_block", num_experts=8)


@pytest.mark.parametrize(
    ("function", "recipe", "values", "told"),
    [
        (CUTLASS, "nvfp4", {"received_ids": -1}, "received_ids=-1.*received_ids=8"),
        (TRTLLM_FP4, "nvfp4", {"received_ids": "elsewhere"}, "received_ids='elsewhere'.*=-1"),
        (TRTLLM_FP4, "nvfp4", {"scales_layout": "interleaved"}, "='interleaved'.*='linear'"),
        (TRTLLM_FP8, "fp8_block", {"scales_layout": "linear"}, "='linear'.*='column_major'"),
    ],
)
def test_an_exchange_with_other_settings(
    function: str, recipe: str, values: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        check(function, config_of(function, recipe, 2, 0, **values))


# FlashInfer's own names and numbers.


def test_activation_numbers(flashinfer: Any) -> None:
    named = {each.value: each.name for each in flashinfer.tllm_enums.ActivationType}
    named.pop(flashinfer.tllm_enums.ActivationType.InvalidType.value)
    assert named == experts.ACTIVATIONS


@pytest.mark.parametrize(
    ("weights", "told"),
    [
        ({"output": ONE}, "output of trtllm_fp8.* comes from the exchange"),
        ({"gemm1_weigths": ONE}, "no parameter gemm1_weigths; it has .*gemm1_weights"),
        ({"gemm1_weights": ONE}, "also needs .*gemm2_weights.*intermediate_size"),
    ],
)
def test_wrong_arguments(flashinfer: Any, weights: dict[str, Any], told: str) -> None:
    config = config_of(TRTLLM_FP8, "fp8_block", 1, 0)
    with pytest.raises(InputError, match=told):
        FusedExperts(SimpleNamespace(config=config), TRTLLM_FP8, **weights)  # type: ignore[arg-type]


def test_without_flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer.fused_moe", None)
    with pytest.raises(UnsupportedError, match="pip install 'moe-nvlink-plugin.flashinfer.'"):
        experts._find(CUTLASS)


def test_a_release_without_the_function(flashinfer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(flashinfer.fused_moe, TRTLLM_FP4)
    with pytest.raises(UnsupportedError, match=f"has no {TRTLLM_FP4}"):
        experts._find(TRTLLM_FP4)


# The calls, and what they compute.


class Case(NamedTuple):
    """One row of the table of `experts`, with SwiGLU or SwigluStep experts of random weights."""

    function: str
    recipe: str | None
    activation: int = SWIGLU

    @property
    def name(self) -> str:
        return f"{self.function.split('_block')[0]} {self.recipe}"

    @property
    def has_blocks_of_128(self) -> bool:
        return self.recipe in ("fp8_block", "fp8_block_pow2")

    @property
    def global_scale(self) -> torch.Tensor | None:
        """1, which the references know nothing of."""
        return ONE if self.recipe in ("nvfp4", "fp8_tensor") else None


CASES = (
    Case(CUTLASS, None),
    Case(CUTLASS, "fp8_tensor"),
    Case(CUTLASS, "nvfp4"),
    Case(CUTLASS, "mxfp8"),
    Case(TRTLLM_FP4, None),
    Case(TRTLLM_FP4, "nvfp4"),
    Case(TRTLLM_FP4, "mxfp8"),
    Case(TRTLLM_FP8, "fp8_block"),
    Case(TRTLLM_FP8, "fp8_block_pow2"),
    Case(TRTLLM_FP8, "mxfp8", STEP),
)
each_case = pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])


def weights_of(case: Case, first: int, end: int) -> dict[str, Any]:
    """The weights of experts [first, end), as far as the references read them.

    Only the rows are quantised in a way that matters here: FP4 weights are random codes, FP8
    weights random values, each with random scales.
    """
    random = torch.Generator().manual_seed(5)
    sizes = ((2 * INTERMEDIATE_SIZE, HIDDEN_SIZE), (HIDDEN_SIZE, INTERMEDIATE_SIZE))

    def draw(number: int) -> dict[str, torch.Tensor]:
        rows, columns = sizes[number]
        values = torch.randn(NUM_EXPERTS, rows, columns, generator=random) * columns**-0.5
        if case.function == CUTLASS:
            return {f"fc{number + 1}_expert_weights": values.bfloat16()}
        names = (f"gemm{number + 1}_weights", f"gemm{number + 1}_weights_scale")
        if case.function == TRTLLM_FP4:
            codes = torch.randint(256, (NUM_EXPERTS, rows, columns // 2), generator=random)
            is_mx = case.recipe != "nvfp4"
            shape = (NUM_EXPERTS, rows, columns // (32 if is_mx else 16))
            scales = torch.randint(119, 123, shape, generator=random).to(torch.uint8)
            if not is_mx:
                scales = (torch.rand(shape, generator=random) / 16).to(torch.float8_e4m3fn)
            return dict(zip(names, (codes.to(torch.uint8), scales), strict=True))
        block, tall = (128, 128) if case.has_blocks_of_128 else (32, 1)
        shape = (NUM_EXPERTS, rows // tall, columns // block)
        if case.has_blocks_of_128:
            scales = torch.rand(shape, generator=random) + 0.5
        else:
            scales = torch.randint(126, 129, shape, generator=random).to(torch.uint8)
        return dict(zip(names, (values.to(torch.float8_e4m3fn), scales), strict=True))

    drawn = {**draw(0), **draw(1)}
    return {name: value[first:end] for name, value in drawn.items()}


#: Arguments that the references do not read, by function.
UNREAD: dict[str, dict[str, Any]] = {
    CUTLASS: {"quant_scales": []},
    TRTLLM_FP4: {
        **dict.fromkeys(("gemm1_bias", "gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit")),
        **dict.fromkeys(("gemm2_bias", "output1_scale_scalar", "output1_scale_gate_scalar")),
        "output2_scale_scalar": None,
        "intermediate_size": INTERMEDIATE_SIZE,
    },
    TRTLLM_FP8: {"intermediate_size": INTERMEDIATE_SIZE},
}


def sums_of(flashinfer: Any, given: dict[str, Any]) -> torch.Tensor:
    """`[rows, hidden_size]`: FlashInfer's references on the arguments of one of its functions."""
    moe = flashinfer.trace.templates.moe
    if "token_selected_experts" in given:
        rows, scales = given["input"], given["input_sf"]
        if scales is not None:
            rows = moe._dequantize_fp4_hidden_states(rows, scales, False)
        local = len(given["fc1_expert_weights"])  # rows of fp8_tensor have a scale of 1
        sums = moe._moe_bf16_run_experts(
            rows,
            given["fc1_expert_weights"],
            given["fc2_expert_weights"],
            given["token_final_scales"],
            given["token_selected_experts"].long(),
            local * given["ep_rank"],
            local * given["ep_size"],
        )
    else:
        ids, weights = given["topk_ids"]
        is_fp4 = "output1_scale_scalar" in given
        run = moe._fp4_moe_run_experts if is_fp4 else moe._fp8_moe_run_experts
        taken = inspect.signature(run).parameters
        named = {name: value for name, value in given.items() if name in taken}
        sums = run(
            **named, weights=weights, topk_idx=ids.long(), E_global=int(given["num_experts"])
        )
    return torch.as_tensor(sums)


class StandIn:
    """One of FlashInfer's functions on CPU tensors. Rows without a local expert become NaN."""

    def __init__(self, flashinfer: Any, function: str) -> None:
        self._flashinfer = flashinfer
        self._function = getattr(flashinfer.fused_moe, function)
        self.signature = inspect.signature(self._function)
        self.calls: list[dict[str, Any]] = []
        functools.update_wrapper(self, self._function)

    def __call__(self, *given: Any, **named: Any) -> list[torch.Tensor]:
        bound = self.signature.bind(*given, **named)
        self.calls.append(dict(bound.arguments))
        bound.apply_defaults()
        arguments, output = bound.arguments, bound.arguments["output"]
        is_cutlass = "token_selected_experts" in arguments
        (check_cutlass_call if is_cutlass else check_trtllm_call)(arguments)
        sums = sums_of(self._flashinfer, arguments)
        ids, first, end = local_ids(arguments)
        sums[~((ids >= first) & (ids < end)).any(1)] = float("nan")
        output.copy_(sums)
        return [output]


def local_ids(given: dict[str, Any]) -> tuple[torch.Tensor, int, int]:
    if "token_selected_experts" in given:
        local = len(given["fc1_expert_weights"])
        return (
            given["token_selected_experts"],
            local * given["ep_rank"],
            local * (given["ep_rank"] + 1),
        )
    first = given["local_expert_offset"]
    return given["topk_ids"][0], first, first + given["local_num_experts"]


def check_cutlass_call(given: dict[str, Any]) -> None:
    """What runMoe of its binding checks, and what its kernels take for granted."""
    rows, ids, scales = given["input"], given["token_selected_experts"], given["input_sf"]
    assert ids.dtype == torch.int32
    assert given["token_final_scales"].dtype == torch.float32
    assert all(each.is_contiguous() for each in (rows, ids, given["token_final_scales"]))
    assert given["enable_alltoall"]
    assert given["output"].dtype == given["output_dtype"]
    if scales is not None:
        assert not given["swizzled_input_sf"]
        assert scales.is_contiguous()
        assert scales.dtype.itemsize == 1
        assert scales.shape[0] == rows.shape[0]
    is_mxfp8 = rows.dtype == torch.float8_e4m3fn and scales is not None
    assert given["use_mxfp8_act_scaling"] == is_mxfp8
    absent = len(given["fc1_expert_weights"]) * given["ep_size"]
    assert bool(((ids >= 0) & (ids <= absent)).all())


def check_trtllm_call(given: dict[str, Any]) -> None:
    """What the launchers check (trtllm_fused_moe_kernel_launcher.cu)."""
    rows, scales = given["hidden_states"], given["hidden_states_scale"]
    ids, weights = given["topk_ids"]
    assert ids.dtype == torch.int32
    assert weights.dtype == torch.float32
    assert ids.shape == weights.shape == (len(rows), given["top_k"])
    assert all(each.is_contiguous() for each in (rows, ids, weights))
    assert given["output"].dtype == torch.bfloat16
    assert given["output"].shape == (len(rows), HIDDEN_SIZE)
    if "fp8_quantization_type" in given:
        assert rows.dtype == torch.float8_e4m3fn
        if given["fp8_quantization_type"].name == "DeepSeekFp8":
            assert scales.dtype == torch.float32
            assert scales.shape == (HIDDEN_SIZE // 128, len(rows))
        else:
            assert scales.dtype == torch.uint8
    elif scales is not None:
        assert scales.dtype == torch.float8_e4m3fn
        assert given["hidden_states_scale_layout"].name == "layout_linear"
    assert scales is None or scales.is_contiguous()
    assert bool((ids[weights == 0] == -1).all())


def tokens_of(rank: int, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Activations, ids (some of them no expert) and weights above 0."""
    random = torch.Generator().manual_seed(40 + rank)
    ids = torch.rand(count, NUM_EXPERTS, generator=random).topk(TOP_K).indices.to(torch.int32)
    return (
        torch.randn(count, HIDDEN_SIZE, generator=random).bfloat16(),
        torch.where(torch.rand(ids.shape, generator=random) < 0.15, -1, ids),
        torch.rand(count, TOP_K, generator=random) + 0.1,
    )


def expected_of(flashinfer: Any, case: Case, rank: int, count: int) -> torch.Tensor:
    """The layer on one process, by FlashInfer's references: all experts, rows quantised once."""
    hidden, ids, weights = tokens_of(rank, count)
    quantised: Any = (hidden, None)
    if case.recipe is not None:
        quantised = getattr(recipes, case.recipe.upper()).quantise(hidden, case.global_scale)
    rows, scales = quantised
    every = weights_of(case, 0, NUM_EXPERTS)
    if case.function == CUTLASS:
        routed = {"input": rows, "input_sf": scales, "ep_rank": 0, "ep_size": 1}
        routed |= {"token_selected_experts": ids, "token_final_scales": weights}
    else:
        if case.has_blocks_of_128:
            scales = scales.t().contiguous()
        routed = {"hidden_states": rows, "hidden_states_scale": scales, "topk_ids": (ids, weights)}
        kind = 1 if case.has_blocks_of_128 else 2
        routed |= {"num_experts": NUM_EXPERTS, "local_expert_offset": 0}
        routed |= {"fp8_quantization_type": kind, "activation_type": case.activation}
    return sums_of(flashinfer, {**UNREAD[case.function], **routed, **every})


def rounds_of(group: Any, case: Case, stand_in: StandIn) -> list[torch.Tensor]:
    """What combine returned in rounds of other sizes and bounds."""
    config = config_of(case.function, case.recipe, group.size, group.rank)
    first, end = local_expert_range(NUM_EXPERTS, group.size, group.rank)
    results = []
    with MoeAllToAll.create(config, group) as exchange:
        fused = FusedExperts(
            exchange,
            case.function,
            activation_type=case.activation,
            **UNREAD[case.function],
            **weights_of(case, first, end),
        )
        for counts, bound in ROUNDS:
            hidden, ids, weights = tokens_of(group.rank, counts[group.rank])
            received = exchange.dispatch(
                hidden, ids, weights, global_scale=case.global_scale, max_tokens=bound
            )
            made = fused(received)
            check_in_place(exchange, received, made, stand_in)
            results.append(exchange.combine(made, received.metadata))
    return results


#: Tokens of the two ranks, and the bound. In each there are empty slots.
ROUNDS = (((3, 5), CAPACITY), ((0, 4), 5), ((1, 2), 2))


def check_in_place(exchange: Any, received: Any, made: torch.Tensor, stand_in: StandIn) -> None:
    region = exchange.combine_input(metadata=received.metadata)
    calls = [each for each in stand_in.calls if each["output"].data_ptr() == region.data_ptr()]
    given = calls[-1]
    assert made.data_ptr() == region.data_ptr()
    assert made.shape == region.shape
    rows = given["input"] if "input" in given else given["hidden_states"]
    assert rows.data_ptr() == received.hidden_states.data_ptr()
    scales = given.get("input_sf", given.get("hidden_states_scale"))
    assert (scales is None) == (received.scales is None)
    assert scales is None or scales.data_ptr() == received.scales.data_ptr()
    ids, weights = given.get("topk_ids") or (
        given["token_selected_experts"],
        given["token_final_scales"],
    )
    assert ids.data_ptr() == received.topk_ids.data_ptr()
    assert weights.data_ptr() == received.topk_weights.data_ptr()
    assert given["tune_max_num_tokens"] == exchange.config.ep_size * CAPACITY


@pytest.fixture
def stand_in(flashinfer: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], StandIn]:
    def put(function: str) -> StandIn:
        made = StandIn(flashinfer, function)
        monkeypatch.setattr(flashinfer.fused_moe, function, made)
        return made

    return put


@each_case
def test_two_ranks_compute_the_layer(
    flashinfer: Any, stand_in: Callable[[str], StandIn], case: Case
) -> None:
    """Rows, scales, ids, weights and sums in place, and the sums of one process.

    Ranks round their partial sums to bfloat16, one process rounds the whole sum: the two differ by
    a few units of 2^-8 of the largest partial sum.
    """
    recorder = stand_in(case.function)
    results = run_ranks(2, lambda group: rounds_of(group, case, recorder))
    for rank, rounds in enumerate(results):
        for (counts, _), got in zip(ROUNDS, rounds, strict=True):
            expected = expected_of(flashinfer, case, rank, counts[rank]).float()
            assert got.shape == expected.shape
            assert bool(got.isfinite().all())
            if got.numel():
                largest = expected.abs().amax(1, keepdim=True) + 1e-6
                assert float(((got.float() - expected).abs() / largest).max()) < 2**-6


@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp8"])
def test_interleaved_scales_are_flashinfers(flashinfer: Any, recipe: str) -> None:
    """The layout in which vLLM's FlashInferExperts take them (swizzled_input_sf=True)."""
    config = config_of(CUTLASS, recipe, 1, 0, scales_layout="interleaved")
    unswizzled = flashinfer.trace.templates.gemm._unswizzle_sf_128x4

    def rank_main(group: Any) -> None:
        hidden, ids, weights = tokens_of(0, CAPACITY)
        with MoeAllToAll.create(config, group) as exchange:
            scale = ONE if recipe == "nvfp4" else None
            received = exchange.dispatch(hidden, ids, weights, global_scale=scale)
            filled = int(received.recv_counts.sum())
            linear = getattr(recipes, recipe.upper()).quantise(hidden, scale).scales
            found = unswizzled(received.scales, CAPACITY, linear.shape[1])[:filled]
            is_sent = (ids >= 0).any(1)
            assert filled == int(is_sent.sum()) > 0
            rows = {bytes(each.view(torch.uint8).tolist()) for each in linear[is_sent]}
            assert {bytes(each.tolist()) for each in found} == rows
            exchange.combine(exchange.combine_input(), received.metadata)

    run_ranks(1, rank_main)
