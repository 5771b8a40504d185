"""The processes that a run of tests has started, in whatever sessions: found, and ended."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil

#: They remove the shared memory of killed processes, and end after these.
CLEANERS = ("multiprocessing.resource_tracker", "torch_shm_manager")
PATIENCE_S = 10.0


def end(process: subprocess.Popen[bytes], scratch: Path) -> None:
    """Kills the leader of a session and all that it has started; `scratch` is their TMPDIR.

    Parents die first: a shell would go on to its next command if its child died before it.
    CLEANERS get PATIENCE_S.
    """
    end_at = time.monotonic() + PATIENCE_S
    while (family := list(_found(process.pid, scratch))) and time.monotonic() < end_at:
        _kill(one for one in family if not _cleans_up(one))
        process.poll()
        time.sleep(0.05)
    _kill(family)
    process.wait()


def _kill(processes: Iterable[psutil.Process]) -> None:
    for one in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()


def _found(leader: int, scratch: Path) -> Iterator[psutil.Process]:
    """The leader, its session, all processes with its TMPDIR, and their children; parents first.

    None of these is enough: orphans have another parent, servers have other sessions, and engines
    overwrite the memory that their environment is read from.
    """
    for one in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            in_session = leader in (one.pid, os.getsid(one.pid))
            if in_session or one.environ().get("TMPDIR") == str(scratch):
                yield from filter(is_alive, [one, *one.children(recursive=True)])


def is_alive(one: psutil.Process) -> bool:
    """Whether it can still do something."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(one.is_running() and one.status() != psutil.STATUS_ZOMBIE)
    return False


def _cleans_up(one: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return any(name in " ".join(one.cmdline()) for name in CLEANERS)
    return False
