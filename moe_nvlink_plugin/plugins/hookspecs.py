"""Hooks for plugins of this package.

Implement them in a module or object, mark them with `pluggy.HookimplMarker("moe_nvlink")`, and name
the module or object in the entry point group `moe_nvlink.plugins`. `frameworks` has one more hook,
for adapters.
"""

from __future__ import annotations

from moe_nvlink_plugin.frameworks import PROJECT, hookimpl, hookspec
from moe_nvlink_plugin.recipes import Recipe
from moe_nvlink_plugin.transport import Transport

__all__ = ["PROJECT", "hookimpl", "hookspec"]


@hookspec
def moe_nvlink_recipes() -> list[Recipe]:  # type: ignore[empty-body]
    """Return the plugin's recipes. If two plugins provide one name, looking it up raises."""


@hookspec
def moe_nvlink_transports() -> list[Transport]:  # type: ignore[empty-body]
    """Return the plugin's transports. The first that supports a device is its default."""
