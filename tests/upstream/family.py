"""The processes that a run of tests has started, in whatever sessions: found, and ended."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil

#: They remove the shared memory of processes that were killed, and end once those are gone.
CLEANERS = ("multiprocessing.resource_tracker", "torch_shm_manager")
PATIENCE_S = 10.0


def end(process: subprocess.Popen[bytes], scratch: Path) -> None:
    """Kills the leader of a session and all that it has started; `scratch` is their TMPDIR.

    All are stopped before the first one is killed: a shell whose child dies before it would go on
    to its next command. Servers of vLLM's tests have sessions of their own. Processes that clean up
    after others are not stopped and get a moment.
    """
    end_at = time.monotonic() + PATIENCE_S
    family = _stopped(process.pid, scratch, end_at)
    while family and time.monotonic() < end_at:
        _kill(one for one in family if not _cleans_up(one))
        process.poll()
        time.sleep(0.05)
        family = {one for one in {*family, *_found(process.pid, scratch)} if _is_alive(one)}
    _kill(family)
    process.wait()


def _stopped(leader: int, scratch: Path, end_at: float) -> set[psutil.Process]:
    """The family, once none of it that could start another process runs any more."""
    family: set[psutil.Process] = set()
    while time.monotonic() < end_at:
        new = set(_found(leader, scratch)) - family
        for one in new:
            if not _cleans_up(one):
                with contextlib.suppress(psutil.Error):
                    one.suspend()
        family |= new
        # A process that was starting another one when it was stopped may have done so after we
        # looked.
        if not new and not any(_goes_on(one) for one in family):
            break
        time.sleep(0.01)
    return family


def _kill(processes: Iterable[psutil.Process]) -> None:
    for one in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()


def _goes_on(one: psutil.Process) -> bool:
    """Whether it executes instructions of its own; one that waits for a vfork's child does not."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return one.status() in (psutil.STATUS_RUNNING, psutil.STATUS_SLEEPING) and not _cleans_up(
            one
        )
    return False


def _found(leader: int, scratch: Path) -> Iterator[psutil.Process]:
    """Children, the leader's session, and who has inherited its TMPDIR.

    None of these is enough: orphans are nobody's children any more, servers have other sessions,
    and engines overwrite the memory that their environment is read from.
    """
    with contextlib.suppress(psutil.NoSuchProcess):
        yield from psutil.Process(leader).children(recursive=True)
    for one in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if os.getsid(one.pid) == leader or one.environ().get("TMPDIR") == str(scratch):
                yield one
                yield from one.children(recursive=True)


def _is_alive(one: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(one.is_running() and one.status() != psutil.STATUS_ZOMBIE)
    return False


def _cleans_up(one: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return any(name in " ".join(one.cmdline()) for name in CLEANERS)
    return False
