"""How long ranks wait for one another: longer while some may still compile, load or tune.

The limit is an argument of each launch. So the kernels know of one limit only, and a CUDA graph
keeps the limit that its launches were captured with.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple


class Timeouts(NamedTuple):
    """Seconds that a rank waits for the others: `first` while start-up lasts, `later` after it."""

    first: float
    later: float

    @classmethod
    def of(cls, config: Any) -> Timeouts:
        """Those of an AllToAllConfig or HeadConfig."""
        first = config.first_timeout_s
        return cls(config.timeout_s if first is None else first, config.timeout_s)


class Startup:
    """Which limit the launches on one workspace get. Local to this rank.

    Start-up lasts until the first complete round; while it is held, until `end`. A capture ends it:
    what is captured is replayed after start-up, so it gets the later limit.

    is_capturing: whether launches of this thread now go into a CUDA graph.
    """

    def __init__(self, is_capturing: Callable[[], bool]) -> None:
        self._is_capturing = is_capturing
        self._is_over = self._is_held = False
        self._rounds: Counter[int] = Counter()  # by channel: begun with the first limit

    def hold(self) -> None:
        """Lets start-up last until `end` is called, however many rounds there are."""
        self._is_held = True

    def end(self) -> None:
        """Ends start-up for good."""
        self._is_over = True

    def begin_round(self, channel: int, timeouts: Timeouts) -> int:
        """Nanoseconds that the launch which begins a round may wait."""
        timeout = self.timeout_ns(timeouts)
        if not self._is_over:
            self._rounds[channel] += 1
        return timeout

    def timeout_ns(self, timeouts: Timeouts) -> int:
        """Nanoseconds that another launch of the round may wait."""
        if not self._is_over and self._is_capturing():
            self._is_over = True
        return int((timeouts.later if self._is_over else timeouts.first) * 1e9)

    def complete_round(self) -> None:
        """The launch that ends a round has been made."""
        if not self._is_held:
            self._is_over = True

    def waited_s(self, channel: int, epoch: int, timeouts: Timeouts) -> float:
        """Seconds that a wait in this round of a channel had; its epochs count from 1."""
        return timeouts.first if epoch <= self._rounds[channel] else timeouts.later
