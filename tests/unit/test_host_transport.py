"""Shared memory of CPU ranks: private, checked on both sides, and never left behind."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import os
import signal
import stat
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_nvlink_plugin.errors import PeerError, TransportError
from moe_nvlink_plugin.testing import ThreadGroup, run_ranks, try_ranks
from moe_nvlink_plugin.transport import host
from moe_nvlink_plugin.transport.host import HostMemory, HostTransport

pytestmark = pytest.mark.timeout(60)

SHM = Path("/dev/shm")
CPU = torch.device("cpu")


def names_of(pid: int) -> list[str]:
    return [path.name for path in SHM.glob(f"moe_nvlink-{os.getuid()}-{pid}-*")]


def allocate(size_bytes: int) -> Callable[[ThreadGroup], HostMemory]:
    return lambda group: HostTransport().allocate(group, size_bytes, CPU)


def test_every_rank_sees_every_rank() -> None:
    def rank_main(group: ThreadGroup) -> list[int]:
        memory = HostTransport().allocate(group, 5000, CPU)
        mine = memory.local(0, 5000)
        assert not bool(mine.any()), "not zeroed"
        mine[4999] = group.rank + 1
        group.all_gather_object(None)
        last = [memory.base_ptr + rank * memory.rank_stride + 4999 for rank in range(3)]
        seen = [ctypes.c_uint8.from_address(address).value for address in last]
        group.all_gather_object(None)
        return seen

    assert run_ranks(3, rank_main) == [[1, 2, 3]] * 3


def test_nothing_remains_and_only_the_owner_could_open_it(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[int] = []
    inner = host._map_all

    def looking(mine: Any, names: list[str], size_bytes: int, rank: int) -> HostMemory:
        modes.extend(stat.S_IMODE((SHM / name).stat().st_mode) for name in names)
        assert set(names) <= set(names_of(os.getpid()))
        return inner(mine, names, size_bytes, rank)

    monkeypatch.setattr(host, "_map_all", looking)
    mask = os.umask(0)
    try:
        run_ranks(3, allocate(4096))
    finally:
        os.umask(mask)
    assert modes == [0o600] * 9
    assert names_of(os.getpid()) == []


@pytest.mark.parametrize("step", ["_Segment", "_map_all"])
def test_a_rank_that_fails_takes_everything_back(
    step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On that rank its own error, on the others one that names it, and no file, no mapping."""
    inner = getattr(host, step)
    calls: list[int] = []

    def failing(*arguments: Any) -> Any:
        result = inner(*arguments)
        calls.append(1)
        if len(calls) == 2:
            with contextlib.suppress(AttributeError):
                result.close()
            raise TransportError("made to fail")
        return result

    monkeypatch.setattr(host, step, failing)
    outcomes = try_ranks(3, allocate(4096))
    assert sorted(type(outcome).__name__ for outcome in outcomes) == [
        "PeerError",
        "PeerError",
        "TransportError",
    ]
    failed = next(r for r, outcome in enumerate(outcomes) if isinstance(outcome, TransportError))
    for outcome in outcomes:
        if isinstance(outcome, PeerError):
            assert f"rank {failed}: TransportError: made to fail" in str(outcome)
    assert names_of(os.getpid()) == []


def test_sizes_are_compared_by_both() -> None:
    def rank_main(group: ThreadGroup) -> HostMemory:
        return HostTransport().allocate(group, 4096 * (1 + group.rank), CPU)

    outcomes = try_ranks(2, rank_main)
    for rank, (theirs, mine) in enumerate(((8192, 4096), (4096, 8192))):
        assert isinstance(outcomes[rank], TransportError)
        assert f"rank {1 - rank}'s shared memory has {theirs} bytes" in str(outcomes[rank])
        assert f"expects {mine}" in str(outcomes[rank])
    assert names_of(os.getpid()) == []


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


def test_somebody_elses_object_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_DIRECTORY", tmp_path)
    (tmp_path / "object").write_bytes(b"x" * 4096)
    os.close(host._open_peer("object", 4096, 1))
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(TransportError, match="rank 1's .* not owned by this user"):
        host._open_peer("object", 4096, 1)


def test_a_link_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_DIRECTORY", tmp_path)
    (tmp_path / "target").write_bytes(b"x" * 4096)
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with pytest.raises(TransportError, match="cannot open rank 1's"):
        host._open_peer("link", 4096, 1)
    os.mkdir(tmp_path / "folder")
    with pytest.raises(TransportError, match="cannot open"):
        host._open_peer("../folder", 4096, 1)


_HOLD_A_SEGMENT = """
import sys
from moe_nvlink_plugin.transport.host import _Segment
segment = _Segment(4096)
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
