"""Runs of vLLM's tests without our plugin or AVX-512 are without it, and otherwise like others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.upstream import settings
from tests.upstream.run import HERE

HIDING, WITHIN = HERE / "hiding", HERE / "within"

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


def said(code: str, *pythonpath: Path, hide: str = "") -> Any:
    """What a child of a fresh Python prints, as JSON."""
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
    return json.loads(done.stdout.splitlines()[-1])


def test_without_the_plugin_our_package_is_gone_and_nothing_else(tmp_path: Path) -> None:
    """A sitecustomize of the user runs all the same."""
    (tmp_path / "sitecustomize.py").write_text("USERS = 'here'\n")
    installed = said(SEEN, HIDING, tmp_path)
    assert len(installed.pop("entry points")) == 2
    assert installed.pop("imports") == ["", ""]
    assert installed["sitecustomize"] == "here"
    hidden = said(SEEN, HIDING, tmp_path, hide="plugin")
    assert hidden.pop("entry points") == []
    assert all("hidden from this process" in refusal for refusal in hidden.pop("imports"))
    installed["distributions"].remove("moe-nvlink-plugin")
    assert hidden == installed


def test_plugins_of_both_sides_import_nothing_of_ours() -> None:
    names = sorted(path.stem for path in WITHIN.glob("*.py"))
    assert len(names) == 4
    imports = "; ".join(f"import {name}" for name in names)
    assert said(f"{imports}; print('{{}}')", HIDING, WITHIN, hide="plugin") == {}


#: torch on a CPU that has it all: the function that torch.cpu's others ask, and one of those.
TORCH_CPU = """
def get_capabilities():
    return {"avx2": True, "avx512_f": True, "avx512_bf16": True, "amx_tile": True, "threads": 8}

def _is_avx512_supported():
    return get_capabilities()["avx512_f"]
"""
QUESTIONS = """
import json, torch.cpu
print(json.dumps({**torch.cpu.get_capabilities(), "asked": torch.cpu._is_avx512_supported()}))
"""


@pytest.mark.parametrize("hide", ["avx512", "plugin,avx512"])
def test_avx512_and_amx_are_denied(tmp_path: Path, hide: str) -> None:
    (tmp_path / "torch/cpu").mkdir(parents=True)
    (tmp_path / "torch/__init__.py").touch()
    (tmp_path / "torch/cpu/__init__.py").write_text(TORCH_CPU)
    rich = said(QUESTIONS, HIDING, tmp_path)
    assert rich["asked"] is True
    denied = dict.fromkeys(("avx512_f", "avx512_bf16", "amx_tile", "asked"), False)
    assert said(QUESTIONS, HIDING, tmp_path, hide=hide) == rich | denied


def test_torch_answers_by_the_function_that_is_replaced() -> None:
    code = """
import json, torch.cpu
torch.cpu.get_capabilities = lambda: {"avx512_f": True, "avx512_bf16": True, "amx_tile": True}
ask = (torch.cpu._is_avx512_supported, torch.cpu._is_avx512_bf16_supported)
print(json.dumps([one() for one in (*ask, torch.cpu._is_amx_tile_supported)]))
"""
    assert said(code) == [True] * 3


def test_vllm_takes_its_avx2_library() -> None:
    """Which has no shared memory for groups: that is how it can be told from the others."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    code = """
import json, torch
from vllm.platforms import current_platform
current_platform.import_kernels()
with open("/proc/self/maps") as maps:
    libraries = {line.split("/")[-1].strip() for line in maps if "/vllm/_C" in line}
print(json.dumps([sorted(libraries), hasattr(torch.ops._C, "init_shm_manager")]))
"""
    assert said(code, HIDING, hide="avx512") == [["_C_AVX2.abi3.so"], False]
