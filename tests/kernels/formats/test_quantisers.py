"""The kernels' quantisers (quantise.h, number_formats.h) against the recipes, torch, IEEE division.

The host's library exports them over rows and arrays; the text is the one a GPU's kernel is made of,
its hardware conversions and approximate reciprocals apart.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from moe_nvlink_plugin.jit import host
from moe_nvlink_plugin.jit.header import constants
from moe_nvlink_plugin.launch.arguments import element_code
from moe_nvlink_plugin.recipes import QuantisedRows, fp8, mxfp8, nvfp4
from tests.kernels.formats import quantiser_rows as rows_of
from tests.kernels.formats.quantiser_rows import BLOCKS, RECIPES, assert_same, differing
from tests.support import kernel_texts

EVERY_RECIPE = pytest.mark.parametrize("name", RECIPES)
ONE = torch.ones(1)


def on_host(name: str, *arguments: torch.Tensor | float) -> None:
    """Calls a function that the host's library exports for tests."""
    function = getattr(host.load(kernel_texts.host_source())._library, f"moe_nvlink_{name}")
    function(*map(_as_c, arguments))


def _as_c(argument: torch.Tensor | float) -> Any:
    if isinstance(argument, torch.Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    return ctypes.c_int64(argument) if isinstance(argument, int) else ctypes.c_float(argument)


def by_kernel(
    name: str,
    source: torch.Tensor,
    scale: torch.Tensor = ONE,
    call: Callable[..., None] = on_host,
) -> QuantisedRows:
    """What dispatch makes of contiguous rows on their way. Outputs begin as 0xa5."""
    recipe = RECIPES[name]
    announced = recipe.hidden_row(source.shape[1]), recipe.scales_row(source.shape[1])
    rows, scales = (
        None
        if row is None
        else torch.full((len(source), row.row_bytes), 0xA5, dtype=torch.uint8).view(row.dtype)
        for row in announced
    )
    assert rows is not None
    codes = constants()[f"kQuantiser{recipe.quantiser}"], element_code(source.dtype)
    outputs = rows, 0 if scales is None else scales
    call("quantise_rows", *codes, source, scale, *outputs, len(source), source.shape[1])
    return QuantisedRows(rows, scales)


def over_array(name: str, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    on_host(name, source, target, source.numel())
    return target


def check_wide(name: str, source: torch.Tensor, scale: torch.Tensor = ONE) -> None:
    check(name, rows_of.in_wide_rows(source, BLOCKS[name]), scale)


def check(name: str, source: torch.Tensor, scale: torch.Tensor = ONE) -> None:
    source = source.contiguous()
    assert_same(by_kernel(name, source, scale), RECIPES[name].quantise(source, scale), source)


# ---- The kernels are the recipes.


@EVERY_RECIPE
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_pattern(name: str, dtype: torch.dtype) -> None:
    """Alone in its block, and beside numbers of many sizes."""
    block = min(BLOCKS[name], 40)  # alone, a block of 128 is as good where only 40 are filled
    alone = rows_of.patterns_alone(dtype, block)
    if BLOCKS[name] > block:
        alone = torch.cat((alone, torch.zeros(len(alone), BLOCKS[name] - block, dtype=dtype)), 1)
    check_wide(name, alone, torch.tensor([0.37]))
    largest = torch.tensor([0.0, 1e-4, 0.011, 0.9, 1.75, 1.76, 7.03, 448.0, 3e4])
    check_wide(
        name, rows_of.patterns_beside(dtype, BLOCKS[name], largest), torch.tensor([2688 / 3e4])
    )


@EVERY_RECIPE
def test_millions_of_fp32_values(name: str) -> None:
    for seed, scale in enumerate((1.0, 0.013, 2688 / 5.3)):
        source = rows_of.random_rows(BLOCKS[name], seed, num_values=1_000_000)
        check_wide(name, source, torch.tensor([scale]))


@EVERY_RECIPE
def test_ties_and_limits(name: str) -> None:
    numbers = rows_of.E2M1_NUMBERS if name == "nvfp4" else rows_of.E4M3_NUMBERS
    check_wide(name, rows_of.tied_rows(BLOCKS[name], numbers, range(-12, 12)))
    check_wide(name, rows_of.rows_at_limits(BLOCKS[name]))


def test_ties_of_nvfp4_scales() -> None:
    """Global scales between two e4m3 numbers, where amax is 6."""
    source = torch.zeros(1, 16)
    source[0, :3] = torch.tensor([6.0, 2.4, -0.3])
    steps = torch.tensor(rows_of.E4M3_NUMBERS[1:])
    for scale in ((steps[1:] + steps[:-1]) / 2).tolist():
        for near in (scale, scale * (1 + 2**-23), scale * (1 - 2**-23)):
            check("nvfp4", source, torch.tensor([near]))


@EVERY_RECIPE
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_of_several_pieces(name: str, dtype: torch.dtype) -> None:
    """Sizes that are no multiple of what a lane takes at a time; amax anywhere in the row."""
    random = torch.Generator().manual_seed(9)
    whole = RECIPES[name].scales_row(128) is None or name == "fp8_token"
    for pieces in (1, 2, 3, 5, 8, 33, 2176 // BLOCKS[name] + 1):  # two groups of 1024 and more
        hidden_size = pieces * BLOCKS[name] + (pieces % 3 if whole else 0)
        source = torch.randn(7, hidden_size, generator=random).exp().to(dtype)
        check(name, source, torch.tensor([0.2]))


@EVERY_RECIPE
def test_rows_that_lie_on_no_boundary(name: str) -> None:
    """A view two elements into a buffer: bf16 rows that begin at an odd 4 bytes."""
    hidden_size = 3 * BLOCKS[name]
    buffer = torch.randn(5 * hidden_size + 2, generator=torch.Generator().manual_seed(2)).bfloat16()
    check(name, buffer[2:].view(5, hidden_size))


# ---- Of 16 bits to fp32 and back: every pattern up, millions of fp32 patterns down.

FORMATS = pytest.mark.parametrize(
    ("element", "dtype"), [("kElementBf16", torch.bfloat16), ("kElementFp16", torch.float16)]
)


@FORMATS
def test_every_16_bit_pattern_to_fp32(element: str, dtype: torch.dtype) -> None:
    """A NaN stays a NaN; which one is not promised."""
    patterns, ours = rows_of.patterns(dtype), torch.empty(65536)
    on_host("to_float", constants()[element], patterns, ours, len(patterns))
    assert not bool(differing(ours, patterns.float()).any())


def interesting_fp32() -> torch.Tensor:
    """int32 patterns: random ones, ties of both formats, and the neighbourhood of every limit."""
    generator = torch.Generator().manual_seed(11)
    anywhere = torch.randint(-(2**31), 2**31, (3_000_000,), generator=generator)
    # fp16's range, subnormals included, is a small part of fp32's.
    in_fp16 = torch.randint(0x32000000, 0x48000000, (2_000_000,), generator=generator)
    halves = torch.arange(65536) << 16
    ties = torch.cat([halves + 0x8000, halves + 0x7FFF, halves + 0x8001, halves, halves + 0xFFFF])
    fp16_ties = torch.arange(0x33000000 >> 12, 0x47900000 >> 12) << 12
    limits = torch.tensor(
        [0, 1, 0x00800000, 0x33000000, 0x38800000, 0x387FF000, 0x477FE000, 0x477FF000, 0x47800000]
        + [0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF]
    )
    near = (limits[:, None] + torch.arange(-3, 4)).reshape(-1)
    every = torch.cat([anywhere, in_fp16, ties, fp16_ties, fp16_ties + 1, fp16_ties - 1, near])
    every = torch.cat([every, every ^ 0x80000000]) & 0xFFFFFFFF
    return torch.where(every >= 2**31, every - 2**32, every).to(torch.int32)


@FORMATS
def test_fp32_to_16_bits(element: str, dtype: torch.dtype) -> None:
    values = interesting_fp32().view(torch.float32)
    ours = torch.empty(len(values), dtype=dtype)
    on_host("from_float", constants()[element], values, ours, len(values))
    assert not bool(differing(ours, values.to(dtype)).any())


# ---- Conversions and division.


def test_e4m3_from_float() -> None:
    values = rows_of.hard_numbers()
    ours = over_array("e4m3_from_float", values, torch.empty(len(values), dtype=torch.uint8))
    assert not bool(differing(ours.view(fp8.E4M3), fp8.to_e4m3(values)).any())


def test_e2m1_from_float() -> None:
    values = rows_of.hard_numbers()
    ours = over_array("e2m1_from_float", values, torch.empty(len(values), dtype=torch.uint8))
    assert torch.equal(ours, nvfp4.e2m1_codes(values))


def test_every_code_to_float() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    e4m3 = over_array("e4m3_to_float", codes, torch.empty(256))
    assert not bool(differing(e4m3, codes.view(fp8.E4M3).float()).any())
    e2m1 = over_array("e2m1_to_float", codes[:16], torch.empty(16))
    theirs = codes[:16].numpy().view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    assert torch.equal(e2m1.view(torch.int32), torch.from_numpy(theirs).view(torch.int32))


def divided(values: torch.Tensor, divisor: torch.Tensor) -> torch.Tensor:
    quotients = torch.empty_like(values)
    on_host("divide", values, float(divisor), quotients, values.numel())
    return quotients


def divisors() -> torch.Tensor:
    """Scales as blocks have them: amax / 448 over 60 binades, and awkward mantissas."""
    random = torch.Generator().manual_seed(1)
    usual = torch.ldexp(torch.rand(1000, generator=random) + 1, torch.arange(1000) % 60 - 40)
    awkward = torch.tensor([1.0, 1 + 2.0**-23, 2 - 2.0**-23, 1.5, 448.0, 1e-10 / 448, 1.75])
    return torch.cat((usual, awkward, awkward * 2.0**20, awkward * 2.0**-18))


def test_division_is_ieees() -> None:
    """Three million pairs: of a scale and what its block may hold, down to what becomes 0."""
    random = torch.Generator().manual_seed(3)
    for divisor in divisors():
        values = torch.randn(3000, generator=random) * 200 * divisor
        values[::2] *= torch.exp2(torch.randint(-18, 1, (1500,), generator=random).float())
        values[1] = 448 * divisor
        quotients = divided(values, divisor)
        assert torch.equal(quotients.view(torch.int32), (values / divisor).view(torch.int32)), (
            divisor
        )


def test_division_where_rounding_is_hardest() -> None:
    """Quotients next to the middle between two fp32 numbers: x * 2^25 = divisor * odd + e, e small.

    For |e| <= 3, where alone a remainder's rounding could tell, all 17 million pairs of mantissas
    were once tried in C++: none was wrong, after the first correction already.
    """
    errors = torch.tensor([sign * size for size in range(1, 32, 2) for sign in (1, -1)])
    for divisor in range(2**23 + 1, 2**24, 16_778):
        divisor |= 1
        odd = (-errors * pow(divisor, -1, 2**25)) % 2**25
        fits = odd >= 2**24  # the quotient has 24 bits, and half of one
        products = divisor * odd[fits] + errors[fits]
        assert bool((products % 2**25 == 0).all())
        values = (products >> 25).float()
        by = torch.tensor(float(divisor))
        assert torch.equal(divided(values, by), values / by), divisor


def test_division_by_what_is_no_scale() -> None:
    """Of an infinite or NaN amax. An infinite value has an infinite scale, so no other is asked."""
    values = torch.tensor([1.0, -1.0, 0.0, -0.0, float("nan"), 1e-45, float("inf"), -float("inf")])
    for divisor in (float("inf"), float("nan")):
        quotients = divided(values, torch.tensor(divisor))
        assert not bool(differing(quotients, values / divisor).any()), divisor


# ---- What these comparisons are for.


def mistakes() -> Iterator[tuple[str, Callable[[pytest.MonkeyPatch], None]]]:
    """Each makes one recipe wrong, in a way that an implementation easily is."""
    codes, e4m3 = nvfp4.e2m1_codes, fp8.to_e4m3

    def losing_nan(values: torch.Tensor) -> torch.Tensor:
        return e4m3(values.nan_to_num(448.0))

    yield "fp8_block", lambda patch: patch.setattr(fp8, "to_e4m3", rows_of.truncated_e4m3)
    yield "fp8_token", lambda patch: patch.setattr(fp8, "divide", lambda x, by: x * (1.0 / by))
    yield "fp8_tensor", lambda patch: patch.setattr(fp8, "to_e4m3", losing_nan)
    yield (
        "mxfp8",
        lambda patch: patch.setattr(mxfp8, "_power_of_two", lambda b: torch.exp2(b - 126.0)),
    )
    yield (
        "nvfp4",
        lambda patch: patch.setattr(nvfp4, "e2m1_codes", lambda v: codes(v.nan_to_num(0.0))),
    )
    yield (
        "nvfp4",
        lambda patch: patch.setattr(
            nvfp4, "e2m1_codes", lambda v: codes(v).view(*v.shape[:2], -1, 2).flip(3).flatten(2)
        ),
    )


@pytest.mark.parametrize(("name", "mistake"), list(mistakes()))
def test_a_mistake_is_found(
    name: str, mistake: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = rows_of.random_rows(BLOCKS[name], seed=7, num_values=100_000)
    check(name, source)
    mistake(monkeypatch)
    with pytest.raises(AssertionError, match="differ"):
        check(name, source)
