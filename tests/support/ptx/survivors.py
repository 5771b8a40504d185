"""Emulated ranks that meet, and go on with others than before, as MoeAllToAll.mask does it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from moe_nvlink_plugin import rank_mask
from moe_nvlink_plugin.exchange import launches, survivors
from moe_nvlink_plugin.exchange.kernels import MEET
from moe_nvlink_plugin.jit.header import constants
from moe_nvlink_plugin.launch.arguments import Window, new_arguments
from moe_nvlink_plugin.launch.kernel import Build
from moe_nvlink_plugin.launch.shape import Shape
from moe_nvlink_plugin.memory.layout import Region
from moe_nvlink_plugin.verify import compare
from moe_nvlink_plugin.verify.cases import Case, Inputs
from tests.support import emulated
from tests.support.emulated import EmulatedRanks
from tests.support.ptx.backend import PtxBackend

#: Fewer than ranks: a thread has several peers.
THREADS = 2


def build(ranks: EmulatedRanks) -> Build:
    """What a GPU gets of meet."""
    assert isinstance(ranks.backend, PtxBackend)
    return launches.variant(ranks.config, 0).build(MEET, pdl=ranks.backend.grids.pdl)


def come_to_meeting(
    ranks: EmulatedRanks,
    alive: Sequence[int],
    number: int | Mapping[int, int],
    come: Sequence[int] | None = None,
) -> None:
    """Launch one meeting, which waits for longer than the verbs of a broken round before it.

    number: of the meeting, or that with which each rank comes.
    come: ranks that launch; None: all that are alive.
    """
    size = ranks.config.ep_size
    window = Window(ranks.memory.data_ptr(), ranks.memory.stride(0))
    assert ranks.config.timeout_s is not None
    patience = 10 * ranks.config.timeout_s
    calls, come = [], alive if come is None else come
    for rank in come:
        args: Any = new_arguments(MEET, ranks.regions[0], window, patience)
        args.geometry.ep_size, args.geometry.ep_rank = size, rank
        args.active_ranks[0] = rank_mask(alive, size).item()
        args.number = number if isinstance(number, int) else number[rank]
        calls.append(args)
    backend = ranks.backend
    assert isinstance(backend, PtxBackend)
    backend.grids.launch([build(ranks)] * len(calls), calls, Shape(1, THREADS), ranks=come)


def check_all_came(ranks: EmulatedRanks, alive: Sequence[int]) -> None:
    """AssertionError if a rank has waited in vain in the meeting that has ended."""
    size = ranks.config.ep_size
    for rank in alive:
        assert _outcomes(ranks, rank) == [0] * size, f"rank {rank} waited in vain"


def _outcomes(ranks: EmulatedRanks, rank: int) -> list[int]:
    """The host reads what the rank has taken of others; those may write their entries."""
    region, size = ranks.regions[0]["meeting"], ranks.config.ep_size
    found = ranks.memory[rank, region.offset :][: region.size_bytes].view(torch.int64)
    taken = found[-size * (constants()["kMeetingWords"] + 1) :]
    ranks.backend.host_access(rank, taken, writes=False)
    return [int(each) for each in taken.view(size, -1)[:, 0]]


class _Memory:
    """What clearing needs of a Workspace; the host of the rank writes there."""

    def __init__(self, ranks: EmulatedRanks, rank: int) -> None:
        self._ranks, self._rank = ranks, rank
        self.group = SimpleNamespace(size=ranks.config.ep_size)

    def region_bytes(self, region: Region) -> torch.Tensor:
        found = self._ranks.memory[self._rank, region.offset :][: region.size_bytes]
        self._ranks.backend.host_access(self._rank, found, writes=True)
        return found

    def words(self, region: Region, count: int, dtype: torch.dtype) -> torch.Tensor:
        return self.region_bytes(region).view(dtype)[:count]


def meet(ranks: EmulatedRanks, alive: Sequence[int], number: int) -> None:
    """One meeting; AssertionError if a rank has waited in vain."""
    come_to_meeting(ranks, alive, number)
    check_all_came(ranks, alive)


def clear(ranks: EmulatedRanks, alive: Sequence[int], gone: tuple[int, ...] = ()) -> None:
    """Each of these ranks clears its own memory, on its host."""
    for rank in alive:
        memory: Any = _Memory(ranks, rank)
        survivors._clear(memory, ranks.regions[0], gone)


def go_on_without(ranks: EmulatedRanks, gone: int, *, have_met: bool = False) -> None:
    """The others meet, clear their memory, meet again, and have a mask in later rounds.

    have_met: the first meeting is over.
    """
    alive = [rank for rank in range(ranks.config.ep_size) if rank != gone]
    if not have_met:
        meet(ranks, alive, 1)
    clear(ranks, alive, (gone,))
    meet(ranks, alive, 2)
    ranks._masks = [rank_mask(alive, ranks.config.ep_size)] * ranks.config.ep_size


def check_round(case: Case, inputs: list[Inputs], ranks: EmulatedRanks) -> None:
    """A round without the last rank, which has no tokens and does not come."""
    seen = ranks.run_round(inputs[:-1])
    emulated.check_round(case, inputs, [*seen, compare.nothing(case, seen[0])])
