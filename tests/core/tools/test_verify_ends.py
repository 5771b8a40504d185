"""How `moe-nvlink verify` ends if it cannot write its report or its lines, or is killed."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from moe_nvlink_plugin.tools import ranks

LAUNCHER = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
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


#: The command, with kernels that give each of a token's ids a slot: rows lie behind the buffers.
CRASHING = """
import sys
from moe_nvlink_plugin.__main__ import main
from moe_nvlink_plugin.exchange.kernels import LAYER
from moe_nvlink_plugin.jit import host

TEXT = LAYER.host_source()
LINE = "takes_slot = takes_slot && route.target_ranks[earlier] != target;"
assert TEXT.count(LINE) == 1
LIBRARY = host.HostLibrary(host.build(TEXT.replace(LINE, ""), (*host.FLAGS, "-O0")))
load = host.load
host.load = lambda text: LIBRARY if text == TEXT else load(text)
if __name__ == "__main__":
    sys.exit(main(["verify", "--device", "cpu", "--quick", "--timeout", "5", *sys.argv[1:]]))
"""


@pytest.mark.parametrize("launcher", [(), LAUNCHER], ids=["alone", "torchrun"])
def test_ranks_that_crash_have_a_verdict(launcher: tuple[str, ...], tmp_path: Path) -> None:
    script = tmp_path / "crashing.py"
    script.write_text(CRASHING)
    done = subprocess.run(
        [sys.executable, *launcher, str(script)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 1
    assert re.search(r"^verify: (FAILED|WRONG)", done.stdout, re.MULTILINE), (
        done.stdout + done.stderr
    )


def test_no_rank_outlives_the_command(tmp_path: Path) -> None:
    """The ranks' standard output, a pipe, ends with the last of them."""
    started = subprocess.Popen(
        [*(part for part in COMMAND if part != "--quick"), str(tmp_path / "report.json")],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert started.stdout is not None
    for line in started.stdout:
        if line.split()[:1] == ["ok"]:
            break
    started.kill()
    assert "verify: right: " not in started.stdout.read()
    assert started.wait(timeout=300) == -signal.SIGKILL


def test_a_stopped_rank_is_not_waited_for() -> None:
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=time.sleep, args=(seconds,)) for seconds in (0, 1000)]
    for process in processes:
        process.start()
    stopped = processes[1].pid
    assert stopped is not None
    os.kill(stopped, signal.SIGSTOP)
    ranks._join(processes, 0.1)
    assert [process.exitcode for process in processes] == [0, -signal.SIGKILL]
