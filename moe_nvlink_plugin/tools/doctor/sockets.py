"""Where CPU ranks of this process would run, and where their shared memory would lie."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import re
from collections.abc import Iterator
from pathlib import Path

from moe_nvlink_plugin.errors import MoeNvlinkError

_SYSTEM = Path("/sys")
_PROCESS = Path("/proc/self")
_SHMEM_ENABLED = "kernel/mm/transparent_hugepage/shmem_enabled"
_TRIAL_BYTES = 2**22
_RESERVED = "kernel/mm/hugepages/hugepages-2048kB/nr_hugepages"


@dataclasses.dataclass(frozen=True)
class Sockets:
    """Cores, NUMA nodes and huge pages.

    Attributes:
        cores: cores on which this process may run.
        nodes: NUMA nodes of these cores; empty if Linux does not say.
        num_nodes: NUMA nodes of the machine that have cores.
        memory_nodes: nodes of a trial of shared memory; empty if Linux does not say.
        huge_bytes: bytes of that trial in huge pages.
        trial_bytes: bytes of the trial; 0: there was none.
        shmem_enabled: Linux's setting of huge pages for shared memory; "" if it has none.
        reserved_pages: huge pages of 2 MiB reserved for hugetlbfs, which this package does not use.
        error: why there was no trial; "" if there was one.
    """

    cores: tuple[int, ...] = ()
    nodes: tuple[int, ...] = ()
    num_nodes: int = 0
    memory_nodes: tuple[int, ...] = ()
    huge_bytes: int = 0
    trial_bytes: int = 0
    shmem_enabled: str = ""
    reserved_pages: int = 0
    error: str = ""


def look(system: Path = _SYSTEM) -> Sockets:
    """Ask Linux, and make a trial of shared memory. Local; raises nothing.

    Args:
        system: where sysfs is mounted.
    """
    cores = os.sched_getaffinity(0)
    of_node = dict(_cores_of_nodes(system))
    setting = re.search(r"\[(\w+)\]", _text(system / _SHMEM_ENABLED))
    found = Sockets(
        cores=tuple(sorted(cores)),
        nodes=tuple(sorted(node for node, its_cores in of_node.items() if its_cores & cores)),
        num_nodes=sum(map(bool, of_node.values())),
        shmem_enabled=setting[1] if setting else "",
        reserved_pages=int(_text(system / _RESERVED) or 0),
    )
    try:
        nodes, huge_bytes = _trial()
    except MoeNvlinkError as error:
        return dataclasses.replace(found, error=str(error))
    except Exception as error:  # a broken torch may raise anything
        return dataclasses.replace(found, error=f"{type(error).__name__}: {error}")
    return dataclasses.replace(
        found, memory_nodes=nodes, huge_bytes=huge_bytes, trial_bytes=_TRIAL_BYTES
    )


def from_json(values: dict[str, object]) -> Sockets:
    """Return the Sockets that dataclasses.asdict and JSON have made `values` of."""
    lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    return Sockets(**{**values, **lists})  # type: ignore[arg-type]


def _text(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text("utf-8", "replace").strip()  # whatever the locale
    return ""


def _cores_of_nodes(system: Path) -> Iterator[tuple[int, set[int]]]:
    for path in (system / "devices/system/node").glob("node[0-9]*"):
        runs = re.findall(r"(\d+)(?:-(\d+))?", _text(path / "cpulist"))
        cores = {core for a, b in runs for core in range(int(a), int(b or a) + 1)}
        yield int(path.name.removeprefix("node")), cores


def _trial() -> tuple[tuple[int, ...], int]:
    """Make shared memory as a CPU rank does; return its nodes and its bytes in huge pages."""
    import torch

    from moe_nvlink_plugin.testing import ThreadGroup
    from moe_nvlink_plugin.transport import Extent
    from moe_nvlink_plugin.transport.host import HostTransport

    size = _TRIAL_BYTES
    memory = HostTransport().reserve(ThreadGroup.ranks(1)[0], size, torch.device("cpu"))
    try:
        memory.extend([Extent(0, size)])
        # If a huge page is refused, Linux maps a page when it is first read.
        ctypes.string_at(memory.base_ptr, size)
        return seen(memory.base_ptr, _PROCESS)
    finally:
        memory.close()


def seen(address: int, process: Path) -> tuple[tuple[int, ...], int]:
    """Return the NUMA nodes and the bytes in huge pages of the mapping that starts at an address.

    Args:
        address: the mapping's first byte.
        process: the directory of the process in /proc.
    """
    pages = re.search(rf"^0*{address:x} .*$", _text(process / "numa_maps"), re.MULTILINE)
    nodes = re.findall(r" N(\d+)=\d+", pages[0]) if pages else []
    mapping = rf"^0*{address:x}-.*?^ShmemPmdMapped: +(\d+) kB"
    huge = re.search(mapping, _text(process / "smaps"), re.MULTILINE | re.DOTALL)
    return tuple(sorted(map(int, nodes))), 1024 * int(huge[1]) if huge else 0
