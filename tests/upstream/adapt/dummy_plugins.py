"""The plugin packages that lie beside vLLM's tests, installed for one group's processes only.

vLLM's CI installs them before the tests that want them, and uninstalls them behind: only one
platform plugin may be active. Here each is installed once into a folder of its own below the cache
(pip's `--target`), and the folders of those that the variable `WANTED` names go onto this process's
path and its children's. The user's environment stays as it is.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from moe_nvlink_plugin.errors import ConfigError

from .. import fetch

#: A variable for `Group.environment`: folders of `tests/plugins`, separated by commas.
WANTED = "MOE_NVLINK_UPSTREAM_DUMMIES"
_PLUGINS = Path("tests/plugins")


def install(source: Path, cache: Path) -> Path:
    """The folder with the distribution that lies in `source`; made when the cache has none.

    Needs pip and setuptools, and no index. Two processes may do this at a time. ConfigError when
    there is nothing to install, or pip refuses.
    """
    if not (source / "setup.py").is_file():
        raise ConfigError(f"{source} has no setup.py; name folders of {source.parent}.")
    target = cache / f"{source.name}-{_digest(source)}"
    if target.is_dir():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        # setuptools builds beside the sources: in a copy, the tree stays as it was unpacked.
        copy, draft = Path(scratch) / source.name, Path(scratch) / "installed"
        shutil.copytree(source, copy)
        _pip(["--target", str(draft), str(copy)])
        try:
            draft.rename(target)
        except OSError:
            if not target.is_dir():
                raise
            # another process was faster
    return target


def expose(folders: list[Path]) -> None:
    """Puts folders onto the paths of this process and of those it starts. Local."""
    for folder in map(str, folders):
        if folder not in sys.path:
            sys.path.append(folder)
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    missing = [str(folder) for folder in folders if str(folder) not in inherited]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*inherited, *missing]))


def _digest(source: Path) -> str:
    seen = hashlib.sha256(sys.version.encode())
    for file in sorted(source.rglob("*.py")):
        seen.update(file.relative_to(source).as_posix().encode() + b"\0" + file.read_bytes())
    return seen.hexdigest()[:8]


def _pip(arguments: list[str]) -> None:
    line = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    line += ["--no-index", "--no-deps", "--no-build-isolation", *arguments]
    done = subprocess.run(line, capture_output=True, text=True)
    if done.returncode != 0:
        raise ConfigError(
            f"pip ended with code {done.returncode}; it was called as {' '.join(line)} and said: "
            f"{done.stderr.strip()[-2000:]}. It needs setuptools in this environment."
        )


def pytest_collection_finish() -> None:
    """The dummy platform is no CPU, so conftest empties an accelerator's caches behind tests."""
    import torch

    if not torch.accelerator.is_available():
        torch.accelerator.empty_cache = torch.accelerator.empty_host_cache = _nothing


def _nothing() -> None:
    """What there is to empty where no accelerator is."""


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Before vLLM looks for plugins, which it does once."""
    plugins = early_config.rootpath / _PLUGINS
    cache = fetch.CACHE / "dummy_plugins"
    names = [name for name in os.environ.get(WANTED, "").split(",") if name]
    expose([install(plugins / name, cache) for name in names])
