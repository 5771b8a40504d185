"""Engines that vLLM's tests start get expert parallelism and our backend, and must have used it.

In the process of the tests, an engine's arguments are completed where they are made; servers get
FLAGS. Models without experts are left alone. A test then passes only if all ranks of its engines
have counted rounds of ours: without that it would show nothing. Servers are asked after they have
ended, when the last test of theirs has.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from moe_nvlink_plugin.integration.vllm.backend import BACKEND

FLAGS = ("--enable-expert-parallel", "--all2all-backend", BACKEND)
#: A worker writes its counters twice a second, if the machine lets it; then the wait is over.
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

    def problem(self) -> str:
        """Why this launch does not show our backend at work; "" if it does."""
        files = sorted(self.folder.glob("rank*.json"))
        counters = [json.loads(path.read_text("utf-8")) for path in files]
        if not counters:
            return f"no worker has written counters of ours to {self.folder}"
        ranks, sizes = [one["ep_rank"] for one in counters], {one["ep_size"] for one in counters}
        if sizes != {len(ranks)} or len(ranks) < 2:
            return f"only ranks {ranks} of {sizes} have written counters of ours"
        idle = [one["ep_rank"] for one in counters if not one["rounds"]]
        return f"rank(s) {idle} have exchanged nothing" if idle else ""


class Engines:
    """The plugin: completes arguments, remembers what was launched, asks for its counters."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._numbers = itertools.count()
        self._engines: list[Launch] = []  # of this test
        self._servers: list[Launch] = []  # that have not been asked yet
        self._lock = threading.Lock()

    def pytest_collection_finish(self) -> None:
        """Patches vLLM and its tests' helpers, which are imported by now if any test needs them."""
        from vllm.engine.arg_utils import EngineArgs

        _wrap(EngineArgs, "__post_init__", self._complete)
        _wrap(EngineArgs, "create_engine_config", self._expect_engine)
        helpers = sys.modules.get("tests.utils")
        if helpers is not None:
            _wrap(helpers.RemoteVLLMServer, "__init__", self._expect_server)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Generator[None, object, object]:
        """Runs the test, then looks at its engines' counters."""
        self._engines = []
        result = yield
        assert self._engines or self._servers, "the test launched no engine with our backend"
        _check(self._engines)
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self) -> Generator[None, object, object]:
        """Ends fixtures, then looks at the counters of servers that have ended with them."""
        result = yield
        over = [one for one in self._servers if all(s._shutdown_complete for s in one.servers)]
        self._servers = [one for one in self._servers if one not in over]
        _check(over)
        return result

    def _launch(self) -> Launch:
        launch = Launch(self._folder / f"stats{next(self._numbers)}")
        os.environ[STATS_FOLDER] = str(launch.folder)
        return launch

    def _complete(self, arguments: Any, *_: object, **__: object) -> None:
        if arguments.data_parallel_size > 1 and has_experts(arguments.model):
            arguments.enable_expert_parallel = True
            arguments.all2all_backend = BACKEND

    def _expect_engine(self, arguments: Any, *_: object, **__: object) -> None:
        if arguments.data_parallel_size > 1 and has_experts(arguments.model):
            self._engines.append(self._launch())

    def _expect_server(
        self, server: Any, model: str, flags: list[str], *_: object, **__: object
    ) -> None:
        if "--data-parallel-size" not in flags or not has_experts(model):
            return
        # The list itself: tests look into it for what their server was told.
        flags.extend(flag for flag in FLAGS if flag not in flags)
        server._shutdown_complete = False
        with self._lock:  # a thread starts each; servers that live together are one group of ranks
            if not self._servers:
                self._servers.append(self._launch())
            self._servers[-1].servers.append(server)


def _check(launches: Sequence[Launch]) -> None:
    deadline = time.monotonic() + SETTLE_S
    while problems := [problem for one in launches if (problem := one.problem())]:
        assert time.monotonic() < deadline, f"{BACKEND} did not serve: {'; '.join(problems)}"
        time.sleep(0.25)


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
    config.pluginmanager.register(Engines(factory.mktemp("engines")), "moe_nvlink_engines")
