"""Our package beside a FlashInfer whose import fails, or without one."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from moe_nvlink_plugin.errors import UnsupportedError
from moe_nvlink_plugin.integration import flashinfer as ours


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder in which Python looks first; nothing of FlashInfer is imported."""
    homes = tuple(f"{ours.__name__}.{home}" for home in ours._HOMES.values())
    for name in list(sys.modules):
        if name.partition(".")[0] == "flashinfer" or name in homes:
            monkeypatch.delitem(sys.modules, name)
    with monkeypatch.context() as paths:
        paths.syspath_prepend(str(tmp_path))
        yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "flashinfer"]:
        del sys.modules[name]


def test_a_release_that_cannot_be_imported(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An older one has no moe_ep."""
    (path / "flashinfer").mkdir()
    (path / "flashinfer/__init__.py").touch()
    with caplog.at_level(logging.WARNING):
        importlib.reload(ours)
    reason = "No module named 'flashinfer.moe_ep'"
    assert [record.message for record in caplog.records] == [
        "backend moe_nvlink of flashinfer.moe_ep is not registered, because FlashInfer's import "
        f"failed: {reason}"
    ]
    with pytest.raises(UnsupportedError) as caught:
        ours.MoeNvlinkConfig  # noqa: B018
    assert str(caught.value) == (
        f"MoeNvlinkConfig needs FlashInfer 0.7.2 or newer, whose import failed: {reason}; pip "
        "install 'moe-nvlink-plugin[flashinfer]'"
    )
    assert isinstance(caught.value.__cause__, ImportError)
    # This one says that it needs no FlashInfer.
    assert importlib.import_module(f"{ours.__name__}.experts").check


def test_without_flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(UnsupportedError, match=r"^install needs FlashInfer; pip install 'moe-nv"):
        ours.install()
