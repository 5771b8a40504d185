"""Rounds that leave ranks out, on CPU ranks: the bits of the reference, and no wait for them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch

from moe_nvlink_plugin import MoeAllToAll, rank_mask, reference
from moe_nvlink_plugin.errors import (
    ConfigError,
    DisagreementError,
    ExchangeStateError,
    ExchangeTimeoutError,
    InputError,
)
from moe_nvlink_plugin.exchange import checks
from moe_nvlink_plugin.jit import host
from moe_nvlink_plugin.jit.header import structs
from moe_nvlink_plugin.memory.startup import Timeouts
from moe_nvlink_plugin.testing import ThreadGroup, run_ranks, try_ranks
from moe_nvlink_plugin.verify import cases, compare
from moe_nvlink_plugin.verify.cases import Case, Inputs, Seen
from tests.support import case_list, delays, emulated
from tests.support.long_tests import first_of

both_kinds = pytest.mark.parametrize("small", [False, True], ids=["bulk", "small"])

FIVE = Case(
    name="five ranks",
    tokens=(8, 0, 5, 7, 3),
    num_experts=12,
    top_k=5,
    routing="invalid",
    extras=((torch.uint8, (8,)),),
    left_out=(1, 3),
)
CASES = (
    FIVE,
    dataclasses.replace(FIVE, name="all but one are out", left_out=(0, 1, 2, 4)),
    dataclasses.replace(FIVE, name="duplicates", routing="duplicates", num_threads=3),
    dataclasses.replace(FIVE, name="int64 ids", ids_dtype=torch.int64, tokens=(2, 8, 8, 0, 1)),
    dataclasses.replace(FIVE, name="elsewhere", received_ids="elsewhere"),
    dataclasses.replace(FIVE, name="local ids", received_ids="local", num_threads=2),
    dataclasses.replace(FIVE, name="a given id", received_ids=5),
)
RECIPE_CASES = tuple(
    cases.with_formats(dataclasses.replace(FIVE, dtype=torch.bfloat16), recipe, combine)
    for recipe, combine in (
        (None, "fp8_block"),
        ("fp8_block", "nvfp4"),
        ("fp8_token", "bf16"),
        ("fp8_tensor", "fp8_block"),
        ("mxfp8", "bf16"),
        ("nvfp4", "nvfp4"),
    )
)


@both_kinds
@pytest.mark.parametrize("case", [*CASES, *RECIPE_CASES], ids=lambda case: case.name)
def test_as_the_reference(case: Case, small: bool) -> None:
    case_list.check_case(dataclasses.replace(case, small=small))


@pytest.mark.parametrize("left_out", [(), (1, 3)], ids=["all", "masked"])
@pytest.mark.parametrize("recipe", [None, "fp8_token"])
def test_bulk_dispatch_and_small_combine_in_one_round(
    recipe: str | None, left_out: tuple[int, ...]
) -> None:
    """An extra payload of 5 bytes is no whole words; combine moves other rows."""
    odd = dataclasses.replace(
        FIVE, dtype=torch.bfloat16, extras=((torch.uint8, (5,)),), left_out=left_out, small=True
    )
    case = cases.with_formats(odd, recipe, "bf16")
    assert not cases.is_small(case.config(0))
    assert cases.is_small(case.config(0), "combine")
    case_list.check_case(case, rounds=3)
    emulated.check_case("cpu", case)


@both_kinds
def test_a_mask_of_two_words(small: bool) -> None:
    """In ordinary memory, as the other tests of many ranks."""
    tokens = (2, 0, 1, 3) * 18
    case = Case(name="72 ranks", tokens=tokens, num_experts=80, top_k=6, left_out=(3, 64, 70))
    emulated.check_case("cpu", dataclasses.replace(case, small=small), rounds=1)


def test_a_mask_of_all_ranks_is_none() -> None:
    """In tag, too: a rank with such a mask agrees with one that has none."""
    case = Case(name="all", tokens=(3, 4))

    def rank_main(group: ThreadGroup) -> Seen:
        mask = rank_mask(range(2), 2) if group.rank == 0 else None
        with MoeAllToAll.create(case.config(group.rank), group) as layer:
            return cases.run_round(layer, inputs[group.rank], active_ranks=mask)

    inputs = cases.make_inputs(case)
    seen = run_ranks(2, rank_main)
    compare.check_received(case, inputs, seen)
    compare.check_combined(case, inputs, seen)


# A rank that is gone.


class Rounds(NamedTuple):
    """One rank's rounds until it went, and whether its workspace stayed as it was from then on."""

    seen: list[Seen]
    untouched: bool


def _rounds_that_lose_ranks(
    case: Case, inputs: Sequence[Sequence[Inputs]], lost: Sequence[int]
) -> list[Rounds]:
    """After each round the next rank of `lost` goes.

    The mask is one tensor whose content changes, as it does under a CUDA graph.
    """

    def rank_main(group: ThreadGroup) -> Rounds:
        mask = rank_mask(range(case.ep_size), case.ep_size)
        seen: list[Seen] = []
        with MoeAllToAll.create(case.config(group.rank), group) as layer:
            workspace = layer._layer.workspace
            regions = workspace.layout.channel_regions(0).values()
            memory = [workspace.region_bytes(region) for region in regions]
            copies = memory
            for number, of_round in enumerate(inputs):
                gone = lost[:number]
                mask.copy_(rank_mask(set(range(case.ep_size)) - set(gone), case.ep_size))
                if group.rank not in gone:
                    seen.append(cases.run_round(layer, of_round[group.rank], active_ranks=mask))
                elif copies is memory:
                    copies = [region.clone() for region in memory]
                group.all_gather_object(None)  # the round's last signals have arrived
            same = all(map(torch.equal, memory, copies))
        return Rounds(seen, same)

    return run_ranks(case.ep_size, rank_main)


def check_ranks_that_go(combine: str, **values: Any) -> None:
    """They never call again, and nobody touches their memory."""
    case = cases.with_formats(Case(name="going", tokens=(0,) * 4, top_k=3), None, combine)
    case = dataclasses.replace(case, dtype=torch.bfloat16, **values)
    lost = [2, 0]
    tokens = [(5, 3, 8, 2), (4, 8, 0, 8), (0, 7, 0, 1)]
    inputs = [cases.make_inputs(case, tokens[number], seed=number) for number in range(3)]
    by_rank = _rounds_that_lose_ranks(case, inputs, lost)
    assert [len(rank.seen) for rank in by_rank] == [2, 3, 1, 3]
    assert all(rank.untouched for rank in by_rank)
    for number, of_round in enumerate(inputs):
        masked = dataclasses.replace(case, left_out=tuple(lost[:number]))
        seen = [
            rank.seen[number] if number < len(rank.seen) else compare.nothing(case, rank.seen[0])
            for rank in by_rank
        ]
        compare.check_slots(masked, of_round, seen)
        compare.check_received(masked, of_round, seen)
        compare.check_combined(masked, of_round, seen)


@pytest.mark.parametrize("combine", ["bf16", "fp8_block"])
@both_kinds
def test_ranks_that_go(small: bool, combine: str) -> None:
    check_ranks_that_go(combine, small=small)


@both_kinds
def test_counters(small: bool) -> None:
    """Rows for a rank that is left out are not counted, because they do not travel."""
    case = Case(name="counters", tokens=(8, 5, 7), left_out=(1,), small=small)
    inputs = cases.make_inputs(case)
    active = cases.among_active(case, inputs)

    def rank_main(group: ThreadGroup) -> int:
        with MoeAllToAll.create(case.config(group.rank), group) as layer:
            mask = case.mask(group.rank)
            cases.run_round(layer, inputs[group.rank], active_ranks=mask)
            stats = layer.stats()
            row_bytes = case.hidden_size * case.dtype.itemsize
            assert stats.bytes_combined == stats.destinations * row_bytes
            return stats.destinations

    ids = [mine.topk_ids for mine in active]
    rows = reference.dispatch(case.config(0), ids, [[] for _ in ids])
    from_rank = [0] * 3
    for target in rows:
        for source, slice_of_source in enumerate(target):
            from_rank[source] += len(slice_of_source.tokens)
    assert run_ranks(3, rank_main) == from_rank


HELD_MS = 2000
LEAVING = Case(name="leaving", tokens=(8, 1, 3), top_k=8)


@pytest.mark.parametrize("combine", ["bf16", "fp8_block"])
@both_kinds
def test_a_rank_that_leaves_reads_its_rows(
    small: bool, combine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P14. Rank 0 is held in its last combine until the others have done a round without it.

    Their slices are smaller then, so with a format too their rows lie where rank 0 reads. They wait
    for rank 0, which goes on after HELD_MS.
    """
    library, hold = delays.held_reader(0, HELD_MS)
    monkeypatch.setattr(host, "load", lambda _text: library)
    case = dataclasses.replace(cases.with_formats(LEAVING, None, combine), dtype=torch.bfloat16)
    inputs, bound = cases.make_inputs(case), 4
    others = cases.make_inputs(case, (0, bound, bound), seed=1)

    def rank_main(group: ThreadGroup) -> Seen:
        config = case.config(group.rank)
        config = dataclasses.replace(config, small_tokens=bound if small else 0)
        mine = inputs[group.rank]
        with MoeAllToAll.create(config, group) as layer:
            cases.run_round(layer, mine)
            group.all_gather_object(None)
            if group.rank == 0:
                hold(case.ep_size - 1)
            group.all_gather_object(None)
            seen = cases.run_round(layer, mine)
            if group.rank > 0:
                mask = rank_mask((1, 2), 3)
                given = others[group.rank][:3]
                received = layer.dispatch(*given, max_tokens=bound, active_ranks=mask)
                rows = layer.combine_input(metadata=received.metadata).fill_(777.0)
                layer.combine(rows, received.metadata)
                hold(-1)
            group.all_gather_object(None)
        return seen

    compare.check_combined(case, inputs, run_ranks(3, rank_main))


@both_kinds
def test_a_rank_that_dies_in_its_last_combine(small: bool) -> None:
    """Nobody waits for it for ever, and not at all after mask()."""
    case = dataclasses.replace(LEAVING, tokens=(5, 4), capacity=8)
    inputs = cases.make_inputs(case)
    alone: dict[str, Any] = {"max_tokens": 4, "active_ranks": rank_mask((1,), 2)}

    def rank_main(group: ThreadGroup) -> None:
        config = dataclasses.replace(case.config(group.rank), small_tokens=4 if small else 0)
        with MoeAllToAll.create(config, group) as layer:
            cases.run_round(layer, inputs[group.rank])
            if group.rank == 0:
                read_epoch(layer).zero_()
            group.all_gather_object(None)
            if group.rank == 0:
                return
            layer._layer.channel(0)._timeouts = Timeouts(0.2, 0.2)
            with pytest.raises(ExchangeTimeoutError, match="in combine of epoch 1 for") as caught:
                layer.dispatch(*inputs[1][:3], **alone)
            error = caught.value
            assert (error.phase, error.ranks, error.epoch) == ("combine", (0,), 1)
            layer.mask(0)
            received = layer.dispatch(*inputs[1][:3], **alone)
            layer.combine(layer.combine_input(metadata=received.metadata), received.metadata)

    run_ranks(2, rank_main)


@pytest.mark.parametrize("ahead", first_of([1, 0, -1, 2, 2**31 - 5]))
@both_kinds
def test_the_last_word_of_a_leaver_may_be_old(small: bool, ahead: int) -> None:
    """Small combines leave it as it is, for however many rounds."""
    emulated.check_stale_end_of_reading("cpu", small=small, ahead=ahead, ctas=2)


def read_epoch(layer: MoeAllToAll) -> torch.Tensor:
    """The word by which a rank says that it has read its rows (P14)."""
    region = layer._layer.workspace.layout.channel_regions(0)["local"]
    place = structs()["LocalControl"].read_epoch.offset // 8
    return layer._layer.workspace.words(region, place + 1, torch.int64)[place:]


def test_ranks_that_may_not_leave() -> None:
    """Then a combine says nothing at its end, and a mask of the caller's is refused."""
    case = Case(name="staying", tokens=(3, 3))
    inputs = cases.make_inputs(case)

    def rank_main(group: ThreadGroup) -> None:
        config = dataclasses.replace(case.config(group.rank), ranks_may_leave=False)
        with MoeAllToAll.create(config, group) as layer:
            mine = inputs[group.rank]
            cases.run_round(layer, mine, active_ranks=layer.active_ranks)
            assert read_epoch(layer).item() == 0
            with pytest.raises(InputError, match="active_ranks is given, but ranks_may_leave=Fal"):
                cases.dispatch(layer, mine, active_ranks=rank_mask((0, 1), 2))
            cases.run_round(layer, mine)
            other = dataclasses.replace(config, ranks_may_leave=True)
            with pytest.raises(ConfigError, match="ranks_may_leave=True, but share_with has False"):
                MoeAllToAll.create(other, group, share_with=layer)

    run_ranks(2, rank_main)


@pytest.mark.parametrize("phase", ["dispatch", "combine"])
@both_kinds
def test_a_timeout_names_ranks_of_the_round_only(small: bool, phase: str) -> None:
    """Rank 1 is left out, rank 3 is late."""
    case = Case(name="late", tokens=(3, 3, 3, 3), timeout_s=2.0, small=small)
    inputs = cases.make_inputs(case)
    mask = rank_mask((0, 2, 3), 4)

    def rank_main(group: ThreadGroup) -> tuple[str, tuple[int, ...]]:
        named: tuple[str, tuple[int, ...]] = ("", ())
        with MoeAllToAll.create(case.config(group.rank), group) as layer:
            try:
                if group.rank in (0, 2) or (group.rank == 3 and phase == "combine"):
                    received = cases.dispatch(layer, inputs[group.rank], active_ranks=mask)
                if group.rank in (0, 2):
                    layer.combine(layer.combine_input().zero_(), received.metadata)
                    cases.dispatch(layer, inputs[group.rank], active_ranks=mask)
            except ExchangeTimeoutError as error:
                named = (error.phase, error.ranks)
            group.all_gather_object(None)
        return named

    assert run_ranks(4, rank_main) == [(phase, (3,)), ("", ()), (phase, (3,)), ("", ())]


# Masks that are wrong.


@both_kinds
def test_masks_that_differ(small: bool) -> None:
    """Ranks that name each other compare their masks."""
    case = Case(name="differ", tokens=(3, 3, 3), timeout_s=3.0, small=small)
    inputs = cases.make_inputs(case)

    def rank_main(group: ThreadGroup) -> None:
        ranks = (0, 1) if group.rank == 0 else (0, 1, 2)
        with MoeAllToAll.create(case.config(group.rank), group) as layer:
            if group.rank == 2:
                group.all_gather_object(None)
                return
            try:
                cases.dispatch(layer, inputs[group.rank], active_ranks=rank_mask(ranks, 3))
            finally:
                group.all_gather_object(None)

    zero, one, _two = try_ranks(3, rank_main)
    for error, other in ((zero, 1), (one, 0)):
        assert isinstance(error, DisagreementError), error
        assert f"rank {other} passed another max_tokens or active_ranks" in str(error)


def test_a_mask_without_oneself() -> None:
    case = Case(name="without oneself", tokens=(3, 3))
    inputs = cases.make_inputs(case)

    def rank_main(group: ThreadGroup) -> Seen:
        with MoeAllToAll.create(case.config(group.rank), group) as layer:
            mine, other = inputs[group.rank], 1 - group.rank
            with pytest.raises(InputError) as caught:
                cases.dispatch(layer, mine, active_ranks=rank_mask((other,), 2))
            said = f"active_ranks names ranks [{other}] of 0 to 1, but this is rank {group.rank};"
            assert said in str(caught.value)
            return cases.run_round(layer, mine)

    seen = run_ranks(2, rank_main)
    compare.check_combined(case, inputs, seen)


@both_kinds
def test_a_mask_without_oneself_that_only_the_kernel_sees(
    small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where a replayed launch takes what the tensor holds. Nothing is sent."""
    monkeypatch.setattr(checks, "names_itself", lambda *_: None)
    case = Case(name="unseen", tokens=(3, 3), timeout_s=20.0, small=small)
    inputs = cases.make_inputs(case)

    def rank_main(group: ThreadGroup) -> bool:
        with MoeAllToAll.create(case.config(group.rank), group) as layer:
            workspace = layer._layer.workspace
            regions = workspace.layout.channel_regions(0)
            payloads = [
                workspace.region_bytes(region)
                for name, region in regions.items()
                if name.startswith(("recv_hidden", "dispatch_")) or "cells" in name
            ]
            before = [region.clone() for region in payloads]
            with pytest.raises(InputError, match=f"left out rank {group.rank}, which is this"):
                cases.dispatch(layer, inputs[group.rank], active_ranks=rank_mask((), 2))
            with pytest.raises(ExchangeStateError, match="unusable since"):
                cases.dispatch(layer, inputs[group.rank])
            group.all_gather_object(None)
            return all(map(torch.equal, payloads, before))

    assert run_ranks(2, rank_main) == [True, True]
