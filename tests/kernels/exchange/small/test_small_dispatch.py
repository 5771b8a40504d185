"""Dispatch of small batches on CPU ranks: the bits of the reference and of the bulk dispatch, the
order of slots, staging that is left clean, and rounds of both kinds on one workspace.
"""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from moe_nvlink_plugin import Dispatched, MoeAllToAll
from moe_nvlink_plugin.errors import ExchangeTimeoutError
from moe_nvlink_plugin.exchange.kernels import LAYER, SMALL_COMBINE, SMALL_DISPATCH
from moe_nvlink_plugin.exchange.sizes import staged_bytes
from moe_nvlink_plugin.jit import host
from moe_nvlink_plugin.jit.header import constants
from moe_nvlink_plugin.launch.kernel import Family
from moe_nvlink_plugin.testing import ThreadGroup, run_ranks
from moe_nvlink_plugin.verify import cases, compare
from moe_nvlink_plugin.verify.cases import Case, Inputs, Seen
from tests.kernels.exchange.test_rounds import check_rounds, poisoned_round, sometimes
from tests.support import case_list, emulated
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


def both_kinds(case: Case) -> tuple[list[Seen], list[Seen]]:
    """The same round by the kernels for small batches, and by the others."""
    (with_units,) = case_list.run_case(small(case), rounds=1)
    (bulk,) = case_list.run_case(dataclasses.replace(case, num_threads=1), rounds=1)
    return with_units, bulk


@pytest.mark.parametrize("case", ALL_CASES, ids=lambda case: case.name)
def test_as_bulk(case: Case) -> None:
    """One thread of the bulk dispatch hands out slots in the order of tokens; this one always."""
    if case.num_channels > 1:
        case = dataclasses.replace(case, num_channels=1)
    with_units, bulk = both_kinds(case)
    for rank, (mine, other) in enumerate(zip(with_units, bulk, strict=True)):
        what = f"{case.name}, rank {rank}"
        compare.assert_same_bits(mine.recv_counts, other.recv_counts, f"{what}: counts")
        compare.assert_same_bits(mine.topk_ids, other.topk_ids, f"{what}: ids")
        compare.assert_same_bits(mine.send_slots, other.send_slots, f"{what}: slots")
        compare.assert_same_bits(mine.combined, other.combined, f"{what}: combined")
        for number, pair in enumerate(zip(mine.payloads, other.payloads, strict=True)):
            compare.assert_same_bits(*pair, f"{what}: payload {number}")


@pytest.mark.parametrize("case", [*FITTING, *OWN_CASES], ids=lambda case: case.name)
def test_as_the_reference(case: Case) -> None:
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


#: Layers of one workspace: two for small batches, of different geometry, and one for others.
TURNS = (
    small(Case(name="narrow", tokens=(0, 0, 0), num_experts=7, top_k=2, hidden_size=33)),
    Case(name="bulk", tokens=(0, 0, 0), num_experts=12, top_k=5, hidden_size=70, capacity=9),
    small(Case(name="wide", tokens=(0, 0, 0), num_experts=9, top_k=4, hidden_size=1700)),
)


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


def check_turns(rounds: int) -> None:
    """Layers in an irregular order, every buffer poisoned, ranks delayed."""
    choose = random.Random(3)
    order = [choose.randrange(len(TURNS)) for _ in range(rounds)]
    assert {(a, b) for a, b in itertools.pairwise(order)} >= {(0, 1), (1, 0), (0, 2)}
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
        for layer in layers:
            layer.close()
        return seen

    by_rank = run_ranks(3, rank_main)
    for number, turn in enumerate(order):
        check_rounds(TURNS[turn], [inputs[turn][number]], [[seen[number]] for seen in by_rank])


def test_rounds_of_both_kinds_take_turns() -> None:
    check_turns(60)


# What a kernel with a mistake in it does.


class SomeKernels(host.HostLibrary):
    """A library without kernels that layers load and a test does not launch."""

    def kernel(self, name: str, struct: type[ctypes.Structure]) -> Callable[[Any, int], None]:
        try:
            return super().kernel(name, struct)
        except AttributeError:
            return lambda _args, _grid: pytest.fail(f"launches {name}, which is not compiled")


#: All that rounds of small batches launch.
SMALL_KERNELS = Family("", (SMALL_DISPATCH, SMALL_COMBINE))


def broken(
    monkeypatch: pytest.MonkeyPatch, line: str, instead: str, kernels: Family = SMALL_KERNELS
) -> None:
    text = replace_once(kernels.host_source(), line, instead)
    library = SomeKernels(host.build(text, (*host.FLAGS, "-O0")))
    monkeypatch.setattr(host, "load", lambda _text: library)


def test_a_unit_that_is_not_cleared_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch, "      clear_unit<Unit>(units + i * kUnitBytes);\n", "", LAYER)
    with pytest.raises(Exception, match="has left a unit"):
        check_turns(40)


MUTANTS = {
    "slots": ("counts[turn] && tokens[turn].has", "counts[turn] && !tokens[turn].has"),
    "parts": ("kPartBytes<Unit> + chunk", "kPartBytes<Unit> * 2 + chunk"),
    "ids": ("const bool keeps = received.keeps(args, id);", "const bool keeps = true;"),
    "empty": ("int word = filled + column", "int word = filled + 1 + column"),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mistake_is_noticed(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = dataclasses.replace(LONG, received_ids="elsewhere", tokens=(5, 3, 2), timeout_s=2.0)
    broken(monkeypatch, *MUTANTS[mutant])
    with pytest.raises((AssertionError, ExchangeTimeoutError)):
        check_one_round(case)


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


def is_overtaken(then: Case, patience_s: float) -> bool:
    """Whether rank 0 dispatches again, as `then` says, before rank 1 has signalled its combine."""
    first = small(SETTLED)
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

    return any(run_ranks(2, rank_main))


@pytest.mark.parametrize("kind", [True, False], ids=["small", "bulk"])
def test_nobody_dispatches_into_a_round_that_has_not_ended(kind: bool) -> None:
    assert not is_overtaken(dataclasses.replace(SETTLED, small=kind, hidden_size=40), 0.2)


@pytest.mark.parametrize("kind", [True, False], ids=["small", "bulk"])
def test_a_rank_that_overtakes_is_noticed(kind: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """P12 away."""
    wait = "  while (!has_reached(seen = load_acquire_sys(cell), epoch, most_ahead)) {"
    broken(monkeypatch, wait, "  while (false) {", SMALL_KERNELS if kind else LAYER)
    then = dataclasses.replace(SETTLED, small=kind, hidden_size=40)
    assert is_overtaken(then, 30.0)


# Ranks that are missing, or that do something else.


#: Phase, ranks and epoch that an error names.
Named = tuple[str, tuple[int, ...], int]


def errors_of(case: Case, body: Callable[[ThreadGroup, MoeAllToAll], object]) -> list[Named | None]:
    """What each rank's body reports. No rank leaves before all have come to their end."""

    def rank_main(group: ThreadGroup) -> Named | None:
        with MoeAllToAll.create(case.config(group.rank), group) as layer:
            found = None
            try:
                body(group, layer)
            except ExchangeTimeoutError as error:
                found = error.phase, tuple(error.ranks), error.epoch
            group.all_gather_object(None)
            return found

    return run_ranks(case.ep_size, rank_main)


MISSING = small(Case(name="missing", tokens=(3, 2, 1), num_experts=6, top_k=1, timeout_s=1.0))


@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_rank_that_does_not_dispatch(num_threads: int) -> None:
    case = dataclasses.replace(MISSING, num_threads=num_threads)
    inputs = cases.make_inputs(case)

    def body(group: ThreadGroup, layer: MoeAllToAll) -> None:
        if group.rank != 2:
            layer.dispatch(*inputs[group.rank])

    named = ("dispatch", (2,), 1)
    assert errors_of(case, body) == [named, named, None]


@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_rank_that_does_not_combine(num_threads: int) -> None:
    """No rank has a row there, so the others notice in the next dispatch, and name the combine."""
    case = dataclasses.replace(MISSING, num_threads=num_threads)

    def body(group: ThreadGroup, layer: MoeAllToAll) -> None:
        mine = own_experts(case, group.rank)
        received = layer.dispatch(*mine)
        if group.rank == 2:
            return
        layer.combine(received.hidden_states, received.metadata)
        layer.dispatch(*mine)

    named = ("combine", (2,), 1)
    assert errors_of(case, body) == [named, named, None]


@pytest.mark.parametrize("kind", [True, False], ids=["small", "bulk"])
@pytest.mark.parametrize("ctas", [1, 3])
def test_a_dispatch_that_is_repeated_without_its_combine(ctas: int, kind: bool) -> None:
    """The host refuses it, so the kernel's own look at it is what is run here."""
    emulated.check_repeated_dispatch("cpu", small=kind, ctas=ctas)


def test_a_cell_of_a_pull_that_is_older_than_half_of_all_epochs() -> None:
    emulated.check_stale_pulled_cell("cpu", ctas=2)
