"""Transport `host`: ranks are processes (or threads) of one machine, memory is POSIX shared memory.

Every rank creates one object, readable and writable by its owner only, opens everybody's, and
takes its own name away as soon as all ranks have mapped it; from then on no file exists that a
crash could leave behind. Before that, the creator holds a lock on the file: a file whose lock is
free belongs to a rank that died in between, and the next rank of the same user removes it.
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
from pathlib import Path

import torch

from moe_nvlink_plugin.errors import TransportError
from moe_nvlink_plugin.groups import Group, all_or_none

_DIRECTORY = Path("/dev/shm")  # where Linux keeps POSIX shared memory objects
_PREFIX = "moe_nvlink-"
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_MAP_FAILED = ctypes.c_void_p(-1).value

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


def _mmap(address: int, size: int, protection: int, flags: int, fd: int) -> int:
    result = _libc.mmap(address or None, size, protection, flags, fd, 0)
    if result is None or result == _MAP_FAILED:
        code = ctypes.get_errno()
        raise TransportError(
            f"mapping {size} bytes failed: {os.strerror(code)}; raise the address-space limit "
            "(ulimit -v) or lower max_tokens_per_rank"
        )
    return int(result)


class _Segment:
    """This rank's shared memory object, while it has a name."""

    def __init__(self, size_bytes: int) -> None:
        self.path, self.fd = _create_locked_file()
        try:
            _reserve_pages(self.fd, size_bytes)
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
            pass  # a sweeping rank looked at the file between the two calls and removes it
        os.close(fd)
    raise TransportError(f"cannot keep a file in {_DIRECTORY}: something removes it at once")


def _reserve_pages(fd: int, size_bytes: int) -> None:
    """Takes the memory now: a page missing later would kill the process with SIGBUS."""
    try:
        os.posix_fallocate(fd, 0, size_bytes)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.ENOMEM):
            raise TransportError(f"cannot size shared memory: {error.strerror}") from error
        free = os.statvfs(_DIRECTORY)
        raise TransportError(
            f"{size_bytes} bytes of shared memory are needed, {_DIRECTORY} has "
            f"{free.f_bavail * free.f_frsize} free; enlarge it (docker: --shm-size) or lower "
            "max_tokens_per_rank"
        ) from error


def remove_abandoned_segments() -> None:
    """Removes objects of this user whose creator died before it could. Local."""
    for path in _DIRECTORY.glob(f"{_PREFIX}{os.getuid()}-*"):
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue  # gone meanwhile
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
        except OSError:
            pass  # its creator lives
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
    """One address window: rank r's object mapped at base_ptr + r * rank_stride."""

    def __init__(self, num_ranks: int, rank: int, size_bytes: int) -> None:
        self._rank = rank
        self._size_bytes = size_bytes
        self.rank_stride = -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        window_bytes = self.rank_stride * num_ranks
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        self.base_ptr = _mmap(0, window_bytes, 0, flags, -1)
        # The ctypes array is what tensors hold on to; the window goes when the last of them does.
        array = ctypes.c_char * size_bytes
        self._buffer: ctypes.Array[ctypes.c_char] | None = array.from_address(
            self.base_ptr + rank * self.rank_stride
        )
        finalizer = weakref.finalize(self._buffer, _libc.munmap, self.base_ptr, window_bytes)
        finalizer.atexit = False  # the process's end unmaps it anyway, after the last access

    def map_rank(self, peer: int, fd: int) -> None:
        """Maps a rank's object into its place in the window."""
        address = self.base_ptr + peer * self.rank_stride
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        _mmap(address, self._size_bytes, protection, mmap.MAP_SHARED | _MAP_FIXED, fd)

    def local(self, offset: int, size_bytes: int) -> torch.Tensor:
        """Bytes of this rank's workspace, `[size_bytes] uint8`, in a storage of their own."""
        if self._buffer is None:
            raise TransportError("the shared memory has been closed")
        return torch.frombuffer(self._buffer, dtype=torch.uint8, offset=offset, count=size_bytes)

    def close(self) -> None:
        """Drops this object's hold on the window; tensors over it keep it. Local."""
        self._buffer = None


class HostTransport:
    """POSIX shared memory among the ranks of one machine."""

    name = "host"

    def serves(self, device: torch.device) -> bool:
        """CPU ranks."""
        return device.type == "cpu"

    def allocate(self, group: Group, size_bytes: int, device: torch.device) -> HostMemory:
        """Zeroed shared memory of `size_bytes` per rank. Collective.

        Raises:
            TransportError: this rank could not create, open or map an object.
            PeerError: another rank could not; everything made here has been rolled back.
        """
        remove_abandoned_segments()
        segment: _Segment | None = None

        def create() -> _Segment:
            nonlocal segment
            segment = _Segment(size_bytes)
            return segment

        try:
            mine = all_or_none(group, "creating shared memory", create)
            names = group.all_gather_object(mine.path.name)
            return all_or_none(
                group,
                "mapping shared memory",
                lambda: _map_all(mine, names, size_bytes, group.rank),
            )
        finally:
            # All ranks have mapped it, or the set-up failed: either way the name has served.
            if segment is not None:
                segment.close()


def _map_all(mine: _Segment, names: list[str], size_bytes: int, rank: int) -> HostMemory:
    memory = HostMemory(len(names), rank, size_bytes)
    for peer, name in enumerate(names):
        if peer == rank:
            memory.map_rank(peer, mine.fd)
            continue
        fd = _open_peer(name, size_bytes, peer)
        try:
            memory.map_rank(peer, fd)
        finally:
            os.close(fd)
    return memory
