"""Search for recipes and transports; a trial of one. A plugin marks its hooks with `hookimpl`."""

from __future__ import annotations

from moe_nvlink_plugin.frameworks import ENTRY_POINT_GROUP

from .hookspecs import hookimpl
from .registry import check_connected, find_recipe, find_transport, manager

__all__ = [
    "ENTRY_POINT_GROUP",
    "check_connected",
    "find_recipe",
    "find_transport",
    "hookimpl",
    "manager",
]
