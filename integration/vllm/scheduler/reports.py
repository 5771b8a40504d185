"""What our scheduler reports: from vLLM's engine process to the process that serves /metrics.

It takes the way of the workers' counters, see `integration.vllm.metrics`: a file per engine, or
prometheus_client's own files in PROMETHEUS_MULTIPROC_DIR.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from moe_nvlink_plugin import env
from moe_nvlink_plugin.integration.common.stats import write_whole
from moe_nvlink_plugin.integration.vllm.metrics import metrics_folder, remove_at_exit

_PREFIX = "moe_nvlink_capacity_"
_GAUGES = {
    "waiting_requests": (
        "Requests in the queue, if the first that could start waits for KV blocks that are free "
        "but reserved; else 0."
    ),
    "reserved_blocks": "Free KV blocks that requests which hold blocks may still take.",
}
_COUNTER = "refused_requests"
_COUNTER_TEXT = "Requests refused because they need more KV blocks than there are."
#: Seconds between two reports, unless what they say has become 0.
EVERY_S = 1.0


class Report(NamedTuple):
    """What the scheduler says; see the texts of the metrics."""

    waiting_requests: int = 0
    reserved_blocks: int = 0
    refused_requests: int = 0


class Reporter:
    """Leaves an engine's reports where /metrics finds them.

    Args:
        vllm_config: vLLM's.
    """

    def __init__(self, vllm_config: Any) -> None:
        engine = str(vllm_config.parallel_config.data_parallel_index)
        self._publish = _in_directory(engine)
        if self._publish is None:
            folder = metrics_folder(vllm_config)
            self._publish = None if folder is None else _in_file(folder, engine)
        self._next = 0.0
        self._last: Report | None = None

    def is_due(self, *, is_idle: bool) -> bool:
        """Return whether it is time for a report: once a second, and when the engine falls idle."""
        return is_idle or time.monotonic() >= self._next

    def publish(self, report: Report) -> None:
        """Publish a report, unless it says what the last one said. Local; never raises OSError."""
        self._next = time.monotonic() + EVERY_S
        if report != self._last and self._publish is not None:
            with contextlib.suppress(OSError):  # a full disk must not stop the engine
                self._publish(report)
                self._last = report


def _in_file(folder: Path, engine: str) -> Callable[[Report], None]:
    """Return what writes a file, which lies there for as long as this process lives."""
    path = folder / f"engine{engine}.json"

    def publish(report: Report) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(path, {"engine": engine, **report._asdict()})

    remove_at_exit(path, is_file=True)
    return publish


def _in_directory(engine: str) -> Callable[[Report], None] | None:
    """Return what counts in PROMETHEUS_MULTIPROC_DIR; None: there is no such directory."""
    if not env.counts_for_prometheus():
        return None
    from prometheus_client import Counter, Gauge

    # In no registry: this process serves no metrics.
    gauges = {
        name: Gauge(
            _PREFIX + name, text, ["engine"], registry=None, multiprocess_mode="mostrecent"
        ).labels(engine)
        for name, text in _GAUGES.items()
    }
    counter = Counter(_PREFIX + _COUNTER, _COUNTER_TEXT, ["engine"], registry=None).labels(engine)
    counted = 0

    def publish(report: Report) -> None:
        nonlocal counted
        for name, gauge in gauges.items():
            gauge.set(getattr(report, name))
        counter.inc(report.refused_requests - counted)
        counted = report.refused_requests

    return publish


class Collector:
    """Collector of prometheus_client: the last reports that engines have left in some folders."""

    def __init__(self) -> None:
        self.folders: list[Path] = []

    def collect(self) -> Iterator[Any]:
        """Yield the families of all engines. Local."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        families: dict[str, Any] = {
            name: GaugeMetricFamily(_PREFIX + name, text, labels=["engine"])
            for name, text in _GAUGES.items()
        }
        families[_COUNTER] = CounterMetricFamily(
            _PREFIX + _COUNTER, _COUNTER_TEXT, labels=["engine"]
        )
        for report in self._reports():
            for name, family in families.items():
                family.add_metric([report["engine"]], report[name])
        yield from families.values()

    def _reports(self) -> Iterator[Mapping[str, Any]]:
        for folder in self.folders:
            for path in sorted(folder.glob("engine*.json")):
                with contextlib.suppress(FileNotFoundError):  # another process removes the folder
                    yield json.loads(path.read_text(encoding="utf-8"))


_collector: Collector | None = None


def serve(vllm_config: Any) -> None:
    """Let this process's registry show the engines of a configuration. Local.

    vLLM shows the registry of a server's process; with PROMETHEUS_MULTIPROC_DIR, that directory.
    """
    global _collector
    if _collector is None:
        from prometheus_client import REGISTRY

        _collector = Collector()
        REGISTRY.register(_collector)
    folder = metrics_folder(vllm_config)
    if folder is not None and folder not in _collector.folders:
        _collector.folders.append(folder)
        remove_at_exit(folder)
