"""Plugin manager, which finds recipes and transports by name; a trial of a transport."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import pluggy
import torch

from moe_nvlink_plugin import env, frameworks
from moe_nvlink_plugin.config import AllToAllConfig
from moe_nvlink_plugin.errors import ConfigError, UnsupportedError
from moe_nvlink_plugin.frameworks import ENTRY_POINT_GROUP
from moe_nvlink_plugin.groups import all_or_none, as_group
from moe_nvlink_plugin.recipes import Recipe, opaque_recipe, unquantised_recipe_of
from moe_nvlink_plugin.transport import Extent, Transport

from . import builtin as builtin_plugins
from . import hookspecs


class _Named(Protocol):
    @property
    def name(self) -> str: ...


N = TypeVar("N", bound=_Named)


@functools.cache
def manager() -> pluggy.PluginManager:
    """Return the process's plugin manager, with our plugins and those of installed packages."""
    plugins = pluggy.PluginManager(hookspecs.PROJECT)
    plugins.add_hookspecs(hookspecs)
    plugins.add_hookspecs(frameworks)
    plugins.register(builtin_plugins, name="builtin")
    plugins.load_setuptools_entrypoints(ENTRY_POINT_GROUP)
    plugins.check_pending()  # raises if a plugin has a hook that we would never call
    return plugins


def _by_name(hook: Callable[[], list[list[N]]], kind: str) -> dict[str, N]:
    found: dict[str, N] = {}
    # pluggy calls the plugin first that was registered last. Here our plugins come first, so that
    # they keep their names.
    for members in reversed(hook()):
        for member in members:
            if member.name in found:
                raise ConfigError(f"two plugins provide the {kind} {member.name!r}; remove one")
            found[member.name] = member
    return found


def find_recipe(config: AllToAllConfig) -> Recipe:
    """Return the recipe that the configuration names. Local.

    Raises:
        ConfigError: no plugin provides the recipe, or it does not support config.dtype.
    """
    name = config.recipe or unquantised_recipe_of(config.dtype).name
    recipes: dict[str, Recipe] = _by_name(manager().hook.moe_nvlink_recipes, "recipe")
    recipe = recipes.get(name) or opaque_recipe(name)
    if recipe is None:
        raise ConfigError(
            f"recipe={name!r} is unknown; installed are {', '.join(sorted(recipes))}, and bytes_N "
            "for rows of N bytes, 1 to 16777216"
        )
    if config.dtype not in recipe.activation_dtypes:
        allowed = ", ".join(str(dtype) for dtype in recipe.activation_dtypes)
        raise ConfigError(f"recipe {name!r} takes activations of {allowed}, not {config.dtype}")
    return recipe


def find_transport(name: str | None, device: torch.device) -> Transport:
    """Return the transport of that name; without a name, the first that supports the device. Local.

    Raises:
        ConfigError: the name is unknown.
        UnsupportedError: no transport, or not the named one, supports the device.
    """
    transports: dict[str, Transport] = _by_name(manager().hook.moe_nvlink_transports, "transport")
    if name is not None and name not in transports:
        known = ", ".join(sorted(transports))
        raise ConfigError(f"transport={name!r} is unknown; installed are {known}")
    for transport in transports.values():
        if transport.serves(device) and name in (None, transport.name):
            return transport
    raise UnsupportedError(
        f"no installed transport serves {device} ranks"
        + (f" under the name {name!r}" if name else "")
        + f"; installed are {', '.join(sorted(transports))}: 'host' serves CPU ranks of one host, "
        "'nvlink' GPUs of one NVLink domain"
    )


def check_connected(group: Any, device: torch.device | str = "cpu") -> None:
    """Check that a transport connects these ranks. Collective; not capturable.

    The ranks map the least memory that the transport maps of each other, and unmap it. So an
    adapter can choose another backend, or refuse to start, before it loads weights.

    Args:
        group: as `MoeAllToAll.create` takes it.
        device: where this rank's tensors live.

    Raises:
        MoeNvlinkError: on every rank: no transport connects them. The message says why, and what
            to do. A rank whose own step succeeded raises PeerError.
    """
    ranks, here = as_group(group, env.first_timeout_s()), torch.device(device)
    transport = all_or_none(ranks, "finding a transport", lambda: find_transport(None, here))
    memory = transport.reserve(ranks, transport.extent_alignment, here)
    try:
        memory.extend([Extent(0, transport.extent_alignment)])
    finally:
        memory.close()
