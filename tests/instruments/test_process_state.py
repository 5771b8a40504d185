"""Changes that a test may leave in its process: each is named and undone."""

from __future__ import annotations

import logging
import os
import re
import signal
from collections.abc import Callable, Iterator

import pytest
import torch

from tests.support.process_state import ProcessState

_LOGGER = logging.getLogger("moe_nvlink_tests.process_state")


def disable_a_logger() -> None:
    _LOGGER.disabled = True


#: What changes a process, and what is told of it.
CHANGES: dict[str, tuple[Callable[[], object], str]] = {
    "a new variable": (
        lambda: os.environ.update(MOE_NVLINK_TESTS_NEW="1"),
        "variables of os.environ, set: MOE_NVLINK_TESTS_NEW",
    ),
    "another value": (lambda: os.environ.update(PATH="/"), "changed: PATH"),
    "no variable": (lambda: os.environ.pop("PATH"), "removed: PATH"),
    "working directory": (lambda: os.chdir("/"), "the working directory was .* and is /$"),
    "logger": (disable_a_logger, f"loggers are disabled: {_LOGGER.name}"),
    "logging": (lambda: logging.disable(logging.INFO), "logging.disable was 0 and is 20"),
    "signal": (
        lambda: signal.signal(signal.SIGHUP, lambda *_: None),  # nohup has set SIG_IGN
        "the handler of SIGHUP was .* and is <function ",
    ),
    "dtype": (lambda: torch.set_default_dtype(torch.float64), "torch.float64"),
    "device": (lambda: torch.set_default_device("meta"), "'meta'"),
    "threads": (lambda: torch.set_num_threads(torch.get_num_threads() + 1), "number of threads"),
}


@pytest.fixture
def before() -> Iterator[ProcessState]:
    state = ProcessState.now()
    yield state
    state.restore()


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_told_and_undone(change: str, before: ProcessState) -> None:
    make, expected = CHANGES[change]
    make()
    (sentence,) = before.restore()
    assert re.search(expected, sentence)
    assert ProcessState.now() == before
    assert before.restore() == []


def test_pytests_own_variable_is_no_change(before: ProcessState) -> None:
    mine = os.environ["PYTEST_CURRENT_TEST"]
    os.environ["MOE_NVLINK_TESTS_NEW"] = "1"
    assert before.restore()
    assert os.environ["PYTEST_CURRENT_TEST"] == mine
