"""`moe-nvlink verify`, as a user starts it, and what it does with what cannot be."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

#: Small enough for a busy machine.
FEW = ("--hidden-size", "128", "--num-experts", "8", "--top-k", "2", "--max-tokens", "8")
LIMIT_S = 300
COMMAND = (sys.executable, "-m", "moe_nvlink_plugin", "verify")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    return subprocess.run(
        [*COMMAND, *FEW, *arguments],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


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
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", "-m", "moe_nvlink_plugin", "verify", "--quick", *FEW),
        ],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("verify: right: ") == 1, "rank 0 alone prints"


@pytest.mark.long
def test_ranks_that_were_told_different_things() -> None:
    """As two shells of one launch might: each starts a rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
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


def started(*arguments: str) -> subprocess.Popen[str]:
    """The command, after its first check."""
    process = subprocess.Popen(
        [*COMMAND, *FEW, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
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
    process = started("--timeout", "5")
    _first, last = ranks_of(process)
    os.kill(last, signal.SIGKILL)
    out, _err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1
    assert re.search(r"^verify: FAILED after \d+ checks", out, re.MULTILINE), out
    assert "exit status of rank 1: -9" in out.splitlines()[-1]


def test_an_interrupt_ends_all_ranks() -> None:
    process = started()
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
    return subprocess.run(
        [sys.executable, "-c", ALONE.format(body=body), str(folder / "store")],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    done = alone('return ["MismatchError: round 3"]', tmp_path)
    assert done.returncode == 1
    *_lines, wrong, verdict = done.stdout.splitlines()
    assert wrong.strip() == "rank 0: MismatchError: round 3"
    assert verdict == "verify: WRONG on 1 CPU ranks, 1 of 1: planted"


def test_rounds_that_did_not_run_are_not_called_wrong(tmp_path: Path) -> None:
    done = alone('return ["TransportError: /dev/shm is full"]', tmp_path)
    assert done.returncode == 1
    *_lines, line, failed, verdict = done.stdout.splitlines()
    assert line.split()[:2] == ["FAILED", "planted"]
    assert failed.strip() == "rank 0: TransportError: /dev/shm is full"
    assert verdict == "verify: FAILED on 1 CPU ranks, 1 of 1 did not end: planted"


def test_a_rank_that_hangs_says_where(tmp_path: Path) -> None:
    """In C code that no signal reaches, too: nothing of Python has to run."""
    done = alone("time.sleep(1000)", tmp_path)
    assert done.returncode == 1
    assert "Timeout (0:00:04)!" in done.stderr, "waits for others are granted beside"
    assert "in run" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--device", "cuda"), "--device cuda: torch sees no GPU; ask moe-nvlink doctor why"),
        (("--output", "/nowhere/report.json"), "--output /nowhere/report.json cannot be written"),
        (("--top-k", "40"), "top_k=40"),
        (("--ranks", "129"), "--ranks 129 is more than the 128 of an exchange"),
        (("--hidden-size", "0"), "'0' is not a number of at least 1"),
        (("--timeout", "never"), "'never' is not a number of seconds"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_what_cannot_be_is_refused(arguments: tuple[str, ...], said: str) -> None:
    done = run("--quick", *arguments)
    assert done.returncode in (1, 2)
    assert said in done.stderr
    assert "Traceback" not in done.stderr
