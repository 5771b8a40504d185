"""What adapters tell the tools and messages of the package, and what is told without any."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pluggy
import pytest

from moe_nvlink_plugin import env, frameworks
from moe_nvlink_plugin.frameworks import Framework
from moe_nvlink_plugin.tools.doctor import inquiry, report
from tests.support.programs import python


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Framework]:
    """The frameworks of adapters, for a test to change."""
    found: list[Framework] = []
    monkeypatch.setattr(frameworks, "installed", lambda: tuple(found))
    return found


def test_ours_come_in_the_order_of_reports() -> None:
    assert [one.name for one in frameworks.installed()][:3] == ["vLLM", "SGLang", "FlashInfer"]


def test_the_command_asks_no_framework_and_no_torch() -> None:
    code = (
        "import sys; from moe_nvlink_plugin import frameworks; frameworks.variables();"
        "print(*{'vllm', 'sglang', 'flashinfer', 'torch'} & set(sys.modules))"
    )
    done = python("-c", code)
    assert (done.stdout.strip(), done.stderr.strip()) == ("", "")


def test_advice_names_whose_it_is(told: list[Framework]) -> None:
    assert frameworks.advice("flag") == frameworks.named("flag") == ""
    told += [
        Framework("One", advice={"flag": "--one"}),
        Framework("Two"),
        Framework("Three", advice={"flag": "--three"}),
    ]
    assert frameworks.advice("flag") == " (One: --one, Three: --three)"
    assert frameworks.named("flag") == "One and Three"


def test_ours_speak_of_variables_that_exist() -> None:
    for one in frameworks.installed():
        assert set(one.variables) <= set(env.VARIABLES)


def test_an_adapter_of_others_is_in_the_report(told: list[Framework]) -> None:
    """Its distribution, its entry points, its rule for them, and what it finds."""
    told.append(
        Framework(
            "Other",
            distributions=("pytest", "no-such-distribution"),
            entry_point_groups=("pytest11",),
            one_of={"pytest11": "Other takes one plugin: OTHER chooses"},
            look=lambda versions: frameworks.Finding(f"pytest {versions['pytest']} will do"),
        )
    )
    software = inquiry._software()
    assert set(software.distributions) >= {"torch", "pytest"}
    assert "no-such-distribution" not in software.distributions
    found: Any = SimpleNamespace(host="alpha", software=software)
    text = "\n".join(report._software(found))
    assert "pytest11: " in text
    assert "Other takes one plugin: OTHER chooses" in text
    assert f"Other: pytest {pytest.__version__} will do" in text
    assert "SGLang" not in text


class Careless:
    """A plugin of somebody else's, whose hook fails."""

    @frameworks.hookimpl
    def moe_nvlink_frameworks(self) -> list[Framework]:
        raise RuntimeError("no such file")


def test_a_plugin_that_fails_is_none(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def load(plugins: pluggy.PluginManager, group: str) -> int:
        plugins.register(Careless(), name="careless")
        return 1

    monkeypatch.setattr(pluggy.PluginManager, "load_setuptools_entrypoints", load)
    found = frameworks.installed.__wrapped__()
    assert [one.name for one in found] == [one.name for one in frameworks.installed()]
    assert "the plugin careless names no framework" in caplog.text
