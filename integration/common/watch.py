"""Ends a worker whose exchange has failed while the worker only replays CUDA graphs.

On a GPU a verb may fail after its call has returned; then the next call raises the error. But a
replayed graph makes no calls. Without this thread a server would serve what combine writes after a
failure: NaN.
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
    """Ask this process to end; its parent process notices that and fails the open requests."""
    os.kill(os.getpid(), signal.SIGTERM)


class FailureWatch:
    """Thread that calls `failure()` every half second; after the first error it calls `end()` once.

    Args:
        failure: returns the error or None. It waits for nothing and makes no CUDA call, so it
            breaks no capture.
        end: ends the worker.
        period_s: seconds between two calls.
        what: what failed, for the log.
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
        """End the thread. Local; idempotent."""
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join()
