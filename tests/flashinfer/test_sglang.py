"""SGLang's FlashinferDispatcher on our drop-in, in SGLang's environment: see sglang_ranks.py."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from moe_nvlink_plugin.integration.demo.server import ServerError
from moe_nvlink_plugin.integration.demo.sglang_server import interpreter
from tests.integration.common.framework_wheels import left_out
from tests.support import flashinfer_wheel
from tests.support.wheels import FetchError

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.long
def test_sglangs_dispatcher_runs_on_the_drop_in(tmp_path: Path) -> None:
    try:
        python = interpreter()
        flashinfer_wheel.folder()
    except ServerError as error:
        pytest.skip(str(error))
    except FetchError as error:
        left_out(error)
    command = [str(python), "-m", "tests.flashinfer.sglang_ranks", str(tmp_path)]
    environ = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    done = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    # Three formats, each with and without the combine region as the experts' output.
    assert done.stdout.splitlines()[-2:] == ["2 ranks: [6, 6]", "4 ranks: [6, 6, 6, 6]"]
