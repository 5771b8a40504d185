"""Shared memory of CPU ranks: private, checked on both sides, and never left behind."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import mmap
import os
import re
import resource
import signal
import stat
import subprocess
import sys
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_nvlink_plugin.errors import PeerError, TransportError
from moe_nvlink_plugin.testing import ThreadGroup, run_ranks, try_ranks
from moe_nvlink_plugin.transport import HUGE_PAGE_BYTES, Extent, host
from moe_nvlink_plugin.transport.host import HostMemory, HostTransport
from tests.support.ranks import run_processes

SHM = Path("/dev/shm")
CPU = torch.device("cpu")
MIB = 2**20


def names_of(pid: int) -> list[str]:
    return [path.name for path in SHM.glob(f"moe_nvlink-{os.getuid()}-{pid}-*")]


def allocate(size_bytes: int) -> Callable[[ThreadGroup], HostMemory]:
    def body(group: ThreadGroup) -> HostMemory:
        memory = HostTransport().reserve(group, size_bytes, CPU)
        memory.extend([Extent(0, size_bytes)])
        return memory

    return body


def huge_bytes(address: int) -> int:
    """Bytes of huge pages in this process's mapping of shared memory that contains an address."""
    is_there = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match("([0-9a-f]+)-([0-9a-f]+) ", line):
            is_there = int(found[1], 16) <= address < int(found[2], 16)
        elif is_there and line.startswith("ShmemPmdMapped:"):
            return 1024 * int(line.split()[1])
    raise AssertionError("nothing is mapped there")


def collects_huge_pages() -> bool:
    """Whether Linux makes a huge page of private memory now, and may make one of shared memory."""
    setting = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    if not setting.exists() or "[deny]" in setting.read_text():
        return False
    with mmap.mmap(-1, 2 * HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE) as private:
        private.write(bytes(2 * HUGE_PAGE_BYTES))
        first = -ctypes.addressof(ctypes.c_char.from_buffer(private)) % HUGE_PAGE_BYTES
        try:
            private.madvise(25, first, HUGE_PAGE_BYTES)
        except OSError:
            return False
        return True


def test_the_owner_allocates_every_page_before_a_peer_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages lie on the node of the rank that first needs them: on the owner's."""
    extents = [Extent(0, 5000), Extent(2 * MIB + 8192, 4 * MIB), Extent(7 * MIB, 100)]
    allocated = []
    open_peer = host._open_peer

    def look(name: str, size_bytes: int, peer: int) -> int:
        fd = open_peer(name, size_bytes, peer)
        allocated.append(512 * os.fstat(fd).st_blocks)
        return fd

    def rank_main(group: ThreadGroup) -> None:
        HostTransport().reserve(group, 16 * MIB, CPU).extend(extents)

    monkeypatch.setattr(host, "_open_peer", look)
    run_ranks(3, rank_main)
    assert allocated == [8192 + 4 * MIB + 4096] * 6, "holes have memory, or pages have none"


def test_every_rank_maps_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first extent is as a continued region; the other two start where a large one does."""
    extents = [Extent(MIB + 4096, 4 * MIB), Extent(6 * MIB, 4 * MIB), Extent(12 * MIB, 2 * MIB)]
    if not collects_huge_pages():
        pytest.skip("this Linux makes no huge pages of shared memory")

    def rank_main(group: ThreadGroup) -> list[int]:
        memory = HostTransport().reserve(group, 16 * MIB, CPU)
        memory.extend(extents)
        peer = memory.base_ptr + (1 - group.rank) * memory.rank_stride
        own = memory.base_ptr + group.rank * memory.rank_stride
        for extent in extents:
            assert not bool(memory.local(extent.offset, extent.size_bytes).any()), "not zeroed"
        group.all_gather_object(None)
        for extent in extents:
            ctypes.memset(peer + extent.offset, 1, extent.size_bytes)
        return [huge_bytes(base + extent.offset) for base in (own, peer) for extent in extents]

    assert run_ranks(2, rank_main) == [[2 * MIB, 4 * MIB, 2 * MIB] * 2] * 2
    # A Linux that refuses leaves memory that works.
    monkeypatch.setattr(host, "_MADV_COLLAPSE", -1)
    assert run_ranks(2, rank_main) == [[0] * 6] * 2


def test_nothing_remains_and_only_the_owner_could_open_it(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[int] = []
    inner = HostMemory._map_all

    def looking(memory: HostMemory, mine: Any, names: list[str], pieces: Any) -> None:
        modes.extend(stat.S_IMODE((SHM / name).stat().st_mode) for name in names)
        assert set(names) <= set(names_of(os.getpid()))
        inner(memory, mine, names, pieces)

    monkeypatch.setattr(HostMemory, "_map_all", looking)
    mask = os.umask(0)
    try:
        run_ranks(3, allocate(4096))
    finally:
        os.umask(mask)
    assert modes == [0o600] * 9
    assert names_of(os.getpid()) == []


@pytest.mark.parametrize(
    ("owner", "step"), [(host, "_Segment"), (HostMemory, "_map_all"), (HostMemory, "_map_rank")]
)
def test_a_rank_that_fails_takes_everything_back(
    owner: Any, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On that rank its own error, on the others one that names it, and no file, no mapping."""
    gc.collect()  # what a test before this one left in a cycle must not go in between
    before = window_mappings()
    failing(owner, step, monkeypatch)
    outcomes = try_ranks(3, allocate(4096))
    check_one_failed(outcomes)
    del outcomes
    gc.collect()
    assert names_of(os.getpid()) == []
    assert window_mappings() == before


def failing(owner: Any, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second call of this step does its work and then fails."""
    inner = getattr(owner, step)
    calls: list[int] = []

    def wrapper(*arguments: Any) -> Any:
        result = inner(*arguments)
        calls.append(1)
        if len(calls) == 2:
            with contextlib.suppress(AttributeError):
                result.close()
            raise TransportError("made to fail")
        return result

    monkeypatch.setattr(owner, step, wrapper)


def check_one_failed(outcomes: Sequence[Any]) -> None:
    (failed,) = (r for r, outcome in enumerate(outcomes) if isinstance(outcome, TransportError))
    for rank, outcome in enumerate(outcomes):
        if rank != failed:
            assert isinstance(outcome, PeerError)
            assert f"rank {failed}: TransportError: made to fail" in str(outcome)


def window_mappings() -> list[str]:
    """What this process has mapped of our shared objects."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if "/dev/shm/moe_nvlink-" in line]


@pytest.mark.parametrize("step", ["_map_all", "_map_rank"])
def test_growth_that_fails_leaves_what_was_there(
    step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old extents keep their content, the new ones are unmapped again, and a retry works."""
    memories: list[Any] = [None] * 3
    gc.collect()
    others = len(window_mappings())

    def first(group: ThreadGroup) -> None:
        memory = memories[group.rank] = HostTransport().reserve(group, 16 * MIB, CPU)
        memory.extend([Extent(0, 5000)])
        memory.local(0, 5000).fill_(group.rank + 1)

    run_ranks(3, first)
    before = window_mappings()
    assert len(before) == others + 9
    with monkeypatch.context() as patch:
        failing(HostMemory, step, patch)
        check_one_failed(try_ranks(3, grow_again(memories)))
    assert window_mappings() == before
    for memory in memories:
        with pytest.raises(TransportError, match="not mapped"):
            memory.local(8192, 1)
    run_ranks(3, grow_again(memories))
    for memory in memories:
        assert not memory.local(0, 8192 + 3 * MIB)[5000:].any()
        for rank in range(3):
            address = memory.base_ptr + rank * memory.rank_stride
            old = ctypes.string_at(address, 5000)
            assert set(old) == {rank + 1}
            assert set(ctypes.string_at(address + 5000, 8192 - 5000 + 3 * MIB)) == {0}
            assert ctypes.string_at(address + 8 * MIB, 1) == b"\0"


def grow_again(memories: list[Any]) -> Callable[[ThreadGroup], None]:
    """Each rank extends the memory it has by a continuation of its first extent, and by more."""

    def body(group: ThreadGroup) -> None:
        memory = memories[group.rank]
        memory._group = group  # the threads of a second run_ranks meet at another barrier
        memory.extend([Extent(8192, 3 * MIB), Extent(8 * MIB, 1)])

    return body


@pytest.mark.parametrize(
    ("extents", "words"),
    [
        ([], "no extents"),
        ([Extent(2**22 + 100, 10)], "multiple of 4096"),
        ([Extent(-(2**21), 10)], "multiple of"),
        ([Extent(2**22, 0)], "size above 0"),
        ([Extent(0, 10)], "overlaps mapped bytes"),
        ([Extent(2**22, 2**21 + 1), Extent(2**22 + 2**21, 10)], "overlaps"),
        ([Extent(2**40, 10)], "bytes per rank of this window"),
    ],
)
def test_extents_that_cannot_be(extents: list[Extent], words: str) -> None:
    def rank_main(group: ThreadGroup) -> None:
        memory = HostTransport().reserve(group, 16 * MIB, CPU)
        memory.extend([Extent(0, 2 * MIB)])
        memory.local(0, 10).fill_(3)
        try:
            memory.extend(extents)
        finally:
            assert memory.local(0, 10).tolist() == [3] * 10

    for outcome in try_ranks(2, rank_main):
        assert isinstance(outcome, TransportError)
        assert words in str(outcome)


def test_ranks_that_want_different_extents() -> None:
    def rank_main(group: ThreadGroup) -> None:
        HostTransport().reserve(group, 2 * MIB, CPU).extend([Extent(0, 4096 * (1 + group.rank))])

    for rank, outcome in enumerate(try_ranks(2, rank_main)):
        assert isinstance(outcome, TransportError)
        assert f"rank {1 - rank} was asked to map" in str(outcome)
        mine, theirs = 4096 * (1 + rank), 4096 * (2 - rank)
        assert re.search(f"size_bytes={theirs}.*size_bytes={mine}", str(outcome))
    assert names_of(os.getpid()) == []


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of shared memory, with an object of 4096 bytes."""
    monkeypatch.setattr(host, "_DIRECTORY", tmp_path)
    (tmp_path / "object").write_bytes(b"x" * 4096)
    return tmp_path


@pytest.mark.usefixtures("directory")
def test_an_object_of_another_size_is_refused() -> None:
    with pytest.raises(TransportError, match="rank 1's shared memory has 4096 bytes"):
        host._open_peer("object", 8192, 1)


def with_little_address_space(_rank: int, _size: int) -> str:
    resource.setrlimit(resource.RLIMIT_AS, (2**36, 2**36))
    (outcome,) = try_ranks(1, allocate(2**37))
    return str(outcome)


def test_an_address_space_limit(tmp_path: Path) -> None:
    (said,) = run_processes(1, with_little_address_space, tmp_path, meets=False)
    assert "ulimit -v" in said
    assert "max_tokens_per_rank" not in said, "it changes nothing"


def test_more_than_there_is() -> None:
    file_system = os.statvfs(SHM)
    size = file_system.f_blocks * file_system.f_frsize + 2**20
    (outcome,) = try_ranks(1, allocate(size))
    assert isinstance(outcome, TransportError)
    for word in (str(size), "/dev/shm", "--shm-size", "max_tokens_per_rank"):
        assert word in str(outcome)
    assert names_of(os.getpid()) == []


def test_an_unwritable_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_DIRECTORY", tmp_path / "missing")
    (outcome,) = try_ranks(1, allocate(4096))
    assert isinstance(outcome, TransportError)
    assert os.strerror(errno.ENOENT) in str(outcome)


@pytest.mark.usefixtures("directory")
def test_somebody_elses_object_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    os.close(host._open_peer("object", 4096, 1))
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(TransportError, match="rank 1's .* not owned by this user"):
        host._open_peer("object", 4096, 1)


def test_a_link_is_not_followed(directory: Path) -> None:
    (directory / "link").symlink_to(directory / "object")
    with pytest.raises(TransportError, match="cannot open rank 1's"):
        host._open_peer("link", 4096, 1)
    (directory / "folder").mkdir()
    with pytest.raises(TransportError, match="cannot open"):
        host._open_peer("../folder", 4096, 1)


_HOLD_A_SEGMENT = """
import sys
from moe_nvlink_plugin.transport.host import _Piece, _Segment
segment = _Segment([_Piece(0, 4096, 0)])
print(segment.path.name, flush=True)
sys.stdin.read()
"""


def test_a_rank_killed_during_set_up_is_swept_by_the_next() -> None:
    """kill -9 while the object has its name; that of a living rank is left alone."""
    command = [sys.executable, "-c", _HOLD_A_SEGMENT]
    ranks = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    try:
        names = []
        for rank in ranks:
            assert rank.stdout is not None
            names.append(rank.stdout.readline().strip())
        ranks[0].send_signal(signal.SIGKILL)
        ranks[0].wait(20)
        assert (SHM / names[0]).exists(), "the test needs something to sweep"
        run_ranks(1, allocate(4096))
        assert not (SHM / names[0]).exists()
        assert (SHM / names[1]).exists()
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    host.remove_abandoned_segments()
    assert not (SHM / names[1]).exists()


def test_unmapped_when_the_last_tensor_is_gone() -> None:
    (memory,) = run_ranks(1, allocate(2**20))
    address = f"{memory.base_ptr:x}-"
    rows = memory.local(4096, 64)
    rows.fill_(7)
    memory.close()
    gone = weakref.ref(memory)
    del memory
    gc.collect()
    assert gone() is None
    assert bool((rows == 7).all())
    assert address in Path("/proc/self/maps").read_text()
    del rows
    gc.collect()
    assert address not in Path("/proc/self/maps").read_text()


def test_closed_memory_hands_out_nothing() -> None:
    (memory,) = run_ranks(1, allocate(4096))
    memory.close()
    with pytest.raises(TransportError, match="closed"):
        memory.local(0, 1)


def test_leaked_memory_stays_mapped() -> None:
    (memory,) = run_ranks(1, allocate(2**20))
    address, stride = memory.base_ptr, memory.rank_stride
    memory.local(0, 1).fill_(5)
    memory.leak()
    memory.close()
    del memory
    gc.collect()
    assert ctypes.c_uint8.from_address(address).value == 5
    host._libc.munmap(address, stride)
