"""Signals while a CPU rank waits for another one: Ctrl-C, and handlers that return.

The limits of the waits are far above what a test may take, so a wait that signals do not end fails.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from moe_nvlink_plugin import HeadGroup, MoeAllToAll, sharded_argmax
from moe_nvlink_plugin.errors import ExchangeStateError
from moe_nvlink_plugin.launch import cpu
from moe_nvlink_plugin.testing import ThreadGroup, run_ranks
from tests.core.exchange.small_exchange import config, plain, round_of
from tests.support import small_head

LIMIT_S = 3600.0


@pytest.fixture(autouse=True)
def ctrl_c_raises() -> Iterator[None]:
    """Python's own handler, which a program in the background of a shell does not have."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def layers() -> Iterator[list[MoeAllToAll]]:
    """Rank 0's and rank 1's, which run in this process; their waits have three threads."""
    made = created(2, num_threads=3)
    yield made
    for layer in made:
        layer.close()


def created(size: int, **values: Any) -> list[MoeAllToAll]:
    def create(group: ThreadGroup) -> MoeAllToAll:
        return MoeAllToAll.create(config(size, group.rank, timeout_s=LIMIT_S, **values), group)

    return run_ranks(size, create)


@contextlib.contextmanager
def handled_by(handler: Callable[..., Any]) -> Iterator[None]:
    """The handler of SIGUSR1, which comes soon."""
    before = signal.signal(signal.SIGUSR1, handler)
    sender = _signal_soon(signal.SIGUSR1)
    try:
        yield
    finally:
        sender.join()  # without a handler the signal would end the process that runs the tests
        signal.signal(signal.SIGUSR1, before)


def _signal_soon(number: int) -> threading.Thread:
    """Sends a signal when the main thread is inside a launch, or waits for one beside it."""

    def send() -> None:
        end = time.monotonic() + 200
        while not _is_launching() and time.monotonic() < end:
            time.sleep(0.02)
        time.sleep(0.2)  # usually the launch waits by then
        # To the main thread, which Linux chooses, too, if it can: no other wakes one that joins.
        signal.pthread_kill(threading.main_thread().ident or 0, number)

    sender = threading.Thread(target=send)
    sender.start()
    return sender


def _is_launching() -> bool:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    codes = [one.f_code for one, _ in traceback.walk_stack(frame)]
    return any(
        code.co_filename == cpu.__file__ and code.co_name in ("__call__", "wait") for code in codes
    )


class StopError(Exception):
    pass


def stop(*_: object) -> None:
    raise StopError


@pytest.mark.parametrize(
    ("handler", "error"), [(signal.default_int_handler, KeyboardInterrupt), (stop, StopError)]
)
def test_a_handler_that_raises_ends_a_wait(
    layers: list[MoeAllToAll], handler: Callable[..., Any], error: type[BaseException]
) -> None:
    """Ctrl-C's, and another one. This is the main thread; rank 1 never comes."""
    with handled_by(handler), pytest.raises(error):
        layers[0].dispatch(**plain())
    told = f"{error.__name__} has interrupted dispatch on rank 0"
    with pytest.raises(ExchangeStateError, match=told):
        layers[0].dispatch(**plain())
    assert isinstance(layers[0].failure(), ExchangeStateError)


def test_a_handler_that_returns_ends_nothing(layers: list[MoeAllToAll]) -> None:
    """It runs while the rank waits: it is what lets the other rank come."""
    come = threading.Event()

    def other() -> None:
        assert come.wait(200)
        round_of(layers[1], **plain())

    with concurrent.futures.ThreadPoolExecutor(1) as pool, handled_by(lambda *_: come.set()):
        done = pool.submit(other)
        round_of(layers[0], **plain())
        done.result(200)


def test_ctrl_c_ends_a_wait_of_the_shared_head() -> None:
    def create(group: ThreadGroup) -> HeadGroup:
        return HeadGroup.create(small_head.config(2, group.rank, timeout_s=LIMIT_S), group)

    heads = run_ranks(2, create)
    weight = torch.ones(small_head.VOCAB, small_head.HIDDEN)
    _signal_soon(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        sharded_argmax(torch.ones(1, small_head.HIDDEN), weight, group=heads[0])
    with pytest.raises(ExchangeStateError, match="KeyboardInterrupt"):
        sharded_argmax(torch.ones(1, small_head.HIDDEN), weight, group=heads[0])
    for head in heads:
        head.close()


def test_ctrl_c_ends_a_mask() -> None:
    """Three ranks: one is dead, one does not come to the meeting."""
    three = created(3)
    _signal_soon(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        three[0].mask(2)
    for layer in three:
        layer.close()


def test_ctrl_c_ends_a_wait_for_what_runs_beside(layers: list[MoeAllToAll]) -> None:
    """close() joins the verb's thread, whose waits end too."""
    running = layers[0].dispatch_async(**plain())
    _signal_soon(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        running.wait()
    with pytest.raises(
        ExchangeStateError, match="KeyboardInterrupt has interrupted dispatch_async"
    ):
        layers[0].dispatch(**plain())
    layers[0].close()


@pytest.mark.parametrize("ends", ["wait", "close"])
def test_a_handler_that_raises_while_a_verb_runs_beside(
    layers: list[MoeAllToAll], ends: str
) -> None:
    """An ordinary error, as the launch may raise one; the launch still uses the memory."""

    def handler(*_: object) -> None:
        raise ValueError("mine")

    running = layers[0].dispatch_async(**plain())
    with handled_by(handler), pytest.raises(ValueError, match="mine"):
        running.wait() if ends == "wait" else layers[0].close()
    if ends == "wait":
        for verb in (running.wait, lambda: layers[0].dispatch(**plain())):
            with pytest.raises(ExchangeStateError, match="ValueError has interrupted dispatch_asy"):
                verb()
    layers[0].close()
    assert ends == "close" or not [
        thread for thread in threading.enumerate() if thread.name.startswith("moe_nvlink channel")
    ]


def test_a_handler_that_closes_the_exchange(layers: list[MoeAllToAll]) -> None:
    """The verb that waits has the channel, so the handler's call would wait for it for ever."""

    refused = pytest.raises(ExchangeStateError, match="a signal handler called the exchange")
    with handled_by(lambda *_: layers[0].close()), refused:
        layers[0].dispatch(**plain())
    with pytest.raises(ExchangeStateError, match="has interrupted dispatch on rank 0"):
        layers[0].dispatch(**plain())
