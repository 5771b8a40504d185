"""Rows that quantisers are tried on, and ways to compare what they become.

The hard ones are built, not hoped for: every 16-bit pattern alone in a block and beside larger
numbers, fp32 bits of all kinds, values that lie exactly between two codes, and their neighbours.
"""

from __future__ import annotations

import torch

from moe_nvlink_plugin.recipes import QuantisedRows, fp8
from moe_nvlink_plugin.recipes.fp8 import FP8_BLOCK, FP8_BLOCK_POW2, FP8_TENSOR, FP8_TOKEN
from moe_nvlink_plugin.recipes.mxfp8 import MXFP8
from moe_nvlink_plugin.recipes.nvfp4 import NVFP4

RECIPES = {
    recipe.name: recipe
    for recipe in (FP8_BLOCK, FP8_BLOCK_POW2, FP8_TOKEN, FP8_TENSOR, MXFP8, NVFP4)
}
#: Hidden sizes rows of one block each have; tokens are as wide as we like.
BLOCKS = {
    "fp8_block": 128,
    "fp8_block_pow2": 128,
    "fp8_token": 136,
    "fp8_tensor": 40,
    "mxfp8": 32,
    "nvfp4": 16,
}
#: e4m3's numbers from 0 to 448, and e2m1's: sign apart, in the order of their codes.
E4M3_NUMBERS = [
    mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    for exponent in range(16)
    for mantissa in range(8)
][:127]
E2M1_NUMBERS = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def in_wide_rows(rows: torch.Tensor, block: int) -> torch.Tensor:
    """The same blocks side by side: on the host a group of 1024 elements, a piece of 128, a block.

    The first rows come again where the last row needs more.
    """
    side_by_side = 1024 // block + 128 // block + 1
    missing = -len(rows) % side_by_side
    return torch.cat((rows, rows[:missing])).reshape(-1, side_by_side * block)


def patterns(dtype: torch.dtype) -> torch.Tensor:
    """All 65536 numbers of a 16-bit type, NaN and infinities among them."""
    return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)


def patterns_alone(dtype: torch.dtype, block: int) -> torch.Tensor:
    """One row of one block for each pattern, at changing places; zeros beside it."""
    numbers = torch.zeros(65536, block, dtype=torch.int16)
    places = torch.arange(65536) % block
    numbers[torch.arange(65536), places] = patterns(dtype).view(torch.int16)
    return numbers.view(dtype)


def patterns_beside(dtype: torch.dtype, block: int, largest: torch.Tensor) -> torch.Tensor:
    """All patterns once for each number of `largest`, which stands first in every block.

    Patterns of similar size are neighbours, so that few blocks are lost to NaN.
    """
    order = patterns(dtype).view(torch.int16).int().remainder(32768).argsort(stable=True)
    filled = patterns(dtype)[order]
    missing = -len(filled) % (block - 1)
    filled = torch.cat((filled, filled[:missing])).view(-1, block - 1)
    rows = filled.repeat(len(largest), 1)
    first = largest.to(dtype).repeat_interleave(len(filled))
    return torch.cat((first[:, None], rows), 1)


def random_rows(block: int, seed: int, num_values: int = 600_000) -> torch.Tensor:
    """fp32: any bits; Gaussians of any magnitude; values of very different magnitudes in a row."""
    random = torch.Generator().manual_seed(seed)
    shape = (num_values // 3 // block, block)
    bits = torch.randint(-(2**31), 2**31, shape, generator=random).to(torch.int32)
    exponents = torch.randint(-140, 127, (shape[0], 1), generator=random)
    gaussian = torch.ldexp(torch.randn(shape, generator=random), exponents)
    spread = torch.randint(-30, 1, shape, generator=random)
    wide = torch.ldexp(torch.randn(shape, generator=random), exponents.clamp(-60, 60) + spread)
    return torch.cat((bits.view(torch.float32), gaussian, _sprinkled(wide, random)))


def hard_rows(name: str, dtype: torch.dtype) -> torch.Tensor:
    """Wide rows of one type: all 16-bit patterns or fp32 bits of all kinds, ties, limits."""
    block = BLOCKS[name]
    numbers = E2M1_NUMBERS if name == "nvfp4" else E4M3_NUMBERS
    rows = [random_rows(block, 4, 200_000), tied_rows(block, numbers, range(-3, 4))]
    rows = [each.to(dtype) for each in (*rows, rows_at_limits(block))]
    if dtype != torch.float32:
        rows.append(patterns_alone(dtype, block))
    return in_wide_rows(torch.cat(rows), block)


def _sprinkled(rows: torch.Tensor, random: torch.Generator) -> torch.Tensor:
    """In every eighth row one value that is not like others; some rows of nothing but zeros."""
    nan, inf, tiny = float("nan"), float("inf"), 1e-45
    odd = torch.tensor([nan, inf, -inf, 0.0, -0.0, tiny, -tiny, 3e38, -3e38, -nan])
    count = len(rows[::8])
    places = torch.randint(0, rows.shape[1], (count,), generator=random)
    which = torch.randint(0, len(odd), (count,), generator=random)
    rows[torch.arange(count) * 8, places] = odd[which]
    rows[1::64] = 0.0
    rows[2::64] = -0.0
    rows[3::64] = rows[3::64].sign() * tiny  # an amax that is denormal
    return rows


def tied_rows(block: int, numbers: list[float], exponents: range) -> torch.Tensor:
    """fp32 rows with values between two `numbers` times 2^exponent, and their fp32 neighbours.

    The largest of the numbers stands first in each row, so that the scale is that power of two.
    """
    steps = torch.tensor(numbers)
    ties = (steps[1:] + steps[:-1]) / 2  # exact
    near = torch.cat((ties, ties.nextafter(torch.tensor(0.0)), ties.nextafter(steps[-1]), steps))
    near = torch.cat((near, -near))
    missing = -len(near) % (block - 1)
    near = torch.cat((near, near[:missing])).view(-1, block - 1)
    rows = torch.cat((torch.full((len(near), 1), numbers[-1]), near), 1)
    return torch.cat([torch.ldexp(rows, torch.tensor(exponent)) for exponent in exponents])


def rows_at_limits(block: int) -> torch.Tensor:
    """fp32 rows whose amax is beside a number where some scale takes another turn.

    448 times any power of two (MXFP8's exponent), 1e-10 and 1/512 (least scales), the ends of
    fp32's normal and finite numbers.
    """
    powers = 448.0 * torch.exp2(torch.arange(-126.0, 119.0, 7.0))
    others = torch.tensor([1e-10, 1 / 512, 2.0**-126, 448 * 2.0**-127, 3.4e38, 6.0, 2688.0])
    limits = torch.cat((powers, others)).view(torch.int32)
    amax = (limits[:, None] + torch.arange(-44, 45, dtype=torch.int32)).view(torch.float32)
    amax = amax.reshape(-1, 1)
    fractions = torch.linspace(-1.0, 1.0, block - 1)
    return torch.cat((amax, amax * fractions), 1)


def hard_numbers() -> torch.Tensor:
    """fp32: all 16-bit numbers, ties of both formats, a million of any bits, limits."""
    numbers = [patterns(dtype).float() for dtype in (torch.bfloat16, torch.float16)]
    both = (E4M3_NUMBERS, E2M1_NUMBERS)
    numbers += [tied_rows(2, steps, range(1)).flatten() for steps in both]
    random = torch.Generator().manual_seed(5)
    bits = torch.randint(-(2**31), 2**31, (1_000_000,), generator=random).to(torch.int32)
    usual = torch.randint(0x3A000000, 0x44000000, (500_000,), generator=random).to(torch.int32)
    limits = torch.tensor([448.0, 464.0, 480.0, 5.0, 6.0, 0.25, 2.0**-10, 2.0**-9])
    near = (limits.view(torch.int32)[:, None] + torch.arange(-3, 4, dtype=torch.int32)).flatten()
    all_bits = torch.cat((bits, usual, near))
    return torch.cat([*numbers, all_bits.view(torch.float32), -all_bits.view(torch.float32)])


_NEAREST_E4M3 = fp8.to_e4m3


def truncated_e4m3(values: torch.Tensor) -> torch.Tensor:
    """A mistake that is easily made: e4m3 toward zero."""
    nearest = _NEAREST_E4M3(values)
    beyond = nearest.float().abs() > values.abs()
    return (nearest.view(torch.uint8) - beyond.to(torch.uint8)).view(fp8.E4M3)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def differing(ours: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Where two results of one type differ. e4m3 and fp32: a NaN is a NaN, whichever."""
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[ours.dtype.itemsize]
    different = ours.view(width) != others.view(width)
    if ours.dtype.is_floating_point:
        different &= ~(ours.float().isnan() & others.float().isnan())
    return different


def assert_same(ours: QuantisedRows, others: QuantisedRows, source: torch.Tensor) -> None:
    """Rows and scales bit for bit; names the first row that differs."""
    for name, mine, theirs in zip(("rows", "scales"), ours, others, strict=True):
        assert (mine is None) == (theirs is None), name
        if mine is None or theirs is None:
            continue
        assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape), name
        different = differing(mine, theirs)
        if bool(different.any()):
            row, column = different.nonzero()[0].tolist()
            raise AssertionError(
                f"{int(different.sum())} of {different.numel()} {name} differ, first "
                f"[{row}, {column}]: {bytes_of(mine[row])[column]:#x}, not "
                f"{bytes_of(theirs[row])[column]:#x}, of {source[row].tolist()}"
            )
