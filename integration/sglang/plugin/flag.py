"""Our name on SGLang's command line."""

from __future__ import annotations

import argparse
import logging
from typing import Any

from moe_nvlink_plugin.integration.sglang.backend import BACKEND, DRAFT_FIELD, TARGET_FIELD

logger = logging.getLogger(__name__)


def add_choice(result: Any, parser: argparse.ArgumentParser) -> None:
    """Let two flags take our name too, after ``ServerArgs.add_cli_args``. Local; idempotent.

    If a later SGLang has moved a flag, this function logs an error, and SGLang refuses our name. An
    exception would end SGLang also for users who have not chosen our backend.

    Args:
        result: result of the hooked function, which stays as it is.
        parser: SGLang's parser.
    """
    found = {action.dest: action for action in parser._actions}
    for field in (TARGET_FIELD, DRAFT_FIELD):
        choices = getattr(found.get(field), "choices", None)
        if choices is None:
            logger.error(
                "This SGLang has no choices for --%s: %s is not available. Install a newer "
                "moe-nvlink-plugin.",
                field.replace("_", "-"),
                BACKEND,
            )
        elif BACKEND not in choices:
            # A list of its own: SGLang's belongs to its class.
            found[field].choices = [*choices, BACKEND]
