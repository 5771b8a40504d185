"""Judges from facts whether ranks will work, and says what to do if not. Pure functions.

When a group starts, transport/topology.py checks what its ranks must have in common. This module
predicts the result of these checks, also for ranks that do not exist yet: one on each GPU that the
process sees.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

from moe_nvlink_plugin import driver, frameworks

from .gpu import GpuDevice, Peer, Trial
from .inquiry import Facts, Software

#: Drivers of CUDA 13 and newer load cubins that NVRTC 13 has made.
OLDEST_CUDA = (13, 0)
#: Error of cuInit on a machine with NVSwitch until the fabric manager runs.
_NOT_READY = "CUDA_ERROR_SYSTEM_NOT_READY"


def _elsewhere() -> str:
    other = frameworks.advice(frameworks.ANOTHER_BACKEND)
    return f"use another all-to-all backend{other}"


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Judgement on the GPU ranks or the CPU ranks of one process, or of all ranks of a launcher.

    Attributes:
        who: "GPU ranks" or "CPU ranks".
        reasons: why they will not work, each with what to do; empty if they will.
        notes: other facts worth knowing.
    """

    who: str
    reasons: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def works(self) -> bool:
        """Whether there is no reason why they will not work."""
        return not self.reasons

    def __str__(self) -> str:
        """The verdict in one line."""
        told = self.notes if self.works else self.reasons
        texts = told if len(told) < 2 else [f"({n}) {text}" for n, text in enumerate(told, 1)]
        line = f"{self.who}: {'will work' if self.works else 'will not work'}"
        # A reason may be a compiler's log, which the report has in full above.
        return ": ".join([line, *([" ".join(" ".join(texts).split())] if texts else [])])


def judge_gpu_ranks(ranks: Sequence[Facts]) -> Verdict:
    """Judge GPU ranks by the facts of one process, or of every rank in rank order."""
    reasons = _by_rank(ranks, _gpu_reasons)
    if len(ranks) > 1:
        reasons += [*_disagreements(ranks), *_kinds(ranks), *_shared_gpus(ranks)]
        reasons += [*_unlinked(ranks), *_across_hosts(ranks)]
    notes = [*_by_rank(ranks, _gpu_notes), *_differences(ranks), *_adapters(ranks)]
    notes += _side_by_side(ranks)
    return Verdict("GPU ranks", tuple(reasons), tuple(notes))


def judge_cpu_ranks(ranks: Sequence[Facts]) -> Verdict:
    """Judge CPU ranks by the facts of one process, or of every rank in rank order."""
    reasons = _by_rank(ranks, _cpu_reasons)
    if len(ranks) > 1:
        reasons += _disagreements(ranks)
        hosts = _hosts(ranks)
        if len(hosts) > 1:
            reasons.append(
                f"CPU ranks exchange inside one host, these are on {_listed(hosts.values())}; "
                "start them on one"
            )
        elif len({found.cpu.shared_memory_id for found in ranks}) > 1:
            reasons.append(
                "the ranks see different /dev/shm; start them in one container, or give the "
                "containers one shared memory (docker: --ipc)"
            )
    return Verdict("CPU ranks", tuple(reasons), tuple(_adapters(ranks)))


def _by_rank(ranks: Sequence[Facts], judge: Callable[[Facts], list[str]]) -> list[str]:
    """Return each reason of the ranks once, with the numbers of its ranks if there are several."""
    holders: dict[str, list[int]] = {}
    for number, found in enumerate(ranks):
        for text in judge(found):
            holders.setdefault(text, []).append(number)
    if len(ranks) == 1:
        return list(holders)
    return [f"{numbered('rank', numbers)}: {text}" for text, numbers in holders.items()]


def numbered(what: str, numbers: Sequence[int]) -> str:
    """Return "rank 3" or "ranks 0-2, 5", for numbers in ascending order."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"{what}{'s' if len(numbers) > 1 else ''} {', '.join(texts)}"


# ---- one process


def _cpu_reasons(found: Facts) -> list[str]:
    cpu, no_torch = found.cpu, _torch_reasons(found.software)
    reasons = [*found.bad_variables, *no_torch]
    reasons += [one.error for one in (cpu.kernels, cpu.shared_memory) if one.error]
    # Without torch there is no trial, and where nobody may write it says the same again.
    if cpu.sockets.error and not no_torch and not cpu.shared_memory.error:
        reasons.append(f"a trial of shared memory failed: {cpu.sockets.error}")
    return reasons


def _torch_reasons(software: Software) -> list[str]:
    if software.torch_error:
        return [f"torch cannot be imported ({software.torch_error}); install it anew"]
    return [software.numpy_error] if software.numpy_error else []


def _gpu_reasons(found: Facts) -> list[str]:
    if found.gpus.unavailable:
        hint = "; start nvidia-fabricmanager" if _NOT_READY in found.gpus.unavailable else ""
        return [found.gpus.unavailable + hint]
    reasons = [*found.bad_variables, *_software_reasons(found)]
    own = found.own_devices()
    if not own:
        reasons.append(
            f"LOCAL_RANK={found.local_rank} and this process sees {len(found.gpus.devices)} GPUs; "
            "start no more ranks than GPUs, and see CUDA_VISIBLE_DEVICES"
        )
    usable = usable_devices(found)
    if not usable:
        reasons += _by_gpu(own)
    for name in sorted({device.architecture for device in usable}):
        reasons += _kernel_reasons(found, name)
    kinds = sorted({device.capability for device in usable})
    if len(kinds) > 1:
        reasons.append(
            f"GPUs of different kinds (compute capabilities {', '.join(kinds)}); show the ranks "
            "one kind (CUDA_VISIBLE_DEVICES)"
        )
    indices = {device.index for device in usable}
    pairs = [
        f"{device.index}-{peer.index}"
        for device in usable
        for peer in device.peers
        if device.index < peer.index and peer.index in indices and not _is_nvlink(peer)
    ]
    if pairs:
        reasons.append(_no_nvlink(f"GPUs {_listed(pairs)}"))
    return reasons


def _kernel_reasons(found: Facts, architecture: str) -> list[str]:
    """Return why kernels of an architecture are missing.

    If there is no NVRTC, only the first kind must be in the cache, which every layer needs. Other
    missing kinds become a note, because an image has the kinds that it was made for.
    """
    kinds = found.kernels.architectures[architecture]
    refused = _missing(found, architecture)
    if not refused:
        return []
    first = next(iter(kinds))
    if found.kernels.nvrtc.error:
        return [kinds[first].error] if first in refused else []
    error = _shortened(kinds[refused[0]].error)
    if len(refused) == len(kinds):
        return [error]
    return [f"no kernels on {architecture} for {'; '.join(refused)}: {error}"]


def _missing(found: Facts, architecture: str) -> list[str]:
    """Return the kinds of kernels that are missing."""
    kinds = found.kernels.architectures[architecture]
    return [kind for kind, answer in kinds.items() if answer.error]


def _shortened(log: str) -> str:
    """Shorten a compiler's log to three lines: compiler, first error, what to do.

    The first line of the log names the compiler, and the last one says what to do.
    """
    lines = log.splitlines()
    if len(lines) <= 6:
        return log
    errors = [line for line in lines[1:-1] if ": error: " in line]
    return "\n".join([lines[0], *errors[:1], "...", lines[-1]])


def _is_nvlink(peer: Peer) -> bool:
    return peer.access and peer.native_atomics


def _software_reasons(found: Facts) -> Iterator[str]:
    version = tuple(int(part) for part in found.gpus.cuda_version.split("."))
    if version < OLDEST_CUDA:
        yield (
            f"the driver serves CUDA {found.gpus.cuda_version}, the kernels need "
            f"{OLDEST_CUDA[0]}.{OLDEST_CUDA[1]}; install driver 580 or newer"
        )
    yield from _torch_reasons(found.software)
    if found.software.torch_error:
        return
    if not found.software.torch_cuda:
        torch = found.software.distributions.get("torch", "here")
        yield f"torch {torch} is a build without CUDA; install torch's CUDA build"
    elif found.software.plugin_error:
        yield found.software.plugin_error
    elif not any(found.software.transports.values()):
        yield "this installation has no transport that serves GPUs; install a newer one"


def device_reasons(device: GpuDevice) -> list[str]:
    """Return why a rank cannot work on this GPU; empty if it can."""
    if device.error:
        return [f"{device.error}; nvidia-smi and dmesg (Xid) may tell why"]
    reasons = []
    if not device.architecture:
        known = ", ".join(f"{major}.{minor}" for major, minor in driver.ARCHITECTURES)
        reasons.append(
            f"{device.name} has compute capability {device.capability}, the kernels are built for "
            f"{known}; {_elsewhere()}"
        )
    if device.is_mig:
        reasons.append(
            f"{device.name} is a MIG slice, which NVLink does not reach; turn MIG off (nvidia-smi "
            f"-mig 0) or {_elsewhere()}"
        )
    if not device.virtual_memory:
        reasons.append(f"no virtual memory management, as under some vGPU; {_elsewhere()}")
    elif device.tried and not _preferred(device).works:
        cause = _preferred(device).error or "the driver offers no handle that could be shared"
        reasons.append(f"its memory cannot be shared ({cause}); {_elsewhere()}")
    return reasons


def _preferred(device: GpuDevice) -> Trial:
    """Return the attempt by the handle with which ranks share the GPU's memory inside a host."""
    return device.posix_fd if device.posix_fd.supported else device.fabric_handle


def _by_gpu(devices: Sequence[GpuDevice]) -> list[str]:
    """Return each different reason of the GPUs once, with the numbers of its GPUs."""
    holders: dict[str, list[int]] = {}
    for device in devices:
        for text in device_reasons(device):
            holders.setdefault(text, []).append(device.index)
    return [f"{numbered('GPU', indices)}: {text}" for text, indices in holders.items()]


def usable_devices(found: Facts) -> list[GpuDevice]:
    """Return the GPUs of this process that a rank can work on."""
    return [device for device in found.own_devices() if not device_reasons(device)]


def _no_nvlink(between: str) -> str:
    return (
        f"no NVLink between {between}: other GPUs than these are linked, or a container, a virtual "
        "machine or the IOMMU keeps them apart (nvidia-smi topo -p2p n); keep the ranks on GPUs of "
        f"one NVLink domain (CUDA_VISIBLE_DEVICES) or {_elsewhere()}"
    )


def _gpu_notes(found: Facts) -> list[str]:
    usable = usable_devices(found)
    notes = []
    if found.world_size not in (None, 1) and found.local_rank is None:
        notes.append("LOCAL_RANK is not set: which GPU a rank will use is not known here")
    if usable:
        kinds = sorted({f"{device.name}, {device.architecture}" for device in usable})
        notes.append(f"{len(usable)} GPU{'s' * (len(usable) > 1)} ({'; '.join(kinds)})")
        unusable = [device for device in found.own_devices() if device not in usable]
        notes += [f"{text} (CUDA_VISIBLE_DEVICES hides a GPU)" for text in _by_gpu(unusable)]
    for name in sorted({device.architecture for device in usable}):
        missing = _missing(found, name)
        if missing and found.kernels.nvrtc.error:
            notes.append(
                f"the cache has no kernels on {name} for {'; '.join(missing)}: a layer that needs "
                "them stops at start-up and says what to run, because nothing here compiles them: "
                f"{found.kernels.nvrtc.error}"
            )
    return notes


# ---- all ranks together


def _hosts(ranks: Sequence[Facts]) -> dict[str, str]:
    """Return host_id -> name, in rank order."""
    return {found.host_id: found.host for found in ranks}


def _listed(texts: Iterable[str], most: int = 8) -> str:
    items = list(texts)
    rest = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(items[:most]) + rest


def _differing(ranks: Sequence[Facts], what: str, value: Callable[[Facts], str]) -> str:
    """Return "torch differs (2.13.0 on rank 0, 2.14.0 on rank 1)"; "" if it does not."""
    holders: dict[str, list[int]] = {}
    for number, found in enumerate(ranks):
        holders.setdefault(value(found) or "none", []).append(number)
    if len(holders) == 1:
        return ""
    told = ", ".join(f"{text} on {numbered('rank', numbers)}" for text, numbers in holders.items())
    return f"{what} differs ({told})"


def _disagreements(ranks: Sequence[Facts]) -> list[str]:
    """Return what differs between ranks and must not."""
    found = [
        _differing(ranks, "moe-nvlink-plugin", lambda found: found.software.plugin),
        _differing(ranks, "the kernels' source", lambda found: found.software.kernel_text),
    ]
    return [f"{text}; install the same everywhere" for text in found if text]


def _kinds(ranks: Sequence[Facts]) -> list[str]:
    text = _differing(ranks, "the GPUs' compute capability", _capability)
    return [f"{text}; use one kind of GPU for a group"] if text else []


def _capability(found: Facts) -> str:
    return ", ".join(sorted({device.capability for device in found.own_devices()}))


def _differences(ranks: Sequence[Facts]) -> list[str]:
    """Return what differs between ranks and may, but seldom should."""
    values: dict[str, Callable[[Facts], str]] = {
        "torch": lambda found: found.software.distributions.get("torch", ""),
        "the driver's CUDA": lambda found: found.gpus.cuda_version,
        "MOE_NVLINK_PDL": lambda found: found.variables.get("MOE_NVLINK_PDL") or "1",
    }
    told = [_differing(ranks, what, value) for what, value in values.items()]
    return [text for text in told if text]


def _adapters(ranks: Sequence[Facts]) -> list[str]:
    """Return the frameworks that only a part of the ranks could use, and which ranks lack what."""
    names = dict.fromkeys(name for found in ranks for name in found.software.frameworks)

    def state(found: Facts, name: str) -> str:
        if name not in found.software.frameworks:
            return f"no adapter for {name}"
        answer = found.software.frameworks[name]
        if answer is None:
            return f"no {name}"
        return "an adapter that would not work" if answer.error else "an adapter that would work"

    told = [_differing(ranks, name, lambda found, name=name: state(found, name)) for name in names]  # type: ignore[misc]
    return [f"{text}; a server of it needs the same on all its ranks" for text in told if text]


def _owners(ranks: Sequence[Facts]) -> list[tuple[int, Facts, GpuDevice]]:
    """Return (rank, facts, GPU) of each rank that has one GPU."""
    return [
        (number, found, found.own_devices()[0])
        for number, found in enumerate(ranks)
        if len(found.own_devices()) == 1
    ]


def _sharing(ranks: Sequence[Facts]) -> list[str]:
    """Return "ranks 0-1 are on one GPU (uuid)" for each GPU with several ranks."""
    holders: dict[str, list[int]] = {}
    for number, _found, device in _owners(ranks):
        holders.setdefault(device.uuid, []).append(number)
    return [
        f"{numbered('rank', numbers)} are on one GPU ({uuid})"
        for uuid, numbers in holders.items()
        if len(numbers) > 1 and uuid
    ]


def _may_share(ranks: Sequence[Facts]) -> bool:
    return all(found.variables.get("MOE_NVLINK_ALLOW_SHARED_GPU") == "1" for found in ranks)


def _shared_gpus(ranks: Sequence[Facts]) -> list[str]:
    own = "give every rank its own (LOCAL_RANK and CUDA_VISIBLE_DEVICES decide)"
    return [] if _may_share(ranks) else [f"{text}; {own}" for text in _sharing(ranks)]


def _side_by_side(ranks: Sequence[Facts]) -> list[str]:
    """Return what a shared GPU costs, if sharing is allowed."""
    cost = (
        "for tests: each rank gets its part of the SMs, and without MPS the GPU runs one process "
        "at a time, so that every wait lasts as long as the others' time slices"
    )
    return [f"{text}, {cost}" for text in _sharing(ranks)] if _may_share(ranks) else []


def _unlinked(ranks: Sequence[Facts]) -> list[str]:
    """Return the pairs of ranks without NVLink between their GPUs, if one rank sees both GPUs."""
    pairs = set()
    for (a, here, mine), (b, _there, theirs) in itertools.permutations(_owners(ranks), 2):
        # This rank sees neither GPUs of another host nor GPUs that the launcher hides.
        seen = {device.index for device in here.gpus.devices if device.uuid == theirs.uuid}
        if any(peer.index in seen and not _is_nvlink(peer) for peer in mine.peers):
            pairs.add((min(a, b), max(a, b)))
    between = _listed(f"{a}-{b}" for a, b in sorted(pairs))
    return [_no_nvlink(f"the GPUs of ranks {between}")] if pairs else []


def _across_hosts(ranks: Sequence[Facts]) -> list[str]:
    if len({found.descriptor_domain for found in ranks}) == 1:
        return []
    hosts = _hosts(ranks)
    if len(hosts) > 1:
        where = f"ranks on several hosts ({_listed(hosts.values())})"
    else:
        where = "ranks in several network namespaces (docker: --network host gives them one)"
    needed = (
        f"{where} need one NVLink domain with IMEX running on all of its hosts; start the ranks on "
        f"one host or {_elsewhere()}"
    )
    told: dict[str, list[int]] = {}
    domains: dict[tuple[str, int], list[int]] = {}
    for number, found, device in _owners(ranks):
        if not device.fabric_handle.works:
            told.setdefault(_why_no_fabric(found, device), []).append(number)
        elif device.fabric.state == "completed":
            domains.setdefault((device.fabric.cluster, device.fabric.clique), []).append(number)
    if told:
        causes = "; ".join(
            f"{numbered('rank', numbers)}: {cause}" for cause, numbers in told.items()
        )
        return [f"{needed} ({causes})"]
    if len(domains) > 1:
        sides = ", ".join(numbered("rank", numbers) for numbers in domains.values())
        return [f"{needed} (NVML names {len(domains)} domains: {sides})"]
    return []


def _why_no_fabric(found: Facts, device: GpuDevice) -> str:
    if not device.fabric_handle.supported:
        return "this GPU is in no NVLink fabric of several hosts"
    if not found.gpus.imex_channels:
        return (
            f"{device.fabric_handle.error}, and there is no channel in "
            "/dev/nvidia-caps-imex-channels: start nvidia-imex and give the container the channel"
        )
    return device.fabric_handle.error or "not tried"
