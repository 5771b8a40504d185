"""The recipes against what they must equal: vLLM's references that run here, ml_dtypes, and the
arithmetic of vLLM's CUDA kernels written out again in numpy.

Where vLLM's variants differ among themselves, a test says by how much and which one is followed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
import torch

from moe_nvlink_plugin.errors import ConfigError, InputError
from moe_nvlink_plugin.recipes import QuantisedRows, QuantisingRecipe, fp8, mxfp8, nvfp4
from moe_nvlink_plugin.recipes.base import check_global_scale
from tests.kernels.formats import quantiser_rows as rows_of
from tests.kernels.formats.quantiser_rows import BLOCKS, RECIPES, assert_same, differing

Array: TypeAlias = np.ndarray[Any, Any]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
EVERY_RECIPE = pytest.mark.parametrize("name", RECIPES)
SCALE = torch.tensor([0.37])


# ---- vLLM's CUDA kernels, written out again. Finite rows only: NaN is where we differ on purpose.


def rounded(values: Array, numbers: list[float]) -> Array:
    """Codes of the nearest of `numbers`, the even one of two; saturating; the sign is bit 7."""
    steps = np.array(numbers)
    ties = (steps[1:] + steps[:-1]) / 2
    size = np.abs(values).astype(np.float64)
    codes = np.searchsorted(ties, size, side="left")
    tied = size == ties[np.minimum(codes, len(ties) - 1)]
    codes += tied & (codes % 2 == 1)
    signed: Array = codes + 128 * np.signbit(values)
    return signed.astype(np.uint8)


def e4m3(values: Array) -> Array:
    return rounded(values, rows_of.E4M3_NUMBERS)


def decoded(codes: Array) -> Array:
    """fp32 of e4m3 codes without a sign."""
    numbers: Array = np.array(rows_of.E4M3_NUMBERS, dtype=np.float32)
    return numbers[codes]


def cuda_fp8_block(x: Array, scale: np.float32) -> tuple[Array, Array]:
    """per_token_group_quant.cu with group_size 128, eps 1e-10."""
    blocks = x.reshape(len(x), -1, 128)
    amax = np.maximum(np.abs(blocks).max(2), np.float32(1e-10))
    scales = amax / np.float32(448)
    return e4m3(blocks / scales[:, :, None]).reshape(x.shape), scales


def exact_fp8_block_pow2(x: Array, scale: np.float32) -> tuple[Array, Array]:
    """Not vLLM's logarithm: the least power of two by frexp."""
    blocks = x.reshape(len(x), -1, 128)
    scales = np.maximum(np.abs(blocks).max(2) / np.float32(448), np.float32(1e-10))
    mantissas, exponents = np.frexp(scales)  # 0.5 <= mantissa < 1
    powers = np.ldexp(np.float32(1), exponents - (mantissas == 0.5))
    return e4m3(blocks / powers[:, :, None]).reshape(x.shape), powers


def cuda_fp8_token(x: Array, scale: np.float32) -> tuple[Array, Array]:
    """common.cu, dynamic_per_token_scaled_fp8_quant_kernel_strided."""
    amax = np.abs(x).max(1, keepdims=True)
    scales = np.maximum(amax / np.float32(448), np.float32(1) / (np.float32(448) * np.float32(512)))
    return e4m3(x / scales), scales


def cuda_fp8_tensor(x: Array, scale: np.float32) -> tuple[Array, None]:
    """common.cu, scaled_fp8_quant_kernel_strided_group_shape with one scale."""
    return e4m3(x * (np.float32(1) / scale)), None


def exact_mxfp8(x: Array, scale: np.float32) -> tuple[Array, Array]:
    """Not vLLM's logarithm: the least power of two by frexp, and an exact quotient."""
    blocks = x.reshape(len(x), -1, 32)
    amax = np.maximum(np.abs(blocks).max(2), np.finfo(np.float32).tiny)
    mantissas, exponents = np.frexp(amax)  # 0.5 <= mantissa < 1
    biased = np.clip(exponents - 9 + (mantissas > 0.875) + 127, 0, 254)
    return e4m3(np.ldexp(blocks, 127 - biased[:, :, None])).reshape(x.shape), biased


def cuda_nvfp4(x: Array, scale: np.float32) -> tuple[Array, Array]:
    """nvfp4_utils.cuh, cvt_warp_fp16_to_fp4, with IEEE reciprocals."""
    blocks = x.reshape(len(x), -1, 16)
    one = np.float32(1)
    scales = e4m3(scale * (np.abs(blocks).max(2) * (one / np.float32(6))))
    stored = decoded(scales)
    factors = np.divide(one, stored * (one / scale), where=stored != 0, out=np.zeros_like(stored))
    codes = rounded(blocks * factors[:, :, None], rows_of.E2M1_NUMBERS).reshape(x.shape)
    codes = (codes & 7) | (codes >> 4)
    return codes[:, 0::2] + 16 * codes[:, 1::2], scales


WRITTEN_AGAIN: dict[str, Callable[..., tuple[Array, Array | None]]] = {
    "fp8_block": cuda_fp8_block,
    "fp8_block_pow2": exact_fp8_block_pow2,
    "fp8_token": cuda_fp8_token,
    "fp8_tensor": cuda_fp8_tensor,
    "mxfp8": exact_mxfp8,
    "nvfp4": cuda_nvfp4,
}


def written_again(name: str, x: torch.Tensor, scale: torch.Tensor) -> QuantisedRows:
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        codes, scales = WRITTEN_AGAIN[name](x.float().numpy(), scale.numpy()[0])
    rows_dtype = RECIPES[name].hidden_row(x.shape[1]).dtype
    rows = torch.from_numpy(codes).view(rows_dtype)
    row = RECIPES[name].scales_row(x.shape[1])
    if row is None or scales is None:
        return QuantisedRows(rows, None)
    narrow = scales if row.dtype == torch.float32 else scales.astype(np.uint8)
    return QuantisedRows(rows, torch.from_numpy(narrow).view(row.dtype))


def finite_rows(name: str) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Rows of every type, with a global scale each."""
    block = BLOCKS[name]
    largest = torch.tensor([448.0, 1.0, 7.03, 3e4])
    sources = [rows_of.patterns_beside(dtype, block, largest) for dtype in DTYPES[:2]]
    sources += [rows_of.random_rows(block, seed=3, num_values=400_000)]
    sources += [rows_of.rows_at_limits(block), all_ties(name)]
    for source, scale in zip(sources, (0.37, 2688 / 3e4, 1.0, 1.0, 1.0), strict=True):
        finite = source[source.isfinite().all(1)]
        assert 2 * len(finite) > len(source)
        yield finite, torch.tensor([scale])


def all_ties(name: str) -> torch.Tensor:
    numbers = rows_of.E2M1_NUMBERS if name == "nvfp4" else rows_of.E4M3_NUMBERS
    return rows_of.tied_rows(BLOCKS[name], numbers, range(-8, 7))


@EVERY_RECIPE
def test_recipe_is_the_kernels_arithmetic(name: str) -> None:
    for source, scale in finite_rows(name):
        assert_same(
            RECIPES[name].quantise(source, scale), written_again(name, source, scale), source
        )


def by_logarithm(amax: torch.Tensor) -> torch.Tensor:
    """As vLLM's torch implementation."""
    least = amax.clamp(min=torch.finfo(torch.float32).tiny)
    return (torch.ceil(torch.log2(least / 448.0)) + 127.0).clamp(0, 254).to(torch.uint8).int()


# ---- Conversions.


def test_e4m3_is_ml_dtypes_and_torchs() -> None:
    """ml_dtypes has NaN beyond 464, where we saturate as torch 2.13 does and the hardware."""
    values = rows_of.hard_numbers()
    ours = fp8.to_e4m3(values)
    with np.errstate(invalid="ignore"):
        theirs = torch.from_numpy(values.numpy().astype(ml_dtypes.float8_e4m3fn).view(np.uint8))
    within = (values.abs() <= 464) | values.isnan()
    assert not bool(differing(ours, theirs.view(fp8.E4M3))[within].any())
    beyond = values.abs() > 464
    assert bool((ours.float()[beyond] == values[beyond].sign() * 448).all())
    assert bool((ours.view(torch.uint8)[values.isnan()] == 0x7F).all())
    limited = values.clamp(-448, 448)
    assert not bool(differing(ours, limited.to(fp8.E4M3)).any())


def test_e2m1_is_ml_dtypes() -> None:
    """NaN apart, which ml_dtypes makes -0: ours is 7, as NVIDIA's conversion has it."""
    values = rows_of.hard_numbers()
    with np.errstate(invalid="ignore"):
        theirs = values.numpy().astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15
    numbers = ~values.isnan()
    ours = nvfp4.e2m1_codes(values)
    assert torch.equal(ours[numbers], torch.from_numpy(theirs)[numbers])
    assert bool((ours[~numbers] == 7).all())
    codes = torch.arange(16, dtype=torch.uint8)
    decoded_by_them = codes.numpy().view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    assert torch.equal(
        nvfp4.e2m1_values(codes).view(torch.int32),
        torch.from_numpy(decoded_by_them).view(torch.int32),
    )


# ---- vLLM's own references in torch.


@pytest.fixture(scope="module")
def vllm_fp8() -> dict[str, Any]:
    """QuantFP8 for blocks, tokens and a given scale."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
    from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape

    # A configuration for CPUs sets variables for the workers to come, LD_PRELOAD among them.
    with mock.patch.dict(os.environ), set_current_vllm_config(VllmConfig()):
        return {
            "fp8_block": QuantFP8(False, GroupShape(1, 128), use_ue8m0=False),
            "fp8_token": QuantFP8(False, GroupShape.PER_TOKEN),
            "fp8_tensor": QuantFP8(True, GroupShape.PER_TENSOR),
        }


def usual_rows(dtype: torch.dtype, num_rows: int = 512) -> torch.Tensor:
    """Gaussian activations `[n, 2048]`."""
    return torch.randn(num_rows, 2048, generator=torch.Generator().manual_seed(6)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_powers_of_two_are_those_of_vllms_logarithm(dtype: torch.dtype) -> None:
    """exp2(ceil(log2(max(amax / 448, 1e-10)))) in fp32, for every amax that the type has."""
    amax = rows_of.patterns(dtype).float().abs()
    amax = amax[amax.isfinite()]
    source = torch.zeros(len(amax), 128)
    source[:, 7] = amax
    scales = fp8.FP8_BLOCK_POW2.quantise(source).scales
    assert scales is not None
    raw = fp8.divide(amax, 448.0).clamp(min=1e-10)
    assert torch.equal(scales.flatten(), torch.exp2(torch.ceil(torch.log2(raw))))


@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_blocks_are_forward_native(vllm_fp8: dict[str, Any], dtype: torch.dtype) -> None:
    """All patterns; blocks whose amax is below 1/512 apart, where its least scale is another."""
    source = torch.cat(
        (
            rows_of.patterns_alone(dtype, 128),
            rows_of.patterns_beside(dtype, 128, torch.tensor([1.0, 7.03])),
        )
    )
    ours = fp8.FP8_BLOCK.quantise(source)
    theirs = QuantisedRows(*vllm_fp8["fp8_block"].forward_native(source))
    assert ours.scales is not None
    assert theirs.scales is not None
    small = source.float().abs().amax(1) < 1 / 512
    assert bool((theirs.scales[small] == 1 / (448 * 512)).all())
    assert_same(
        QuantisedRows(ours.rows[~small], ours.scales[~small]),
        QuantisedRows(theirs.rows[~small], theirs.scales[~small]),
        source[~small],
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_are_forward_native_but_for_its_reciprocal(
    vllm_fp8: dict[str, Any], dtype: torch.dtype
) -> None:
    """vLLM's kernel divides, its reference multiplies by a rounded reciprocal: ties fall apart.

    Of a million Gaussian bf16 values some 370 codes, each by one; the scales are equal.
    """
    source = usual_rows(dtype)
    rows, scales = fp8.FP8_TOKEN.quantise(source)
    native, native_scales = vllm_fp8["fp8_token"].forward_native(source)
    assert scales is not None
    assert torch.equal(scales, native_scales)
    assert torch.equal(fp8.to_e4m3(source.float() * scales.reciprocal()).float(), native.float())
    apart = (rows.view(torch.uint8).int() - native.view(torch.uint8).int()).abs()
    assert int(apart.max()) <= 1
    assert float((apart > 0).float().mean()) < 1e-3
    if dtype == torch.bfloat16:
        assert int(apart.sum()) > 100


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_given_scale_is_forward_native(vllm_fp8: dict[str, Any], dtype: torch.dtype) -> None:
    source = usual_rows(dtype, 64)
    if dtype != torch.float32:
        source = torch.cat((source.view(-1), rows_of.patterns(dtype))).view(-1, 2048)
    native, _ = vllm_fp8["fp8_tensor"].forward_native(source, SCALE)
    assert_same(fp8.FP8_TENSOR.quantise(source, SCALE), QuantisedRows(native, None), source)


@pytest.mark.parametrize("dtype", DTYPES)
def test_mxfp8_is_vllms(dtype: torch.dtype) -> None:
    utils = pytest.importorskip("vllm.model_executor.layers.quantization.utils.mxfp8_utils")
    source = usual_rows(dtype, 128).view(-1, 32)
    if dtype != torch.float32:
        source = torch.cat((source, rows_of.patterns_alone(dtype, 32)))
        source = torch.cat((source, rows_of.patterns_beside(dtype, 32, torch.tensor([1.0, 448.0]))))
    theirs = QuantisedRows(*utils.mxfp8_e4m3_quantize(source))
    assert_same(mxfp8.MXFP8.quantise(source), theirs, source)


def test_mxfp8_differs_from_vllms_logarithm_and_nowhere_else() -> None:
    """In every binade: only the first few numbers above 448 times a power of two.

    Tried are the 512 around 1.75 and every 999th mantissa.
    """
    most = 0
    mantissas = torch.cat(
        (torch.arange(0x600000 - 256, 0x600000 + 256), torch.arange(0, 2**23, 999))
    )
    for exponent in range(-126, 128):
        amax = ((exponent + 127 << 23) + mantissas.int()).view(torch.float32)
        ours, theirs = mxfp8._exponents(amax), by_logarithm(amax)
        places = (ours != theirs).nonzero().flatten()
        beyond = mantissas[places] - 0x600000  # units in the last place above 1.75 * 2^exponent
        assert torch.equal(beyond, torch.arange(1, len(beyond) + 1))
        assert torch.equal(theirs[places], ours[places] - 1)
        # The half as large scale changes no code of the largest value: 448.00x, which saturates.
        assert bool(
            (fp8.to_e4m3(amax[places] / 2.0 ** (theirs[places] - 127)).float() == 448).all()
        )
        most = max(most, len(beyond))
    assert 22 <= most <= 40


@pytest.mark.parametrize(
    ("dtype", "scale"),
    [(torch.bfloat16, 1.0), (torch.float16, 2688 / 4.5), (torch.float32, 100.0)],
)
def test_nvfp4_is_ref_nvfp4_quant(dtype: torch.dtype, scale: float) -> None:
    utils = pytest.importorskip(
        "vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils"
    )
    source, given_scale = usual_rows(dtype, 128).view(-1, 16), torch.tensor([scale])
    if dtype != torch.float32:
        source = torch.cat((source, rows_of.patterns_alone(dtype, 16)))
        source = torch.cat((source, rows_of.patterns_beside(dtype, 16, torch.tensor([6.0]))))
    rows, scales = nvfp4.NVFP4.quantise(source, given_scale)
    values, native_scales = utils.ref_nvfp4_quant(source, given_scale, 16)
    ours = nvfp4.e2m1_values(torch.stack((rows & 15, rows >> 4), 2).flatten(1))
    assert scales is not None
    assert not bool(differing(scales, fp8.to_e4m3(native_scales)).any())
    # The reference forgets the sign of zeros, and multiplies by 1e-8 where the scale is 0.
    same = (ours == values) | values.isnan() | (native_scales == 0) & (source.float().abs() > 2.5e7)
    assert bool(same.all())
    assert bool((ours.abs()[values.isnan()] == 6).all())


@EVERY_RECIPE
def test_dequantise_in_plain_arithmetic(name: str) -> None:
    """In fp32, then rounded to the type asked for."""
    recipe, source = RECIPES[name], usual_rows(torch.bfloat16, 16)
    rows, scales = recipe.quantise(source, SCALE)
    of_blocks = SCALE.view(1, 1) if scales is None else scales
    plain: dict[str, Callable[[], torch.Tensor]] = {
        "fp8_block": lambda: rows.float() * of_blocks.repeat_interleave(128, 1),
        "fp8_block_pow2": lambda: rows.float() * of_blocks.repeat_interleave(128, 1),
        "fp8_token": lambda: rows.float() * of_blocks,
        "fp8_tensor": lambda: rows.float() * of_blocks,
        "mxfp8": lambda: torch.ldexp(rows.float(), of_blocks.int().repeat_interleave(32, 1) - 127),
        "nvfp4": lambda: nvfp4_plainly(rows, of_blocks),
    }
    expected = plain[name]()
    for dtype in DTYPES:
        back = recipe.dequantise(rows, scales, dtype, SCALE)
        assert back.dtype == dtype
        assert torch.equal(back, expected.to(dtype))


def nvfp4_plainly(rows: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    table = torch.tensor(rows_of.E2M1_NUMBERS)
    table = torch.cat((table, -table))
    out = torch.empty(len(rows), rows.shape[1] * 2)
    for column in range(rows.shape[1]):
        out[:, 2 * column] = table[rows[:, column].int() % 16]
        out[:, 2 * column + 1] = table[rows[:, column].int() // 16]
    return out * (scales.float() / SCALE).repeat_interleave(16, 1)


# ---- Special values, as the docstrings of the recipes have them.

NAN, INF = float("nan"), float("inf")


@EVERY_RECIPE
@pytest.mark.parametrize("dtype", DTYPES)
def test_special_values(name: str, dtype: torch.dtype) -> None:
    recipe, block = RECIPES[name], max(BLOCKS[name], 32)
    source = torch.ones(5, block)
    source[0, 3], source[1, 3], source[2, 3] = NAN, INF, -INF
    source[3:] = torch.tensor([0.0, -0.0])[:, None]
    rows, scales = recipe.quantise(source.to(dtype), torch.tensor([1.0]))
    codes = rows.view(torch.uint8)
    zero, minus = (0, 0x88) if name == "nvfp4" else (0, 0x80)
    assert bool((codes[3] == zero).all())
    assert bool((codes[4] == minus).all())
    nan_rows = {"fp8_tensor": [3], "nvfp4": []}.get(name, list(range(block)))
    assert (codes[0] == 0x7F).nonzero().flatten().tolist() == nan_rows
    back = recipe.dequantise(rows, scales, torch.float32, torch.tensor([1.0]))
    assert bool(back[0].isnan()[:16].all()) == (name != "fp8_tensor")
    infinite = {"fp8_tensor": 448.0, "nvfp4": 6 * 448.0, "mxfp8": INF}.get(name, NAN)
    assert str(float(back[1, 3])) == str(infinite)
    assert str(float(back[2, 3])).lstrip("-") == str(infinite)
    if name == "mxfp8":
        assert scales is not None
        assert scales.flatten().tolist() == [0, 254, 254, 0, 0]
        assert codes[1:3, 3].tolist() == [0x7E, 0xFE]
    if name == "nvfp4":
        assert bool((codes[0, :8] == 0x77).all())


# ---- What is refused.


@pytest.mark.parametrize(
    ("name", "hidden_size", "block"),
    [("fp8_block", 7200, 128), ("mxfp8", 7184, 32), ("nvfp4", 7176, 16)],
)
def test_a_row_that_blocks_do_not_fill(name: str, hidden_size: int, block: int) -> None:
    recipe = RECIPES[name]
    for ask in (recipe.hidden_row, recipe.scales_row):
        with pytest.raises(
            ConfigError, match=rf"hidden_size={hidden_size} .* {block}, .*{name}.*Use fp8_token"
        ):
            ask(hidden_size)
    with pytest.raises(ConfigError, match=f"hidden_size={hidden_size}"):
        recipe.quantise(torch.zeros(1, hidden_size), SCALE)


@EVERY_RECIPE
def test_rows_are_what_the_recipe_announces(name: str) -> None:
    recipe = RECIPES[name]
    assert isinstance(recipe, QuantisingRecipe)
    for num_tokens, hidden_size in ((0, 128), (3, 384)):
        rows, scales = recipe.quantise(torch.ones(num_tokens, hidden_size), SCALE)
        announced = recipe.hidden_row(hidden_size), recipe.scales_row(hidden_size)
        for tensor, row in zip((rows, scales), announced, strict=True):
            assert (tensor is None) == (row is None)
            if tensor is not None and row is not None:
                assert tensor.dtype == row.dtype
                assert tensor.shape == (num_tokens, row.elements)
                assert tensor.is_contiguous()
        back = recipe.dequantise(rows, scales, torch.bfloat16, SCALE)
        assert back.shape == (num_tokens, hidden_size)


@EVERY_RECIPE
def test_what_is_no_activation(name: str) -> None:
    with pytest.raises(InputError, match=f"{name} .*shape \\[128\\]; reshape"):
        RECIPES[name].quantise(torch.zeros(128), SCALE)
    with pytest.raises(InputError, match=f"{name} .*not torch.float8_e4m3fn.*scales="):
        RECIPES[name].quantise(torch.zeros(2, 128).to(fp8.E4M3), SCALE)


@pytest.mark.parametrize("name", ["fp8_block", "fp8_block_pow2", "fp8_token", "mxfp8", "nvfp4"])
def test_rows_without_scales(name: str) -> None:
    rows, _ = RECIPES[name].quantise(torch.zeros(2, 128), SCALE)
    with pytest.raises(InputError, match=f"{name} mean nothing without scales"):
        RECIPES[name].dequantise(rows, None, torch.bfloat16, SCALE)


@pytest.mark.parametrize("name", ["fp8_tensor", "nvfp4"])
def test_without_a_global_scale(name: str) -> None:
    """core/exchange/test_quantised_dispatch.py has scales of another form."""
    with pytest.raises(InputError, match="needs global_scale"):
        RECIPES[name].quantise(torch.zeros(2, 128), None)


def test_limits_of_a_global_scale() -> None:
    for value in (1e-39, 1e38, -INF):
        scale = torch.tensor([value])
        with pytest.raises(InputError, match="global_scale=.* of recipe nvfp4 must be from 2.-126"):
            check_global_scale("nvfp4", scale)
        assert check_global_scale("nvfp4", scale, read_value=False).shape == ()
    for value in (2.0**-126, 2.0**126):
        assert float(check_global_scale("nvfp4", torch.tensor([[value]]))) == value
