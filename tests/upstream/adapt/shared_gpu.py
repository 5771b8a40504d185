"""Ranks of vLLM's tests that start their own processes: on a GPU each, or several on one GPU.

On GPUs this has never been run. `gpu_layers` runs its tests of plain exchanges through it on CPU
processes, and tests/unit/test_upstream_gpu.py asks it where ranks would sit.

Names for other adapters:

* `begin_ranks_here(module, name)`: ranks that begin with this function of a module begin with
  `in_every_rank`'s functions; on CPUs, and where ranks share a GPU, it also gets them gloo groups.
* `in_every_rank(function)`: a module-level function without arguments, called in every rank.

How ranks share: a test that asks for more ranks than there are GPUs is told that each of its ranks
is on a host of as many GPUs as there are. Then vLLM's own launcher gives every rank a device that
exists. NCCL refuses two ranks on one device, so groups are gloo's, and vLLM's own collectives that
need a device for each rank (PyNccl, custom all-reduce, symmetric memory) are off. Our exchange goes
through its own transport, `nvlink`, which maps memory of the same device like that of another one.
Tests that name devices by rank ("cuda:1" in rank 1) cannot share: their groups ask for more GPUs.
"""

from __future__ import annotations

import functools
import importlib
import multiprocessing
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from .. import settings
from ..groups import Device
from .cpu_device import MOST_RANKS

#: Of vLLM, where ranks share a GPU: collectives that want one device for each rank.
SHARING_ENVIRONMENT = {
    "VLLM_DISABLE_PYNCCL": "1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
}
#: Launchers of vLLM's tests that tell each rank its device.
LAUNCHERS = (
    "tests.kernels.moe.parallel_utils",
    "tests.kernels.moe.modular_kernel_tools.parallel_utils",
)
_NCCL = "nccl"
#: A launcher of vLLM's tests tells its ranks the same port of this host whenever it is called.
_PORT = "MASTER_PORT"
_FREE_PORT = "MOE_NVLINK_UPSTREAM_PORT"

_setups: list[Callable[[], None]] = []


class Seat(NamedTuple):
    """Where a rank is told to be: host, device of that host, devices of a host."""

    node: int
    device: int
    devices: int


def seat(rank: int, world_size: int, gpus: int) -> Seat:
    """A rank's place: one host where there are GPUs enough (or CPUs), else hosts of `gpus` each.

    Local. gpus: 0 on CPUs.
    """
    devices = gpus if 0 < gpus < world_size else world_size
    return Seat(rank // devices, rank % devices, devices)


def shares(world_size: int) -> bool:
    """Whether ranks of a test with so many must share a GPU. Local."""
    return 0 < settings.gpus() < world_size


def device_count() -> int:
    """What tests are told that there is; on GPUs at least `MOST_RANKS`, since ranks can share."""
    return max(settings.gpus(), MOST_RANKS)


def choose_port() -> None:
    """Ranks started later meet at a port that nobody has, another run of the tests say. Local."""
    from vllm.utils.network_utils import get_open_port

    os.environ[_FREE_PORT] = str(get_open_port())


def in_every_rank(function: Callable[[], None]) -> None:
    """Ranks that are started later call it first. Local, idempotent."""
    if function not in _setups:
        _setups.append(function)


class Beginning:
    """A function of vLLM's tests that a rank begins with, as something to be pickled.

    seated: its arguments begin with local_rank, world_size, world_local_size and node_rank, as
    those of the launchers of tests/kernels/moe do; then ranks may share GPUs.
    """

    def __init__(self, module: str, name: str, *, seated: bool) -> None:
        self.module, self.name, self.seated = module, name, seated
        self.setups: tuple[Callable[[], None], ...] = ()
        self.environment: dict[str, str] = {}

    def __getstate__(self) -> dict[str, Any]:
        """As it is when a rank is started: a fork server would give it older variables."""
        return {**vars(self), "setups": tuple(_setups), "environment": dict(os.environ)}

    def __call__(self, *arguments: Any) -> Any:
        """In the rank."""
        os.environ.clear()
        os.environ.update(self.environment)
        _settle(arguments[1] if self.seated else 0)
        for setup in self.setups:
            setup()
        for told in arguments:
            if isinstance(told, dict) and _PORT in told:
                told[_PORT] = os.environ.get(_FREE_PORT, told[_PORT])
        function = getattr(importlib.import_module(self.module), self.name)
        return function(*(seated(arguments) if self.seated else arguments))


def seated(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """A launcher's arguments with this rank's seat in them. Local."""
    rank, world_size, _devices, _node, *rest = arguments
    here = seat(rank, world_size, settings.gpus())
    return (here.device, world_size, here.devices, here.node, *rest)


def begin_ranks_here(module: str, name: str, *, seated: bool) -> None:
    """Ranks whose launcher starts them with this function of this module are prepared. Local."""
    loaded = importlib.import_module(module)
    if not isinstance(getattr(loaded, name), Beginning):
        setattr(loaded, name, Beginning(module, name, seated=seated))


def _settle(world_size: int) -> None:
    """What a rank needs of its device before anything of the test."""
    if settings.device() is Device.CPU:
        from . import cpu_device

        cpu_device.install()
        gloo_for_nccl()
    elif shares(world_size):
        os.environ.update(SHARING_ENVIRONMENT)
        gloo_for_nccl()
        _without_custom_all_reduce()


def _without_custom_all_reduce() -> None:
    from vllm.distributed import parallel_state

    parallel_state.set_custom_all_reduce(False)


def gloo_for_nccl() -> None:
    """Groups of this process that are asked for NCCL get gloo, which copies device tensors. Local.

    Idempotent.
    """
    import torch.distributed as dist

    for name in ("init_process_group", "new_group"):
        original = getattr(dist, name)
        if not hasattr(original, "with_nccl"):
            setattr(dist, name, _with_gloo(original))


def _with_gloo(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def made(*arguments: Any, **named: Any) -> Any:
        if _NCCL in str(named.get("backend", "")):
            named["backend"] = "gloo"
            named.pop("device_id", None)
        return original(*[_gloo_name(value) for value in arguments], **named)

    made.with_nccl = original  # type: ignore[attr-defined]
    return made


def _gloo_name(value: Any) -> Any:
    return (
        "gloo" if isinstance(value, str) and value in (_NCCL, f"cpu:gloo,cuda:{_NCCL}") else value
    )


def install() -> None:
    """In pytest's process, before test modules are imported: how many devices there are, and how
    processes start. Local, idempotent.
    """
    if settings.device() is Device.CPU:
        from . import cpu_device

        cpu_device.install()
        _fork_ranks()
    elif settings.gpus() < MOST_RANKS:
        _count_shared_devices()
        for launcher in LAUNCHERS:
            begin_ranks_here(launcher, "_worker_parallel_launch", seated=True)


def _fork_ranks() -> None:
    """Ranks on CPUs are forks of a process that has imported torch and vLLM."""
    multiprocessing.set_start_method("forkserver", force=True)
    multiprocessing.set_forkserver_preload([f"{__package__}.warm_layers"])


def _count_shared_devices() -> None:
    import torch
    from vllm.platforms import current_platform

    torch.cuda.device_count = device_count
    torch.accelerator.device_count = device_count
    platform = type(current_platform)
    platform.device_count = classmethod(lambda _cls: device_count())


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Before any module of vLLM's tests is imported."""
    install()
