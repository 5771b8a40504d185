"""What an adapter's list of the framework's names is made of, and what is asked of it at run time.

Each adapter lists every name of its framework in its `compat` module. A test holds the list against
the framework's source, so that a release that moves a name is found before a user meets it.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from moe_nvlink_plugin.errors import UnsupportedError

logger = logging.getLogger(__name__)


class Touched(NamedTuple):
    """One name of a framework: where it lives and what we do with it.

    kind: "hook": made for plugins; "subclass": overridden or extended; "use": called or read;
    "patch": replaced or wrapped in place.
    parameters: of a function, self and cls left out. For a hook or subclass the framework calls us,
    so its own must be exactly these; for the rest we call, so these must be taken and all others
    must have defaults. None: not a function, or one we pass on as it comes.
    device: the only device that needs the name, "" for both. since: the first release that has it;
    a name with it is looked for at run time, and done without where it is missing. needed_for:
    "drafts": needed only where ranks share an MTP draft's LM head; "one draft": by one of the
    framework's draft models, and looked for when that model is served.
    """

    module: str
    name: str
    kind: str
    parameters: tuple[str, ...] | None = None
    device: str = ""
    since: str = ""
    needed_for: str = ""


class Fields(NamedTuple):
    """Attributes of one class that we read; those with `since` only where they exist."""

    module: str
    owner: str
    names: tuple[str, ...]
    since: str = ""


def methods(
    module: str, owner: str, kind: str, /, device: str = "", **methods: tuple[str, ...]
) -> list[Touched]:
    """Methods of one class, each with its parameters."""
    return [
        Touched(module, f"{owner}.{name}", kind, parameters, device)
        for name, parameters in methods.items()
    ]


def minor(version: str) -> str:
    """ "0.32" of "0.32.1+cpu"."""
    return ".".join(version.split(".")[:2])


def exists(touched: Touched) -> bool:
    """Whether the installed framework has the name. Local; imports its module."""
    try:
        found: object = importlib.import_module(touched.module)
    except ImportError:
        return False
    for part in touched.name.split("."):
        if not hasattr(found, part):
            return False
        found = getattr(found, part)
    return True


def require(needed: Iterable[Touched], framework: str, version: str, install: str) -> None:
    """Raises UnsupportedError that lists what the installed framework lacks. Local.

    framework, version: of the installed one; install: a version that has all names.
    """
    missing = [f"{one.module}.{one.name}" for one in needed if not exists(one)]
    if missing:
        raise UnsupportedError(
            f"{framework} {version} lacks what the moe_nvlink adapter stands on: "
            f"{', '.join(missing)}. Install {framework} {install}, or a newer moe-nvlink-plugin."
        )


def warn_if_untried(
    framework: str, version: str, device_type: str, tried: Sequence[str], read: Sequence[str]
) -> None:
    """Logs a warning if no test has served a model with this version on such a device. Local.

    tried: the versions that tests have served models with there, as beginnings ("0.32"); read:
    those whose source a test has compared.
    """
    if any(version == one or version.startswith(f"{one}.") for one in tried):
        return
    were = ", ".join(f"{known}.x" if known.count(".") == 1 else known for known in tried) or "none"
    logger.warning(
        "moe_nvlink has served models on %s devices with these versions of %s: %s. This is %s; "
        "the names it uses were compared with the sources of %s. Check outputs before you rely on "
        "it.",
        device_type,
        framework,
        were,
        version,
        ", ".join(read),
    )
