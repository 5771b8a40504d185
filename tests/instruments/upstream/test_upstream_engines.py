"""The adapter that holds vLLM's engine tests to our backend: a test without it must not pass."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.upstream.adapt import engines

pytestmark = pytest.mark.long

MOE = "ibm-research/PowerMoE-3b"
DENSE = "hmellor/tiny-random-LlamaForCausalLM"


@pytest.fixture(autouse=True)
def redirected(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> dict[str, str]:
    """vLLM's redirects, to configs alone."""
    folder = tmp_path_factory.mktemp("redirects")
    kinds = {MOE: {"num_local_experts": 40}, DENSE: {"hidden_size": 128}}
    found = {}
    for name, config in kinds.items():
        model = folder / name
        model.mkdir(parents=True)
        (model / "config.json").write_text(json.dumps(config), "utf-8")
        found[name] = str(model)
    monkeypatch.setattr(
        "vllm.transformers_utils.utils.maybe_model_redirect", lambda name: found.get(name, name)
    )
    monkeypatch.setattr(engines, "SETTLE_S", 0.0)
    monkeypatch.setenv(engines.STATS_FOLDER, "unset")
    return found


def _arguments(model: str, data_parallel_size: int = 2) -> Any:
    return SimpleNamespace(
        model=model,
        data_parallel_size=data_parallel_size,
        enable_expert_parallel=False,
        all2all_backend="allgather_reducescatter",
    )


def _count(launch: engines.Launch, rounds: dict[int, int], ep_size: int = 2) -> None:
    launch.folder.mkdir(exist_ok=True)
    for rank, number in rounds.items():
        counters = {"ep_rank": rank, "ep_size": ep_size, "rounds": number}
        (launch.folder / f"rank{rank}.json").write_text(json.dumps(counters), "utf-8")


def _run(hook: Any, test: Callable[[], object] = lambda: None) -> None:
    """A wrapper of the plugin around a step, as pytest runs it."""
    steps = hook()
    next(steps)
    test()
    with pytest.raises(StopIteration):
        steps.send(None)


@pytest.fixture
def plugin(tmp_path: Path) -> engines.Engines:
    return engines.Engines(tmp_path)


def test_only_ranks_with_experts_get_our_backend(plugin: engines.Engines) -> None:
    for model, size, ours in ((MOE, 2, True), (MOE, 1, False), (DENSE, 2, False)):
        arguments = _arguments(model, size)
        plugin._complete(arguments)
        assert arguments.enable_expert_parallel is ours
        assert (arguments.all2all_backend == "moe_nvlink") is ours


@pytest.mark.parametrize(
    ("rounds", "ep_size", "told"),
    [
        ({0: 6, 1: 6}, 2, None),
        ({}, 2, "no worker"),
        ({0: 6}, 2, "only ranks"),
        ({0: 6, 1: 6}, 4, "only ranks"),
        ({0: 6}, 1, "only ranks"),
        ({0: 6, 1: 0}, 2, r"rank\(s\) \[1\]"),
    ],
)
def test_an_engine_must_have_counted_on_every_rank(
    plugin: engines.Engines, rounds: dict[int, int], ep_size: int, told: str | None
) -> None:
    """Each of them: another engine of the same test makes up for nothing."""

    def test() -> None:
        for own in ({0: 3, 1: 3}, rounds):
            plugin._expect_engine(_arguments(MOE))
            _count(plugin._engines[-1], own, 2 if own is not rounds else ep_size)

    with pytest.raises(AssertionError, match=told) if told else contextlib.nullcontext():
        _run(plugin.pytest_runtest_call, test)


def test_a_test_without_a_launch_of_its_own_fails(plugin: engines.Engines) -> None:
    def test() -> None:
        plugin._expect_engine(_arguments(MOE))
        _count(plugin._engines[-1], {0: 1, 1: 1})

    _run(plugin.pytest_runtest_call, test)
    for other in (lambda: None, lambda: plugin._expect_engine(_arguments(DENSE))):
        with pytest.raises(AssertionError, match="launched no engine"):
            _run(plugin.pytest_runtest_call, other)


@pytest.mark.parametrize("rounds", [0, 5])
def test_servers_of_one_fixture_are_one_group_and_asked_at_its_end(
    plugin: engines.Engines, rounds: int
) -> None:
    servers = [SimpleNamespace(), SimpleNamespace()]
    for port, server in enumerate(servers):
        own = ["--data-parallel-size", "2", "--port", str(port)]
        plugin._expect_server(server, MOE, own)
        assert own[-3:] == list(engines.FLAGS)
    (launch,) = plugin._servers
    for _ in range(2):
        _run(plugin.pytest_runtest_call)
        _run(plugin.pytest_runtest_teardown)
    _count(launch, {0: rounds, 1: rounds})
    for server in servers:
        server._shutdown_complete = True
    with contextlib.nullcontext() if rounds else pytest.raises(AssertionError, match="nothing"):
        _run(plugin.pytest_runtest_teardown)
    with pytest.raises(AssertionError, match="launched no engine"):
        _run(plugin.pytest_runtest_call)
