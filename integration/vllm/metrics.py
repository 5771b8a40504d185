"""Puts our counters into vLLM's /metrics.

vLLM serves prometheus_client's own registry, or, with several API servers, what its processes leave
in PROMETHEUS_MULTIPROC_DIR, which vLLM sets before it starts any process. So a worker leaves a
file for a collector in that registry, or counts in that directory. Our schedulers do the same in
vLLM's engine processes (``scheduler.reports``), in the same folder.

vLLM's group of entry points for stat loggers is not used. An entry point there, whatever the flag,
turns on vLLM's statistics for a user who has passed --disable-log-stats. And a stat logger sees
what schedulers report, not what workers have counted.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import shutil
from pathlib import Path
from typing import Any

from moe_nvlink_plugin import env
from moe_nvlink_plugin.integration.common.metrics import (
    ProcessCounters,
    Publication,
    RankFile,
    RanksCollector,
    folder_of,
)

logger = logging.getLogger(__name__)

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
