"""What of the suite runs alone, although pytest-xdist knows no such thing: a lock of the system's.

A process that dies gives up its locks, so nobody waits for it.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

#: The longest that tests of one group take, several times over.
PATIENCE_S = 3600.0


class Turn:
    """A place that many processes may hold at once, or one alone.

    Args:
        file: the same one for all of them.
    """

    def __init__(self, file: Path) -> None:
        self._file = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
        self._name = file
        self.is_held = False

    def take(self, *, alone: bool, patience_s: float = PATIENCE_S) -> None:
        """Waits for those that hold it, if this one or they want it alone.

        Raises:
            TimeoutError: they did not give it back in time.
        """
        give_up = time.monotonic() + patience_s
        while not self._taken(fcntl.LOCK_EX if alone else fcntl.LOCK_SH):
            if time.monotonic() > give_up:
                raise TimeoutError(
                    f"another process has held {self._name} for {patience_s:.0f} s; end the test "
                    "run that hangs, or run these tests with -n 0"
                )
            time.sleep(0.05)
        self.is_held = True

    def _taken(self, kind: int) -> bool:
        try:
            fcntl.flock(self._file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def give_back(self) -> None:
        """Also on behalf of processes forked meanwhile, which hold the same lock."""
        fcntl.flock(self._file, fcntl.LOCK_UN)
        self.is_held = False
