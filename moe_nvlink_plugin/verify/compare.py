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
from moe_nvlink_plugin.errors import MismatchError
from moe_nvlink_plugin.recipes import combine_formats
from moe_nvlink_plugin.verify import cases
from moe_nvlink_plugin.verify.cases import (
    Case,
    Inputs,
    Seen,
    expert_rows,
    is_small,
)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes, flat uint8."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _require(holds: object, what: str) -> None:
    if not holds:
        raise MismatchError(what)


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Check that two tensors have the same shape, type and bits.

    Raises:
        MismatchError: names the first difference.
    """
    _require(actual.shape == expected.shape, f"{what}: {actual.shape} instead of {expected.shape}")
    _require(actual.dtype == expected.dtype, f"{what}: {actual.dtype} instead of {expected.dtype}")
    differs = bits(actual) != bits(expected)
    if bool(differs.any()):
        index = int(differs.nonzero()[0]) // actual.dtype.itemsize
        place = torch.unravel_index(torch.tensor(index), actual.shape)
        raise MismatchError(
            f"{what}: first difference at {[int(i) for i in place]}: "
            f"{actual.reshape(-1)[index]} instead of {expected.reshape(-1)[index]}"
        )


def assert_next_code(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Check nvfp4's payloads: every code at most one away. uint8 are pairs of e2m1, others e4m3.

    Raises:
        MismatchError: names the first code that is further away.
    """
    _require(actual.shape == expected.shape, f"{what}: {actual.shape} instead of {expected.shape}")
    far = (_ordinals(actual) - _ordinals(expected)).abs() > 1
    if bool(far.any()):
        place = far.nonzero()[0].tolist()
        raise MismatchError(f"{what}: {int(far.sum())} codes are more than one away, at {place}")


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
    """Check what all ranks received, as check_received_by does for one.

    Raises:
        MismatchError: names the ranks and the first difference.
    """
    slots = [rank.send_slots for rank in seen]
    expected = expected_received(case, inputs)
    for target, mine in enumerate(seen):
        check_received_by(case, expected, target, mine, slots, near=near, any_nan=any_nan)


def expected_received(case: Case, inputs: list[Inputs]) -> list[list[reference.ReceivedRows]]:
    """Return `received[target][source]` of the reference, with rows in the format that travels."""
    inputs = cases.among_active(case, inputs)
    payloads = [[rank.topk_weights, *_sent(case, rank), *rank.extras] for rank in inputs]
    return reference.dispatch(case.config(0), [rank.topk_ids for rank in inputs], payloads)


def check_received_by(
    case: Case,
    expected: list[list[reference.ReceivedRows]],
    target: int,
    seen: Seen,
    slots: list[torch.Tensor],
    *,
    near: bool = False,
    any_nan: bool = False,
) -> None:
    """Check every source's rows at one rank, each in the slot that the source recorded. Local.

    Args:
        case: of the round.
        expected: of expected_received.
        target: the rank.
        seen: what it got.
        slots: every rank's send_slots, `[num_tokens, top_k]` int32, on the CPU.
        near: nvfp4's codes may be one away.
        any_nan: two NaN are equal among float32 scales.

    Raises:
        MismatchError: a count, a slot, an id, a weight or a bit of a row is wrong, or an empty slot
            is not empty.
    """
    for source, rows in enumerate(expected[target]):
        what = f"{case.name}: rank {source} to rank {target}"
        places = _check_slice(case, seen, target, source, rows, slots[source], what)
        _check_payloads(case, seen, places, rows, what, near=near, any_nan=any_nan)


def _sent(case: Case, inputs: Inputs) -> list[torch.Tensor]:
    """What the recipe in torch makes of a rank's activations."""
    rows = cases.quantised(case.config(0), inputs.hidden_states)
    return [rows.rows] if rows.scales is None else [rows.rows, rows.scales]


def _check_slice(
    case: Case,
    seen: Seen,
    target: int,
    source: int,
    rows: reference.ReceivedRows,
    sent: torch.Tensor,
    what: str,
) -> list[int]:
    """Check counts, slots and ids; return where the rows are."""
    count = len(rows.tokens)
    found = int(seen.recv_counts[source])
    _require(found == count, f"{what}: {found} rows instead of {count}")
    slots = sent[rows.tokens]
    here = (slots >= target * case.capacity) & (slots < (target + 1) * case.capacity)
    _require(here.sum(1).tolist() == [1] * count, f"{what}: not one slot for each token: {slots}")
    row_of_token = (slots[here] - target * case.capacity).tolist()
    # Filled from the front without gaps; in a small batch, or with one CTA, in the source's order.
    _require(sorted(row_of_token) == list(range(count)), f"{what}: slots {row_of_token}")
    if case.num_threads == 1 or is_small(case.config(target)):
        _require(row_of_token == sorted(row_of_token), f"{what}: order {row_of_token}")
    first = source * case.capacity
    places = [first + row for row in row_of_token]
    assert_same_bits(seen.topk_ids[places], rows.topk_ids.int(), f"{what}: ids")
    empty = slice(first + count, first + case.capacity)
    absent = reference.absent_id(case.config(target), target)
    _require((seen.topk_ids[empty] == absent).all(), f"{what}: ids of empty slots")
    if case.received_ids != "global":
        weights = seen.payloads[0][empty]
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
        name = f"{what}: payload {index}"
        if index == 2 and case.has_scales:
            payload = _linear(case, payload, expected.shape[1], places, name)
        actual = reference.chosen_rows(payload, places)
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


def _linear(
    case: Case, scales: torch.Tensor, columns: int, places: list[int], what: str
) -> torch.Tensor:
    """Return scales as `[slots, columns]`; check their strides, or that padding is 0."""
    slots = case.ep_size * case.capacity
    if case.scales_layout == "column_major":
        wanted = (1, slots)
        _require(
            columns == 1 or scales.stride() == wanted,
            f"{what}: strides {scales.stride()} instead of {wanted}",
        )
    padded = cases.linear_scales(case.config(0), scales)
    behind = reference.chosen_rows(padded[:, columns:], places)
    _require(not bits(behind).any(), f"{what}: padding behind a row's scales is not 0")
    return padded[:slots, :columns]


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
    back = combine_formats.combine_format(case.combine, case.combine_scale)
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
        scales = seen[target].payloads[2] if case.has_scales else None
        rows = cases.received_activations(case.config(target), seen[target].payloads[1], scales)
        hidden = torch.zeros((len(slots), case.hidden_size), dtype=case.dtype)
        hidden[tokens] = rows[places]
        found.append(hidden)
    return found


def one_nan(tensor: torch.Tensor) -> torch.Tensor:
    """With every NaN the same: which sign and bits arithmetic gives it is the machine's choice."""
    return torch.where(tensor.isnan(), torch.nan, tensor)


def check_combined(
    case: Case, inputs: list[Inputs], seen: list[Seen], *, near: bool = False
) -> None:
    """Check every rank's sums.

    Args:
        case: of the round.
        inputs: of all ranks.
        seen: what all ranks got.
        near: sums are those of the rows that were received, whose codes may be one away.

    Raises:
        MismatchError: names the rank and the first difference.
    """
    for rank, mine in enumerate(cases.among_active(case, inputs)):
        hidden = received_activations(case, seen, rank) if near else None
        check_combined_by(case, mine, rank, seen[rank], hidden)


def check_combined_by(
    case: Case,
    inputs: Inputs,
    rank: int,
    seen: Seen,
    hidden: list[torch.Tensor] | None = None,
) -> None:
    """Check one rank's sums. Local.

    Args:
        case: of the round.
        inputs: of this rank, among active ranks.
        rank: its number.
        seen: what it got.
        hidden: as expected_combined has it.

    Raises:
        MismatchError: names the rank and the first difference.
    """
    expected = expected_combined(case, inputs, rank, hidden)
    what = f"{case.name}: combined on rank {rank}"
    assert_same_bits(one_nan(seen.combined), one_nan(expected), what)


def check_counts_by(
    case: Case,
    inputs: list[Inputs],
    rank: int,
    seen: Seen,
    given: list[torch.Tensor] | None = None,
) -> None:
    """Check the counts per expert that one rank has received. Local.

    Args:
        case: of the round.
        inputs: of all ranks.
        rank: its number.
        seen: what it got.
        given: of each rank what its caller has counted; None: dispatch counts.

    Raises:
        MismatchError: names the rank and the first difference.
    """
    ids = [mine.topk_ids for mine in inputs]
    active = case.active_ranks(rank)
    if given is None:
        expected = reference.expert_counts(case.config(rank), ids, active_ranks=active)
    else:
        expected = torch.stack(given)
        expected[[other for other in range(case.ep_size) if other not in active]] = 0
    what = f"{case.name}: counts per expert on rank {rank}"
    _require(seen.expert_counts is not None, f"{what}: none")
    assert seen.expert_counts is not None
    assert_same_bits(seen.expert_counts, expected, what)


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
    """A slot exactly where the reference has a target, at that target; if the case asks for it, in
    the order of the tokens.
    """
    for rank, mine in enumerate(cases.among_active(case, inputs)):
        table = reference.target_ranks(mine.topk_ids, case.num_experts, case.ep_size)
        targets = seen[rank].send_slots.div(case.capacity, rounding_mode="floor").tolist()
        wanted = [[-1 if target is None else target for target in row] for row in table]
        _require(targets == wanted, f"{case.name}: targets of rank {rank}")
        if case.ordered_slots:
            ordered = _ordered_slots(wanted, case.capacity)
            in_order = seen[rank].send_slots.tolist() == ordered
            _require(in_order, f"{case.name}: order of the slots of rank {rank}")


def _ordered_slots(targets: list[list[int]], capacity: int) -> list[list[int]]:
    """Return the slot of each target if rows lie in the order of their tokens; -1: no target."""
    next_of: dict[int, int] = {}
    slots = []
    for row in targets:
        slots.append([t if t < 0 else t * capacity + next_of.get(t, 0) for t in row])
        for target in row:
            next_of[target] = next_of.get(target, 0) + 1
    return slots
