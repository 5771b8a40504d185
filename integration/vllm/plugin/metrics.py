"""Puts our counters into vLLM's /metrics.

vLLM serves prometheus_client's own registry, or, with several API servers, what its processes leave
in PROMETHEUS_MULTIPROC_DIR, which vLLM sets before it starts any process. So a worker leaves a
file for a collector in that registry, or counts in that directory.

vLLM's group of entry points for stat loggers is not used. An entry point there, whatever the flag,
turns on vLLM's statistics for a user who has passed --disable-log-stats. And a stat logger sees
what schedulers report, not what workers have counted.
"""

from __future__ import annotations

from typing import Any

from moe_nvlink_plugin import env
from moe_nvlink_plugin.integration.common.metrics import (
    ProcessCounters,
    Publication,
    RankFile,
    RanksCollector,
)
from moe_nvlink_plugin.integration.vllm.places import metrics_folder, remove_at_exit

_collector: RanksCollector | None = None


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
    return None if folder is None else RankFile(folder)
