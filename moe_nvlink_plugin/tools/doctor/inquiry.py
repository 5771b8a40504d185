"""Facts about the machine of one process: software, CPU side, GPU side, environment."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import importlib
import importlib.metadata
import json
import os
import platform
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moe_nvlink_plugin import env, frameworks
from moe_nvlink_plugin.errors import ConfigError, MoeNvlinkError
from moe_nvlink_plugin.jit import cache, header, host, nvrtc
from moe_nvlink_plugin.launch.kernel import Variant
from moe_nvlink_plugin.tools import precompile, shipped
from moe_nvlink_plugin.version import own_version

from . import sockets
from .gpu import GpuDevice, Gpus, own_index, probe
from .gpu import from_json as gpus_from_json

#: Distributions that this package uses, whose versions a report names; those of frameworks follow.
_DISTRIBUTIONS = ("torch", "cuda-bindings", "nvidia-cuda-nvrtc")
_SHM = Path("/dev/shm")  # Linux keeps POSIX shared memory objects here
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclasses.dataclass(frozen=True)
class Found:
    """Answer to one question: what was found, or the error, which says what to do."""

    text: str = ""
    error: str = ""


@dataclasses.dataclass(frozen=True)
class EntryPoint:
    """Entry point of an installed distribution: a plugin of a framework or this package."""

    group: str
    name: str
    distribution: str


@dataclasses.dataclass(frozen=True)
class Software:
    """Installed software.

    Attributes:
        plugin: version of this package.
        python: version of Python.
        kernel_text: digest of the kernels' source, which must be equal on all ranks.
        torch_cuda: version of CUDA that torch was built for; "" for a build without CUDA.
        torch_error: why torch cannot be imported; "" if it can.
        numpy_error: why torch cannot use numpy, by which ranks meet; "" if it can.
        distributions: name -> version of the installed distributions.
        entry_points: plugins that the installed distributions declare.
        transports: name -> whether it serves GPU ranks.
        plugin_error: why the transports cannot be listed; "" if they can.
        frameworks: name of a framework whose adapter here can look -> whether the adapter would
            work with it; None without the framework.
    """

    plugin: str
    python: str
    kernel_text: str
    torch_cuda: str
    torch_error: str
    distributions: dict[str, str]
    entry_points: tuple[EntryPoint, ...]
    transports: dict[str, bool]
    plugin_error: str
    numpy_error: str = ""
    frameworks: dict[str, Found | None] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Cpu:
    """What CPU ranks need.

    Attributes:
        compiler: the host compiler; not needed if the kernels are in the cache.
        kernels: the host libraries, loaded.
        shared_memory: free bytes in /dev/shm.
        shared_memory_id: equal in two processes that see the same /dev/shm.
        sockets: cores, NUMA nodes and huge pages.
    """

    compiler: Found
    kernels: Found
    shared_memory: Found
    shared_memory_id: str
    sockets: sockets.Sockets


@dataclasses.dataclass(frozen=True)
class Kernels:
    """What GPU ranks run.

    Attributes:
        nvrtc: version of NVRTC.
        architectures: architecture that a GPU here needs -> kind of kernel -> whether it is there.
            The kinds are precompile.kinds, in that order.
    """

    nvrtc: Found
    architectures: dict[str, dict[str, Found]]


@dataclasses.dataclass(frozen=True)
class Facts:
    """Everything that one process found out.

    Attributes:
        rank, world_size, local_rank: what the launcher says; None without a launcher.
        host: name of the host.
        host_id: equal for all processes on one running operating system.
        descriptor_domain: equal for processes that can pass file descriptors to each other.
        cache: directory of the compiled kernels.
        variables: name of each of our environment variables -> its text; None if it is not set.
        bad_variables: errors in these variables.
    """

    rank: int | None
    world_size: int | None
    local_rank: int | None
    host: str
    host_id: str
    descriptor_domain: str
    software: Software
    cache: Found
    cpu: Cpu
    gpus: Gpus
    kernels: Kernels
    variables: dict[str, str | None]
    bad_variables: tuple[str, ...]

    def own_devices(self) -> tuple[GpuDevice, ...]:
        """Return this rank's GPU, or all GPUs without a launcher; empty if the rank has none."""
        own = own_index(self.local_rank, len(self.gpus.devices))
        return tuple(gpu for gpu in self.gpus.devices if own in (None, gpu.index))


def facts() -> Facts:
    """Ask this machine. Local; takes seconds to minutes, and waits for no other rank.

    It compiles what the cache lacks for the GPUs found and for the CPU. It creates no CUDA context
    in this process.

    Raises:
        ConfigError: RANK, WORLD_SIZE or LOCAL_RANK is not a number in its range.
    """
    launched = env.launched()
    local_rank = launched.local_rank if launched else None
    gpus = probe(local_rank)
    variables, bad = _environment()
    # NVRTC compiles for the GPUs while this thread imports torch and the host compiler works.
    with concurrent.futures.ThreadPoolExecutor(1) as beside:
        kernels = beside.submit(_kernels, gpus)
        software, cpu = _software(), _cpu()
        tuned = Found() if software.torch_error else _ask(_tuning)
    return Facts(
        rank=launched.rank if launched else None,
        world_size=launched.world_size if launched else None,
        local_rank=local_rank,
        host=platform.node(),
        host_id=_host_id(),
        descriptor_domain=_descriptor_domain(),
        software=software,
        cache=_ask(_cache),
        cpu=cpu,
        gpus=gpus,
        kernels=kernels.result(),
        variables=variables,
        bad_variables=(*bad, tuned.error) if tuned.error else bad,
    )


def to_json(found: Facts) -> str:
    """Return facts as one line of JSON."""
    return json.dumps(dataclasses.asdict(found))


def from_json(text: str) -> Facts:
    """Return the facts of which `to_json` has made `text`, perhaps beside other adapters."""
    values = json.loads(text)
    software, cpu, kernels = values["software"], values["cpu"], values["kernels"]
    software["entry_points"] = tuple(EntryPoint(**e) for e in software["entry_points"])
    software["frameworks"] = {
        name: one and Found(**one) for name, one in software["frameworks"].items()
    }
    values["software"] = Software(**software)
    for name in ("compiler", "kernels", "shared_memory"):
        cpu[name] = Found(**cpu[name])
    cpu["sockets"] = sockets.from_json(cpu["sockets"])
    values["cpu"] = Cpu(**cpu)
    values["kernels"] = Kernels(
        Found(**kernels["nvrtc"]),
        {
            name: {kind: Found(**found) for kind, found in kinds.items()}
            for name, kinds in kernels["architectures"].items()
        },
    )
    values["cache"] = Found(**values["cache"])
    values["gpus"] = gpus_from_json(values["gpus"])
    values["bad_variables"] = tuple(values["bad_variables"])
    return Facts(**values)


def _ask(question: Callable[[], str]) -> Found:
    try:
        return Found(question())
    except MoeNvlinkError as error:
        return Found(error=str(error))


def _host_id() -> str:
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return platform.node()


def _descriptor_domain() -> str:
    try:
        from moe_nvlink_plugin.transport import topology

        return topology.host_id()
    except Exception:  # there is no torch or no /proc, so one process cannot know
        return _host_id()


def _environment() -> tuple[dict[str, str | None], tuple[str, ...]]:
    bad = []
    readers: tuple[Callable[[], Any], ...] = (env.host_threads, env.first_timeout_s, env.pdl)
    readers += (env.max_sms, env.small_tokens, env.unit_data_bytes, _combine)
    readers += (env.allow_shared_gpu, env.lineinfo, env.mtp_lm_head_tp)
    for reader in readers:
        found = _ask(lambda reader=reader: str(reader()))  # type: ignore[misc]
        if found.error:
            bad.append(found.error)
    return env.current(), tuple(bad)


def _combine() -> str:
    """Return the format that MOE_NVLINK_COMBINE names; without torch, which config.py imports."""
    name, formats = env.combine(), header.combine_formats()
    if name not in formats:
        raise ConfigError(
            f"MOE_NVLINK_COMBINE={name!r} is no format of combine; set one of "
            f"{', '.join(formats)}, or unset it for bf16"
        )
    return name


def _tuning() -> str:
    """Read the file that MOE_NVLINK_TUNING names, as each layer will. With torch."""
    from moe_nvlink_plugin.exchange import tuning

    if path := env.tuning():
        tuning.load(path)
    return path


def _software() -> Software:
    served = frameworks.installed()
    distributions = {}
    for name in (*_DISTRIBUTIONS, *(name for one in served for name in one.distributions)):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            # None of the folder that an interrupted pip leaves.
            distributions[name] = importlib.metadata.version(name) or "unknown"
    groups = [group for one in served for group in one.entry_point_groups]
    entry_points = tuple(
        EntryPoint(entry.group, entry.name, entry.dist.name if entry.dist else "unknown")
        for group in (*groups, frameworks.ENTRY_POINT_GROUP)
        for entry in importlib.metadata.entry_points(group=group)
    )
    torch_cuda, torch_error = _torch()
    transports, plugin_error = ({}, "") if torch_error else _transports()
    return Software(
        plugin=own_version(),
        python=platform.python_version(),
        kernel_text=shipped.kernel_text_digest(),
        torch_cuda=torch_cuda,
        torch_error=torch_error,
        distributions=distributions,
        entry_points=entry_points,
        transports=transports,
        plugin_error=plugin_error,
        numpy_error="" if torch_error else _numpy_error(),
        frameworks=_frameworks(distributions),
    )


def _frameworks(versions: dict[str, str]) -> dict[str, Found | None]:
    """Return name -> what its adapter finds, of the frameworks whose adapters look."""
    found: dict[str, Found | None] = {}
    for one in frameworks.installed():
        if one.look is not None:
            answer = one.look(versions)
            found[one.name] = None if answer is None else Found(*answer)
    return found


def _torch() -> tuple[str, str]:
    try:
        import torch

        return torch.version.cuda or "", ""
    except Exception as error:  # a broken installation may raise anything, or lack its modules
        return "", f"{type(error).__name__}: {error}"


def _numpy_error() -> str:
    import torch

    try:
        torch.empty(0).numpy()
    except RuntimeError as error:
        return f"{error}: torch cannot gather the ranks' configurations; pip install numpy"
    return ""


def _transports() -> tuple[dict[str, bool], str]:
    """Return name -> whether the transport serves a GPU, and the error of a plugin."""
    import torch

    from moe_nvlink_plugin import plugins

    gpu = torch.device("cuda", 0)
    found = {}
    try:
        for members in plugins.manager().hook.moe_nvlink_transports():
            for transport in members:
                found[transport.name] = transport.serves(gpu)
    except Exception as error:  # a third-party plugin may raise anything
        return found, f"a plugin of {plugins.ENTRY_POINT_GROUP} fails: {error}; remove or fix it"
    return found, ""


def _cache() -> str:
    shipped = cache.shipped_directory()
    if shipped is None:
        return str(cache.directory())
    own = _ask(lambda: str(cache.directory()))
    return f"{shipped}, only readable; what it lacks goes to {own.text or own.error}"


def _cpu() -> Cpu:
    try:
        status = _SHM.stat()
        shared_memory_id = f"{status.st_dev}:{status.st_ino}"
    except OSError:
        shared_memory_id = ""
    return Cpu(
        compiler=_compiler(),
        kernels=_ask(_host_kernels),
        shared_memory=_shared_memory(),
        shared_memory_id=shared_memory_id,
        sockets=sockets.look(),
    )


def _host_kernels() -> str:
    shipped.load_host_libraries()
    return "compiled and loaded"


def _compiler() -> Found:
    try:
        name = env.cxx_words()[0]
    except ConfigError as error:
        return Found(error=str(error))
    path = shutil.which(name)
    if path is not None:
        return Found(path)
    return Found(error=host.not_found(name))


def _shared_memory() -> Found:
    if not os.access(_SHM, os.W_OK):
        return Found(error=f"{_SHM} is not writable; CPU ranks exchange through it")
    status = os.statvfs(_SHM)
    return Found(f"{status.f_bavail * status.f_frsize / 2**30:.1f} GiB free in {_SHM}")


def _kernels(gpus: Gpus) -> Kernels:
    """Compile what the cache lacks, several builds at once: NVRTC works in several threads."""
    needed = sorted({gpu.architecture for gpu in gpus.devices if gpu.architecture})
    pairs = [(name, kind) for name in needed for kind in precompile.kinds(name)]
    try:
        answers = [_compiled(outcome) for outcome in _outcomes(pairs, env.pdl())]
    except ConfigError as error:  # MOE_NVLINK_PDL; among the bad variables too
        answers = [Found(error=str(error))] * len(pairs)
    found: dict[str, dict[str, Found]] = {name: {} for name in needed}
    for (name, kind), answer in zip(pairs, answers, strict=True):
        found[name][str(kind)] = answer
    return Kernels(_ask(nvrtc.version), found)


def _outcomes(pairs: list[tuple[str, Variant]], pdl: bool) -> list[precompile.Outcome]:
    tasks = [precompile.Task(name, kind, pdl) for name, kind in pairs]
    with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return list(precompile.outcomes(tasks, lambda all_: pool.map(precompile.compiled, all_)))


def _compiled(outcome: precompile.Outcome) -> Found:
    if outcome.error:
        return Found(error=outcome.error)
    return Found("in the cache" if outcome.was_there else "compiled now")
