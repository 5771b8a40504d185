"""Without our flag SGLang behaves as if the package were not installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sglang.srt", reason="SGLang is not installed here: make sglang-env")

from tests.sglang import arguments

FIELDS = {"moe_a2a_backend", "speculative_moe_a2a_backend"}


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What `snapshots` saw in a process that loads no plugin and in one that loads ours alone."""
    model = arguments.write_model(tmp_path_factory.mktemp("model"))
    info = arguments.write_entry_points(tmp_path_factory.mktemp("entry_points"))
    path = os.pathsep.join([str(info), str(arguments.ROOT), os.environ.get("PYTHONPATH", "")])
    environ = {**os.environ, "PYTHONPATH": path}
    arguments.cpu_environment(environ)
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("snapshots.py")), str(model)],
        env=environ,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_the_snapshots_are_of_two_kinds(seen: dict[str, dict[str, Any]]) -> None:
    assert seen["without"]["plugins"] == []
    assert seen["with"]["plugins"] == ["moe_nvlink"]


def test_the_parser_differs_in_two_choices_alone(seen: dict[str, dict[str, Any]]) -> None:
    without, ours = seen["without"]["parser"], seen["with"]["parser"]
    assert without.keys() == ours.keys()
    assert len(without) > 300
    for dest, action in without.items():
        if dest in FIELDS:
            action = {**action, "choices": [*action["choices"], "moe_nvlink"]}
        assert ours[dest] == action, dest


def test_resolved_arguments_are_equal(seen: dict[str, dict[str, Any]]) -> None:
    without, ours = seen["without"]["resolved"], seen["with"]["resolved"]
    assert without.keys() == ours.keys()
    assert len(without) > 300
    assert {name: ours[name] for name in without if ours[name] != without[name]} == {}
    assert seen["without"]["declared"] == seen["with"]["declared"]
    assert seen["without"]["environ"] == seen["with"]["environ"]


def test_functions_of_the_layers_are_untouched(seen: dict[str, dict[str, Any]]) -> None:
    """After a process that builds a model has published its arguments."""
    assert seen["without"]["wrapped"] == {}
    assert seen["with"]["wrapped"].keys() == {"add_cli_args", "publish"}


def test_loading_the_plugin_imports_no_layer(seen: dict[str, dict[str, Any]]) -> None:
    more = set(seen["with"]["imported"]) - set(seen["without"]["imported"])
    ours = "moe_nvlink_plugin"
    own = f"{ours}.integration.sglang"
    assert more - {"sglang.srt.arg_groups.resolution_hooks"} == {
        *(ours, f"{ours}.errors", f"{ours}.integration", own),
        *(f"{own}.backend", f"{own}.effect"),
        *(f"{own}.plugin", f"{own}.plugin.flag", f"{own}.plugin.hooks"),
    }
