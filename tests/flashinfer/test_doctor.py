"""What `moe-nvlink doctor` says of FlashInfer, which it does not import."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from moe_nvlink_plugin import frameworks
from moe_nvlink_plugin.tools.doctor import inquiry, report


def install(
    folder: Path, monkeypatch: pytest.MonkeyPatch, version: str, *, has_registry: bool
) -> None:
    """Its files are not beside its metadata, as in an editable installation."""
    info = folder / f"metadata/flashinfer_python-{version}.dist-info"
    info.mkdir(parents=True)
    name = "Metadata-Version: 2.1\nName: flashinfer-python\n"
    (info / "METADATA").write_text(f"{name}Version: {version}\n")
    registry = folder / "checkout/flashinfer/moe_ep/core/comm/communication.py"
    registry.parent.mkdir(parents=True)
    package = folder / "checkout/flashinfer/__init__.py"
    for file in (package, registry) if has_registry else (package,):
        file.write_text("raise ImportError('nobody asked for it')\n")
    monkeypatch.delitem(sys.modules, "flashinfer", raising=False)
    for place in ("metadata", "checkout"):
        monkeypatch.syspath_prepend(str(folder / place))


def test_the_backend_can_register(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, "0.7.2", has_registry=True)
    text = report.as_text([inquiry.facts()], [])
    assert "FlashInfer: 0.7.2 has flashinfer.moe_ep; import moe_nvlink_plugin.integration" in text
    assert "flashinfer" not in sys.modules


def test_a_release_without_the_registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, "0.6.1", has_registry=False)
    found = inquiry._software().frameworks["FlashInfer"]
    assert found is not None
    assert "0.6.1 has no registry of moe_ep for backend moe_nvlink; install" in found.error


def test_without_flashinfer_there_is_no_line() -> None:
    (one,) = [one for one in frameworks.installed() if one.name == "FlashInfer"]
    assert one.look is not None
    assert one.look({}) is None
