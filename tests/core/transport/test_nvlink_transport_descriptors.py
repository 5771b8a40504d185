"""Descriptors between the ranks of a host: all arrive, strangers get none, no wait is endless."""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from moe_nvlink_plugin.errors import TransportError
from moe_nvlink_plugin.testing import ThreadGroup, run_ranks, try_ranks
from moe_nvlink_plugin.transport import descriptors
from moe_nvlink_plugin.transport.descriptors import Address, Listener

_NOBODY = 65534


def num_open() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture(autouse=True)
def nothing_left_open() -> Iterator[None]:
    before = num_open()
    yield
    assert num_open() == before


def files_of(rank: int, count: int, folder: Path) -> list[int]:
    """Descriptors of files that say whose and which they are."""
    opened = []
    for index in range(count):
        path = folder / f"{rank}-{index}"
        path.write_text(path.name)
        opened.append(os.open(path, os.O_RDONLY))
    return opened


def exchange(
    group: ThreadGroup,
    folder: Path,
    count: int = 2,
    *,
    receive: Callable[[int, list[int]], None] | None = None,
    timeout_s: float = 20.0,
    before: Callable[[list[Address]], None] = lambda addresses: None,
) -> dict[int, list[str]]:
    """What each peer's descriptors say, after one exchange."""
    said: dict[int, list[str]] = {}

    def read(peer: int, received: list[int]) -> None:
        assert all(fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC for fd in received)
        said[peer] = [os.pread(fd, 100, 0).decode() for fd in received]

    listener = Listener()
    mine = files_of(group.rank, count, folder)
    try:
        addresses = group.all_gather_object(listener.address)
        before(addresses)
        listener.exchange(group.rank, addresses, mine, receive or read, timeout_s)
    finally:
        listener.close()
        for fd in mine:
            os.close(fd)
    return said


BOTH_GOT_ALL = [{1: ["1-0", "1-1"]}, {0: ["0-0", "0-1"]}]


def two_exchange(
    folder: Path, before: Callable[[list[Address]], None]
) -> list[dict[int, list[str]]]:
    return run_ranks(2, lambda group: exchange(group, folder, before=before))


@pytest.mark.parametrize(("num_ranks", "count"), [(1, 2), (2, 1), (5, 64), (3, 65), (24, 13)])
def test_everybody_gets_everything(num_ranks: int, count: int, tmp_path: Path) -> None:
    """One packet, several packets, many ranks."""
    results = run_ranks(num_ranks, lambda group: exchange(group, tmp_path, count))
    for rank, said in enumerate(results):
        peers = set(range(num_ranks)) - {rank}
        assert said == {peer: [f"{peer}-{i}" for i in range(count)] for peer in peers}


def test_a_receiver_that_fails_serves_the_others_all_the_same(tmp_path: Path) -> None:
    def rank_main(group: ThreadGroup) -> dict[int, list[str]]:
        def failing(peer: int, _received: list[int]) -> None:
            raise ValueError(f"cannot use those of {peer}")

        return exchange(group, tmp_path, receive=failing if group.rank == 1 else None)

    outcomes = try_ranks(4, rank_main)
    assert isinstance(outcomes[1], ValueError)
    for outcome in outcomes[:1] + outcomes[2:]:
        assert isinstance(outcome, dict)
        assert len(outcome) == 3


def connecting(hello: Callable[[Address], bytes | None]) -> Callable[[list[Address]], None]:
    """Somebody who connects to rank 0 before its peers do, and says `hello`."""

    def before(addresses: list[Address]) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
            stranger.connect(addresses[0].name)
            packet = hello(addresses[0])
            if packet is not None:
                stranger.send(packet)

    return before


@pytest.mark.parametrize(
    "hello",
    [
        lambda address: None,
        lambda address: b"x",
        lambda address: b"",
        lambda address: descriptors._HELLO.pack(bytes(16), 1, 1),
        lambda address: descriptors._HELLO.pack(address.secret, 0, 1),
        lambda address: descriptors._HELLO.pack(address.secret, 7, 1),
    ],
    ids=["silent", "short", "empty", "wrong secret", "own rank", "no rank"],
)
def test_strangers_are_ignored(hello: Callable[[Address], bytes | None], tmp_path: Path) -> None:
    assert two_exchange(tmp_path, connecting(hello)) == BOTH_GOT_ALL


def connection_to(address: Address) -> socket.socket:
    """A stranger's."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.setblocking(False)
    try:
        connection.connect(address.name)
    except OSError:
        connection.close()
        raise
    return connection


def test_strangers_that_stay_and_say_nothing_delay_nobody(tmp_path: Path) -> None:
    """Programs of this user. Whoever waited for the greeting of one would wait to the deadline."""
    with contextlib.ExitStack() as opened:

        def connect(addresses: list[Address]) -> None:
            for address in addresses * 8:
                opened.enter_context(connection_to(address))

        assert two_exchange(tmp_path, connect) == BOTH_GOT_ALL


def _stranger_of_another_user(pipe: Any) -> None:
    os.setgroups([])
    os.setgid(_NOBODY)
    os.setuid(_NOBODY)
    opened = [connection_to(address) for address in pipe.recv() * 50]
    pipe.send("connected")
    assert pipe.recv() == "close them"
    for connection in opened:
        connection.close()


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become another user")
def test_connections_of_another_user_delay_nobody(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    stranger = context.Process(target=_stranger_of_another_user, args=(there,))
    stranger.start()

    def connect(addresses: list[Address]) -> None:
        if addresses_told.acquire(blocking=False):
            here.send(addresses)
            assert here.poll(30), "they fill the queue"
            assert here.recv() == "connected"
        both_here.wait(40)

    addresses_told, both_here = threading.Lock(), threading.Barrier(2)
    assert two_exchange(tmp_path, connect) == BOTH_GOT_ALL
    here.send("close them")
    stranger.join(30)
    assert stranger.exitcode == 0
    stranger.close()
    for end in (here, there):
        end.close()


def fill(listener: Address, opened: contextlib.ExitStack) -> None:
    """Silent connections, until there is no room for another one."""
    with contextlib.suppress(BlockingIOError):
        while True:
            opened.enter_context(connection_to(listener))


def test_a_full_queue_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descriptors, "_BACKLOG", 1)
    tries = threading.Semaphore(0)
    really_left = descriptors._left

    def left(deadline: float) -> float:
        if isinstance(threading.current_thread(), descriptors._Sender):
            tries.release()
        return really_left(deadline)

    monkeypatch.setattr(descriptors, "_left", left)
    with contextlib.ExitStack() as opened:

        def before(addresses: list[Address]) -> None:
            if group_of_thread.rank == 0:
                fill(addresses[0], opened)
                is_full.set()
                # The other rank has found the queue full, and comes again.
                for _ in range(3):
                    assert tries.acquire(timeout=20)
            else:
                assert is_full.wait(20)

        is_full, group_of_thread = threading.Event(), threading.local()

        def rank_main(group: ThreadGroup) -> dict[int, list[str]]:
            group_of_thread.rank = group.rank
            return exchange(group, tmp_path, before=before)

        assert run_ranks(2, rank_main) == BOTH_GOT_ALL


def test_a_queue_that_stays_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descriptors, "_BACKLOG", 1)
    listener = Listener()
    with contextlib.ExitStack() as opened, contextlib.closing(listener):
        fill(listener.address, opened)
        addresses = [Address(b"", b""), listener.address]
        sender = descriptors._Sender(0, addresses, [], time.monotonic() + 0.2)
        sender.run()
    (error,) = sender.errors
    assert "rank 1 accepted no connection in time: others fill its queue" in str(error)
    assert "ulimit" not in str(error)


@pytest.mark.parametrize("who", ["sender", "taker", "both"])
def test_another_user_gets_nothing(
    who: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What another user sends is not looked at, and nothing is sent to him."""
    taken: list[int] = []

    def peer_uid(_connection: socket.socket) -> int:
        side = "sender" if isinstance(threading.current_thread(), descriptors._Sender) else "taker"
        return os.getuid() + (who in (side, "both"))

    monkeypatch.setattr(descriptors, "_peer_uid", peer_uid)
    outcomes = try_ranks(
        2,
        lambda group: exchange(
            group, tmp_path, receive=lambda peer, _fds: taken.append(peer), timeout_s=0.5
        ),
    )
    words = "went away" if who == "taker" else "another user answers in the place of rank"
    assert_says(words, *outcomes)
    assert taken == []


def assert_says(words: str, *outcomes: object) -> None:
    for outcome in outcomes:
        assert isinstance(outcome, TransportError)
        assert words in str(outcome)


def test_a_rank_that_never_comes_is_named(tmp_path: Path) -> None:
    others_are_done = threading.Semaphore(0)

    def rank_main(group: ThreadGroup) -> Any:
        if group.rank != 2:
            try:
                return exchange(group, tmp_path, timeout_s=1.0)
            finally:
                others_are_done.release()
        listener = Listener()  # it listens, and that is all
        group.all_gather_object(listener.address)
        for _other in range(2):
            assert others_are_done.acquire(timeout=20), "they wait for ever"
        listener.close()
        return "it waited for them"

    *outcomes, last = try_ranks(3, rank_main)
    assert last == "it waited for them"
    assert_says("rank 2 did not take the descriptors in time", *outcomes)


def exchange_with(other: Callable[[Listener, Address], None], folder: Path) -> Any:
    """What rank 0 hears, and soon, whose only peer does `other`, and then goes."""

    def rank_main(group: ThreadGroup) -> Any:
        if group.rank == 0:
            return exchange(group, folder, timeout_s=50.0)
        listener = Listener()
        to_rank_0, _own = group.all_gather_object(listener.address)
        other(listener, to_rank_0)
        listener.close()
        return None

    start = time.monotonic()
    outcome, nothing = try_ranks(2, rank_main)
    assert nothing is None
    assert time.monotonic() - start < 10
    return outcome


def test_a_rank_that_is_gone_is_not_waited_for(tmp_path: Path) -> None:
    assert_says("rank 1 went away", exchange_with(lambda _listener, _peer: None, tmp_path))


def test_a_rank_that_takes_and_then_goes(tmp_path: Path) -> None:
    """The sender has nothing to complain about; the one who waits asks whether it still listens."""

    def take(listener: Listener, _peer: Address) -> None:
        taker = descriptors._Taker(
            listener._socket, listener.address.secret, lambda peer, fds: None, time.monotonic() + 9
        )
        idle: Any = threading.Thread()
        idle.gone, idle.probe = set(), lambda peers: None
        assert taker.run({0}, idle) == set()

    assert_says("rank(s) 1 did not send", exchange_with(take, tmp_path))


def test_a_rank_that_sends_and_is_killed_before_the_answer(tmp_path: Path) -> None:
    def send(_listener: Listener, peer: Address) -> None:
        mine = files_of(1, 1, tmp_path)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.connect(peer.name)
            connection.send(descriptors._HELLO.pack(peer.secret, 1, 1))
            socket.send_fds(connection, [b"."], mine)
            connection.shutdown(socket.SHUT_RD)
        os.close(mine[0])

    outcome = exchange_with(send, tmp_path)
    assert_says("rank 1 went away while it sent its descriptors", outcome)


def test_too_many_open_files(tmp_path: Path) -> None:
    """Twenty on each side and the sockets are within the limit; those that arrive are not."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (num_open() + 60, hard))
    try:
        outcomes = try_ranks(2, lambda group: exchange(group, tmp_path, 20))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert any("ulimit -n" in str(outcome) for outcome in outcomes), outcomes
