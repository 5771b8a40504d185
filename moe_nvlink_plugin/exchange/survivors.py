"""What the ranks that live do when another one has died: they agree to go on without it.

After a timeout the ranks stand in different rounds, and their memory has the remains of a broken
one. They meet, each of them clears its own memory, and they meet again (kernels/exchange/meet.cu).
After the first meeting no old round stores to a peer any more, so zeros are not overwritten. After
the second one all memory is clear, so no zero falls on a new round's rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn

import torch

from moe_nvlink_plugin.errors import (
    DisagreementError,
    ExchangeStateError,
    ExchangeTimeoutError,
    InputError,
    PeerError,
)
from moe_nvlink_plugin.jit.header import constants, structs
from moe_nvlink_plugin.launch.arguments import Window, new_arguments
from moe_nvlink_plugin.launch.base import Budget, Executor, Interrupted, Launch
from moe_nvlink_plugin.launch.kernel import Variant
from moe_nvlink_plugin.memory.layout import Region
from moe_nvlink_plugin.memory.workspace import Workspace

from . import rank_masks
from .kernels import MEET

#: Threads of the meeting's one CTA on a GPU; each serves some ranks.
MEETING_THREADS = 128

#: Regions that are zero when a workspace is made; without them rounds begin with epoch 1.
_ZERO_AT_FIRST = ("send_counters", "recv_counts", "rows_from", "expert_counters")

#: Halves of the number in an entry of a meeting (meet.cu).
_NUMBER, _AGAIN = 2**32 - 1, 1 << 32


def load_meeting(
    workspace: Workspace[Executor], variant: Variant, num_channels: int, *, pdl: bool = True
) -> Launch:
    """Load the kernel of the meetings, before a rank has died. Local."""
    # With the layer's channels: then its build has PDL if the builds of the layer have it.
    size, ranks_on_device = workspace.group.size, workspace.memory.ranks_on_device
    budget = Budget(1, None, size, num_channels, ranks_on_device, pdl)
    return workspace.executor.launcher(variant, budget).load(MEET, MEETING_THREADS)


def leave_out(
    workspace: Workspace[Executor],
    ranks: Iterable[int],
    everyones_regions: Sequence[Sequence[dict[str, Region]]],
    meet: Launch,
    timeout_s: float,
    end_verbs: Callable[[], None],
) -> None:
    """Go on without these ranks. Collective over the ranks that live.

    Args:
        workspace: the workspace that all of them share.
        ranks: ranks that have died. Those that died before are left out anyway.
        everyones_regions: for each layer on the workspace its regions, by channel.
        meet: what load_meeting has loaded.
        timeout_s: how long a rank waits for the others at each meeting.
        end_verbs: ends what runs beside its callers; nobody starts a verb meanwhile.

    Raises:
        InputError: a rank is not one of the group, or is this rank. Nothing has changed.
        ExchangeStateError: the workspace is unusable, and not because a rank is missing.
        DisagreementError: another rank leaves out other ranks; call again.
        ExchangeTimeoutError: a rank did not come; call again on all ranks that live.
    """
    gone = _gone(workspace, ranks)
    workspace.check_mapped()
    if not isinstance(workspace.broken, ExchangeTimeoutError | PeerError | DisagreementError):
        workspace.check_usable()
    with contextlib.ExitStack() as locks:
        for channel in range(workspace.layout.num_channels):
            locks.enter_context(workspace.channel_lock(channel))
        workspace.check_mapped()  # again: a release may have had the locks
        end_verbs()
        workspace.executor.synchronize_device()  # verbs of other channels may be on other streams
        # Of a kind after which this function may be called again.
        workspace.broken = workspace.broken or PeerError(
            "mask() has not come to its end on this rank; call it again on all ranks that live"
        )
        meeting = _Meeting(workspace, gone, meet, timeout_s)
        meeting.begin()
        for regions in everyones_regions:
            for of_channel in regions:
                _clear(workspace, of_channel, gone)
        meeting.hold(workspace.meetings)
        workspace.recover(gone, meeting.mask)


def let_go(
    workspace: Workspace[Executor],
    ranks: Iterable[int],
    everyones_regions: Sequence[Sequence[dict[str, Region]]],
    meet: Launch,
    timeout_s: float,
    end_verbs: Callable[[], None],
) -> None:
    """Let ranks that live go. Collective over all ranks; arguments as those of leave_out.

    All meet twice: after the first time nobody reads what another one has, and after the second
    nobody looks at an entry of the first, which the meetings of those that stay overwrite.

    Raises:
        InputError: a rank does not take part, or nobody stays. Nothing has changed.
        ExchangeStateError: the workspace is unusable, or a dispatch waits for its combine.
        DisagreementError, ExchangeTimeoutError: as leave_out.
    """
    leaving = _leaving(workspace, ranks)
    with contextlib.ExitStack() as locks:
        for channel in range(workspace.layout.num_channels):
            locks.enter_context(workspace.channel_lock(channel))
        workspace.check_usable()
        if bool(workspace.pending.any()):
            raise ExchangeStateError(
                "leave() between a dispatch and its combine; call combine first"
            )
        workspace.executor.synchronize_device()
        workspace.broken = PeerError(
            "leave() has not come to its end on this rank; call mask() on the ranks that stay"
        )
        meeting = _Meeting(workspace, workspace.left_out, meet, timeout_s)
        meeting.begin()
        meeting.hold(workspace.meetings)
        if workspace.group.rank in leaving:
            workspace.broken = ExchangeStateError(
                f"rank {workspace.group.rank} has left the exchange"
            )
            return
    leave_out(workspace, leaving, everyones_regions, meet, timeout_s, end_verbs)


def _leaving(workspace: Workspace[Executor], ranks: Iterable[int]) -> list[int]:
    size = workspace.group.size
    present = [rank for rank in range(size) if rank not in workspace.left_out]
    leaving = [*ranks]
    for rank in leaving:
        if type(rank) is not int or rank not in present:
            raise InputError(f"rank {rank!r} cannot leave: the ranks that take part are {present}")
    if len(set(leaving)) in (0, len(present)):
        raise InputError(
            f"ranks {leaving} cannot leave: name some of {present}, and not all, who would close "
            "their layers"
        )
    return leaving


def _gone(workspace: Workspace[Executor], ranks: Iterable[int]) -> tuple[int, ...]:
    size, me = workspace.group.size, workspace.group.rank
    dead = [*ranks]  # no set yet: a caller may pass one list, which no set can hold
    for rank in dead:
        is_int = isinstance(rank, int) and not isinstance(rank, bool)
        if not is_int or not 0 <= rank < size or rank == me:
            raise InputError(
                f"rank {rank!r} cannot be left out: name ranks of 0 to {size - 1}, and not rank "
                f"{me}, which is this rank"
            )
    return tuple(sorted({*dead, *workspace.left_out}))


class _Meeting:
    """The barrier of the ranks that are not gone."""

    def __init__(
        self,
        workspace: Workspace[Executor],
        gone: tuple[int, ...],
        meet: Launch,
        timeout_s: float,
    ) -> None:
        group, memory = workspace.group, workspace.memory
        self._workspace, self._launch, self._timeout_s = workspace, meet, timeout_s
        self._alive = [rank for rank in range(group.size) if rank not in gone]
        regions = workspace.layout.channel_regions(0)
        self._num_words = constants()["kMeetingWords"]
        count = group.size * (3 * self._num_words + 1)
        self._words = workspace.words(regions["meeting"], count, torch.int64)
        window = Window(memory.base_ptr, memory.rank_stride)
        self._args = new_arguments(MEET, regions, window, timeout_s)
        self._args.geometry.ep_size, self._args.geometry.ep_rank = group.size, group.rank
        #: Ranks that have come to a meeting of this call, though maybe to another one than this.
        self._heard: set[int] = set()
        self.mask = rank_masks.rank_mask(self._alive, group.size)
        for index, word in enumerate(self.mask.tolist()):
            self._args.active_ranks[index] = word & (2**64 - 1)

    def begin(self) -> None:
        """Hold the first meeting, whose number is odd. Leave the second one's in `meetings`.

        A rank takes a larger number than it has seen. What it has seen may be of a call that has
        failed; a rank that still waits sees the larger number, and comes to that meeting.
        """
        size, words = self._workspace.group.size, self._num_words
        entries = self._words[: 2 * size * words].view(2, size, words)[:, :, -1].tolist()
        latest = [max(a & _NUMBER, b & _NUMBER) for a, b in zip(*entries, strict=True)]
        self._heard.update(r for r in self._alive if latest[r] > self._workspace.meetings)
        seen = max(entries[1][rank] & _NUMBER for rank in self._alive)
        number = max(self._workspace.meetings + 1, seen + 2 if seen else 1)
        largest = 0
        while number != largest:
            number = max(number, largest)
            self._workspace.meetings = number + 1
            largest = self.hold(number)

    def hold(self, number: int) -> int:
        """Meet; return the largest number that a rank has come with, or is to come with."""
        self._args.number = number | (_AGAIN if self._workspace.has_met_in_vain else 0)
        try:
            self._launch(self._args)
        except Interrupted as stop:  # mask() may be called again
            self._workspace.has_met_in_vain = True
            raise stop.error from None
        self._workspace.executor.synchronize()
        size = self._workspace.group.size
        taken = self._words[-size * (self._num_words + 1) :].view(size, -1).tolist()
        come = {rank: taken[rank][1:] for rank in self._alive if taken[rank][0] == 0}
        largest = max((self._number_of(rank, come[rank], number) for rank in come), default=0)
        late = tuple(rank for rank in self._alive if rank not in come)
        self._heard.update(come)
        if late:
            # Beside a rank that is gone, those that waited for it at another meeting are not late.
            late = tuple(rank for rank in late if rank not in self._heard) or late
            self._give_up(
                f"waited {self._timeout_s:g} s in mask, meeting {number}, for rank(s) "
                f"{_listed(late)}; call mask() again on every rank that lives: with the same ranks "
                "if it was late, with that rank too if it has died",
                late,
                number,
            )
        return largest

    def _give_up(self, what: str, ranks: tuple[int, ...], number: int) -> NoReturn:
        self._workspace.has_met_in_vain = True
        raise ExchangeTimeoutError(
            f"rank {self._workspace.group.rank} {what}", phase="mask", ranks=ranks, epoch=number
        )

    def _number_of(self, rank: int, entry: list[int], number: int) -> int:
        """Return the meeting to which a rank has come, or is to come, for the same mask as ours.

        Ranks learn of a second death one after another. So masks differ for a while: who has waited
        in vain calls again with fewer ranks, and the others may still wait in their first call.
        """
        theirs, has_called_again = entry[-1] & _NUMBER, bool(entry[-1] & _AGAIN)
        if entry[: len(self.mask)] == self.mask.tolist():
            return theirs
        group = self._workspace.group
        ranks = rank_masks.ranks_in(torch.tensor(entry, dtype=torch.int64), group.size)
        dropped = tuple(sorted(set(self._alive).difference(ranks)))
        if has_called_again and set(ranks) < set(self._alive):
            self._give_up(
                f"no longer waits in mask, meeting {number}: rank {rank} has waited in vain and "
                f"goes on without rank(s) {_listed(dropped)}; call mask() again with those too",
                dropped,
                number,
            )
        if self._workspace.has_met_in_vain and set(ranks) > set(self._alive):
            return theirs + 2  # it will be told the above, and call again
        if theirs > number:
            return theirs  # both find out there
        raise DisagreementError(
            f"rank {rank} goes on with ranks {ranks}, rank {group.rank} with {self._alive}; call "
            "mask() with the same ranks on all ranks that live"
        )


def _listed(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, ranks))


def _clear(
    workspace: Workspace[Executor], regions: dict[str, Region], gone: tuple[int, ...]
) -> None:
    """Leave one channel's memory on this rank as it was when the workspace was made."""
    for name, region in regions.items():
        if name in _ZERO_AT_FIRST or name.endswith("_staging"):
            workspace.region_bytes(region).zero_()
        elif name.endswith("_cells"):
            cells = workspace.words(region, workspace.group.size, torch.int64).zero_()
            for rank in gone:
                cells[rank] = _never_a_round()
    # Nobody sleeps until a cell changes (LocalControl.sleepers): no verb runs during mask().
    local = workspace.region_bytes(regions["local"])
    host_fault = structs()["LocalControl"].host_fault
    local[: host_fault.offset].zero_()
    local[host_fault.offset + host_fault.size :].zero_()


def _never_a_round() -> int:
    """Return the cell of a rank that has gone.

    A launch that does not leave the rank out finds it ahead, and does not wait. Should its epoch
    ever be right, no slice holds so many rows.
    """
    most_rows = (1 << constants()["kCountBits"]) - 1
    return most_rows << 32 | 0x7FFFFFFF
