"""Shows our log messages where a framework shows its own."""

from __future__ import annotations

import logging

#: The logger above every logger of ours.
OURS = "moe_nvlink_plugin"


class _Through(logging.Handler):
    """Passes each record to a framework's logger, which has the handlers and the level."""

    def __init__(self, framework: logging.Logger) -> None:
        super().__init__()
        self._framework = framework

    def emit(self, record: logging.LogRecord) -> None:
        if self._framework.isEnabledFor(record.levelno):
            self._framework.handle(record)


def show_through(framework: logging.Logger) -> None:
    """Send our messages through a framework's logger. Local; idempotent.

    A framework configures its own logger only. Of other loggers Python prints warnings without a
    format, and drops the rest. Call this function again after the framework has configured its
    logger, because `logging.config.dictConfig` may disable every logger that it does not name. If
    our logger already has a handler, this function does not change its handlers or its level.
    """
    ours = logging.getLogger(OURS)
    for name, logger in logging.root.manager.loggerDict.items():
        if isinstance(logger, logging.Logger) and f"{name}.".startswith(f"{OURS}."):
            logger.disabled = False
    if ours.handlers:
        return
    ours.addHandler(_Through(framework))
    ours.setLevel(logging.DEBUG)  # the framework's level decides
    ours.propagate = False  # the root logger would print each message a second time
