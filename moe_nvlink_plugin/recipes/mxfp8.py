"""MXFP8: e4m3 values in blocks of 32 that share a power of two (OCP microscaling).

The scale follows the rule of vLLM 0.32's `mxfp8_e4m3_quantize`: the least power of two for which
amax / scale is at most 448. vLLM's torch implementation computes `ceil(log2(amax / 448))` and
rounds the logarithm to fp32. This recipe reads the exponent exactly, from the bits of amax. The two
differ only if amax lies just above 448 times a power of two, by up to 40 units in the last place (2
around 1, 39 around 2^100, none around 448). vLLM's scale is then half as large, and vLLM clamps
amax / scale to 448. bf16 and fp16 have no numbers so close to these limits, so for them both rules
are equal. On Blackwell vLLM calls FlashInfer's quantiser instead of torch.

The hidden size must be a multiple of 32; vLLM asserts this. FlashInfer's quantiser pads columns to
the `mx_alignment` of a FusedMoEQuantConfig (256 for MXFP4 weights under its TRT-LLM kernels). This
recipe does not pad.
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


@dataclasses.dataclass(frozen=True)
class Mxfp8Recipe:
    """Recipe mxfp8: e4m3 `[n, H]`, one e8m0 byte b per 32 elements, which means 2^(b - 127).

    H must be a multiple of 32. b is the least number from 0 to 254 with amax <= 448 * 2^(b - 127),
    and value = e4m3(clamp(x / 2^(b - 127), -448, 448)).

    NaN and infinity follow vLLM's torch implementation on torch 2.13. If amax is infinite, b is 254
    and infinity becomes 448 (NaN with older torch). If the block has a NaN, b is 0 and every value
    is NaN (0x7f).
    """

    name: ClassVar[str] = "mxfp8"
    quantiser: ClassVar[str] = "Mxfp8"
    needs_global_scale: ClassVar[bool] = False
    activation_dtypes: ClassVar[tuple[torch.dtype, ...]] = ACTIVATION_DTYPES

    block: ClassVar[int] = 32

    def hidden_row(self, hidden_size: int) -> PayloadRow:
        check_block(self.name, hidden_size, self.block, "fp8_token")
        return PayloadRow(E4M3, hidden_size)

    def scales_row(self, hidden_size: int) -> PayloadRow:
        check_block(self.name, hidden_size, self.block, "fp8_token")
        return PayloadRow(torch.uint8, hidden_size // self.block)

    def quantise(
        self, hidden_states: torch.Tensor, global_scale: torch.Tensor | None = None
    ) -> QuantisedRows:
        """Return rows e4m3 `[n, H]` and scales uint8 `[n, H/32]`. Local; capturable.

        Raises:
            ConfigError: H is no multiple of 32.
            InputError: hidden_states is not two-dimensional, or not of an activation type.
        """
        check_activations(self.name, hidden_states)
        check_block(self.name, hidden_states.shape[1], self.block, "fp8_token")
        blocks = in_blocks(hidden_states, self.block)
        amax = blocks.abs().amax(dim=2)
        exponents = _exponents(amax)
        # The factor is 2^(127 - b). The product has the same bits as the quotient by 2^(b - 127),
        # which is subnormal for b = 0.
        values = blocks * _power_of_two(254 - exponents)[:, :, None]
        values = torch.where(amax.isnan()[:, :, None], float("nan"), values)
        return QuantisedRows(to_e4m3(values).flatten(1), exponents.to(torch.uint8))

    def dequantise(
        self,
        rows: torch.Tensor,
        scales: torch.Tensor | None,
        dtype: torch.dtype,
        global_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return value * 2^(b - 127), rounded to `dtype`; NaN for b = 255. Local; capturable."""
        exponents = scales_given(self.name, scales).to(torch.int32)
        blocks = in_blocks(rows, self.block)
        return (blocks * _power_of_two(exponents)[:, :, None]).flatten(1).to(dtype)


def _exponents(amax: torch.Tensor) -> torch.Tensor:
    """Return the biased exponents of the blocks' scales, int32 0..254. 448 is 1.75 * 2^8."""
    bits = amax.view(torch.int32)
    beyond = (bits & 0x7FFFFF) > 0x600000  # the mantissa is above 1.75
    exponents = ((bits >> 23) - 8 + beyond.int()).clamp(min=0)
    return torch.where(amax.isinf(), 254, exponents).masked_fill(amax.isnan(), 0)


def _power_of_two(biased: torch.Tensor) -> torch.Tensor:
    """Return 2^(biased - 127) in fp32 for int32 0..254; NaN for 255, which is e8m0's NaN."""
    bits = torch.where(biased == 0, 0x400000, biased << 23)  # 2^-127 is subnormal
    return torch.where(biased == 255, 0x7FC00000, bits).to(torch.int32).view(torch.float32)


MXFP8 = Mxfp8Recipe()
