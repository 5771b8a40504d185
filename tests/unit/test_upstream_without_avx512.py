"""Runs of vLLM's tests as on a CPU without AVX-512: on any CPU vLLM takes its AVX2 library."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parents[1] / "upstream"
WITHOUT_AVX512, WITHOUT_PLUGIN = HERE / "without_avx512", HERE / "without_plugin"

#: torch on a CPU that has it all: the function that torch.cpu's others ask, and one of those.
TORCH_CPU = """
def get_capabilities():
    return {"avx2": True, "avx512_f": True, "avx512_bf16": True, "amx_tile": True, "threads": 8}

def _is_avx512_supported():
    return get_capabilities()["avx512_f"]
"""
QUESTIONS = """
import json, torch.cpu
print(json.dumps([dict(torch.cpu.get_capabilities()), torch.cpu._is_avx512_supported()]))
"""


def answers(code: str, *pythonpath: Path) -> Any:
    """What a child of a fresh Python prints, as JSON."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, pythonpath))}
    child = f"import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', {code!r}]))"
    done = subprocess.run(
        [sys.executable, "-c", child], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def rich(tmp_path: Path) -> Path:
    """A folder with such a torch, and with a sitecustomize that must be run all the same."""
    (tmp_path / "torch/cpu").mkdir(parents=True)
    (tmp_path / "torch/__init__.py").touch()
    (tmp_path / "torch/cpu/__init__.py").write_text(TORCH_CPU)
    said = tmp_path / "said"
    (tmp_path / "sitecustomize.py").write_text(f"open({str(said)!r}, 'a').write('run ')")
    return tmp_path


@pytest.mark.parametrize("before", [(), (WITHOUT_PLUGIN,)])
def test_avx512_and_amx_are_denied(rich: Path, before: tuple[Path, ...]) -> None:
    assert answers(QUESTIONS, *before, rich)[1] is True
    (rich / "said").unlink()
    has, avx512 = answers(QUESTIONS, *before, WITHOUT_AVX512, rich)
    assert avx512 is False
    assert has == {
        "avx2": True,
        "threads": 8,
        **dict.fromkeys(("avx512_f", "avx512_bf16", "amx_tile"), False),
    }
    assert (rich / "said").read_text() == "run run ", "once in the process and once in its child"


def test_torch_answers_by_the_function_that_is_replaced() -> None:
    code = """
import json, torch.cpu
torch.cpu.get_capabilities = lambda: {"avx512_f": True, "avx512_bf16": True, "amx_tile": True}
ask = (torch.cpu._is_avx512_supported, torch.cpu._is_avx512_bf16_supported)
print(json.dumps([one() for one in (*ask, torch.cpu._is_amx_tile_supported)]))
"""
    assert answers(code) == [True] * 3


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
    assert answers(code, WITHOUT_AVX512) == [["_C_AVX2.abi3.so"], False]
