"""The plugin manager: finds recipes and transports by name."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Protocol, TypeVar

import pluggy
import torch

from moe_nvlink_plugin.config import AllToAllConfig
from moe_nvlink_plugin.errors import ConfigError, UnsupportedError
from moe_nvlink_plugin.recipes import Recipe, unquantised_recipe_of
from moe_nvlink_plugin.transport import Transport

from . import builtin as builtin_plugins
from . import hookspecs

ENTRY_POINT_GROUP = "moe_nvlink.plugins"


class _Named(Protocol):
    @property
    def name(self) -> str: ...


N = TypeVar("N", bound=_Named)


@functools.cache
def manager() -> pluggy.PluginManager:
    """The process's plugin manager, with our plugins and those of installed packages."""
    plugins = pluggy.PluginManager(hookspecs.PROJECT)
    plugins.add_hookspecs(hookspecs)
    plugins.register(builtin_plugins, name="builtin")
    plugins.load_setuptools_entrypoints(ENTRY_POINT_GROUP)
    plugins.check_pending()  # a hook by a name we do not have would never be called: refused
    return plugins


def _by_name(hook: Callable[[], list[list[N]]], kind: str) -> dict[str, N]:
    found: dict[str, N] = {}
    # pluggy calls the plugin registered last first; ours come first here, so that a name is ours
    # to keep and the error names the newcomer.
    for members in reversed(hook()):
        for member in members:
            if member.name in found:
                raise ConfigError(f"two plugins provide the {kind} {member.name!r}; remove one")
            found[member.name] = member
    return found


def find_recipe(config: AllToAllConfig) -> Recipe:
    """The recipe a configuration asks for.

    Raises:
        ConfigError: no plugin provides it, or it does not go with config.dtype.
    """
    name = config.recipe or unquantised_recipe_of(config.dtype).name
    recipes: dict[str, Recipe] = _by_name(manager().hook.moe_nvlink_recipes, "recipe")
    if name not in recipes:
        raise ConfigError(f"recipe={name!r} is unknown; installed are {', '.join(sorted(recipes))}")
    recipe = recipes[name]
    if config.dtype not in recipe.activation_dtypes:
        allowed = ", ".join(str(dtype) for dtype in recipe.activation_dtypes)
        raise ConfigError(f"recipe {name!r} takes activations of {allowed}, not {config.dtype}")
    return recipe


def find_transport(name: str | None, device: torch.device) -> Transport:
    """The transport of that name, or the first that serves the device.

    Raises:
        ConfigError: the name is unknown.
        UnsupportedError: no transport serves the device.
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
