"""The host build for aarch64, executed by qemu-user: the bits of this machine's build.

What this shows and what it cannot show: tests/support/aarch64.py.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from moe_nvlink_plugin.exchange.kernels import COMBINE
from moe_nvlink_plugin.launch.arguments import element_code
from moe_nvlink_plugin.recipes.combine_formats import FORMATS
from moe_nvlink_plugin.verify import cases
from moe_nvlink_plugin.verify.cases import Case
from tests.kernels.exchange.test_combine_formats import check_every_code_and_scale
from tests.kernels.formats import quantiser_rows as rows_of
from tests.kernels.formats.quantiser_rows import BLOCKS, RECIPES, assert_same
from tests.kernels.formats.test_quantisers import by_kernel, interesting_fp32
from tests.kernels.lm_head import test_head as test_head_on_cpu
from tests.support import aarch64, emulated, kernel_texts
from tests.support.aarch64 import Aarch64Backend, Aarch64HeadRanks, Calls
from tests.support.head_ranks import Round, check, make_calls

pytestmark = [pytest.mark.long, aarch64.IS_EMULATED]

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return aarch64.build_library(tmp_path_factory.mktemp("library"))


@pytest.fixture(scope="module")
def calls(library: Path) -> Iterator[Calls]:
    with aarch64.running(library) as found:
        yield found


def sources(name: str, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Hard numbers in rows of one block and in wide rows, and ordinary rows of several pieces."""
    block = BLOCKS[name]
    if dtype == torch.float32:
        numbers = rows_of.E2M1_NUMBERS if name == "nvfp4" else rows_of.E4M3_NUMBERS
        yield rows_of.tied_rows(block, numbers, range(-3, 3))
        yield rows_of.rows_at_limits(block)
        yield rows_of.random_rows(block, seed=4, num_values=60_000)
    else:
        yield rows_of.patterns_beside(dtype, block, torch.tensor([0.0, 0.9, 1.76]))
    random = torch.Generator().manual_seed(9)
    for pieces in (3, 2176 // block + 1):
        yield torch.randn(3, pieces * block, generator=random).exp().to(dtype)
    yield rows_of.hard_rows(name, dtype)[::4]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", RECIPES)
def test_quantisers(name: str, dtype: torch.dtype, calls: Calls) -> None:
    scale = torch.tensor([0.37])
    for source in sources(name, dtype):
        source = source.contiguous()
        here = by_kernel(name, source, scale)
        assert_same(by_kernel(name, source, scale, calls.call), here, source)


@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_conversions(dtype: torch.dtype, calls: Calls) -> None:
    """Every 16-bit pattern up; ties, limits and random patterns down."""
    element, patterns = element_code(dtype), rows_of.patterns(dtype)
    floats = torch.empty(len(patterns))
    calls.call("to_float", element, patterns, floats, len(patterns))
    assert not bool(rows_of.differing(floats, patterns.float()).any())
    numbers = interesting_fp32()[::8].view(torch.float32).contiguous()
    rounded = torch.empty(len(numbers), dtype=dtype)
    calls.call("from_float", element, numbers, rounded, len(numbers))
    assert not bool(rows_of.differing(rounded, numbers.to(dtype)).any())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMATS)
def test_every_code_and_scale(name: str, dtype: torch.dtype, calls: Calls) -> None:
    """Of rows that travel back; as test_combine_formats has it of this machine's build."""
    check_every_code_and_scale(
        name, dtype, calls.call, lambda part: calls.place(part.data_ptr(), part.nbytes)
    )


ROUNDS = Case(
    name="rounds",
    tokens=(8, 0, 5),
    num_experts=10,
    top_k=6,
    hidden_size=300,
    routing="invalid",
    num_threads=2,
)


@pytest.mark.parametrize("recipe", [None, *RECIPES])
def test_rounds(recipe: str | None, calls: Calls) -> None:
    """Dispatch and combine of three ranks, held to the oracle that holds the other builds."""
    choices = itertools.product(DTYPES, cases.COMBINE_FORMATS, (False, True))
    for (dtype, back, small), add in zip(choices, itertools.cycle(cases.ADDS), strict=False):
        sizes = dataclasses.replace(ROUNDS, dtype=dtype, small=small, add=add, scale=-1.5)
        if small:  # rows and scales of whole words, which the kernels for small batches take
            sizes = dataclasses.replace(sizes, hidden_size=384)
        case = cases.with_formats(sizes, recipe, back)
        inputs = cases.make_inputs(case)
        backend = Aarch64Backend(calls, case.num_threads)
        ranks = emulated.EmulatedRanks.of_case(case, backend, hidden_splits=2)
        with emulated.naming(f"{dtype}, {back} back, small={small}, add={add!r}"):
            for _ in range(2):
                emulated.check_round(case, inputs, ranks.run_round(inputs))


@pytest.mark.parametrize("dtype", DTYPES)
def test_head(dtype: torch.dtype, calls: Calls) -> None:
    """Of three ranks, the last of which has few columns, with every number of parts of a row."""
    config = test_head_on_cpu.config_of(3, 700, hidden_size=37, dtype=dtype)
    generator = torch.Generator().manual_seed(2)
    ranks = Aarch64HeadRanks(config, calls, ctas=2)
    for splits in range(1, test_head_on_cpu.MOST_SPLITS + 1):
        of_round = Round(4, soft_cap=3.0 * (splits % 3 == 0), compact=splits % 2 == 0)
        rounds = make_calls(config, [splits % 5, 3, 0], generator, splits)
        check(rounds, of_round, ranks.run(rounds, of_round))
    assert [ranks.fault(rank) for rank in range(3)] == [None] * 3


# ---- Vector code.

#: An operation on the four words of a NEON register, and one on a single float.
VECTOR = re.compile(r"\t(?:f(?:mul|add|sub|ml[as])|cm\w+|bsl|bi[tf]|[us]?sh[lr]|and|orr|add|sub)"
                    r"\tv\d+\.(?:4s|16b)")  # fmt: skip
SCALAR = re.compile(r"\tf(?:mul|add|sub|div|n?m(?:add|sub))\ts\d")
#: What encodes rows, and what decodes and adds them.
LOOPS = {"encoding": "quantis", "decoding": "sum_present_rows"}


def operations(symbols: dict[str, str], part: str) -> tuple[int, int]:
    """Of vectors and of single floats, in the functions whose names have this part."""
    code = "".join(each for name, each in symbols.items() if part in name.lower())
    return len(VECTOR.findall(code)), len(SCALAR.findall(code))


def test_rows_are_encoded_and_decoded_by_neon(library: Path) -> None:
    symbols = aarch64.disassembly(library)
    for loop, part in LOOPS.items():
        vectors, floats = operations(symbols, part)
        assert vectors > floats, f"{loop}: {vectors} vector operations, {floats} of one float"
    ours = "".join(code for name, code in symbols.items() if "moe_nvlink" in name)
    # Fused multiply-add and conversions are instructions here.
    assert re.findall(r"\tbl\t\w+ <_*(fmaf|\w+[sdht]f2)>", ours) == []


def test_sve_would_make_scalar_code(tmp_path: Path) -> None:
    """Why host.flags_of does not ask for the processor's own instructions; and that the test above
    would notice. If a newer compiler fails here, flags_of may take `-march=native`.
    """
    constants = {"int kTopK": "2", "int kTopKBound": "2", "int kElement": "0"}
    text = kernel_texts.host_unit(COMBINE.source, constants=constants | {"int kCombine": "1"})
    symbols = aarch64.disassembly(aarch64.build(text, tmp_path, "-c", "-march=armv8.2-a+sve"))
    vectors, floats = operations(symbols, "")
    assert vectors < floats, f"{vectors} vector operations, {floats} of one float"
