"""Shows this rank's counters to whoever watches a server: in a file and where an adapter says."""

from __future__ import annotations

import atexit
import json
import logging
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from moe_nvlink_plugin.errors import MoeNvlinkError

logger = logging.getLogger(__name__)

_PERIOD_S = 0.5

#: A worker's counters, by name, as StatsWriter writes them.
Snapshot = Mapping[str, Any]


class Publication(Protocol):
    """Where a worker's counters go. One thread calls it, and then another closes it."""

    def publish(self, snapshot: Snapshot) -> None:
        """Publish the newest counters. Local; raises OSError if it cannot."""
        ...

    def close(self) -> None:
        """Give up what only a living worker needs. Local; idempotent."""
        ...


def write_whole(path: Path, content: Snapshot) -> None:
    """Write a JSON file so that a reader sees the whole of one state. Local; raises OSError.

    Two threads of a process may write the same file: when ranks join or leave, a worker has two
    pools for a while.
    """
    scratch = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}.tmp")
    scratch.write_text(json.dumps(content) + "\n", encoding="utf-8")
    scratch.replace(path)


class StatsWriter:
    """Keeps ``<directory>/rank<ep_rank>.json`` up to date from a thread of its own.

    Because a thread writes, an idle worker still publishes its last rounds, and the exchange never
    waits for a disk. The writer replaces the file as a whole, so a reader sees one state or the
    next. If the file cannot be written, the writer logs the path and the reason once, and the
    worker continues: counters are not worth a server. The same holds for the publication.

    Args:
        directory: created if it does not exist; None: no file.
        about: keys of the file that do not change; `ep_rank` is one of them.
        read: returns the other keys.
        pool: name of the pool, if a worker has several; the file is
            ``<directory>/<pool>-rank<ep_rank>.json`` then.
        publication: gets all keys too; `close` closes it.
    """

    def __init__(
        self,
        directory: str | Path | None,
        about: Mapping[str, int],
        read: Callable[[], Mapping[str, object]],
        *,
        pool: str = "",
        publication: Publication | None = None,
    ) -> None:
        prefix = f"{pool}-" if pool else ""
        name = f"{prefix}rank{about['ep_rank']}.json"
        self.path = None if directory is None else Path(directory) / name
        self._publication = publication
        self._about = {**about, "pid": os.getpid()}
        self._read = read
        self._written: Mapping[str, object] | None = None
        self._has_warned = False
        self._stop = threading.Event()
        try:
            if self.path is not None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            self._warn_of_path(error)
        self._thread = threading.Thread(target=self._run, name="moe-nvlink-stats", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def _run(self) -> None:
        while not self._stop.wait(_PERIOD_S):
            self._write()

    def _write(self) -> None:
        try:
            stats = self._read()
        except MoeNvlinkError as error:  # of a GPU that can do nothing any more
            self._warn("the counters of this rank cannot be read: %s", error)
            return
        if stats == self._written:
            return
        content = {**self._about, **stats}
        self._written = stats
        try:
            if self._publication is not None:
                self._publication.publish(content)
        except OSError as error:
            self._warn(
                "the server's metrics lack this rank: %s; let XDG_RUNTIME_DIR name a directory "
                "that this process may write to",
                error,
            )
        try:
            if self.path is not None:
                write_whole(self.path, content)
        except OSError as error:
            self._written = None  # tried again, also if nothing is counted
            self._warn_of_path(error)

    def _warn_of_path(self, error: OSError) -> None:
        self._warn(
            "the counters of this rank are not written to %s: %s; let MOE_NVLINK_STATS_DIR name a "
            "directory that this process may write to",
            self.path,
            error,
        )

    def _warn(self, message: str, *values: object) -> None:
        if not self._has_warned:
            logger.warning(f"moe_nvlink: {message}", *values)
        self._has_warned = True

    def close(self) -> None:
        """Stop the thread and write the last state. Local; idempotent; raises no OSError."""
        if self._stop.is_set():
            return
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._write()
        if self._publication is not None:
            self._publication.close()
        atexit.unregister(self.close)
