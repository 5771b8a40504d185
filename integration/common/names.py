"""The list of a framework's names that an adapter touches, and its checks at run time.

Each adapter lists every name of its framework in its `compat` module. A test compares the list with
the framework's source, so the test finds a release that moves a name before a user does.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from moe_nvlink_plugin.errors import UnsupportedError

logger = logging.getLogger(__name__)


class Touched(NamedTuple):
    """One name of a framework, its place, and what we do with it.

    Attributes:
        module: module that has the name.
        name: dotted name in the module.
        kind: "hook": the framework made it for plugins. "subclass": we override or extend it.
            "use": we call or read it. "patch": we replace or wrap it in place.
        parameters: parameters of a function without self and cls; None: it is no function, or we
            pass on whatever we get. The framework calls hooks and subclasses, so theirs must be
            exactly these. We call the others, so these must exist, and other parameters must have
            defaults.
        device: the only device that needs the name; "": both need it.
        since: the first release that has the name. Code looks for such a name at run time, and does
            without it if it is missing.
        needed_for: "drafts": only if ranks share an MTP draft's LM head. "one draft": by one of the
            framework's draft models; code looks for it when it serves that model. "balancing": only
            if the framework's load balancer moves experts. "adapters": only with LoRA.
            "scheduling": only by our schedulers. "": always.
    """

    module: str
    name: str
    kind: str
    parameters: tuple[str, ...] | None = None
    device: str = ""
    since: str = ""
    needed_for: str = ""


class Fields(NamedTuple):
    """Attributes of one class that we read; with `since`, only if they exist."""

    module: str
    owner: str
    names: tuple[str, ...]
    since: str = ""


def methods(
    module: str, owner: str, kind: str, /, device: str = "", **methods: tuple[str, ...]
) -> list[Touched]:
    """Return the methods of one class, each with its parameters."""
    return [
        Touched(module, f"{owner}.{name}", kind, parameters, device)
        for name, parameters in methods.items()
    ]


def minor(version: str) -> str:
    """Return the minor version: "0.32" for "0.32.1+cpu"."""
    return ".".join(version.split(".")[:2])


def exists(touched: Touched) -> bool:
    """Return whether the installed framework has the name. Local; imports the name's module."""
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
    """Check that the installed framework has the names. Local.

    Args:
        needed: the names.
        framework: name of the framework, for the message.
        version: its installed version.
        install: a version that has all names.

    Raises:
        UnsupportedError: names are missing; the message lists them.
    """
    missing = [f"{one.module}.{one.name}" for one in needed if not exists(one)]
    if missing:
        raise UnsupportedError(
            f"{framework} {version} lacks names that the moe_nvlink adapter needs: "
            f"{', '.join(missing)}. Install {framework} {install}, or a newer moe-nvlink-plugin."
        )


def warn_if_untried(
    framework: str, version: str, device_type: str, tried: Sequence[str], read: Sequence[str]
) -> None:
    """Log a warning if no test has served a model with this version on such a device. Local.

    Args:
        framework: name of the framework.
        version: its installed version.
        device_type: "cpu" or "cuda".
        tried: the versions, or their beginnings ("0.32"), with which tests have served models.
        read: the releases whose source a test has compared.
    """
    if any(version == one or version.startswith(f"{one}.") for one in tried):
        return
    were = ", ".join(f"{known}.x" if known.count(".") == 1 else known for known in tried) or "none"
    logger.warning(
        "moe_nvlink has served models on %s devices with these versions of %s: %s. This is %s; "
        "the names of %s that moe_nvlink uses were compared with the sources of %s. Check outputs "
        "before you rely on them.",
        device_type,
        framework,
        were,
        version,
        framework,
        ", ".join(read),
    )
