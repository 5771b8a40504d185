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
#: Of a thread that launches for a caller who may stop waiting: `given_up`, an Event.
_launch = threading.local()


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
IS_GIVEN_UP = ctypes.CFUNCTYPE(ctypes.c_int)(
    lambda: (given_up := getattr(_launch, "given_up", None)) is not None and given_up.is_set()
)


def is_in_handler() -> bool:
    """Return whether a handler runs in this thread during one of its launches. Local."""
    is_main = threading.current_thread() is threading.main_thread()
    return is_main and bool(_serving.gi_running)


def end_waits_when(given_up: threading.Event) -> None:
    """Let an event end the waits of this thread's launches, whose caller waits no longer. Local."""
    _launch.given_up = given_up


def raise_in_main_thread() -> None:
    """Raise what a handler has raised, if this is the main thread. Local; after a launch.

    Raises:
        Interrupted: a handler has raised, such as Python's own for Ctrl-C.
    """
    if raised and threading.current_thread() is threading.main_thread():
        first = raised[0]
        raised.clear()
        raise Interrupted(first)
