"""How long a kernel waits for its peers, on CPU ranks, which run the GPU's text."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from moe_nvlink_plugin import MoeAllToAll
from moe_nvlink_plugin.jit import host
from moe_nvlink_plugin.jit.header import structs
from moe_nvlink_plugin.testing import ThreadGroup, run_ranks
from moe_nvlink_plugin.verify import cases, compare
from moe_nvlink_plugin.verify.cases import Case
from tests.support import delays


def test_a_clock_that_goes_back_ends_no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's clock may be set back. Its difference, taken as unsigned, is beyond every timeout."""
    library = delays.clock_that_goes_back()
    monkeypatch.setattr(host, "load", lambda _text: library)
    case = Case(name="clock", tokens=(3, 2))
    inputs = cases.make_inputs(case)

    def rank_main(group: ThreadGroup) -> torch.Tensor:
        with MoeAllToAll.create(case.config(group.rank), group) as exchange:
            if group.rank == 1:
                until_looked(library)
            return cases.run_round(exchange, inputs[group.rank]).combined

    for rank, combined in enumerate(run_ranks(case.ep_size, rank_main)):
        expected = compare.expected_combined(case, inputs[rank], rank)
        compare.assert_same_bits(combined, expected, f"rank {rank}")


def test_who_changes_a_cell_wakes_the_sleepers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sleeps last longer than the waits may, so a wake that is missing or lost is an error.

    In every round all other ranks sleep, in dispatch or in combine, before the last rank signals.
    """
    library = delays.sleeps_of(seconds=60)
    monkeypatch.setattr(host, "load", lambda _text: library)
    case = Case(name="sleep", tokens=(3, 0, 2))
    inputs = cases.make_inputs(case)

    def rank_main(group: ThreadGroup) -> list[torch.Tensor]:
        config = dataclasses.replace(case.config(group.rank), timeout_s=30, first_timeout_s=30)
        found = []
        with MoeAllToAll.create(config, group) as exchange:
            for number in range(40):
                is_last, in_combine = group.rank == number % case.ep_size, number % 2 == 1
                # Of dispatch, of combine.
                waits = iter((is_last and not in_combine, is_last and in_combine))

                def before(waits: Iterator[bool] = waits) -> None:
                    if next(waits):
                        until_others_sleep(exchange)

                mine = inputs[group.rank]
                found.append(cases.run_round(exchange, mine, before=before).combined)
            group.all_gather_object(None)
            assert sleepers_of(exchange) == [0] * case.ep_size
        return found

    for rank, combined in enumerate(run_ranks(case.ep_size, rank_main)):
        expected = compare.expected_combined(case, inputs[rank], rank)
        for number, output in enumerate(combined):
            compare.assert_same_bits(output, expected, f"rank {rank}, round {number}")


def sleepers_of(exchange: MoeAllToAll) -> list[int]:
    """LocalControl.sleepers of every rank."""
    workspace = exchange._layer.workspace
    memory, region = workspace.memory, workspace.layout.channel_regions(0)["local"]
    kind: Any = structs()["LocalControl"]
    starts = range(workspace.group.size)
    return [
        int(kind.from_address(memory.base_ptr + r * memory.rank_stride + region.offset).sleepers)
        for r in starts
    ]


def until_others_sleep(exchange: MoeAllToAll) -> None:
    """Returns when every other rank sleeps."""
    deadline = time.monotonic() + 25
    while sum(sleepers_of(exchange)) < exchange.config.ep_size - 1:
        assert time.monotonic() < deadline, f"sleepers: {sleepers_of(exchange)}"
        time.sleep(0.0005)


def until_looked(library: host.HostLibrary) -> None:
    """Returns when the other rank waits in dispatch, and has looked at its clock a few times."""
    deadline = time.monotonic() + 60
    while library._library.test_looks() < 4:
        assert time.monotonic() < deadline, "the other rank does not wait"
        time.sleep(0.001)
