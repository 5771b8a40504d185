"""Rows that change from call to call: combine's type and width, and the extra payloads."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from moe_nvlink_plugin import Dispatched, MoeAllToAll
from moe_nvlink_plugin.errors import DisagreementError, InputError
from moe_nvlink_plugin.testing import ThreadGroup, run_ranks, try_ranks
from tests.core.exchange.small_exchange import Inputs, inputs_of, sized

CAPACITY, HIDDEN = 5, 24
TYPES = (torch.bfloat16, torch.float32, torch.float16)


config = sized(
    num_experts=6,
    top_k=3,
    hidden_size=HIDDEN,
    max_tokens_per_rank=CAPACITY,
    dtype=torch.bfloat16,
)


def rows_of(received: Dispatched, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Whole numbers, so that sums of a few are exact in every type; NaN in empty slots."""
    numbers = torch.arange(width) % 5 + (received.hidden_states[:, :1] > 0).float()
    empty = (received.topk_ids < 0).all(1, keepdim=True)
    return torch.where(empty, torch.nan, numbers).to(dtype)


def expected_of(inputs: Inputs, width: int, dtype: torch.dtype, ep_size: int) -> torch.Tensor:
    hidden, ids, _weights = inputs
    owners = ids // (6 // ep_size)
    num_ranks = torch.tensor([len(set(row)) for row in owners.tolist()]).view(-1, 1)
    return (num_ranks * (torch.arange(width) % 5 + (hidden[:, :1] > 0).float())).to(dtype)


@pytest.mark.parametrize("ep_size", [1, 2])
@pytest.mark.parametrize("zero_copy", [False, True])
def test_combine_in_another_type_and_width(ep_size: int, zero_copy: bool) -> None:
    """Each call its own, the output given and not; 7 bf16 elements are no whole words."""
    calls = [(dtype, width) for dtype in TYPES for width in (HIDDEN, 1, 7, 16)]
    calls += [(torch.bfloat16, 2 * HIDDEN), (torch.bfloat16, HIDDEN)]

    def rank_main(group: ThreadGroup) -> None:
        mine = config(group, combine_dtypes=TYPES)
        with MoeAllToAll.create(mine, group) as layer:
            for number, (dtype, width) in enumerate(calls):
                bound = number % CAPACITY + 1
                inputs = inputs_of(layer, (number + group.rank) % (bound + 1), number)
                received = layer.dispatch(*inputs, max_tokens=bound)
                rows = rows_of(received, width, dtype)
                if zero_copy:
                    region = layer.combine_input(
                        dtype, hidden_size=width, metadata=received.metadata
                    )
                    assert region.data_ptr() == layer.combine_input().data_ptr()
                    rows = region.copy_(rows)
                expected = expected_of(inputs, width, dtype, ep_size)
                output = torch.full_like(expected, torch.nan) if number % 2 else None
                size = None if width == HIDDEN and number % 3 else width
                combined = layer.combine(rows, received.metadata, output=output, hidden_size=size)
                assert combined.dtype is dtype
                assert output is None or combined is output
                assert torch.equal(combined, expected), (dtype, width)

    run_ranks(ep_size, rank_main)


@pytest.mark.parametrize("combine", ["fp8_block", "nvfp4", "fp8_tensor"])
def test_quantised_rows_of_another_type_and_width(combine: str) -> None:
    """As an exchange of that type and width has them, bit for bit."""
    dtype, width = torch.float32, 128

    def rank_main(group: ThreadGroup) -> None:
        wide = config(group, hidden_size=256, combine=combine, combine_dtypes=(dtype,))
        own = dataclasses.replace(wide, hidden_size=width, dtype=dtype, combine_dtypes=())
        with (
            MoeAllToAll.create(wide, group) as layer,
            MoeAllToAll.create(own, group) as other,
        ):
            hidden, ids, weights = inputs_of(layer, 4, group.rank)
            combined = []
            for one in (layer, other):
                given = hidden[:, : one.config.hidden_size].contiguous().to(one.config.dtype)
                received = one.dispatch(given, ids, weights)
                rows = received.hidden_states[:, :width].to(dtype).contiguous()
                combined.append(one.combine(rows, received.metadata, hidden_size=width))
            assert torch.equal(*combined)
            assert bool(combined[0].any())

    run_ranks(2, rank_main)


#: What the two ranks combine: two types of one width, two widths of one type.
OTHER_ROWS = {
    "types": ((torch.bfloat16, HIDDEN), (torch.float16, HIDDEN)),
    "widths": ((torch.bfloat16, HIDDEN), (torch.bfloat16, 16)),
}


@pytest.mark.parametrize("rows", OTHER_ROWS.values(), ids=OTHER_ROWS)
@pytest.mark.parametrize("next_bound", [CAPACITY - 1, CAPACITY], ids=["small", "bulk"])
def test_ranks_that_combine_other_rows_in_a_small_batch(
    rows: tuple[tuple[torch.dtype, int], ...], next_bound: int
) -> None:
    """No rank has rows at the other, so nothing is wrong but what the next dispatch finds."""

    def rank_main(group: ThreadGroup) -> None:
        mine = config(group, combine_dtypes=TYPES, small_tokens=CAPACITY - 1, timeout_s=20)
        dtype, width = rows[group.rank]
        with MoeAllToAll.create(mine, group) as layer:
            hidden, ids, weights = inputs_of(layer, 2)
            ids = 3 * group.rank + ids % 3
            received = layer.dispatch(hidden, ids, weights, max_tokens=CAPACITY - 1)
            sent = rows_of(received, width, dtype)
            combined = layer.combine(sent, received.metadata, hidden_size=width)
            assert torch.equal(combined, expected_of((hidden, ids, weights), width, dtype, 2))
            layer.dispatch(hidden, ids, weights, max_tokens=next_bound)

    check_that_ranks_name_each_other(try_ranks(2, rank_main), rows)


@pytest.mark.parametrize("combine", ["bf16", "fp8_block"])
@pytest.mark.parametrize("rows", OTHER_ROWS.values(), ids=OTHER_ROWS)
def test_ranks_that_combine_other_rows(
    rows: tuple[tuple[torch.dtype, int], ...], combine: str
) -> None:
    rows = tuple((dtype, 16 * width) for dtype, width in rows)

    def rank_main(group: ThreadGroup) -> None:
        wide = {"hidden_size": 16 * HIDDEN, "combine": combine, "timeout_s": 20}
        dtype, width = rows[group.rank]
        with MoeAllToAll.create(config(group, combine_dtypes=TYPES, **wide), group) as layer:
            received = layer.dispatch(*inputs_of(layer, 2))
            sent = torch.zeros(len(received.topk_ids), width, dtype=dtype)
            layer.combine(sent, received.metadata, hidden_size=width)

    check_that_ranks_name_each_other(try_ranks(2, rank_main), rows)


def check_that_ranks_name_each_other(
    outcomes: Sequence[Any], rows: tuple[tuple[torch.dtype, int], ...]
) -> None:
    for rank, (outcome, (dtype, width)) in enumerate(zip(outcomes, rows, strict=True)):
        assert isinstance(outcome, DisagreementError), repr(outcome)
        assert f"in combine of epoch 1 rank {1 - rank} combined rows of another" in str(outcome)
        assert f"than rank {rank} (dtype={dtype}, hidden_size={width}" in str(outcome)


@pytest.fixture
def alone() -> Any:
    (group,) = ThreadGroup.ranks(1)
    mine = config(group, combine_dtypes=(torch.float32,), extra_payload_bytes=(8, 4))
    with MoeAllToAll.create(mine, group) as layer:
        yield layer


def test_rows_for_which_there_is_no_room(alone: MoeAllToAll) -> None:
    received = alone.dispatch(*inputs_of(alone, 2))
    for dtype, width, words in (
        (torch.float32, HIDDEN + 1, "hidden_size=25 of torch.float32 makes rows of 100 bytes, not"),
        (torch.bfloat16, 2 * HIDDEN + 1, "makes rows of 98 bytes, not 1 to 96; create"),
        (torch.bfloat16, 0, "hidden_size=0"),
    ):
        rows = torch.zeros(CAPACITY, width, dtype=dtype)
        with pytest.raises(InputError, match=words):
            alone.combine(rows, received.metadata, hidden_size=width)
        with pytest.raises(InputError, match=words):
            alone.combine_input(dtype, hidden_size=width)
    alone.combine(alone.combine_input(), received.metadata)


def test_a_width_that_the_call_does_not_name(alone: MoeAllToAll) -> None:
    received = alone.dispatch(*inputs_of(alone, 2))
    rows = torch.zeros(CAPACITY, 7, dtype=torch.bfloat16)
    with pytest.raises(InputError, match=r"expert_output has shape \[5, 7\], expected \[5, 24\]"):
        alone.combine(rows, received.metadata)
    with pytest.raises(InputError, match=r"expert_output has shape \[5, 7\], expected \[5, 6\]"):
        alone.combine(rows, received.metadata, hidden_size=6)
    with pytest.raises(InputError, match="output has dtype torch.float32, expected torch.bfloat16"):
        alone.combine(rows, received.metadata, hidden_size=7, output=torch.zeros(2, 7))
    alone.combine(rows, received.metadata, hidden_size=7)


def test_a_type_that_create_did_not_load(alone: MoeAllToAll) -> None:
    received = alone.dispatch(*inputs_of(alone, 2))
    rows = torch.zeros(CAPACITY, HIDDEN, dtype=torch.float16)
    with pytest.raises(
        InputError, match="has dtype torch.float16, expected torch.bfloat16 or torch.float32"
    ):
        alone.combine(rows, received.metadata)
    with pytest.raises(InputError, match=r"of torch.float16 was asked for, .*name it in combine"):
        alone.combine_input(torch.float16)
    with pytest.raises(InputError, match="channel=1"):
        alone.combine_input(channel=1)
    alone.combine(alone.combine_input(torch.float32), received.metadata)


@pytest.mark.parametrize(
    ("combine", "width", "words"),
    [("fp8_block", 64, "multiple of"), ("fp8_block", 384, "exceeds the exchange's 256")],
)
def test_a_width_that_the_format_does_not_support(combine: str, width: int, words: str) -> None:
    (group,) = ThreadGroup.ranks(1)
    mine = config(group, hidden_size=256, combine=combine, combine_dtypes=(torch.float32,))
    with MoeAllToAll.create(mine, group) as layer, pytest.raises(InputError, match=words):
        layer.combine_input(hidden_size=width)


def test_compiled_in_another_type_and_any_width(alone: MoeAllToAll) -> None:
    counter = CompileCounterWithBackend("aot_eager")

    def layer(hidden: Any, ids: Any, weights: Any, width: int) -> torch.Tensor:
        received = alone.dispatch(hidden, ids, weights)
        rows = received.hidden_states[:, :width].float().contiguous()
        return alone.combine(rows, received.metadata, hidden_size=width) * 2.0

    torch._dynamo.reset()
    compiled = torch.compile(layer, backend=counter, fullgraph=True, dynamic=True)
    for number, width in enumerate((16, 9, 21)):
        inputs = inputs_of(alone, 4, number)
        expected = layer(*inputs, width)
        torch.testing.assert_close(compiled(*inputs, width), expected, rtol=0, atol=0)
    assert counter.frame_count == 1


# Extra payloads.


def extras_of(rows: torch.Tensor, number: int) -> list[torch.Tensor]:
    """From none to two, of several types and shapes, made of the token's row."""
    one = rows[:, 0].contiguous()
    kinds: tuple[list[torch.Tensor], ...] = (
        [],
        [one.float().view(-1, 1), one],
        [one],
        [rows[:, :4], one.float()],
        [rows[:, :4].contiguous().view(torch.uint8)[:, :3]],
        [rows[:, None, :2], (9 * one).clamp(0, 200).to(torch.uint8)],
    )
    return [payload.clone(memory_format=torch.contiguous_format) for payload in kinds[number % 6]]


@pytest.mark.parametrize("small_tokens", [0, CAPACITY], ids=["bulk", "small"])
@pytest.mark.parametrize("ep_size", [1, 2])
def test_extra_payloads_that_change_from_call_to_call(ep_size: int, small_tokens: int) -> None:
    """Those that are no whole words go by the kernel for large batches in a small batch too."""

    def rank_main(group: ThreadGroup) -> None:
        mine = config(group, extra_payload_bytes=(8, 4), small_tokens=small_tokens)
        with MoeAllToAll.create(mine, group) as layer:
            assert layer.config.small_tokens == small_tokens
            for number in range(12):
                bound = number % CAPACITY + 1
                inputs = inputs_of(layer, (number + group.rank) % (bound + 1), number + group.rank)
                sent = extras_of(inputs[0], number)
                received = layer.dispatch(*inputs, sent, max_tokens=bound)
                filled = (received.topk_ids >= 0).any(1)
                # What the sender made of the row, made of the row that arrived.
                expected = extras_of(received.hidden_states, number)
                assert len(received.extra_payloads) == len(sent)
                for arrived, wanted in zip(received.extra_payloads, expected, strict=True):
                    assert arrived.shape == wanted.shape
                    assert arrived.dtype is wanted.dtype
                    assert torch.equal(arrived[filled], wanted[filled])
                layer.combine(layer.combine_input(metadata=received.metadata), received.metadata)

    run_ranks(ep_size, rank_main)


def test_extra_payloads_without_room(alone: MoeAllToAll) -> None:
    hidden, ids, weights = inputs_of(alone, 2)
    for sent, words in (
        ([torch.zeros(2), torch.zeros(2, 5, dtype=torch.uint8)], r"\[1\] has rows of 5 bytes"),
        ([torch.zeros(2, 0)], r"\[0\] has rows of 0 bytes"),
    ):
        with pytest.raises(InputError, match=words):
            alone.dispatch(hidden, ids, weights, sent)
    received = alone.dispatch(hidden, ids, weights)
    alone.combine(alone.combine_input(), received.metadata)


@pytest.mark.parametrize(
    ("small_tokens", "sizes"),
    [(0, (4, 8)), (CAPACITY, (4, 8)), (CAPACITY, (4, 3))],
    ids=["bulk", "small", "by kernels of both kinds"],
)
def test_ranks_with_other_extra_payloads(small_tokens: int, sizes: tuple[int, int]) -> None:
    def rank_main(group: ThreadGroup) -> None:
        mine = config(group, extra_payload_bytes=(8, 4), timeout_s=20, small_tokens=small_tokens)
        with MoeAllToAll.create(mine, group) as layer:
            extra = torch.zeros(2, sizes[group.rank], dtype=torch.uint8)
            layer.dispatch(*inputs_of(layer, 2), [extra])

    for rank, outcome in enumerate(try_ranks(2, rank_main)):
        assert isinstance(outcome, DisagreementError), repr(outcome)
        assert f"extra payloads of ({sizes[rank]},) bytes" in str(outcome)
