"""Formats in which the experts' rows travel back in combine, and a bound on their error.

Without a format, partial rows travel in `AllToAllConfig.dtype`. With a format, the rank that owns
the experts quantises their rows at the start of combine. The rank that combines fetches the
quantised rows, dequantises them, adds them in fp32 as a pairwise tree over k and rounds once.
Quantising loses bits, so only `AllToAllConfig.combine` turns it on. The tests compare the kernel
(kernels/exchange/combine.cu) with the torch code here, bit for bit; its operations round the same
on every device.

| format     | region              | row of a slot            | bytes at hidden 7168 |
|------------|---------------------|--------------------------|----------------------|
| fp8_block  | combine_rows        | e4m3 `[H]`               | 7168                 |
|            | combine_scales      | fp32 `[H/128]`           | 224                  |
| nvfp4      | combine_rows        | packed e2m1 `[H/2]`      | 3584                 |
|            | combine_scales      | e4m3 `[H/16]`            | 448                  |
|            | combine_row_scales  | fp32 `[1]`               | 4                    |
| fp8_tensor | combine_rows        | e4m3 `[H]`               | 7168                 |
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple, Protocol

import torch

from moe_nvlink_plugin.errors import ConfigError

from . import PayloadRow
from . import fp8 as recipe_fp8
from .fp8 import E4M3_MAX, divide, to_e4m3
from .nvfp4 import e2m1_codes, e2m1_values, packed, unpacked

E2M1_MAX = 6.0
#: Smallest scale of an nvfp4 row: times the least block scale, 2**-9, it is still a normal number.
LEAST_ROW_SCALE = 2.0**-100

#: Relative error of one fp32 operation.
_U32 = 2.0**-24


class QuantisedPartialRows(NamedTuple):
    """Quantised form of `n` partial rows; each field is the content of one region."""

    rows: torch.Tensor
    scales: torch.Tensor | None  # None if the format has none
    row_scales: torch.Tensor | None  # fp32 [n, 1]; None if the format has none


class CombineFormat(Protocol):
    """Format of combine. Stateless; all methods are local and work on any device."""

    @property
    def name(self) -> str:
        """Name by which AllToAllConfig.combine selects the format."""
        ...

    def rows(self, hidden_size: int) -> dict[str, PayloadRow]:
        """Return region name -> row of a slot.

        Raises:
            ConfigError: hidden_size is no multiple of the format's block.
        """
        ...

    def quantise(self, partial_rows: torch.Tensor) -> QuantisedPartialRows:
        """Quantise `[n, H]` of an activation type, with the kernel's bits."""
        ...

    def dequantise(self, quantised: QuantisedPartialRows) -> torch.Tensor:
        """Return the terms of combine's sum, fp32 `[n, H]`."""
        ...

    def error_bound(self, partial_rows: torch.Tensor) -> torch.Tensor:
        """Return a bound on |dequantise(quantise(x)) - x| for finite x, fp64 `[n, H]`."""
        ...


@dataclasses.dataclass(frozen=True)
class Fp8BlockFormat:
    """e4m3 with one fp32 scale per 128 elements, by the rule of the recipe fp8_block."""

    name: str = "fp8_block"
    block: int = 128

    def rows(self, hidden_size: int) -> dict[str, PayloadRow]:
        _check_hidden_size(self.name, hidden_size, self.block)
        return {
            "combine_rows": PayloadRow(torch.float8_e4m3fn, hidden_size),
            "combine_scales": PayloadRow(torch.float32, hidden_size // self.block),
        }

    def quantise(self, partial_rows: torch.Tensor) -> QuantisedPartialRows:
        rows, scales = recipe_fp8.FP8_BLOCK.quantise(partial_rows)
        assert scales is not None
        return QuantisedPartialRows(rows, scales, None)

    def dequantise(self, quantised: QuantisedPartialRows) -> torch.Tensor:
        rows, scales, _ = quantised
        return recipe_fp8.FP8_BLOCK.dequantise(rows, scales, torch.float32)

    def error_bound(self, partial_rows: torch.Tensor) -> torch.Tensor:
        scales = self.quantise(partial_rows).scales
        assert scales is not None
        scales = scales.double().repeat_interleave(self.block, -1)
        exact = partial_rows.double().abs()
        values = exact / scales
        return _with_fp32_roundings(scales * _half_step_of_e4m3(values), exact)


@dataclasses.dataclass(frozen=True)
class Nvfp4Format:
    """e2m1 with one e4m3 scale per 16 elements and one fp32 scale per row.

    The row's scale r replaces the recipe's global scale: r = amax of the row / (448 * 6), so that
    the scale of the largest block is the largest e4m3 number. The scales s of the blocks are those
    of the recipe nvfp4 with global scale 1 / r. A value is e2m1 * (s * r), and the quantiser
    multiplies x by the reciprocal of s * r, the product that the receiver computes. A NaN or an
    infinity makes r NaN, and with r every value of its row.
    """

    name: str = "nvfp4"
    block: int = 16

    def rows(self, hidden_size: int) -> dict[str, PayloadRow]:
        _check_hidden_size(self.name, hidden_size, self.block)
        return {
            "combine_rows": PayloadRow(torch.uint8, hidden_size // 2),
            "combine_scales": PayloadRow(torch.float8_e4m3fn, hidden_size // self.block),
            "combine_row_scales": PayloadRow(torch.float32, 1),
        }

    def quantise(self, partial_rows: torch.Tensor) -> QuantisedPartialRows:
        rows = partial_rows.float()
        amax = rows.abs().amax(-1, keepdim=True)
        row_scales = divide(amax, E4M3_MAX * E2M1_MAX).clamp(min=LEAST_ROW_SCALE)
        row_scales = torch.where(amax < math.inf, row_scales, math.nan)
        blocks = recipe_fp8.in_blocks(rows, self.block)
        scales = to_e4m3(row_scales.reciprocal() * (blocks.abs().amax(-1) * (1.0 / E2M1_MAX)))
        units = scales.float() * row_scales
        factors = torch.where(scales.float() == 0.0, 0.0, units.reciprocal())
        codes = e2m1_codes(blocks * factors.unsqueeze(-1)).flatten(-2)
        return QuantisedPartialRows(packed(codes), scales, row_scales)

    def dequantise(self, quantised: QuantisedPartialRows) -> torch.Tensor:
        blocks = recipe_fp8.in_blocks(e2m1_values(unpacked(quantised.rows)), self.block)
        return (blocks * self._units(quantised).unsqueeze(-1)).flatten(-2)

    def error_bound(self, partial_rows: torch.Tensor) -> torch.Tensor:
        units = self._units(self.quantise(partial_rows)).double().repeat_interleave(self.block, -1)
        exact = partial_rows.double().abs()
        values = exact / units  # inf or NaN if the unit is zero; every value is then zero
        half_step = torch.where(values < 2.0, 0.25, torch.where(values < 4.0, 0.5, 1.0))
        beyond = values - E2M1_MAX  # positive if the block's scale was rounded down
        error = torch.where(units == 0.0, exact, units * torch.maximum(half_step, beyond))
        return _with_fp32_roundings(error, exact)

    def _units(self, quantised: QuantisedPartialRows) -> torch.Tensor:
        assert quantised.scales is not None
        assert quantised.row_scales is not None
        return quantised.scales.float() * quantised.row_scales


@dataclasses.dataclass(frozen=True)
class Fp8TensorFormat:
    """e4m3 with one scale for all rows, which does not travel: AllToAllConfig.combine_scale.

    A value is e4m3(x * (1 / scale)); the reciprocal is rounded first. A magnitude above 448 * scale
    becomes 448 * scale, and one up to 2**-10 * scale becomes zero. NaN and infinities become NaN,
    each for itself. With scale 1 it is the cast of TensorRT-LLM's and FlashInfer's low-precision
    combine, which makes +-448 of an infinity.

    Combine adds the codes and multiplies the sum by the scale. With a power of two that has the
    bits of the sum of `dequantise`'s terms.
    """

    scale: float = 1.0
    name: str = "fp8_tensor"
    block: int = 16

    def rows(self, hidden_size: int) -> dict[str, PayloadRow]:
        _check_hidden_size(self.name, hidden_size, self.block)
        return {"combine_rows": PayloadRow(torch.float8_e4m3fn, hidden_size)}

    def quantise(self, partial_rows: torch.Tensor) -> QuantisedPartialRows:
        rows = partial_rows.float()
        codes = to_e4m3((rows + rows * 0.0) * self._scale(rows).reciprocal())
        return QuantisedPartialRows(codes, None, None)

    def dequantise(self, quantised: QuantisedPartialRows) -> torch.Tensor:
        codes = quantised.rows.float()
        return codes * self._scale(codes)

    def error_bound(self, partial_rows: torch.Tensor) -> torch.Tensor:
        scale = self._scale(partial_rows).double()
        exact = partial_rows.double().abs()
        values = exact / scale
        error = scale * torch.maximum(_half_step_of_e4m3(values), values - E4M3_MAX)
        return _with_fp32_roundings(error, exact)

    def _scale(self, like: torch.Tensor) -> torch.Tensor:
        return torch.tensor(self.scale, dtype=torch.float32, device=like.device)


FP8_BLOCK = Fp8BlockFormat()
NVFP4 = Nvfp4Format()
FP8_TENSOR = Fp8TensorFormat()
#: Formats by name. None and "bf16" mean unquantised rows.
FORMATS: dict[str, CombineFormat] = {one.name: one for one in (FP8_BLOCK, NVFP4, FP8_TENSOR)}
UNQUANTISED_NAMES = (None, "bf16")


def combine_format(name: str | None, scale: float = 1.0) -> CombineFormat | None:
    """Return the format of that name; None for unquantised rows. Local.

    Args:
        name: as AllToAllConfig.combine.
        scale: as AllToAllConfig.combine_scale.

    Raises:
        ConfigError: there is no such format.
    """
    if name in UNQUANTISED_NAMES:
        return None
    if name not in FORMATS:
        raise ConfigError(f"combine={name!r} is no format; use one of bf16, {', '.join(FORMATS)}")
    return Fp8TensorFormat(scale) if name == FP8_TENSOR.name else FORMATS[name]


def combine_rows(name: str | None, hidden_size: int) -> dict[str, PayloadRow]:
    """Return region name -> row of a slot for the format's regions; {} for unquantised rows. Local.

    Raises:
        ConfigError: there is no such format, or hidden_size is no multiple of its block.
    """
    found = combine_format(name)
    return {} if found is None else found.rows(hidden_size)


def error_bound(
    partial_rows: torch.Tensor, name: str, dtype: torch.dtype | None = None, scale: float = 1.0
) -> torch.Tensor:
    """Bound the distance between combine's result and the exact sum of the experts' rows. Local.

    Args:
        partial_rows: `[n, top_k, H]` of an activation type, finite; zeros for a k without a row.
        name: name of the format.
        dtype: type that combine writes; None: the type of partial_rows.
        scale: as AllToAllConfig.combine_scale.

    Returns:
        fp64 `[n, H]`: an upper bound of |combine's element - exact sum|, if the sum does not
        overflow `dtype`.

    Derivation. x_k is the experts' element, and y_k is the receiver's dequantised element.

    1. One block. fp8_block: s = max(amax, 1e-10) / 448 puts |x / s| into [0, 448], up to fp32's
       rounding, which the clamp corrects. e4m3 rounds v = x / s to the nearest of numbers that
       lie 2**(floor(log2 |v|) - 3) apart, 2**-9 below 2**-6. So |y - x| is at most
       s * 2**(max(floor(log2 |v|), -6) - 4): never more than the larger of |x| / 16 and
       amax / (448 * 1024), and at most amax / 28 anywhere in the block.
       nvfp4: the unit of a block is u = s * r with r = amax of the row / 2688 and s the e4m3 number
       next to amax of the block / (6 * r). e2m1 numbers lie 0.5 apart below 2, 1 below 4, 2 below
       6, so |y - x| is at most u times 0.25, 0.5 or 1; where s was rounded down, v = x / u may
       exceed 6, which saturates: then u * (v - 6), if that is larger. A normal s (amax of the block
       from amax of the row / 28672 on) is off by a 16th at most: together at most 17/96 of the
       block's amax. Blocks below that have a subnormal s; the smallest (amax of the block up to
       6 * 2**-10 * r) have s = 0, send zeros, and |y - x| = |x|.
       fp8_tensor: e4m3's steps of fp8_block with s = scale, and above 448 * s the distance to it,
       which has no limit: half the value is lost at 896 * s. The product with s comes after the sum
       of 2, where it moves the result by what it would move the terms.
       All: quotient, scale and the receiver's product are each rounded to fp32, which moves |y| by
       less than 2**-20 of its value; if that turns a tie the other way, |y - x| is no larger.
       No element is off by more than its magnitude, because zero is among the rounded numbers.
    2. The sum over k is a pairwise tree of depth d = ceil(log2(top_k)) in fp32, so it is off by at
       most ((1 + 2**-24)**d - 1) * sum_k |y_k| with |y_k| <= |x_k| + the bound of 1.
    3. One rounding to dtype: half a unit in the last place of the result, 2**-8 (bf16) or 2**-11
       (fp16) of its magnitude, which is at most |exact sum| + the bounds of 1 and 2; below fp16's
       normal numbers half its step there, 2**-25.
    """
    found = combine_format(name, scale)
    assert found is not None, "unquantised rows have no blocks"
    shape = partial_rows.shape
    flat = partial_rows.reshape(-1, shape[-1])
    errors = found.error_bound(flat).view(shape)
    exact = partial_rows.double()
    depth = math.ceil(math.log2(shape[1])) if shape[1] > 1 else 0
    terms = (exact.abs() + errors).sum(1)
    before_rounding = errors.sum(1) + ((1 + _U32) ** depth - 1) * terms
    relative, absolute = _ROUNDING[dtype or partial_rows.dtype]
    return before_rounding + relative * (exact.sum(1).abs() + before_rounding) + absolute


#: Type of the result -> half a unit in the last place (relative), half a step of subnormals.
_ROUNDING = {
    torch.bfloat16: (2.0**-8, 2.0**-134),
    torch.float16: (2.0**-11, 2.0**-25),
    torch.float32: (0.0, 0.0),
}


def _check_hidden_size(name: str, hidden_size: int, block: int) -> None:
    if hidden_size % block:
        raise ConfigError(
            f"combine={name!r} needs a hidden_size that is a multiple of {block}, got "
            f"{hidden_size}; use combine='bf16' for this layer"
        )


def _half_step_of_e4m3(values: torch.Tensor) -> torch.Tensor:
    """Return half the distance between e4m3 numbers near magnitudes up to 448.

    They have 3 bits after the leading bit, and below 2**-6 the distance is constant.
    """
    return torch.exp2(_floor_log2(values).clamp(min=-6.0, max=8.0) - 4.0)


def _floor_log2(values: torch.Tensor) -> torch.Tensor:
    """Return floor(log2(values)), exactly; a negative number for zero."""
    return torch.frexp(values)[1].double() - 1.0


def _with_fp32_roundings(error: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    error = torch.minimum(error, exact)
    return error + 2.0**-20 * (exact + error)
