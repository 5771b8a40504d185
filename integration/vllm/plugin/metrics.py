"""Puts our counters into vLLM's /metrics.

vLLM serves prometheus_client's own registry, or, with several API servers, what its processes leave
in PROMETHEUS_MULTIPROC_DIR, which vLLM sets before it starts any process. So a worker leaves a
file for a collector in that registry, or counts in that directory.

vLLM's group of entry points for stat loggers is not used. An entry point there, whatever the flag,
turns on vLLM's statistics for a user who has passed --disable-log-stats. And a stat logger sees
what schedulers report, not what workers have counted.
"""

from __future__ import annotations

import os
from typing import Any

from moe_nvlink_plugin.integration.common.metrics import (
    ProcessCounters,
    Publication,
    RankFile,
    RanksCollector,
    folder_of,
)

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
    _collector.folders.append(folder_of(_server(vllm_config)))


def publication(vllm_config: Any) -> Publication:
    """Return where this worker's counters go. Local."""
    if os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
        return ProcessCounters()
    return RankFile(folder_of(_server(vllm_config)))


def _server(vllm_config: Any) -> str:
    """Return a name that the server and all its engines have in common.

    vLLM adds the number of the engine if engines are Ray's actors.
    """
    return str(vllm_config.instance_id).partition("_dp")[0]
