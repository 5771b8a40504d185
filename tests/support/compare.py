"""What ranks received and combined against moe_nvlink_plugin.reference, bit for bit.

`near`, for a GPU: nvfp4 takes reciprocals there by an instruction that approximates them, as the
framework's own quantiser does, so that a code may be the next one. Rows and scales may differ from
the recipe's by one code; combined is then held to what was received. Combine's own formats take no
such reciprocals.

An e4m3 NaN may have either sign: torch's casts keep one, the kernels make all of them 0x7f.

`any_nan`, for rows that the caller has quantised on a GPU: torch's arithmetic makes other NaN there
than on the CPU, where the recipe's scales are made that they are compared with. Of two fp32 scales
both may be NaN, of whatever bits. The kernels only carry them.
"""

from __future__ import annotations

import torch

from moe_nvlink_plugin import reference
from moe_nvlink_plugin.recipes import combine_formats
from tests.support import cases
from tests.support.cases import (
    Case,
    Inputs,
    Seen,
    expert_rows,
    is_small,
    make_inputs,
    run_case,
)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    assert actual.shape == expected.shape, f"{what}: {actual.shape} instead of {expected.shape}"
    assert actual.dtype == expected.dtype, f"{what}: {actual.dtype} instead of {expected.dtype}"
    differs = bits(actual) != bits(expected)
    if bool(differs.any()):
        index = int(differs.nonzero()[0]) // actual.dtype.itemsize
        place = torch.unravel_index(torch.tensor(index), actual.shape)
        raise AssertionError(
            f"{what}: first difference at {[int(i) for i in place]}: "
            f"{actual.reshape(-1)[index]} instead of {expected.reshape(-1)[index]}"
        )


def assert_next_code(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """nvfp4's payloads: every code at most one away. uint8 are pairs of e2m1, others e4m3."""
    assert actual.shape == expected.shape, f"{what}: {actual.shape} instead of {expected.shape}"
    far = (_ordinals(actual) - _ordinals(expected)).abs() > 1
    if bool(far.any()):
        place = far.nonzero()[0].tolist()
        raise AssertionError(f"{what}: {int(far.sum())} codes are more than one away, at {place}")


def _ordinals(codes: torch.Tensor) -> torch.Tensor:
    """Codes by the size of what they stand for; both zeros are 0."""
    raw = codes.view(torch.uint8).int()
    if codes.dtype != torch.uint8:
        return torch.where(raw >= 128, -(raw - 128), raw)
    both = torch.stack((raw & 15, raw >> 4), -1)
    return torch.where(both >= 8, -(both - 8), both)


def unsigned_nan(rows: torch.Tensor) -> torch.Tensor:
    """e4m3 rows whose NaN have no sign; others as they are."""
    if rows.dtype != torch.float8_e4m3fn:
        return rows
    raw = rows.view(torch.uint8)
    return torch.where(raw == 0xFF, 0x7F, raw).to(torch.uint8).view(rows.dtype)


def check_received(
    case: Case,
    inputs: list[Inputs],
    seen: list[Seen],
    *,
    near: bool = False,
    any_nan: bool = False,
) -> None:
    """Every source's rows, each in the slot that the source recorded, and empty slots behind."""
    inputs = cases.among_active(case, inputs)
    ids = [rank.topk_ids for rank in inputs]
    payloads = [[rank.topk_weights, *_sent(case, rank), *rank.extras] for rank in inputs]
    expected = reference.dispatch(case.config(0), ids, payloads)
    for target, sources in enumerate(expected):
        for source, rows in enumerate(sources):
            what = f"{case.name}: rank {source} to rank {target}"
            places = _check_slice(case, seen, target, source, rows, what)
            _check_payloads(case, seen[target], places, rows, what, near=near, any_nan=any_nan)


def _sent(case: Case, inputs: Inputs) -> list[torch.Tensor]:
    """What the recipe in torch makes of a rank's activations."""
    rows = cases.quantised(case.config(0), inputs.hidden_states)
    return [rows.rows] if rows.scales is None else [rows.rows, rows.scales]


def _check_slice(
    case: Case,
    seen: list[Seen],
    target: int,
    source: int,
    rows: reference.ReceivedRows,
    what: str,
) -> list[int]:
    """Counts, slots and ids; returns where the rows are."""
    count = len(rows.tokens)
    assert int(seen[target].recv_counts[source]) == count, what
    slots = seen[source].send_slots[rows.tokens]
    here = (slots >= target * case.capacity) & (slots < (target + 1) * case.capacity)
    assert here.sum(1).tolist() == [1] * count, f"{what}: one slot per token"
    row_of_token = (slots[here] - target * case.capacity).tolist()
    # Filled from the front without gaps; in a small batch, or with one CTA, in the source's order.
    assert sorted(row_of_token) == list(range(count)), f"{what}: slots {row_of_token}"
    if case.num_threads == 1 or is_small(case.config(target)):
        assert row_of_token == sorted(row_of_token), f"{what}: order {row_of_token}"
    first = source * case.capacity
    places = [first + row for row in row_of_token]
    assert_same_bits(seen[target].topk_ids[places], rows.topk_ids.int(), f"{what}: ids")
    empty = slice(first + count, first + case.capacity)
    absent = reference.absent_id(case.config(target), target)
    assert bool((seen[target].topk_ids[empty] == absent).all()), f"{what}: empty slots"
    if case.received_ids != "global":
        weights = seen[target].payloads[0][empty]
        assert_same_bits(weights, torch.zeros_like(weights), f"{what}: weights of empty slots")
    return places


def _check_payloads(
    case: Case,
    seen: Seen,
    places: list[int],
    rows: reference.ReceivedRows,
    what: str,
    *,
    near: bool,
    any_nan: bool,
) -> None:
    for index, (payload, expected) in enumerate(zip(seen.payloads, rows.payloads, strict=True)):
        actual = reference.chosen_rows(payload, places)
        name = f"{what}: payload {index}"
        if index == 0:
            expected = torch.where(rows.is_absent, 0.0, expected)
        if near and case.recipe == "nvfp4" and index in (1, 2):
            assert_next_code(actual, expected, name)
        elif index == 1:
            assert_same_bits(unsigned_nan(actual), unsigned_nan(expected), name)
        elif any_nan and case.has_scales and index == 2 and expected.dtype is torch.float32:
            assert_same_bits(one_nan(actual), one_nan(expected), name)
        else:
            assert_same_bits(actual, expected, name)


def _partial_rows(
    case: Case, inputs: Inputs, ep_rank: int, hidden: list[torch.Tensor]
) -> list[torch.Tensor]:
    """What each rank's experts make of this rank's tokens, of which rank t has `hidden[t]`."""
    config = case.config(ep_rank)
    ids = inputs.topk_ids
    ids = torch.where((ids >= 0) & (ids < case.num_experts), ids, -1)
    return [
        expert_rows(config, target, hidden[target], ids, inputs.topk_weights)
        for target in range(case.ep_size)
    ]


def expected_combined(
    case: Case, inputs: Inputs, ep_rank: int, hidden: list[torch.Tensor] | None = None
) -> torch.Tensor:
    """`hidden`: what each rank has of this rank's tokens; None: what the recipe makes of them."""
    config = case.config(ep_rank)
    if hidden is None:
        rows = cases.activations(config, *cases.quantised(config, inputs.hidden_states))
        hidden = [rows] * case.ep_size
    partial_rows = _partial_rows(case, inputs, ep_rank, hidden)
    back = combine_formats.combine_format(case.combine)
    if back is not None:
        partial_rows = [back.dequantise(back.quantise(rows)) for rows in partial_rows]
    added = cases.added_rows(inputs.hidden_states, case.add)
    return reference.combine(config, inputs.topk_ids, partial_rows, added, case.scale)


def received_activations(case: Case, seen: list[Seen], ep_rank: int) -> list[torch.Tensor]:
    """What each rank has of a rank's tokens; zeros for those it has not got."""
    slots = seen[ep_rank].send_slots
    found = []
    for target in range(case.ep_size):
        here = (slots >= target * case.capacity) & (slots < (target + 1) * case.capacity)
        tokens, _k = here.nonzero(as_tuple=True)
        places = ep_rank * case.capacity + slots[here].long() - target * case.capacity
        scales = seen[target].payloads[2][places] if case.has_scales else None
        rows = cases.activations(case.config(target), seen[target].payloads[1][places], scales)
        hidden = torch.zeros((len(slots), case.hidden_size), dtype=case.dtype)
        hidden[tokens] = rows
        found.append(hidden)
    return found


def one_nan(tensor: torch.Tensor) -> torch.Tensor:
    """With every NaN the same: which sign and bits arithmetic gives it is the machine's choice."""
    return torch.where(tensor.isnan(), torch.nan, tensor)


def check_combined(
    case: Case, inputs: list[Inputs], seen: list[Seen], *, near: bool = False
) -> None:
    for rank, mine in enumerate(cases.among_active(case, inputs)):
        what = f"{case.name}: combined on rank {rank}"
        hidden = received_activations(case, seen, rank) if near else None
        expected = expected_combined(case, mine, rank, hidden)
        assert_same_bits(one_nan(seen[rank].combined), one_nan(expected), what)


def nothing(case: Case, like: Seen) -> Seen:
    """What the reference has for a rank without tokens that gets no rows."""
    return Seen(
        torch.zeros_like(like.recv_counts),
        torch.full_like(like.topk_ids, -1),
        like.payloads,
        torch.empty((0, case.top_k), dtype=torch.int32),
        torch.empty((0, case.hidden_size), dtype=case.dtype),
    )


def check_slots(case: Case, inputs: list[Inputs], seen: list[Seen]) -> None:
    """A slot exactly where the reference has a target, at that target."""
    for rank, mine in enumerate(cases.among_active(case, inputs)):
        table = reference.target_ranks(mine.topk_ids, case.num_experts, case.ep_size)
        targets = seen[rank].send_slots.div(case.capacity, rounding_mode="floor").tolist()
        wanted = [[-1 if target is None else target for target in row] for row in table]
        assert targets == wanted, f"{case.name}: targets of rank {rank}"


def check_case(case: Case, rounds: int = 2) -> None:
    inputs = make_inputs(case)
    results = run_case(case, rounds)
    for seen in results:
        check_slots(case, inputs, seen)
        check_received(case, inputs, seen)
        check_combined(case, inputs, seen)
    for rank, first in enumerate(results[0]):
        for later in results[1:]:
            assert_same_bits(later[rank].combined, first.combined, f"{case.name}: a second run")
