"""The product's own kernels for GPUs, executed as PTX, against the reference bit for bit.

`make test` has a sample, in which every value of an axis occurs. kernels/EVIDENCE.md has the
command of the whole list (`-m long`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from moe_nvlink_plugin import HeadConfig, reference
from moe_nvlink_plugin.choices import TODAY
from moe_nvlink_plugin.config import MAX_SMALL_TOKENS
from moe_nvlink_plugin.jit.header import combine_formats, constants, elements, quantisers
from moe_nvlink_plugin.verify import cases, compare
from moe_nvlink_plugin.verify.cases import ADDS, RECIPES, Case, Inputs
from tests.support import emulated, users_form
from tests.support.case_list import CASES, RECIPE_CASES
from tests.support.emulated import EmulatedRanks
from tests.support.head_ranks import Round, check, make_calls
from tests.support.long_tests import first_of
from tests.support.ptx.backend import PtxBackend
from tests.support.ptx.head import PtxHeadRanks
from tests.support.ptx.machine import PtxError

pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC is not installed")
pytestmark = pytest.mark.timeout(1800)

ARCHITECTURES = ("sm_90a", "sm_100a")

SMALL = Case(
    name="small",
    tokens=(3, 0, 4),
    num_experts=10,
    top_k=2,
    hidden_size=264,
    capacity=4,
    dtype=torch.bfloat16,
    routing="invalid",
)


def name_of(case: Case) -> str:
    return case.name.replace(" ", "-").replace(",", "")


def finished(case: Case, number: int) -> Case:
    """The case with what combine does to the sums; eight numbers have every form of it."""
    turn = number + number // len(ADDS)
    return dataclasses.replace(
        case, add=ADDS[(number + 1) % len(ADDS)], scale=(1 / 3, 1.0)[turn % 2]
    )


def varied(number: int) -> dict[str, Any]:
    """Architecture, CTAs, threads, splits, PDL and the scheduler's seed of one case of a list."""
    return {
        "architecture": ARCHITECTURES[number // 4 % 2],
        "ctas": 1 + number % 3,
        "threads": (64, 32, 128, 96)[number % 4],
        "hidden_splits": (1, 2, 5)[number // 3 % 3],
        "pdl": number % 2 == 0,
        "seed": number,
    }


# ---- the sample: every quantiser, every format of combine, both kinds of conversions, the head

#: (recipe, format of combine, architecture, the caller has quantised the rows)
SAMPLE: tuple[tuple[str | None, str, str, bool], ...] = (
    (None, "bf16", "sm_90a", False),
    ("fp8_block", "fp8_block", "sm_90a", False),
    ("fp8_block_pow2", "nvfp4", "sm_100a", False),
    ("fp8_token", "bf16", "sm_90a", True),
    ("fp8_token", "bf16", "sm_90a", False),
    ("fp8_tensor", "fp8_tensor", "sm_90a", False),
    ("mxfp8", "nvfp4", "sm_100a", False),
    ("nvfp4", "nvfp4", "sm_100a", False),
)


def test_the_sample_has_every_variant() -> None:
    recipes = {recipe or "none" for recipe, _, _, _ in SAMPLE}
    assert recipes == set(quantisers())
    assert {combine for _, combine, _, _ in SAMPLE} == set(combine_formats())
    assert {architecture for _, _, architecture, _ in SAMPLE} == set(ARCHITECTURES)


@pytest.mark.parametrize(("recipe", "combine", "architecture", "post_quant"), SAMPLE)
def test_sample(recipe: str | None, combine: str, architecture: str, post_quant: bool) -> None:
    number = SAMPLE.index((recipe, combine, architecture, post_quant))
    case = finished(cases.with_formats(SMALL, recipe, combine), number)
    emulated.check_case(
        "ptx",
        case,
        architecture=architecture,
        post_quant=post_quant,
        ctas=2,
        hidden_splits=3,
        threads=64,
        pdl=True,
    )


# ---- few SMs: rows of combine come by TMA

#: Rows of one part, and of several with a shorter last one; with fewer items than stages, and more.
BY_TMA = (
    (dataclasses.replace(SMALL, tokens=(4, 0, 3)), {"ctas": 5, "stages": 16}),
    (dataclasses.replace(SMALL, hidden_size=1032, add="apart", scale=1 / 3), {"stages": 3}),
    (dataclasses.replace(SMALL, dtype=torch.float32, add="in place"), {"ctas": 1, "stages": 1}),
    (dataclasses.replace(SMALL, add="unaligned", hidden_size=1032), {"threads": 32}),
)


def test_rows_by_tma() -> None:
    for number, (case, options) in enumerate(BY_TMA):
        of_all: dict[str, Any] = {"ctas": 2, "pdl": True}
        of_all["architecture"] = ARCHITECTURES[number % 2]
        emulated.check_case("ptx", dataclasses.replace(case, max_sms=1), **of_all | options)


# ---- ranks signal each other by st.async.release


@pytest.mark.parametrize("architecture", first_of(["sm_100a", "sm_90a"]))
def test_asynchronous_signals(architecture: str) -> None:
    """The same bits; on sm_90a, which lacks the store, by an ordinary release."""
    case = dataclasses.replace(SMALL, choices=TODAY.but("async_release", True))
    options: dict[str, Any] = {"architecture": architecture, "ctas": 3, "threads": 64, "pdl": True}
    emulated.check_case("ptx", cases.with_formats(case, None, "fp8_block"), **options)
    for small in (False, True):
        mine = dataclasses.replace(case, small=small)
        emulated.check_rounds("ptx", mine, 3, seed=2, races=True, **options)


# ---- small batches: what dispatch and combine launch for them instead


#: (recipe, format of combine, architecture, the caller has quantised the rows); the first one is in
#: `make test`.
SMALL_SAMPLE = tuple(
    each if number == 0 else pytest.param(*each, marks=pytest.mark.long)
    for number, each in enumerate(SAMPLE)
)


@pytest.mark.parametrize(("recipe", "combine", "architecture", "post_quant"), SMALL_SAMPLE)
def test_small_sample(
    recipe: str | None, combine: str, architecture: str, post_quant: bool
) -> None:
    """With CTAs for each role, and with CTAs that have both, the latter also with other units."""
    number = SAMPLE.index((recipe, combine, architecture, post_quant))
    case = dataclasses.replace(cases.with_formats(SMALL, recipe, combine), small=True)
    options: dict[str, Any] = {"architecture": architecture, "post_quant": post_quant}
    for ctas, data_bytes in ((3, 14), (1, 14), (1, 12)):
        mine = finished(case, number + ctas + data_bytes // 2 - 3)
        mine = dataclasses.replace(mine, unit_data_bytes=data_bytes)
        emulated.check_case("ptx", mine, ctas=ctas, threads=64, pdl=True, **options)


@pytest.mark.parametrize("small", [False, True], ids=["bulk", "small"])
def test_ranks_that_are_left_out(small: bool) -> None:
    """Two rounds side by side, which know nothing of each other."""
    case = dataclasses.replace(SMALL, small=small, left_out=(1,))
    emulated.check_case("ptx", case, ctas=3, hidden_splits=2, threads=64, pdl=True)


@pytest.mark.parametrize("small", [False, True], ids=["bulk", "small"])
def test_counts_per_expert(small: bool) -> None:
    """Of rounds in which a rank is left out."""
    case = dataclasses.replace(SMALL, small=small, left_out=(1,), num_expert_counts=10)
    users_form.check_counts("ptx", case, ctas=3, threads=64, pdl=True, races=True)


@pytest.mark.parametrize("recipe", [None, "fp8_token"])
def test_slots_in_the_order_of_the_tokens(recipe: str | None) -> None:
    """More tokens than a CTA has threads, on an odd number of ranks, two of which share a sum."""
    case = dataclasses.replace(SMALL, tokens=(70, 0, 41), capacity=70, ordered_slots=True)
    case = cases.with_formats(case, recipe, "bf16")
    emulated.check_case("ptx", case, ctas=3, threads=64, pdl=True, races=True)


@pytest.mark.parametrize("small", [False, True], ids=["bulk", "small"])
@pytest.mark.parametrize("received_ids", ["elsewhere", 5])
def test_ids_and_weights_as_experts_read_them(received_ids: str | int, small: bool) -> None:
    case = dataclasses.replace(SMALL, received_ids=received_ids, small=small)
    emulated.check_case("ptx", case, ctas=3, hidden_splits=3, threads=64, pdl=True)


@pytest.mark.parametrize(
    ("recipe", "layout", "architecture"),
    [("fp8_block", "column_major", "sm_90a"), ("nvfp4", "interleaved", "sm_100a")],
)
def test_scales_as_experts_read_them(recipe: str, layout: str, architecture: str) -> None:
    """The region that dispatch lays out holds the linear scales that travelled, bit for bit."""
    case = dataclasses.replace(cases.with_formats(SMALL, recipe), scales_layout=layout)
    options: dict[str, Any] = {"architecture": architecture, "ctas": 2, "threads": 64, "pdl": True}
    users_form.check_laid_out_scales("ptx", case, **options)


@pytest.mark.parametrize("pdl", [False, True])
def test_static_rounds(pdl: bool) -> None:
    """Fixed addresses and counts, rows behind the tokens that go nowhere: as a graph replays it."""
    emulated.check_static_rounds("ptx", SMALL, 3, pdl=pdl)


@pytest.mark.parametrize(("small", "data_bytes"), [(False, 14), (True, 14), (True, 12)])
def test_rounds_of_other_counts(small: bool, data_bytes: int) -> None:
    case = dataclasses.replace(SMALL, small=small, unit_data_bytes=data_bytes)
    emulated.check_rounds("ptx", case, 6, ctas=2, pdl=True, seed=3)


@pytest.mark.parametrize("seed", range(3))
def test_rounds_that_the_host_does_not_interrupt(seed: int) -> None:
    """All launches are in the streams at once: with PDL a combine and the dispatch after it
    overlap, and ranks run apart by as much as the protocol lets them.
    """
    rounds = emulated.varying_inputs(SMALL, 5)
    config = emulated.config_of(SMALL)
    with contextlib.closing(PtxBackend(3, config(0), ctas=2, pdl=True, seed=seed)) as backend:
        ranks = EmulatedRanks(config, backend, hidden_splits=2)
        generator = torch.Generator().manual_seed(seed)
        written = [ranks.view(rank, "combine") for rank in range(3)]
        for rows in written:  # in the place of experts: what each rank's peers read
            rows.copy_(torch.randn(rows.shape, generator=generator).to(rows.dtype))
        slots, outputs = [], []
        with backend.grids.queued():
            for of_round in rounds:
                received = ranks.dispatch(of_round)
                slots.append([mine.send_slots for mine in received])
                outputs.append([torch.full_like(mine.hidden_states, -7) for mine in of_round])
                ranks.combine(slots[-1], outputs[-1])
        ranks.check_faults()
        for number, of_round in enumerate(rounds):
            for rank, mine in enumerate(of_round):
                expected = _combined(mine, slots[number][rank], written, rank)
                what = f"round {number} rank {rank}"
                compare.assert_same_bits(outputs[number][rank], expected, what)


def _combined(
    mine: Inputs, slots: torch.Tensor, rows: list[torch.Tensor], rank: int
) -> torch.Tensor:
    """The sum of the rows that a rank's slots name."""
    partial = []
    for target, there in enumerate(rows):
        found = torch.zeros((len(slots), SMALL.hidden_size), dtype=SMALL.dtype)
        places = slots.long() - target * SMALL.capacity
        tokens, k = ((places >= 0) & (places < SMALL.capacity)).nonzero(as_tuple=True)
        found[tokens] = there[rank * SMALL.capacity + places[tokens, k]]
        partial.append(found)
    ids = torch.where((mine.topk_ids >= 0) & (mine.topk_ids < 10), mine.topk_ids, -1)
    return reference.combine(SMALL.config(rank), ids, partial)


# ---- the LM head


def head_config(dtype: torch.dtype, tp_size: int, vocab_size: int, hidden_size: int) -> HeadConfig:
    return HeadConfig(
        tp_size=tp_size,
        tp_rank=0,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        max_rows_per_rank=4,
        dtype=dtype,
        full_logits=True,
        timeout_s=10.0,
    )


def check_head(config: HeadConfig, rounds: int, **options: Any) -> None:
    """Every rank another number of parts of a row; filled rows, and slots, in turn."""
    generator = torch.Generator().manual_seed(config.vocab_size)
    choose = random.Random(config.vocab_size)
    with contextlib.closing(PtxHeadRanks(config, **options)) as ranks:
        for number in range(rounds):
            bound = choose.randint(1, config.max_rows_per_rank)
            soft_cap, scale = choose.choice((0.0, 4.0)), choose.choice((1.0, -0.25))
            of_round = Round(bound, soft_cap, scale, compact=number % 2 == 0)
            rows = [choose.randint(0, bound) for _ in ranks.configs]
            splits = 1 + 3 * number % constants()["kMaxHeadSplits"]
            calls = make_calls(config, rows, generator, splits)
            check(calls, of_round, ranks.run(calls, of_round))
        assert [ranks.fault(rank) for rank in range(config.tp_size)] == [None] * config.tp_size


def test_head_sample() -> None:
    check_head(head_config(torch.bfloat16, 3, 301, 40), 3, ctas=2, pdl=True)


_HEADS = (
    head_config(torch.bfloat16, 4, 40, 19),
    head_config(torch.bfloat16, 1, 1, 1),
    head_config(torch.float16, 3, 1001, 64),
    head_config(torch.float32, 2, 2051, 260),
    head_config(torch.bfloat16, 2, 4096, 520),
)


@pytest.mark.long
@pytest.mark.parametrize("number", range(len(_HEADS)))
def test_heads(number: int) -> None:
    options = varied(number)
    del options["hidden_splits"]
    check_head(_HEADS[number], 8, **options)


# ---- all of it


@pytest.mark.long
@pytest.mark.parametrize("number", range(len(CASES)), ids=[name_of(case) for case in CASES])
def test_case(number: int) -> None:
    emulated.check_case("ptx", CASES[number], **varied(number))


@pytest.mark.long
@pytest.mark.parametrize("number", range(len(CASES)), ids=[name_of(case) for case in CASES])
def test_case_as_a_small_batch(number: int) -> None:
    if CASES[number].capacity > MAX_SMALL_TOKENS:
        pytest.skip("more tokens than a small batch has")
    case, options = dataclasses.replace(CASES[number], small=True), varied(number)
    case = dataclasses.replace(case, unit_data_bytes=(14, 12)[number % 3 // 2])
    del options["hidden_splits"]
    emulated.check_case("ptx", case, **options)


def architecture_of(number: int, post_quant: bool) -> str:
    """Of a case of RECIPE_CASES, in which all recipes take turns."""
    return ARCHITECTURES[(number // len(RECIPES) + post_quant) % 2]


def test_recipe_cases_run_every_recipe_on_both_architectures() -> None:
    ways = [(number, given) for number in range(len(RECIPE_CASES)) for given in (False, True)]
    met = {
        (RECIPE_CASES[number].recipe, given, architecture_of(number, given))
        for number, given in ways
    }
    assert met == set(itertools.product(RECIPES, (False, True), ARCHITECTURES))


@pytest.mark.long
@pytest.mark.parametrize("post_quant", [False, True])
@pytest.mark.parametrize(
    "number", range(len(RECIPE_CASES)), ids=[name_of(case) for case in RECIPE_CASES]
)
def test_recipe_case(number: int, post_quant: bool) -> None:
    architecture = architecture_of(number, post_quant)
    options = varied(number + int(post_quant)) | {"architecture": architecture}
    options["pdl"] = architecture == "sm_90a"  # each PTX is compiled once, for most of the time
    case = RECIPE_CASES[number]
    emulated.check_case("ptx", case, post_quant=post_quant, **options)


@pytest.mark.long
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("seed", range(4))
def test_many_rounds(seed: int, architecture: str) -> None:
    """Rounds of other counts, in which the scheduler draws another order each."""
    recipe, combine = (None, "fp8_block", "mxfp8", "nvfp4")[seed], ("bf16", "nvfp4")[seed % 2]
    case = cases.with_formats(SMALL, recipe, combine)
    emulated.check_rounds(
        "ptx", case, 20, ctas=3, pdl=seed % 2 == 0, seed=seed, architecture=architecture
    )
    emulated.check_static_rounds("ptx", SMALL, 5, seed=seed, architecture=architecture)


# ---- these comparisons can fail

#: what is wrong -> (recipe, a pattern of the PTX, what stands in its place, once or everywhere)
MUTANTS: dict[str, tuple[str | None, str, str]] = {
    "a term is subtracted": (None, r"add\.rn\.f32", "sub.rn.f32"),
    "a vector's address is no multiple of its size": (
        None,
        r"(ld\.global\.v4\.[ub]32 \s*\{[^}]*\}, \[%rd\d+)\]",
        r"\1+4]",
    ),
    "bf16 is rounded up less often": (None, r", 32767;", ", 32766;"),
    "experts belong to another rank": (None, r"div\.s32", "rem.s32"),
    "the halves of a pair are swapped": (
        "fp8_block",
        r"(cvt\.rn\.satfinite\.e4m3x2\.f32 %\w+), (%\w+), (%\w+)",
        r"\1, \3, \2",
    ),
    "a lane exchanges with another neighbour": (
        "fp8_block",
        r"(shfl\.sync\.bfly\.b32\s+\S+ %\w+), [^,]+,",  # a number, or a register that holds it
        r"\1, 2,",
    ),
    "the smallest magnitude decides on the scale": ("fp8_block", r"max\.u32", "min.u32"),
}
_IN_SAMPLE = ("a vector's address is no multiple of its size", "the halves of a pair are swapped")


def _mutated(pattern: str, instead: str, seen: list[int]) -> Callable[[str], str]:
    def rewrite(ptx: str) -> str:
        text, count = re.subn(pattern, instead, ptx)
        seen.append(count)
        return text

    return rewrite


@pytest.mark.parametrize(
    "mutant",
    [
        each if each in _IN_SAMPLE else pytest.param(each, marks=pytest.mark.long)
        for each in MUTANTS
    ],
)
def test_a_mutant_is_noticed(mutant: str) -> None:
    """The PTX itself is changed, in dispatch or in combine or in both."""
    recipe, pattern, instead = MUTANTS[mutant]
    case = cases.with_formats(dataclasses.replace(SMALL, routing="distinct"), recipe)
    changed: list[int] = []
    with pytest.raises((AssertionError, PtxError)) as raised:
        emulated.check_case("ptx", case, rewrite=_mutated(pattern, instead, changed))
    assert sum(changed) > 0, "the PTX has no such text"
    assert ("Misaligned" in type(raised.value).__name__) == ("address" in mutant)


def test_the_mutants_cases_are_right_unchanged() -> None:
    for recipe in {recipe for recipe, _, _ in MUTANTS.values()}:
        case = cases.with_formats(dataclasses.replace(SMALL, routing="distinct"), recipe)
        emulated.check_case("ptx", case)


def test_every_element_type_is_in_the_list() -> None:
    names = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    assert {names[name] for name in elements()} == {case.dtype for case in CASES}
