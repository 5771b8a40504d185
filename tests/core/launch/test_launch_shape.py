"""Launch geometry on a GPU, from counts alone."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_nvlink_plugin.choices import TODAY, Choices, table
from moe_nvlink_plugin.errors import ConfigError
from moe_nvlink_plugin.exchange.shapes import (
    LANE_ELEMENTS,
    MOST_STAGES,
    QUANTISED_WIDTH,
    CombineSizes,
    SmallSizes,
    combine_shape,
    dispatch_shape,
    quantising_lanes,
    small_shape,
    tma_combine_shape,
)
from moe_nvlink_plugin.jit.header import constants
from moe_nvlink_plugin.jit.source import read_kernel_file
from moe_nvlink_plugin.launch.shape import VECTOR_BYTES, WARP, Limits, Shape, share
from moe_nvlink_plugin.lm_head.kernels import (
    MOST_HEAD_SPLITS,
    head_argmax_shape,
    head_rows_shape,
)

H200_SMS = 132
#: Any values that a tuning file may have.
ANY_CHOICES = st.builds(Choices, **{one.name: st.sampled_from(one.candidates) for one in table()})
THREADS_PER_SM = 2048


def limits(num_sms: int = H200_SMS, registers: int = 64) -> Limits:
    """As an SM with 65536 registers gives them."""
    most = min(65536 // registers // WARP * WARP, 1024)

    def blocks_per_sm(threads: int) -> int:
        return min(65536 // (registers * threads), THREADS_PER_SM // threads, 32)

    return Limits(num_sms, most, blocks_per_sm)


def check_fits(shape: Shape, mine: Limits) -> None:
    assert WARP <= shape.threads <= mine.max_threads
    assert shape.threads % WARP == 0
    assert 1 <= shape.blocks <= mine.resident(shape.threads)
    assert shape.splits >= 1


def test_one_token_is_dispatched_by_a_thread_per_vector() -> None:
    assert dispatch_shape(1, 14336, 0, limits()) == Shape(1, 896, 1)
    # 80 registers a thread: 1024 threads of them are more than an SM has.
    assert dispatch_shape(1, 14336, 0, limits(registers=80)) == Shape(1, 800, 1)
    assert dispatch_shape(1, 40, 0, limits()) == Shape(1, 32, 1)


@pytest.mark.parametrize(
    ("hidden_size", "threads"), [(7168, 448), (128, 32), (43, 64), (7170, 1024)]
)
def test_one_token_is_quantised_by_a_thread_per_16_elements(hidden_size: int, threads: int) -> None:
    """Or per element, where that is how an odd row is stored."""
    text = read_kernel_file("include/moe_nvlink/platform_gpu.h")
    assert f"constexpr int kLaneElements = {LANE_ELEMENTS};" in text
    lanes = quantising_lanes(hidden_size)
    assert dispatch_shape(1, lanes * VECTOR_BYTES, 0, limits()).threads == threads


def test_many_tokens_are_dispatched_by_several_ctas_an_sm() -> None:
    assert dispatch_shape(8192, 14336, 0, limits()) == Shape(H200_SMS * 4, 256, 1)
    assert dispatch_shape(200, 14336, 0, limits()) == Shape(200, 256, 1)


def test_empty_slots_are_marked_by_more_than_the_tokens_need() -> None:
    assert dispatch_shape(0, 14336, 0, limits()).blocks == 1
    assert dispatch_shape(0, 14336, 3 * TODAY.marked_bytes_per_cta, limits()).blocks == 3
    assert dispatch_shape(1, 14336, 64 * 8192 * 32, limits()).blocks == TODAY.marking_ctas
    assert dispatch_shape(100, 14336, 64 * 8192 * 32, limits()).blocks == 100


def test_a_row_is_split_while_all_ctas_fit() -> None:
    # One vector of each of the top_k rows per thread: 4 x 224 = 896 = 7168 * 2 / 16.
    assert combine_shape(1, 7168, 2, limits()) == Shape(4, 224, 4)
    assert combine_shape(64, 7168, 2, limits()) == Shape(256, 224, 4)
    assert combine_shape(300, 7168, 2, limits()) == Shape(300, 224, 1)
    assert combine_shape(0, 7168, 2, limits()) == Shape(1, 224, 4)
    assert combine_shape(1, 1, 4, limits()) == Shape(1, 32, 1)


def test_many_tokens_take_no_more_ctas_than_fill_the_links() -> None:
    most = TODAY.full_link_sms * 4
    assert combine_shape(8192, 7168, 2, limits()) == Shape(most, 224, 1)
    assert combine_shape(4 * most, 7168, 2, limits()).blocks == most
    # With fewer, some CTAs would have a token more than others for long.
    assert combine_shape(4 * most - 1, 7168, 2, limits()).blocks == H200_SMS * 4
    # Fewer SMs by configuration stay fewer; rows that are quantised first want all.
    assert combine_shape(8192, 7168, 2, limits(num_sms=16)).blocks == 64
    assert combine_shape(8192, 7168, 2, limits(), slots=65536).blocks == H200_SMS * 4


def test_few_sms_get_rows_by_tma() -> None:
    sizes = CombineSizes(7168, 2, 0, staged_rows=8)
    mine = dataclasses.replace(limits(num_sms=16), shared_bytes=220 * 1024)
    part = 224 * VECTOR_BYTES * 8
    assert tma_combine_shape(8192, sizes, mine) == Shape(16, 224, 4, 7 * part)
    # No more stages than a CTA has items; a CTA at least, which may have to signal.
    assert tma_combine_shape(3, sizes, mine) == Shape(12, 224, 4, part)
    assert tma_combine_shape(0, sizes, mine) == Shape(4, 224, 4, part)
    assert tma_combine_shape(64, CombineSizes(64, 2, 0, staged_rows=1), mine) == Shape(
        16, 32, 1, 4 * 32 * VECTOR_BYTES
    )


@settings(deadline=None)
@given(st.integers(0, 9000), st.integers(1, 20000), st.integers(1, 32), st.sampled_from((95, 223)))
def test_two_stages_fit_whatever_the_rows(tokens: int, vectors: int, top_k: int, kib: int) -> None:
    """Of a CTA on an SM of 12.0, and of 9.0; the parts make up the row."""
    sizes = CombineSizes(vectors * 8, 2, 0, staged_rows=top_k)
    shape = tma_combine_shape(
        tokens, sizes, dataclasses.replace(limits(num_sms=7), shared_bytes=kib * 1024)
    )
    assert shape.splits * shape.threads >= vectors > (shape.splits - 1) * shape.threads
    stage = shape.threads * VECTOR_BYTES * top_k
    items = -(-max(tokens, 1) * shape.splits // shape.blocks)
    assert stage * min(items, 2) <= shape.shared_bytes <= kib * 1024
    assert shape.shared_bytes % stage == 0
    assert shape.shared_bytes // stage <= MOST_STAGES


def test_quantising_takes_every_cta_that_fits() -> None:
    """Not more: each waits for the last of them to have quantised its rows."""
    mine = limits(registers=128)
    assert mine.resident(224) == H200_SMS * 2
    for num_tokens, splits in ((0, 4), (1, 4), (64, 4), (300, 1), (8192, 1)):
        assert combine_shape(num_tokens, 7168, 2, mine, slots=64 * 256) == Shape(264, 224, splits)
    # No more than there are slots and items; fp32 rows have the same parts once they are quantised.
    assert combine_shape(1, 7168, 2, mine, slots=12) == Shape(12, 224, 4)
    assert combine_shape(4, 7168, 4, mine, slots=12) == Shape(16, 224, 4)


def test_channels_and_ranks_share_the_gpu() -> None:
    assert share(H200_SMS, 1) == H200_SMS
    assert share(H200_SMS, 2) == share(H200_SMS, 1, 2) == 66
    assert share(H200_SMS, 2, 3) == 22
    assert share(H200_SMS, 2, 66) == 1
    with pytest.raises(ConfigError, match=r"67 rank.* 2 channel.* 134 together.* GPU has 132; low"):
        share(H200_SMS, 2, 67)


def test_a_kernel_beside_others_has_one_cta_an_sm() -> None:
    mine = limits().beside_others(share(H200_SMS, 4))
    assert mine.resident(256) == 33
    assert limits(num_sms=5).beside_others(33).resident(256) == 5, "max_sms still holds"
    assert limits(registers=255).beside_others(33).resident(1024) == 0, "what fits nowhere does not"
    # Alone on its SM it is as wide as the row, however many tokens there are.
    assert dispatch_shape(8192, 14336, 0, mine) == Shape(33, 896, 1)
    assert combine_shape(8192, 7168, 2, mine) == Shape(33, 224, 1)


@settings(deadline=None)
@given(data=st.data(), num_sms=st.integers(1, 160), num_channels=st.integers(1, 8))
def test_whoever_waits_leaves_an_sm_to_each_cta_that_has_yet_to_start(
    data: st.DataObject, num_sms: int, num_channels: int
) -> None:
    """Any kernels of all channels and ranks, each with any number of tokens, at the same time.

    Two CTAs on an SM need not fit: the widest dispatch takes more than half of its registers.
    """
    num_ranks = data.draw(st.integers(1, max(num_sms // num_channels, 1)))
    if num_channels * num_ranks > num_sms:
        return
    fraction = share(num_sms, num_channels, num_ranks)
    waiting = 0
    for _ in range(num_channels * num_ranks):
        registers = data.draw(st.sampled_from([56, 64, 96, 168, 255]))
        mine = limits(num_sms, registers).beside_others(fraction)
        num_tokens = data.draw(st.sampled_from([0, 1, 30, 200, 8192]))
        kernel = data.draw(st.sampled_from(["dispatch", "combine", "with a format"]))
        if kernel == "dispatch":
            waiting += dispatch_shape(num_tokens, 14336, 2**28, mine).blocks
        else:
            slots = 2**20 if kernel == "with a format" else 0
            waiting += combine_shape(num_tokens, 7168, 2, mine, slots).blocks
    assert waiting <= num_sms


def test_marking_ctas_are_those_of_the_kernel() -> None:
    assert constants()["kMaxFinishers"] == TODAY.marking_ctas


def test_rows_of_a_shared_head_go_to_each_rank_by_a_cta() -> None:
    assert head_rows_shape(1, 14336, 4, limits()) == Shape(4, 896, 1)
    assert head_rows_shape(0, 14336, 4, limits()) == Shape(1, 896, 1)
    assert head_rows_shape(3, 64, 8, limits()) == Shape(24, 32, 1)
    # As many as fit: 2 of 896 threads an SM. Those of logits are longer than a CTA is wide.
    assert head_rows_shape(512, 14336, 8, limits(registers=32)) == Shape(H200_SMS * 2, 896, 1)
    assert head_rows_shape(2, 32320 * 2, 4, limits()) == Shape(8, 1024, 1)
    assert head_rows_shape(100, 14336, 8, limits(num_sms=3)).blocks == 3


def test_few_rows_of_logits_are_split() -> None:
    """While all CTAs fit, and each has enough to do: 32320 logits of 2 bytes are four parts."""
    assert 3 < 32320 * 2 / TODAY.logits_bytes_per_cta < 4
    assert head_argmax_shape(4, 32320 * 2, limits()) == Shape(16, 256, 4)
    assert head_argmax_shape(1, 129280 * 2, limits()) == Shape(
        MOST_HEAD_SPLITS, 256, MOST_HEAD_SPLITS
    )
    assert head_argmax_shape(200, 32320 * 2, limits()) == Shape(400, 256, 2)
    assert head_argmax_shape(400, 32320 * 2, limits()) == Shape(400, 256, 1)
    assert head_argmax_shape(2048, 32320 * 2, limits()) == Shape(H200_SMS * 4, 256, 1)
    assert head_argmax_shape(3, 32, limits()) == Shape(3, 32, 1)
    assert head_argmax_shape(0, 0, limits()) == Shape(1, 32, 1)
    assert head_argmax_shape(64, 32320 * 2, limits(num_sms=1)) == Shape(4, 256, 1)


@settings(deadline=None)
@given(
    num_rows=st.integers(0, 20000),
    row_bytes=st.integers(0, 2**22),
    tp_size=st.integers(1, 128),
    num_sms=st.integers(1, 160),
    registers=st.sampled_from([32, 64, 96, 168, 255]),
)
def test_launches_of_a_shared_head_fit(
    num_rows: int, row_bytes: int, tp_size: int, num_sms: int, registers: int
) -> None:
    mine = limits(num_sms, registers)
    rows = head_rows_shape(num_rows, row_bytes, tp_size, mine)
    argmax = head_argmax_shape(num_rows, row_bytes, mine)
    for shape in (rows, argmax):
        check_fits(shape, mine)
    assert rows.splits == 1
    assert argmax.splits <= MOST_HEAD_SPLITS
    assert argmax.splits == 1 or argmax.blocks == max(num_rows, 1) * argmax.splits


@settings(deadline=None)
@given(
    num_tokens=st.integers(0, 20000),
    hidden_size=st.integers(1, 20000),
    element_bytes=st.sampled_from([2, 4]),
    tail_bytes=st.integers(0, 2**28),
    num_sms=st.integers(1, 160),
    registers=st.sampled_from([32, 64, 96, 128, 168, 255]),
    slots=st.sampled_from([0, 1, 100, 2**20]),
    choices=ANY_CHOICES,
)
def test_every_grid_is_resident_and_covers_its_rows(
    num_tokens: int,
    hidden_size: int,
    element_bytes: int,
    tail_bytes: int,
    num_sms: int,
    registers: int,
    slots: int,
    choices: Choices,
) -> None:
    mine = limits(num_sms, registers)
    row_bytes = hidden_size * element_bytes
    for shape in (
        dispatch_shape(num_tokens, row_bytes, tail_bytes, mine, choices),
        combine_shape(num_tokens, hidden_size, element_bytes, mine, slots, choices),
    ):
        check_fits(shape, mine)
    # Split for one vector a thread, or less far where not all CTAs would fit; never further.
    elements = QUANTISED_WIDTH if slots else VECTOR_BYTES // element_bytes
    assert (shape.splits - 1) * shape.threads * elements < hidden_size
    assert num_tokens * shape.splits <= mine.resident(shape.threads) or (shape.splits == 1)


#: One token of EP 8 and top_k 8: a row of 5 parts to send, 8 rows to receive; and the way back.
SMALL_DISPATCH_SIZES = SmallSizes(5, 5, received_rows=8, sent_cost=3, fixed_parts=True)
SMALL_COMBINE_SIZES = SmallSizes(5, 5, sent_rows=8, received_cost=4)


def test_parts_of_a_small_batch_have_a_cta_each_while_they_fit() -> None:
    assert small_shape(1, SMALL_DISPATCH_SIZES, limits()) == Shape(5 + 40 + 1, 256, 5)
    assert small_shape(1, SMALL_COMBINE_SIZES, limits()) == Shape(40 + 5 + 1, 256, 40)
    # A rank without tokens receives all the same.
    assert small_shape(0, SMALL_DISPATCH_SIZES, limits()).splits == 5
    # 64 tokens: 320 parts to send do not fit beside 2561. They take 960 of 3521 of the time, so
    # 144 CTAs; of the other 384, as many receive each of five parts, and 4 are left to send.
    assert small_shape(64, SMALL_DISPATCH_SIZES, limits()) == Shape(528, 256, 148)
    # 32 tokens: sending takes 1280 of 1924 of the time, but 161 CTAs are enough to receive.
    assert small_shape(32, SMALL_COMBINE_SIZES, limits()) == Shape(528, 256, 528 - 161)


@settings(deadline=None)
@given(
    num_tokens=st.integers(0, 256),
    sizes=st.builds(
        SmallSizes,
        *[st.integers(1, 64)] * 4,
        *[st.floats(0.25, 64)] * 2,
        st.booleans(),
        ANY_CHOICES,
    ),
    num_sms=st.integers(1, 160),
    registers=st.sampled_from([32, 64, 96, 128, 168, 255]),
    is_alone=st.booleans(),
)
def test_both_roles_of_a_small_batch_have_ctas_that_fit(
    num_tokens: int, sizes: SmallSizes, num_sms: int, registers: int, is_alone: bool
) -> None:
    mine = limits(num_sms, registers)
    if not is_alone:
        mine = mine.beside_others(num_sms)
    shape = small_shape(num_tokens, sizes, mine)
    most = mine.resident(shape.threads)
    assert WARP <= shape.threads <= mine.max_threads
    if most == 1:
        assert shape == Shape(1, shape.threads, 1), "one CTA has both roles"
        return
    assert 1 <= shape.splits < shape.blocks <= most
    # No CTA is left without a part, the one that signals apart.
    tokens = max(num_tokens, 1)
    assert shape.splits <= tokens * sizes.sent_rows * sizes.send_parts
    assert shape.blocks - shape.splits <= tokens * sizes.received_rows * sizes.receive_parts + 1


@pytest.mark.parametrize("resident", [0, 1])
def test_one_cta_has_both_roles_of_a_small_batch_where_no_second_fits(resident: int) -> None:
    one = Limits(1, 1024, lambda _threads: resident)
    assert small_shape(8, SMALL_DISPATCH_SIZES, one) == Shape(1, 256, 1)


@pytest.mark.parametrize("threads", [1, 31])
def test_a_kernel_that_allows_less_than_a_warp_still_gets_one(threads: int) -> None:
    assert dispatch_shape(1, 64, 0, Limits(1, threads, lambda _threads: 1)).threads == WARP
