"""Writes what the exchange moved to a JSON file per rank, for whoever watches a server."""

from __future__ import annotations

import atexit
import json
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

_PERIOD_S = 0.5


class StatsWriter:
    """Keeps ``<directory>/rank<ep_rank>.json`` up to date from a thread of its own.

    A thread, so that a worker that idles after its last request still publishes its last rounds,
    and the exchange itself never waits for a disk. The file is replaced as a whole: a reader sees
    one state or the next. Its keys: those of `about` and of what `read` returns.

    pool: of a worker with several pools; its file is ``<pool>-rank<ep_rank>.json``. watch: False
    has no thread, and `close` alone writes.
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
        self._stop = threading.Event()
        self.path.parent.mkdir(parents=True, exist_ok=True)
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
        scratch.write_text(content + "\n", encoding="utf-8")
        scratch.replace(self.path)
        self._written = stats

    def close(self) -> None:
        """Stops the thread and writes the last state. Local, idempotent."""
        if self._stop.is_set():
            return
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._write()
        atexit.unregister(self.close)
