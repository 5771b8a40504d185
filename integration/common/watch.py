"""Ends a worker whose exchange has failed while it only replays CUDA graphs.

On a GPU a verb fails after its call has returned, and the next call raises it. A replayed graph
makes no calls: without this thread a server would go on serving what combine writes then, NaN.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable

from moe_nvlink_plugin.errors import MoeNvlinkError

logger = logging.getLogger(__name__)

_PERIOD_S = 0.5


def end_worker() -> None:
    """Asks this process to end; its parent process notices, and fails the open requests."""
    os.kill(os.getpid(), signal.SIGTERM)


class FailureWatch:
    """Asks `failure()` every half second from a thread of its own, and acts once on what it says.

    failure: waits for nothing and makes no CUDA call, so it disturbs no capture. what: has failed
    when it says so, for the log.
    """

    def __init__(
        self,
        failure: Callable[[], MoeNvlinkError | None],
        end: Callable[[], None] = end_worker,
        period_s: float = _PERIOD_S,
        what: str = "The exchange of experts",
    ) -> None:
        self._failure, self._what = failure, what
        self._end, self._period_s = end, period_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="moe-nvlink-watch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(self._period_s):
            found = self._failure()
            if found is not None:
                logger.critical("%s has failed, this worker ends: %s", self._what, found)
                self._end()
                return

    def close(self) -> None:
        """Ends the thread. Local, idempotent."""
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join()
