"""Every process of a session, and the shared memory it holds: found, ended and swept up (Linux).

A vLLM server is a tree of processes, and its branches outlive a killed trunk. All of them stay in
the session the server was started in, so the session id finds them even when they are orphans.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


def die_with_parent() -> None:
    """Run in a fresh child: the kernel sends it SIGTERM when the parent's starting thread ends."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def processes_of_session(session: int) -> list[int]:
    """The living processes of a session; a zombie holds nothing and counts as gone."""
    pids = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]
    states = {pid: _state_and_session(pid) for pid in pids}
    return [
        pid for pid, found in states.items() if found and found[1] == session and found[0] != "Z"
    ]


def _state_and_session(pid: int) -> tuple[str, int] | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:  # it ended while we looked
        return None
    # The name stands in parentheses and may contain anything, so count from the last one.
    state, _parent, _group, session = text[text.rindex(")") + 2 :].split()[:4]
    return state, int(session)


def shared_memory_of(pids: Iterable[int]) -> set[Path]:
    """The files of /dev/shm that these processes map and that still have a name."""
    found = set()
    for pid in pids:
        try:
            maps = Path(f"/proc/{pid}/maps").read_text()
        except OSError:
            continue
        for line in maps.splitlines():
            path = line.split(maxsplit=5)[-1]
            if path.startswith(f"{SHARED_MEMORY}/") and not path.endswith(" (deleted)"):
                found.add(Path(path))
    return found


def end_session(session: int, *, grace_s: float = 20.0, kill_s: float = 10.0) -> list[int]:
    """End every process of a session and return those that stay, which should be none.

    They get SIGTERM and `grace_s` seconds to clean up after themselves, then SIGKILL. Shared memory
    that they held and that nobody removed is removed at the end. Takes at most about
    `grace_s + kill_s` seconds.
    """
    held = shared_memory_of(processes_of_session(session))
    _signal_all(processes_of_session(session)[:1], signal.SIGTERM)
    if not _wait_until_gone(session, grace_s / 2):
        _signal_all(processes_of_session(session), signal.SIGTERM)
        _wait_until_gone(session, grace_s / 2)
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
