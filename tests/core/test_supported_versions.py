"""The oldest and the newest versions that pyproject.toml allows, each in an environment of its own.

`make test-oldest` and `make test-newest`, for the rotation of long tests.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: The interpreters of the Makefile, and what a version of torch or of Python may break first.
PYTHONS = {"oldest": "3.10", "newest": "3.13"}


def interpreter(version: str) -> str | None:
    """A Python of this version that starts: pyenv's name for one it has not chosen does not."""
    named = shutil.which(f"python{version}")
    installed = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    for path in [*filter(None, [named]), *map(str, installed)]:
        if subprocess.run([path, "--version"], capture_output=True, check=False).returncode == 0:
            return path
    return None


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("end", PYTHONS)
def test_the_core_passes_on_versions_at_this_end(end: str) -> None:
    python = interpreter(PYTHONS[end])
    if python is None:
        pytest.skip(f"no Python {PYTHONS[end]} here")
    chosen = [f"{end.upper()}_PYTHON={python}", "PYTEST_ARGS=-q"]
    done = subprocess.run(
        ["make", "--no-print-directory", f"test-{end}", *chosen],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1700,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
    summary = done.stdout.strip().splitlines()[-1]
    assert int(summary.split(" passed")[0].split()[-1]) > 500, summary
