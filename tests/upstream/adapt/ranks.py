"""Ranks of vLLM's tests: processes of this CPU, or on GPUs, of which ranks may share one.

vLLM's launchers start ranks by torch's `spawn`. As a pytest plugin this module puts its own `spawn`
in its place. A rank is then prepared before anything of the test is imported in it:

* CPUs: it is forked from pytest's process, which has imported all that it needs and has no threads.
  "cuda" is its CPU (`cpu_device`), and its groups are gloo's. A collective gives up after
  `COLLECTIVE_S`, because a test of several subcases catches what one rank raises in a subcase, and
  the other ranks wait there.
* GPUs, NEVER RUN: if a test asks for more ranks than there are GPUs, each rank is told that it is
  on a host of as many GPUs as there are. vLLM's launcher then gives every rank an existing device.
  NCCL refuses two ranks on one device, so their groups are gloo's, and vLLM's own collectives that
  need a device for each rank are off. Our transport `nvlink` maps memory of the same device like
  memory of another one. Tests that name devices by rank ("cuda:1") cannot share: their groups in
  `groups.yaml` ask for more GPUs.

If a rank raises, dies or does not end in time, the launch fails with the rank's number, and the
other ranks are killed.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.multiprocessing.spawn import start_processes

from .. import settings
from . import cpu_device

#: Modules of vLLM's tests that start ranks by `spawn`, and tell each rank its device.
LAUNCHERS = (
    "tests.kernels.moe.parallel_utils",
    "tests.kernels.moe.modular_kernel_tools.parallel_utils",
)
#: The variable with the seconds that a collective may take: ranks of a busy machine are apart.
COLLECTIVE_S = "MOE_NVLINK_UPSTREAM_COLLECTIVE_S"
#: If one rank has failed, the other ranks may end by themselves for so long.
GRACE_S = 5.0
SHARED_MEMORY = Path("/dev/shm")
#: vLLM's collectives that need one device for each rank are off, where ranks share a GPU.
SHARING_ENVIRONMENT = {
    "VLLM_DISABLE_PYNCCL": "1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
}
#: Begins the names of vLLM's shared memory. Its workers get it from their executor.
_IDENTITY = "VLLM_DIST_IDENT"
_NCCL = ("nccl", "cpu:gloo,cuda:nccl")
#: An option of pytest for the fast subset.
FEW = "--few-subcases"

_setups: list[Callable[[], None]] = []


class RanksError(RuntimeError):
    """Some ranks of a launch did not end in time; the message says which."""


def in_every_rank(function: Callable[[], None]) -> None:
    """Ranks that are started later first call this module-level function. Local, idempotent."""
    if function not in _setups:
        _setups.append(function)


@contextlib.contextmanager
def in_step() -> Iterator[None]:
    """Prints an exception of a step that all ranks do; wherever the test catches it."""
    try:
        yield
    except BaseException:
        traceback.print_exc()
        raise


def spawn(
    function: Callable[..., Any],
    args: tuple[Any, ...] = (),
    nprocs: int = 1,
    join: bool = True,
    *,
    seated: bool = True,
) -> None:
    """torch's `spawn`, whose ranks are prepared. Raises what that raises, and RanksError.

    Args:
        seated: `args` begin with the number of ranks, the number of ranks of a host and the host's
            number, as those of LAUNCHERS do, so that ranks may share GPUs.
    """
    assert join
    rank_main = _Rank(function, nprocs, seated)
    method = "spawn" if settings.gpus() else "fork"
    ranks = start_processes(  # type: ignore[no-untyped-call]
        rank_main, args, nprocs, join=False, daemon=True, start_method=method
    )
    limit_s = settings.launch_s()
    end = time.monotonic() + limit_s
    try:
        while not ranks.join(max(0.0, end - time.monotonic()), GRACE_S):
            late = [rank for rank, one in enumerate(ranks.processes) if one.is_alive()]
            if late and time.monotonic() > end:
                raise RanksError(f"rank(s) {late} have not ended within {limit_s:g} s")
    finally:
        for process in ranks.processes:
            process.kill()
            process.join()
        # vLLM removes them when a process unloads its library, which forks never do.
        for left in SHARED_MEMORY.glob(f"{rank_main.identity}-*"):
            left.unlink(missing_ok=True)


class _Rank:
    """What a rank runs, after it has been prepared.

    A spawned process is prepared when it reads this, before it reads the arguments, which imports
    the test's modules. A forked process reads nothing.
    """

    def __init__(self, function: Callable[..., Any], world_size: int, seated: bool) -> None:
        self._of = (function.__module__, function.__qualname__, world_size, seated)
        self.identity = uuid.uuid4().hex[:8]

    def __call__(self, *args: Any) -> Any:
        prepare, told = self.__reduce__()
        return prepare(*told)(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        environment = {**os.environ, _IDENTITY: self.identity}
        return _prepared, (*self._of, tuple(_setups), environment)


def _prepared(
    module: str,
    name: str,
    world_size: int,
    seated: bool,
    setups: tuple[Callable[[], None], ...],
    environment: Mapping[str, str],
) -> Callable[..., Any]:
    os.environ.clear()
    os.environ.update(environment)
    if not settings.gpus():
        _prepare_cpu()
    elif seated and settings.gpus() < world_size:
        _prepare_shared_gpu()
    for setup in setups:
        setup()
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return functools.partial(_seated, function) if seated else function


def _seated(function: Callable[..., Any], rank: int, world_size: int, *args: Any) -> Any:
    here = seat(rank, world_size, settings.gpus())
    return function(here.device, world_size, here.devices, here.node, *args[2:])


class Seat(NamedTuple):
    """Where a rank is told to be: host, device of that host, devices of a host."""

    node: int
    device: int
    devices: int


def seat(rank: int, world_size: int, gpus: int) -> Seat:
    """A rank's place: one host if there are GPUs enough (or none), else hosts of `gpus` each."""
    devices = gpus if 0 < gpus < world_size else world_size
    return Seat(rank // devices, rank % devices, devices)


def _prepare_cpu() -> None:
    cpu_device.install()
    limit = timedelta(seconds=float(os.environ.get(COLLECTIVE_S, "120")))
    torch.distributed.distributed_c10d.default_pg_timeout = limit
    gloo_for_nccl()


def _prepare_shared_gpu() -> None:
    from vllm.distributed import parallel_state

    os.environ.update(SHARING_ENVIRONMENT)
    gloo_for_nccl()
    parallel_state.set_custom_all_reduce(False)


def gloo_for_nccl() -> None:
    """Groups of this process that ask for NCCL get gloo, which copies device tensors. Local."""
    for name in ("init_process_group", "new_group"):
        original = getattr(torch.distributed, name)
        setattr(torch.distributed, name, functools.partial(_with_gloo, original))


def _with_gloo(original: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    named.pop("device_id", None)
    if named.get("backend") in _NCCL:
        named["backend"] = "gloo"
    first = ["gloo" if isinstance(one, str) and one in _NCCL else one for one in arguments[:1]]
    return original(*first, *arguments[1:], **named)


def pytest_addoption(parser: pytest.Parser) -> None:
    """What a test of several subcases leaves out, its adapter says."""
    parser.addoption(FEW, action="store_true", help="small shapes, few tokens")


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Before any module of vLLM's tests is imported."""
    if not settings.gpus():
        cpu_device.install()
    elif settings.gpus() < cpu_device.MOST_RANKS:
        _count_shared_devices()
    os.environ.setdefault(_IDENTITY, uuid.uuid4().hex[:8])
    for launcher in LAUNCHERS:
        setattr(importlib.import_module(launcher), "spawn", spawn)  # noqa: B010


def _count_shared_devices() -> None:
    """As many devices as the largest test asks for: ranks can share."""
    from vllm.platforms import current_platform

    most = cpu_device.MOST_RANKS
    torch.cuda.device_count = torch.accelerator.device_count = lambda: most
    platform = type(current_platform)
    platform.device_count = classmethod(lambda _cls: most)
