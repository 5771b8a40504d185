"""Writes this rank's counters to a JSON file, for whoever watches a server."""

from __future__ import annotations

import atexit
import json
import logging
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

logger = logging.getLogger(__name__)

_PERIOD_S = 0.5


class StatsWriter:
    """Keeps ``<directory>/rank<ep_rank>.json`` up to date from a thread of its own.

    Because a thread writes, an idle worker still publishes its last rounds, and the exchange never
    waits for a disk. The writer replaces the file as a whole, so a reader sees one state or the
    next. If the file cannot be written, the writer logs the path and the reason once, and the
    worker continues: counters are not worth a server.

    Args:
        directory: created if it does not exist.
        about: keys of the file that do not change; `ep_rank` is one of them.
        read: returns the other keys.
        pool: name of the pool, if a worker has several; the file is
            ``<directory>/<pool>-rank<ep_rank>.json`` then.
        watch: False starts no thread; then only `close` writes.
    """

    def __init__(
        self,
        directory: str | Path,
        about: Mapping[str, int],
        read: Callable[[], Mapping[str, object]],
        *,
        pool: str = "",
        watch: bool = True,
    ) -> None:
        prefix = f"{pool}-" if pool else ""
        self.path = Path(directory) / f"{prefix}rank{about['ep_rank']}.json"
        self._about = {**about, "pid": os.getpid()}
        self._read = read
        self._written: Mapping[str, object] | None = None
        self._has_warned = False
        self._stop = threading.Event()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            self._warn(error)
        self._thread = threading.Thread(target=self._run, name="moe-nvlink-stats", daemon=True)
        if watch:
            self._thread.start()
        atexit.register(self.close)

    def _run(self) -> None:
        while not self._stop.wait(_PERIOD_S):
            self._write()

    def _write(self) -> None:
        stats = self._read()
        if stats == self._written:
            return
        content = json.dumps({**self._about, **stats})
        scratch = self.path.with_suffix(f".{os.getpid()}.tmp")
        try:
            scratch.write_text(content + "\n", encoding="utf-8")
            scratch.replace(self.path)
        except OSError as error:
            self._warn(error)
            return
        self._written = stats

    def _warn(self, error: OSError) -> None:
        if not self._has_warned:
            logger.warning(
                "moe_nvlink: the counters of this rank are not written to %s: %s; let "
                "MOE_NVLINK_STATS_DIR name a directory that this process may write to",
                self.path,
                error,
            )
        self._has_warned = True

    def close(self) -> None:
        """Stop the thread and write the last state. Local; idempotent; raises no OSError."""
        if self._stop.is_set():
            return
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._write()
        atexit.unregister(self.close)
