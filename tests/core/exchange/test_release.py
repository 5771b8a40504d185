"""Memory that is released and mapped anew: rounds before and after it, and what is in between."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moe_nvlink_plugin import MoeAllToAll
from moe_nvlink_plugin.errors import (
    DisagreementError,
    ExchangeStateError,
    PeerError,
    TransportError,
    UnsupportedError,
)
from moe_nvlink_plugin.exchange.layer import find
from moe_nvlink_plugin.testing import ThreadGroup, run_ranks
from moe_nvlink_plugin.transport.host import HostMemory
from moe_nvlink_plugin.verify import cases
from moe_nvlink_plugin.verify.cases import Case, Seen
from tests.core.exchange.test_elastic import (
    PAIR,
    Meetings,
    all_right,
    at_stage,
    check_round,
    config_of,
    joined,
    right,
)
from tests.support.ranks import run_threads

PLACES = (0, 1)
CASE = Case(name="release", tokens=(5, 7), num_experts=6, top_k=3, timeout_s=20.0)
#: Of the one round of most tests.
MASKED, INPUTS = at_stage(CASE, 0, 0, PLACES)


def shared_mappings(layer: MoeAllToAll) -> int:
    """How many pieces of ranks' memory are mapped in the layer's window."""
    memory = layer._layer.workspace.memory
    window = range(memory.base_ptr, memory.base_ptr + memory.rank_stride * layer.config.ep_size)
    lines = Path("/proc/self/maps").read_text().splitlines()
    of_ranks = [line for line in lines if "/moe_nvlink-" in line]
    return sum(int(line.split("-")[0], 16) in window for line in of_ranks)


def refused(call: Callable[[], object]) -> str:
    with pytest.raises(ExchangeStateError) as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize(
    "case",
    [CASE, dataclasses.replace(CASE, small=True), dataclasses.replace(CASE, num_channels=2)],
    ids=["large", "small", "two channels"],
)
def test_rounds_go_on_with_the_same_layers(case: Case) -> None:
    """Twice, with a second release of what is released, on two layers of one workspace."""

    def rounds(layers: list[MoeAllToAll], stage: int) -> list[Seen]:
        inputs = at_stage(case, stage, 0, PLACES)[1]
        return [
            cases.run_round(layer, inputs[layer.config.ep_rank], channel=channel)
            for layer in layers
            for channel in range(case.num_channels)
        ]

    def body(group: ThreadGroup) -> list[list[Seen]]:
        first = MoeAllToAll.create(case.config(group.rank), group)
        layers = [first, MoeAllToAll.create(case.config(group.rank), group, share_with=first)]
        inputs = at_stage(case, 0, 0, PLACES)[1][group.rank]
        seen = [rounds(layers, 0)]
        for stage in (1, 2):
            before, rows = first.stats(), first.combine_input()
            address, mapped = rows.data_ptr(), shared_mappings(first)
            layers[1].release()
            assert (mapped > 0, shared_mappings(first)) == (True, 0)
            first.release()
            assert first.failure() is None
            assert first.stats() == first.stats(wait=False) == before
            assert not any(map(any, first.waits()))
            for call in (
                lambda: cases.dispatch(first, inputs),
                first.combine_input,
                first.fault_words,
                first.mask,
                lambda: first.leave(1 - group.rank),
            ):
                assert "has given it back; call renew() on all ranks" in refused(call)
            first.renew(group, PLACES)
            assert shared_mappings(first) == mapped
            assert first.combine_input() is rows
            assert (rows.data_ptr(), bool(rows.any())) == (address, False)
            assert first.stats() == before
            seen.append(rounds(layers, stage))
            assert first.stats().rounds == before.rounds // stage * (stage + 1)
        for layer in layers:
            layer.close()
        return seen

    lived = run_ranks(len(PLACES), body)
    for stage, of_stage in enumerate(zip(*lived, strict=True)):
        masked, inputs = at_stage(case, stage, 0, PLACES)
        for of_round in zip(*of_stage, strict=True):
            check_round(masked, inputs, dict(enumerate(of_round)))


def test_the_memory_comes_back_over_the_group_of_then() -> None:
    meet = Meetings()

    def body(place: int) -> Any:
        if place == 2:
            layer = joined(meet, 2)
        else:
            config = config_of(PAIR, place, (0, 1))
            layer = MoeAllToAll.create(config, meet("create", place, (0, 1)))
            right(layer, 0)
            layer.release()
            layer.renew(meet("join", place, (0, 1, 2)), (0, 1, 2))
        with layer:
            return right(layer, 1)

    all_right(1, (0, 1, 2), run_threads(3, body))


def test_released_layers_are_closed() -> None:
    def body(group: ThreadGroup) -> None:
        layer = MoeAllToAll.create(CASE.config(group.rank), group)
        cases.run_round(layer, INPUTS[group.rank])
        layer.release()
        layer.close()
        assert layer.stats().rounds == 1
        assert "is closed" in refused(layer.release)

    run_ranks(2, body)


def check_rounds_of(body: Callable[[ThreadGroup], Seen]) -> None:
    seen = run_ranks(2, body)
    check_round(MASKED, INPUTS, dict(enumerate(seen)))


def test_what_is_refused_changes_nothing() -> None:
    """An open round, also if its verb runs beside its caller; and ranks that call other things."""

    def body(group: ThreadGroup) -> Seen:
        with MoeAllToAll.create(CASE.config(group.rank), group) as layer:
            received = cases.dispatch(layer, INPUTS[group.rank])
            assert "between a dispatch and its combine" in refused(layer.release)
            combining = layer.combine_async(layer.combine_input().zero_(), received.metadata)
            assert "wait() for a verb" in refused(layer.release)
            assert not combining.wait().any()
            other = (layer.release, lambda: layer.renew(group, PLACES))[group.rank]
            with pytest.raises(DisagreementError, match="rank 0 has release, rank 1 has renew"):
                other()
            return cases.run_round(layer, INPUTS[group.rank])

    check_rounds_of(body)


def test_without_a_rank_that_has_died() -> None:
    """Its place is empty at the next renewal, so that comes first."""
    meet = Meetings()

    def body(place: int) -> Any:
        layer = MoeAllToAll.create(
            config_of(PAIR, place, (0, 1, 2)), meet("create", place, (0, 1, 2))
        )
        layer.leave(2)
        if place == 2:
            layer.close()
            return None
        with layer:
            assert "release() without rank(s) 2" in refused(layer.release)
            layer.renew(meet("two", place, PLACES), PLACES)
            layer.release()
            layer.renew(meet("three", place, PLACES), PLACES)
            return right(layer, 1)

    all_right(1, PLACES, run_threads(3, body))


def test_memory_that_cannot_be_unmapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """No rank goes on as if nothing were; a renewal maps all anew."""
    release, fails = HostMemory.release, threading.local()

    def unmap(memory: HostMemory) -> None:
        if getattr(fails, "once", False):
            fails.once = False
            raise TransportError("no")
        release(memory)

    monkeypatch.setattr(HostMemory, "release", unmap)

    def body(group: ThreadGroup) -> Seen:
        inputs = INPUTS[group.rank]
        with MoeAllToAll.create(CASE.config(group.rank), group) as layer:
            fails.once = group.rank == 1
            kind = (PeerError, TransportError)[group.rank]
            with pytest.raises(kind, match="no"):
                layer.release()
            assert "call renew()" in refused(lambda: cases.dispatch(layer, inputs))
            layer.release()
            assert layer.failure() is None
            fails.once = group.rank == 1
            with pytest.raises(kind, match="no"):
                layer.renew(group, PLACES)
            assert isinstance(layer.failure(), PeerError), "nobody releases on purpose here"
            layer.renew(group, PLACES)
            return cases.run_round(layer, inputs)

    check_rounds_of(body)


def test_memory_of_another_kind_is_not_released(monkeypatch: pytest.MonkeyPatch) -> None:
    """A third party's, which serves all else."""
    monkeypatch.delattr(HostMemory, "release")

    def body(group: ThreadGroup) -> Seen:
        with MoeAllToAll.create(CASE.config(group.rank), group) as layer:
            with pytest.raises(UnsupportedError, match="memory of HostMemory cannot be released"):
                layer.release()
            return cases.run_round(layer, INPUTS[group.rank])

    check_rounds_of(body)


def beside() -> list[str]:
    """Threads of verbs that run beside their caller."""
    names = (thread.name for thread in threading.enumerate())
    return [name for name in names if name.startswith("moe_nvlink channel")]


def test_a_renewal_waits_for_what_a_dropped_layer_has_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 0's dispatch waits for rank 1, which has none: up to its own limit, in old memory."""
    renew, running = HostMemory.renew, list[list[str]]()

    def look(memory: HostMemory, group: Any) -> None:
        running.append(beside())
        renew(memory, group)

    monkeypatch.setattr(HostMemory, "renew", look)
    case = dataclasses.replace(CASE, timeout_s=2.0)

    def body(group: ThreadGroup) -> Seen:
        inputs = INPUTS[group.rank]
        kept = MoeAllToAll.create(case.config(group.rank), group)
        dropped = MoeAllToAll.create(case.config(group.rank), group, share_with=kept)
        if group.rank == 0:
            dropped.dispatch_async(inputs.hidden_states, *inputs[1:3])
            assert beside() == ["moe_nvlink channel 0"]
        handle = dropped._layer.handle
        del dropped
        assert refused(lambda: find(handle))
        kept.renew(group, PLACES)
        assert running == [[], []]
        with kept:
            return cases.run_round(kept, inputs)

    check_rounds_of(body)
