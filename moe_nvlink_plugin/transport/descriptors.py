"""Hands file descriptors to the other ranks of a host: AF_UNIX sockets and SCM_RIGHTS.

No privilege is needed (to take a descriptor out of another process, pidfd_getfd needs ptrace's).
Every rank listens under a random abstract name; names and a secret for each travel through the
group. A thread of each rank then serves one peer after the other, while the rank itself takes what
arrives in whatever order it comes: so no two ranks can wait for each other. A packet waits for its
receipt before the next is sent, because the kernel counts descriptors under way per user and
refuses more than the limit of open files.
"""

from __future__ import annotations

import array
import hmac
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from moe_nvlink_plugin.errors import TransportError

#: Descriptors in one packet; the kernel takes 253, and of all ranks of a user together no more
#: than the limit of open files.
_MOST_IN_PACKET = 64
_HELLO = struct.Struct("=16sii")  # the listener's secret, the sender's rank, descriptors to come
_CREDENTIALS = struct.Struct("=iII")  # struct ucred: pid, uid, gid
_INTS = array.array("i")  # as SCM_RIGHTS packs descriptors
_POLL_S = 0.1


class Address(NamedTuple):
    """Where a rank listens. Travels through the group, which is as private as the job's control."""

    name: bytes
    secret: bytes


#: Called with a rank and what it sent.
Receive = Callable[[int, list[int]], None]


class Listener:
    """This rank's end. Create it, exchange the addresses, call `exchange` on every rank."""

    def __init__(self, num_ranks: int) -> None:
        name = b"\0moe_nvlink-" + secrets.token_hex(16).encode()
        self.address = Address(name, secrets.token_bytes(16))
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._socket.bind(self.address.name)
            self._socket.listen(num_ranks)  # no peer's connect() has to wait
            self._socket.settimeout(_POLL_S)
        except BaseException:
            self._socket.close()
            raise

    def close(self) -> None:
        """Local; may be called twice."""
        self._socket.close()

    def exchange(
        self,
        rank: int,
        addresses: Sequence[Address],
        descriptors: Sequence[int],
        receive: Receive,
        timeout_s: float,
    ) -> None:
        """Gives `descriptors` to every peer and calls `receive(peer, descriptors)` for each.

        The descriptors that `receive` gets are closed when it returns. When it fails, the peers
        are served all the same, and its error is raised at the end. Collective.

        Raises:
            TransportError: a rank did not come within `timeout_s`, or went away; it is named.
        """
        deadline = time.monotonic() + timeout_s
        sender = _Sender(rank, addresses, descriptors, deadline)
        taker = _Taker(self._socket, self.address.secret, receive, deadline)
        sender.start()
        try:
            waiting = taker.run(set(range(len(addresses))) - {rank}, sender)
        finally:
            sender.join()  # it keeps the deadline too
        for error in [*taker.errors, *sender.errors]:
            raise error
        if waiting:
            late = ", ".join(map(str, sorted(waiting)))
            raise TransportError(
                f"rank(s) {late} did not send their descriptors within {timeout_s:g} s, or went "
                "away before; look at those ranks' logs"
            )


class _StrangerError(Exception):
    """Somebody else has connected; whoever it is gets no answer."""


class _Taker:
    """Takes what the peers send, in the order in which they come."""

    def __init__(
        self, listening: socket.socket, secret: bytes, receive: Receive, deadline: float
    ) -> None:
        self._listening, self._secret = listening, secret
        self._receive, self._deadline = receive, deadline
        self.errors: list[Exception] = []

    def run(self, waiting: set[int], sender: _Sender) -> set[int]:
        """The ranks that never came; it gives up early on those that are gone."""
        probe_at = 0.0
        while waiting and time.monotonic() < self._deadline:
            gone = set(sender.gone)
            try:
                connection, _name = self._listening.accept()
            except TimeoutError:
                if waiting <= gone:
                    break
                if not sender.is_alive() and time.monotonic() > probe_at:
                    probe_at = time.monotonic() + 10 * _POLL_S
                    sender.probe(waiting)
                continue
            with connection:
                waiting.discard(self._take_from(connection, waiting))
        return waiting

    def _take_from(self, connection: socket.socket, waiting: set[int]) -> int:
        """The rank that has connected, or -1."""
        peer, descriptors = -1, list[int]()
        try:
            if _peer_uid(connection) != os.getuid():
                raise _StrangerError
            connection.settimeout(_left(self._deadline))
            peer, count = self._hello(connection, waiting)
            _take(connection, peer, count, descriptors)
            if not self.errors:
                self._receive(peer, descriptors)
        except _StrangerError:
            pass
        except Exception as error:
            self.errors.append(error)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        return peer

    def _hello(self, connection: socket.socket, waiting: set[int]) -> tuple[int, int]:
        packet = connection.recv(_HELLO.size)
        if len(packet) != _HELLO.size:
            raise _StrangerError
        secret, peer, count = _HELLO.unpack(packet)
        if not hmac.compare_digest(secret, self._secret) or peer not in waiting:
            raise _StrangerError
        return peer, count


def _take(connection: socket.socket, peer: int, count: int, descriptors: list[int]) -> None:
    """Appends what `peer` sends to `descriptors`, which the caller closes in any case."""
    while len(descriptors) < count:
        try:
            # Not socket.recv_fds: it forgets its flags (CPython 3.11), and with them close-on-exec.
            data, messages, flags, _address = connection.recvmsg(
                1, socket.CMSG_SPACE(_MOST_IN_PACKET * _INTS.itemsize), socket.MSG_CMSG_CLOEXEC
            )
        except TimeoutError as error:
            raise TransportError(f"rank {peer} stopped in the middle of its descriptors") from error
        for level, kind, packed in messages:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                whole = len(packed) // _INTS.itemsize * _INTS.itemsize
                descriptors.extend(array.array(_INTS.typecode, packed[:whole]))
        if flags & socket.MSG_CTRUNC:
            raise TransportError(
                f"cannot take rank {peer}'s descriptors: too many open files; raise `ulimit -n`"
            )
        if not data:
            raise TransportError(f"rank {peer} hung up before it had sent its descriptors")
        connection.send(b".")


class _Sender(threading.Thread):
    """Serves the peers, the next rank first, so that not all turn to rank 0 at once.

    Attributes:
        gone: ranks whose process has ended, or has given up.
        errors: what went wrong, one entry a peer.
    """

    def __init__(
        self, rank: int, addresses: Sequence[Address], descriptors: Sequence[int], deadline: float
    ) -> None:
        super().__init__(name="moe_nvlink descriptors", daemon=True)
        self._rank, self._addresses, self._descriptors = rank, addresses, descriptors
        self._deadline = deadline
        self.gone: set[int] = set()
        self.errors: list[Exception] = []

    def run(self) -> None:
        size = len(self._addresses)
        for step in range(1, size):
            peer = (self._rank + step) % size
            try:
                self._send_to(peer)
            except OSError as error:
                if isinstance(error, ConnectionError):
                    self.gone.add(peer)
                self.errors.append(TransportError(_explanation(peer, error)))
            except Exception as error:  # nobody else would ever see it
                self.errors.append(error)

    def _send_to(self, peer: int) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.settimeout(_left(self._deadline))
            connection.connect(self._addresses[peer].name)
            if _peer_uid(connection) != os.getuid():
                raise TransportError(
                    f"another user answers in the place of rank {peer}; run all ranks as one user"
                )
            count = len(self._descriptors)
            connection.send(_HELLO.pack(self._addresses[peer].secret, self._rank, count))
            for first in range(0, count, _MOST_IN_PACKET):
                connection.settimeout(_left(self._deadline))
                chunk = self._descriptors[first : first + _MOST_IN_PACKET]
                socket.send_fds(connection, [b"."], chunk)
                if not connection.recv(1):
                    raise ConnectionResetError

    def probe(self, peers: set[int]) -> None:
        """Adds those to `gone` that no longer listen. After the thread has ended."""
        for peer in peers:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
                connection.setblocking(False)
                try:
                    connection.connect(self._addresses[peer].name)
                except ConnectionRefusedError:
                    self.gone.add(peer)
                except OSError:
                    pass  # it listens, and has many to serve


def _left(deadline: float) -> float:
    return max(_POLL_S, deadline - time.monotonic())


def _peer_uid(connection: socket.socket) -> int:
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(packed)[1])


def _explanation(peer: int, error: OSError) -> str:
    if isinstance(error, ConnectionError):
        return f"rank {peer} went away before it had taken the descriptors; look at its log"
    if isinstance(error, TimeoutError):
        return f"rank {peer} did not take the descriptors in time; look at its log"
    return (
        f"cannot send descriptors to rank {peer}: {error.strerror}; raise the limit of open files "
        "(ulimit -n)"
    )
