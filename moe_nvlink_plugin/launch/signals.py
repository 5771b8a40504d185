"""Handlers of signals during a launch on CPU ranks, which returns to Python only at its end."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Iterator

from .base import Interrupted

#: What a handler has raised during a launch of the main thread.
raised: list[BaseException] = []


def _serve() -> Iterator[int]:
    """Run the handlers of the signals that have come; yield whether one of them has raised.

    A generator, and not a function: the interpreter runs handlers when it enters a function, before
    any `try`, and ctypes would swallow what they raise. It goes on within this `try`.
    """
    has_raised = 0
    while True:
        try:
            yield has_raised
            ctypes.pythonapi.PyErr_CheckSignals()
            has_raised = 0
        except GeneratorExit:
            return
        except BaseException as error:
            raised.append(error)
            has_raised = 1


_serving = _serve()
next(_serving)

#: What the kernels' waits call every 50 ms in the main thread, the only one that runs handlers.
CALL = ctypes.CFUNCTYPE(ctypes.c_int)(functools.partial(next, _serving))


def raise_in_main_thread() -> None:
    """Raise what a handler has raised, if this is the main thread. Local; after a launch.

    Raises:
        Interrupted: a handler has raised, such as Python's own for Ctrl-C.
    """
    if raised and threading.current_thread() is threading.main_thread():
        raise Interrupted(raised.pop())
