"""A layout placed in symmetric memory, shared by the layers of one expert-parallel group."""

from __future__ import annotations

import logging
import threading
from typing import NamedTuple

import torch

from .config import AllToAllConfig
from .errors import ExchangeStateError, MoeNvlinkError
from .groups import Group, all_or_none
from .layout import Region, WorkspaceLayout
from .recipes import Recipe
from .transport import SymmetricMemory, Transport

logger = logging.getLogger(__name__)


class ExchangeStats(NamedTuple):
    """Totals of one rank since its workspace was made; counted by the kernels. Bytes and counts.

    A destination is a unique (token, rank) pair; `remote` ones leave this rank. The last two are
    what an all-gather of the same payloads and a reduce-scatter of the same outputs would have sent
    between this rank and its peers.
    """

    rounds: int = 0
    tokens: int = 0
    destinations: int = 0
    remote_destinations: int = 0
    bytes_dispatched: int = 0
    bytes_dispatched_remote: int = 0
    bytes_combined: int = 0
    bytes_combined_remote: int = 0
    bytes_allgather: int = 0
    bytes_reducescatter: int = 0

    def plus(self, other: ExchangeStats) -> ExchangeStats:
        """Field by field."""
        return ExchangeStats(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


def _zeros(count: int) -> torch.Tensor:
    # Not an inference tensor, whatever the caller is in: verbs outside that mode write to it too.
    with torch.inference_mode(False):
        return torch.zeros(count, dtype=torch.int64)


class Workspace:
    """Symmetric memory of one group, the layout in it, and which verb each channel is at.

    Attributes:
        pending: `[num_channels] int64` on the CPU: 0, or the handle of the layer whose dispatch
            waits for its combine. It is an argument of both ops, so that a compiled graph keeps
            their order.
        broken: why no rank may use the workspace any more, once there is such a reason. It is
            the workspace's, not a layer's: all layers' rounds share its cells and its epochs.
    """

    def __init__(self, group: Group, transport: Transport, device: torch.device) -> None:
        self.group = group
        self.device = device
        self.broken: MoeNvlinkError | None = None
        self.pending = _zeros(1)
        self.generation = 0  # counts moves: layers make their views again after one
        self._locks: list[threading.Lock] = []
        self._transport = transport
        self._layout: WorkspaceLayout | None = None
        self._memory: SymmetricMemory | None = None
        self._earlier = ExchangeStats()
        self._users = 0

    def ensure(self, config: AllToAllConfig, recipe: Recipe) -> None:
        """Makes the workspace serve one more geometry, growing it where it must. Collective.

        Raises:
            ExchangeStateError: it must grow while a dispatch waits for its combine, or is broken.
            TransportError, PeerError: the memory could not be had; the old one stays as it was.
        """
        wanted = all_or_none(
            self.group, "fitting the workspace", lambda: self._wanted(config, recipe)
        )
        if wanted != self._layout:
            self._place(wanted)
        self._users += 1

    def _wanted(self, config: AllToAllConfig, recipe: Recipe) -> WorkspaceLayout:
        self.check_usable()
        wanted = WorkspaceLayout.for_geometry(config, recipe)
        if self._layout is not None:
            wanted = self._layout.union(wanted)
        if wanted != self._layout and bool(self.pending.any()):
            raise ExchangeStateError(
                "the workspace cannot grow between a dispatch and its combine; create all layers "
                "before the first dispatch, or combine first"
            )
        return wanted

    def check_usable(self) -> None:
        """Before a launch or a change.

        Raises:
            ExchangeStateError: a rank has failed here before; the reason is in the message.
        """
        if self.broken is not None:
            raise ExchangeStateError(
                f"the exchange is unusable since: {self.broken}; close all layers that share its "
                "workspace and create them anew"
            ) from self.broken

    def channel_lock(self, channel: int) -> threading.Lock:
        """Held by a verb while it runs: one thread at a time uses a channel."""
        return self._locks[channel]

    def abandon(self, handle: int) -> None:
        """For a layer that closes: its unfinished dispatch can never be combined. Local."""
        if self.broken is None and bool((self.pending == handle).any()):
            self.broken = ExchangeStateError(
                f"exchange {handle} was closed between its dispatch and its combine"
            )

    def _place(self, layout: WorkspaceLayout) -> None:
        logger.info(
            "moe_nvlink: rank %d of %d allocates a workspace of %.1f MiB (%d channel(s); %s)",
            self.group.rank,
            self.group.size,
            layout.total_bytes / 2**20,
            layout.num_channels,
            ", ".join(f"{name} {size}" for name, size in layout.sizes.items() if size > 65536),
        )
        memory = self._transport.allocate(self.group, layout.total_bytes, self.device)
        if self._memory is not None:
            self._earlier = self.stats()
            self._memory.close()
        self._memory, self._layout = memory, layout
        self.generation += 1
        self.pending = _zeros(layout.num_channels)
        new_channels = layout.num_channels - len(self._locks)
        self._locks += [threading.Lock() for _ in range(new_channels)]
        # The transport hands out zeros, which is what every control word starts with. No rank may
        # put into a workspace that its owner has not finished with: hence the barrier.
        all_or_none(self.group, "initialising the workspace", lambda: None)

    @property
    def layout(self) -> WorkspaceLayout:
        """The regions in force."""
        if self._layout is None:
            raise ExchangeStateError("the workspace has not been allocated")
        return self._layout

    @property
    def memory(self) -> SymmetricMemory:
        """The window over all ranks' workspaces."""
        if self._memory is None:
            raise ExchangeStateError("the workspace is closed; create a new MoeAllToAll")
        return self._memory

    def region_bytes(self, region: Region, size_bytes: int | None = None) -> torch.Tensor:
        """The region in this rank's memory, `[size_bytes] uint8`; a view that keeps it mapped."""
        size = region.size_bytes if size_bytes is None else size_bytes
        return self.memory.local(region.offset, size)

    def words(self, region: Region, count: int, dtype: torch.dtype) -> torch.Tensor:
        """The first `count` elements of a control region."""
        return self.region_bytes(region, count * dtype.itemsize).view(dtype)

    def stats(self) -> ExchangeStats:
        """Totals over all channels and over memory that growth has replaced. Local."""
        total = self._earlier
        if self._memory is None:
            return total
        for channel in range(self.layout.num_channels):
            region = self.layout.channel_regions(channel)["counters"]
            values = self.words(region, len(ExchangeStats._fields), torch.int64).tolist()
            total = total.plus(ExchangeStats(*values))
        return total

    def release(self) -> None:
        """One layer less uses the workspace; the last one closes it. Local."""
        self._users -= 1
        if self._users > 0 or self._memory is None:
            return
        self._earlier = self.stats()
        self._memory.close()
        self._memory = None
