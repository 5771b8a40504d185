"""A layout placed in symmetric memory, shared by the layers of one expert-parallel group."""

from __future__ import annotations

import logging
import secrets
import threading
import weakref
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

import torch

from moe_nvlink_plugin.config import MAX_CHANNELS
from moe_nvlink_plugin.errors import ExchangeStateError, MoeNvlinkError
from moe_nvlink_plugin.groups import Group, all_or_none
from moe_nvlink_plugin.transport import SymmetricMemory, Transport

from .executor import Executor, FaultWords
from .layout import MAX_WINDOW_BYTES, Region, WorkspaceLayout
from .startup import Startup

logger = logging.getLogger(__name__)

#: Address space of a rank's window, in multiples of the first layout's and at least in bytes: room
#: for layers to come. It costs no memory.
WINDOW_FACTOR = 4
LEAST_WINDOW_BYTES = 4 * 2**30


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


#: The executor as its caller knows it.
E = TypeVar("E", bound=Executor)


class Workspace(Generic[E]):
    """Symmetric memory of one group, the layout in it, and which verb each channel is at.

    Attributes:
        executor: launches kernels on this memory.
        pending: `[MAX_CHANNELS] int64` on the CPU: 0, or the handle of the layer whose dispatch
            waits for its combine. It is an argument of both ops, so that a compiled graph keeps
            their order.
        broken: why no rank may use the workspace any more, once there is such a reason. It is
            the workspace's, not a layer's: all layers' rounds share its cells and its epochs.
        startup: how long the launches on it may wait.
        name: the same on every rank once all have agreed, and no other workspace's.
    """

    def __init__(
        self, group: Group, transport: Transport, executor: E, device: torch.device
    ) -> None:
        self.group = group
        self.device = device
        self.executor = executor
        self.broken: MoeNvlinkError | None = None
        self.startup = Startup(executor.is_capturing)
        self.name = secrets.token_hex(8)
        # Not an inference tensor, whatever the caller is in: verbs outside that mode write to it.
        with torch.inference_mode(False):
            self.pending = torch.zeros(MAX_CHANNELS, dtype=torch.int64, device="cpu")
        self._locks = [threading.Lock() for _ in range(MAX_CHANNELS)]
        self._transport = transport
        self._layout: WorkspaceLayout | None = None
        self._memory: SymmetricMemory | None = None
        self._faults: FaultWords | None = None
        self._last_stats = ExchangeStats()
        self._users = 0

    def ensure(self, layout_for: Callable[[int], WorkspaceLayout]) -> None:
        """Makes the workspace serve one more geometry, growing it where it must. Collective.

        layout_for: what is needed, by the bytes that its places must be aligned to.

        What earlier layers use stays where it is, with its content, so they may be in the middle
        of a round, and CUDA graphs with their addresses stay valid.

        Raises:
            ExchangeStateError: it is broken, or the stream is capturing a CUDA graph.
            TransportError, PeerError: the memory could not be had; the old one stays as it was.
        """
        wanted = all_or_none(self.group, "fitting the workspace", lambda: self._wanted(layout_for))
        if wanted != self._layout:
            self._place(wanted)
        self._users += 1

    def _wanted(self, layout_for: Callable[[int], WorkspaceLayout]) -> WorkspaceLayout:
        self.check_usable()
        if self.executor.is_capturing():
            raise ExchangeStateError(
                "the stream is capturing a CUDA graph, and a new layer may need memory, which "
                "cannot be had then; create all layers before the capture"
            )
        wanted = layout_for(self._transport.extent_alignment)
        return wanted if self._layout is None else self._layout.union(wanted)

    def check_usable(self) -> None:
        """Before a launch or a change.

        Raises:
            ExchangeStateError: a rank has failed here before; the reason is in the message.
        """
        if self.broken is not None:
            raise ExchangeStateError(
                f"the exchange is unusable since: {self.broken}; close all layers, or the head "
                "group, on its workspace and create them anew"
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
        before = self._layout
        logger.info(
            "moe_nvlink: rank %d of %d %s a workspace of %.1f MiB (%d channel(s); %s)",
            self.group.rank,
            self.group.size,
            "allocates" if before is None else "grows to",
            layout.total_bytes / 2**20,
            layout.num_channels,
            ", ".join(f"{name} {size}" for name, size in layout.sizes.items() if size > 65536),
        )
        memory = self._memory
        if memory is None:
            reserved = max(min(WINDOW_FACTOR * layout.end, MAX_WINDOW_BYTES), LEAST_WINDOW_BYTES)
            memory = self._transport.reserve(self.group, reserved, self.device)
        memory_has_grown = False
        try:
            # A layout may grow within memory that is mapped already, which comes in whole pages.
            if extents := layout.extents(before):
                memory.extend(extents)
            memory_has_grown = bool(extents)
            all_or_none(
                self.group,
                "initialising the workspace",
                lambda: self._connect_faults(memory, layout, before),
            )
        except Exception as error:
            if before is None:
                self._faults = None
                memory.close()
            elif memory_has_grown:
                # The layout does not know of what is mapped now, and would map it again.
                self.broken = MoeNvlinkError(f"growing failed half-way: {error}")
            raise
        self._memory, self._layout = memory, layout
        if before is None:
            assert self._faults is not None
            # Also for layers that are dropped without close.
            self._keep = weakref.finalize(
                self, _keep_for_graphs, self.group.rank, self.executor, memory, self._faults
            )
            self._keep.atexit = False

    def _connect_faults(
        self, memory: SymmetricMemory, layout: WorkspaceLayout, before: WorkspaceLayout | None
    ) -> None:
        # The transport hands out zeros, which is what every other control word starts with.
        if self._faults is None:
            self._faults = self.executor.fault_words(MAX_CHANNELS)
        for channel in range(0 if before is None else before.num_channels, layout.num_channels):
            region = layout.channel_regions(channel)["local"]
            self._faults.connect(channel, memory.local(region.offset, region.size_bytes))

    def fault(self, channel: int) -> int:
        """The channel's fault word as far as it has reached the host; waits for nothing. Local."""
        return 0 if self._faults is None else self._faults.read(channel)

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
            raise ExchangeStateError(
                "the workspace is closed; create a new MoeAllToAll or HeadGroup"
            )
        return self._memory

    def region_bytes(self, region: Region, size_bytes: int | None = None) -> torch.Tensor:
        """The region in this rank's memory, `[size_bytes] uint8`; a view that keeps it mapped."""
        size = region.size_bytes if size_bytes is None else size_bytes
        return self.memory.local(region.offset, size)

    def words(self, region: Region, count: int, dtype: torch.dtype) -> torch.Tensor:
        """The first `count` elements of a control region."""
        return self.region_bytes(region, count * dtype.itemsize).view(dtype)

    def stats(self) -> ExchangeStats:
        """Totals over all channels. Local; waits for this thread's stream; not capturable."""
        if self._memory is None:
            return self._last_stats
        total = ExchangeStats()
        for channel in range(self.layout.num_channels):
            region = self.layout.channel_regions(channel)["counters"]
            values = self.words(region, len(ExchangeStats._fields), torch.int64).tolist()
            total = total.plus(ExchangeStats(*values))
        return total

    def release(self) -> None:
        """One layer less uses the workspace; the last one closes it. Local; waits for this thread's
        stream. Other streams' verbs must have ended.
        """
        self._users -= 1
        if self._users > 0 or self._memory is None:
            return
        self._keep_last_stats()
        self._keep()
        self._memory.close()
        self._memory = self._faults = None

    def _keep_last_stats(self) -> None:
        try:
            if not self.executor.is_capturing():  # the copy would end the capture
                self._last_stats = self.stats()
        except (RuntimeError, MoeNvlinkError) as error:  # of a GPU that can do nothing any more
            logger.warning(
                "moe_nvlink: rank %d: the last counters are lost: %s", self.group.rank, error
            )


def _keep_for_graphs(
    rank: int, executor: Executor, memory: SymmetricMemory, faults: FaultWords
) -> None:
    """Before a workspace goes: leaves its memory to the CUDA graphs that hold its addresses."""
    if executor.captured:
        logger.warning(
            "moe_nvlink: rank %d: the workspace stays mapped until the process ends, because CUDA "
            "graphs were captured with it and may still be replayed",
            rank,
        )
        memory.leak()
        faults.leak()
