"""Fetches files of a wheel by pip, without its dependencies, and keeps them; installs nothing."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import filelock
import platformdirs

#: What pip says when it cannot reach a registry, whatever registry it was told to use.
_UNREACHABLE = re.compile(
    "connection broken|NewConnectionError|ConnectTimeout|ReadTimeout|Read timed out|"
    "Name or service not known|name resolution|ProxyError|No route to host|SSLError",
    re.IGNORECASE,
)
TIME_LIMIT_S = 280


class FetchError(RuntimeError):
    """pip could not fetch a wheel."""


class UnreachableError(FetchError):
    """No registry can be reached: nothing is known of the wheel."""


def files_of(
    name: str,
    version: str,
    wanted: Callable[[str], bool],
    chosen: str,
    tags: Sequence[str] = (),
) -> Path:
    """Return a folder with the wanted files of one release, as they lie in its wheel.

    Args:
        wanted: whether a file of this name in the wheel is one.
        chosen: what `wanted` depends on; another selection of files is no substitute.
        tags: pip's words for another Python or platform than this one, such as
            ("--python-version", "3.12").

    Raises:
        FetchError: pip's reason.
    """
    cache = Path(platformdirs.user_cache_dir("moe_nvlink")) / f"{name}-source"
    kept = cache / f"{version}-{hashlib.sha256(chosen.encode()).hexdigest()[:8]}"
    if kept.is_dir():
        return kept
    cache.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(cache / f"{kept.name}.lock"):  # a wheel has up to hundreds of MB
        if kept.is_dir():  # another process has been quicker
            return kept
        scratch = Path(tempfile.mkdtemp(prefix=f"{version}.", dir=cache))
        try:
            _fetch(f"{name}=={version}", scratch, wanted, tags)
            scratch.rename(kept)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return kept


def _fetch(
    requirement: str, folder: Path, wanted: Callable[[str], bool], tags: Sequence[str]
) -> None:
    """Downloads the wheel and leaves its wanted files under `folder`."""
    command = [
        *(sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet"),
        *("--no-deps", "--no-cache-dir", "--only-binary", ":all:", "--retries", "2"),
        *("--timeout", "20", *tags, "--dest", str(folder), requirement),
    ]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIME_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise UnreachableError(
            f"pip could not fetch {requirement} within {TIME_LIMIT_S} s"
        ) from error
    if done.returncode != 0:
        kind = UnreachableError if _UNREACHABLE.search(done.stderr) else FetchError
        raise kind(f"pip could not fetch {requirement}: {done.stderr.strip()[-600:]}")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder, [file for file in archive.namelist() if wanted(file)])
    wheel.unlink()
