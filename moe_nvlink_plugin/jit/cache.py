"""Content-addressed files of compiled kernels, shared by all processes of one user.

A file is published by an atomic rename, so a reader sees all of it or none; one process compiles a
text while the others wait for it. What lies here is executed, so it is believed only where nobody
but this user and root could have written it: the directory and the file itself belong to one of
the two, and neither group nor others may write to either.

MOE_NVLINK_CACHE_DIR may name a directory that came with an image, filled by root and only readable
here. It is looked into first; what it lacks is compiled into the user's own directory.
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

#: A compilation takes seconds; a lock held longer belongs to a process in trouble.
_LOCK_TIMEOUT_S = 300.0
_ROOT = 0
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def directory() -> Path:
    """The directory that this process publishes into, created if need be.

    Raises:
        CompileError: it cannot be created, or others could write into it.
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
    """MOE_NVLINK_CACHE_DIR where this process may read but not write, else None.

    Raises:
        CompileError: it is not readable, or somebody else than this user and root may write to it.
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
    # access() knows of read-only file systems too, where root itself cannot write.
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
    # Here, not above: a machine lent for minutes may lack it, and sets MOE_NVLINK_CACHE_DIR.
    import platformdirs

    path = Path(platformdirs.user_cache_dir("moe_nvlink"))
    if not path.is_absolute():  # a container's user without an entry in passwd
        raise CompileError(
            f"user {os.getuid()} has no home directory for compiled kernels; set "
            "MOE_NVLINK_CACHE_DIR to a directory of yours"
        )
    return path


def _check(path: Path, status: os.stat_result, owners: set[int]) -> None:
    """Raises CompileError where somebody else than `owners` may write into the directory."""
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
    """What `read` makes of the file for `key`, or None where there is none that it accepts. Local.

    Writes nothing, and asks for no directory that can be written to.

    Raises:
        CompileError: a directory others could write to.
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
    """What `read` makes of the file for `key`; `build(target)` makes the file if there is none.

    `read` returns None for a file it does not accept, which is then built anew. Local.

    Raises:
        CompileError: the directory is unusable, the build failed or its lock is held for minutes.
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
        raise CompileError(f"{path} was just compiled and is not readable; remove it")
    return found


def _directory_for_a_miss() -> Path:
    shipped = shipped_directory()
    try:
        return directory()
    except CompileError as error:
        if shipped is None:
            raise
        raise CompileError(
            f"{shipped} lacks the kernels asked for (add them with `moe-nvlink precompile`), and "
            f"there is no place to compile them into: {error}"
        ) from error


def get_or_build(key: str, suffix: str, build: Callable[[Path], None]) -> Path:
    """The file for `key`, made by `build(target)` if it is not there yet. Local.

    Raises:
        CompileError: as load_or_build.
    """
    return load_or_build(key, suffix, build, lambda path: path)


def _name(key: str, suffix: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()[:32] + suffix


def _read(path: Path, read: Callable[[Path], T | None]) -> T | None:
    try:
        status = path.lstat()
        # Also where the directory is in order: root may have put there what a group may change.
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
        target.chmod(0o644)  # whatever the umask: a file its group may change would not be believed
        # A name must not survive a power failure that its content did not.
        with target.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(target, path)
