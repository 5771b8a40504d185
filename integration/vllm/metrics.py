"""Puts our counters into vLLM's /metrics.

vLLM serves prometheus_client's own registry, or, with several API servers, what its processes leave
in PROMETHEUS_MULTIPROC_DIR, which vLLM sets before it starts any process. Workers are other
processes than the server. So each worker leaves its counters in a file (`RankFile`), which the
server reads when it is asked for metrics (`RanksCollector`), or counts in that directory
(`ProcessCounters`). Our schedulers do the same in vLLM's engine processes (``scheduler.reports``),
in the same folder.

vLLM's group of entry points for stat loggers is not used. An entry point there, whatever the flag,
turns on vLLM's statistics for a user who has passed --disable-log-stats. And a stat logger sees
what schedulers report, not what workers have counted.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import platformdirs

from moe_nvlink_plugin import env
from moe_nvlink_plugin.integration.common.stats import Publication, Snapshot, write_whole

logger = logging.getLogger(__name__)


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
    "moe_nvlink_audited": Family(
        "Rows that this rank has compared with their sender's checksum.", ("ep_rank", "source")
    ),
    "moe_nvlink_audit_faults": Family(
        "Audits of this rank that found a wrong or missing row.", ("ep_rank", "source")
    ),
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
    for key in ("audited", "audit_faults"):  # with the option audit_every
        for source, count in enumerate(snapshot.get(key, ())):
            yield f"moe_nvlink_{key}", (rank, str(source)), count


class RankFile:
    """Keeps a rank's counters in a file, for as long as its worker lives.

    Attributes:
        users: who will close it; the last one's `close` counts. When ranks join or leave, a worker
            has two pools for a while.
    """

    def __init__(self, folder: Path) -> None:
        self.users = 1
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
        self.users -= 1
        if self._path is None or self.users > 0:
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


_collector: RanksCollector | None = None
#: The files of this worker, by folder.
_files: dict[Path, RankFile] = {}


def serve(vllm_config: Any) -> None:
    """Let this process's registry show the workers of a configuration. Local.

    The platform's check calls it, which runs in each process that serves the configuration.
    """
    global _collector
    if _collector is None:
        from prometheus_client import REGISTRY

        _collector = RanksCollector(())
        REGISTRY.register(_collector)
    if (folder := metrics_folder(vllm_config)) is not None:
        _collector.folders.append(folder)
        remove_at_exit(folder)


def publication(vllm_config: Any) -> Publication | None:
    """Return where this worker's counters go; None if they have no place. Local."""
    if env.counts_for_prometheus():
        return ProcessCounters()
    folder = metrics_folder(vllm_config)
    if folder is None:
        return None
    if folder not in _files or _files[folder].users <= 0:
        _files[folder] = RankFile(folder)
    else:
        _files[folder].users += 1
    return _files[folder]


def metrics_folder(vllm_config: Any) -> Path | None:
    """Return the folder of a server's files; None if this user may have none. Local."""
    try:
        return folder_of(_server(vllm_config))
    except OSError as error:  # the runtime directory is somebody else's
        logger.warning("/metrics lacks our counters: %s", error)
        return None


def remove_at_exit(path: Path, *, is_file: bool = False) -> None:
    """Remove a file, or a folder with what killed processes have left there, when this one ends.

    With the last file its folder goes too. Local. A forked child of this process inherits the
    order, and does not follow it.

    Args:
        path: of what may not exist yet.
        is_file: whether it is a file.
    """
    atexit.register(_remove, path, is_file, os.getpid())


def _remove(path: Path, is_file: bool, pid: int) -> None:
    if os.getpid() != pid:
        return
    if not is_file:
        shutil.rmtree(path, ignore_errors=True)
        return
    with contextlib.suppress(OSError):  # the folder is gone, or has another process's file
        path.unlink(missing_ok=True)
        path.parent.rmdir()


def _server(vllm_config: Any) -> str:
    """Return a name that the server and all its engines have in common.

    vLLM adds the number of the engine if engines are Ray's actors.
    """
    return str(vllm_config.instance_id).partition("_dp")[0]


def folder_of(server: str) -> Path:
    """Return the folder where the workers of a server leave their files. Local.

    Args:
        server: name of the server, which its workers know; no other server of this user has it.
    """
    # Created now, for this user alone: in /tmp, somebody else could create it later.
    runtime = platformdirs.user_runtime_path("moe-nvlink", ensure_exists=True)
    return runtime / "metrics" / server
