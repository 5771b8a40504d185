"""What stands around a command: streams that do not take all text, readers that go, Ctrl-C."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
from collections.abc import Iterator


def take_any_text() -> None:
    """Have this process print what the locale has no character for as an escape."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a stream that the shell has closed is None
            stream.reconfigure(errors="backslashreplace")


def has_lost_output() -> bool:
    """Return whether standard output takes nothing any more; then it is left, and that is said.

    For whoever has caught an OSError, which may be a file's or a socket's too.
    """
    try:
        print(flush=True)
    except OSError as error:
        leave_output(error)
        return True
    return False


def leave_output(error: OSError) -> None:
    """Have all later text go nowhere, what Python holds and prints at its exit too."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(error, BrokenPipeError):  # as of `head`: the reader has seen enough
        return
    told = f"moe-nvlink: standard output cannot be written: {error.strerror}"
    with contextlib.suppress(OSError):  # it may be the same full disk
        print(told, file=sys.stderr or sys.stdout, flush=True)


@contextlib.contextmanager
def interrupts_are_ours() -> Iterator[None]:
    """Processes that start in this context do not hear a terminal's Ctrl-C. In the main thread.

    They would print where they are, those that import still as well. This process ends them.
    """
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
