"""How recipes and transports are found. A plugin marks its hooks with `hookimpl`."""

from __future__ import annotations

from .hookspecs import hookimpl
from .manager import find_recipe, find_transport

__all__ = ["find_recipe", "find_transport", "hookimpl"]
