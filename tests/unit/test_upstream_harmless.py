"""The runs of vLLM's tests without our plugin are without it, and otherwise like the others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from moe_nvlink_plugin.integration.vllm import upstream

WITHOUT = Path(str(upstream.__file__)).parent / "without_plugin"

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
    "name", ["moe_nvlink_plugin", "moe_nvlink_plugin.integration.vllm.platform"]
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
