"""The groups of vLLM's tests that `groups.yaml` selects."""

from __future__ import annotations

import enum
import functools
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path

import pydantic
import yaml
from pydantic.dataclasses import dataclass

FILE = Path(__file__).with_name("groups.yaml")


class Plugin(enum.Enum):
    """What a group shows about our plugin; `groups.yaml` explains the three words."""

    SELECTED = "selected"
    INSTALLED = "installed"
    COMPARED = "compared"


@dataclass(frozen=True, config=pydantic.ConfigDict(extra="forbid"))
class Group:
    """Tests that one pytest process runs (COMPARED: two processes). Keys as in `groups.yaml`."""

    name: str
    title: str
    arguments: tuple[str, ...]
    plugin: Plugin = Plugin.SELECTED
    adapters: tuple[str, ...] = ()
    fast: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    test_timeout_s: int = 300

    def __post_init__(self) -> None:
        if self.plugin is Plugin.COMPARED and self.adapters:
            raise ValueError(
                f"group {self.name!r} is compared with a run in which our package is hidden, "
                f"so it can have no adapters of ours: {', '.join(self.adapters)}"
            )


@functools.cache
def all_groups() -> tuple[Group, ...]:
    """Every group, in the order in which groups run and are reported."""
    entries = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    return tuple(Group(name=name, **entry) for name, entry in entries.items())
