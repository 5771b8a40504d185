from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import pytest

#: Files of these folders need vLLM, but for some.
OF_VLLM = {Path(__file__).parent / "vllm", Path(__file__).parent / "servers"}
WITHOUT = ("test_vllm_idle_steps.py", "test_vllm_stats.py", "test_sglang_e2e.py")


class LeftOut(pytest.Module):
    """A file of tests where vLLM is missing, which nobody imports."""

    def collect(self) -> NoReturn:
        pytest.skip("vLLM is not installed", allow_module_level=True)


def _has_vllm() -> bool:
    try:
        return importlib.util.find_spec("vllm") is not None
    except ModuleNotFoundError:  # SGLang's environment hides it
        return False


def pytest_pycollect_makemodule(
    module_path: Path, parent: pytest.Collector
) -> pytest.Module | None:
    is_of_vllm = not OF_VLLM.isdisjoint(module_path.parents)
    if not is_of_vllm or module_path.name in WITHOUT or _has_vllm():
        return None
    left_out: pytest.Module = LeftOut.from_parent(parent, path=module_path)
    return left_out


@pytest.fixture
def turns_from_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which tokens are audited does not depend on the clock."""
    from moe_nvlink_plugin.integration.common import audit

    monkeypatch.setattr(audit, "time", SimpleNamespace(time_ns=lambda: 2**23))
