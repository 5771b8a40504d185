"""Our messages in a framework's log."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest

from moe_nvlink_plugin.integration.common import logs


@pytest.fixture
def framework() -> Iterator[logging.Logger]:
    """A framework's logger, whose handler writes with a format of its own."""
    logger = logging.getLogger("some_framework")
    logger.setLevel(logging.INFO)
    handler = logging.StreamHandler(io.StringIO())
    handler.setFormatter(logging.Formatter("[framework] %(message)s"))
    logger.addHandler(handler)
    yield logger
    logger.removeHandler(handler)


def shown(framework: logging.Logger) -> list[str]:
    (handler,) = framework.handlers
    assert isinstance(handler, logging.StreamHandler)
    return str(handler.stream.getvalue()).splitlines()


def test_messages_go_through_the_frameworks_handlers_once(
    framework: logging.Logger, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        logs.show_through(framework)
    logging.getLogger("moe_nvlink_plugin.integration.vllm").info("from an adapter")
    logging.getLogger("moe_nvlink_plugin.memory").debug("below the framework's level")
    assert shown(framework) == ["[framework] from an adapter"]
    assert caplog.text == "", "the root logger has it too"


def test_somebody_elses_configuration_stays(framework: logging.Logger) -> None:
    ours = logging.getLogger(logs.OURS)
    theirs = logging.NullHandler()
    ours.addHandler(theirs)
    logs.show_through(framework)
    assert ours.handlers == [theirs]
    assert ours.propagate


def test_a_framework_without_handlers_changes_nothing() -> None:
    ours = logging.getLogger(logs.OURS)
    logs.show_through(logging.getLogger("a_framework_that_configured_nothing"))
    assert ours.handlers == []
    assert ours.propagate


def test_every_logger_of_ours_is_below_the_one_that_is_shown() -> None:
    from moe_nvlink_plugin.integration.common import draft_head, pool, watch

    for module in (draft_head, pool, watch):
        assert module.logger.name.startswith(f"{logs.OURS}.")
