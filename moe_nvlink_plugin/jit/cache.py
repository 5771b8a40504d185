"""Content-addressed files of compiled kernels, shared by all processes of one user.

A file is published by an atomic rename, so a reader sees all of it or none; one process compiles a
text while the others wait for it. The directory must be the user's own and writable by nobody else,
for what lies in it is executed.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

import filelock
import platformdirs

from moe_nvlink_plugin import env
from moe_nvlink_plugin.errors import CompileError

#: A compilation takes seconds; a lock held longer belongs to a process in trouble.
_LOCK_TIMEOUT_S = 300.0


def directory() -> Path:
    """The cache directory, created if need be.

    Raises:
        CompileError: it cannot be created, or others could write into it.
    """
    path = env.cache_dir() or Path(platformdirs.user_cache_dir("moe_nvlink"))
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.stat()
    except OSError as error:
        raise CompileError(
            f"cannot use {path} for compiled kernels: {error}; set MOE_NVLINK_CACHE_DIR to a "
            "directory of yours"
        ) from error
    if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise CompileError(
            f"{path} holds code this process would run, but others may write to it "
            f"(mode {stat.S_IMODE(status.st_mode):o}, owner {status.st_uid}); chmod 700 it or set "
            "MOE_NVLINK_CACHE_DIR"
        )
    return path


def get_or_build(key: str, suffix: str, build: Callable[[Path], None]) -> Path:
    """The file for `key`, made by `build(target)` if it is not there yet. Local.

    Raises:
        CompileError: the directory is unusable, the build failed or its lock is held for minutes.
    """
    digest = hashlib.sha256(key.encode()).hexdigest()[:32]
    folder = directory()
    path = folder / f"{digest}{suffix}"
    if path.exists():
        return path
    try:
        with filelock.FileLock(folder / f"{digest}.lock", timeout=_LOCK_TIMEOUT_S):
            if not path.exists():
                _publish(path, build)
    except filelock.Timeout as error:
        raise CompileError(
            f"another process has been compiling {path.name} for {_LOCK_TIMEOUT_S:g} s; "
            f"end it or remove {error.lock_file}"
        ) from error
    return path


def _publish(path: Path, build: Callable[[Path], None]) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="building-") as folder:
        target = Path(folder) / path.name
        build(target)
        os.replace(target, path)
