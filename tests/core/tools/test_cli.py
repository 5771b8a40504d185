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

from moe_nvlink_plugin.tools import cli, top
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


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/ä", "http://a..b:8000"])
def test_top_refuses_what_no_request_can_hold(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["top", "--once", url]) == 1
    assert f"{url!r} is no URL of a server" in capsys.readouterr().err


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


def test_json_says_nothing_of_memory(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["doctor", "--json", "--memory", "a=1"])
    assert "argument --memory: not allowed with argument --json" in capsys.readouterr().err


def test_a_distribution_without_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _name: None)
    assert own_version() == "unknown"
