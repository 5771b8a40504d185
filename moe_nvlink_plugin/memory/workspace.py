"""Workspace: a layout in symmetric memory, which the layers of one group share."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import secrets
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from moe_nvlink_plugin import frameworks
from moe_nvlink_plugin.config import MAX_CHANNELS
from moe_nvlink_plugin.errors import (
    ExchangeStateError,
    MoeNvlinkError,
    PeerError,
    TransportError,
    UnsupportedError,
)
from moe_nvlink_plugin.groups import Group, Left, all_or_none, members_of, tell
from moe_nvlink_plugin.transport import Extent, SymmetricMemory, Transport

from .executor import FaultWords, WordReader, WorkspaceExecutor
from .layout import MAX_WINDOW_BYTES, Region, WorkspaceLayout
from .startup import Startup

logger = logging.getLogger(__name__)

#: Address space of a rank's window: a multiple of the first layout's, and at least these bytes. It
#: is room for later layers and costs no memory.
WINDOW_FACTOR = 4
LEAST_WINDOW_BYTES = 4 * 2**30


class ExchangeStats(NamedTuple):
    """Totals of one rank since its workspace was created. The kernels count them.

    Attributes:
        rounds: number of rounds.
        tokens: number of tokens that this rank dispatched.
        destinations: number of different (token, rank) pairs.
        remote_destinations: number of these pairs whose rank is another rank.
        bytes_dispatched: bytes of all rows that dispatch stored.
        bytes_dispatched_remote: bytes of these rows on other ranks.
        bytes_combined: bytes of all rows that combine loaded.
        bytes_combined_remote: bytes of these rows from other ranks.
        bytes_allgather: bytes that an all-gather of the same payloads would have sent between this
            rank and its peers.
        bytes_reducescatter: the same for a reduce-scatter of the same outputs.
        waited_ns: nanoseconds that this rank's verbs have waited for each rank, by its number; ()
            before there is memory. A wait counts after it has ended. One CTA of each kernel counts
            (kernels/README.md); in small batches' combine it sees the ranks of one token. A GPU's
            timer moves in steps, a microsecond on some: one short wait counts as nothing or as
            whole steps, and only the sum of many is right on average.
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
    waited_ns: tuple[int, ...] = ()

    def plus(self, other: ExchangeStats) -> ExchangeStats:
        """Add field by field."""
        pairs = zip(self[:-1], other[:-1], strict=True)
        waits = itertools.zip_longest(self.waited_ns, other.waited_ns, fillvalue=0)
        return ExchangeStats._make([*(a + b for a, b in pairs), tuple(a + b for a, b in waits)])


#: Fields of ExchangeStats that are in the struct ExchangeCounters of args.h, in its order.
COUNTERS = ExchangeStats._fields[:-1]


#: The executor as its caller knows it.
E = TypeVar("E", bound=WorkspaceExecutor)


class Workspace(Generic[E]):
    """Symmetric memory of one group, its layout, and the state of each channel.

    Attributes:
        executor: launches kernels on this memory.
        pending: `[MAX_CHANNELS]` int64 on the CPU: 0, or the handle of the layer whose dispatch has
            not been combined. It is an argument of both ops, so that a compiled graph keeps their
            order.
        broken: why no rank may use the workspace any more; None while it is usable. It belongs to
            the workspace, because the rounds of all layers share its cells and epochs.
        left_out: places without a rank, and ranks that have died or left, and that the others have
            agreed to go on without.
        is_elastic: whether ranks come and go; then every launch has a mask.
        active_ranks: mask of the other ranks, on the device; None: no layer is on the workspace.
        meetings: the largest number of a meeting after a death so far.
        has_met_in_vain: whether the last mask() has waited in vain for a rank.
        startup: limits of the waits of its launches.
        name: unique name, equal on every rank after the ranks have agreed.
    """

    def __init__(
        self, group: Group, transport: Transport, executor: E, device: torch.device
    ) -> None:
        self.group: Group = group
        self.device = device
        self.executor = executor
        self.broken: MoeNvlinkError | None = None
        self.left_out = self._empty_places()
        self.is_elastic = False
        self.active_ranks: torch.Tensor | None = None
        self.meetings = 0
        self.has_met_in_vain = False
        self.startup = Startup(executor.is_capturing)
        self.name = secrets.token_hex(8)
        # Not an inference tensor, even in the caller's inference mode: verbs outside it write here.
        with torch.inference_mode(False):
            self.pending = torch.zeros(MAX_CHANNELS, dtype=torch.int64, device="cpu")
        self._locks = [threading.Lock() for _ in range(MAX_CHANNELS)]
        #: What was last started beside its caller on each channel, until a wait. It is here too,
        #: because a layer that is dropped without close takes its own along.
        self.running: list[Any] = [None] * MAX_CHANNELS
        self._transport = transport
        self._layout: WorkspaceLayout | None = None
        self._memory: SymmetricMemory | None = None
        self._faults: FaultWords | None = None
        self._reader: WordReader | None = None
        # While memory is read beside its users, or given up.
        self._reading = threading.Lock()
        self._last_stats = ExchangeStats()
        self._users = 0
        #: How many layers there have been.
        self.layers_so_far = 0
        #: What is mapped, in the order of mapping.
        self.extents: list[Extent] = []
        #: Bytes that a growth has mapped which then failed; they go with the rest.
        self._stray_bytes = 0
        #: False from a release, or the begin of a renewal, to the end of one: the addresses are
        #: there, and no memory.
        self.is_mapped = True
        #: Whether memory that is not mapped is away on purpose, and no failure.
        self._is_away = False
        #: What a renewal keeps, by channel: region, bytes.
        self._kept: list[list[tuple[Region, torch.Tensor]]] = []
        self._owner = os.getpid()
        #: Whether the workspace belongs to the process that this one is a fork of.
        self.is_parents = False
        _alive.add(self)

    def _empty_places(self) -> tuple[int, ...]:
        return tuple(sorted(set(range(self.group.size)).difference(members_of(self.group))))

    def leave_to_parent(self) -> None:
        """Record that this process is a fork of the one whose workspace this is. Local."""
        self.is_parents = True
        if self._memory is not None and self._faults is not None:
            self._memory.leak()
            self._faults.leak()
        # Threads of the parent may have held them; none of these threads is here.
        self._locks = [threading.Lock() for _ in range(MAX_CHANNELS)]
        self._reading = threading.Lock()

    def ensure(self, layout_for: Callable[[int], WorkspaceLayout]) -> int:
        """Make room for one more geometry; grow the workspace if needed. Collective.

        Regions of earlier layers keep their place and content, so these layers may be in the middle
        of a round, and CUDA graphs with their addresses stay valid.

        Args:
            layout_for: makes the needed layout from the alignment of its places in bytes.

        Returns:
            How often this has been called before, which is equal on all ranks: a number for the
            layer. Cells have it in their tags, so that ranks notice if they use different layers.

        Raises:
            ExchangeStateError: the workspace is broken, or the stream is capturing a CUDA graph.
            TransportError, PeerError: a rank could not get memory. The old memory is unchanged.
        """
        wanted = all_or_none(self.group, "fitting the workspace", lambda: self._wanted(layout_for))
        if wanted != self._layout:
            self._place(wanted)
        self._users += 1
        self.layers_so_far += 1
        return self.layers_so_far - 1

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
        """Check that a launch or a change is possible. Local.

        Raises:
            ExchangeStateError: a rank has failed before, or this process is a fork of the one that
                created the workspace; the message says which.
        """
        if self.is_parents:
            raise ExchangeStateError(
                f"process {os.getpid()} is a fork of process {self._owner}, whose exchange this is "
                f"(workspace {self.name}, rank {self.group.rank}); create the exchange in the "
                "process that uses it, or start processes with spawn"
            )
        self.check_mapped()
        if self.broken is not None:
            raise ExchangeStateError(
                f"the exchange is unusable since: {self.broken}; close all layers, or the head "
                "group, on its workspace and create them anew"
            ) from self.broken

    def channel_lock(self, channel: int) -> threading.Lock:
        """Return the lock that a verb holds while it runs: one thread at a time uses a channel.

        Raises:
            ExchangeStateError: a signal handler asks, and this thread's verb, in whose wait the
                handler runs, has the lock.
        """
        lock = self._locks[channel]
        if lock.locked() and self.executor.is_in_handler():
            raise ExchangeStateError(
                "a signal handler called the exchange while a verb of this rank waits; raise in "
                "the handler, as sys.exit() does, and call the exchange when the verb has ended"
            )
        return lock

    def abandon(self, handle: int) -> None:
        """Mark the workspace broken if this closing layer has an uncombined dispatch. Local."""
        if self.broken is None and bool((self.pending == handle).any()):
            self.broken = ExchangeStateError(
                f"exchange {handle} was closed between its dispatch and its combine"
            )

    def interrupt(self, verb: str, error: BaseException) -> None:
        """Mark the workspace broken: an exception has ended a verb in its middle. Local."""
        if self.broken is None:
            self.broken = ExchangeStateError(
                f"{type(error).__name__} has interrupted {verb} on rank {self.group.rank}, and its "
                "round has failed"
            )

    def recover(
        self,
        left_out: tuple[int, ...] = (),
        active_ranks: torch.Tensor | None = None,
        *,
        with_newcomers: bool = False,
    ) -> None:
        """Make the workspace usable without some ranks. Local; its memory is as when it was made.

        Args:
            left_out: places without a rank, and ranks that have died.
            active_ranks: mask of the others; None: the kernels know no masks.
            with_newcomers: some of these have just come; start-up's limit holds again.
        """
        assert self._faults is not None
        for channel in range(self.layout.num_channels):
            self._faults.clear(channel)
        self.pending.zero_()
        self.startup.begin_anew(with_newcomers=with_newcomers)
        self.left_out = left_out
        self.has_met_in_vain = False
        if active_ranks is not None:
            assert self.active_ranks is not None
            self.active_ranks.copy_(active_ranks)  # in place: a CUDA graph may have captured it
        self.executor.synchronize()  # the next verb may come from a thread with another stream
        with self._reading:
            self.broken, self.is_mapped = None, True

    def enter(self, group: Group, layout: WorkspaceLayout, extents: Sequence[Extent]) -> None:
        """Get memory that ranks of the group have already, which call `renew`. Collective.

        Args:
            group: the ranks.
            layout: the layout in use.
            extents: what the others have mapped.

        Raises:
            MoeNvlinkError: a rank failed. Nothing of this call remains.
        """
        self.group = group
        self._place(layout, extents)
        self.left_out = self._empty_places()

    @contextlib.contextmanager
    def renewing(self, stop: Callable[[], object] = lambda: None) -> Iterator[None]:
        """Surround `renew` and all until `recover`: no memory is nobody's failure yet. Local.

        Args:
            stop: called first; ends rounds whose callers do not get their results.
        """
        why = "renew() has not come to its end; call renew() again on all ranks of a group"
        try:
            stop()
        except BaseException:
            self.broken = PeerError(why)  # with the memory that it has, and what is counted there
            raise
        self._begin_without_memory(why)
        try:
            yield
        except BaseException:
            self._is_away = False
            raise

    def renew(self, group: Group, extents: Sequence[Extent]) -> None:
        """Have zeroed memory with the ranks of a group, at the same addresses. Collective.

        The ranks of the old group that are not in the new one keep what they have mapped, which is
        no longer ours: a process that wakes late changes nothing.

        Args:
            group: its size and this rank are those of the workspace's group. Its new ranks call
                `enter`.
            extents: what is mapped.

        Raises:
            MoeNvlinkError: a rank failed, and this one has no memory now; it may call again.
        """
        memory = self.memory
        memory.renew(group)
        self.group, self._stray_bytes = group, 0
        memory.extend(extents)
        all_or_none(group, "initialising the workspace", self._begin_again)

    def give_back(self, called: str, values: dict[str, str], stop: Callable[[], None]) -> None:
        """Unmap all memory, which `renew` maps anew. Collective over the ranks of the group.

        Ranks whose memory is not there take part too, so after a failure all may call again.

        Args:
            called: what this rank's caller has called; equal on all ranks.
            values: name -> value, equal on all ranks; what each of them releases.
            stop: checks that no round is open, and waits for the device. Local; under all locks.

        Raises:
            MoeNvlinkError: a rank failed. Nothing has changed, or no rank can run a verb.
        """
        if self.is_parents:
            self.check_usable()
        empty = self._empty_places()
        if gone := [rank for rank in self.left_out if rank not in empty]:
            raise ExchangeStateError(
                f"release() without rank(s) {', '.join(map(str, gone))}, which mask() or leave() "
                "has left out, and all ranks of the group release together; call renew() first"
            )
        with contextlib.ExitStack() as locks:

            def prepare() -> None:
                for channel in range(self.layout.num_channels):
                    locks.enter_context(self.channel_lock(channel))
                if not hasattr(self.memory, "release"):
                    raise UnsupportedError(
                        f"memory of {type(self.memory).__name__} cannot be released; use the "
                        "transport host or nvlink, or close all layers"
                    )
                if self.is_mapped:
                    self.check_no_capture("release()")
                    self.check_usable()
                    stop()
                    self.keep_totals()

            all_or_none(self.group, "preparing the release", prepare)
            tell(self.group, called, values, None)
            self._begin_without_memory(
                "release() has given it back; call renew() on all ranks of the group"
                + frameworks.advice(frameworks.RESTORE)
            )
            all_or_none(self.group, "unmapping the memory", self.memory.release)

    def check_no_capture(self, what: str) -> None:
        """Check that this thread's stream captures no CUDA graph. Local.

        Raises:
            ExchangeStateError: it does.
        """
        if self.executor.is_capturing():
            raise ExchangeStateError(
                f"{what} while the stream captures a CUDA graph; end the capture first"
            )

    def _begin_without_memory(self, why: str) -> None:
        with self._reading:
            self.is_mapped, self._is_away = False, True
            # Of a kind after which a renewal may be called again.
            self.broken = PeerError(why)

    @property
    def failure(self) -> MoeNvlinkError | None:
        """Why no verb can run; None if one can, or if memory is away on purpose. Any thread."""
        with self._reading:
            return None if self.is_away else self.broken

    @property
    def is_away(self) -> bool:
        """Whether the memory is released, or being renewed. Any thread."""
        return not self.is_mapped and self._is_away

    def check_mapped(self) -> None:
        """Check that there is memory. Local.

        Raises:
            ExchangeStateError: it has been released, or a renewal has failed; says what to do.
        """
        if not self.is_mapped:
            raise ExchangeStateError(
                f"rank {self.group.rank} has no memory: {self.broken}, or close all layers on the "
                "workspace"
            )

    def keep_totals(self) -> None:
        """Copy what `renew` writes into the fresh memory. Local; no verb runs."""
        if self.is_mapped:
            self._kept = [self._totals(channel) for channel in range(self.layout.num_channels)]
            self._last_stats = self.stats()

    def _totals(self, channel: int) -> list[tuple[Region, torch.Tensor]]:
        regions = self.layout.channel_regions(channel)
        kept = (regions["counters"], regions["wait_totals"])
        return [(region, self.region_bytes(region).to("cpu", copy=True)) for region in kept]

    def _begin_again(self) -> None:
        """Put into fresh memory what the host has put into the first, and the totals. Local."""
        assert self._faults is not None
        for channel in range(self.layout.num_channels):
            # Without it a fault would not reach the host: verbs would return wrong rows.
            region = self.layout.channel_regions(channel)["local"]
            self._faults.connect(channel, self.memory.local(region.offset, region.size_bytes))
        for of_region, content in itertools.chain.from_iterable(self._kept):
            self.region_bytes(of_region).copy_(content)
        self.meetings = 0
        self.left_out = self._empty_places()

    @contextlib.contextmanager
    def one_more_user(self, layout: WorkspaceLayout) -> Iterator[None]:
        """Count a layer whose regions have the places of this layout, if it can be made. Local."""
        self._users += 1
        self._layout = layout
        try:
            yield
        except BaseException:
            self.release()
            raise

    def count(self, layout: WorkspaceLayout, layers_so_far: int) -> None:
        """Take from other ranks the last layout, and how many layers there were. Local."""
        self._layout, self.layers_so_far = layout, layers_so_far

    def forsake(self) -> None:
        """Give up memory that no layer uses, if there is any. Local."""
        if self._memory is not None:
            self._users = 1
            self.release()

    def _place(self, layout: WorkspaceLayout, wanted: Sequence[Extent] = ()) -> None:
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
            # Memory comes in whole pages, so a layout may grow within mapped memory.
            if extents := wanted or layout.extents(before):
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
                # The layout does not contain the memory that is mapped now, and would map it again.
                self.broken = MoeNvlinkError(f"growing failed half-way: {error}")
                self._stray_bytes = layout.total_bytes - before.total_bytes
            raise
        self._memory, self._layout = memory, layout
        self.extents.extend(extents)
        if before is None:
            assert self._faults is not None
            # It also serves layers that are dropped without close.
            self._keep = weakref.finalize(
                self, _keep_for_graphs, self.group.rank, self.executor, memory, self._faults
            )
            self._keep.atexit = False

    def _connect_faults(
        self, memory: SymmetricMemory, layout: WorkspaceLayout, before: WorkspaceLayout | None
    ) -> None:
        # The transport provides zeros, and every other control word starts at zero.
        if self._faults is None:
            # The reader needs as many words as the largest region that it reads.
            self._reader = self.executor.word_reader(max(len(COUNTERS), self.group.size))
            self._faults = self.executor.fault_words(MAX_CHANNELS)
        for channel in range(0 if before is None else before.num_channels, layout.num_channels):
            region = layout.channel_regions(channel)["local"]
            self._faults.connect(channel, memory.local(region.offset, region.size_bytes))

    @property
    def mapped_bytes(self) -> int:
        """Bytes of memory that this rank has in the workspace now: 0 if released or closed."""
        is_there = self._memory is not None and self.is_mapped
        return self.layout.total_bytes + self._stray_bytes if is_there else 0

    def fault(self, channel: int) -> int:
        """Return the channel's fault word, if it has reached the host. Local; waits for nothing."""
        faults = self._faults
        return 0 if faults is None else faults.words[channel]

    @property
    def layout(self) -> WorkspaceLayout:
        """Layout in use."""
        if self._layout is None:
            raise ExchangeStateError("the workspace has not been allocated")
        return self._layout

    @property
    def memory(self) -> SymmetricMemory:
        """Window over all ranks' workspaces."""
        if self.is_parents:
            self.check_usable()
        if self._memory is None:
            raise ExchangeStateError(
                "the workspace is closed; create a new MoeAllToAll or HeadGroup"
            )
        return self._memory

    def region_bytes(self, region: Region, size_bytes: int | None = None) -> torch.Tensor:
        """Return the region of this rank as `[size_bytes]` uint8; the view keeps it mapped."""
        size = region.size_bytes if size_bytes is None else size_bytes
        return self.memory.local(region.offset, size)

    def words(self, region: Region, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the first `count` elements of a control region as a view."""
        return self.region_bytes(region, count * dtype.itemsize).view(dtype)

    def stats(self, *, wait: bool = True) -> ExchangeStats:
        """Return totals of all channels. Local.

        Args:
            wait: True: wait for this thread's stream; not capturable. False: wait for no launch, so
                the totals of running verbs may be missing; any thread may call, also while
                another thread captures a CUDA graph.
        """
        if self._memory is None or not self.is_mapped:
            return self._last_stats
        total = ExchangeStats()
        try:
            for channel in range(self.layout.num_channels):
                regions = self.layout.channel_regions(channel)
                counters = self._numbers(regions["counters"], len(COUNTERS), wait)
                waits = self._numbers(regions["wait_totals"], self.group.size, wait)
                total = total.plus(ExchangeStats._make([*counters, tuple(waits)]))
        except TransportError:
            if self.is_mapped:
                raise
        # A release or renewal may have begun meanwhile.
        return total if self.is_mapped else self._last_stats

    def _numbers(self, region: Region, count: int, wait: bool) -> list[int]:
        if not wait:
            return self._numbers_of(self.group.rank, region, count)
        numbers: list[int] = self.words(region, count, torch.int64).tolist()
        return numbers

    def _numbers_of(self, rank: int, region: Region, count: int) -> list[int]:
        """Return the first words of a rank's control region; waits for no launch."""
        with self._reading:
            memory = self.memory
            if not self.is_mapped or rank not in members_of(self.group):
                return [0] * count
            assert self._reader is not None
            address = memory.base_ptr + rank * memory.rank_stride + region.offset
            return self._reader.read(address, count)

    def waits(self) -> list[list[int]]:
        """Return the nanoseconds that rank r has waited for rank p, as [r][p], of all channels.

        Local; any thread may call. It reads the peers' memory and waits for no launch. All are 0
        while there is no memory.
        """
        size = self.group.size
        nothing = [[0] * size for _ in range(size)]
        waited = [[0] * size for _ in range(size)]
        for channel in range(self.layout.num_channels):
            region = self.layout.channel_regions(channel)["wait_totals"]
            for rank in members_of(self.group):  # an empty place has no memory
                if rank in self.left_out:  # its process has ended, maybe its memory too
                    continue
                for peer, number in enumerate(self._numbers_of(rank, region, size)):
                    waited[rank][peer] += number
        return waited if self.is_mapped else nothing  # and not a part of them

    def release(self) -> None:
        """Release the workspace for one layer; the last layer closes it. Local.

        It waits for this thread's stream. The verbs of other streams must have ended.
        """
        self._users -= 1
        if self._users > 0:
            return
        self.group = Left(self.group)
        if self._memory is None:
            return
        self._keep_last_stats()
        self._keep()
        with self._reading:
            self._memory.close()
            self._memory = self._faults = self._reader = None

    def _keep_last_stats(self) -> None:
        if self.is_parents:
            return
        try:
            if not self.executor.is_capturing():  # the copy would end the capture
                self._last_stats = self.stats()
        except (RuntimeError, MoeNvlinkError) as error:  # of a GPU that can do nothing any more
            logger.warning(
                "moe_nvlink: rank %d: the last counters are lost: %s", self.group.rank, error
            )


#: Workspaces of this process.
_alive: weakref.WeakSet[Workspace[Any]] = weakref.WeakSet()


def _leave_to_parent() -> None:
    for workspace in list(_alive):
        workspace.leave_to_parent()


os.register_at_fork(after_in_child=_leave_to_parent)


def _keep_for_graphs(
    rank: int, executor: WorkspaceExecutor, memory: SymmetricMemory, faults: FaultWords
) -> None:
    """Keep a closing workspace's memory mapped if CUDA graphs have captured its addresses."""
    if executor.captured:
        logger.warning(
            "moe_nvlink: rank %d: the workspace stays mapped until the process ends, because CUDA "
            "graphs were captured with it and may still be replayed",
            rank,
        )
        memory.leak()
        faults.leak()
