"""`moe-nvlink verify`, as a user starts it, and what it does with what cannot be."""

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
import torch

from moe_nvlink_plugin.groups import Group
from moe_nvlink_plugin.integration.demo.server import free_port
from moe_nvlink_plugin.tools import ranks
from tests.support.programs import python

#: Small enough for a busy machine.
FEW = ("--hidden-size", "128", "--num-experts", "8", "--top-k", "2", "--max-tokens", "8")
LIMIT_S = 300
COMMAND = (sys.executable, "-m", "moe_nvlink_plugin", "verify")
LAUNCHER = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return python(*COMMAND[1:], *FEW, *arguments, timeout_s=LIMIT_S)


@pytest.mark.long
def test_three_ranks_and_a_report(tmp_path: Path) -> None:
    output = tmp_path / "report.json"
    done = run("--ranks", "3", "--output", str(output))
    assert done.returncode == 0, done.stdout + done.stderr
    *lines, verdict = done.stdout.splitlines()
    assert verdict.startswith("verify: right: ")
    assert "3 CPU ranks" in verdict
    assert any(line.split()[:3] == ["ok", "large", "batches"] for line in lines)
    assert any("all-to-all" in line for line in lines), "the table"
    report = json.loads(output.read_text())
    assert report["right"]
    assert report["verdict"] == verdict
    assert report["geometry"]["hidden_size"] == 128
    assert all(check["wrong"] == ["", "", ""] for check in report["checks"])
    assert report["table"]
    assert report["machine"]["software"]["plugin"]


def test_quick_under_torchrun() -> None:
    done = python(*LAUNCHER, *COMMAND[1:], "--quick", *FEW, timeout_s=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("verify: right: ") == 1, "rank 0 alone prints"


@pytest.mark.long
def test_ranks_that_were_told_different_things() -> None:
    """As two shells of one launch might: each starts a rank."""
    environment = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            [*COMMAND, "--quick", *FEW, "--max-tokens", tokens],
            env=os.environ | environment | {"RANK": rank},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, tokens in (("0", "4"), ("1", "5"))
    ]
    told = [rank.communicate(timeout=LIMIT_S) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1, 1]
    assert [out.startswith("verify: FAILED: Disagreement") for out, _error in told] == [True, False]
    for _out, error in told:
        assert "different configurations; max_tokens: rank 0 has 4, rank 1 has 5" in error


def started(*command: str) -> subprocess.Popen[str]:
    """The command, after its first check."""
    streams: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(command, start_new_session=True, **streams)
    assert process.stdout is not None
    for line in process.stdout:
        if line.split()[:1] == ["ok"]:
            return process
    raise AssertionError("ended before its first check")


def ranks_of(process: subprocess.Popen[str]) -> list[int]:
    """The processes that the command has started, oldest first, but for Python's own."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [
        int(child)
        for child in children
        if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()
    ]


def test_a_rank_that_is_killed() -> None:
    process = started(*COMMAND, *FEW, "--timeout", "5")
    _first, last = ranks_of(process)
    os.kill(last, signal.SIGKILL)
    out, _err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1
    assert re.search(r"^verify: FAILED after \d+ checks", out, re.MULTILINE), out
    assert "exit status of rank 1: -9" in out.splitlines()[-1]


def test_an_interrupt_ends_all_ranks() -> None:
    process = started(*COMMAND, *FEW)
    ranks = ranks_of(process)
    assert len(ranks) == 2
    os.killpg(process.pid, signal.SIGINT)
    out, _err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130
    assert "verify: interrupted" in out
    assert "Traceback" not in out
    assert not any(Path(f"/proc/{rank}").exists() for rank in ranks)


#: One rank that runs this check alone.
ALONE = """
import functools, sys, time, torch
from moe_nvlink_plugin.tools import ranks, verify

class Check:
    name, rounds = "planted", 1

    def run(self, group, device):
        {body}

verify.plan = lambda *_given, **_named: [Check()]
verify._LIMIT_S = 2.0
options = verify.Options(device="cpu", quick=True, timeout_s=1.0)
wanted = ranks.Wanted("verify", "cpu", 1, 1.0, limit_s=100.0)
body = functools.partial(verify._verified, options)
sys.exit(ranks._rank(wanted, body, 0, 1, torch.device("cpu"), "file://" + sys.argv[1]))
"""


def alone(body: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return python("-c", ALONE.format(body=body), folder / "store", timeout_s=LIMIT_S)


@pytest.mark.parametrize(
    ("error", "word", "verdict"),
    [
        ("MismatchError: round 3", "WRONG", "verify: WRONG on 1 CPU ranks, 1 of 1: planted"),
        # Rounds that did not run are not called wrong.
        (
            *("TransportError: /dev/shm is full", "FAILED"),
            "verify: FAILED on 1 CPU ranks, 1 of 1 did not end: planted",
        ),
    ],
)
def test_what_is_wrong_is_said(error: str, word: str, verdict: str, tmp_path: Path) -> None:
    done = alone(f"return [{error!r}]", tmp_path)
    assert done.returncode == 1
    *_lines, line, of_rank, last = done.stdout.splitlines()
    assert line.split()[:2] == [word, "planted"]
    assert (of_rank.strip(), last) == (f"rank 0: {error}", verdict)


def test_a_rank_that_hangs_says_where(tmp_path: Path) -> None:
    """In C code that no signal reaches, too: nothing of Python has to run."""
    done = alone("time.sleep(1000)", tmp_path)
    assert done.returncode == 1
    assert "Timeout (0:00:04)!" in done.stderr, "waits for others are granted beside"
    assert "in run" in done.stderr


def umlaut(group: Group, _device: torch.device) -> int:
    ranks.voice(group.rank)("ä")
    return int(signal.getsignal(signal.SIGINT) is not signal.SIG_IGN)


def test_ranks_print_any_text_and_leave_interrupts_to_the_command(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    assert ranks.run(ranks.Wanted("verify", "cpu", 1, 5.0, limit_s=100.0), umlaut) == 0
    assert "\\xe4" in capfd.readouterr().out.splitlines()  # gloo may speak too


# How one rank ends that cannot write its report or its lines, or is killed.

ONE_RANK = (*COMMAND, "--device", "cpu", "--quick", "--ranks", "1", *FEW, "--output")


def run_one(output: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """The command with one rank."""
    return subprocess.run(
        [*ONE_RANK, str(output)],
        stderr=subprocess.PIPE,
        text=True,
        timeout=600,
        check=False,
        **options,
    )


def test_a_full_disk_is_named() -> None:
    done = run_one(Path("/dev/full"), stdout=subprocess.PIPE)
    assert done.returncode == 1
    assert "verify: right: " in done.stdout
    assert "--output /dev/full cannot be written: No space left on device" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("output", "said"), [("a pipe", 0), ("/dev/full", 1)])
def test_output_that_takes_nothing(output: str, said: int, tmp_path: Path) -> None:
    """As `| head -1`: the checks go on, for the other ranks and the report."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer if output == "a pipe" else output, "w") as stdout:
        done = run_one(tmp_path / "report.json", stdout=stdout)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count("standard output cannot be written: No space left") == said
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


@pytest.mark.parametrize(
    "launcher", [(), pytest.param(LAUNCHER, marks=pytest.mark.long)], ids=["alone", "torchrun"]
)
def test_ranks_that_crash_have_a_verdict(launcher: tuple[str, ...], tmp_path: Path) -> None:
    script = tmp_path / "crashing.py"
    script.write_text(CRASHING)
    done = python(*launcher, script)
    assert done.returncode == 1
    told = done.stdout + done.stderr
    assert re.search(r"^verify: (FAILED|WRONG)", done.stdout, re.MULTILINE), told


def test_no_rank_outlives_the_command(tmp_path: Path) -> None:
    """The ranks' standard output, a pipe, ends with the last of them."""
    command = (*(part for part in ONE_RANK if part != "--quick"), str(tmp_path / "report.json"))
    process = started(*command)
    assert process.stdout is not None
    process.kill()
    assert "verify: right: " not in process.stdout.read()
    assert process.wait(timeout=600) == -signal.SIGKILL


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
