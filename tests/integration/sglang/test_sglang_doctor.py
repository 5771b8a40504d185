"""What `moe-nvlink doctor` says of SGLang, which need not be importable for it."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

import pytest

from moe_nvlink_plugin.tools.doctor import inquiry

VALUE = "moe_nvlink_plugin.integration.sglang:register"


class Environment:
    """Distributions of an environment with some SGLang, in which our plugin may be declared."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self._folder = folder
        self._others = importlib.metadata.entry_points
        patch.syspath_prepend(str(folder))
        # What this environment declares is not the question.
        patch.setattr(importlib.metadata, "entry_points", self._declared)
        self._values: list[str] = []

    def _declared(self, **choice: str) -> object:
        if choice.get("group") != "sglang.srt.plugins":
            return self._others(**choice)
        return [
            importlib.metadata.EntryPoint("moe_nvlink", value, choice["group"])
            for value in self._values
        ]

    def has(self, version: str, *values: str) -> None:
        info = self._folder / f"sglang-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n")
        self._values += values


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Environment:
    monkeypatch.delenv("SGLANG_PLUGINS", raising=False)
    return Environment(tmp_path, monkeypatch)


def _asked() -> inquiry.Found:
    found = inquiry._software().frameworks["SGLang"]
    assert found is not None
    return found


def test_the_flag_is_available(environment: Environment) -> None:
    environment.has("0.5.23", VALUE)
    found = _asked()
    assert found.error == ""
    assert found.text.startswith("0.5.23 takes --moe-a2a-backend moe_nvlink")
    assert "names compared with 0.5.23" in found.text
    assert "workers look" not in found.text
    assert not [name for name in sys.modules if name.startswith("sglang.srt.layers")]


def test_a_version_nobody_has_read(environment: Environment) -> None:
    environment.has("0.7.0", VALUE)
    assert "workers look for the names when they start" in _asked().text


def test_a_checkout_that_is_not_installed(environment: Environment) -> None:
    environment.has("0.5.23")
    assert "no installed distribution declares our plugin; install" in _asked().error


@pytest.mark.parametrize(("allowed", "works"), [("other", False), (" other , moe_nvlink", True)])
def test_plugins_that_a_user_has_chosen(
    environment: Environment, monkeypatch: pytest.MonkeyPatch, allowed: str, works: bool
) -> None:
    environment.has("0.5.23", VALUE)
    monkeypatch.setenv("SGLANG_PLUGINS", allowed)
    assert (_asked().error == "") == works
    if not works:
        assert "add moe_nvlink to SGLANG_PLUGINS" in _asked().error


def test_an_installation_that_does_not_load(environment: Environment) -> None:
    environment.has("0.5.23", "moe_nvlink_plugin.integration.nowhere:register")
    assert "cannot load moe_nvlink_plugin.integration.nowhere:register: Module" in _asked().error
