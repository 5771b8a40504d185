"""The emulated kernels' machine code on disk: compiled on one machine, found on another."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_nvlink_plugin.jit import nvrtc
from tests.gpu import test_rounds
from tests.support import emulated

KERNEL = (2, 0, 8, "sm_90a")


def test_what_was_compiled_is_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a line of the text was replaced, which must not be taken for the intact text."""
    monkeypatch.setenv("MOE_NVLINK_CACHE_DIR", str(tmp_path / "cache"))
    emulated.cubin.cache_clear()
    broken = emulated.broken_cubin(*test_rounds.LEFT_OUT["combine"])
    made = emulated.cubin(*KERNEL), broken(*KERNEL)
    assert made[0] != made[1]
    monkeypatch.setattr(nvrtc, "compile_cubin", lambda *args, **options: pytest.fail("compiled"))
    emulated.cubin.cache_clear()
    assert (emulated.cubin(*KERNEL), broken(*KERNEL)) == made
