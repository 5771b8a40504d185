"""Ranks of vLLM's tests: processes of this CPU.

vLLM's launchers start ranks by torch's `spawn`. As a pytest plugin this module puts its own `spawn`
in its place. A rank is forked from pytest's process, which has imported all that it needs and has
no threads, and is prepared before it calls anything of the test: "cuda" is its CPU (`cpu_device`),
and its groups are gloo's. A collective gives up after `COLLECTIVE_S`, because a test of several
subcases catches what one rank raises in a subcase, and the other ranks wait there.

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
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

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
#: Begins the names of vLLM's shared memory. Its workers get it from their executor.
_IDENTITY = "VLLM_DIST_IDENT"
_NCCL = ("nccl", "cpu:gloo,cuda:nccl")

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
) -> None:
    """torch's `spawn`, whose ranks are prepared. Raises what that raises, and RanksError."""
    assert join
    rank_main = _Rank(function)
    ranks = start_processes(  # type: ignore[no-untyped-call]
        rank_main, args, nprocs, join=False, daemon=True, start_method="fork"
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
    """What a rank runs, after it has been prepared."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.identity = uuid.uuid4().hex[:8]

    def __call__(self, *args: Any) -> Any:
        os.environ[_IDENTITY] = self.identity
        _prepare()
        for setup in _setups:
            setup()
        return self._function(*args)


def _prepare() -> None:
    cpu_device.install()
    limit = timedelta(seconds=float(os.environ.get(COLLECTIVE_S, "120")))
    torch.distributed.distributed_c10d.default_pg_timeout = limit
    gloo_for_nccl()


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


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Before any module of vLLM's tests is imported."""
    cpu_device.install()
    os.environ.setdefault(_IDENTITY, uuid.uuid4().hex[:8])
    for launcher in LAUNCHERS:
        setattr(importlib.import_module(launcher), "spawn", spawn)  # noqa: B010
