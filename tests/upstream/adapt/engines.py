"""Engines that vLLM's tests start get expert parallelism and our backend, and must have used it.

In the process of the tests the arguments of an engine are completed where they are made; servers
get two flags more. Models without experts are left alone. Each test then passes only if all ranks
of its engines have counted rounds of ours: one that ran without us would show nothing. On GPUs,
where workers count when they end, this has never been run.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import sys
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from moe_nvlink_plugin.integration.vllm.backend import BACKEND

from .. import settings
from ..groups import Device

FLAGS = ("--enable-expert-parallel", "--all2all-backend", BACKEND)
#: Tests that ask a server about itself, so that no token passes through its experts.
WITHOUT_TOKENS = (
    "test_external_lb_server_info",
    "test_hybrid_dp_server_info",
    "test_multinode_dp_server_info",
)
#: A worker writes its counters twice a second, where the machine lets it; then the wait is over.
SETTLE_S = 60.0
#: The variable that names the folder of the counters.
STATS_FOLDER = "MOE_NVLINK_STATS_DIR"

_COUNTS_OF_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass
class Launch:
    """Ranks that were started together: one engine, or the servers of one test.

    folder: where their workers write counters. servers: vLLM's objects; none for an engine.
    """

    folder: Path
    servers: list[Any] = field(default_factory=list)

    def is_alive(self) -> bool:
        """Whether later tests can still ask it."""
        return any(not server._shutdown_complete for server in self.servers)

    def rounds(self) -> dict[int, int]:
        """Rounds of the exchange by rank; of every rank that there is, if `problem` is None."""
        return {rank: counters["rounds"] for rank, counters in self._counters().items()}

    def problem(self, before: Mapping[int, int], *, without_tokens: bool) -> str | None:
        """Why this launch does not show our backend at work since `before`; None: it does."""
        counters = self._counters()
        if not counters:
            return f"no worker has written counters of ours to {self.folder}"
        sizes = {one["ep_size"] for one in counters.values()}
        if sizes != {len(counters)} or len(counters) < 2:
            return f"only ranks {sorted(counters)} of {sizes} have written counters of ours"
        idle = [rank for rank, one in counters.items() if one["rounds"] <= before.get(rank, 0)]
        if idle and not without_tokens:
            return f"rank(s) {sorted(idle)} have exchanged nothing in this test"
        return None

    def _counters(self) -> dict[int, dict[str, Any]]:
        files = sorted(self.folder.glob("rank*.json"))
        counters = [json.loads(path.read_text("utf-8")) for path in files]
        return {one["ep_rank"]: one for one in counters}


class Engines:
    """The plugin: completes arguments, remembers what was launched, asks for its counters.

    counted_at_end: workers write when they end, as on GPUs, so that servers are asked only then.
    """

    def __init__(self, folder: Path, *, counted_at_end: bool = False) -> None:
        self._folder = folder
        self._counted_at_end = counted_at_end
        self._numbers = itertools.count()
        self._launches: list[Launch] = []
        self._of_test: list[Launch] = []

    def pytest_collection_finish(self) -> None:
        """Patches vLLM and its tests' helpers, which are imported by now if any test needs them."""
        from vllm.engine.arg_utils import EngineArgs

        _wrap(EngineArgs, "__post_init__", self._complete)
        _wrap(EngineArgs, "create_engine_config", self._expect_engine)
        helpers = sys.modules.get("tests.utils")
        if helpers is not None:
            _wrap(helpers.RemoteVLLMServer, "__init__", self._expect_server)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        """What is launched from here on, fixtures included, belongs to this test."""
        self._of_test = []
        self._launches = [launch for launch in self._launches if launch.is_alive()]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        """Runs the test, then looks at the counters."""
        before = {id(launch): launch.rounds() for launch in self._launches}
        result = yield
        name = getattr(item, "originalname", item.name)
        problems = self._problems(before, without_tokens=name in WITHOUT_TOKENS)
        assert not problems, f"{BACKEND} did not serve this test: {'; '.join(problems)}"
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self) -> Generator[None, object, object]:
        """Ends fixtures; servers that end with them may only now have written their counters."""
        result = yield
        if self._counted_at_end:
            ended = [one for one in self._launches if one.servers and not one.is_alive()]
            found = [launch.problem({}, without_tokens=False) for launch in ended]
            problems = [problem for problem in found if problem is not None]
            assert not problems, f"{BACKEND} did not serve these servers: {'; '.join(problems)}"
        return result

    def _problems(
        self, before: Mapping[int, Mapping[int, int]], *, without_tokens: bool
    ) -> list[str]:
        if not self._launches:
            return ["it launched no engine with our backend"]
        deadline = time.monotonic() + SETTLE_S
        due = [one for one in self._launches if not (one.servers and self._counted_at_end)]
        while True:
            found = [
                launch.problem(before.get(id(launch), {}), without_tokens=without_tokens)
                for launch in due
            ]
            problems = [problem for problem in found if problem is not None]
            if not problems or time.monotonic() > deadline:
                return problems
            time.sleep(0.25)

    def _launch(self) -> Launch:
        launch = Launch(self._folder / f"stats{next(self._numbers)}")
        self._of_test.append(launch)
        self._launches.append(launch)
        os.environ[STATS_FOLDER] = str(launch.folder)
        return launch

    def _complete(self, arguments: Any, *_: object, **__: object) -> None:
        if arguments.data_parallel_size > 1 and has_experts(arguments.model):
            arguments.enable_expert_parallel = True
            arguments.all2all_backend = BACKEND

    def _expect_engine(self, arguments: Any, *_: object, **__: object) -> None:
        if arguments.data_parallel_size > 1 and has_experts(arguments.model):
            self._launch()

    def _expect_server(
        self, server: Any, model: str, flags: list[str], *_: object, **__: object
    ) -> None:
        if "--data-parallel-size" not in flags or not has_experts(model):
            return
        # The list itself: tests look into it for what their server was told.
        flags.extend(flag for flag in FLAGS if flag not in flags)
        # Servers of one test are one group of ranks, each started by a thread of its own.
        launch = next((one for one in self._of_test if one.servers), None) or self._launch()
        server._shutdown_complete = False
        launch.servers.append(server)


def has_experts(model: str) -> bool:
    """Whether the model that vLLM takes for this name is a mixture of experts."""
    from vllm.transformers_utils.utils import maybe_model_redirect

    path = Path(maybe_model_redirect(model)) / "config.json"
    if not path.exists():
        return False
    config = json.loads(path.read_text("utf-8"))
    return any(config.get(key, 0) > 0 for key in _COUNTS_OF_EXPERTS)


def _wrap(owner: type, name: str, before: Any) -> None:
    """Calls `before` with the arguments of each call of a method."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        before(self, *args, **kwargs)
        return original(self, *args, **kwargs)

    setattr(owner, name, wrapped)


def pytest_configure(config: pytest.Config) -> None:
    """Registers the plugin with a folder of this run."""
    factory = pytest.TempPathFactory.from_config(config, _ispytest=True)
    at_end = settings.device() is Device.GPU
    engines = Engines(factory.mktemp("engines"), counted_at_end=at_end)
    config.pluginmanager.register(engines, "moe_nvlink_engines")
