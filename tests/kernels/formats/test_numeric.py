"""number_formats.h against torch: every 16-bit pattern up, millions of fp32 patterns down."""

from __future__ import annotations

import pytest
import torch

from moe_nvlink_plugin.jit.header import constants
from tests.kernels.formats.test_quantisers import on_host

FORMATS = pytest.mark.parametrize(
    ("element", "dtype"), [("kElementBf16", torch.bfloat16), ("kElementFp16", torch.float16)]
)


def convert(name: str, element: str, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    on_host(name, constants()[element], source, target, source.numel())
    return target


def first_difference(patterns: torch.Tensor, ours: torch.Tensor, torchs: torch.Tensor) -> str:
    index = int((ours != torchs).nonzero()[0])
    values = (int(tensor[index]) & 0xFFFFFFFF for tensor in (patterns, ours, torchs))
    return "pattern {:#x} became {:#x}, with torch {:#x}".format(*values)


@FORMATS
def test_every_16_bit_pattern_to_fp32(element: str, dtype: torch.dtype) -> None:
    patterns = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    ours = convert("to_float", element, patterns, torch.empty(65536)).view(torch.int32)
    torchs = patterns.view(dtype).float().view(torch.int32)
    # A NaN stays a NaN; which one is not promised.
    both_nan = ours.view(torch.float32).isnan() & torchs.view(torch.float32).isnan()
    different = (ours != torchs) & ~both_nan
    assert not bool(different.any()), first_difference(patterns, ours, torchs)


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
    patterns = interesting_fp32()
    ours = torch.empty(patterns.shape, dtype=torch.int16)
    convert("from_float", element, patterns, ours)
    torchs = patterns.view(torch.float32).to(dtype).view(torch.int16)
    both_nan = ours.view(dtype).isnan() & torchs.view(dtype).isnan()
    different = (ours != torchs) & ~both_nan
    assert not bool(different.any()), first_difference(patterns, ours, torchs)
