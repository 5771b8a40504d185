"""Runs `tests/sglang` in SGLang's environment, whose pins clash with those of this one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from moe_nvlink_plugin.integration.demo.server import ServerError
from moe_nvlink_plugin.integration.demo.sglang_server import interpreter

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.timeout(900)
def test_every_test_that_needs_sglang_passes_beside_it() -> None:
    try:
        python = interpreter()
    except ServerError as error:
        pytest.skip(str(error))
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/sglang"]
    # A worker of pytest-xdist tells the processes it starts that they are one too.
    environ = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    done = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=880, check=False
    )
    sys.stdout.write(done.stdout[-8000:])
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    summary = done.stdout.splitlines()[-1]
    assert " passed" in summary
    assert "skipped" not in summary, "every test here needs SGLang alone, which is there"
