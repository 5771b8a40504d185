"""Python in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def python(
    *arguments: object, variables: Mapping[str, str] | None = None, timeout_s: float = 600.0
) -> subprocess.CompletedProcess[str]:
    """Run `python *arguments` in the checkout; its exit status is the caller's to look at.

    variables: of the environment, beside those of this process.
    """
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, **(variables or {})},
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
    )
