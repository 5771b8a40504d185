"""A worker's counters as metrics for Prometheus: from the worker to the process that serves them.

Workers are other processes than the server. Each worker leaves its counters in a file (`RankFile`),
and the server reads the files when it is asked for metrics (`RanksCollector`). If the server
collects what its processes leave in PROMETHEUS_MULTIPROC_DIR, as several servers of one model do,
each worker counts there with prometheus_client (`ProcessCounters`).
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import platformdirs

#: What `samples` reads, by name, as StatsWriter writes it.
Snapshot = Mapping[str, Any]


class Family(NamedTuple):
    """A metric, which counts up: its text, and the labels of its samples."""

    text: str
    labels: tuple[str, ...]


#: By name; Prometheus adds "_total".
FAMILIES = {
    "moe_nvlink_rounds": Family("Dispatches of this rank.", ("ep_rank",)),
    "moe_nvlink_tokens": Family("Tokens that this rank dispatched, in all layers.", ("ep_rank",)),
    "moe_nvlink_bytes": Family(
        "Bytes of rows that this rank's dispatches put, and its combines got.",
        ("ep_rank", "verb", "place"),
    ),
    "moe_nvlink_wait_seconds": Family(
        "Seconds that this rank's verbs have waited for a peer.", ("ep_rank", "peer")
    ),
    "moe_nvlink_faults": Family("1 after a verb of this rank has failed.", ("ep_rank",)),
}

#: Name of a family, values of its labels, value.
Sample = tuple[str, tuple[str, ...], float]


def samples(snapshot: Snapshot) -> Iterator[Sample]:
    """Yield the samples of one rank. Local."""
    rank = str(snapshot["ep_rank"])
    yield "moe_nvlink_rounds", (rank,), snapshot["rounds"]
    yield "moe_nvlink_tokens", (rank,), snapshot["tokens"]
    for verb, key in (("dispatch", "bytes_dispatched"), ("combine", "bytes_combined")):
        remote = snapshot[f"{key}_remote"]
        yield "moe_nvlink_bytes", (rank, verb, "remote"), remote
        yield "moe_nvlink_bytes", (rank, verb, "local"), snapshot[key] - remote
    for peer, waited in enumerate(snapshot["waited_ns"]):
        if str(peer) != rank:
            yield "moe_nvlink_wait_seconds", (rank, str(peer)), waited / 1e9
    yield "moe_nvlink_faults", (rank,), snapshot["faults"]


class Publication(Protocol):
    """Where a worker's counters go. One thread calls it, and then another closes it."""

    def publish(self, snapshot: Snapshot) -> None:
        """Publish the newest counters. Local; raises OSError if it cannot."""
        ...

    def close(self) -> None:
        """Give up what only a living worker needs. Local; idempotent."""
        ...


def folder_of(server: str) -> Path:
    """Return the folder where the workers of a server leave their files. Local.

    Args:
        server: name of the server, which its workers know; no other server of this user has it.
    """
    # Created now, for this user alone: in /tmp, somebody else could create it later.
    runtime = platformdirs.user_runtime_path("moe-nvlink", ensure_exists=True)
    return runtime / "metrics" / server


def write_whole(path: Path, content: Snapshot) -> None:
    """Write a JSON file so that a reader sees the whole of one state. Local; raises OSError."""
    scratch = path.with_suffix(f".{os.getpid()}.tmp")
    scratch.write_text(json.dumps(content) + "\n", encoding="utf-8")
    scratch.replace(path)


class RankFile:
    """Keeps a rank's counters in a file, for as long as its worker lives."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path: Path | None = None

    def publish(self, snapshot: Snapshot) -> None:
        """See Publication."""
        if self._path is None:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._path = self._folder / f"rank{snapshot['ep_rank']}.json"
        write_whole(self._path, snapshot)

    def close(self) -> None:
        """See Publication. The last worker of a server also removes the folder."""
        if self._path is None:
            return
        path, self._path = self._path, None
        with contextlib.suppress(OSError):  # the folder has another worker's file
            path.unlink(missing_ok=True)
            self._folder.rmdir()


class RanksCollector:
    """Collector of prometheus_client: the counters of the ranks whose files lie in some folders."""

    def __init__(self, folders: Iterable[Path]) -> None:
        self.folders = list(folders)

    def collect(self) -> Iterator[Any]:
        """Yield the families of all ranks. Local."""
        from prometheus_client.core import CounterMetricFamily

        families = {
            name: CounterMetricFamily(name, family.text, labels=family.labels)
            for name, family in FAMILIES.items()
        }
        for snapshot in self._snapshots():
            for name, labels, value in samples(snapshot):
                families[name].add_metric(labels, value)
        yield from families.values()

    def _snapshots(self) -> Iterator[Snapshot]:
        for folder in self.folders:
            for path in sorted(folder.glob("rank*.json")):
                try:
                    yield json.loads(path.read_text(encoding="utf-8"))
                except FileNotFoundError:  # its worker has ended since
                    continue


class ProcessCounters:
    """Counters of prometheus_client in a process whose environment has PROMETHEUS_MULTIPROC_DIR.

    The library writes them to a file in that directory, where the server's collector finds them.
    """

    def __init__(self) -> None:
        from prometheus_client import Counter

        # In no registry: this process serves no metrics.
        self._counters = {
            name: Counter(name, family.text, family.labels, registry=None)
            for name, family in FAMILIES.items()
        }
        self._published: dict[tuple[str, tuple[str, ...]], float] = {}

    def publish(self, snapshot: Snapshot) -> None:
        """See Publication."""
        for name, labels, value in samples(snapshot):
            more = value - self._published.get((name, labels), 0.0)
            self._counters[name].labels(*labels).inc(
                max(more, 0)
            )  # after mask() there is no fault any more
            self._published[name, labels] = value

    def close(self) -> None:
        """See Publication. Counters stay: Prometheus expects that of a process that has ended."""
