"""compute-sanitizer over a small emulated exchange, and over one with a bug that it must find."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

ROOT = Path(__file__).resolve().parents[2]
FOUND = 99
#: What each tool prints of the bug that is put in.
FINDING = {"memcheck": r"Invalid __global__ write", "racecheck": r"RACECHECK SUMMARY: [1-9]"}
# Where the toolkit puts it when it is not on the PATH.
PLACES = ("/usr/local/cuda/bin", "/opt/cuda/bin")


def sanitizer() -> str:
    found = shutil.which("compute-sanitizer", path=os.pathsep.join([os.environ["PATH"], *PLACES]))
    if found is None:
        pytest.skip("compute-sanitizer is not installed")
    return found


def watch(tool: str, *options: str) -> subprocess.CompletedProcess[str]:
    # Failed calls of the driver are torch's way to find out what it has. An option of memcheck's.
    quiet = ("--report-api-errors", "no") if tool == "memcheck" else ()
    command = [sanitizer(), "--tool", tool, "--error-exitcode", str(FOUND), *quiet]
    # Every tensor an allocation of its own: inside torch's pool nothing is out of bounds.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(
        [*command, sys.executable, "-m", "tests.gpu.sanitized", *options],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    if "Device not supported" in done.stdout + done.stderr:
        pytest.skip("compute-sanitizer does not support this machine's runtime")
    return done


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_clean(tool: str) -> None:
    done = watch(tool)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "all rounds verified" in done.stdout


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_the_tool_looks(tool: str) -> None:
    """The exit status is FOUND only where the program itself ends well, and after an access that
    memcheck has refused it does not: its context is gone. So the finding is looked for.
    """
    done = watch(tool, "--break", tool)
    said = done.stdout + done.stderr
    assert done.returncode != 0, said[-4000:]
    assert re.search(FINDING[tool], said), said[-4000:]
