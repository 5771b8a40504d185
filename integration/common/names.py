"""The names of a framework that an adapter touches, and the checks of them at run time.

`own_source` reads them off the adapter's source; its `compat` module lists what no reader sees. A
test compares both with the framework's source, so the test finds a release that moves a name before
a user does.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from moe_nvlink_plugin.errors import UnsupportedError

logger = logging.getLogger(__name__)


class Call(NamedTuple):
    """Arguments that we pass: how many by position, and the names of the others."""

    positional: int
    keywords: tuple[str, ...] = ()


class Signature(NamedTuple):
    """Parameters of a function, without self and cls.

    Attributes:
        names: the names.
        positional: how many of them may be given by position; these come first.
        optional: those with a default.
        takes_more: whether it has *args, and whether it has **kwargs.
    """

    names: tuple[str, ...]
    positional: int
    optional: frozenset[str] = frozenset()
    takes_more: tuple[bool, bool] = (False, False)


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
        why: what for: our module, and what it is or does with the name.
        signature: the method of ours that overrides it; its parameters may then be fewer.
        calls: how we call it.
    """

    module: str
    name: str
    kind: str
    parameters: tuple[str, ...] | None = None
    device: str = ""
    since: str = ""
    needed_for: str = ""
    why: str = ""
    signature: Signature | None = None
    calls: tuple[Call, ...] = ()


class Fields(NamedTuple):
    """Attributes of one class that we read; with `since`, only if they exist."""

    module: str
    owner: str
    names: tuple[str, ...]
    since: str = ""


def use(module: str, *names: str, kind: str = "use", since: str = "") -> tuple[Touched, ...]:
    """Return names of one module, each a dotted name, with "(a, b)" if it is a function. Local."""
    found = []
    for text in names:
        name, is_function, rest = text.partition("(")
        parameters = tuple(filter(None, rest.removesuffix(")").replace(" ", "").split(",")))
        found.append(Touched(module, name, kind, parameters if is_function else None, since=since))
    return tuple(found)


def hook(module: str, *names: str) -> tuple[Touched, ...]:
    """Return names that the framework made for plugins, as `use` does. Local."""
    return use(module, *names, kind="hook")


def patch(module: str, name: str, why: str) -> tuple[Touched, ...]:
    """Return a name that we replace in place, and what for. Local."""
    return tuple(one._replace(why=why) for one in use(module, name, kind="patch"))


def fields(table: Mapping[str, str], since: str = "") -> list[Fields]:
    """Return what a table "module:Class" -> "attribute attribute" says. Local."""
    found = []
    for owner, attributes in table.items():
        module, _, name = owner.partition(":")
        found.append(Fields(module, name, tuple(attributes.split()), since))
    return found


def minor(version: str) -> str:
    """Return the minor version: "0.32" for "0.32.1+cpu"."""
    return ".".join(version.split(".")[:2])


def find(touched: Touched) -> Any:
    """Return what the installed framework has under the name. Local; imports the name's module.

    Raises:
        ImportError: there is no such module.
        AttributeError: the module has no such name.
    """
    module = importlib.import_module(touched.module)
    return functools.reduce(getattr, touched.name.split("."), module)


def exists(touched: Touched) -> bool:
    """Return whether the installed framework has the name. Local; imports the name's module."""
    try:
        find(touched)
    except (ImportError, AttributeError):
        return False
    return True


def require(needed: Iterable[Touched], framework: str, version: str, install: str) -> None:
    """Check that the installed framework has the names. Local.

    Args:
        needed: the names.
        framework: name of the framework, for the message.
        version: its installed version.
        install: a version that has all names.

    Raises:
        UnsupportedError: names are missing; the message lists them, each with what needs it.
    """
    reasons = {f"{one.module}.{one.name}": one.why for one in needed if not exists(one)}
    if reasons:
        listed = "".join(f"\n  - {name}, for {why}" for name, why in reasons.items())
        raise UnsupportedError(
            f"{framework} {version} lacks names that the moe_nvlink adapter needs:{listed}\n"
            f"Install {framework} {install}, or a newer moe-nvlink-plugin."
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


def table(touched: Iterable[Touched], read: Iterable[Fields]) -> str:
    """Return every name as lines of text: kind, name, what for; patches first. Local.

    Args:
        touched: the names.
        read: the fields that objects of the framework are asked for.
    """
    order = ("patch", "hook", "subclass", "use")
    lines = {
        (order.index(one.kind), f"{one.kind:9} {one.module}.{one.name}", one.why) for one in touched
    }
    told = [f"{name}\n{'':10}{why}" for _, name, why in sorted(lines)]
    told += [f"{'field':9} {one.module}.{one.owner}: {', '.join(one.names)}" for one in read]
    return "\n".join(told)
