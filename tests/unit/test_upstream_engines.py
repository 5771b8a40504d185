"""The adapter that holds vLLM's engine tests to our backend: a test without it must not pass."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.upstream import models
from tests.upstream.adapt import engines, redirects

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


def _server() -> Any:
    return SimpleNamespace(_shutdown_complete=False)


def _item(name: str) -> Any:
    return SimpleNamespace(originalname=name, name=name)


def _count(launch: engines.Launch, rounds: dict[int, int], ep_size: int = 2) -> None:
    launch.folder.mkdir(exist_ok=True)
    for rank, number in rounds.items():
        counters = {"ep_rank": rank, "ep_size": ep_size, "rounds": number}
        (launch.folder / f"rank{rank}.json").write_text(json.dumps(counters), "utf-8")


def _run(plugin: engines.Engines, test: Any, name: str = "test_load") -> None:
    """As pytest does."""
    plugin.pytest_runtest_setup()
    steps = plugin.pytest_runtest_call(_item(name))
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
    def test() -> None:
        plugin._expect_engine(_arguments(MOE))
        _count(plugin._launches[-1], rounds, ep_size)

    if told is None:
        _run(plugin, test)
    else:
        with pytest.raises(AssertionError, match=told):
            _run(plugin, test)


def test_a_test_without_a_launch_fails(plugin: engines.Engines) -> None:
    with pytest.raises(AssertionError, match="launched no engine"):
        _run(plugin, lambda: plugin._expect_engine(_arguments(DENSE)))


def test_each_of_two_engines_must_have_counted(plugin: engines.Engines) -> None:
    def test() -> None:
        for rounds in ({0: 3, 1: 3}, {0: 0, 1: 0}):
            plugin._expect_engine(_arguments(MOE))
            _count(plugin._launches[-1], rounds)

    with pytest.raises(AssertionError, match="exchanged nothing"):
        _run(plugin, test)


def test_an_engine_of_the_test_before_does_not_count(plugin: engines.Engines) -> None:
    def test() -> None:
        plugin._expect_engine(_arguments(MOE))
        _count(plugin._launches[-1], {0: 1, 1: 1})

    _run(plugin, test)
    with pytest.raises(AssertionError, match="launched no engine"):
        _run(plugin, lambda: None)


def test_servers_of_one_fixture_are_one_group_until_they_stop(plugin: engines.Engines) -> None:
    servers = [_server(), _server()]
    flags = [["--data-parallel-size", "2", "--port", str(port)] for port in (8000, 8001)]
    plugin.pytest_runtest_setup()
    for server, own in zip(servers, flags, strict=True):
        plugin._expect_server(server, MOE, own)
        assert own[-3:] == list(engines.FLAGS)
    (launch,) = plugin._launches
    _count(launch, {0: 0, 1: 0})

    def check(name: str = "test_load", to: int | None = None) -> None:
        steps = plugin.pytest_runtest_call(_item(name))
        next(steps)
        if to is not None:
            _count(launch, {0: to, 1: to})
        with pytest.raises(StopIteration):
            steps.send(None)

    check(to=4)
    plugin.pytest_runtest_setup()
    check(engines.WITHOUT_TOKENS[0])
    plugin.pytest_runtest_setup()
    with pytest.raises(AssertionError, match="in this test"):
        check()  # the servers are as they were: this test has sent nothing
    for server in servers:
        server._shutdown_complete = True
    plugin.pytest_runtest_setup()
    with pytest.raises(AssertionError, match="launched no engine"):
        check()


@pytest.mark.parametrize("rounds", [0, 5])
def test_servers_that_count_at_their_end_are_asked_then(tmp_path: Path, rounds: int) -> None:
    plugin = engines.Engines(tmp_path, counted_at_end=True)
    server = _server()
    plugin.pytest_runtest_setup()
    plugin._expect_server(server, MOE, ["--data-parallel-size", "2"])
    steps = plugin.pytest_runtest_call(_item("test_load"))
    next(steps)
    with pytest.raises(StopIteration):
        steps.send(None)
    for ends in (False, True):
        teardown = plugin.pytest_runtest_teardown()
        next(teardown)
        if ends:
            server._shutdown_complete = True
            _count(plugin._launches[0], {0: rounds, 1: rounds})
        with pytest.raises(AssertionError if ends and not rounds else StopIteration):
            teardown.send(None)


def test_a_server_without_experts_is_left_alone(plugin: engines.Engines) -> None:
    flags = ["--data-parallel-size", "2"]
    plugin._expect_server(_server(), DENSE, flags)
    assert flags == ["--data-parallel-size", "2"]
    assert not plugin._launches


def test_our_name_of_the_variable_is_the_one_that_workers_read(tmp_path: Path) -> None:
    from moe_nvlink_plugin import env

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(engines.STATS_FOLDER, str(tmp_path))
        assert env.stats_dir() == tmp_path


def test_models_enter_as_folders_and_are_served_by_their_names(
    redirected: dict[str, str],
) -> None:
    class Arguments:
        def __init__(self, model: str, **others: Any) -> None:
            self.model, self.tokenizer = model, None
            self.served_model_name: str | None = None
            self.speculative_config = others.get("speculative_config")
            self.__post_init__()

        def __post_init__(self) -> None:
            self.seen = self.model

    redirects._redirect_engines(Arguments)
    ours = Arguments(MOE, speculative_config={"model": DENSE, "method": "eagle"})
    assert ours.seen == redirected[MOE]
    assert ours.served_model_name == MOE
    assert ours.speculative_config == {"model": redirected[DENSE], "method": "eagle"}
    other = Arguments("somebody/else")
    assert (other.seen, other.served_model_name) == ("somebody/else", None)

    class Server:
        def __init__(self, model: str, flags: list[str]) -> None:
            self.model, self.flags = model, flags

    redirects._redirect_servers(Server)
    server = Server(MOE, ["--port", "1"])
    assert server.model == redirected[MOE]
    assert server.flags == ["--port", "1", "--served-model-name", MOE]


def test_every_stand_in_is_known_to_have_experts_or_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = json.loads(models.redirect_file(tmp_path).read_text("utf-8"))
    monkeypatch.setattr(
        "vllm.transformers_utils.utils.maybe_model_redirect", lambda name: found[name]
    )
    experts = {name: engines.has_experts(name) for name in found}
    kinds = {name: one.model_type for name, one in models.STAND_INS.items()}
    assert experts == {name: "moe" in kind for name, kind in kinds.items()}
