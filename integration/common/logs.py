"""Shows our log messages where a framework shows its own."""

from __future__ import annotations

import logging

#: The logger above every logger of ours.
OURS = "moe_nvlink_plugin"


def show_through(framework: logging.Logger) -> None:
    """Gives our logger the handlers and the level of a framework's logger. Local, idempotent.

    A framework gives handlers to its own logger only. Of other loggers Python prints warnings
    without a format, and drops the rest. If the framework's logger has no handlers, or ours has
    some, somebody has configured logging otherwise, and nothing changes here.
    """
    ours = logging.getLogger(OURS)
    if ours.handlers or not framework.handlers:
        return
    for handler in framework.handlers:
        ours.addHandler(handler)
    ours.setLevel(framework.level)
    ours.propagate = False  # the root logger would print each message a second time
