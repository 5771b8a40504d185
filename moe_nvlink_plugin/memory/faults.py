"""Errors from the fault word of a channel (pack_fault in epoch_flags.h)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from typing import Any

import torch

from moe_nvlink_plugin.errors import (
    DisagreementError,
    ExchangeStateError,
    ExchangeTimeoutError,
    InputError,
    MoeNvlinkError,
    PeerError,
)
from moe_nvlink_plugin.jit.header import constants

from .phases import Phase
from .startup import Timeouts
from .workspace import Workspace


class Faults:
    """Reader of the fault word of one channel of one layer.

    Args:
        workspace: the layer's workspace.
        channel: number of the channel.
        rank: number of this rank.
        size: number of ranks in the group.
        timeouts: limits of the layer's waits.
        phases: phases of the layer's kernels.
    """

    def __init__(
        self,
        workspace: Workspace[Any],
        channel: int,
        rank: int,
        size: int,
        timeouts: Timeouts,
        phases: Iterable[Phase],
    ) -> None:
        self._workspace, self._channel = workspace, channel
        self._rank, self._size, self._timeouts = rank, size, timeouts
        self._phases = {phase.code: phase for phase in phases}

    def error(
        self,
        disagreement: Callable[[int, str, int], str],
        *,
        ask_device: bool = True,
        takes_part: Callable[[], list[int]] | None = None,
    ) -> MoeNvlinkError | None:
        """Return the error of a verb that failed, or None. Local. It names phase, ranks and epoch.

        Args:
            disagreement: makes the message if `peer` used another layer, from peer, phase and
                epoch. It is not kept: as a method of this object's owner it would keep the memory
                of a dropped layer alive.
            ask_device: also find out which other ranks are late. On a GPU this waits for the
                device. Without it nothing here waits, and any thread may call.
            takes_part: returns the ranks of the round, of which some may be late; None: all ranks.
                On a GPU it may wait for the device.
        """
        word = self._workspace.fault(self._channel)
        if not word:
            return None
        code, phase = word >> 56, self._phase(word >> 48 & 0xFF)
        peer, epoch = word >> 32 & 0xFFFF, word & 0xFFFFFFFF
        if peer in self._workspace.left_out:
            return PeerError(
                f"{phase.name} of epoch {epoch} took rank {peer} for a rank that takes part, but "
                "mask() has left it out: a CUDA graph that was captured before without "
                "active_ranks=MoeAllToAll.active_ranks, or active_ranks that name the rank; call "
                "mask() on all ranks that live, and capture the graph again"
            )
        if code == constants()["kFaultGeometry"]:
            return DisagreementError(disagreement(peer, phase.name, epoch))
        if code == constants()["kFaultAhead"]:
            return PeerError(
                f"rank {peer} is ahead of this rank's round, {phase.name} of epoch {epoch}: it "
                "went on after a failure of its own, which its log names; end all ranks"
            )
        if code == constants()["kFaultLeftOut"]:
            return InputError(
                f"in {phase.name} of epoch {epoch} active_ranks left out rank {peer}, which is "
                "this rank; a rank that dispatches names itself, and the others name it too; close "
                "all layers on the workspace and create them anew"
            )
        if code == constants()["kFaultRepeated"]:
            return ExchangeStateError(
                f"rank {self._rank} ran {phase.name} of epoch {epoch} again without its combine: a "
                "CUDA graph that holds a dispatch without its combine was replayed; rows may be "
                "lost; capture both in one graph, or replay the combine's graph after each replay "
                "of the dispatch's; close all layers on the workspace and create them anew"
            )
        if code == constants()["kFaultBadCount"]:
            return PeerError(
                f"rank {peer} announced more rows than its slice holds in {phase.name} of epoch "
                f"{epoch}: somebody wrote into the exchange's memory; end all ranks"
            )
        if code != constants()["kFaultTimeout"]:
            return PeerError(
                f"rank {self._rank} found fault word {word:#018x} in the exchange's memory, whose "
                f"code {code} no kernel writes (config.h): somebody wrote into the memory; end all "
                "ranks"
            )
        late = (self._late_ranks(phase, epoch, takes_part) if ask_device else ()) or (peer,)
        waited_s = self._workspace.startup.waited_s(self._channel, epoch, self._timeouts)
        is_first = waited_s != self._timeouts.later
        raised = "first_timeout_s (MOE_NVLINK_FIRST" if is_first else "timeout_s (MOE_NVLINK"
        return ExchangeTimeoutError(
            f"rank {self._rank} waited {waited_s:g} s in {phase.name} of epoch {epoch} for "
            f"rank(s) {', '.join(map(str, late))}; look at those ranks' logs, and raise "
            f"{raised}_TIMEOUT_S) if they were only slow",
            phase=phase.name,
            ranks=late,
            epoch=epoch,
        )

    def _phase(self, code: int) -> Phase:
        """Return the phase with this code.

        A workspace may also serve kernels of which this reader knows nothing. Their phase has no
        name and no cells here, but the fault is still an error to report.
        """
        return self._phases.get(code) or Phase(f"phase {code} (of another kernel)", "", cells="")

    def _late_ranks(
        self, phase: Phase, epoch: int, takes_part: Callable[[], list[int]] | None
    ) -> tuple[int, ...]:
        if not phase.cells:
            return ()
        if self._workspace.executor.is_capturing():
            return ()  # reading the cells would wait for the GPU, which a capture forbids
        region = self._workspace.layout.channel_regions(self._channel)[phase.cells]
        cells = self._workspace.words(region, self._size, torch.int64)
        epochs = [cell & 0xFFFFFFFF for cell in cells.tolist()]
        ranks = range(self._size) if takes_part is None else takes_part()
        return tuple(rank for rank in ranks if ctypes.c_int32(epochs[rank] - epoch).value < 0)
