"""Runs `tests/sglang` in SGLang's environment, whose pins clash with those of this one.

One file of it needs Triton, which interprets SGLang's kernels.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from moe_nvlink_plugin.integration.demo.server import ServerError
from moe_nvlink_plugin.integration.demo.sglang_server import interpreter
from tests.support import sglang_triton

ROOT = Path(__file__).resolve().parents[3]
WITH_TRITON = "tests/sglang/test_triton_runner.py"


def test_every_test_that_needs_sglang_passes_beside_it() -> None:
    _check(["tests/sglang", f"--ignore={WITH_TRITON}"], {})


@pytest.mark.long
@pytest.mark.parametrize("marked", ["not long", "long"])
def test_sglangs_triton_runner_passes_there_too(marked: str, tmp_path: Path) -> None:
    _check([WITH_TRITON, "-m", marked], sglang_triton.variables(tmp_path))


def _check(arguments: list[str], variables: dict[str, str]) -> None:
    try:
        python = interpreter()
    except ServerError as error:
        pytest.skip(str(error))
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    # A worker of pytest-xdist tells the processes it starts that they are one too.
    environ = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")} | variables
    done = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=880, check=False
    )
    sys.stdout.write(done.stdout[-8000:])
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    summary = done.stdout.splitlines()[-1]
    assert " passed" in summary
    assert "skipped" not in summary, "every test here needs SGLang alone, which is there"
