"""What this package's tools and messages tell of the frameworks that it serves; it names none.

A framework's adapter says it by the hook `moe_nvlink_frameworks`. Ours do in `FOLDER.frameworks`;
those of others, in the entry point group `moe_nvlink.plugins`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import logging
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pluggy

from . import env

PROJECT = "moe_nvlink"
ENTRY_POINT_GROUP = "moe_nvlink.plugins"
#: The porch, which need not be installed.
FOLDER = f"{__package__}.integration"

#: Keys of `Framework.advice`: how its users get a smaller workspace, more room on the GPU, and an
#: exchange without us; how its servers take `retry` from `watch`.
CAPACITY, GPU_MEMORY, ANOTHER_BACKEND = "capacity", "GPU memory", "another backend"
FAULT_TOLERANCE = "fault tolerance"
#: What its users call for `renew` after a release.
RESTORE = "restore"
#: Keys without a text: it binds a rank to one NUMA node; its servers have metrics for `top`.
BINDS_RANKS, METRICS = "binds ranks", "metrics"


class Finding(NamedTuple):
    """Answer to one question: what was found, or the error, which says what to do."""

    text: str = ""
    error: str = ""


@dataclasses.dataclass(frozen=True)
class Framework:
    """What is told of one framework.

    Attributes:
        name: as it writes its name.
        distributions: those that a report gives with their versions.
        entry_point_groups: where it finds plugins.
        one_of: group of which it takes one plugin -> what decides.
        variables: variable of `env.VARIABLES` that only adapters read -> ""; one that means
            something else with this framework -> what.
        advice: what its users can do; see the keys above.
        look: takes the versions of installed distributions, and returns whether our adapter would
            work; None without the framework. It must not import the framework.
    """

    name: str
    distributions: tuple[str, ...] = ()
    entry_point_groups: tuple[str, ...] = ()
    one_of: Mapping[str, str] = dataclasses.field(default_factory=dict)
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)
    advice: Mapping[str, str] = dataclasses.field(default_factory=dict)
    look: Callable[[Mapping[str, str]], Finding | None] | None = None


logger = logging.getLogger(__name__)

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def moe_nvlink_frameworks() -> list[Framework]:  # type: ignore[empty-body]
    """Return the frameworks that the plugin serves. It must be cheap, and import none of them."""


@functools.cache
def installed() -> tuple[Framework, ...]:
    """Return the frameworks that adapters here serve; ours come first. Local."""
    plugins = pluggy.PluginManager(PROJECT)
    plugins.add_hookspecs(sys.modules[__name__])
    # pluggy calls the plugin first that was registered last. A plugin that fails is none here:
    # whoever looks for transports and recipes says so.
    with contextlib.suppress(Exception):
        plugins.load_setuptools_entrypoints(ENTRY_POINT_GROUP)
    if importlib.util.find_spec(FOLDER) is not None:
        plugins.register(importlib.import_module(f"{FOLDER}.frameworks"), name="builtin")
    found: list[Framework] = []
    for one in reversed(plugins.hook.moe_nvlink_frameworks.get_hookimpls()):
        try:
            members: Any = one.function()
            found += members
        except Exception:
            # Error messages of ours come here, and must not end in a plugin's mistake.
            logger.warning("moe_nvlink: the plugin %s names no framework", one.plugin_name)
    return tuple(found)


def named(what: str) -> str:
    """Return "one" or "one and another": the frameworks with such an advice; "" if none. Local."""
    return " and ".join(one.name for one in installed() if what in one.advice)


def advice(what: str) -> str:
    """Return " (one: ITS ADVICE, another: ...)"; "" if no framework has such an advice. Local."""
    told = [f"{one.name}: {one.advice[what]}" for one in installed() if what in one.advice]
    return f" ({', '.join(told)})" if told else ""


def variables() -> dict[str, tuple[str, str]]:
    """Return `env.VARIABLES`, with what the frameworks add to the meanings. Local."""
    table = {}
    for name, (default, meaning) in env.VARIABLES.items():
        notes = {one.name: one.variables[name] for one in installed() if name in one.variables}
        alone = ", ".join(framework for framework, note in notes.items() if not note)
        told = "; ".join([meaning, *filter(None, notes.values())])
        table[name] = (default, f"{alone}: {told}" if alone else told)
    return table
