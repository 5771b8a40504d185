"""Our name on SGLang's command line and in Python."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

import pytest

pytest.importorskip("sglang.srt", reason="SGLang is not installed here: make sglang-env")

from moe_nvlink_plugin.integration.sglang.plugin import flag
from tests.sglang import arguments


@pytest.fixture(scope="module")
def parser(plugin: None) -> argparse.ArgumentParser:
    from sglang.srt.server_args import ServerArgs

    made = argparse.ArgumentParser()
    ServerArgs.add_cli_args(made)
    return made


def test_sglangs_own_choices_stay(parser: argparse.ArgumentParser) -> None:
    """Its list belongs to its class: a later parser without our hook must not have our name."""
    from sglang.srt.arg_groups.arg_utils import add_cli_args_from_dataclass
    from sglang.srt.server_args import ServerArgs

    assert parser.parse_args(["--model-path", "model"]).moe_a2a_backend == "none"
    unhooked = argparse.ArgumentParser()
    add_cli_args_from_dataclass(unhooked, ServerArgs, fields=["moe_a2a_backend"])
    (action,) = (a for a in unhooked._actions if a.dest == "moe_a2a_backend")
    assert action.choices is not None
    assert "moe_nvlink" not in action.choices


def test_a_configuration_file_takes_it(
    parser: argparse.ArgumentParser, tmp_path: Path, plugin: None
) -> None:
    """`--config FILE` is merged into the command line before it is parsed."""
    from sglang.srt.server_args import prepare_server_args

    model = arguments.write_model(tmp_path)
    file = tmp_path / "server.yaml"
    file.write_text(f"model-path: {model}\nmoe-a2a-backend: moe_nvlink\n")
    assert prepare_server_args(["--config", str(file)]).moe_a2a_backend == "moe_nvlink"


def test_a_parser_without_the_flags_is_told_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """An exception would end SGLang for users who have not chosen our backend."""
    with caplog.at_level(logging.ERROR):
        flag.add_choice(None, argparse.ArgumentParser())
    assert "no choices for --moe-a2a-backend" in caplog.text
    assert "--speculative-moe-a2a-backend" in caplog.text
