"""Our messages in a framework's log."""

from __future__ import annotations

import io
import logging
import logging.config
from collections.abc import Iterator

import pytest

from moe_nvlink_plugin.integration.common import pool
from moe_nvlink_plugin.integration.vllm import logs


class Framework:
    """A framework's logger, whose handler writes with a format of its own."""

    def __init__(self) -> None:
        self.stream = io.StringIO()
        self.handler = logging.StreamHandler(self.stream)
        self.handler.setFormatter(logging.Formatter("[framework] %(message)s"))
        self.logger = logging.getLogger("some_framework")

    def configure(self, level: int = logging.INFO) -> None:
        self.logger.setLevel(level)
        self.logger.addHandler(self.handler)
        self.logger.propagate = False

    def shown(self) -> list[str]:
        return self.stream.getvalue().splitlines()


@pytest.fixture
def framework() -> Iterator[Framework]:
    made = Framework()
    yield made
    made.logger.removeHandler(made.handler)


@pytest.fixture
def unharmed_loggers() -> Iterator[None]:
    """Restores every logger of this process after a test: dictConfig disables those of others."""
    named = logging.root.manager.loggerDict.values()
    loggers = [logger for logger in named if isinstance(logger, logging.Logger)]
    before = [(logger, logger.disabled) for logger in loggers]
    yield
    for logger, disabled in before:
        logger.disabled = disabled


def test_messages_go_through_the_frameworks_handlers_once(framework: Framework) -> None:
    framework.configure()
    for _ in range(2):
        logs.show_through(framework.logger)
    logging.getLogger("moe_nvlink_plugin.integration.vllm").info("from an adapter")
    logging.getLogger("moe_nvlink_plugin.memory").debug("below the framework's level")
    assert framework.shown() == ["[framework] from an adapter"]
    assert not logging.getLogger(logs.OURS).propagate, "the root logger would have it too"


def test_a_framework_may_configure_its_logger_later_and_again(framework: Framework) -> None:
    logs.show_through(framework.logger)
    ours = logging.getLogger(logs.OURS)
    framework.configure()
    ours.info("configured")
    framework.configure(logging.ERROR)
    ours.info("configured again, for errors only")
    assert framework.shown() == ["[framework] configured"]


@pytest.mark.usefixtures("unharmed_loggers")
def test_a_configuration_that_disables_other_loggers(framework: Framework) -> None:
    """vLLM calls dictConfig in each of its processes, after it has loaded plugins; with a user's
    file, which by Python's default disables the loggers that it does not name.
    """
    ours = [logging.getLogger(logs.OURS), pool.logger]
    logs.show_through(framework.logger)
    settings = {"version": 1, "loggers": {framework.logger.name: {"level": "INFO"}}}
    logging.config.dictConfig(settings)
    framework.configure()
    assert all(logger.disabled for logger in ours), "otherwise this test shows nothing"
    logs.show_through(framework.logger)
    for logger in ours:
        logger.info(logger.name)
    assert framework.shown() == [f"[framework] {logger.name}" for logger in ours]


def test_somebody_elses_configuration_stays(framework: Framework) -> None:
    framework.configure()
    ours = logging.getLogger(logs.OURS)
    theirs = logging.NullHandler()
    ours.addHandler(theirs)
    logs.show_through(framework.logger)
    assert ours.handlers == [theirs]
    assert ours.propagate
