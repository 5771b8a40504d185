"""What a selected part of vLLM's tests is."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType


class Device(enum.Enum):
    """Where a group's ranks run."""

    CPU = "cpu"
    GPU = "gpu"


class Plugin(enum.Enum):
    """What a group shows about our plugin."""

    SELECTED = "selected"  #: the tests run through our backend
    INSTALLED = "installed"  #: the plugin is loaded, our backend is not chosen
    COMPARED = "compared"  #: each outcome with the plugin installed is the one without it


@dataclass(frozen=True)
class Group:
    """Some of vLLM's tests, run by one pytest process (COMPARED: by two, one after the other).

    `arguments` and `fast` are pytest's: paths below the unpacked source distribution, node ids,
    options. `fast` is what the fast subset runs of this group; empty: nothing. `adapters` are
    modules of `adapt`, loaded by name before anything of vLLM is collected, in this order; a
    COMPARED group can have none.
    """

    name: str  #: of the group's section in the expectations files
    title: str  #: of its row in the table of integration/README.md
    arguments: tuple[str, ...]
    plugin: Plugin = Plugin.SELECTED
    devices: frozenset[Device] = frozenset({Device.CPU, Device.GPU})
    adapters: tuple[str, ...] = ()
    fast: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    test_timeout_s: int = 300  #: for one test
    gpus: int = 1  #: fewer, and the group is left out on GPUs

    def __post_init__(self) -> None:
        if self.plugin is Plugin.COMPARED and self.adapters:
            raise ValueError(
                f"group {self.name!r} is compared with a run in which our package is hidden, "
                f"so it can have no adapters of ours: {', '.join(self.adapters)}"
            )
