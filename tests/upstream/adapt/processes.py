"""vLLM's launcher of a test's ranks, with processes on this CPU in the place of GPUs.

Names for other adapters:

* `in_every_rank(function)`: a module-level function without arguments; every rank started later
  calls it, behind `cpu_device.install` and before anything of the test is imported there. Not
  called in this process.
* `install()`: replaces `parallel_launch_with_config` in
  `tests.kernels.moe.modular_kernel_tools.parallel_utils`. As a pytest plugin this module does so
  itself, before test modules import that by name. List it in `Group.adapters` behind `cpu_device`.
* `in_step()`: around work that all ranks do together, where the test goes on after an exception. A
  rank that raises there ends the launch, unless the others come to the end of that work too.
* `joined_together(ranks)`: for launchers of vLLM's tests that join their ranks one by one.
* `LIMIT_S`: name of the variable that bounds a launch in seconds.

A rank is forked from a process that has imported torch and vLLM once (Python's forkserver, which
has no threads of its own), with the environment of the test. The world is a gloo group; vLLM's
groups are made from it as in its own launcher. A rank that raises, dies or does not end in time
fails the launch with the ranks' names and what they printed last; the others are killed.

Tests of several subcases catch what a subcase raises, and meet at a barrier. Where one rank alone
raises, the others still wait for it inside the subcase, as long as gloo does: half an hour.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import math
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import wait
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from . import cpu_device

#: Seconds a launch may take, all of a test's subcases together.
LIMIT_S = "MOE_NVLINK_UPSTREAM_LAUNCH_S"
DEFAULT_LIMIT_S = 280.0
#: After one rank failed, the others may end by themselves for so long.
GRACE_S = 5.0
#: After one rank's exception in a step, the others may take so long to the end of that step. On a
#: busy machine they may need longer; then the launch, which has failed anyway, says less.
STEP_GRACE_S = 20.0
#: How often the launcher looks at the ranks' steps.
LOOK_S = 0.5
SHARED_MEMORY = Path("/dev/shm")
#: Of a failed rank's output, how many characters are shown.
TAIL = 6000

_PARALLEL_UTILS = "tests.kernels.moe.modular_kernel_tools.parallel_utils"
_setups: list[Callable[[], None]] = []
_steps: list[Path] = []  # in a rank: where it writes how its steps ended


class Launch(NamedTuple):
    """What every rank of a launch is told, pickled.

    setups: called first. environment: the test's whole; folders: of `sys.path`. store: file of the
    ranks' rendezvous. work: worker, configuration, arguments and named ones as the test gave them,
    pickled once more: to read it imports the test's module, which setups must come before.
    """

    world_size: int
    setups: tuple[Callable[[], None], ...]
    environment: dict[str, str]
    folders: tuple[str, ...]
    store: str
    work: bytes


class RanksError(RuntimeError):
    """Some ranks of a launch raised, died or hung; the message says which, and what they said."""


def in_every_rank(function: Callable[[], None]) -> None:
    """Ranks that are started later call it before the test's own code. Local, idempotent."""
    if function not in _setups:
        _setups.append(function)


@contextlib.contextmanager
def in_step() -> Iterator[None]:
    """In a rank, around a step that all ranks do: the launcher sees who raised and who is missing.

    Exceptions pass through. Outside of a launch nothing happens.
    """
    raised = ""
    try:
        yield
    except BaseException:
        raised = traceback.format_exc()
        raise
    finally:
        for path in _steps:
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(raised) + "\n")


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

    Raises RanksError.
    """
    identity = uuid.uuid4().hex[:8]
    environment = {**os.environ, "VLLM_DIST_IDENT": identity}
    environment.update({str(name): str(value) for name, value in (env_dict or {}).items()})
    with tempfile.TemporaryDirectory(prefix="moe-upstream-") as folder:
        plan = Launch(
            world_size,
            tuple(_setups),
            environment,
            tuple(sys.path),
            str(Path(folder) / "store"),
            bytes(ForkingPickler.dumps((worker, vllm_config, args, kwargs))),
        )
        try:
            _run(plan, Path(folder))
        finally:
            # vLLM removes them when a process unloads its library, which forks never do.
            for left in SHARED_MEMORY.glob(f"{identity}-*"):
                left.unlink(missing_ok=True)


def _run(plan: Launch, folder: Path) -> None:
    context = _fork_server()
    outputs = [folder / f"rank{rank}.txt" for rank in range(plan.world_size)]
    ranks = [
        context.Process(target=rank_main, args=(plan, rank, str(output)), daemon=True)
        for rank, output in enumerate(outputs)
    ]
    for process in ranks:
        process.start()
    try:
        problems = _await(ranks, _limit_s(), _Steps([_steps_of(output) for output in outputs]))
    finally:
        for process in ranks:
            process.kill()
            process.join()
    # Rank 0 reports the subcases, as it does on GPUs.
    print(_printed(outputs[0]), end="", flush=True)
    if problems:
        raise RanksError(
            f"of {plan.world_size} ranks:\n"
            + "\n".join(
                f"rank {rank} {problem}; its last words:\n{_printed(outputs[rank])[-TAIL:]}"
                for rank, problem in problems.items()
            )
        )


def _fork_server() -> Any:
    context = multiprocessing.get_context("forkserver")
    # The first launch starts it; `warm` is imported there once, for all ranks of all launches.
    context.set_forkserver_preload([f"{__package__}.warm"])
    return context


def _limit_s() -> float:
    return float(os.environ.get(LIMIT_S, DEFAULT_LIMIT_S))


def joined_together(ranks: Sequence[Any]) -> dict[int, str]:
    """Joins started processes; after one has failed, the others get `GRACE_S` and are killed.

    Returns what went wrong, by rank.
    """
    problems = _await(ranks, math.inf)
    for process in ranks:
        process.kill()
        process.join()
    return problems


class _Steps:
    """How the ranks' steps ended, read from the files that `in_step` writes."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = files
        self._seen: dict[tuple[int, int], float] = {}  # rank and step of an exception: since when

    def problems(self) -> dict[int, str]:
        """The exceptions of steps that other ranks do not come to the end of, by rank."""
        ends = [_lines(file) for file in self._files]
        lost = {}
        for rank, end in enumerate(ends):
            for step, raised in enumerate(end):
                missing = [other for other, theirs in enumerate(ends) if len(theirs) <= step]
                if not raised or not missing:
                    continue
                since = self._seen.setdefault((rank, step), time.monotonic())
                if time.monotonic() - since > STEP_GRACE_S:
                    lost[rank] = (
                        f"raised in step {step}, and {STEP_GRACE_S:g} s later rank(s) "
                        f"{', '.join(map(str, missing))} had not come to its end:\n{raised}"
                    )
        return lost


def _steps_of(output: Path) -> Path:
    return output.with_suffix(".steps")


def _lines(file: Path) -> list[str]:
    """Of each step its traceback, or ""; a line that is being written is left for later."""
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]


def _await(ranks: Sequence[Any], limit_s: float, steps: _Steps | None = None) -> dict[int, str]:
    """What went wrong, by rank; returns when nothing more is worth waiting for."""
    end = time.monotonic() + limit_s
    problems: dict[int, str] = {}
    running = dict(enumerate(ranks))
    while running and (left := end - time.monotonic()) > 0:
        wait([process.sentinel for process in running.values()], timeout=min(left, LOOK_S))
        for rank, process in list(running.items()):
            if process.exitcode is None:
                continue
            del running[rank]
            if process.exitcode:
                problems[rank] = f"ended with {process.exitcode}"
                end = min(end, time.monotonic() + GRACE_S)
        if running and not problems and steps is not None and (lost := steps.problems()):
            return lost
    if running and not problems:
        for rank in running:
            problems[rank] = f"has not ended within {limit_s:g} s"
    elif running:
        for rank in running:
            problems[rank] = f"was still running {GRACE_S:g} s after another rank's end"
    return problems


def _printed(output: Path) -> str:
    return output.read_text(errors="replace") if output.exists() else "(nothing)"


def rank_main(plan: Launch, rank: int, output: str) -> None:
    """One rank, from fork to end. Ends the process with a status of 1 when it raised."""
    _become(plan, output)
    _steps[:] = [_steps_of(Path(output))]
    try:
        cpu_device.install()
        for setup in plan.setups:
            setup()
        _run_rank(plan, rank)
    except BaseException:
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # threads of a broken group may never end


def _become(plan: Launch, output: str) -> None:
    os.environ.clear()
    os.environ.update(plan.environment)
    sys.path[:] = plan.folders
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115


def _run_rank(plan: Launch, rank: int) -> None:
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import cleanup_dist_env_and_memory

    utils = _gloo_groups()
    device = torch.device("cpu")
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{plan.store}", rank=rank, world_size=plan.world_size
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
