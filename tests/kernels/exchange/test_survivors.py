"""Ranks that die by SIGKILL, in the midst of a kernel too: the others go on without them.

Each rank is a process. The ranks 0, 1, ... die one after another, each at another place; after each
death the others mask it and do two rounds, whose results are those of the reference.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from threading import Barrier, Event
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from moe_nvlink_plugin import MoeAllToAll, rank_mask, reference
from moe_nvlink_plugin.errors import (
    DisagreementError,
    ExchangeStateError,
    ExchangeTimeoutError,
    InputError,
    PeerError,
)
from moe_nvlink_plugin.exchange import rank_masks, survivors
from moe_nvlink_plugin.exchange.kernels import LAYER
from moe_nvlink_plugin.jit import host
from moe_nvlink_plugin.jit.header import constants
from moe_nvlink_plugin.testing import ThreadGroup, run_ranks
from moe_nvlink_plugin.verify import cases, compare
from moe_nvlink_plugin.verify.cases import Case, Inputs, Seen
from tests.support.long_tests import first_of
from tests.support.ranks import run_processes

TIMEOUT_S = 4.0

_DYING = """
#include <signal.h>
#include <unistd.h>
#include <atomic>
namespace moe_nvlink {
inline std::atomic<int> test_place{-1}, test_turns{0};
inline void test_die(int place) {
  if (test_place == place && test_turns.fetch_sub(1) == 1) kill(getpid(), SIGKILL);
}
}  // namespace moe_nvlink
extern "C" void moe_nvlink_die_at(int place, int turn) {
  moe_nvlink::test_turns = turn;
  moe_nvlink::test_place = place;
}
"""


class Place(NamedTuple):
    """Where a rank dies: before the turn-th run of one of these lines of the kernels."""

    name: str
    lines: tuple[str, ...]
    turn: int = 1


#: Those of both kinds of rounds stand there for each.
PLACES = (
    Place(
        "before the rows",
        ("  plan_rows<Config>(args, cta, shared);\n", "  if (role.sends()) {\n    send_round<"),
    ),
    Place(
        "between rows",
        (
            "    TokenRoute& route = shared.routes[turn];\n    if (token == cta.block) await",
            "  Unit::store(reinterpret_cast<uint64_t*>(target),\n",
        ),
        2,
    ),
    Place("between rows and cells", ("  const uint32_t tag = round_tag(args);\n",)),
    Place(
        "between cells",
        (
            "    const uint32_t count = load_relaxed_gpu(&send_counters[peer]);\n",
            "    // A count is a part of its cell, so it needs no release.\n",
        ),
        3,
    ),
    Place(
        "while it waits for the peers' cells",
        (
            "  collect_counts(args, cta, is_last, shared);\n",
            "  see_counts(args, cta, role, round.epoch(), shared.faulted != 0, shared);\n",
        ),
    ),
    Place(
        "between the signals of combine",
        ("    if (is_active(args, peer)) signal_peer<Config>(args, cells, peer, cell);\n",),
        4,
    ),
    Place(
        "while the peers take its rows",
        (
            "  const bool faulted = combine_barrier(args, cta, shared);\n",
            "  if (!role.receives()) return;\n",
        ),
    ),
)
#: Before a rank tells a peer that it has come to a meeting: to a second one, to a first one.
IN_SECOND, IN_FIRST = len(PLACES), len(PLACES) + 1
_TELLS = "  store_release_sys(entry + kRankMaskWords, args.number);\n"
#: Between dispatch and combine, on the host.
AMONG_EXPERTS = len(PLACES)
NUM_DEATHS = len(PLACES) + 1

CASE = Case(
    name="deaths",
    tokens=(4,) * (NUM_DEATHS + 2),
    num_experts=2 * NUM_DEATHS + 5,
    top_k=4,
    routing="invalid",
    timeout_s=TIMEOUT_S,
)


def mortal_library() -> Path:
    """The kernels of a layer, in which moe_nvlink_die_at() arms a place."""
    text = LAYER.host_source()
    lines = [(line, str(number)) for number, place in enumerate(PLACES) for line in place.lines]
    for line, place in (*lines, (_TELLS, f"{IN_SECOND} + args.number % 2")):
        assert line in text, line
        text = text.replace(line, f"  test_die({place});\n{line}")
    marker = "// ---- kernels/include/moe_nvlink/memory_order.h\n"
    assert text.count(marker) == 1
    return host.build(text.replace(marker, _DYING + marker), (*host.FLAGS, "-O0"))


class Lived(NamedTuple):
    """What a survivor saw: the rounds after each death, and which ranks its errors named."""

    rounds: list[list[Seen]]
    named: list[tuple[int, ...]]


def _inputs(case: Case) -> list[list[list[Inputs]]]:
    """`inputs[death][round][rank]`."""
    return [
        [
            cases.make_inputs(case, _tokens(case, death, number), seed=10 * death + number)
            for number in range(2)
        ]
        for death in range(NUM_DEATHS + 1)
    ]


def _tokens(case: Case, death: int, number: int) -> tuple[int, ...]:
    return tuple(0 if rank < death else 1 + (rank + number) % 5 for rank in range(case.ep_size))


def _mortal(case: Case, ep_rank: int) -> tuple[MoeAllToAll, Any]:
    """A layer of this rank, and the library whose moe_nvlink_die_at() arms its kernels."""
    path = mortal_library()
    dist.barrier()  # create waits for no more than TIMEOUT_S, and processes start when they can
    with mock.patch.object(host, "load", return_value=host.HostLibrary(path)):
        layer = MoeAllToAll.create(case.config(ep_rank), dist.group.WORLD)
    return layer, ctypes.CDLL(str(path))


def _live(ep_rank: int, _ep_size: int, case: Case) -> Lived:
    lived, numbers = Lived([], []), _inputs(case)
    layer, arms = _mortal(case, ep_rank)
    with layer:
        for death, rounds in enumerate(numbers):
            lived.rounds.append([cases.run_round(layer, inputs[ep_rank]) for inputs in rounds])
            if death == NUM_DEATHS:
                break
            if ep_rank == death and death != AMONG_EXPERTS:
                arms.moe_nvlink_die_at(death, PLACES[death].turn)
            with pytest.raises(ExchangeTimeoutError) as caught:
                _rounds_until_an_error(
                    layer, rounds[0][ep_rank], dies=ep_rank == death == AMONG_EXPERTS
                )
            lived.named.append(caught.value.ranks)
            layer.mask(death)
    return lived


def _rounds_until_an_error(layer: MoeAllToAll, inputs: Inputs, *, dies: bool) -> None:
    for _round in range(3):
        received = cases.dispatch(layer, inputs)
        if dies:  # no place in a kernel was armed
            os.kill(os.getpid(), signal.SIGKILL)
        layer.combine(layer.combine_input().zero_(), received.metadata)


@pytest.mark.parametrize(
    ("small", "combine"),
    first_of([(False, "bf16"), (True, "bf16"), (False, "fp8_block")]),
    ids=["bulk", "small", "fp8_block back"],
)
def test_the_others_go_on(small: bool, combine: str, tmp_path: Path) -> None:
    case = cases.with_formats(CASE, None, combine)
    case = dataclasses.replace(case, small=small, dtype=torch.bfloat16)
    numbers = _inputs(case)
    killed = tuple(range(NUM_DEATHS))
    mortal_library()  # once, and not in every rank
    lives = run_processes(case.ep_size, _live, tmp_path, case, killed=killed)
    survivors = [life for life in lives if life is not None]
    assert len(survivors) == 2
    for life in survivors:
        assert all(death in named for death, named in enumerate(life.named)), life.named
    for death, rounds in enumerate(numbers):
        masked = dataclasses.replace(case, left_out=tuple(range(death)))
        for number, inputs in enumerate(rounds):
            for rank in range(NUM_DEATHS, case.ep_size):
                _check(masked, inputs, rank, lives[rank].rounds[death][number])


def _check(case: Case, inputs: list[Inputs], rank: int, seen: Seen) -> None:
    """What one survivor got; who has died later has taken along what it saw."""
    what = f"ranks {case.left_out} are gone: rank {rank}"
    everyones = cases.among_active(case, inputs)
    expected = compare.expected_combined(case, everyones[rank], rank)
    compare.assert_same_bits(
        compare.one_nan(seen.combined), compare.one_nan(expected), f"{what}: combined"
    )
    ids = [mine.topk_ids for mine in everyones]
    rows = reference.dispatch(case.config(0), ids, [[] for _ in ids])[rank]
    assert seen.recv_counts.tolist() == [len(each.tokens) for each in rows], what


# A death during mask().

MEETING_CASE = dataclasses.replace(CASE, tokens=(3, 2, 5, 4), num_experts=9)


def _live_on(ep_rank: int, _ep_size: int, case: Case, place: int, turn: int) -> tuple[int, Seen]:
    """How often a rank had to call mask(), and what it saw of the round after that."""
    inputs, gone = cases.make_inputs(case)[ep_rank], {0}
    layer, arms = _mortal(case, ep_rank)
    with layer:
        cases.run_round(layer, inputs)
        if ep_rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        if ep_rank == 1:
            arms.moe_nvlink_die_at(place, turn)
        for calls in range(1, 5):
            try:
                layer.mask(*gone)
                return calls, cases.run_round(layer, inputs)
            except ExchangeTimeoutError:  # of a meeting; or of a round, if mask() had an end here
                gone.add(1)
    raise AssertionError("four calls were not enough")


@pytest.mark.parametrize(
    ("place", "turn"),
    [
        pytest.param(IN_FIRST, 3, marks=pytest.mark.long),
        pytest.param(IN_SECOND, 2, marks=pytest.mark.long),
        (IN_SECOND, 3),
    ],
    ids=["the first meeting", "the second", "the second, of which one peer knows"],
)
def test_a_death_during_mask(place: int, turn: int, tmp_path: Path) -> None:
    """Rank 0 dies; then rank 1, before it tells its turn-th peer (first itself) that it has come.

    If one peer knows of its second meeting, that peer ends mask() while the other one waits.
    """
    mortal_library()
    lives = run_processes(4, _live_on, tmp_path, MEETING_CASE, place, turn, killed=(0, 1))
    masked = dataclasses.replace(MEETING_CASE, left_out=(0, 1))
    inputs = cases.make_inputs(MEETING_CASE)
    for rank in (2, 3):
        calls, seen = lives[rank]
        assert calls > 1, "rank 1 has died too late"
        _check(masked, inputs, rank, seen)


# Without a death.


def interrupt(
    monkeypatch: pytest.MonkeyPatch,
    before: Callable[[Any, int], None],
    after: Callable[[Any], None],
) -> None:
    """`before` and `after` the kernel of each meeting of each rank."""
    launched = survivors._Meeting.hold

    def hold(self: Any, number: int) -> int:
        launch = self._launch

        def interrupted(args: Any) -> None:
            before(self, number)
            launch(args)
            after(self)

        self._launch = interrupted
        try:
            return launched(self, number)
        finally:
            self._launch = launch

    monkeypatch.setattr(survivors._Meeting, "hold", hold)


def entry_of(meeting: Any, rank: int) -> torch.Tensor:
    """What a rank has brought to odd meetings, in the memory of the meeting's rank."""
    words, size = meeting._num_words, meeting._workspace.group.size
    entries: torch.Tensor = meeting._words[: 2 * size * words].view(2, size, words)
    return entries[1, rank]


def test_a_rank_that_still_waits_when_another_has_called_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 0 has died. Rank 1 comes to rank 2's first meeting, and dies before rank 3 knows it."""

    def before(meeting: Any, number: int) -> None:
        rank = meeting._workspace.group.rank
        if (rank, calls[rank]) == (3, 1):
            meeting._args.timeout_ns = 1000
        elif (rank, calls[rank]) == (2, 1):
            # What rank 1 would have stored, had it come before rank 2 looks and died then.
            mask = [0b1110, *[0] * (meeting._num_words - 2)]
            entry_of(meeting, 1).copy_(torch.tensor([*mask, number]))
            waits.set()

    def call(layer: MoeAllToAll, rank: int, *ranks: int) -> None:
        calls[rank] += 1
        layer.mask(*ranks)

    def body(layer: MoeAllToAll, rank: int) -> None:
        cases.run_round(layer, inputs[rank])
        if rank < 2:
            return
        if rank == 3:
            with pytest.raises(ExchangeTimeoutError):
                call(layer, 3, 0)
            called.set()
            assert waits.wait(60)
        else:
            assert called.wait(60)
            with pytest.raises(
                ExchangeTimeoutError, match="call mask.. again with those"
            ) as caught:
                call(layer, 2, 0)
            assert (caught.value.phase, caught.value.ranks) == ("mask", (1,))
        call(layer, rank, 0, 1)
        seen[rank] = cases.run_round(layer, inputs[rank])

    called, waits, calls = Event(), Event(), [0] * 4
    interrupt(monkeypatch, before, lambda _: None)
    case = Case(name="together", tokens=(3,) * 4, left_out=(0, 1))
    inputs, seen = cases.make_inputs(case), dict[int, Seen]()
    together(4, body, timeout_s=60.0)
    for rank in (2, 3):
        _check(case, inputs, rank, seen[rank])


def test_entries_that_change_after_a_meeting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that calls again writes its mask before its number. The host takes no such entry."""

    def before(meeting: Any, _number: int) -> None:
        entry_of(meeting, 1 - meeting._workspace.group.rank)[0] = 0b11

    def after(meeting: Any) -> None:
        is_torn[meeting._workspace.group.rank] = True
        entry_of(meeting, 1 - meeting._workspace.group.rank)[0] = 1

    def body(layer: MoeAllToAll, rank: int) -> None:
        cases.run_round(layer, inputs[rank])
        if rank < 2:
            layer.mask(2)
            cases.run_round(layer, inputs[rank])

    is_torn = [False] * 3
    interrupt(monkeypatch, before, after)
    inputs = cases.make_inputs(Case(name="together", tokens=(3,) * 3))
    together(3, body)
    assert is_torn == [True, True, False]


def together(size: int, body: Callable[[MoeAllToAll, int], None], **values: Any) -> None:
    """`body` on ranks that are threads, with a layer each."""
    case = Case(name="together", tokens=(3,) * size, **values)

    def rank_main(group: ThreadGroup) -> None:
        config = dataclasses.replace(case.config(group.rank), first_timeout_s=case.timeout_s)
        with MoeAllToAll.create(config, group) as layer:
            body(layer, group.rank)
            group.all_gather_object(None)

    run_ranks(size, rank_main)


def check_that_ranks_go_on(timeout_s: float) -> None:
    """In the simplest case: the last rank ends after a round."""

    def body(layer: MoeAllToAll, rank: int) -> None:
        cases.run_round(layer, inputs[rank])
        if rank < 2:
            layer.mask(2)
            seen[rank] = cases.run_round(layer, inputs[rank])

    case = Case(name="together", tokens=(3,) * 3, left_out=(2,))
    inputs, seen = cases.make_inputs(case), dict[int, Seen]()
    together(3, body, timeout_s=timeout_s)
    for rank in range(2):
        _check(case, inputs, rank, seen[rank])


def test_counts_per_expert_begin_anew() -> None:
    """A broken round leaves numbers where ids are counted and where counts arrive."""

    def body(layer: MoeAllToAll, rank: int) -> None:
        cases.run_round(layer, inputs[rank])
        if rank == 2:
            return
        workspace, channel = layer._layer.workspace, layer._layer.channel(0)
        for name in ("expert_counters", "expert_counts_staging"):
            workspace.region_bytes(channel.regions[name]).fill_(1)
        layer.mask(2)
        staging = workspace.region_bytes(channel.regions["expert_counts_staging"]).view(3, -1)
        assert not staging[2].any(), "where nobody writes any more"
        received = cases.dispatch(layer, inputs[rank])
        assert received.expert_counts is not None
        found[rank] = received.expert_counts.clone()
        layer.combine(layer.combine_input().zero_(), received.metadata)

    values: dict[str, Any] = {"num_experts": 6, "num_expert_counts": 6}
    case = Case(name="together", tokens=(3,) * 3, left_out=(2,), **values)
    inputs, found = cases.make_inputs(case), dict[int, torch.Tensor]()
    together(3, body, **values)
    ids = [mine.topk_ids for mine in inputs]
    expected = reference.expert_counts(case.config(0), ids, active_ranks=(0, 1))
    for rank in range(2):
        assert torch.equal(found[rank], expected)


def test_ranks_that_may_not_be_left_out() -> None:
    def body(layer: MoeAllToAll, rank: int) -> None:
        # The bool equals the other rank.
        others: tuple[Any, ...] = (bool(1 - rank), [1 - rank], (1 - rank,))
        for wrong in (rank, -1, 2, *others):
            message = re.escape(f"rank {wrong} cannot be left out: name ranks of")
            with pytest.raises(InputError, match=message):
                layer.mask(wrong)
        cases.run_round(layer, inputs[rank])

    inputs = cases.make_inputs(Case(name="together", tokens=(3, 3)))
    together(2, body)


def test_ranks_that_leave_out_different_ranks() -> None:
    """Both say so; a second call in which they agree is good."""

    def body(layer: MoeAllToAll, rank: int) -> None:
        if rank > 1:
            barrier.wait()
            return
        workspaces[rank] = layer._layer.workspace
        # A rank that waits for a third one does not see that its peer has gone on: rank 0 is first.
        while rank == 1 and (0 not in workspaces or workspaces[0].meetings == 0):
            time.sleep(0.001)
        with pytest.raises(DisagreementError) as caught:
            layer.mask(*((2, 3), (3,))[rank])
        barrier.wait()  # rank 1 has waited for rank 2
        ranks = ([0, 1], [0, 1, 2])
        assert f"goes on with ranks {ranks[1 - rank]}, rank {rank} with" in str(caught.value)
        with pytest.raises(ExchangeStateError, match="mask.. has not come to its end"):
            cases.dispatch(layer, inputs[rank])
        layer.mask(2, 3)
        cases.run_round(layer, inputs[rank])

    inputs = cases.make_inputs(Case(name="together", tokens=(3,) * 4))
    barrier, workspaces = Barrier(4, timeout=60), dict[int, Any]()
    together(4, body, timeout_s=2.0)


def test_a_rank_that_does_not_come_to_the_meeting() -> None:
    def body(layer: MoeAllToAll, rank: int) -> None:
        if rank > 0:
            return
        with pytest.raises(ExchangeTimeoutError) as caught:
            layer.mask(2)
        assert (caught.value.phase, caught.value.ranks) == ("mask", (1,))
        layer.mask(1, 2)  # alone from now on, for both have died
        cases.run_round(layer, inputs[rank])

    inputs = cases.make_inputs(Case(name="together", tokens=(3,) * 3))
    together(3, body, timeout_s=0.3)


def test_metadata_of_the_broken_round_is_refused() -> None:
    def body(layer: MoeAllToAll, rank: int) -> None:
        received = cases.dispatch(layer, inputs[rank])
        if rank == 2:
            return
        layer.mask(2)
        with pytest.raises(ExchangeStateError, match="combine without dispatch"):
            layer.combine(layer.combine_input(), received.metadata)
        cases.run_round(layer, inputs[rank])

    inputs = cases.make_inputs(Case(name="together", tokens=(3,) * 3))
    together(3, body)


def missed(in_vain: tuple[int, ...], rank: int) -> set[int]:
    """Whom a rank names after these calls: who has not come since its own last one; else all."""
    numbers = {caller: 2 * index + 1 for index, caller in enumerate(in_vain)}
    own_last, others = numbers.get(rank, 0), {0, 1, 2} - {rank}
    return {other for other in others if numbers.get(other, 0) <= own_last} or others


@pytest.mark.parametrize(
    "in_vain",
    [(0, 1), (1, 0), (0, 0, 0, 1), (1, 1, 1, 0), (0, 1, 2), (2, 2, 1)],
    ids=lambda turns: "".join(map(str, turns)),
)
def test_survivors_whose_calls_were_in_vain(
    in_vain: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They call in this order, each alone. However many calls a rank has behind it, all of them
    meet as soon as all of them call.
    """

    def before(meeting: Any, number: int) -> None:
        rank = meeting._workspace.group.rank
        if hasty[rank]:
            meeting._args.timeout_ns = 1000
            numbers.append(number)

    def body(layer: MoeAllToAll, rank: int) -> None:
        workspaces[rank] = layer._layer.workspace
        for index, turn in enumerate(in_vain):
            barrier.wait()
            if turn == rank:
                hasty[rank] = True
                with pytest.raises(ExchangeTimeoutError, match="again on every rank") as caught:
                    layer.mask(3)
                assert set(caught.value.ranks) == missed(in_vain[:index], rank)
                hasty[rank] = False
        barrier.wait()
        if rank == 3:
            return
        layer.mask(3)
        seen[rank] = cases.run_round(layer, inputs[rank])

    interrupt(monkeypatch, before, lambda _: None)
    case = Case(name="together", tokens=(3,) * 4, left_out=(3,))
    inputs, seen = cases.make_inputs(case), dict[int, Seen]()
    barrier, workspaces = Barrier(4, timeout=60), dict[int, Any]()
    hasty, numbers = [False] * 4, list[int]()
    together(4, body, timeout_s=60.0)
    assert numbers == list(range(1, 2 * len(in_vain), 2)), "each later one has seen the earlier"
    assert len({workspaces[rank].meetings for rank in range(3)}) == 1
    for rank in range(3):
        assert not workspaces[rank].has_met_in_vain
        _check(case, inputs, rank, seen[rank])


def test_a_call_that_ends_well_on_one_rank_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 gives up in the second meeting; rank 0 comes then, and finds that rank 1 was there.

    Rank 0 learns of it in its next round, which fails. It calls again while rank 1 waits.
    """

    def before(meeting: Any, number: int) -> None:
        rank = meeting._workspace.group.rank
        if number % 2 == 1 or has_given_up.is_set():
            return
        if rank == 1:
            assert has_left_first.wait(60)  # or rank 0 meets rank 1's next call there
            meeting._args.timeout_ns = 1000
        else:
            has_left_first.set()
            assert has_given_up.wait(60)

    def body(layer: MoeAllToAll, rank: int) -> None:
        if rank == 2:
            return
        workspace = workspaces[rank] = layer._layer.workspace
        if rank == 1:
            with pytest.raises(ExchangeTimeoutError, match="again on every rank") as caught:
                layer.mask(2)
            assert caught.value.epoch is not None
            assert caught.value.epoch % 2 == 0, "not the second meeting"
            has_given_up.set()
        else:
            layer.mask(2)
        in_vain[rank] = workspace.has_met_in_vain
        layer.mask(2)
        seen[rank] = cases.run_round(layer, inputs[rank])

    interrupt(monkeypatch, before, lambda _: None)
    case = Case(name="together", tokens=(3,) * 3, left_out=(2,))
    inputs, seen = cases.make_inputs(case), dict[int, Seen]()
    has_left_first, has_given_up = Event(), Event()
    in_vain, workspaces = [False] * 2, dict[int, Any]()
    together(3, body, timeout_s=60.0)
    assert in_vain == [False, True]
    assert workspaces[0].meetings == workspaces[1].meetings
    for rank in range(2):
        _check(case, inputs, rank, seen[rank])


def test_a_rank_that_meets_what_another_has_left_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 is held up before its kernel until rank 0 has given up; it takes rank 0's old number.

    So it waits in a second meeting to which rank 0 never comes. Its next call finds rank 0.
    """

    def before(meeting: Any, number: int) -> None:
        if has_met.is_set():
            return
        if meeting._workspace.group.rank == 1:
            is_under_way.set()
            assert has_given_up.wait(60)
            if number == 1:
                return
            has_met.set()
        meeting._args.timeout_ns = 1000

    def body(layer: MoeAllToAll, rank: int) -> None:
        if rank == 2:
            return
        if rank == 0:
            assert is_under_way.wait(60)
        with pytest.raises(ExchangeTimeoutError) as caught:
            layer.mask(2)
        numbers[rank] = caught.value.epoch
        if rank == 0:
            has_given_up.set()
            assert has_met.wait(60)
        layer.mask(2)
        seen[rank] = cases.run_round(layer, inputs[rank])

    interrupt(monkeypatch, before, lambda _: None)
    case = Case(name="together", tokens=(3,) * 3, left_out=(2,))
    inputs, seen, numbers = cases.make_inputs(case), dict[int, Seen](), dict[int, int | None]()
    is_under_way, has_given_up, has_met = Event(), Event(), Event()
    together(3, body, timeout_s=60.0)
    assert numbers == {0: 1, 1: 2}
    for rank in range(2):
        _check(case, inputs, rank, seen[rank])


@pytest.mark.parametrize("small", [False, True], ids=["bulk", "small"])
def test_a_launch_that_names_a_rank_that_has_gone(small: bool) -> None:
    """As a graph that was captured before, without the mask: it says so, and waits for nobody."""

    def body(layer: MoeAllToAll, rank: int) -> None:
        everybody = rank_mask(range(3), 3)
        cases.run_round(layer, inputs[rank], active_ranks=everybody)
        if rank == 2:
            return
        layer.mask(2)
        with pytest.raises(PeerError, match=r"took rank 2 .* but mask\(\) has left it out"):
            cases.dispatch(layer, inputs[rank], active_ranks=everybody)
        assert layer._layer.workspace.fault(0) >> 56 == constants()["kFaultAhead"]
        layer.mask()
        cases.run_round(layer, inputs[rank])

    inputs = cases.make_inputs(Case(name="together", tokens=(3,) * 3))
    together(3, body, small=small)


def test_the_tensor_that_graphs_capture() -> None:
    """It is one tensor from the first call on, and mask() changes its content."""

    def body(layer: MoeAllToAll, rank: int) -> None:
        mask = layer.active_ranks
        assert rank_masks.ranks_in(mask, 4) == [0, 1, 2, 3]
        for gone in range(3):
            if rank >= 4 - gone:
                return
            if gone:
                layer.mask(4 - gone)
            assert layer.active_ranks is mask
            assert rank_masks.ranks_in(mask, 4) == list(range(4 - gone))
            seen[gone][rank] = cases.run_round(layer, inputs[rank], active_ranks=mask)

    case = Case(name="together", tokens=(3,) * 4)
    inputs, seen = cases.make_inputs(case), tuple(dict[int, Seen]() for _ in range(3))
    together(4, body)
    for gone, of_round in enumerate(seen):
        masked = dataclasses.replace(case, left_out=tuple(range(4 - gone, 4)))
        assert len(of_round) == 4 - gone
        for rank, mine in of_round.items():
            _check(masked, inputs, rank, mine)


def test_no_layer_is_added_after_a_death() -> None:
    """Not by way of the group, in which the dead rank would be waited for."""

    def body(layer: MoeAllToAll, rank: int) -> None:
        if rank == 2:
            return
        layer.mask(2)
        with pytest.raises(ExchangeStateError, match=r"mask\(\) has left out rank\(s\) 2 of"):
            MoeAllToAll.create(layer.config, no_group, share_with=layer)
        cases.run_round(layer, inputs[rank])

    no_group = object()
    inputs = cases.make_inputs(Case(name="together", tokens=(3,) * 3))
    together(3, body)
