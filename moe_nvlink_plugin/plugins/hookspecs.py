"""What a plugin of this package can add. Implement these in a module or object marked with
`pluggy.HookimplMarker("moe_nvlink")` and name it in the entry point group `moe_nvlink.plugins`.
"""

from __future__ import annotations

import pluggy

from moe_nvlink_plugin.recipes import Recipe
from moe_nvlink_plugin.transport import Transport

PROJECT = "moe_nvlink"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def moe_nvlink_recipes() -> list[Recipe]:  # type: ignore[empty-body]
    """Formats that may travel; a name that is taken already is refused."""


@hookspec
def moe_nvlink_transports() -> list[Transport]:  # type: ignore[empty-body]
    """Ways to reach peers' memory; the first that serves a device is its default."""
