"""What ranks received and combined against moe_nvlink_plugin.reference, bit for bit."""

from __future__ import annotations

import torch

from moe_nvlink_plugin import combine_formats, reference
from tests.kernels import cases
from tests.kernels.cases import Case, Inputs, Seen, expert_rows, make_inputs, run_case


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


def check_received(case: Case, inputs: list[Inputs], seen: list[Seen]) -> None:
    """Every source's rows, each in the slot that the source recorded, and -1 behind them."""
    ids = [rank.topk_ids for rank in inputs]
    payloads = [[rank.topk_weights, *_sent(case, rank), *rank.extras] for rank in inputs]
    expected = reference.dispatch(case.config(0), ids, payloads)
    for target, sources in enumerate(expected):
        for source, rows in enumerate(sources):
            what = f"{case.name}: rank {source} to rank {target}"
            _check_slice(case, seen, target, source, rows, what)


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
) -> None:
    count = len(rows.tokens)
    assert int(seen[target].recv_counts[source]) == count, what
    slots = seen[source].send_slots[rows.tokens]
    here = (slots >= target * case.capacity) & (slots < (target + 1) * case.capacity)
    assert here.sum(1).tolist() == [1] * count, f"{what}: one slot per token"
    row_of_token = (slots[here] - target * case.capacity).tolist()
    # Filled from the front without gaps; with one CTA also in the source's order.
    assert sorted(row_of_token) == list(range(count)), f"{what}: slots {row_of_token}"
    if case.num_threads == 1:
        assert row_of_token == sorted(row_of_token), f"{what}: order {row_of_token}"
    first = source * case.capacity
    places = [first + row for row in row_of_token]
    assert_same_bits(seen[target].topk_ids[places], rows.topk_ids.int(), f"{what}: ids")
    for index, payload in enumerate(seen[target].payloads):
        assert_same_bits(payload[places], rows.payloads[index], f"{what}: payload {index}")
    empty = seen[target].topk_ids[first + count : first + case.capacity]
    assert bool((empty == -1).all()), f"{what}: empty slots"


def expected_combined(case: Case, inputs: Inputs, ep_rank: int) -> torch.Tensor:
    config = case.config(ep_rank)
    ids = inputs.topk_ids
    ids = torch.where((ids >= 0) & (ids < case.num_experts), ids, -1)
    hidden = cases.activations(config, *cases.quantised(config, inputs.hidden_states))
    partial_rows = [
        expert_rows(config, target, hidden, ids, inputs.topk_weights)
        for target in range(case.ep_size)
    ]
    back = combine_formats.combine_format(case.combine)
    if back is not None:
        partial_rows = [back.dequantise(back.quantise(rows)) for rows in partial_rows]
    return reference.combine(config, inputs.topk_ids, partial_rows)


def one_nan(tensor: torch.Tensor) -> torch.Tensor:
    """With every NaN the same: whose sign and bits a sum of two takes is the machine's choice."""
    return torch.where(tensor.isnan(), torch.nan, tensor)


def check_combined(case: Case, inputs: list[Inputs], seen: list[Seen]) -> None:
    for rank, mine in enumerate(inputs):
        expected = expected_combined(case, mine, rank)
        what = f"{case.name}: combined on rank {rank}"
        assert_same_bits(one_nan(seen[rank].combined), one_nan(expected), what)


def check_slots(case: Case, inputs: list[Inputs], seen: list[Seen]) -> None:
    """A slot exactly where the reference has a target, at that target."""
    for rank, mine in enumerate(inputs):
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
