"""Which GPUs the ranks use, and how these GPUs can share memory: gather, compare, decide."""

from __future__ import annotations

import dataclasses
import enum
import logging
import os
import socket
from collections.abc import Sequence

from moe_nvlink_plugin import driver, env, frameworks
from moe_nvlink_plugin.errors import DriverError, UnsupportedError

from . import hosts, vmm

logger = logging.getLogger(__name__)


def _instead() -> str:
    other = frameworks.advice(frameworks.ANOTHER_BACKEND)
    return f"or exchange over NCCL{other}, or across NVLink domains with DeepEP"


class Link(enum.Enum):
    """Connection from one GPU to another GPU that this process sees."""

    NVLINK = "NVLink"
    PCIE = "PCIe"  # peer to peer, but without atomics
    NONE = "no peer-to-peer access"


@dataclasses.dataclass(frozen=True)
class Facts:
    """Facts about one rank and its GPU, which every rank gets.

    Attributes:
        host: boot id of Linux and network namespace. If two processes have the same, they can pass
            descriptors to each other; abstract socket names belong to a network namespace.
        host_name: name of the host, for messages.
        index: ordinal of the GPU in the rank's process.
        name: name that the driver gives the GPU.
        uuid: 32 hexadecimal digits, equal in every process.
        capability: compute capability, (major, minor).
        is_mig: whether the device is a MIG slice.
        posix: whether memory can be shared through file descriptors.
        fabric_error: why memory cannot be shared through FABRIC handles; "" if it can.
        fabric_trial: a FABRIC handle of this rank that the other ranks try; None if there is none.
        links: uuid of each other GPU that the rank's process sees -> connection to it.
        process: namespace of process ids, and process id. Threads of one process have the same; no
            two processes of a machine do.
        allow_shared_gpu: MOE_NVLINK_ALLOW_SHARED_GPU.
    """

    host: str
    host_name: str
    index: int
    name: str
    uuid: str
    capability: tuple[int, int]
    is_mig: bool
    posix: bool
    fabric_error: str
    fabric_trial: bytes | None
    links: dict[str, Link]
    process: tuple[str, int]
    allow_shared_gpu: bool

    def __str__(self) -> str:
        return f"GPU {self.index} of {self.host_name}"


def host_id() -> str:
    """Return a text that is equal in processes that can pass descriptors to each other. Local."""
    try:
        return f"{hosts.boot_id()} {os.readlink('/proc/self/ns/net')}"
    except OSError:  # a sandbox that hides it
        return socket.gethostname()


def _process() -> tuple[str, int]:
    """Return (namespace, process id). Two containers may both have a process 1."""
    try:
        return os.readlink("/proc/self/ns/pid"), os.getpid()
    except OSError:  # a sandbox that hides it
        return "", os.getpid()


def look(index: int, trial: vmm.FabricTrial) -> Facts:
    """Gather the facts about this rank on GPU `index`. Local.

    Args:
        index: ordinal of the GPU.
        trial: a trial on that GPU; it must stay open while other ranks import its handle.

    Raises:
        UnsupportedError: there is no driver, the kernels are not built for this GPU, or the GPU has
            no virtual memory management.
        DriverError: there is no such GPU.
    """
    device = driver.device(index)
    _ = device.architecture
    if not vmm.attribute(index, "VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED"):
        raise UnsupportedError(
            f"GPU {index} ({device.name}) has no virtual memory management (a vGPU profile or WSL "
            f"may lack it); use another machine, {_instead()}"
        )
    links = {} if device.is_mig else _links(device)
    return Facts(
        host=host_id(),
        host_name=socket.gethostname(),
        index=index,
        name=device.name,
        uuid=device.uuid,
        capability=device.capability,
        is_mig=device.is_mig,
        posix=vmm.attribute(index, "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED"),
        fabric_error=trial.error,
        fabric_trial=trial.blob,
        links=links,
        process=_process(),
        allow_shared_gpu=env.allow_shared_gpu(),
    )


def _links(device: driver.Device) -> dict[str, Link]:
    """Return the connection to every other GPU, and log them.

    The driver does not name the wire: atomics work over NVLink, but over some PCIe systems, too.
    NVML is asked as well, and whoever reads the log decides.
    """
    links = {}
    for index in range(driver.num_devices()):
        if index == device.index:
            continue
        peer = driver.device(index).uuid
        link = links[peer] = _link(device.index, index)
        said = _nvml_says(device.uuid, peer)
        level = logging.WARNING if link is Link.NVLINK and said == _NO_NVLINK else logging.INFO
        here, there = f"GPU {device.index}", f"GPU {index}"
        logger.log(
            level, "moe_nvlink: %s to %s: %s by the driver, %s", here, there, link.value, said
        )
    return links


_NO_NVLINK = (
    "but NVML knows no NVLink between them. If that is true, the exchange runs at PCIe's speed; "
    "`nvidia-smi topo -p2p n` shows what NVML says"
)


def _nvml_says(uuid: str, peer: str) -> str:
    """Return whether NVML knows NVLink between two GPUs, as the end of a sentence."""
    try:
        from cuda.bindings import nvml

        nvml.init_v2()
        handles = [nvml.device_get_handle_by_uuid(driver.nvml_uuid(one)) for one in (uuid, peer)]
        status = nvml.device_get_p2p_status(*handles, int(nvml.GpuP2PCapsIndex.NVLINK))
    except Exception as error:
        return f"NVML not asked ({type(error).__name__})"
    return "and NVML says the same" if status == nvml.GpuP2PStatus.OK else _NO_NVLINK


def _link(index: int, peer: int) -> Link:
    mine, theirs = (driver.call("cuDeviceGet", one) for one in (index, peer))
    if not driver.call("cuDeviceCanAccessPeer", mine, theirs):
        return Link.NONE
    attribute = driver.api().CUdevice_P2PAttribute
    atomics = attribute.CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
    return (
        Link.NVLINK if driver.call("cuDeviceGetP2PAttribute", atomics, mine, theirs) else Link.PCIE
    )


def decide(ranks: Sequence[Facts]) -> vmm.Sharing:
    """Decide how these ranks share memory. Local; every rank gets the same result from `ranks`.

    Raises:
        UnsupportedError: they cannot share memory; names the ranks, the cause, and what to use
            instead.
    """
    _check_devices(ranks)
    _check_one_gpu_each(ranks)
    _check_links(ranks)
    if len({facts.host for facts in ranks}) == 1 and all(facts.posix for facts in ranks):
        return vmm.Sharing.POSIX
    lacking = [
        f"rank {rank} ({facts}): {facts.fabric_error}"
        for rank, facts in enumerate(ranks)
        if facts.fabric_trial is None
    ]
    if lacking:
        raise UnsupportedError(
            f"{_hosts(ranks)}, and memory is shared between hosts only inside one NVLink domain, "
            f"through FABRIC handles, which are missing on {'; '.join(lacking)}. On a "
            "multi-node NVLink system start the IMEX service on every host and give the container "
            "/dev/nvidia-caps-imex-channels (containers of one host: a common network namespace "
            f"is enough, docker: --network host); {_instead()}"
        )
    return vmm.Sharing.FABRIC


def _check_devices(ranks: Sequence[Facts]) -> None:
    slices = [f"rank {rank} ({facts})" for rank, facts in enumerate(ranks) if facts.is_mig]
    if slices and len(ranks) > 1:
        raise UnsupportedError(
            f"{', '.join(slices)}: NVLink does not reach a MIG slice; turn MIG off (nvidia-smi "
            f"-mig 0), {_instead()}"
        )
    first = ranks[0]
    for rank, facts in enumerate(ranks):
        if facts.capability != first.capability:
            raise UnsupportedError(
                f"rank {rank} runs on {facts} ({facts.name}, compute capability "
                f"{_dotted(facts.capability)}), rank 0 on {first} ({first.name}, "
                f"{_dotted(first.capability)}); use one kind of GPU for a group, {_instead()}"
            )


def ranks_on_gpu(rank: int, ranks: Sequence[Facts]) -> int:
    """Return how many ranks use the GPU of `rank`, including `rank`. Local."""
    return sum(facts.uuid == ranks[rank].uuid for facts in ranks)


def _check_one_gpu_each(ranks: Sequence[Facts]) -> None:
    owner: dict[str, int] = {}
    threads: dict[tuple[str, tuple[str, int]], int] = {}
    for rank, facts in enumerate(ranks):
        sibling = threads.setdefault((facts.uuid, facts.process), rank)
        if sibling != rank:
            # Even if sharing is allowed: nobody knows yet on which streams they will launch, and
            # the hardware may put two streams into one queue.
            raise UnsupportedError(
                f"ranks {sibling} and {rank} are threads of one process (pid {facts.process[1]}) "
                f"and both on {facts}: if both launch on one stream, the kernel of one rank is "
                "queued after the other rank's, which waits for it; give each rank a GPU of its "
                "own (torch.cuda.set_device in its thread), or start each rank as a process of its "
                "own"
            )
        other = owner.setdefault(facts.uuid, rank)
        if other != rank and not all(one.allow_shared_gpu for one in ranks):
            raise UnsupportedError(
                f"ranks {other} and {rank} are both on {facts}; give each rank a GPU of its own "
                "(torch.cuda.set_device(local_rank) before the first CUDA call), or, to try things "
                "out slowly, set MOE_NVLINK_ALLOW_SHARED_GPU=1 on all ranks"
            )


def _check_links(ranks: Sequence[Facts]) -> None:
    for rank, facts in enumerate(ranks):
        for peer, theirs in enumerate(ranks):
            link = facts.links.get(theirs.uuid)
            if link in (Link.NONE, Link.PCIE):
                raise UnsupportedError(
                    f"rank {rank} ({facts}) reaches rank {peer} ({theirs}) by {link.value}, not by "
                    "NVLink; look at `nvidia-smi topo -p2p n` (IOMMU, ACS or a hypervisor may turn "
                    f"it off), choose GPUs of one NVLink domain, {_instead()}"
                )


def check_trials(ranks: Sequence[Facts], unreachable: Sequence[dict[int, str]]) -> None:
    """Check that every rank could import every other rank's FABRIC handle. Local.

    Args:
        ranks: the facts about each rank.
        unreachable: for each rank: peer -> why the import failed.

    Raises:
        UnsupportedError: an import failed; names a pair of ranks, the same on every rank.
    """
    for rank, failed in enumerate(unreachable):
        for peer, cause in failed.items():
            raise UnsupportedError(
                f"rank {rank} ({ranks[rank]}) cannot import the memory of rank {peer} "
                f"({ranks[peer]}): {cause}; they are not in one NVLink domain, or not in one IMEX "
                f"domain (nvidia-imex-ctl -N shows it): choose hosts of one domain, {_instead()}"
            )


def try_peers(rank: int, ranks: Sequence[Facts]) -> dict[int, str]:
    """Try every peer's FABRIC handle; return peer -> why the import failed. Local."""
    failed = {}
    for peer, facts in enumerate(ranks):
        if peer == rank or facts.fabric_trial is None:
            continue
        try:
            handle = vmm.import_handle(vmm.Sharing.FABRIC, facts.fabric_trial)
        except DriverError as error:
            failed[peer] = str(error)
        else:
            vmm.quietly("cuMemRelease", handle)
    return failed


def _hosts(ranks: Sequence[Facts]) -> str:
    where: dict[tuple[str, str], list[str]] = {}
    for rank, facts in enumerate(ranks):
        where.setdefault((facts.host_name, facts.host), []).append(str(rank))
    if len(where) == 1:
        return "this host's GPUs share no memory through file descriptors"
    parts = [f"{name}: ranks {', '.join(on_it)}" for (name, _id), on_it in where.items()]
    return f"the ranks are on {len(where)} hosts or network namespaces ({'; '.join(parts)})"


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
