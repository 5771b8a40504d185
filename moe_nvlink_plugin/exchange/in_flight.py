"""A verb that runs beside its caller: dispatch_async and combine_async, until their wait()."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from moe_nvlink_plugin.errors import ExchangeStateError

T = TypeVar("T")


class Running:
    """One launch that runs beside the caller on one channel.

    Attributes:
        verb: "dispatch" or "combine".
        touched: what holds the tensors that the kernel reads and writes. The channel keeps this
            object until the wait, so nobody else gets the memory meanwhile.
    """

    def __init__(self, verb: str, join: Callable[[], None], touched: tuple[Any, ...]) -> None:
        self.verb = verb
        self.touched = touched
        self._join = join

    def join(self) -> None:
        """Wait for the launch: on a GPU the caller's stream waits, on CPU ranks the caller."""
        self._join()

    def refuse(self, verb: str, channel: int) -> ExchangeStateError:
        """Return the error of a verb that the caller starts too early."""
        return ExchangeStateError(
            f"{verb} on channel {channel} before wait() of its {self.verb}_async; call wait() on "
            f"what {self.verb}_async returned first, or use another channel"
        )


class InFlight(Generic[T]):
    """A verb that runs beside its caller. Exactly one `wait` ends it.

    Until then the caller neither writes to the tensors that it has passed, nor reads the results,
    nor starts another verb on the channel. Verbs of other channels may run meanwhile.
    """

    def __init__(self, wait: Callable[[], T]) -> None:
        self._wait = wait

    def wait(self) -> T:
        """Wait for the verb, and return what the verb without `_async` returns.

        Local: the peers do not notice it. Capturable, in the capture that holds the verb's start.
        On a GPU the host goes on, and the caller's current stream waits for the kernel; if that is
        not the stream which started the verb, order that one after it too. On CPU ranks the caller
        waits. Any thread may call.

        Raises:
            ExchangeStateError: it has been called before, or the exchange is closed.
            ExchangeTimeoutError, DisagreementError, PeerError, InputError: as the verb. On a GPU
                the verb may fail later; the next verb then raises.
        """
        return self._wait()
