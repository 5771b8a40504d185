"""Content-addressed files of compiled kernels, shared by all processes of one user.

A process publishes a file by an atomic rename, so a reader sees all of it or none. Each file ends
with the SHA-256 of what stands before, so a damaged file is noticed and built again. One process
compiles a text while the others wait for it.

Processes execute what lies here. Therefore a process uses a file only if nobody but this user and
root could have written it: directory and file belong to one of the two, and neither group nor
others may write to them. A process opens the directory once, checks what it has opened, and reaches
files through that descriptor alone: whoever owns the parent can exchange the directory meanwhile.

MOE_NVLINK_CACHE_DIR may name a directory that came with an image, which root has filled and this
user may only read. A process looks there first. What the directory lacks, the process compiles into
the user's own directory.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

import filelock

from moe_nvlink_plugin import env
from moe_nvlink_plugin.errors import CompileError

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: A compilation takes seconds, so a process that holds a lock for longer has failed or hangs.
_LOCK_TIMEOUT_S = 300.0
_ROOT = 0
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_SEAL_BYTES = hashlib.sha256().digest_size


class Entry(NamedTuple):
    """A file of the cache that nobody else could have written, and that is whole.

    Attributes:
        path: where it lies. Another file may lie there by now: do not open it by this name.
        descriptor: the file, open until the reader returns.
        content: what was built. In the file 32 bytes follow it, which ELF files may have.
    """

    path: Path
    descriptor: int
    content: bytes


#: Function of a file; it returns None for a file that it does not accept.
Read = Callable[[Entry], T | None]


def directory() -> Path:
    """Return the directory that this process publishes into; create it if needed. Local.

    Raises:
        CompileError: the directory cannot be created, or others may write to it.
    """
    given = env.cache_dir()
    path = _user_directory() if given is None or shipped_directory() else given
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise _unusable(path, error) from error
    with _opened(path, {os.getuid()}):
        return path


def _unusable(path: Path, error: OSError) -> CompileError:
    remedy = (
        "set MOE_NVLINK_CACHE_DIR to a directory of yours, or to one that `moe-nvlink precompile` "
        "has filled"
    )
    told = f"{_told(error)}; {_remedy(error, remedy)}"
    return CompileError(f"cannot use {path} for compiled kernels: {told}")


@contextlib.contextmanager
def _opened(path: Path, owners: set[int]) -> Iterator[Path]:
    """Check a directory; yield a path that leads to this very one, also if it is moved. Local."""
    if not _by_descriptor(0).parent.is_dir():
        raise CompileError(
            "/proc/self/fd is missing, by which compiled kernels are opened; mount /proc"
        )
    try:
        descriptor = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise _unusable(path, error) from error
    try:
        _check(path, os.fstat(descriptor), owners)
        yield _by_descriptor(descriptor)
    finally:
        os.close(descriptor)


def _by_descriptor(descriptor: int) -> Path:
    return Path(f"/proc/self/fd/{descriptor}")


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
    for_everybody = bool(status.st_mode & stat.S_ISVTX)  # /tmp and the like
    if for_everybody:
        remedy = f"set MOE_NVLINK_CACHE_DIR to {path / f'moe_nvlink-{os.getuid()}'}"
    elif status.st_uid == os.getuid():
        remedy = "chmod 700 it"
    elif status.st_uid in owners:
        remedy = "chmod 755 it"
    else:
        remedy = "give it and its files to root (chown -R 0, chmod 755)"
    raise CompileError(
        f"{path} holds code this process would run, but others may write to it (mode "
        f"{stat.S_IMODE(status.st_mode):o}, owner {status.st_uid}); {remedy}, or "
        f"{'' if for_everybody else 'set MOE_NVLINK_CACHE_DIR '}to a directory that only you, or "
        "only root, may write to"
    )


def load(key: str, suffix: str, read: Read[T]) -> T | None:
    """Return what `read` makes of the file for `key`; None if it accepts no such file. Local.

    It writes nothing, and needs no directory that this process may write to.

    Args:
        key: whatever the content depends on.
        suffix: ending of the file's name.
        read: reads a file; returns None for a file that it does not accept.

    Raises:
        CompileError: others may write to a directory.
    """
    name = _name(key, suffix)
    shipped = shipped_directory()
    if shipped is not None:
        with _opened(shipped, {os.getuid(), _ROOT}) as inside:
            found = _read(shipped / name, inside, read)
        if found is not None:
            return found
    try:
        own = directory()
    except CompileError:
        if shipped is None:
            raise
        return None
    with _opened(own, {os.getuid()}) as inside:
        return _read(own / name, inside, read)


def load_or_build(key: str, suffix: str, build: Callable[[Path], None], read: Read[T]) -> T:
    """Return what `read` makes of the file for `key`; build the file if there is none. Local.

    Args:
        key: whatever the content depends on.
        suffix: ending of the file's name.
        build: writes the file to the path that it gets, which lies in a temporary directory.
        read: reads a file. If it returns None, the file is built again.

    Raises:
        CompileError: the directory cannot be used, the build failed, or another process held the
            lock for 300 s.
    """
    found = load(key, suffix, read)
    if found is not None:
        return found
    own = _directory_for_a_miss()
    path = own / _name(key, suffix)
    lock = path.with_suffix(".lock").name
    with _opened(own, {os.getuid()}) as inside:
        try:
            # Where no file can be created filelock would try until its time limit.
            with tempfile.TemporaryFile(dir=inside):
                pass
            with filelock.FileLock(inside / lock, timeout=_LOCK_TIMEOUT_S):
                found = _read(path, inside, read)
                if found is None:
                    _publish(inside, path.name, _sealed(_built(path.name, build)))
                    found = _read(path, inside, read)
        except filelock.Timeout as error:
            raise CompileError(
                f"another process has been compiling {path.name} for {_LOCK_TIMEOUT_S:g} s; "
                f"end it or remove {own / lock}"
            ) from error
        except OSError as error:
            raise _unwritable(path, error) from error
    if found is None:
        raise CompileError(f"{path} was just compiled and cannot be read; remove the file")
    return found


def _unwritable(path: Path, error: OSError) -> CompileError:
    otherwise = "remove that directory" if path.is_dir() else "make room there"
    remedy = _remedy(error, f"{otherwise}, or set MOE_NVLINK_CACHE_DIR")
    return CompileError(f"cannot write {path}: {_told(error)}; {remedy}")


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

    Only for directories that nobody else can exchange. Args and errors are those of load_or_build.
    """
    return load_or_build(key, suffix, build, lambda entry: entry.path)


def write_beside(key: str, suffix: str, text: str) -> Path:
    """Write a text that people and their tools read; return its path, from the root. Local.

    The text has no checksum at its end, and no process of this package reads it. Only for the
    `build` of load_or_build with the same key, during which no other process writes this file.

    Raises:
        CompileError: the directory cannot be used, or the text cannot be written.
    """
    own = directory()
    path = own / _name(key, suffix)
    with _opened(own, {os.getuid()}) as inside:
        try:
            _publish(inside, path.name, text.encode())
        except OSError as error:
            raise _unwritable(path, error) from error
    return path.absolute()


def _name(key: str, suffix: str) -> str:
    # A variable of the environment may have any bytes.
    return hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()[:32] + suffix


def _read(path: Path, inside: Path, read: Read[T]) -> T | None:
    """Return what `read` makes of a file; None, and a warning, if it is not to be used. Local.

    Args:
        path: the file's name, for messages.
        inside: its directory, by descriptor.
        read: as in `load`.
    """
    try:
        # A link is not followed, and a named pipe not waited for.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(inside / path.name, flags)
    except FileNotFoundError:
        return None
    except OSError as error:
        logger.warning("%s is not used: %s", path, _told(error))
        return None
    try:
        problem = _problem(os.fstat(descriptor))
        if not problem:
            content = _whole(_by_descriptor(descriptor).read_bytes())
            found = None if content is None else read(Entry(path, descriptor, content))
            if found is not None:
                return found
            problem = "it is damaged"
    except OSError as error:
        problem = _told(error)
    finally:
        os.close(descriptor)
    logger.warning("%s is not used: %s", path, problem)
    return None


def _problem(status: os.stat_result) -> str:
    # Checked even if the directory is safe: root may have put a file there that a group may change.
    if not stat.S_ISREG(status.st_mode):
        return "it is no regular file"
    if status.st_uid in (os.getuid(), _ROOT) and not status.st_mode & _OTHERS_WRITE:
        return ""
    mode = stat.S_IMODE(status.st_mode)
    return f"others may write to it (mode {mode:o}, owner {status.st_uid}); chmod 644 it"


def _sealed(content: bytes) -> bytes:
    return content + hashlib.sha256(content).digest()


def _whole(data: bytes) -> bytes | None:
    content = data[:-_SEAL_BYTES]
    return content if _sealed(content) == data else None


def _built(name: str, build: Callable[[Path], None]) -> bytes:
    # Not in the cache: a compiler is another process and cannot follow our descriptor.
    try:
        with tempfile.TemporaryDirectory(prefix="moe_nvlink-") as folder:
            target = Path(folder) / name
            build(target)
            return target.read_bytes()
    except OSError as error:
        raise CompileError(
            f"cannot compile in {error.filename or 'the temporary directory'}: {_told(error)}; "
            + _remedy(error, "make room there, or set TMPDIR to another directory")
        ) from error


def _publish(inside: Path, name: str, content: bytes) -> None:
    """Write a file under its name. The lock is held, so nobody else writes the scratch file."""
    scratch = inside / f"{name}.new"
    try:
        with scratch.open("wb") as file:
            os.fchmod(file.fileno(), 0o644)  # with some umasks the group could write
            file.write(content)
            file.flush()
            # The content reaches the disk before the name, so a power failure leaves no empty file.
            os.fsync(file.fileno())
        scratch.replace(inside / name)
    except OSError:
        scratch.unlink(missing_ok=True)
        raise


def _told(error: OSError) -> str:
    """Return an error without its file's name, which is a descriptor's."""
    return error.strerror or str(error)


def _remedy(error: OSError, otherwise: str) -> str:
    """Return what to do: another directory does not help against a limit of the process."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return "raise the limit of open files (ulimit -n)"
    if error.errno == errno.EFBIG:
        return "lift the limit of file sizes (ulimit -f unlimited)"
    return otherwise
