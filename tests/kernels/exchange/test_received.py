"""What dispatch leaves for experts to read: ids, weights, and rows that are padding."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

from moe_nvlink_plugin import MoeAllToAll, reference
from moe_nvlink_plugin.errors import ConfigError
from moe_nvlink_plugin.testing import ThreadGroup, run_ranks
from moe_nvlink_plugin.verify import cases, compare
from moe_nvlink_plugin.verify.cases import Case, Seen
from tests.kernels.exchange.test_rounds import check_rounds
from tests.support import case_list

both_kinds = pytest.mark.parametrize("small", [False, True], ids=["bulk", "small"])

#: What a layer may say of its ids; 5 is the id of an expert, 2**31 - 1 of none.
RECEIVED_IDS: tuple[str | int, ...] = ("elsewhere", "local", -1, 5, 2**31 - 1)

IDS_CASES = tuple(
    dataclasses.replace(case, name=f"{case.name}, {ids} ids", received_ids=ids)
    for number, case in enumerate(case_list.CASES)
    for ids in ("elsewhere", RECEIVED_IDS[1 + number % (len(RECEIVED_IDS) - 1)])
)


@pytest.mark.parametrize("case", IDS_CASES, ids=lambda case: case.name)
def test_ids_and_weights_as_experts_read_them(case: Case) -> None:
    case_list.check_case(case)


@pytest.mark.parametrize("recipe", [None, *cases.RECIPES])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_ids_of_quantised_rows(recipe: str | None, num_threads: int) -> None:
    base = Case(
        name="quantised",
        tokens=(8, 3, 0, 5),
        top_k=6,
        received_ids="elsewhere",
        routing="invalid",
        num_threads=num_threads,
    )
    case_list.check_case(cases.with_formats(base, recipe))


def test_a_wrong_id_would_be_noticed() -> None:
    case = next(case for case in IDS_CASES if case.name.startswith("invalid ids, elsewhere"))
    inputs = cases.make_inputs(case)
    (seen,) = case_list.run_case(case, 1)
    compare.check_received(case, inputs, seen)
    for other in ("local", 3):
        with pytest.raises(AssertionError):
            compare.check_received(dataclasses.replace(case, received_ids=other), inputs, seen)
    spoilt = [rank._replace(payloads=(rank.payloads[0] + 1.0, *rank.payloads[1:])) for rank in seen]
    with pytest.raises(AssertionError):
        compare.check_received(case, inputs, spoilt)


# Padding.

MASKS: dict[str, Callable[[int], torch.Tensor]] = {
    "none": lambda count: torch.zeros(count, dtype=torch.bool),
    "the last": lambda count: torch.arange(count) >= count // 2,
    "every other": lambda count: torch.arange(count) % 2 == 0,
    "all": lambda count: torch.ones(count, dtype=torch.bool),
}


@both_kinds
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("recipe", [None, "fp8_token", "nvfp4"])
def test_padding_is_not_sent(recipe: str | None, mask: str, small: bool) -> None:
    """As if all ids of the masked tokens were -1, and no kernel reads the tokens' rows."""
    base = Case(name="padded", tokens=(8, 5, 0), top_k=3, received_ids="elsewhere", num_threads=2)
    case = dataclasses.replace(cases.with_formats(base, recipe), small=small)
    inputs = cases.make_inputs(case)
    masks = [MASKS[mask](len(mine.topk_ids)) for mine in inputs]
    ids = reference.without_padding([mine.topk_ids for mine in inputs], masks)
    without = [mine._replace(topk_ids=own) for mine, own in zip(inputs, ids, strict=True)]
    spoilt = [mine._replace(hidden_states=mine.hidden_states.clone()) for mine in inputs]
    for mine, padding in zip(spoilt, masks, strict=True):
        mine.hidden_states[padding] = float("nan")

    def rank_main(group: ThreadGroup) -> Seen:
        with MoeAllToAll.create(case.config(group.rank), group) as layer:
            mine, mask = spoilt[group.rank], masks[group.rank]
            return cases.run_round(layer, mine, zero_copy=False, is_padding=mask)

    seen = run_ranks(case.ep_size, rank_main)
    compare.check_slots(case, without, seen)
    compare.check_received(case, without, seen)
    compare.check_combined(case, without, seen)
    for rank, padding in zip(seen, masks, strict=True):
        assert not rank.combined[padding].any()


# Layouts of scales.

LAYOUTS = (
    ("mxfp8", "interleaved"),
    ("nvfp4", "interleaved"),
    ("fp8_block", "column_major"),
    ("fp8_token", "column_major"),
)
#: Scales of a row in whole vectors, in whole words, and neither; slots below and above a tile.
LAYOUT_CASES = tuple(
    Case(
        name=f"{recipe} {layout} {hidden} x {capacity}",
        tokens=(capacity, 3, 0, capacity - 1),
        hidden_size=hidden,
        capacity=capacity,
        recipe=recipe,
        scales_layout=layout,
        num_threads=1 + number % 3,
        top_k=3,
    )
    for recipe, layout in LAYOUTS
    for number, (hidden, capacity) in enumerate(((512, 5), (640, 37), (1024, 33)))
)


def laid_out(layout: str, scales: torch.Tensor) -> torch.Tensor:
    """What linear scales `[rows, scales per row]` become, in plain torch."""
    if layout == "column_major":
        return scales.t().contiguous().t()
    rows, columns = scales.shape
    padded = torch.zeros(-(-rows // 128) * 128, -(-columns // 4) * 4, dtype=torch.uint8)
    padded[:rows, :columns] = scales.view(torch.uint8)
    tiles = padded.view(padded.shape[0] // 128, 4, 32, padded.shape[1] // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).flatten()


def filled_places(layout: str, filled: torch.Tensor, columns: int) -> torch.Tensor:
    """Where a layout has scales of filled slots, padding behind a row included."""
    if layout == "column_major":
        return filled[:, None].expand(-1, columns)
    padded = -(-columns // 4) * 4
    marks = filled[:, None].expand(-1, padded).to(torch.uint8).contiguous()
    return laid_out(layout, marks).bool()


@both_kinds
@pytest.mark.parametrize("case", LAYOUT_CASES, ids=lambda case: case.name)
def test_scales_in_the_layout_of_the_experts(case: Case, small: bool) -> None:
    """Those of the recipe, in rounds of other sizes, whatever has been there before."""
    case = dataclasses.replace(case, small=small)
    tokens = [tuple(count >> number for count in case.tokens) for number in range(3)]
    inputs = [cases.make_inputs(case, each, seed=number) for number, each in enumerate(tokens)]

    def rank_main(group: ThreadGroup) -> list[Seen]:
        seen = []
        with MoeAllToAll.create(case.config(group.rank), group) as layer:
            laid_out_here = layer._layer.channel(0)._scales
            for number, of_round in enumerate(inputs):
                laid_out_here.view(torch.uint8).fill_(1)
                mine = of_round[group.rank]
                seen.append(cases.run_round(layer, mine, post_quant=number == 1))
        return seen

    check_rounds(case, inputs, run_ranks(case.ep_size, rank_main))


def test_layouts_of_the_tests_are_read_back_by_verify() -> None:
    scales = torch.randint(0, 256, (150, 6), dtype=torch.uint8)
    case = Case(tokens=(1,), hidden_size=6 * 32, recipe="mxfp8", scales_layout="interleaved")
    linear = cases.linear_scales(case.config(0), laid_out("interleaved", scales))
    assert torch.equal(linear[:150, :6], scales)


def test_layouts_of_the_tests_are_the_layouts_of_vllm() -> None:
    mxfp8 = pytest.importorskip("vllm.model_executor.layers.quantization.utils.mxfp8_utils")
    scales = torch.randint(0, 256, (150, 6), dtype=torch.uint8)
    swizzled = mxfp8.swizzle_mxfp8_scale(scales, M=150, K=6 * 32)
    assert torch.equal(laid_out("interleaved", scales), swizzled)


@pytest.mark.parametrize(
    ("recipe", "layout", "words"),
    [
        (None, "interleaved", "recipe fp32 has no scales"),
        ("fp8_tensor", "column_major", "recipe fp8_tensor has no scales"),
        ("fp8_block", "interleaved", "scales of 1 bytes, recipe fp8_block has scales of 4 bytes"),
        ("nvfp4", "column_major", "scales of 4 bytes, recipe nvfp4 has scales of 1 bytes"),
    ],
)
def test_a_layout_that_is_none_for_the_scales(recipe: str | None, layout: str, words: str) -> None:
    case = Case(tokens=(1,), hidden_size=128, recipe=recipe, scales_layout=layout)
    with pytest.raises(ConfigError, match=words):
        MoeAllToAll.check(case.config(0))


def test_other_bits_of_a_nan_from_the_caller() -> None:
    """Only where the caller has quantised on a GPU, only scales, and only NaN beside NaN."""
    case = Case(name="NaN", tokens=(16, 16), hidden_size=128, capacity=16)
    case = cases.with_formats(case, "fp8_block")
    inputs, seen = cases.make_inputs(case), case_list.run_case(case, rounds=1)[0]
    compare.check_received(case, inputs, seen)

    def with_scales(changed: Callable[[torch.Tensor], torch.Tensor]) -> list[Seen]:
        return [
            mine._replace(payloads=(*mine.payloads[:2], changed(mine.payloads[2]))) for mine in seen
        ]

    other_nan = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
    of_a_gpu = with_scales(lambda scales: torch.where(scales.isnan(), other_nan, scales))
    compare.check_received(case, inputs, of_a_gpu, any_nan=True)
    with pytest.raises(AssertionError, match=r"payload 2: first .* nan instead of nan"):
        compare.check_received(case, inputs, of_a_gpu)
    for wrong in (
        with_scales(lambda scales: torch.where(scales.isnan(), 1.0, scales)),
        with_scales(lambda scales: torch.full_like(scales, torch.nan)),
        with_scales(lambda scales: scales * 2),
    ):
        with pytest.raises(AssertionError, match=r"payload 2: first difference"):
            compare.check_received(case, inputs, wrong, any_nan=True)
