"""Recipes and transports of this package, through the hooks that third-party plugins use."""

from __future__ import annotations

from moe_nvlink_plugin.recipes import BUILT_IN, Recipe
from moe_nvlink_plugin.transport import Transport
from moe_nvlink_plugin.transport.host import HostTransport
from moe_nvlink_plugin.transport.nvlink import NvlinkTransport

from .hookspecs import hookimpl


@hookimpl
def moe_nvlink_recipes() -> list[Recipe]:
    """Return the recipes of this package."""
    return list(BUILT_IN)


@hookimpl
def moe_nvlink_transports() -> list[Transport]:
    """Return host and nvlink."""
    return [HostTransport(), NvlinkTransport()]
