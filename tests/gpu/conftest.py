"""Ranks of a GPU's tests may share the one GPU there is."""

import pytest


@pytest.fixture(autouse=True)
def shared_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_NVLINK_ALLOW_SHARED_GPU", "1")
