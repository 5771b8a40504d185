"""What the ranks that live do when another one has died: they agree to go on without it.

After a timeout the ranks stand in different rounds, and their memory has the remains of a broken
one. They meet, each of them clears its own memory, and they meet again (kernels/exchange/meet.cu).
After the first meeting no old round stores to a peer any more, so zeros are not overwritten. After
the second one all memory is clear, so no zero falls on a new round's rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from moe_nvlink_plugin.errors import (
    DisagreementError,
    ExchangeTimeoutError,
    InputError,
    PeerError,
)
from moe_nvlink_plugin.jit.header import constants, structs
from moe_nvlink_plugin.launch.arguments import Window, new_arguments
from moe_nvlink_plugin.launch.base import Budget, Executor
from moe_nvlink_plugin.launch.kernel import Variant
from moe_nvlink_plugin.memory.layout import Region
from moe_nvlink_plugin.memory.workspace import Workspace

from . import rank_masks
from .kernels import MEET

#: Threads of the meeting's one CTA on a GPU; each serves some ranks.
MEETING_THREADS = 128

#: Regions that are zero between rounds. Cells are set to the epoch.
_ZERO_BETWEEN_ROUNDS = ("send_counters", "recv_counts", "rows_from")


def leave_out(
    workspace: Workspace[Executor],
    ranks: Iterable[int],
    everyones_regions: Sequence[Sequence[dict[str, Region]]],
    variant: Variant,
    timeout_s: float,
) -> None:
    """Go on without these ranks. Collective over the ranks that live.

    Args:
        workspace: the workspace that all of them share.
        ranks: ranks that have died. Those that died before are left out anyway.
        everyones_regions: for each layer on the workspace its regions, by channel.
        variant: that of a layer on the workspace, which names the builds of its kernels.
        timeout_s: how long a rank waits for the others at each meeting.

    Raises:
        InputError: a rank is not one of the group, or is this rank. Nothing has changed.
        ExchangeStateError: the workspace is unusable, and not because a rank is missing.
        DisagreementError: another rank leaves out other ranks. Nothing has changed.
        ExchangeTimeoutError: a rank did not come; call again on all ranks that live.
    """
    group = workspace.group
    alive = _alive(workspace, ranks)
    if not isinstance(workspace.broken, ExchangeTimeoutError | PeerError | DisagreementError):
        workspace.check_usable()
    with contextlib.ExitStack() as locks:
        for channel in range(workspace.layout.num_channels):
            locks.enter_context(workspace.channel_lock(channel))
        workspace.executor.synchronize()
        # Of a kind after which this function may be called again.
        workspace.broken = workspace.broken or PeerError(
            "mask() has not come to its end on this rank; call it again on all ranks that live"
        )
        meeting = _Meeting(workspace, alive, variant, timeout_s)
        # Both numbers are taken, whatever happens: so ranks that call again stay in step.
        workspace.meetings += 2
        epoch = meeting.hold(workspace.meetings - 1, meeting.own_epoch())
        for regions in everyones_regions:
            for of_channel in regions:
                _clear(workspace, of_channel, epoch)
        meeting.hold(workspace.meetings, epoch)
        mask = rank_masks.rank_mask(alive, group.size, workspace.device)
        workspace.recover(mask)


def _alive(workspace: Workspace[Executor], ranks: Iterable[int]) -> list[int]:
    size, me = workspace.group.size, workspace.group.rank
    dead = set(ranks)
    for rank in dead:
        if not 0 <= rank < size or rank == me:
            raise InputError(
                f"rank {rank} cannot be left out: name ranks of 0 to {size - 1}, and not rank "
                f"{me}, which is this rank"
            )
    known = list(range(size))
    if workspace.active_ranks is not None:
        known = rank_masks.ranks_in(workspace.active_ranks, size)
    return [rank for rank in known if rank not in dead]


class _Meeting:
    """The barrier of these ranks."""

    def __init__(
        self,
        workspace: Workspace[Executor],
        alive: list[int],
        variant: Variant,
        timeout_s: float,
    ) -> None:
        self._workspace, self._alive, self._timeout_s = workspace, alive, timeout_s
        group, memory = workspace.group, workspace.memory
        self._regions = workspace.layout.channel_regions(0)
        window = Window(memory.base_ptr, memory.rank_stride)
        self._args = new_arguments(MEET, self._regions, window, timeout_s)
        self._args.geometry.ep_size, self._args.geometry.ep_rank = group.size, group.rank
        self._mask = rank_masks.rank_mask(alive, group.size).tolist()
        for index, word in enumerate(self._mask):
            self._args.active_ranks[index] = word & (2**64 - 1)
        launcher = workspace.executor.launcher(
            variant, Budget(num_threads=1, max_sms=None, num_ranks=group.size)
        )
        self._launch = launcher.load(MEET, MEETING_THREADS)

    def own_epoch(self) -> int:
        """Return the largest epoch that this rank has come to."""
        kind, epochs = structs()["LocalControl"], [0]
        for channel in range(self._workspace.layout.num_channels):
            region = self._workspace.layout.channel_regions(channel)["local"]
            control: Any = kind.from_buffer_copy(
                bytes(self._workspace.region_bytes(region).tolist())
            )
            epochs += [control.epoch, control.combined_epoch]
        return max(epochs)

    def hold(self, number: int, epoch: int) -> int:
        """Meet; return the largest epoch of all."""
        size = self._workspace.group.size
        self._args.number, self._args.epoch = number, epoch
        self._launch(self._args)
        self._workspace.executor.synchronize()
        words = constants()["kMeetingWords"]
        count = size * (2 * words + 1)
        found = self._workspace.words(self._regions["meeting"], count, torch.int64).tolist()
        first = number % 2 * size
        entries = {
            rank: found[(first + rank) * words : (first + rank + 1) * words] for rank in self._alive
        }
        came = {rank: entry for rank, entry in entries.items() if entry[-1] == number}
        for rank, entry in came.items():
            self._compare(rank, entry[: len(self._mask)])
        late = tuple(rank for rank in self._alive if found[2 * size * words + rank] != 0)
        if late:
            raise ExchangeTimeoutError(
                f"rank {self._workspace.group.rank} waited {self._timeout_s:g} s in mask, meeting "
                f"{number}, for rank(s) {', '.join(map(str, late))}; every rank that lives calls "
                "mask() with the same ranks; if one of those has died, call it again with that "
                "rank too",
                phase="mask",
                ranks=late,
                epoch=number,
            )
        return max(entry[constants()["kRankMaskWords"]] for entry in entries.values())

    def _compare(self, rank: int, mask: list[int]) -> None:
        if mask == self._mask:
            return
        group = self._workspace.group
        theirs = rank_masks.ranks_in(torch.tensor(mask, dtype=torch.int64), group.size)
        raise DisagreementError(
            f"rank {rank} goes on with ranks {theirs}, rank {group.rank} with {self._alive}; call "
            "mask() with the same ranks on all ranks that live"
        )


def _clear(workspace: Workspace[Executor], regions: dict[str, Region], epoch: int) -> None:
    """Leave one channel's memory on this rank as after a pull combine of this epoch."""
    size = workspace.group.size
    for name, region in regions.items():
        if name in _ZERO_BETWEEN_ROUNDS or name.endswith("_staging"):
            workspace.region_bytes(region).zero_()
        elif name.endswith("_cells"):
            workspace.words(region, size, torch.int64).fill_(epoch)
    kind = structs()["LocalControl"]
    local = workspace.region_bytes(regions["local"])
    control: Any = kind()
    control.host_fault = kind.from_buffer_copy(bytes(local.tolist())).host_fault
    control.epoch = control.combined_epoch = epoch
    control.has_pulled = 1
    words = torch.frombuffer(bytearray(bytes(control)), dtype=torch.uint8)
    local[: len(words)].copy_(words)
