"""NVFP4: e2m1 values, two per byte, in blocks of 16 with an e4m3 scale, under one global scale.

The arithmetic follows vLLM 0.32's CUDA kernel `scaled_fp4_quant`, with one difference: reciprocals
are IEEE's, while vLLM's kernel, and our kernel on a GPU, use approximate reciprocals. If such a
factor is off by one unit in the last place, a value on a tie rounds to the other side. By
computation on a CPU this concerns about 6 in 1000 codes of bf16 Gaussians for g = 1, and at most 1
in 1000 for a g that is no round number. vLLM's torch reference, `ref_nvfp4_quant`, differs from its
kernel in two ways; here the kernel counts:

- Scales that round to 0: the kernel multiplies the block's values by 0. The reference multiplies
  them by 1e-8, which shows only if |x| is above 2.5e7.
- Zeros: the kernel keeps the sign of a value that rounds to zero (code 8). The reference drops it.

NaN differs from vLLM's kernel on purpose. The kernel drops a NaN in amax, because fmaxf does, and
stores 6. Here, as in the reference, the scale of the block becomes NaN (0x7f) and all its codes 7.
Infinity becomes 6 under the largest scale.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch

from .base import PayloadRow, QuantisedRows, check_global_scale
from .fp8 import (
    ACTIVATION_DTYPES,
    E4M3,
    check_activations,
    check_block,
    in_blocks,
    scales_given,
    to_e4m3,
)


@dataclasses.dataclass(frozen=True)
class Nvfp4Recipe:
    """Recipe nvfp4: e2m1 packed in uint8 `[n, H/2]`, one e4m3 scale per 16 elements, fp32 scale g.

    H must be a multiple of 16 (vLLM's quantiser asserts this). The caller gives g as global_scale:
    448 * 6 / amax of the tensor. vLLM's name for it is a1_gscale.

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
        """Return rows uint8 `[n, H/2]` and scales e4m3 `[n, H/16]`. Local; capturable.

        Raises:
            ConfigError: H is no multiple of 16.
            InputError: hidden_states is not two-dimensional, or not of an activation type; or
                global_scale is missing, not fp32, or not one element. Dispatch checks its value.
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
        """Return value * (s / g), rounded to `dtype`. Local; capturable."""
        scale = check_global_scale(self.name, global_scale, read_value=False)
        blocks = in_blocks(e2m1_values(unpacked(rows)), self.block)
        of_blocks = scales_given(self.name, scales).float() / scale
        return (blocks * of_blocks[:, :, None]).flatten(1).to(dtype)


def packed(codes: torch.Tensor) -> torch.Tensor:
    """Pack codes `[n, H]` into bytes `[n, H/2]`, the even element in the low half."""
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def unpacked(rows: torch.Tensor) -> torch.Tensor:
    """Unpack bytes `[n, H/2]` into codes `[n, H]`."""
    return torch.stack((rows & 15, rows >> 4), dim=2).flatten(1)


def e2m1_codes(values: torch.Tensor) -> torch.Tensor:
    """Round fp32 to e2m1 codes 0..15 (uint8), to nearest even, at most 6; NaN becomes 7 (PTX)."""
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
    """Return e2m1 codes 0..15 as fp32: sign, 2 bits of exponent with bias 1, 1 bit of mantissa."""
    codes = codes.to(torch.int32)
    size = codes & 7
    normal = ((size >> 1) + 126) << 23 | (size & 1) << 22
    bits = torch.where(size < 2, size * (126 << 23), normal)  # 0 and 0.5 = 2^-1
    return (bits | (codes & 8) << 28).view(torch.float32)


NVFP4 = Nvfp4Recipe()
