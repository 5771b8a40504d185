"""Content-addressed files of compiled kernels, shared by all processes of one user.

A process publishes a file by an atomic rename, so a reader sees all of it or none. One process
compiles a text while the others wait for it. Processes execute what lies here. Therefore a process
uses a file only if nobody but this user and root could have written it: directory and file belong
to one of the two, and neither group nor others may write to them.

MOE_NVLINK_CACHE_DIR may name a directory that came with an image, which root has filled and this
user may only read. A process looks there first. What the directory lacks, the process compiles into
the user's own directory.
"""

from __future__ import annotations

import hashlib
import logging
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import filelock

from moe_nvlink_plugin import env
from moe_nvlink_plugin.errors import CompileError

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: A compilation takes seconds, so a process that holds a lock for longer has failed or hangs.
_LOCK_TIMEOUT_S = 300.0
_ROOT = 0
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def directory() -> Path:
    """Return the directory that this process publishes into; create it if needed. Local.

    Raises:
        CompileError: the directory cannot be created, or others may write to it.
    """
    given = env.cache_dir()
    path = _user_directory() if given is None or shipped_directory() else given
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.stat()
    except OSError as error:
        raise CompileError(
            f"cannot use {path} for compiled kernels: {error}; set MOE_NVLINK_CACHE_DIR to a "
            "directory of yours, or to one that `moe-nvlink precompile` has filled"
        ) from error
    _check(path, status, {os.getuid()})
    return path


def shipped_directory() -> Path | None:
    """Return MOE_NVLINK_CACHE_DIR if this process may only read it, else None. Local.

    Raises:
        CompileError: this process may not read it, or others than this user and root may write to
            it.
    """
    path = env.cache_dir()
    if path is None:
        return None
    try:
        status = path.stat()
    except FileNotFoundError:
        return None  # directory() makes it
    except OSError as error:
        raise CompileError(f"cannot look into MOE_NVLINK_CACHE_DIR={path}: {error}") from error
    # access() also knows of read-only file systems, where even root cannot write.
    if status.st_uid == os.getuid() and os.access(path, os.W_OK):
        return None
    _check(path, status, {os.getuid(), _ROOT})
    if not os.access(path, os.R_OK | os.X_OK):
        raise CompileError(
            f"MOE_NVLINK_CACHE_DIR={path} is not readable by user {os.getuid()} (mode "
            f"{stat.S_IMODE(status.st_mode):o}, owner {status.st_uid}); chmod 755 it"
        )
    return path


def _user_directory() -> Path:
    # Imported here: a borrowed machine may lack platformdirs, and sets MOE_NVLINK_CACHE_DIR.
    import platformdirs

    path = Path(platformdirs.user_cache_dir("moe_nvlink"))
    if not path.is_absolute():  # a container's user without an entry in passwd
        raise CompileError(
            f"user {os.getuid()} has no home directory for compiled kernels; set "
            "MOE_NVLINK_CACHE_DIR to a directory of yours"
        )
    return path


def _check(path: Path, status: os.stat_result, owners: set[int]) -> None:
    """Raise CompileError if others than `owners` may write to the directory."""
    if status.st_uid in owners and not status.st_mode & _OTHERS_WRITE:
        return
    if status.st_uid == os.getuid():
        remedy = "chmod 700 it"
    elif status.st_uid in owners:
        remedy = "chmod 755 it"
    else:
        remedy = "give it and its files to root (chown -R 0, chmod 755)"
    raise CompileError(
        f"{path} holds code this process would run, but others may write to it (mode "
        f"{stat.S_IMODE(status.st_mode):o}, owner {status.st_uid}); {remedy}, or set "
        "MOE_NVLINK_CACHE_DIR to a directory that only you, or only root, may write to"
    )


def load(key: str, suffix: str, read: Callable[[Path], T | None]) -> T | None:
    """Return what `read` makes of the file for `key`; None if it accepts no such file. Local.

    It writes nothing, and needs no directory that this process may write to.

    Args:
        key: whatever the content depends on.
        suffix: ending of the file's name.
        read: reads a file; returns None for a file that it does not accept.

    Raises:
        CompileError: others may write to a directory.
    """
    shipped = shipped_directory()
    found = None if shipped is None else _read(shipped / _name(key, suffix), read)
    if found is not None:
        return found
    try:
        own = directory()
    except CompileError:
        if shipped is None:
            raise
        return None
    return _read(own / _name(key, suffix), read)


def load_or_build(
    key: str, suffix: str, build: Callable[[Path], None], read: Callable[[Path], T | None]
) -> T:
    """Return what `read` makes of the file for `key`; build the file if there is none. Local.

    Args:
        key: whatever the content depends on.
        suffix: ending of the file's name.
        build: writes the file to the path that it gets.
        read: reads a file. If it returns None, the file is built again.

    Raises:
        CompileError: the directory cannot be used, the build failed, or another process held the
            lock for 300 s.
    """
    found = load(key, suffix, read)
    if found is not None:
        return found
    path = _directory_for_a_miss() / _name(key, suffix)
    try:
        with filelock.FileLock(path.with_suffix(".lock"), timeout=_LOCK_TIMEOUT_S):
            found = _read(path, read)
            if found is None:
                _publish(path, build)
                found = _read(path, read)
    except filelock.Timeout as error:
        raise CompileError(
            f"another process has been compiling {path.name} for {_LOCK_TIMEOUT_S:g} s; "
            f"end it or remove {error.lock_file}"
        ) from error
    except OSError as error:
        raise CompileError(
            f"cannot write {path}: {error}; make room there, or set MOE_NVLINK_CACHE_DIR"
        ) from error
    if found is None:
        raise CompileError(f"{path} was just compiled and cannot be read; remove the file")
    return found


def _directory_for_a_miss() -> Path:
    shipped = shipped_directory()
    try:
        return directory()
    except CompileError as error:
        if shipped is None:
            raise
        raise CompileError(
            f"{shipped} lacks the needed kernels (add them with `moe-nvlink precompile`), and "
            f"there is no directory to compile them into: {error}"
        ) from error


def get_or_build(key: str, suffix: str, build: Callable[[Path], None]) -> Path:
    """Return the path of the file for `key`; build the file if there is none. Local.

    Args and errors are those of load_or_build.
    """
    return load_or_build(key, suffix, build, lambda path: path)


def _name(key: str, suffix: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()[:32] + suffix


def _read(path: Path, read: Callable[[Path], T | None]) -> T | None:
    try:
        status = path.lstat()
        # Checked even if the directory is safe: root may have put a file there that a group may
        # change.
        ours = stat.S_ISREG(status.st_mode) and status.st_uid in (os.getuid(), _ROOT)
        if not ours or status.st_mode & _OTHERS_WRITE:
            logger.warning(
                "%s is not used: others may write to it (mode %o, owner %d); chmod 644 it",
                path,
                stat.S_IMODE(status.st_mode),
                status.st_uid,
            )
            return None
        found = read(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        logger.warning("%s is not used: %s", path, error)
        return None
    if found is None:
        logger.warning("%s is damaged and is not used", path)
    return found


def _publish(path: Path, build: Callable[[Path], None]) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="building-") as folder:
        target = Path(folder) / path.name
        build(target)
        target.chmod(0o644)  # with some umasks the group could write, and no process would use it
        # The content reaches the disk before the name, so a power failure leaves no empty file.
        with target.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(target, path)
