"""Exchange of file descriptors between the ranks of a host, by AF_UNIX sockets and SCM_RIGHTS.

This needs no privilege. (pidfd_getfd, which takes a descriptor out of another process, needs that
of ptrace.) Every rank listens at a random abstract socket name; the group carries each rank's name
and a secret to all ranks. A thread of each rank then sends to one peer after the other, while the
rank itself receives in whatever order packets arrive, so no two ranks can wait for each other. The
thread sends a packet only after the receipt of the previous packet, because Linux counts the
descriptors that a user has in transit, and refuses more than the limit of open files.

Anybody on the host can connect to an abstract socket. A rank closes another user's connection when
it accepts it, waits for the greeting of no single connection, and connects to a peer again while
strangers' connections fill that peer's queue.
"""

from __future__ import annotations

import array
import contextlib
import errno
import hmac
import os
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from moe_nvlink_plugin.errors import TransportError

#: Descriptors in one packet. Linux takes 253, and from all ranks of a user together at most the
#: limit of open files.
_MOST_IN_PACKET = 64
_HELLO = struct.Struct("=16sii")  # the listener's secret, the sender's rank, descriptors to come
_CREDENTIALS = struct.Struct("=iII")  # struct ucred: pid, uid, gid
_INTS = array.array("i")  # as SCM_RIGHTS packs descriptors
_POLL_S = 0.1
_RETRY_S = 0.01
#: Connections that wait to be accepted, at most. As many as Linux lets a socket have by default:
#: they are strangers', for of the peers there is one each.
_BACKLOG = 4096
_LIMITS = (errno.EMFILE, errno.ENFILE, errno.ETOOMANYREFS)


class Address(NamedTuple):
    """Where a rank listens. The group carries it, and is as private as the job's control.

    Attributes:
        name: abstract socket name, with its leading zero byte.
        secret: 16 random bytes that a peer must send first.
    """

    name: bytes
    secret: bytes


#: Function of a rank and the descriptors that it sent.
Receive = Callable[[int, list[int]], None]


class Listener:
    """This rank's socket. Create it, give its address to all ranks, then call `exchange`."""

    def __init__(self) -> None:
        name = b"\0moe_nvlink-" + secrets.token_hex(16).encode()
        self.address = Address(name, secrets.token_bytes(16))
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._socket.bind(self.address.name)
            self._socket.listen(_BACKLOG)
            self._socket.setblocking(False)
        except BaseException:
            self._socket.close()
            raise

    def close(self) -> None:
        """Close the socket. Local; may be called twice."""
        self._socket.close()

    def exchange(
        self,
        rank: int,
        addresses: Sequence[Address | None],
        descriptors: Sequence[int],
        receive: Receive,
        timeout_s: float,
    ) -> None:
        """Send `descriptors` to every peer and receive every peer's descriptors. Collective.

        The descriptors that `receive` gets are closed after it returns. If `receive` fails, this
        rank still serves its peers, and raises the error at the end.

        Args:
            rank: this rank.
            addresses: every rank's address, in rank order; None: there is no such rank.
            descriptors: this rank's open descriptors; they stay the caller's.
            receive: called as `receive(peer, descriptors)` in this thread, once per peer.
            timeout_s: seconds for the whole exchange.

        Raises:
            TransportError: a rank did not send within `timeout_s`, or went away; names the rank.
        """
        deadline = time.monotonic() + timeout_s
        sender = _Sender(rank, addresses, descriptors, deadline)
        taker = _Taker(self._socket, self.address.secret, receive, deadline)
        sender.start()
        try:
            peers = {peer for peer, address in enumerate(addresses) if address is not None}
            waiting = taker.run(peers - {rank}, sender)
        finally:
            sender.join()  # the sender keeps the deadline too
        for error in [*taker.errors, *sender.errors]:
            raise error
        if waiting:
            late = ", ".join(map(str, sorted(waiting)))
            raise TransportError(
                f"rank(s) {late} did not send their descriptors within {timeout_s:g} s, or went "
                "away before; look at those ranks' logs"
            )


class _UnknownSenderError(Exception):
    """The process that has connected is no peer. It gets no answer."""


class _Taker:
    """Receiver of the peers' packets, in the order in which the peers' greetings arrive."""

    def __init__(
        self, listening: socket.socket, secret: bytes, receive: Receive, deadline: float
    ) -> None:
        self._listening, self._secret = listening, secret
        self._receive, self._deadline = receive, deadline
        self.errors: list[Exception] = []

    def run(self, waiting: set[int], sender: _Sender) -> set[int]:
        """Receive from the ranks of `waiting`; return the ranks that did not send.

        It returns before the deadline if all of these ranks have gone away.
        """
        probe_at = 0.0
        with contextlib.ExitStack() as silent, selectors.PollSelector() as selector:
            selector.register(self._listening, selectors.EVENT_READ)
            while waiting and time.monotonic() < self._deadline:
                gone = set(sender.gone)
                ready = selector.select(_POLL_S)
                for key, _events in ready:
                    if key.fileobj is self._listening:
                        self._accept(selector, silent)
                        continue
                    connection = key.data
                    selector.unregister(connection)
                    with connection:
                        waiting.discard(self._take_from(connection, waiting))
                if ready:
                    continue
                if waiting <= gone:
                    break
                if not sender.is_alive() and time.monotonic() > probe_at:
                    probe_at = time.monotonic() + 10 * _POLL_S
                    sender.probe(waiting)
        return waiting

    def _accept(self, selector: selectors.BaseSelector, silent: contextlib.ExitStack) -> None:
        """Accept a connection and wait for its greeting, beside others; not of another user."""
        try:
            connection, _name = self._listening.accept()
        except (BlockingIOError, ConnectionAbortedError):  # it has gone again
            return
        except OSError as error:
            raise TransportError(f"cannot take descriptors: {_told(error)}") from error
        if _peer_uid(connection) != os.getuid():
            connection.close()
            return
        silent.enter_context(connection)  # closes it again at the end, which does no harm
        selector.register(connection, selectors.EVENT_READ, connection)

    def _take_from(self, connection: socket.socket, waiting: set[int]) -> int:
        """Receive from one connection; return its rank, or -1 if it is no peer."""
        peer, descriptors = -1, list[int]()
        try:
            connection.settimeout(_left(self._deadline))
            peer, count = self._hello(connection, waiting)
            try:
                _take(connection, peer, count, descriptors)
            except ConnectionError as error:  # it was killed before the answer reached it
                raise TransportError(
                    f"rank {peer} went away while it sent its descriptors; look at its log"
                ) from error
            if not self.errors:
                self._receive(peer, descriptors)
        except _UnknownSenderError:
            pass
        except Exception as error:
            self.errors.append(error)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        return peer

    def _hello(self, connection: socket.socket, waiting: set[int]) -> tuple[int, int]:
        try:
            packet = connection.recv(_HELLO.size)  # is there, or the connection's end
        except ConnectionError as error:
            raise _UnknownSenderError from error
        if len(packet) != _HELLO.size:
            raise _UnknownSenderError
        secret, peer, count = _HELLO.unpack(packet)
        if not hmac.compare_digest(secret, self._secret) or peer not in waiting:
            raise _UnknownSenderError
        return peer, count


def _take(connection: socket.socket, peer: int, count: int, descriptors: list[int]) -> None:
    """Append the descriptors that `peer` sends to `descriptors`, which the caller always closes."""
    while len(descriptors) < count:
        try:
            # Not socket.recv_fds: in CPython 3.11 it ignores its flags, and so close-on-exec.
            data, messages, flags, _address = connection.recvmsg(
                1, socket.CMSG_SPACE(_MOST_IN_PACKET * _INTS.itemsize), socket.MSG_CMSG_CLOEXEC
            )
        except TimeoutError as error:
            raise TransportError(
                f"rank {peer} sent {len(descriptors)} of its {count} descriptors and then nothing; "
                "look at its log"
            ) from error
        for level, kind, packed in messages:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                whole = len(packed) // _INTS.itemsize * _INTS.itemsize
                descriptors.extend(array.array(_INTS.typecode, packed[:whole]))
        if flags & socket.MSG_CTRUNC:
            raise TransportError(
                f"cannot take rank {peer}'s descriptors: too many open files; raise `ulimit -n`"
            )
        if not data:
            raise TransportError(
                f"rank {peer} closed the connection before it had sent its descriptors; look at "
                "its log"
            )
        connection.send(b".")


class _Sender(threading.Thread):
    """Thread that sends to the peers. It starts with the next rank, so that ranks spread the load.

    Attributes:
        gone: ranks whose process has ended, or has given up.
        errors: one error per peer to which sending failed.
    """

    def __init__(
        self,
        rank: int,
        addresses: Sequence[Address | None],
        descriptors: Sequence[int],
        deadline: float,
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
            address = self._addresses[peer]
            if address is None:
                continue
            try:
                self._send_to(peer, address)
            except OSError as error:
                if isinstance(error, ConnectionError):
                    self.gone.add(peer)
                self.errors.append(TransportError(_explanation(peer, error)))
            except Exception as error:  # else it would end unseen in this thread
                self.errors.append(error)

    def _send_to(self, peer: int, address: Address) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            self._connect(connection, peer, address)
            if _peer_uid(connection) != os.getuid():
                raise TransportError(
                    f"another user answers in the place of rank {peer}; run all ranks as one user"
                )
            count = len(self._descriptors)
            connection.settimeout(_left(self._deadline))
            connection.send(_HELLO.pack(address.secret, self._rank, count))
            for first in range(0, count, _MOST_IN_PACKET):
                connection.settimeout(_left(self._deadline))
                chunk = self._descriptors[first : first + _MOST_IN_PACKET]
                socket.send_fds(connection, [b"."], chunk)
                if not connection.recv(1):
                    raise ConnectionResetError

    def _connect(self, connection: socket.socket, peer: int, address: Address) -> None:
        while True:
            try:
                connection.settimeout(_left(self._deadline))
                connection.connect(address.name)
                return
            except BlockingIOError as error:  # the peer's queue is full
                if time.monotonic() > self._deadline:
                    raise TransportError(
                        f"rank {peer} accepted no connection in time: others fill its queue; look "
                        "at its log, and for a program that connects to sockets named "
                        "@moe_nvlink-... (ss -xp)"
                    ) from error
                time.sleep(_RETRY_S)

    def probe(self, peers: set[int]) -> None:
        """Add the peers that no longer listen to `gone`. Call it after the thread has ended."""
        for peer in peers:
            address = self._addresses[peer]
            assert address is not None
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
                connection.setblocking(False)
                try:
                    connection.connect(address.name)
                except ConnectionRefusedError:
                    self.gone.add(peer)
                except OSError:
                    pass  # the peer listens, and its queue is full


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
    return f"cannot send descriptors to rank {peer}: {_told(error)}"


def _told(error: OSError) -> str:
    advice = "; raise the limit of open files (ulimit -n)" if error.errno in _LIMITS else ""
    return f"{error.strerror or error}{advice}"
