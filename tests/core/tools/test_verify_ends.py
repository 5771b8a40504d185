"""How `moe-nvlink verify` ends if its report or its lines cannot be written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

COMMAND = (
    *(sys.executable, "-m", "moe_nvlink_plugin", "verify", "--device", "cpu", "--quick"),
    *("--ranks", "1", "--hidden-size", "128", "--num-experts", "4", "--top-k", "2"),
    *("--max-tokens", "4", "--output"),
)


def run(output: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """The command with one rank."""
    return subprocess.run(
        [*COMMAND, str(output)],
        stderr=subprocess.PIPE,
        text=True,
        timeout=300,
        check=False,
        **options,
    )


def test_a_directory_is_refused_before_the_checks(tmp_path: Path) -> None:
    done = run(tmp_path, stdout=subprocess.PIPE)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == f"--output {tmp_path} cannot be written: Is a directory\n"


def test_a_full_disk_is_named() -> None:
    done = run(Path("/dev/full"), stdout=subprocess.PIPE)
    assert done.returncode == 1
    assert "verify: right: " in done.stdout
    assert "--output /dev/full cannot be written: No space left on device" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_reader_that_has_seen_enough(tmp_path: Path) -> None:
    """As `| head -1`: the checks go on, for the other ranks and the report."""
    reader, writer = os.pipe()
    os.close(reader)
    done = run(tmp_path / "report.json", stdout=writer)
    os.close(writer)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert json.loads((tmp_path / "report.json").read_text())["right"]
