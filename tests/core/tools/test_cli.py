"""The command line beside what the commands do: streams, interrupts, and what cannot be."""

from __future__ import annotations

import argparse
import importlib.metadata
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from moe_nvlink_plugin.tools import cli, ranks, top
from moe_nvlink_plugin.version import own_version
from tests.core.exchange.test_waits import serving
from tests.support.programs import ROOT, python

METRIC = 'moe_nvlink_rounds_total{ep_rank="%s"} 1'


def test_text_that_the_locale_has_no_character_for(monkeypatch: pytest.MonkeyPatch) -> None:
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, encoding="ascii"))
    monkeypatch.setattr(cli, "_run", lambda _options: print("ä"))
    cli.main(["doctor"])
    assert printed.getvalue() == b"\\xe4\n"


@pytest.mark.parametrize("command", ["verify", "tune", "doctor --memory a=1"])
def test_a_broken_torch_is_named(command: str, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise OSError('no libcudart')")
    path = f"{tmp_path}:{ROOT}"
    done = python("-m", "moe_nvlink_plugin", *command.split(), variables={"PYTHONPATH": path})
    assert done.returncode == 1
    assert done.stderr.endswith(
        ": torch cannot be imported (OSError: no libcudart); moe-nvlink doctor says more\n"
    )
    assert done.stderr.count("\n") == 1


FULL = "moe-nvlink: standard output cannot be written: No space left on device\n"


@pytest.mark.parametrize("arguments", ["--version", "dump-source --arch sm_90a meet"])
@pytest.mark.parametrize(("output", "said"), [("a pipe", ""), ("/dev/full", FULL)])
def test_output_that_takes_nothing(arguments: str, output: str, said: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer if output == "a pipe" else output, "w") as stdout:
        done = subprocess.run(
            [sys.executable, "-m", "moe_nvlink_plugin", *arguments.split()],
            env={**os.environ, "PYTHONUNBUFFERED": ""},
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert (done.returncode, done.stderr) == (1, said)


def test_the_package_s_own_errors_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_options: argparse.Namespace) -> int:
        raise BrokenPipeError("a socket's")

    monkeypatch.setattr(cli, "_run", fail)
    with pytest.raises(BrokenPipeError, match="a socket's"):
        cli.main(["doctor"])


def test_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_options: argparse.Namespace) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_run", interrupted)
    assert cli.main(["doctor"]) == 130


def test_top_without_standard_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", None)
        assert cli.main(["top", "http://127.0.0.1:9"]) == 1
    assert "does not answer" in capsys.readouterr().err


def test_top_asks_no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setattr("urllib.request._opener", None)  # it has read the variable already
    monkeypatch.delenv("no_proxy", raising=False)
    with serving(iter([METRIC % 0])) as url:
        assert top.fetch(f"{url}/a").strip() == METRIC % 0


def test_numbers_that_python_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    number = "9" * 5000
    assert not top.parse([METRIC % number], 0.0).ranks
    layer = f"ep_size=2,max_tokens_per_rank=8,top_k=2,hidden_size={number}"
    assert cli.main(["doctor", "--memory", layer]) == 1
    told = capsys.readouterr().err
    assert "not so: hidden_size; give numbers of at most 18 digits" in told
    assert len(told) < 500


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ("verify --device cuda", 1, "--device cuda: torch sees no GPU; ask moe-nvlink doctor why"),
        ("verify --output /nowhere/a.json", 1, "--output /nowhere/a.json cannot be written"),
        ("verify --output /tmp", 1, "--output /tmp cannot be written: Is a directory\n"),
        ("verify --device cpu --top-k 40", 1, "top_k=40 must be an integer from 1 to 32"),
        ("verify --device cpu --max-tokens 99999999999", 1, "=99999999999 must be an integer from"),
        ("verify --ranks 129", 1, "--ranks 129 is more than the 128 of an exchange"),
        ("verify --hidden-size 0", 2, "'0' is not a number of at least 1"),
        ("verify --timeout never", 2, "'never' is not a number of seconds"),
        ("tune --device cuda", 1, "--device cuda: torch sees no GPU; ask moe-nvlink doctor why"),
        ("tune --dtype int8", 2, "argument --dtype: invalid choice: 'int8'"),
        ("tune --budget 0", 2, "'0' is not a number of seconds from 0.1 to 3600"),
        ("watch", 2, "the following arguments are required: URL"),
        ("watch --restart ' http://a", 2, "is no command: No closing quotation"),
        ("watch --restart= http://a", 2, "names no command; leave the option out"),
        ("watch --patience 0 http://a", 2, "is not a number of seconds"),
        ("top --once http://127.0.0.1:9/ä", 1, "'http://127.0.0.1:9/ä' is no URL of a server"),
        ("top --once http://a..b:8000", 1, "'http://a..b:8000' is no URL of a server"),
        ("doctor --json --memory a=1", 2, "argument --memory: not allowed with argument --json"),
        ("dump-source meet", 2, "--arch"),
        ("dump-source meet --arch sm_80", 2, "argument --arch: invalid choice: 'sm_80'"),
    ],
)
def test_what_cannot_be_is_refused(
    arguments: str,
    code: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Before a rank starts."""
    monkeypatch.delattr(ranks, "run")
    try:
        found: object = cli.main(arguments.split())
    except SystemExit as ended:
        found = ended.code
    told = capsys.readouterr()
    assert (found, told.out) == (code, "")
    assert said in told.err


def test_a_distribution_without_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _name: None)
    assert own_version() == "unknown"
