"""Which host a process runs on, and with which processes it can share memory."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from moe_nvlink_plugin.errors import UnsupportedError

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
#: Where Linux keeps POSIX shared memory objects.
SHARED_MEMORY = Path("/dev/shm")


class Host(NamedTuple):
    """The place of one process. Processes of equal boot and shared_memory can share memory.

    Attributes:
        boot: boot id of Linux. If a sandbox hides it: the name of the host.
        shared_memory: device and inode of /dev/shm. Containers of one host may each have their own.
        name: name of the host, for messages. Two hosts may have the same.
    """

    boot: str
    shared_memory: str
    name: str


def boot_id() -> str:
    """Return what tells this host from others: the boot id, or the name of the host. Local."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:  # a sandbox that hides it
        return socket.gethostname()


def here() -> Host:
    """Return the place of this process. Local."""
    try:
        found = os.stat(SHARED_MEMORY)
        shared_memory = f"{found.st_dev}:{found.st_ino}"
    except OSError:  # the error comes when this rank creates memory there
        shared_memory = ""
    return Host(boot_id(), shared_memory, socket.gethostname())


def check_shared(ranks: Mapping[int, Host]) -> None:
    """Check that all ranks can share memory. Local; every rank gets the same result from `ranks`.

    Args:
        ranks: rank -> its place.

    Raises:
        UnsupportedError: they are on several hosts, or see several /dev/shm of one host; names the
            ranks of each.
    """
    by_host = _by({rank: (host.boot, host.name) for rank, host in ranks.items()})
    if len({host.boot for host in ranks.values()}) > 1:
        where = "; ".join(
            f"{_ranks(found)} on {name} (boot id {boot})" for (boot, name), found in by_host.items()
        )
        raise UnsupportedError(
            f"the CPU ranks are on several hosts, and their transport is the shared memory of one "
            f"host: {where}. Start all ranks on one host"
        )
    views = _by({rank: (host.shared_memory, "") for rank, host in ranks.items()})
    if len(views) > 1:
        raise UnsupportedError(
            f"the CPU ranks are on one host ({next(iter(ranks.values())).name}) and see different "
            f"{SHARED_MEMORY}: {'; '.join(_ranks(found) for found in views.values())}. "
            "Let their containers share "
            "it (docker: --ipc=host, or --ipc=container:NAME; Kubernetes: one volume of medium "
            f"Memory at {SHARED_MEMORY})"
        )


def _by(places: dict[int, tuple[str, str]]) -> dict[tuple[str, str], list[int]]:
    """Return place -> its ranks."""
    found: dict[tuple[str, str], list[int]] = {}
    for rank, place in places.items():
        found.setdefault(place, []).append(rank)
    return found


def _ranks(numbers: Sequence[int]) -> str:
    listed = ", ".join(map(str, numbers))
    return f"rank {listed}" if len(numbers) == 1 else f"ranks {listed}"
