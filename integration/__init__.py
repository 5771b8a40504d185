"""Adapters for serving frameworks; nothing in the package imports them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def overrides(method: F) -> F:
    """Mark a method of ours that a framework declares, so that `common.own_source` finds it. Local.

    Our class extends the framework's, or stands in its place. The method then has the framework's
    parameters, and perhaps more with defaults. It stands here because an adapter that is installed
    and not used loads this module and not `common`.
    """
    return method
