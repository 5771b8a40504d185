"""Handlers of signals during a launch on CPU ranks, which returns to Python only at its end."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Iterator
from typing import Any

from .base import Interrupted

#: What handlers have raised during a launch of the main thread.
raised: list[BaseException] = []
#: Threads that launch for a caller who waits no longer.
_given_up: set[int] = set()


def _serve() -> Iterator[int]:
    """Run the handlers of the signals that have come; yield whether one of them has raised.

    A generator, and not a function: the interpreter runs handlers when it enters a function, before
    any `try`, and ctypes would swallow what they raise. It goes on within this `try`. The outer one
    is for a second signal, whose handler runs before the inner one is entered again.
    """
    has_raised = 0
    while True:
        try:
            try:
                yield has_raised
                ctypes.pythonapi.PyErr_CheckSignals()
                has_raised = 0
            except GeneratorExit:
                return
            except BaseException as error:
                raised.append(error)
                has_raised = 1
        except BaseException as error:
            raised.append(error)
            has_raised = 1


_serving: Any = _serve()
next(_serving)

#: What the kernels' waits call every 50 ms in the main thread, the only one that runs handlers; and
#: in every other thread.
SERVE = ctypes.CFUNCTYPE(ctypes.c_int)(functools.partial(next, _serving, 1))
IS_GIVEN_UP = ctypes.CFUNCTYPE(ctypes.c_int)(lambda: threading.get_ident() in _given_up)


def is_in_handler() -> bool:
    """Return whether a handler runs in this thread during one of its launches. Local."""
    is_main = threading.current_thread() is threading.main_thread()
    return is_main and bool(_serving.gi_running)


def give_up(thread: threading.Thread) -> None:
    """End the waits of the launch that a thread runs. Local; nobody waits for its result."""
    if thread.ident is not None:
        _given_up.add(thread.ident)


def forget_thread() -> None:
    """Launches of this thread are not given up; another thread may get its number. Local."""
    _given_up.discard(threading.get_ident())


def raise_in_main_thread() -> None:
    """Raise what a handler has raised, if this is the main thread. Local; after a launch.

    Raises:
        Interrupted: a handler has raised, such as Python's own for Ctrl-C.
    """
    if raised and threading.current_thread() is threading.main_thread():
        first = raised[0]
        raised.clear()
        raise Interrupted(first)
