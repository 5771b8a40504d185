"""Ranks as processes that meet over gloo; what each returns comes back through a file.

They are forked from a process that has imported torch and has no threads: that takes 3 s of CPU
time, and the tests start some hundred ranks.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import pickle
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import connection, forkserver
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

#: What bodies need, the modules they stand in included; nothing that reads the environment.
PRELOADED = [
    "torch.distributed",
    "pytest",
    "hypothesis",
    "cuda.bindings.driver",
    "moe_nvlink_plugin.testing",
    "tests.support.fake_cuda.transport",
    "tests.support.cases",
    "tests.support.compare",
]
#: Longer than ranks on a GPU wait for a peer (tests/support/real_path.py).
GRACE_S = 15.0
#: What they are forked from starts with this, not with what the first test to need ranks has set:
#: ranks of later tests would find its stand-in of a driver, by the linker's path.
_ENVIRONMENT = dict(os.environ)


def run_processes(
    ep_size: int,
    body: Callable[..., Any],
    folder: Path,
    *args: Any,
    killed: tuple[int, ...] = (),
    timeout_s: float = 200.0,
) -> list[Any]:
    """`[body(rank, ep_size, *args) for rank in ...]`, each in its own process, all at once.

    `body` must stand at the top of an importable module. torch.distributed is initialised there,
    and os.environ is as it is here now.
    Ranks in `killed` are expected to die by SIGKILL; None stands in the place of their result.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with mock.patch.dict(os.environ, _ENVIRONMENT, clear=True):
        forkserver.ensure_running()
    processes = [
        context.Process(
            target=_rank_main,
            args=(dict(os.environ), rank, ep_size, body, str(folder), args, len(killed)),
        )
        for rank in range(ep_size)
    ]
    try:
        for process in processes:
            process.start()
        expected = [-signal.SIGKILL if rank in killed else 0 for rank in range(ep_size)]
        _join(processes, expected, timeout_s)
        codes = [process.exitcode for process in processes]
        assert codes == expected, f"exit codes of the ranks: {codes}"
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()
    files = [folder / f"result{rank}" for rank in range(ep_size)]
    return [
        None if rank in killed else pickle.loads(file.read_bytes())
        for rank, file in enumerate(files)
    ]


def _join(
    processes: Sequence[multiprocessing.process.BaseProcess],
    expected: Sequence[int],
    timeout_s: float,
) -> None:
    """Waits for all of them; once one has failed, the others get GRACE_S to say what they saw."""
    give_up = time.monotonic() + timeout_s
    running = {process.sentinel: number for number, process in enumerate(processes)}
    while running and (left := give_up - time.monotonic()) > 0:
        for ended in connection.wait(list(running), left):
            assert isinstance(ended, int)
            number = running.pop(ended)
            processes[number].join()
            if processes[number].exitcode != expected[number]:
                give_up = min(give_up, time.monotonic() + GRACE_S)


def _rank_main(
    environment: Mapping[str, str],
    ep_rank: int,
    ep_size: int,
    body: Callable[..., Any],
    folder: str,
    args: tuple[Any, ...],
    num_killed: int,
) -> None:
    _live_in(environment)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=ep_rank, world_size=ep_size
    )
    result = body(ep_rank, ep_size, *args)
    unfinished = Path(folder, f"unfinished{ep_rank}")
    unfinished.write_bytes(pickle.dumps(result))
    unfinished.rename(Path(folder, f"result{ep_rank}"))
    # Not by a barrier: a test may have left the group's collectives out of step.
    give_up = time.monotonic() + 60
    while (
        len(list(Path(folder).glob("result*"))) < ep_size - num_killed
        and time.monotonic() < give_up
    ):
        time.sleep(0.01)
    dist.destroy_process_group()


def _live_in(environment: Mapping[str, str]) -> None:
    """Takes variables that the process this one was forked from was not started with."""
    os.environ.clear()
    os.environ.update(environment)
    # The linker read its path long ago; who opens a library of this name later gets this one.
    for folder in environment.get("LD_LIBRARY_PATH", "").split(":"):
        driver = Path(folder, "libcuda.so.1")
        if folder and driver.exists():
            ctypes.CDLL(str(driver))
            break
