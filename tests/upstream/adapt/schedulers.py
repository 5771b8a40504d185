"""`Scheduler` and `AsyncScheduler` of vLLM's tests are our schedulers.

The names are replaced in vLLM's modules before a test module imports them. A test then passes only
if it has made a scheduler of ours, and none that is not: without that it would show nothing.

vLLM's CPU platform turns asynchronous scheduling off in every configuration, and tests make an
`AsyncScheduler` nevertheless. Ours refuses that, so it gets what the test had asked for.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Generator
from typing import Any

import pytest

from moe_nvlink_plugin.integration.vllm.choices import CAPACITY, KEY

#: A variable for `Group.environment`: our schedulers' options as JSON; default: their defaults.
OPTIONS = "MOE_NVLINK_UPSTREAM_CAPACITY"


class Schedulers:
    """The plugin: notes the class of each scheduler that a test makes."""

    def __init__(self) -> None:
        self._made: list[type] = []  # by this test
        self._of_all = 0
        self._ours: type = object

    def install(self) -> None:
        """Replaces the names. Local, for good."""
        import vllm.v1.core.sched.async_scheduler as asynchronous
        import vllm.v1.core.sched.scheduler as synchronous

        from moe_nvlink_plugin.integration.vllm import scheduler as ours

        self._note_all(synchronous.Scheduler)
        self._ours = ours.GuaranteedNoEvictScheduler
        synchronous.Scheduler = ours.GuaranteedNoEvictScheduler
        asynchronous.AsyncScheduler = ours.AsyncGuaranteedNoEvictScheduler
        _change(ours.AsyncGuaranteedNoEvictScheduler, _schedule_asynchronously)
        if os.environ.get(OPTIONS):
            _change(ours.GuaranteedNoEvictScheduler, _choose_options)

    def _note_all(self, base: Any) -> None:
        original = base.__init__

        @functools.wraps(original)
        def init(scheduler: Any, *args: Any, **kwargs: Any) -> None:
            self._made.append(type(scheduler))
            original(scheduler, *args, **kwargs)

        base.__init__ = init

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self) -> Generator[None, object, object]:
        """Counts from here: fixtures make schedulers, too."""
        self._made = []
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Generator[None, object, object]:
        """Runs the test, then looks at what it has made."""
        result = yield
        assert self._made, "the test made no scheduler"
        others = {one.__name__ for one in self._made if not issubclass(one, self._ours)}
        assert not others, f"the test made schedulers that are not ours: {', '.join(others)}"
        self._of_all += len(self._made)
        return result

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """For the run's log."""
        terminalreporter.write_line(f"{self._of_all} schedulers of ours in tests that passed")


def _change(cls: Any, change: Callable[[Any], None]) -> None:
    """Changes every configuration before an object of the class is made from it."""
    original = cls.__new__

    def new(cls: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        change(vllm_config)
        return original(cls, vllm_config, *args, **kwargs)

    cls.__new__ = new


def _schedule_asynchronously(vllm_config: Any) -> None:
    vllm_config.scheduler_config.async_scheduling = True


def _choose_options(vllm_config: Any) -> None:
    vllm_config.additional_config = {KEY: {CAPACITY: json.loads(os.environ[OPTIONS])}}


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Before any module of vLLM's tests is imported."""
    schedulers = Schedulers()
    schedulers.install()
    early_config.pluginmanager.register(schedulers, "moe_nvlink_schedulers")
