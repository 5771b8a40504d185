"""The plugin packages that lie beside vLLM's tests, installed for one group's processes only.

vLLM's CI installs them before the tests that want them, and uninstalls them afterwards: only one
platform plugin may be active. Here those that the variable `WANTED` names are installed into a
folder of this run (pip's `--target`), which goes onto this process's path and its children's. The
user's environment stays as it is.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from moe_nvlink_plugin.errors import ConfigError

#: A variable for `Group.environment`: folders of `tests/plugins`, separated by commas.
WANTED = "MOE_NVLINK_UPSTREAM_DUMMIES"
_PLUGINS = Path("tests/plugins")


def install(sources: Sequence[Path], folder: Path) -> Path:
    """Installs the distributions that lie in `sources` below `folder`; returns where.

    Needs pip and setuptools, and no index. ConfigError when pip refuses.
    """
    # setuptools builds beside the sources: of copies, the tree stays as it was unpacked.
    copies = [str(shutil.copytree(source, folder / source.name)) for source in sources]
    target = folder / "installed"
    line = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    line += ["--no-index", "--no-deps", "--no-build-isolation", "--target", str(target), *copies]
    done = subprocess.run(line, capture_output=True, text=True)
    if done.returncode != 0:
        raise ConfigError(
            f"pip ended with code {done.returncode}; it was called as {' '.join(line)} and said: "
            f"{done.stderr.strip()[-2000:]}. It needs setuptools in this environment."
        )
    return target


def expose(folder: Path) -> None:
    """Puts a folder onto the paths of this process and of those it starts. Local."""
    sys.path.append(str(folder))
    inherited = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [inherited, str(folder)]))


def pytest_collection_finish() -> None:
    """The dummy platform is no CPU, so conftest empties an accelerator's caches after tests."""
    import torch

    if not torch.accelerator.is_available():
        torch.accelerator.empty_cache = torch.accelerator.empty_host_cache = _nothing


def _nothing() -> None:
    """What there is to empty where no accelerator is."""


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Before vLLM looks for plugins, which it does once."""
    names = [name for name in os.environ.get(WANTED, "").split(",") if name]
    sources = [early_config.rootpath / _PLUGINS / name for name in names]
    # The runner removes its TMPDIR.
    expose(install(sources, Path(tempfile.mkdtemp(prefix="dummies"))))
