"""The folder in which processes of one vLLM server leave counters for the process with /metrics."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import shutil
from pathlib import Path
from typing import Any

from moe_nvlink_plugin.integration.common.metrics import folder_of

logger = logging.getLogger(__name__)


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
