"""Limit of the ranks' waits for one another: longer while ranks may compile, load or tune.

Each launch has its limit as an argument. So a kernel knows one limit only, and a CUDA graph keeps
the limit of its captured launches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple


class Timeouts(NamedTuple):
    """Seconds that a rank waits for the others: `first` during start-up, `later` after it."""

    first: float
    later: float

    @classmethod
    def of(cls, config: Any) -> Timeouts:
        """Take the limits of an AllToAllConfig or HeadConfig."""
        first = config.first_timeout_s
        return cls(config.timeout_s if first is None else first, config.timeout_s)


class Startup:
    """Chooser of the limit that each launch on one workspace gets. Local to this rank.

    Start-up lasts until the second complete round; if it is held, until `end`. The capture of a
    CUDA graph also ends it: a graph replays its launches after start-up, so they get the later
    limit.

    Args:
        is_capturing: whether launches of this thread now go into a CUDA graph.
    """

    def __init__(self, is_capturing: Callable[[], bool]) -> None:
        self._is_capturing = is_capturing
        self._is_over = self._is_held = False
        self._complete = 0  # rounds
        self._rounds: Counter[int] = Counter()  # channel -> rounds that began with the first limit

    def hold(self) -> None:
        """Make start-up last until `end` is called, regardless of the number of rounds."""
        self._is_held = True

    def end(self) -> None:
        """End start-up, until new ranks come."""
        self._is_over, self._is_held = True, False

    def begin_round(self, channel: int, timeouts: Timeouts) -> int:
        """Begin a round; return the nanoseconds that its first launch may wait."""
        if self._is_over:
            return int(timeouts.later * 1e9)
        timeout = self.timeout_ns(timeouts)
        if not self._is_over:
            self._rounds[channel] += 1
        return timeout

    def timeout_ns(self, timeouts: Timeouts) -> int:
        """Return the nanoseconds that a further launch of the round may wait."""
        if self._is_over:
            return int(timeouts.later * 1e9)
        if self._is_capturing():
            self._is_over = True
        return int((timeouts.later if self._is_over else timeouts.first) * 1e9)

    def complete_round(self) -> None:
        """Record that the last launch of a round has been made.

        The second round has the first limit too. The combine of a small batch waits for the rows of
        this rank's own tokens only; the dispatch after it waits until every rank has combined.
        """
        if not (self._is_over or self._is_held):
            self._complete += 1
            if self._complete > 1:  # never set it back: another channel's thread may have set it
                self._is_over = True

    def begin_anew(self, *, with_newcomers: bool = False) -> None:
        """Record that the epochs of all channels begin at 1 again.

        Args:
            with_newcomers: start-up begins again too, because new ranks may compile or tune.
        """
        self._rounds.clear()
        if with_newcomers:
            self._is_over, self._complete = False, 0

    def waited_s(self, channel: int, epoch: int, timeouts: Timeouts) -> float:
        """Return the limit in seconds of a wait in this round; epochs of a channel start at 1."""
        return timeouts.first if epoch <= self._rounds[channel] else timeouts.later
