"""The processes that a run of tests has started, in whatever sessions: found, and ended."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

#: They remove the shared memory of processes that were killed, and end once those are gone.
CLEANERS = ("multiprocessing.resource_tracker", "torch_shm_manager")
PATIENCE_S = 10.0


def end(process: subprocess.Popen[bytes], scratch: Path) -> None:
    """Kills the leader of a session and all that it has started; `scratch` is their TMPDIR.

    Servers of vLLM's tests have sessions of their own. What cleans up behind others gets a moment.
    """
    end_at = time.monotonic() + PATIENCE_S
    family = set(_found(process.pid, scratch))
    while family and time.monotonic() < end_at:
        for one in family:
            if not _cleans_up(one):
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
        process.poll()
        time.sleep(0.05)
        family = {one for one in {*family, *_found(process.pid, scratch)} if _is_alive(one)}
    for one in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    process.wait()


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
