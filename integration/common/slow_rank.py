"""Says in the log which rank all the others wait for."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from moe_nvlink_plugin.errors import MoeNvlinkError

logger = logging.getLogger(__name__)

#: Seconds between two looks at the waits.
PERIOD_S = 10.0
#: Part of that time which every other rank must have waited for a rank that the log names.
LEAST_SHARE = 0.25
#: Seconds between two lines about the same rank.
AGAIN_S = 300.0

#: Nanoseconds that rank r has waited for rank p, as [r][p].
Waits = Sequence[Sequence[int]]


class SlowRank:
    """Finds the rank for which all others wait, from totals that it is shown now and then."""

    def __init__(self) -> None:
        self._before: Waits | None = None
        self._since = 0.0
        self._named: dict[int, float] = {}  # rank -> when the log has named it last

    def look(self, waits: Waits, now: float) -> None:
        """Log a warning if a rank was waited for since the last look. Local.

        Args:
            waits: of all ranks; at least two.
            now: seconds on a clock that is never set back.
        """
        before, since = self._before, self._since
        if before is not None and not any(map(any, waits)):
            return  # the memory with the totals has been given back; they come again with it
        self._before, self._since = waits, now
        if before is None:
            return
        waited = [
            [(waits[r][rank] - before[r][rank]) / 1e9 for r in range(len(waits)) if r != rank]
            for rank in range(len(waits))
        ]
        slow = max(range(len(waits)), key=lambda rank: min(waited[rank]))
        least, most = min(waited[slow]), max(waited[slow])
        is_new = now - self._named.get(slow, -AGAIN_S) >= AGAIN_S
        if least < LEAST_SHARE * (now - since) or not is_new:
            return
        self._named[slow] = now
        logger.warning(
            "moe_nvlink: all ranks wait for rank %d: waits that ended in the last %.1f s took each "
            "of the other %d rank(s) %.1f to %.1f s; look at rank %d: its log, the load of its "
            "host, the clock of its GPU, and how many tokens its experts get",
            slow,
            now - since,
            len(waits) - 1,
            least,
            most,
            slow,
        )


class SlowRankWatch:
    """Thread that shows the waits to a `SlowRank` every few seconds.

    Args:
        waits: returns the totals, or None, which ends the thread. It waits for nothing.
        period_s: seconds between two calls.
    """

    def __init__(self, waits: Callable[[], Waits | None], period_s: float = PERIOD_S) -> None:
        self._waits, self._period_s = waits, period_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="moe-nvlink-slow", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        slow = SlowRank()
        while True:
            try:
                waits = self._waits()
            except MoeNvlinkError as error:  # the ranks end, or a peer's memory is gone
                logger.info("moe_nvlink: waits are no longer looked at: %s", error)
                return
            if waits is None:
                return
            slow.look(waits, time.monotonic())
            del waits
            if self._stop.wait(self._period_s):
                return

    def close(self) -> None:
        """End the thread. Local; idempotent."""
        self._stop.set()
        self._thread.join()
