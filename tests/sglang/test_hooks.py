"""The hooks of processes that build a model, and what is said where one took no effect."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang.srt", reason="SGLang is not installed here: make sglang-env")

from moe_nvlink_plugin.errors import UnsupportedError
from moe_nvlink_plugin.integration.common import own_source
from moe_nvlink_plugin.integration.common.names import use
from moe_nvlink_plugin.integration.sglang import backend, compat, effect
from moe_nvlink_plugin.integration.sglang.plugin import hooks

Resolve = Callable[..., Any]


@pytest.fixture
def published(resolved: Resolve) -> Iterator[Any]:
    """This process has published arguments that name us, as a scheduler of SGLang does."""
    from sglang.srt import runtime_context

    yield runtime_context.publish(resolved(), role="scheduler")
    runtime_context.reset_context()


@pytest.fixture
def forgetting() -> Iterator[None]:
    yield
    effect.forget()


def test_a_process_with_a_model_has_every_hook(published: Any) -> None:
    from sglang.srt.layers.moe.utils import MoeA2ABackend

    effect.assert_hooks()
    assert MoeA2ABackend.CUSTOMIZED.is_flashinfer()
    assert MoeA2ABackend.FLASHINFER.is_flashinfer()
    for other in set(MoeA2ABackend) - {MoeA2ABackend.CUSTOMIZED, MoeA2ABackend.FLASHINFER}:
        assert not other.is_flashinfer(), other


def test_forwards_are_watched_where_sglang_keeps_a_record(published: Any) -> None:
    from sglang.srt.model_executor.model_runner import ModelRunner

    before = ModelRunner._forward_raw
    assert not backend.keeps_record(SimpleNamespace(elastic_ep_backend=None))
    assert backend.keeps_record(SimpleNamespace(elastic_ep_backend="mooncake"))
    hooks.watch_ranks()
    watched = ModelRunner._forward_raw
    assert watched is not before
    hooks.watch_ranks()
    assert ModelRunner._forward_raw is watched


def test_sglang_asks_us_for_dispatchers_of_our_backend_alone(
    published: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.layers.moe.fused_moe_triton import layer
    from sglang.srt.layers.moe.utils import initialize_moe_config
    from sglang.srt.runtime_context import get_flags

    from moe_nvlink_plugin.integration.sglang.moe import forms

    def create(moe_runner_config: str, quant_method: str) -> tuple[str, ...]:
        return "ours", moe_runner_config, quant_method

    monkeypatch.setattr(forms, "create", create)
    monkeypatch.setattr(layer, "StandardDispatcher", lambda *given: ("SGLang's", *given))
    initialize_moe_config()
    assert layer.create_moe_dispatcher("config", "method") == ("ours", "config", "method")
    named = layer.create_moe_dispatcher(moe_runner_config="config", quant_method="method")
    assert named == ("ours", "config", "method")
    none = type(get_flags().moe.a2a_backend).NONE
    monkeypatch.setattr(get_flags().moe, "a2a_backend", none)
    assert layer.create_moe_dispatcher("config", "method") == ("SGLang's", "config")


def test_a_hook_without_effect_is_named(published: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.layers.moe.utils import MoeA2ABackend

    monkeypatch.setattr(MoeA2ABackend, "is_flashinfer", MoeA2ABackend.is_flashinfer.__wrapped__)
    with pytest.raises(UnsupportedError, match="is_flashinfer does not know us"):
        effect.assert_hooks()


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("moe_a2a_backend", "none", "moe_a2a_backend is 'none', not 'customized'"),
        ("ep_size", 1, "ep_size is 1, tp_size 2"),
        ("disable_shared_experts_fusion", False, "shared experts are fused"),
    ],
)
def test_a_resolution_without_effect_is_named(
    published: Any, field: str, value: Any, words: str
) -> None:
    from sglang.srt.runtime_context import get_context

    get_context().override("a test", **{field: value})
    with pytest.raises(UnsupportedError, match=words) as caught:
        effect.assert_hooks()
    assert str(caught.value).count("\n  - ") == 1


def test_the_reason_of_a_failure_is_told(
    published: Any, monkeypatch: pytest.MonkeyPatch, forgetting: None
) -> None:
    """SGLang swallows what a plugin raises; the first dispatcher repeats it."""
    from moe_nvlink_plugin.integration import sglang as door

    def fail() -> None:
        raise OSError("no such library")

    monkeypatch.setattr(hooks, "register", fail)
    with pytest.raises(OSError, match="no such library"):
        door.register()
    with pytest.raises(UnsupportedError, match="not registered: OSError: no such library"):
        effect.assert_hooks()


def test_another_plugin_that_was_quicker_is_noticed(
    resolved: Resolve, monkeypatch: pytest.MonkeyPatch, forgetting: None
) -> None:
    """SGLang applies the hooks of a function once; later ones are dropped without a word."""
    from sglang.srt import runtime_context
    from sglang.srt.plugins.hook_registry import HookRegistry

    monkeypatch.setattr(HookRegistry, "apply_hooks", lambda: None)
    monkeypatch.setattr(hooks.put_in_place, "done", False, raising=False)
    with pytest.raises(UnsupportedError, match="SGLang has not applied the hook"):
        runtime_context.publish(resolved(), role="scheduler")
    runtime_context.reset_context()


@pytest.mark.parametrize("role", hooks.WITHOUT_MODEL)
def test_processes_without_a_model_get_none(
    resolved: Resolve, monkeypatch: pytest.MonkeyPatch, role: str
) -> None:
    from sglang.srt import runtime_context

    monkeypatch.setattr(hooks, "put_in_place", lambda: pytest.fail("a process without a model"))
    assert role in runtime_context.ROLE_NAMESPACE_SETS
    runtime_context.publish(resolved(), role=role)
    runtime_context.reset_context()


def test_every_name_we_touch_exists_here() -> None:
    compat.check_names()


def test_a_missing_name_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that a list has, and one that our source spells."""
    gone = use("sglang.srt.plugins.hook_registry", "HookRegistry.gone")
    rules = compat.RULES._replace(by_hand={**compat.BY_HAND, "plugin.flag": gone})
    texts = own_source.modules_of(rules.package)
    texts["budget"] = texts["budget"].replace("import attn_tp_size_of", "import no_such_size_of")
    monkeypatch.setattr(compat, "RULES", rules)
    monkeypatch.setattr(own_source, "modules_of", lambda package: texts)
    with pytest.raises(UnsupportedError, match=r"SGLang 0\..* lacks names") as caught:
        compat.check_names()
    assert str(caught.value).splitlines()[1:-1] == [
        "  - sglang.srt.plugins.hook_registry.HookRegistry.gone, for plugin.flag: Our name on "
        "SGLang's command line",
        "  - sglang.srt.runtime_context.no_such_size_of, for budget: How many tokens one rank may "
        "dispatch at once: the capacity of its exchange",
    ]


def test_the_platform_has_what_resolution_asks() -> None:
    """Its facts are looked up by name when they are read, so no reader of sources finds them."""
    from sglang.srt.runtime_context import get_platform

    assert {get_platform().is_sm90, get_platform().is_sm100} <= {True, False}
