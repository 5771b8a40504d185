"""Writes facts and verdicts as text for people and as JSON for programs."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from moe_nvlink_plugin import frameworks

from .gpu import GpuDevice, Trial
from .inquiry import Facts, Found
from .sockets import Sockets
from .verdict import Verdict, device_reasons, numbered

_OK, _NO, _PLAIN = "  ok  ", "  NO  ", "      "


def as_text(ranks: Sequence[Facts], verdicts: Sequence[Verdict]) -> str:
    """Return the report as text; ranks with the same section share it; verdicts come last."""
    lines = []
    for title, section in _SECTIONS.items():
        holders: dict[tuple[str, ...], list[int]] = {}
        for number, found in enumerate(ranks):
            holders.setdefault(tuple(section(found)), []).append(number)
        for body, numbers in holders.items():
            alone = len(ranks) == 1
            lines += [title if alone else f"{title} ({numbered('rank', numbers)})", *body]
    return "\n".join([*lines, *map(str, verdicts)])


def as_json(ranks: Sequence[Facts], verdicts: Sequence[Verdict]) -> str:
    """Return the report as JSON: {"ranks": [facts], "verdicts": [{who, works, reasons, notes}]}."""
    answer = {
        "ranks": [dataclasses.asdict(found) for found in ranks],
        "verdicts": [{**dataclasses.asdict(v), "works": v.works} for v in verdicts],
    }
    return json.dumps(answer, indent=2)


def _line(what: str, found: Found) -> str:
    mark, text = (_NO, found.error) if found.error else (_OK, found.text)
    return f"{mark}{what}: {text}"


def _software(found: Facts) -> list[str]:
    software = found.software
    build = f"for CUDA {software.torch_cuda}" if software.torch_cuda else "a build without CUDA"
    if software.torch_error:
        build = f"cannot be imported: {software.torch_error}"
    lines = [
        f"{_PLAIN}host {found.host}",
        f"{_PLAIN}moe-nvlink-plugin {software.plugin}, kernels' source {software.kernel_text}",
        f"{_PLAIN}Python {software.python}",
    ]
    for name, version in software.distributions.items():
        lines.append(f"{_PLAIN}{name} {version}" + (f", {build}" if name == "torch" else ""))
    lines += [
        f"{_PLAIN}{entry.group}: {entry.name} of {entry.distribution}"
        for entry in software.entry_points
    ]
    declared = Counter(entry.group for entry in software.entry_points)
    lines += [
        f"{_PLAIN}{which}"
        for framework in frameworks.installed()
        for group, which in framework.one_of.items()
        if declared[group] > 1
    ]
    lines += [_line(name, answer) for name, answer in software.frameworks.items() if answer]
    if software.numpy_error:
        lines.append(f"{_NO}{software.numpy_error}")
    if software.plugin_error:
        lines.append(f"{_NO}{software.plugin_error}")
    transports = [
        f"{name} ({'GPU' if gpu else 'CPU'})" for name, gpu in software.transports.items()
    ]
    return [*lines, f"{_PLAIN}transports: {', '.join(transports) or 'none'}"]


def _cpu(found: Facts) -> list[str]:
    return [
        _line("host compiler", found.cpu.compiler),
        _line("kernel cache", found.cache),
        _line("host kernels", found.cpu.kernels),
        _line("shared memory", found.cpu.shared_memory),
        *(_PLAIN + text for text in _sockets(found.cpu.sockets)),
    ]


def _sockets(found: Sockets) -> Iterator[str]:
    yield f"{numbered('core', found.cores)}{_on_nodes(found)}"
    if found.error:
        yield f"placement and huge pages were not tried: {found.error}"
        return
    lies = f"lies on NUMA {numbered('node', found.memory_nodes)}"
    unknown = "lies on a node that Linux does not name (/proc/self/numa_maps)"
    yield f"shared memory of this process {lies if found.memory_nodes else unknown}"
    setting = f"shmem_enabled: {found.shmem_enabled or 'unknown'}"
    yield (
        f"huge pages: {found.huge_bytes // 2**20} MiB of a trial's {found.trial_bytes // 2**20} "
        f"MiB ({setting}; {found.reserved_pages} reserved for hugetlbfs, not used)"
    )


def _on_nodes(found: Sockets) -> str:
    if not found.nodes:
        return ""
    told = f", on NUMA {numbered('node', found.nodes)} of {found.num_nodes}"
    if len(found.nodes) == 1:
        return told
    who = frameworks.named(frameworks.BINDS_RANKS)
    other = f"{who} does; else " if who else ""
    return f"{told}; bind each rank to one node ({other}numactl --cpunodebind --membind)"


def _driver(found: Facts) -> list[str]:
    gpus = found.gpus
    if gpus.unavailable:
        return [f"{_NO}{gpus.unavailable}", *_imex(found)]
    release = f", release {gpus.driver_release}" if gpus.driver_release else ""
    line = f"{_OK}serves CUDA {gpus.cuda_version}{release}, {len(gpus.devices)} GPUs visible"
    when = "at their first launch" if gpus.lazy_loading else "at the start"
    loading = f"{_PLAIN}kernels are loaded {when} (num_channels > 1: CUDA_MODULE_LOADING=EAGER)"
    return [line, loading, *_matrix(gpus.devices), *_imex(found)]


def _gpus(found: Facts) -> list[str]:
    lines = [line for device in found.own_devices() for line in _device(device)]
    return lines or [f"{_PLAIN}none"]


def _device(device: GpuDevice) -> list[str]:
    reasons = device_reasons(device)
    lines = [f"{_NO}GPU {device.index}: {reason}" for reason in reasons]
    what = (
        f"GPU {device.index}: {device.name}, {device.architecture or device.capability}, "
        f"{device.num_sms} SMs, {device.total_bytes / 2**30:.0f} GiB, {device.uuid}"
    )
    if not device.error:
        lines.insert(0, f"{_PLAIN if reasons else _OK}{what}")
    if device.tried:
        lines.append(f"{_PLAIN}  shared by POSIX file descriptor: {_trial(device.posix_fd)}")
        lines.append(f"{_PLAIN}  shared by FABRIC handle: {_trial(device.fabric_handle)}")
    fabric = device.fabric
    if fabric.state:
        lines.append(
            f"{_PLAIN}  fabric: {fabric.state}, cluster {fabric.cluster}, clique {fabric.clique}"
        )
    elif fabric.error:
        lines.append(f"{_PLAIN}  fabric: NVML does not say ({fabric.error})")
    return lines


def _trial(trial: Trial) -> str:
    if not trial.supported:
        return "not supported by this GPU and driver"
    if not trial.tried:
        return "supported, not tried"
    return trial.error or "exported, imported and mapped"


def _matrix(devices: Sequence[GpuDevice]) -> list[str]:
    """Return a table of connections: the GPU of a row loads from and stores to a column's GPU.

    NVL: access and native atomics. P2P: access only.
    """
    if len(devices) < 2:
        return []
    lines = [f"{_PLAIN}peers (NVL: NVLink; P2P: access without it, not used; no: no access)"]
    lines.append(_PLAIN + "".join(f"{text:>5}" for text in ["", *(d.index for d in devices)]))
    for device in devices:
        by_index = {peer.index: peer for peer in device.peers}
        row = [str(device.index)]
        for other in devices:
            peer = by_index.get(other.index)
            kind = "?" if peer is None else "NVL" if peer.native_atomics else "P2P"
            row.append("." if other == device else "no" if peer and not peer.access else kind)
        lines.append(_PLAIN + "".join(f"{text:>5}" for text in row))
    return lines


def _imex(found: Facts) -> list[str]:
    gpus = found.gpus
    if not gpus.imex_channels and not gpus.imex_capability:
        return [f"{_PLAIN}IMEX: none; only GPUs on several hosts need it"]
    channels = ", ".join(gpus.imex_channels) or "no channel in /dev/nvidia-caps-imex-channels"
    return [f"{_PLAIN}IMEX: {channels}"]


def _kernels(found: Facts) -> list[str]:
    lines = [_line("NVRTC", found.kernels.nvrtc)]
    for name, kinds in found.kernels.architectures.items():
        counts = Counter(kind.text for kind in kinds.values() if not kind.error)
        if counts:
            told = ", ".join(f"{count} {text}" for text, count in counts.items())
            lines.append(f"{_OK}kernels for {name}: {told}, of {len(kinds)} kinds")
        lines += [
            _line(f"kernels for {name}, {kind}", answer)
            for kind, answer in kinds.items()
            if answer.error
        ]
    if not found.kernels.architectures:
        lines.append(f"{_PLAIN}no GPU to compile for")
    return lines


def _environment(found: Facts) -> list[str]:
    lines = [f"{_NO}{text}" for text in found.bad_variables]
    for name, (default, meaning) in frameworks.variables().items():
        value = found.variables.get(name)
        said = f"unset (default: {default})" if value is None else f"= {value}"
        lines.append(f"{_PLAIN}{name} {said}: {meaning}")
    return lines


_SECTIONS: dict[str, Callable[[Facts], list[str]]] = {
    "software": _software,
    "CPU": _cpu,
    "CUDA driver": _driver,
    "GPU": _gpus,
    "kernels for GPUs": _kernels,
    "environment": _environment,
}
