"""What `moe-nvlink doctor` says of FlashInfer, which it does not import."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from moe_nvlink_plugin.tools.doctor import inquiry, report


def install(folder: Path, version: str, *, has_registry: bool) -> None:
    info = folder / f"flashinfer_python-{version}.dist-info"
    info.mkdir()
    name = "Metadata-Version: 2.1\nName: flashinfer-python\n"
    (info / "METADATA").write_text(f"{name}Version: {version}\n")
    if has_registry:
        registry = folder / "flashinfer/moe_ep/core/comm/communication.py"
        registry.parent.mkdir(parents=True)
        registry.write_text("raise ImportError('nobody asked for it')\n")


def test_the_backend_can_register(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    install(tmp_path, "0.7.2", has_registry=True)
    found = inquiry.facts()
    assert inquiry.from_json(inquiry.to_json(found)) == found
    text = report.as_text([found], [])
    assert "FlashInfer: 0.7.2 has flashinfer.moe_ep; import moe_nvlink_plugin.integration" in text
    assert "flashinfer" not in sys.modules


def test_a_release_without_the_registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    install(tmp_path, "0.6.1", has_registry=False)
    found = inquiry._software().flashinfer
    assert found is not None
    assert "0.6.1 has no registry of moe_ep for backend moe_nvlink; install" in found.error


def test_without_flashinfer_there_is_no_line() -> None:
    found = inquiry._software()
    assert found.flashinfer is None
    assert "flashinfer-python" not in found.distributions
