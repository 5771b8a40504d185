"""Audits of rows while serving: no false alarm, and what each planted fault leaves behind."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

from moe_nvlink_plugin.errors import ConfigError, DisagreementError
from moe_nvlink_plugin.exchange.kernels import LAYER
from moe_nvlink_plugin.integration.common.audit import AUDIT_BYTES, Audited, AuditReport
from moe_nvlink_plugin.integration.common.formats import Sent
from moe_nvlink_plugin.integration.common.options import read
from moe_nvlink_plugin.jit import host
from moe_nvlink_plugin.testing import ThreadGroup, run_ranks, try_ranks
from moe_nvlink_plugin.verify.cases import RECIPES
from tests.integration.common.test_adapter_common import GEOMETRY, WORDING, ToyInput, pool_of
from tests.support.audited import CAPACITY, SIZE, Rank
from tests.support.delays import replace_once

pytestmark = pytest.mark.usefixtures("turns_from_one")


def audited(body: Callable[[Rank], Any], size: int = SIZE, **values: Any) -> list[Any]:
    """What body returns on each rank; each rank's audits if it returns None."""

    def rank_main(group: ThreadGroup) -> Any:
        rank = Rank(group, **values)
        with rank.exchange:
            told = body(rank)
            return rank.audit.found() if told is None else told

    return run_ranks(size, rank_main)


def ragged(rank: Rank, rounds: int = 24) -> None:
    for number in range(rounds):
        place = rank.exchange.config.ep_rank
        received = rank.round((number * (place + 2) + 5 * place) % (CAPACITY + 1))
        assert received.extra_payloads == ()


# No false alarm.


@pytest.mark.parametrize("ids", ["global", "local", "elsewhere"])
@pytest.mark.parametrize("small", [0, CAPACITY])
@pytest.mark.parametrize("recipe", [None, *RECIPES])
def test_rounds_without_a_fault(recipe: str | None, small: int, ids: str) -> None:
    for found in audited(ragged, recipe=recipe, small_tokens=small, received_ids=ids):
        assert min(found.rows) > 4
        assert found.wrong == found.stale == [0] * SIZE
        assert found.slots == [-1] * SIZE


def test_rows_that_the_caller_has_quantised() -> None:
    def body(rank: Rank) -> None:
        recipe: Any = rank.exchange.recipe
        for number in range(12):
            rank.round(number, given=lambda hidden: Sent(*recipe.quantise(hidden)))

    for found in audited(body, recipe="fp8_block"):
        assert min(found.rows) > 2
        assert found.wrong == found.stale == [0] * SIZE


def test_rounds_after_a_rank_has_left() -> None:
    """Ids of its experts travel as -1."""

    def body(rank: Rank) -> Any:
        place = rank.exchange.config.ep_rank
        rank.round(CAPACITY)
        rank.exchange.leave(SIZE - 1)
        if place == SIZE - 1:
            return ()
        for _ in range(12):
            rank.round(CAPACITY)
        return None

    for found in audited(body)[:-1]:
        assert min(found.rows[:-1]) > 4
        assert found.wrong == found.stale == [0] * SIZE


def test_ranks_that_audit_in_other_rounds_compare_nothing_and_say_nothing() -> None:
    def body(rank: Rank) -> None:
        if rank.exchange.config.ep_rank == 1:
            rank.audit._calls = [1]
        ragged(rank)

    zero, one, _two = audited(body, every=2)
    assert zero.rows[1] == one.rows[0] == 0
    assert zero.rows[2] > 2
    assert not any(map(any, (zero.wrong, zero.stale, one.wrong, one.stale)))


def test_each_token_has_its_turn() -> None:
    def body(rank: Rank) -> set[int]:
        ids = torch.zeros(5, 4, dtype=torch.int32)
        ids[2] = -1
        weights = torch.ones(5, 4)
        sent = Sent(torch.ones(5, 256, dtype=torch.bfloat16))
        seen = set()
        for _ in range(5):
            words = rank.audit.words(sent, ids, weights, None)
            (token,) = words[:, 1].nonzero().flatten().tolist()
            assert len(set((words[:, 0] >> 24).tolist())) == 1
            assert (words[:, 0] % 2**24).tolist() == list(range(5))
            seen.add(token)
        return seen

    assert audited(body, size=1, ep_size=1) == [{0, 1, 3, 4}]


def test_every_round_of_n_is_audited() -> None:
    def body(rank: Rank) -> list[bool]:
        told = []
        for _ in range(7):
            rank.round(1)
            told.append(rank.audit._is_turn[0])
        return told

    assert audited(body, size=1, ep_size=1, every=3) == [[False, False, True] * 2 + [False]]


# Planted faults.


def slot_of_audited(received: Any, source: int) -> int | None:
    bound = received.metadata.max_tokens
    first, count = source * bound, int(received.recv_counts[source])
    hits = received.extra_payloads[-1][first : first + count, 1].nonzero().flatten().tolist()
    return first + hits[0] if hits else None


@pytest.mark.parametrize("recipe", [None, "fp8_block", "mxfp8", "fp8_tensor"])
def test_a_wrong_byte_anywhere_is_found(recipe: str | None) -> None:
    """Of the row, its scales, ids and weights."""

    def body(rank: Rank) -> Any:
        missed: list[Any] = []
        places = 0

        def spoil(received: Any) -> None:
            nonlocal places
            slot = slot_of_audited(received, 1)
            if slot is None or places > 1000:
                return
            parts = [received.hidden_states, received.topk_ids, received.topk_weights]
            parts += [] if received.scales is None else [received.scales]
            for number, part in enumerate(parts):
                row = part.view(torch.uint8)[slot]
                for place in range(len(row)):
                    before = sum(rank.audit._found[0, 1].tolist())
                    row[place] ^= 1 << place % 8
                    rank.audit.compared(received)
                    row[place] ^= 1 << place % 8
                    places += 1
                    if sum(rank.audit._found[0, 1].tolist()) != before + 1:
                        missed.append((number, place))

        for _ in range(8):
            rank.round(CAPACITY, spoil)
        return missed, places

    for missed, places in audited(body, recipe=recipe):
        assert missed == []
        assert places > 256


def test_a_slot_that_was_not_written_is_found() -> None:
    """It holds a whole row of an earlier round, with its own checksum, or of one without audit."""

    def body(rank: Rank) -> Any:
        old: list[torch.Tensor] = []

        def keep(received: Any) -> None:
            old.append(received.extra_payloads[-1].clone())

        def stale(received: Any) -> None:
            slot = int(received.recv_counts[0]) - 1  # the last of rank 0
            received.extra_payloads[-1][slot] = old[0][slot]

        rank.round(CAPACITY, keep)
        rank.round(CAPACITY, stale)
        return rank.audit.found().stale

    assert audited(body) == [[1, 0, 0]] * SIZE


def test_a_row_in_two_slots_is_found() -> None:
    """With all that belongs to it, so its checksum holds."""

    def body(rank: Rank) -> Any:
        def twice(received: Any) -> None:
            for tensor in (received.hidden_states, received.topk_ids, received.topk_weights):
                tensor.view(torch.uint8)[1] = tensor.view(torch.uint8)[0]
            received.extra_payloads[-1][1] = received.extra_payloads[-1][0]

        for _ in range(2):
            rank.round(CAPACITY, twice, to_all=True)
        return rank.audit.found().stale, rank.audit.found().wrong

    assert audited(body) == [([2, 0, 0], [0, 0, 0])] * SIZE


def test_a_round_that_is_wholly_old_is_found() -> None:
    def body(rank: Rank) -> Any:
        def again(received: Any) -> None:
            rank.audit.compared(received)

        rank.round(CAPACITY, again)
        return rank.audit.found().stale

    assert audited(body) == [[1] * SIZE] * SIZE


#: As in tests/core/verify/test_checks.py: what is planted -> line, what stands there instead, and
#: the rounds that show it.
FAULTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "a row in a slice's last slot": (
        "slot = target * geometry.max_tokens_per_rank + place;",
        "slot = target * geometry.max_tokens_per_rank + place;\n"
        "      if (place == geometry.max_tokens_per_rank - 1) row = row - 1;",
        {"small_tokens": 0},
    ),
    "rows in each other's slots": (
        "static_cast<uint64_t>(row) * payload.row_bytes);\n      present = place + 1;",
        "static_cast<uint64_t>(row ^ 1) * payload.row_bytes);\n      present = place + 1;",
        {"small_tokens": 0},
    ),
    "scales in each other's place": (
        "put(scales + offset, vector);",
        "put(scales, vector);",
        {"small_tokens": CAPACITY, "recipe": "fp8_block", "hidden_size": 384},
    ),
}
EACH_FAULT = [
    fault if fault == "rows in each other's slots" else pytest.param(fault, marks=pytest.mark.long)
    for fault in FAULTS
]


@pytest.mark.parametrize("fault", EACH_FAULT)
def test_a_fault_of_the_kernels_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    line, instead, values = FAULTS[fault]
    library = host.HostLibrary(
        host.build(replace_once(LAYER.host_source(), line, instead), (*host.FLAGS, "-O0"))
    )
    monkeypatch.setattr(host, "load", lambda _text: library)

    def body(rank: Rank) -> None:
        for _ in range(2 * CAPACITY):
            # A token without a destination has no row to be taken for another's.
            rank.round(CAPACITY, to_all=fault.startswith("a row in"))

    found = audited(body, **values)
    assert any(sum(one.wrong) + sum(one.stale) for one in found), found


# What becomes of it.


class Finds:
    """Stands for an Audit."""

    def __init__(self, found: Audited) -> None:
        self.now = found

    def found(self) -> Audited:
        return self.now


def test_a_fault_is_counted_always_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    fine = Audited([5, 6], [0, 0], [0, 0], [-1, -1])
    one: Any = Finds(fine)
    report = AuditReport(0)
    with caplog.at_level(logging.ERROR):
        assert report.snapshot([one]) == {"audited": [5, 6], "audit_faults": [0, 0]}
        assert not caplog.records
        one.now = Audited([6, 7], [0, 2], [0, 1], [-1, 17])
        told = report.snapshot([Finds(fine), one])  # type: ignore[list-item]
        assert told == {"audited": [11, 13], "audit_faults": [0, 3]}
        report.snapshot([one])
    (record,) = caplog.records
    said = record.getMessage()
    assert "rank 0" in said
    assert (
        "exchange 1: 2 of 7 rows from rank 1 have other bytes than it sent, last in slot 17" in said
    )


def test_counters_and_turns_outlive_lost_memory() -> None:
    def body(rank: Rank) -> Any:
        for _ in range(6):
            rank.round(CAPACITY)
        before = rank.audit.found()
        for tensor in (rank.audit._factors, rank.audit._found, rank.audit._turns):
            tensor.fill_(-1)
        rank.audit._latest.fill_(2**62)
        rank.audit.restore()
        assert rank.audit.found() == before
        return None

    for found in audited(body):
        assert found.wrong == found.stale == [0] * SIZE


def test_one_rank_alone_loses_its_memory() -> None:
    """It has audited more often than the clock, which stands here, has moved."""

    def body(rank: Rank) -> Any:
        for _ in range(6):
            rank.round(CAPACITY)
        if rank.exchange.config.ep_rank == 1:
            rank.audit._turns.fill_(-1)
            rank.audit.restore()
        for _ in range(6):
            rank.round(CAPACITY)

    for found in audited(body):
        assert found.wrong == found.stale == [0] * SIZE


# The option.


@pytest.mark.parametrize("value", [-1, True, 1.0, "10", None, 10**9 + 1])
def test_options_that_are_no_number_of_rounds_are_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"toy.yaml: audit_every=.* is no number of rounds"):
        read({"audit_every": value}, WORDING)


def test_ranks_that_disagree_are_refused_by_name() -> None:
    def body(group: ThreadGroup) -> None:
        pool = pool_of(group, audit_every=5 + group.rank)
        pool.agree_on_format("layer 0", ToyInput(None), GEOMETRY)

    for outcome in try_ranks(2, body):
        assert isinstance(outcome, DisagreementError)
        assert "audit_every 5" in str(outcome)
        assert "audit_every 6" in str(outcome)


def test_a_pool_audits_only_if_the_user_says_so() -> None:
    def body(group: ThreadGroup) -> tuple[Any, Any]:
        told = []
        for every in (0, 7):
            pool = pool_of(group, audit_every=every)
            exchange = pool.exchange(GEOMETRY)
            told.append((pool.audit_of(exchange) is None, exchange.config.extra_payload_bytes))
            pool.close()
        return told[0], told[1]

    assert run_ranks(2, body) == [((True, ()), (False, (AUDIT_BYTES,)))] * 2


def test_words_travel_last() -> None:
    (group,) = ThreadGroup.ranks(1)
    config = pool_of(group, audit_every=1).config(GEOMETRY._replace(extra_payload_bytes=(4,)))
    assert config.extra_payload_bytes == (4, AUDIT_BYTES)
    assert dataclasses.replace(config, extra_payload_bytes=()) == pool_of(group).config(GEOMETRY)
