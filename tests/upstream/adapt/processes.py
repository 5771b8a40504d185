"""vLLM's launcher of a test's ranks, with processes on this CPU in the place of GPUs.

Names for other adapters:

* `in_every_rank(function)`: a module-level function without arguments; every rank started later
  calls it, after `cpu_device.install` and before anything of the test is imported there. Not
  called in this process.
* `install()`: replaces `parallel_launch_with_config` in
  `tests.kernels.moe.modular_kernel_tools.parallel_utils`. As a pytest plugin this module does so
  itself, before test modules import that by name. List it in `Group.adapters` after `cpu_device`.
* `in_step()`: around work that all ranks do together, where the test goes on after an exception.
* `join_together(ranks)`: for launchers of vLLM's tests that join their ranks one by one.
* `LIMIT_S`: name of the variable that bounds a launch in seconds.

A rank is forked from a process that has imported torch and vLLM once (Python's forkserver, which
has no threads of its own), with the environment of the test. The world is a gloo group; vLLM's
groups are made from it as in its own launcher. If a rank raises, dies or does not end in time, the
launch fails with the rank's number, and the other ranks are killed.

Tests of several subcases catch what a subcase raises, and meet at a barrier. If one rank alone
raises, the other ranks wait for it inside the subcase; collectives of gloo therefore give up after
`COLLECTIVE_S` instead of half an hour.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import multiprocessing
import os
import tempfile
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from torch.multiprocessing.spawn import ProcessContext, start_processes

from . import cpu_device

#: Seconds a launch may take, all of a test's subcases together.
LIMIT_S = "MOE_NVLINK_UPSTREAM_LAUNCH_S"
DEFAULT_LIMIT_S = 280.0
#: Seconds a collective may take: longer than ranks of a busy machine are apart.
COLLECTIVE_S = "MOE_NVLINK_UPSTREAM_COLLECTIVE_S"
DEFAULT_COLLECTIVE_S = 120.0
#: After one rank failed, the others may end by themselves for so long.
GRACE_S = 5.0
SHARED_MEMORY = Path("/dev/shm")

_PARALLEL_UTILS = "tests.kernels.moe.modular_kernel_tools.parallel_utils"
_setups: list[Callable[[], None]] = []


class Launch(NamedTuple):
    """What every rank of a launch is told, pickled.

    setups: called first. environment: the test's whole. store: file of the ranks' rendezvous. work:
    worker, configuration, arguments and named ones as the test gave them, pickled once more: to
    read it imports the test's module, which setups must come before.
    """

    world_size: int
    setups: tuple[Callable[[], None], ...]
    environment: dict[str, str]
    store: str
    work: bytes


class RanksError(RuntimeError):
    """Some ranks of a launch did not end in time; the message says which."""


def in_every_rank(function: Callable[[], None]) -> None:
    """Ranks that are started later call it before the test's own code. Local, idempotent."""
    if function not in _setups:
        _setups.append(function)


@contextlib.contextmanager
def in_step() -> Iterator[None]:
    """In a rank, around a step that all ranks do: prints an exception, which passes through.

    The test may catch it, and then the rank waits for others that wait for it.
    """
    try:
        yield
    except BaseException:
        traceback.print_exc()
        raise


def install() -> None:
    """Replaces vLLM's launcher in this process. Local, idempotent."""
    _gloo_groups().parallel_launch_with_config = launch
    # Needed by vLLM's shared-memory groups; its workers get it from their executor.
    os.environ.setdefault("VLLM_DIST_IDENT", uuid.uuid4().hex[:8])


def _gloo_groups() -> Any:
    """The tests' launcher module, whose groups are gloo's from now on. Local, idempotent."""
    utils: Any = importlib.import_module(_PARALLEL_UTILS)
    parallel_state = importlib.import_module("vllm.distributed.parallel_state")
    utils.init_distributed_environment = functools.partial(_with_gloo, parallel_state)
    return utils


def _with_gloo(parallel_state: Any, **named: Any) -> None:
    parallel_state.init_distributed_environment(**{**named, "backend": "gloo"})


def launch(
    world_size: int,
    worker: Callable[..., None],
    vllm_config: Any,
    env_dict: Mapping[Any, Any] | None,
    *args: Any,
    **kwargs: Any,
) -> None:
    """`parallel_launch_with_config` of vLLM's tests, on processes of this CPU.

    Raises what torch's `ProcessContext.join` does, and RanksError.
    """
    identity = uuid.uuid4().hex[:8]
    environment = {**os.environ, "VLLM_DIST_IDENT": identity}
    environment.update({str(name): str(value) for name, value in (env_dict or {}).items()})
    with tempfile.TemporaryDirectory(prefix="moe-upstream-") as folder:
        work = bytes(ForkingPickler.dumps((worker, vllm_config, args, kwargs)))
        plan = Launch(world_size, tuple(_setups), environment, str(Path(folder) / "store"), work)
        try:
            _run(plan)
        finally:
            # vLLM removes them when a process unloads its library, which forks never do.
            for left in SHARED_MEMORY.glob(f"{identity}-*"):
                left.unlink(missing_ok=True)


def _run(plan: Launch) -> None:
    # The first launch starts the server; `warm` is imported there once, for all ranks.
    multiprocessing.set_forkserver_preload([f"{__package__}.warm"])
    limit_s = float(os.environ.get(LIMIT_S, DEFAULT_LIMIT_S))
    end = time.monotonic() + limit_s
    ranks = start_processes(  # type: ignore[no-untyped-call]
        rank_main, (plan,), plan.world_size, join=False, daemon=True, start_method="forkserver"
    )
    try:
        while not ranks.join(max(0.0, end - time.monotonic()), GRACE_S):
            late = [rank for rank, one in enumerate(ranks.processes) if one.is_alive()]
            if late and time.monotonic() > end:
                raise RanksError(f"rank(s) {late} have not ended within {limit_s:g} s")
    finally:
        _kill(ranks.processes)


def join_together(ranks: Sequence[Any]) -> None:
    """Joins started processes; after one has failed, the others get `GRACE_S` and are killed.

    Raises torch's ProcessExitedException for the first that failed.
    """
    context = ProcessContext(ranks, [""] * len(ranks))  # type: ignore[no-untyped-call]
    try:
        while not context.join(grace_period=GRACE_S):
            pass
    finally:
        _kill(ranks)


def _kill(ranks: Sequence[Any]) -> None:
    for process in ranks:
        process.kill()
        process.join()


def rank_main(rank: int, plan: Launch) -> None:
    """One rank, from fork to end."""
    os.environ.clear()
    os.environ.update(plan.environment)
    cpu_device.install()
    for setup in plan.setups:
        setup()
    _run_rank(plan, rank)


def _run_rank(plan: Launch, rank: int) -> None:
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import cleanup_dist_env_and_memory

    utils = _gloo_groups()
    device = torch.device("cpu")
    limit = timedelta(seconds=float(os.environ.get(COLLECTIVE_S, DEFAULT_COLLECTIVE_S)))
    # Of groups that are made of the world.
    torch.distributed.distributed_c10d.default_pg_timeout = limit
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{plan.store}",
        rank=rank,
        world_size=plan.world_size,
        timeout=limit,
    )
    info = utils.ProcessGroupInfo(plan.world_size, plan.world_size, rank, 0, rank, device)
    worker, vllm_config, arguments, named = ForkingPickler.loads(plan.work)
    if vllm_config is None:
        worker(info, None, None, *arguments, **named)
        torch.distributed.destroy_process_group()
        return
    group = utils._set_vllm_config(vllm_config, plan.world_size, rank, rank)
    with set_current_vllm_config(vllm_config):
        worker(info, vllm_config, group, *arguments, **named)
    cleanup_dist_env_and_memory()


@pytest.hookimpl(trylast=True)
def pytest_load_initial_conftests() -> None:
    """Before any module of vLLM's tests is imported."""
    install()
