"""The host library for other processors than this one, and that of the oldest compiler, give the
same bits: those of the oracle.

What rounds could differ between builds (a fused multiply-add, a reciprocal, an order of additions),
and so could what a compiler takes for a vector. Every other test of the host library runs the build
for this processor.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from unittest import mock

import pytest
import torch

from moe_nvlink_plugin import HeadGroup, sharded_argmax
from moe_nvlink_plugin.jit import host
from moe_nvlink_plugin.recipes.combine_formats import FORMATS
from moe_nvlink_plugin.testing import ThreadGroup, run_ranks
from moe_nvlink_plugin.verify import cases
from moe_nvlink_plugin.verify.cases import RECIPES, Case
from tests.kernels.exchange import test_combine_formats
from tests.kernels.formats import quantiser_rows, test_quantisers
from tests.kernels.lm_head import test_head
from tests.support import builds, case_list

pytestmark = [pytest.mark.long, builds.ON_X86]

#: More than one part of a row, of a vector, and of the tree of sums.
CASE = Case(name="build", tokens=(5, 0, 8), num_experts=12, top_k=7, hidden_size=300)


#: The product's, which a fixture replaces.
LOAD = host.load

#: The compiler, None: the one that this machine calls g++; and the processor. The oldest compiler
#: with the code for AVX-512, of which compilers differ most in what they know.
BUILDS = [pytest.param((None, level), id=level) for level in builds.LEVELS]
OLDEST = pytest.param((builds.OLDEST, "x86-64-v4"), id=builds.OLDEST, marks=builds.HAS_OLDEST)


@pytest.fixture(scope="module", params=[*BUILDS, OLDEST])
def built(request: pytest.FixtureRequest) -> host.HostLibrary:
    compiler, level = request.param
    if lacking := builds.missing(level):
        pytest.skip(f"this processor cannot execute {level}: it lacks {', '.join(lacking)}")
    return host.HostLibrary(builds.library(level, compiler))


@pytest.fixture(autouse=True)
def loaded(built: host.HostLibrary, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This build is what ranks of this process load."""
    load = mock.Mock(return_value=built)
    monkeypatch.setattr(host, "load", load)
    yield
    assert load.called, "this test has not used the library"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_and_sums(dtype: torch.dtype) -> None:
    case_list.check_case(dataclasses.replace(CASE, dtype=dtype))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("combine", ["bf16", *FORMATS])
def test_formats(recipe: str, combine: str) -> None:
    case = dataclasses.replace(CASE, dtype=torch.bfloat16)
    case_list.check_case(cases.with_formats(case, recipe, combine))


@pytest.mark.parametrize("recipe", RECIPES)
def test_quantised_rows(recipe: str) -> None:
    test_quantisers.test_ties_and_limits(recipe)
    test_quantisers.test_rows_of_several_pieces(recipe, torch.float32)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_quantised_bytes(recipe: str, dtype: torch.dtype) -> None:
    """Those of the build for this processor, also of NaN, which a comparison of numbers passes."""
    rows = quantiser_rows.hard_rows(recipe, dtype)
    scale = torch.tensor([0.37])
    found = test_quantisers.by_kernel(recipe, rows, scale)
    with mock.patch.object(host, "load", LOAD):
        expected = test_quantisers.by_kernel(recipe, rows, scale)
    for mine, theirs in zip(found, expected, strict=True):
        if mine is None or theirs is None:
            assert mine is theirs
        else:
            assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.parametrize("name", FORMATS)
def test_special_rows_that_travel_back(name: str) -> None:
    test_combine_formats.test_special_rows(name, torch.float32, 640)
    test_combine_formats.test_every_code_and_scale(name, torch.float32)


@pytest.mark.parametrize("element", ["kElementBf16", "kElementFp16"])
def test_conversions(element: str) -> None:
    dtype = torch.bfloat16 if element == "kElementBf16" else torch.float16
    test_quantisers.test_every_16_bit_pattern_to_fp32(element, dtype)
    test_quantisers.test_fp32_to_16_bits(element, dtype)


def test_division() -> None:
    test_quantisers.test_division_where_rounding_is_hardest()


def test_argmax_of_a_shared_head() -> None:
    """Of small whole numbers, whose products are exact, with ties and a NaN."""
    config = test_head.config_of(2, 1001, hidden_size=24, dtype=torch.float32)
    random = torch.Generator().manual_seed(5)
    rows = torch.randint(-2, 3, (2, 3, 24), generator=random).float()
    weight = torch.randint(-2, 3, (1001, 24), generator=random).float()
    weight[700] = weight[13]
    rows[1, 2] = torch.nan

    def rank_main(group: ThreadGroup) -> torch.Tensor:
        mine = dataclasses.replace(config, tp_rank=group.rank)
        with HeadGroup.create(mine, group) as head:
            return sharded_argmax(rows[group.rank], weight, group=head)

    for rank, tokens in enumerate(run_ranks(2, rank_main)):
        assert tokens.tolist() == (rows[rank] @ weight.T).argmax(1).tolist()
