"""Transport `host`: POSIX shared memory between processes (or threads) of one host.

In `reserve`, the ranks compare their hosts: boot ids, and the file system of /dev/shm.

In every `extend`, each rank creates one shared memory object, which only its user may read and
write, and which holds all extents one after the other. Each rank opens and maps the objects of all
ranks. After all ranks have mapped them, each rank removes the name of its object, so that no file
exists that a crash could leave. Until then the creator holds a lock on the file. If the lock of a
file is free, its creator has died, and the next rank of the same user removes the file.

Linux places a page by the memory policy of the thread that first needs it: without a policy on the
NUMA node of the core on which the thread runs. A rank allocates all pages of its object before any
peer can open it, so they lie on the rank's own node. kernels/README.md says why each region belongs
there. Then the rank asks Linux to collect its pages into huge pages, which stay on that node.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import secrets
import stat
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from moe_nvlink_plugin.errors import TransportError
from moe_nvlink_plugin.groups import Group, all_or_none, members_of

from . import hosts
from .base import HUGE_PAGE_BYTES, Extent
from .window import MappedRanges, check_same_extents, round_up

_DIRECTORY = hosts.SHARED_MEMORY
_PREFIX = "moe_nvlink-"
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_MAP_FAILED = ctypes.c_void_p(-1).value
_MADV_COLLAPSE = 25  # since Linux 6.1; the module mmap does not name it

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def _mmap(address: int, size: int, protection: int, flags: int, fd: int, offset: int) -> int:
    result = _libc.mmap(address or None, size, protection, flags, fd, offset)
    if result is None or result == _MAP_FAILED:
        code = ctypes.get_errno()
        raise TransportError(
            f"mapping {size} bytes failed: {os.strerror(code)}; lift the limit of addresses "
            "(ulimit -v unlimited): a rank reserves at least 4 GiB of them for every rank"
        )
    return int(result)


def _map_nothing(address: int, size: int) -> int:
    """Reserve addresses that nobody may access; it replaces what was mapped there. Local."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    return _mmap(address, size, 0, flags | (_MAP_FIXED if address else 0), -1, 0)


def _reserve_window(size_bytes: int) -> int:
    """Reserve addresses that start at a multiple of HUGE_PAGE_BYTES. Local."""
    first = _map_nothing(0, size_bytes + HUGE_PAGE_BYTES)
    start = round_up(first, HUGE_PAGE_BYTES)
    for unused, end in ((first, start), (start + size_bytes, first + size_bytes + HUGE_PAGE_BYTES)):
        if unused < end:
            _libc.munmap(unused, end - unused)
    return start


#: (address, bytes) of the windows that are mapped.
_windows: set[tuple[int, int]] = set()


def _unmap_window(window: tuple[int, int]) -> None:
    _windows.discard(window)
    _libc.munmap(*window)


def _map_zeros(address: int, size: int) -> None:
    """Map zeros of this process's own, so that tensors there stay valid addresses. Local."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED
    try:
        _mmap(address, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    except TransportError:  # the system commits no such size: then nobody may look there
        _map_nothing(address, size)


def _leave_windows_to_the_parent() -> None:
    """Replace the shared memory by zeros of this process's own, after a fork.

    The child's tensors stay valid addresses, but what it writes there must not reach the ranks: the
    parent is one of them, and goes on.
    """
    for address, size in list(_windows):  # the collector may unmap one meanwhile
        if (address, size) in _windows:
            _map_zeros(address, size)


os.register_at_fork(after_in_child=_leave_windows_to_the_parent)


def collapse(address: int, size_bytes: int) -> bool:
    """Collect the whole huge pages in a mapped range; return whether Linux did. Local.

    The content stays. Linux refuses before version 6.1, without transparent huge pages, and if no
    huge page is free on the node that has the pages. The range then keeps the pages that it has,
    and works. Linux asks no setting for this call but one: `deny` in
    /sys/kernel/mm/transparent_hugepage/shmem_enabled, after which it refuses too.
    """
    first = round_up(address, HUGE_PAGE_BYTES)
    whole = (address + size_bytes - first) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    return whole > 0 and _libc.madvise(first, whole, _MADV_COLLAPSE) == 0


class _Segment:
    """Shared memory object of this rank, as long as it has a name."""

    def __init__(self, pieces: Sequence[_Piece]) -> None:
        self.path, self.fd = _create_locked_file()
        try:
            for piece in pieces:
                _reserve_pages(self.fd, piece)
        except BaseException:
            self.close()
            raise

    def unlink(self) -> None:
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        self.unlink()
        os.close(self.fd)


def _create_locked_file() -> tuple[Path, int]:
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    for _attempt in range(16):
        path = _DIRECTORY / f"{_PREFIX}{os.getuid()}-{os.getpid()}-{secrets.token_hex(8)}"
        try:
            fd = os.open(path, flags, 0o600)
        except OSError as error:
            raise TransportError(
                f"cannot create {path}: {error.strerror}; CPU ranks need a writable {_DIRECTORY}"
            ) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(fd).st_nlink == 1:
                return path, fd
        except BlockingIOError:
            pass  # another rank's sweep locked the file between the two calls, and removes it
        os.close(fd)
    raise TransportError(f"cannot keep a file in {_DIRECTORY}: something removes it at once")


def _reserve_pages(fd: int, piece: _Piece) -> None:
    """Allocate the pages now, by this rank.

    If a page were missing later, SIGBUS would kill the process. If a peer needed a page first, the
    page could lie on the peer's NUMA node.
    """
    try:
        os.posix_fallocate(fd, piece.file_offset, piece.size_bytes)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.ENOMEM):
            limit = "; lift the limit of file sizes (ulimit -f unlimited)"
            raise TransportError(
                f"cannot get {piece.size_bytes} bytes of shared memory in {_DIRECTORY}: "
                f"{error.strerror}{limit if error.errno == errno.EFBIG else ''}"
            ) from error
        free = os.statvfs(_DIRECTORY)
        raise TransportError(
            f"{piece.size_bytes} bytes of shared memory are needed, {_DIRECTORY} has "
            f"{free.f_bavail * free.f_frsize} free; enlarge it (docker: --shm-size) or lower "
            "max_tokens_per_rank"
        ) from error


def remove_abandoned_segments() -> None:
    """Remove this user's objects whose creator died before it removed them. Local."""
    for path in _DIRECTORY.glob(f"{_PREFIX}{os.getuid()}-*"):
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue  # another rank has removed it
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
        except OSError:
            pass  # its creator is alive
        finally:
            os.close(fd)


def _open_peer(name: str, size_bytes: int, peer: int) -> int:
    path = _DIRECTORY / Path(name).name
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise TransportError(
            f"cannot open rank {peer}'s shared memory {path}: {error.strerror}; all ranks must run "
            "on one host, as one user, and see the same /dev/shm"
        ) from error
    status = os.fstat(fd)
    if status.st_uid != os.getuid() or not stat.S_ISREG(status.st_mode):
        os.close(fd)
        raise TransportError(f"rank {peer}'s shared memory {path} is not owned by this user")
    if status.st_size != size_bytes:
        os.close(fd)
        raise TransportError(
            f"rank {peer}'s shared memory has {status.st_size} bytes, this rank expects "
            f"{size_bytes}; the ranks' configurations differ"
        )
    return fd


class HostMemory:
    """Address window in which rank r's objects lie at base_ptr + r * rank_stride + offset."""

    ranks_on_device = 1

    def __init__(self, group: Group, reserve_bytes: int) -> None:
        self._group = group
        self.rank_stride = round_up(max(reserve_bytes, 1), HUGE_PAGE_BYTES)
        self.base_ptr = _reserve_window(self.rank_stride * group.size)
        self._mapped = MappedRanges(self.rank_stride, mmap.PAGESIZE)
        # Tensors keep the ctypes array alive. After the last of them is gone, the window is
        # unmapped.
        array = ctypes.c_char * self.rank_stride
        mine = self.base_ptr + group.rank * self.rank_stride
        self._buffer: ctypes.Array[ctypes.c_char] | None = array.from_address(mine)
        window = (self.base_ptr, self.rank_stride * group.size)
        _windows.add(window)
        self._unmap = weakref.finalize(self._buffer, _unmap_window, window)
        self._unmap.atexit = False  # the process's end unmaps it, after the last access

    def extend(self, extents: Sequence[Extent]) -> None:
        """Map zeroed shared memory of every rank at these ranges. Collective.

        Raises:
            TransportError: this rank could not create, open or map an object.
            PeerError: another rank could not. In both cases this call leaves nothing mapped.
        """
        remove_abandoned_segments()
        group = self._group
        segment: _Segment | None = None
        pieces: list[_Piece] = []

        def create() -> _Segment:
            nonlocal segment, pieces
            self._check_open()
            self._mapped.check(extents)
            pieces = _pieces(extents)
            segment = _Segment(pieces)
            return segment

        try:
            mine = all_or_none(group, "creating shared memory", create)
            told = group.all_gather_object((mine.path.name, tuple(extents)))
            names = [name for name, _extents in told]
            theirs = [asked for _name, asked in told]

            def map_all() -> None:
                check_same_extents(group, extents, theirs)
                self._map_all(mine, names, pieces)

            all_or_none(group, "mapping shared memory", map_all)
        except BaseException:
            self._take_back(pieces)
            raise
        finally:
            # All ranks have mapped the object, or the set-up failed. Nobody needs its name now.
            if segment is not None:
                segment.close()
        self._mapped.add(extents)

    def renew(self, group: Group) -> None:
        """Unmap everything, and go on with the ranks of another group. Collective; see base.

        Raises:
            UnsupportedError: the ranks are on several hosts, or see several /dev/shm.
            TransportError: the memory is closed, or cannot be unmapped.
            PeerError: another rank failed.
        """
        _check_one_host(group)
        all_or_none(group, "reserving addresses", self.release)
        self._group = group

    def release(self) -> None:
        """Unmap everything; see base. Local.

        Raises:
            TransportError: the memory is closed, or cannot be unmapped.
        """
        self._check_open()
        for rank in range(self._group.size):
            # Tensors over the own part stay valid addresses.
            replace = _map_zeros if rank == self._group.rank else _map_nothing
            replace(self.base_ptr + rank * self.rank_stride, self.rank_stride)
        self._mapped.clear()

    def _map_all(self, mine: _Segment, names: list[str], pieces: list[_Piece]) -> None:
        size_bytes = pieces[-1].file_offset + pieces[-1].size_bytes
        for peer, name in zip(members_of(self._group), names, strict=True):
            if peer == self._group.rank:
                self._map_rank(peer, mine.fd, pieces)
                for piece in pieces:
                    collapse(self._address(peer, piece), piece.size_bytes)
                continue
            fd = _open_peer(name, size_bytes, peer)
            try:
                self._map_rank(peer, fd, pieces)
            finally:
                os.close(fd)

    def _map_rank(self, peer: int, fd: int, pieces: list[_Piece]) -> None:
        protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED
        for piece in pieces:
            address = self._address(peer, piece)
            _mmap(address, piece.size_bytes, protection, flags, fd, piece.file_offset)

    def _take_back(self, pieces: list[_Piece]) -> None:
        for peer in range(self._group.size):
            take = _map_zeros if peer == self._group.rank else _map_nothing
            for piece in pieces:
                take(self._address(peer, piece), piece.size_bytes)

    def _address(self, rank: int, piece: _Piece) -> int:
        return self.base_ptr + rank * self.rank_stride + piece.offset

    def _check_open(self) -> ctypes.Array[ctypes.c_char]:
        if self._buffer is None:
            raise TransportError("the shared memory has been closed")
        return self._buffer

    def local(self, offset: int, size_bytes: int) -> torch.Tensor:
        """Return bytes of this rank's workspace, `[size_bytes]` uint8, as a new storage. Local.

        Raises:
            TransportError: the range is not mapped, or the memory is closed.
        """
        buffer = self._check_open()
        self._mapped.require(offset, size_bytes)
        return torch.frombuffer(buffer, dtype=torch.uint8, offset=offset, count=size_bytes)

    def close(self) -> None:
        """Give up the window; it stays mapped as long as a tensor over it exists. Local."""
        self._buffer = None

    def leak(self) -> None:
        """Keep the window mapped until the process ends. Local."""
        self._unmap.detach()


def _check_one_host(group: Group) -> None:
    everyones = group.all_gather_object(hosts.here())
    hosts.check_shared(dict(zip(members_of(group), everyones, strict=True)))


class _Piece(NamedTuple):
    """Mapped range of every rank's workspace, and its place in the shared object; all in bytes."""

    offset: int
    size_bytes: int
    file_offset: int


def _pieces(extents: Sequence[Extent]) -> list[_Piece]:
    """Place extents in an object, as far from a multiple of HUGE_PAGE_BYTES as in the window.

    Otherwise no huge page could be mapped. The holes between the extents have no memory.
    """
    pieces, end = [], 0
    for extent in extents:
        file_offset = end + (extent.offset - end) % HUGE_PAGE_BYTES
        size_bytes = round_up(extent.size_bytes, mmap.PAGESIZE)
        pieces.append(_Piece(extent.offset, size_bytes, file_offset))
        end = file_offset + size_bytes
    return pieces


class HostTransport:
    """Transport by POSIX shared memory among the ranks of one host."""

    name = "host"
    executor = "host"
    extent_alignment = mmap.PAGESIZE

    def serves(self, device: torch.device) -> bool:
        """Return whether the device is a CPU. Local."""
        return device.type == "cpu"

    def reserve(self, group: Group, reserve_bytes: int, device: torch.device) -> HostMemory:
        """Reserve addresses for every rank's workspace. Collective.

        Args:
            group: the ranks.
            reserve_bytes: bytes per rank.
            device: not used.

        Raises:
            UnsupportedError: the ranks are on several hosts, or see several /dev/shm.
            TransportError: this rank's address space is too small.
            PeerError: another rank's address space is too small.
        """
        _check_one_host(group)
        return all_or_none(group, "reserving addresses", lambda: HostMemory(group, reserve_bytes))
