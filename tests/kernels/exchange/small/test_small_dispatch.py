"""Rounds of small batches on CPU ranks: the bits of the reference, and so of the bulk dispatch, the
order of slots, staging that is left clean, and rounds of both kinds on one workspace.
"""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import random
import threading
import time
from typing import Any

import pytest
import torch

from moe_nvlink_plugin import Dispatched, MoeAllToAll
from moe_nvlink_plugin.errors import ExchangeTimeoutError
from moe_nvlink_plugin.exchange.kernels import LAYER
from moe_nvlink_plugin.exchange.sizes import staged_bytes
from moe_nvlink_plugin.jit import host
from moe_nvlink_plugin.jit.header import constants, structs
from moe_nvlink_plugin.testing import ThreadGroup, run_ranks
from moe_nvlink_plugin.verify import cases, compare
from moe_nvlink_plugin.verify.cases import Case, Inputs, Seen
from tests.kernels.exchange.test_rounds import check_rounds, poisoned_round, sometimes
from tests.support import case_list, delays, emulated
from tests.support.delays import replace_once
from tests.support.emulated import varying_inputs


def small(case: Case) -> Case:
    return dataclasses.replace(case, small=True)


def fitting(all_cases: tuple[Case, ...]) -> tuple[Case, ...]:
    """Those which the kernels for small batches take."""
    most = constants()["kMaxSmallTokens"]
    return tuple(
        case
        for case in all_cases
        if case.capacity <= most and cases.is_small(small(case).config(0))
    )


FITTING = fitting(case_list.CASES)

#: Packed rows of several parts: of 256 units of 14 bytes.
LONG = Case(name="three parts", tokens=(5, 0, 8), hidden_size=2048, top_k=3)
#: Some ranks own two experts, the others one.
MANY = Case(name="64 ranks", tokens=(2, 0, 1, 3) * 16, num_experts=69, top_k=6)
OWN_CASES = (
    LONG,
    *(
        Case(name=f"{888 + words} words", tokens=(5, 0, 8), hidden_size=888 + words, top_k=3)
        for words in (-1, 0, 1, 4, 7)  # less, as much and more than a part, with ids and weights
    ),
    MANY,
    dataclasses.replace(
        LONG,
        name="extras over the bounds of parts",
        extras=((torch.uint8, (3004,)), (torch.uint8, (8,)), (torch.int16, (1602,))),
    ),
    Case(name="64 tokens", tokens=(64, 1, 0, 63), capacity=64, routing="invalid", top_k=8),
)
IDS_CASES = tuple(
    dataclasses.replace(case, name=f"{case.name}, {ids} ids", received_ids=ids)
    for case, ids in zip(FITTING, ("elsewhere", "local", -1, 5) * len(FITTING), strict=False)
)
ALL_CASES = (*FITTING, *OWN_CASES, *IDS_CASES, *fitting(case_list.RECIPE_CASES))


@pytest.mark.parametrize("case", ALL_CASES, ids=lambda case: case.name)
def test_as_the_reference(case: Case) -> None:
    """Which the kernels for large batches are held to as well (test_exchange.py)."""
    case_list.check_case(small(case))


@pytest.mark.long
def test_the_most_ranks() -> None:
    """In ordinary memory: so many ranks of one process would need too many mappings."""
    many = dataclasses.replace(MANY, tokens=(2, 0, 1, 3) * 32, num_experts=131)
    emulated.check_case("cpu", small(many))


def staging(layer: MoeAllToAll) -> bytes:
    """This rank's staging of dispatch, as long as the layer's rows take."""
    args = layer._layer.channel(0)._dispatch_args
    geometry = args.geometry
    first = args.window_base + geometry.ep_rank * args.rank_stride + 256 * args.staging_region
    rows = geometry.ep_size * geometry.max_tokens_per_rank
    return ctypes.string_at(first, rows * staged_bytes(args.packed_bytes, 14))


NARROW = small(Case(name="narrow", tokens=(0, 0, 0), num_experts=7, top_k=2, hidden_size=33))
#: Layers of one workspace: two for small batches, of different geometry, one for others, and one
#: that is dispatched as a small batch and pulled.
TURNS = (
    NARROW,
    Case(name="bulk", tokens=(0, 0, 0), num_experts=12, top_k=5, hidden_size=70, capacity=9),
    small(Case(name="wide", tokens=(0, 0, 0), num_experts=9, top_k=4, hidden_size=1700)),
    dataclasses.replace(cases.with_formats(NARROW, None, "fp8_block"), name="quantised back"),
)


#: Those whose combine reads rows in its peers' memory.
PULLED = (1, 3)


def left_by_combine(layer: MoeAllToAll) -> tuple[int, bool]:
    """What the next dispatch must know: the epoch, and whether rows were read at the peers."""
    args = layer._layer.channel(0)._dispatch_args
    place = args.window_base + args.geometry.ep_rank * args.rank_stride + 256 * args.control.local
    local: Any = structs()["LocalControl"]
    control = local.from_address(place)
    return control.combined_epoch, bool(control.has_pulled)


class CheckedLayer:
    """A layer whose dispatch leaves no unit: until this rank's combine nobody may send more."""

    def __init__(self, layer: MoeAllToAll) -> None:
        self.layer = layer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layer, name)

    def dispatch(self, *arguments: Any) -> Dispatched:
        received = self.layer.dispatch(*arguments)
        assert not any(staging(self.layer)), "dispatch has left a unit"
        return received


def check_turns(rounds: int = 60) -> None:
    """Layers in an irregular order, every buffer poisoned, ranks delayed."""
    choose = random.Random(1)
    order = [choose.randrange(len(TURNS)) for _ in range(rounds)]
    assert len(set(itertools.pairwise(order))) == len(TURNS) ** 2, "each after each"
    inputs = [varying_inputs(case, rounds) for case in TURNS]

    def rank_main(group: ThreadGroup) -> list[Seen]:
        delay = sometimes(group.rank)
        layers: list[MoeAllToAll] = []
        for case in TURNS:
            first = layers[0] if layers else None
            layers.append(MoeAllToAll.create(case.config(group.rank), group, share_with=first))
        seen = []
        for number, turn in enumerate(order):
            layer: Any = CheckedLayer(layers[turn]) if TURNS[turn].small else layers[turn]
            seen.append(poisoned_round(layer, inputs[turn][number][group.rank], delay))
            assert left_by_combine(layers[turn]) == (number + 1, turn in PULLED)
        for layer in layers:
            layer.close()
        return seen

    by_rank = run_ranks(3, rank_main)
    for number, turn in enumerate(order):
        check_rounds(TURNS[turn], [inputs[turn][number]], [[seen[number]] for seen in by_rank])


#: Lines of the small combine: before it sends, signals and receives.
PLACES = (
    "  if (role.sends()) send_rows<",
    "    publish_combined<",
    "  int token = share / plan.parts;\n",
)


def slow_by_turns() -> host.HostLibrary:
    """Rank 1 sleeps in each of its small combines, at one of the places after the other."""
    text = LAYER.host_source()
    for number, line in enumerate(PLACES):
        sleep = (
            f"  static int calls = {number};\n"
            "  if (args.geometry.ep_rank == 1 && calls++ % 3 == 0) {\n"
            "    timespec time{0, 2000000};\n    nanosleep(&time, nullptr);\n  }\n"
        )
        text = replace_once(text, line, sleep + line)
    return host.HostLibrary(host.build(text, emulated.FLAGS_OF_DELAYED))


SLOW = {"random": delays.randomly_delayed, "by turns": slow_by_turns}


@pytest.mark.parametrize("slow", SLOW)
def test_rounds_of_both_kinds_take_turns(slow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    library = SLOW[slow]()
    monkeypatch.setattr(host, "load", lambda _text: library)
    check_turns()


def check_one_round(case: Case) -> None:
    inputs = cases.make_inputs(case)
    (seen,) = case_list.run_case(small(case), rounds=1)
    compare.check_slots(case, inputs, seen)
    compare.check_received(case, inputs, seen)


# P12: a rank that is still in its round, and that no other rank waits for in combine.

SETTLED = Case(name="settled", tokens=(2, 2), num_experts=4, top_k=1, capacity=4)


def own_experts(case: Case, rank: int) -> Inputs:
    """Tokens that stay on their rank."""
    inputs = cases.make_inputs(case)[rank]
    return inputs._replace(topk_ids=torch.full_like(inputs.topk_ids, 2 * rank))


def check_nobody_overtakes(kind: bool, patience_s: float) -> None:
    """Rank 0 may not dispatch a batch of this kind before rank 1 has signalled its combine."""
    first, then = small(SETTLED), dataclasses.replace(SETTLED, small=kind, hidden_size=40)
    has_received = threading.Event()

    def rank_main(group: ThreadGroup) -> bool:
        layer = MoeAllToAll.create(first.config(group.rank), group)
        other = MoeAllToAll.create(then.config(group.rank), group, share_with=layer)
        mine = own_experts(first, group.rank)
        received = layer.dispatch(*mine)
        overtaken = False
        if group.rank == 0:
            # Without it the mistake may show in another way: as a rank that is ahead in dispatch.
            assert has_received.wait(60)
        else:
            has_received.set()
            args = layer._layer.channel(0)._dispatch_args
            cells = args.window_base + args.rank_stride + 256 * args.control.dispatch_cells
            until = time.monotonic() + patience_s
            while time.monotonic() < until and not overtaken:
                cell = int.from_bytes(ctypes.string_at(cells, 4), "little")
                overtaken = cell == 2
                time.sleep(0.001)
        rows = received.hidden_states
        compare.assert_same_bits(
            layer.combine(rows, received.metadata), mine.hidden_states, f"rank {group.rank}"
        )
        again = other.dispatch(*own_experts(then, group.rank))
        other.combine(again.hidden_states, again.metadata)
        other.close()
        layer.close()
        return overtaken

    assert not any(run_ranks(2, rank_main))


@pytest.mark.parametrize("kind", [True, False], ids=["small", "bulk"])
def test_nobody_dispatches_into_a_round_that_has_not_ended(kind: bool) -> None:
    check_nobody_overtakes(kind, 0.2)


# Ranks that are missing, or that do something else.


MISSING = small(Case(name="missing", tokens=(3, 2, 1), num_experts=6, top_k=1, timeout_s=1.0))


@pytest.mark.parametrize("verb", ["dispatch", "combine"])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_rank_that_does_not_come(num_threads: int, verb: str) -> None:
    """No rank has a row there, so the others notice a combine in the next dispatch, and name it."""
    case = dataclasses.replace(MISSING, num_threads=num_threads)

    def rank_main(group: ThreadGroup) -> tuple[str, tuple[int, ...], int] | None:
        mine, found = own_experts(case, group.rank), None
        with MoeAllToAll.create(case.config(group.rank), group) as layer:
            try:
                if group.rank != 2 or verb == "combine":
                    received = layer.dispatch(*mine)
                if group.rank != 2:
                    layer.combine(received.hidden_states, received.metadata)
                    layer.dispatch(*mine)
            except ExchangeTimeoutError as error:
                found = error.phase, tuple(error.ranks), error.epoch
            group.all_gather_object(None)  # no rank leaves before all have come to their end
        return found

    named = (verb, (2,), 1)
    assert run_ranks(case.ep_size, rank_main) == [named, named, None]


@pytest.mark.parametrize("kind", [True, False], ids=["small", "bulk"])
@pytest.mark.parametrize("ctas", [1, 3])
def test_a_dispatch_that_is_repeated_without_its_combine(ctas: int, kind: bool) -> None:
    """The host refuses it, so the kernel's own look at it is what is run here."""
    emulated.check_repeated_dispatch("cpu", small=kind, ctas=ctas)


def test_a_cell_of_a_pull_that_is_older_than_half_of_all_epochs() -> None:
    emulated.check_stale_pulled_cell("cpu", ctas=2)
