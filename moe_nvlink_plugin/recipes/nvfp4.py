"""NVFP4: e2m1 values, two in a byte, in blocks of 16 with an e4m3 scale, under one given scale.

The arithmetic is that of vLLM 0.32's CUDA kernel `scaled_fp4_quant` with IEEE reciprocals in place
of the approximate ones that it (and this package's kernel on a GPU) takes. Where such a factor is
one unit in the last place off, values on a tie fall to the other side: with g = 1 some 6 in 1000
codes of bf16 Gaussians, with a g that is no round number 1 in 1000 or none. Against its torch
reference `ref_nvfp4_quant`:

- a block whose scale rounds to 0: the kernel multiplies its values by 0; the reference multiplies
  by 1e-8, which only shows where |x| is above 2.5e7.
- zeros: the kernel keeps the sign of what rounds to zero (code 8), the reference's +0 loses it.

vLLM's kernels lose a NaN in amax, since fmaxf drops it, and it becomes 6; here it makes the scale
of its block NaN (0x7f) and all codes 7, on purpose, as in the reference. Infinity becomes 6 under
the largest scale.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch

from .base import PayloadRow, QuantisedRows
from .fp8 import (
    ACTIVATION_DTYPES,
    E4M3,
    check_activations,
    check_block,
    in_blocks,
    scales_given,
    to_e4m3,
)
from .global_scale import check_global_scale


@dataclasses.dataclass(frozen=True)
class Nvfp4Recipe:
    """Packed e2m1 uint8 `[n, H/2]`, one e4m3 scale per 16 elements, a given fp32 scale g.

    H must be a multiple of 16 (vLLM's quantiser asserts it). g is what vLLM calls a1_gscale: the
    largest scale there is over the tensor's amax, 448 * 6 / amax.

        s = e4m3(min(g * (amax * fp32(1/6)), 448))
        o = 0 where s is 0, else 1 / (s * (1 / g))
        value = e2m1(x * o), to nearest even, at most 6

    The even element is in the low four bits.
    """

    name: ClassVar[str] = "nvfp4"
    quantiser: ClassVar[str] = "Nvfp4"
    needs_global_scale: ClassVar[bool] = True
    activation_dtypes: ClassVar[tuple[torch.dtype, ...]] = ACTIVATION_DTYPES

    block: ClassVar[int] = 16

    def hidden_row(self, hidden_size: int) -> PayloadRow:
        check_block(self.name, hidden_size, self.block, "fp8_token")
        return PayloadRow(torch.uint8, hidden_size // 2)

    def scales_row(self, hidden_size: int) -> PayloadRow:
        check_block(self.name, hidden_size, self.block, "fp8_token")
        return PayloadRow(E4M3, hidden_size // self.block)

    def quantise(
        self, hidden_states: torch.Tensor, global_scale: torch.Tensor | None = None
    ) -> QuantisedRows:
        """Rows uint8 `[n, H/2]`, scales e4m3 `[n, H/16]`. Local; capturable.

        Raises:
            ConfigError: H is no multiple of 16.
            InputError: not two-dimensional, not of an activation type, or no usable global_scale
                (its value is not read here: dispatch does that).
        """
        check_activations(self.name, hidden_states)
        check_block(self.name, hidden_states.shape[1], self.block, "fp8_token")
        scale = check_global_scale(self.name, global_scale, read_value=False)
        blocks = in_blocks(hidden_states, self.block)
        scales = to_e4m3(scale * (blocks.abs().amax(dim=2) * (1.0 / 6.0)))
        stored = scales.float()
        one = torch.ones_like(scale)
        factors = torch.where(stored == 0, 0.0, one / (stored * (one / scale)))
        codes = e2m1_codes(blocks * factors[:, :, None]).flatten(1)
        return QuantisedRows(packed(codes), scales)

    def dequantise(
        self,
        rows: torch.Tensor,
        scales: torch.Tensor | None,
        dtype: torch.dtype,
        global_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """value * (s / g), rounded to `dtype`. Local; capturable."""
        scale = check_global_scale(self.name, global_scale, read_value=False)
        blocks = in_blocks(e2m1_values(unpacked(rows)), self.block)
        of_blocks = scales_given(self.name, scales).float() / scale
        return (blocks * of_blocks[:, :, None]).flatten(1).to(dtype)


def packed(codes: torch.Tensor) -> torch.Tensor:
    """Codes `[n, H]` as bytes `[n, H/2]`, the even element in the low half."""
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def unpacked(rows: torch.Tensor) -> torch.Tensor:
    """Bytes `[n, H/2]` as codes `[n, H]`."""
    return torch.stack((rows & 15, rows >> 4), dim=2).flatten(1)


def e2m1_codes(values: torch.Tensor) -> torch.Tensor:
    """fp32 to e2m1 codes 0..15 (uint8): to nearest even, at most 6; NaN becomes 7, as in PTX."""
    size = values.abs()
    codes = torch.zeros_like(values, dtype=torch.uint8)
    # Halfway between neighbours of 0, 0.5, 1, 1.5, 2, 3, 4, 6 the even code wins.
    for tie in (0.25, 1.25, 2.5, 5.0):
        codes += size > tie
    for tie in (0.75, 1.75, 3.5):
        codes += size >= tie
    codes = torch.where(values.signbit(), codes | 8, codes)
    return codes.masked_fill_(values.isnan(), 7)


def e2m1_values(codes: torch.Tensor) -> torch.Tensor:
    """e2m1 codes 0..15 to fp32: sign, two bits of exponent with bias 1, one of mantissa."""
    codes = codes.to(torch.int32)
    size = codes & 7
    normal = ((size >> 1) + 126) << 23 | (size & 1) << 22
    bits = torch.where(size < 2, size * (126 << 23), normal)  # 0 and 0.5 = 2^-1
    return (bits | (codes & 8) << 28).view(torch.float32)


NVFP4 = Nvfp4Recipe()
