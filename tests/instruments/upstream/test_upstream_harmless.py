"""Without our plugin vLLM's tests see nothing of ours."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.upstream import settings
from tests.upstream.run import HERE

pytestmark = pytest.mark.long

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
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


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
    assert len(names) == 3
    imports = "; ".join(f"import {name}" for name in names)
    run_python(imports, HIDING, WITHIN, hide="1")
