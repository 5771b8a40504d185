"""Transport `nvlink`: CUDA virtual memory shared among GPUs of one NVLink domain.

Each rank is a process, or a thread that has a GPU of its own. One window of addresses covers all
ranks' workspaces. In `extend`, each rank creates memory on its own GPU, one handle per extent, and
sends the handles to every other rank: as file descriptors inside a host, as FABRIC bytes between
hosts. It maps the memory of all ranks into the window and releases the handles at once, because the
mappings keep the memory alive. Before that, in `reserve`, the ranks agree which of the two ways
they use, and whether all pairs of ranks can reach each other.

No GPU has run this. The tests run it through unmodified cuda-python on a stand-in for the driver.
"""

from __future__ import annotations

import collections
import contextlib
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from moe_nvlink_plugin import driver, env, frameworks
from moe_nvlink_plugin.errors import DriverError, MoeNvlinkError, TransportError, UnsupportedError
from moe_nvlink_plugin.groups import Group, all_or_none, members_of

from . import topology, vmm
from .base import Extent
from .descriptors import Address, Listener
from .window import MappedRanges, check_same_extents, round_up

T = TypeVar("T")

#: (owner, address, bytes) -> `[bytes] uint8` that keeps `owner` alive.
View = Callable[[object, int, int], torch.Tensor]


def _on_device(index: int, body: Callable[[], T]) -> T:
    with driver.on_device(index):
        return body()


class _Unused(NamedTuple):
    """Window without references that is still mapped. Sizes are bytes."""

    gpu: int
    base: int
    size_bytes: int
    mappings: list[tuple[int, int]]


#: Windows whose last view is gone. The garbage collector chooses that moment, perhaps while a
#: thread captures a CUDA graph, and waiting for the GPU would break the capture. Therefore the
#: windows stay here until a call that may wait for the GPU unmaps them.
_unused: collections.deque[_Unused] = collections.deque()


class _Window:
    """Reserved addresses, and the mappings in them. Views keep the window alive."""

    def __init__(self, index: int, size_bytes: int) -> None:
        self.base_ptr = int(driver.call("cuMemAddressReserve", size_bytes, 0, 0, 0))
        self.mappings: list[tuple[int, int]] = []
        self._free = weakref.finalize(
            self, _unused.append, _Unused(index, self.base_ptr, size_bytes, self.mappings)
        )
        self._free.atexit = False  # the driver may be gone by then; the process's end frees it

    def leak(self) -> None:
        self._free.detach()


# A fork has no context of the driver's; what is unused there is the parent's to unmap.
os.register_at_fork(after_in_child=_unused.clear)


def unmap_unused() -> None:
    """Unmap the windows that have no references. Local; waits for the GPU.

    No thread may capture a CUDA graph on that GPU meanwhile.
    """
    while _unused:
        try:
            window = _unused.popleft()
        except IndexError:  # another thread was faster
            return
        try:
            with driver.on_device(window.gpu):
                driver.call("cuCtxSynchronize")
                for address, size in window.mappings:
                    vmm.quietly("cuMemUnmap", address, size)
                vmm.quietly("cuMemAddressFree", window.base, window.size_bytes)
        except MoeNvlinkError as error:
            # The memory stays until the process ends, because a running kernel may still use it.
            vmm.logger.warning("moe_nvlink: a window of GPU %d stays mapped: %s", window.gpu, error)


class _Agreed(NamedTuple):
    """What the ranks have agreed on before they reserve memory.

    Attributes:
        sharing: how the ranks share memory.
        ranks_on_device: how many ranks use this rank's GPU, this rank included.
    """

    sharing: vmm.Sharing
    ranks_on_device: int


class NvlinkMemory:
    """Address window over the memory of all ranks' GPUs."""

    def __init__(
        self, group: Group, index: int, agreed: _Agreed, reserve_bytes: int, view: View
    ) -> None:
        self._group, self._index, self._view = group, index, view
        self._sharing, self.ranks_on_device = agreed
        sharing = agreed.sharing
        self._timeout_s = env.timeout_s()
        unit = vmm.granularity(index, sharing)
        if vmm.GRANULARITY % unit != 0:
            raise UnsupportedError(
                f"GPU {index} maps memory in units of {unit} bytes, and this release supports "
                f"{vmm.GRANULARITY}; use another all-to-all backend on this machine"
            )
        self.rank_stride = round_up(max(reserve_bytes, 1), vmm.GRANULARITY)
        try:
            self._window: _Window | None = _Window(index, self.rank_stride * group.size)
        except DriverError as error:
            raise TransportError(
                f"cannot reserve {group.size} x {self.rank_stride} bytes of addresses: {error}; "
                "lower max_tokens_per_rank or num_channels"
            ) from error
        self.base_ptr = self._window.base_ptr
        self._mapped = MappedRanges(self.rank_stride, vmm.GRANULARITY)

    def extend(self, extents: Sequence[Extent]) -> None:
        """Map zeroed GPU memory of every rank at these ranges. Collective; not capturable.

        Raises:
            TransportError: this rank could not create, share or map memory; says what to do.
            PeerError: another rank could not. In both cases this call leaves nothing mapped.
        """
        building = _Building(self, tuple(extents))
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(building.take_back)
            offer = self._step("creating GPU memory", building.create)
            offers = self._group.all_gather_object(offer)
            self._step("mapping the ranks' memory", lambda: building.connect(offers))
            # From here on only the mappings keep the memory, on every rank.
            self._step("clearing GPU memory", building.finish)
            on_failure.pop_all()
        self.window.mappings.extend(building.mappings)
        self._mapped.add(extents)

    def renew(self, group: Group) -> None:
        """Unmap everything, and go on with the ranks of another group. Collective; see base.

        It waits for the GPU.

        Raises:
            UnsupportedError: as `NvlinkTransport.reserve`; or more ranks than before would use this
                rank's GPU, of which the kernels of each got their share when they were loaded.
            TransportError: the memory is closed, or cannot be unmapped.
            PeerError: another rank failed.
        """
        all_or_none(group, "finding the GPU", lambda: self.window)
        agreed = _agree(group, self._index)
        all_or_none(
            group,
            "reserving addresses",
            lambda: _on_device(self._index, lambda: self._give_up(agreed)),
        )
        self._group, self._sharing = group, agreed.sharing

    def _give_up(self, agreed: _Agreed) -> None:
        if agreed.ranks_on_device > self.ranks_on_device:
            raise UnsupportedError(
                f"{agreed.ranks_on_device} ranks would use GPU {self._index}, of which this rank's "
                f"kernels take a share for {self.ranks_on_device}; start the new rank on another "
                "GPU"
            )
        self._unmap()

    def release(self) -> None:
        """Unmap everything; see base. Local; it waits for the GPU.

        Raises:
            TransportError, DriverError: the memory is closed, or cannot be unmapped.
        """
        _on_device(self._index, self._unmap)

    def _unmap(self) -> None:
        mappings = self.window.mappings
        driver.call("cuCtxSynchronize")
        while mappings:
            driver.call("cuMemUnmap", *mappings[-1])
            mappings.pop()
        self._mapped.clear()

    def _step(self, what: str, body: Callable[[], T]) -> T:
        return all_or_none(self._group, what, lambda: _on_device(self._index, body))

    @property
    def window(self) -> _Window:
        """Window of addresses.

        Raises:
            TransportError: the memory is closed.
        """
        if self._window is None:
            raise TransportError("the GPU memory has been closed")
        return self._window

    def local(self, offset: int, size_bytes: int) -> torch.Tensor:
        """Return bytes of this rank's workspace, `[size_bytes]` uint8, as a new storage. Local.

        Raises:
            TransportError: the range is not mapped, or the memory is closed.
        """
        window = self.window
        self._mapped.require(offset, size_bytes)
        address = self.base_ptr + self._group.rank * self.rank_stride + offset
        made = self._view(window, address, size_bytes)
        if size_bytes and made.data_ptr() != address:
            raise TransportError(
                f"torch made a copy of GPU memory instead of a view ({made.device}); is the "
                f"group's device the one this process uses (GPU {self._index})?"
            )
        return made

    def close(self) -> None:
        """Give up the window; it stays mapped as long as a tensor over it exists. Local.

        It waits for the GPU, so no thread may capture a CUDA graph on that GPU meanwhile. If a
        tensor outlives this call, the next `close` or `reserve` in the process unmaps the window.
        """
        self._window = None
        unmap_unused()

    def leak(self) -> None:
        """Keep the window mapped until the process ends. Local; call it before `close`."""
        self.window.leak()


class _Offer(NamedTuple):
    """Message of a rank to the other ranks in `extend`."""

    extents: tuple[Extent, ...]
    fabric: list[bytes]  # one FABRIC handle per extent; empty with descriptors
    address: Address | None  # where this rank takes descriptors; None with FABRIC handles


class _Building:
    """What one `extend` has created so far on this rank."""

    def __init__(self, memory: NvlinkMemory, extents: tuple[Extent, ...]) -> None:
        self._memory, self._extents = memory, extents
        self._handles: list[Any] = []
        self._shared: list[Any] = []
        self._listener: Listener | None = None
        self.mappings: list[tuple[int, int]] = []

    def create(self) -> _Offer:
        """Create memory on this rank's GPU, map it here, and export its handles."""
        memory = self._memory
        _ = memory.window  # raises if closed
        memory._mapped.check(self._extents)
        is_posix = memory._sharing is vmm.Sharing.POSIX
        prop = vmm.properties(memory._index, memory._sharing)
        for extent in self._extents:
            self._handles.append(self._create_one(prop, _rounded(extent)))
            self._map(memory._group.rank, extent, self._handles[-1])
        with _explained("exporting GPU memory", "`moe-nvlink doctor` tries it step by step"):
            for handle in self._handles:
                self._shared.append(vmm.export_handle(memory._sharing, handle))
        if is_posix:
            self._listener = Listener()
            return _Offer(self._extents, [], self._listener.address)
        return _Offer(self._extents, self._shared, None)

    def _create_one(self, prop: Any, size_bytes: int) -> Any:
        try:
            return driver.call("cuMemCreate", size_bytes, prop, 0)
        except DriverError as error:
            if error.status != "CUDA_ERROR_OUT_OF_MEMORY":
                raise TransportError(f"creating GPU memory: {error}") from error
            free, total = driver.call("cuMemGetInfo")
            sizes = [_rounded(one) for one in self._extents]
            wanted, free = sum(sizes), free + sum(sizes[: len(self._handles)])
            raise TransportError(
                f"GPU {self._memory._index} has no room for {wanted} more bytes of workspace; "
                f"{free} of its {total} bytes are free. A workspace takes ep_size "
                f"({self._memory._group.size}) x max_tokens_per_rank x (bytes of a token's payload "
                "rows + of its widest combined row) x num_channels, and up to 128 MiB x "
                "num_channels for small batches. Lower max_tokens_per_rank"
                f"{frameworks.advice(frameworks.CAPACITY)}, choose a recipe or dtype with fewer "
                "bytes per token, lower num_channels or set MOE_NVLINK_SMALL_TOKENS=0; or leave "
                f"more room on the GPU{frameworks.advice(frameworks.GPU_MEMORY)}"
            ) from error

    def connect(self, offers: Sequence[_Offer]) -> None:
        """Map the other ranks' memory.

        With descriptors nothing may fail here before `exchange`, because the other ranks wait for
        this rank in it.
        """
        memory = self._memory
        rank = memory._group.rank
        check_same_extents(memory._group, self._extents, [offer.extents for offer in offers])
        placed = dict(zip(members_of(memory._group), offers, strict=True))
        if self._listener is None:
            for peer, offer in placed.items():
                if peer != rank:
                    self._receive(peer, offer.fabric)
            return
        present = {peer: offer.address for peer, offer in placed.items()}
        addresses = [present.get(peer) for peer in range(memory._group.size)]
        self._listener.exchange(rank, addresses, self._shared, self._receive, memory._timeout_s)

    def _receive(self, peer: int, shared: Sequence[Any]) -> None:
        for extent, one in zip(self._extents, shared, strict=True):
            what, hint = f"importing rank {peer}'s memory", "`moe-nvlink doctor` tries it alone"
            with _explained(what, hint):
                handle = vmm.import_handle(self._memory._sharing, one)
            self._handles.append(handle)
            self._map(peer, extent, handle)
            self._release(handle)

    def _map(self, peer: int, extent: Extent, handle: Any) -> None:
        memory, size_bytes = self._memory, _rounded(extent)
        address = memory.base_ptr + peer * memory.rank_stride + extent.offset
        hint = "`nvidia-smi topo -p2p n` shows whether the two GPUs may reach each other"
        with _explained(f"mapping rank {peer}'s memory", hint):
            driver.call("cuMemMap", address, size_bytes, 0, handle, 0)
            self.mappings.append((address, size_bytes))
            vmm.allow(memory._index, address, size_bytes)

    def _release(self, handle: Any) -> None:
        driver.call("cuMemRelease", handle)
        self._handles.remove(handle)

    def finish(self) -> None:
        """Release everything except the mappings, and write zeros to this rank's memory."""
        self._close_exchange()
        for handle in list(self._handles):
            self._release(handle)
        memory = self._memory
        for extent in self._extents:
            mine = memory.base_ptr + memory._group.rank * memory.rank_stride + extent.offset
            vmm.clear(mine, _rounded(extent))

    def _close_exchange(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None
            while self._shared:
                os.close(self._shared.pop())

    def take_back(self) -> None:
        """Undo everything, in reverse order."""
        while self.mappings:
            vmm.quietly("cuMemUnmap", *self.mappings.pop())
        while self._handles:
            vmm.quietly("cuMemRelease", self._handles.pop())
        if self._memory._sharing is vmm.Sharing.POSIX:
            while self._shared:
                os.close(self._shared.pop())
        self._close_exchange()


def _rounded(extent: Extent) -> int:
    return round_up(extent.size_bytes, vmm.GRANULARITY)


@contextlib.contextmanager
def _explained(what: str, hint: str) -> Iterator[None]:
    try:
        yield
    except DriverError as error:
        raise TransportError(f"{what}: {error}; {hint}") from error


class _CudaArray:
    """GPU memory in numba's protocol, which torch takes; the tensor keeps this object alive."""

    def __init__(self, owner: object, address: int, size_bytes: int) -> None:
        self._owner = owner
        self.__cuda_array_interface__ = {
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


class NvlinkTransport:
    """Transport by CUDA virtual memory among the GPUs of one NVLink domain."""

    name = "nvlink"
    executor = "cuda"
    extent_alignment = vmm.GRANULARITY

    def serves(self, device: torch.device) -> bool:
        """Return whether the device is a CUDA GPU. Local."""
        return device.type == "cuda"

    def reserve(self, group: Group, reserve_bytes: int, device: torch.device) -> NvlinkMemory:
        """Agree how to share memory, then reserve addresses for every rank's workspace. Collective.

        Args:
            group: the ranks.
            reserve_bytes: bytes per rank.
            device: GPU of this rank; without an index, torch's current one.

        Raises:
            UnsupportedError: this rank has no driver or no such GPU. On every rank: there is a MIG
                slice, two ranks use one GPU (MOE_NVLINK_ALLOW_SHARED_GPU allows it for processes),
                no NVLink connects two ranks, or there is no way to share memory.
            TransportError: this rank could not reserve addresses.
            PeerError: another rank failed.
        """
        unmap_unused()
        index = all_or_none(group, "finding the GPU", lambda: self._device_index(device, group))
        agreed = _agree(group, index)

        made: list[NvlinkMemory] = []

        def make() -> NvlinkMemory:
            made.append(NvlinkMemory(group, index, agreed, reserve_bytes, self._view(device)))
            return made[0]

        try:
            return all_or_none(group, "reserving addresses", make)
        except BaseException:
            for memory in made:
                memory.close()
            raise

    def _device_index(self, device: torch.device, group: Group) -> int:
        driver.api()  # its error says what is missing; torch's error would not
        return torch.cuda.current_device() if device.index is None else device.index

    def _view(self, device: torch.device) -> View:
        def view(owner: object, address: int, size_bytes: int) -> torch.Tensor:
            if size_bytes == 0:
                return torch.empty(0, dtype=torch.uint8, device=device)
            return torch.as_tensor(_CudaArray(owner, address, size_bytes), device=device)

        return view


def _agree(group: Group, index: int) -> _Agreed:
    """Exchange facts about the ranks' GPUs and decide how to share memory. Collective."""
    with contextlib.ExitStack() as stack:

        def look() -> topology.Facts:
            trial = stack.enter_context(contextlib.closing(vmm.FabricTrial(index)))
            return topology.look(index, trial)

        mine = all_or_none(group, "looking at the GPU", lambda: _on_device(index, look))
        ranks: list[topology.Facts] = group.all_gather_object(mine)
        me = list(members_of(group)).index(group.rank)
        stack.enter_context(_places_named(group))
        sharing = topology.decide(ranks)
        if sharing is vmm.Sharing.FABRIC:
            failed = all_or_none(
                group, "trying FABRIC handles", lambda: topology.try_peers(me, ranks)
            )
            topology.check_trials(ranks, group.all_gather_object(failed))
        return _Agreed(sharing, topology.ranks_on_gpu(me, ranks))


@contextlib.contextmanager
def _places_named(group: Group) -> Iterator[None]:
    """Say in an error which ranks it numbers, if some places of the group are empty."""
    try:
        yield
    except UnsupportedError as error:
        members = list(members_of(group))
        if members == list(range(group.size)):
            raise
        raise UnsupportedError(
            f"{error} (here ranks 0, 1, 2, ... are those in places {members})"
        ) from error
