"""Every process of a session, and the shared memory it holds: found, ended and swept up (Linux).

A vLLM server is a tree of processes, and its branches outlive a killed trunk. All of them stay in
the session the server was started in, so the session id finds them even when they are orphans.

Run as a program with a session id, it is that session's watchdog: it ends the session when its
standard input closes, which happens when whoever started it goes away, however that comes about.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")


def start_watchdog(session: int) -> subprocess.Popen[bytes]:
    """A process that ends the session when this process dies, even by kill -9.

    Close its standard input to let it go; it also goes when the session has ended by itself.
    """
    return subprocess.Popen(
        [sys.executable, "-m", __name__, str(session)],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )


def _watch(session: int) -> None:
    # Ending with the session matters: much later its number may belong to somebody else.
    while processes_of_session(session):
        if select.select([sys.stdin], [], [], 1.0)[0]:
            end_session(session, grace_s=3.0)


def processes_of_session(session: int) -> list[int]:
    """The living processes of a session; a zombie holds nothing and counts as gone."""
    pids = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]
    return [pid for pid in pids if _session_of(pid) == session and _is_living(pid)]


def _session_of(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:  # it ended while we looked, or may not be asked about
        return None


def _is_living(pid: int) -> bool:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    # The name stands in parentheses and may contain anything, so look behind the last one.
    return text[text.rindex(")") + 2] != "Z"


def shared_memory_of(pids: Iterable[int]) -> set[Path]:
    """The files of /dev/shm that these processes map and that still have a name.

    Found by inode: a POSIX semaphore is made under a scratch name and linked to its own afterwards,
    so that its creator maps a path which is gone.
    """
    mapped = set()
    for pid in pids:
        try:
            maps = Path(f"/proc/{pid}/maps").read_text()
        except OSError:  # it ended while we looked
            continue
        for line in maps.splitlines():
            _range, _rights, _offset, _device, inode, *path = line.split(maxsplit=5)
            if path and path[0].startswith(f"{SHARED_MEMORY}/"):
                mapped.add(int(inode))
    return {Path(entry.path) for entry in os.scandir(SHARED_MEMORY) if entry.inode() in mapped}


def end_session(
    session: int, *, grace_s: float = 15.0, kill_s: float = 10.0, also_held: Iterable[Path] = ()
) -> list[int]:
    """End every process of a session and return those that stay, which should be none.

    The leader gets SIGTERM and `grace_s` seconds to end its tree in order, then all get SIGKILL.
    Shared memory that they held and that nobody removed is removed at the end, `also_held` with it:
    what was seen of processes that are gone by now. Takes at most about `grace_s + kill_s` seconds.
    """
    held = shared_memory_of(processes_of_session(session)) | set(also_held)
    _signal_all({session} & set(processes_of_session(session)), signal.SIGTERM)
    if not _wait_until_gone(session, grace_s):
        # Stopped processes cannot create another segment between the last look and their end.
        _signal_all(processes_of_session(session), signal.SIGSTOP)
        held |= shared_memory_of(processes_of_session(session))
        _signal_all(processes_of_session(session), signal.SIGKILL)
        _wait_until_gone(session, kill_s)
    stay = processes_of_session(session)
    if not stay:
        for path in held:
            path.unlink(missing_ok=True)
    return stay


def _signal_all(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def _wait_until_gone(session: int, limit_s: float) -> bool:
    deadline = time.monotonic() + limit_s
    while processes_of_session(session):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


if __name__ == "__main__":
    _watch(int(sys.argv[1]))
