"""What an adapter refuses at start-up: how it says so, and the limits that the exchange has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from moe_nvlink_plugin import AllToAllConfig, MoeAllToAll
from moe_nvlink_plugin.errors import ConfigError, UnsupportedError

from .options import AUTO, UNQUANTISED, Options, Wording

#: Devices whose ranks a transport of ours serves.
DEVICES = ("cpu", "cuda")


def refuse(problems: Iterable[str], version: str, wording: Wording) -> None:
    """Raise UnsupportedError that lists all problems; return if there is none. Local.

    Args:
        problems: one sentence each, with the flag to change.
        version: version of the framework.
        wording: words of the framework's messages.
    """
    listed = "".join(f"\n  - {problem}" for problem in problems)
    if listed:
        raise UnsupportedError(
            f"{wording.flag} cannot serve this configuration "
            f"({wording.framework} {version}):{listed}\n"
            f"Change what is listed, or drop the flag to let {wording.framework} use its own "
            "backend."
        )


def device(device_type: str) -> Iterator[str]:
    """Yield a problem if no transport serves ranks on such a device. Local."""
    if device_type not in DEVICES:
        yield (
            f"device {device_type}: the exchange has transports for {' and '.join(DEVICES)} ranks. "
            "Drop the flag."
        )


def exchange(model: str, options: Options, **sizes: Any) -> Iterator[str]:
    """Yield what the exchange itself refuses, before any worker has started. Local.

    Args:
        model: name of the model.
        options: what the user chose.
        sizes: fields of AllToAllConfig, except those that `options` decides.
    """
    named = options.dispatch not in (AUTO, UNQUANTISED)
    try:
        # What "auto" becomes is known only when the experts are chosen.
        recipe = options.dispatch if named else None
        config = AllToAllConfig(
            ep_rank=0, combine=options.combine, recipe=recipe, tuning=options.tuning, **sizes
        )
        MoeAllToAll.check(config)
    except ConfigError as error:
        also = f" (dispatch may also be {AUTO} or {UNQUANTISED})" if named else ""
        yield f"the exchange cannot serve {model}: {error}{also}."


def several_cpu_hosts(device_type: str, nnodes: int) -> Iterator[str]:
    """Yield a problem if CPU ranks are on several hosts, because they share one host's memory.

    Local. GPUs of several hosts may be in one NVLink domain: the transport checks, and refuses
    others.
    """
    if device_type == "cpu" and nnodes > 1:
        yield (
            f"CPU ranks on several hosts: --nnodes is {nnodes}, set it to 1; the host "
            "transport is shared memory."
        )
