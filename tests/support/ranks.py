"""The one launcher of ranks: as processes that meet over gloo, or as threads of this process.

    run_processes(2, body, folder, "an argument")   # [body(0, 2, "an argument"), body(1, 2, ...)]
    run_threads(2, body)                            # [body(0), body(1)]

What a rank returns comes back in the order of the ranks. If a rank fails, the other processes get
GRACE_S to say what they saw and are then killed; threads cannot be killed. An error names the rank.

CPU ranks are forked from a process that has imported torch and has no threads: to import it takes
3 s of CPU time, and the tests start some hundred ranks. With a GPU, ask for "spawn".
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import connection, forkserver
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from unittest import mock

import torch
import torch.distributed as dist

T = TypeVar("T")

#: What bodies need, the modules they stand in included; nothing that reads the environment.
PRELOADED = [
    "torch.distributed",
    "pytest",
    "hypothesis",
    "cuda.bindings.driver",
    "moe_nvlink_plugin.testing",
    "tests.support.fake_cuda.transport",
    "moe_nvlink_plugin.verify.cases",
    "moe_nvlink_plugin.verify.compare",
]
#: vLLM's libraries: most of the time that its import takes. For ranks of a process that has vLLM.
#: Some read variables (HF_*, TORCHINDUCTOR_*) when they are imported: ranks then have those values,
#: whatever a test has set since.
LIBRARIES_OF_VLLM = [
    "torch._inductor.lowering",
    "openai.types.responses",
    "transformers.modeling_gguf_pytorch_utils",
    "transformers.models.auto.image_processing_auto",
    "scipy.signal",
    "xgrammar",
    "fastapi",
    "aiohttp",
    "uvicorn",
]
#: SGLang's own, for ranks of a process that has SGLang. They read the environment, which there is
#: the same for all tests.
OF_SGLANG = ["sglang.srt.model_executor.model_runner"]
#: Longer than ranks on a GPU wait for a peer (tests/support/real_path.py).
GRACE_S = 15.0
#: What they are forked from starts with this, not with what the first test to need ranks has set:
#: ranks of later tests would find its stand-in of a driver, by the linker's path.
_ENVIRONMENT = dict(os.environ)


class Failure(NamedTuple):
    """How a rank ended that should have ended otherwise.

    Attributes:
        kind: the name of the exception's class, or "" if it raised none.
        message: of the exception, or what became of the process.
        trace: of the exception.
    """

    kind: str
    message: str
    trace: str = ""


class RankError(AssertionError):
    """Ranks that failed, the first of them first."""

    def __init__(self, failures: Mapping[int, Failure]) -> None:
        self.failures = dict(failures)
        told = [
            f"rank {rank}: {kind}{': ' if kind else ''}{message}\n{trace}".rstrip()
            for rank, (kind, message, trace) in self.failures.items()
        ]
        super().__init__("\n".join(told))


# Processes.


def run_processes(
    ep_size: int,
    body: Callable[..., Any],
    folder: Path,
    *args: Any,
    killed: tuple[int, ...] = (),
    timeout_s: float = 600.0,
    method: str = "forkserver",
    meets: bool = True,
    ends_with_parent: bool = False,
) -> list[Any]:
    """`[body(rank, ep_size, *args) for rank in ...]`, each in its own process, all at once.

    `body` must stand at the top of an importable module. torch.distributed is initialised there,
    and os.environ is as it is here now.

    Args:
        folder: an empty one, for what ranks return and for their meeting.
        killed: ranks that are expected to die by SIGKILL; their result is None.
        method: of multiprocessing.
        meets: False: `body` initialises torch.distributed itself, or needs none.
        ends_with_parent: ranks end when this process does, even by SIGKILL.

    Raises:
        RankError: a rank raised, ended otherwise than expected, or had not ended after `timeout_s`.
    """
    context: Any = multiprocessing.get_context(method)
    if method == "forkserver":
        of_vllm = LIBRARIES_OF_VLLM if "vllm" in sys.modules else []
        of_sglang = OF_SGLANG if "sglang.srt" in sys.modules else []
        context.set_forkserver_preload([*PRELOADED, *of_vllm, *of_sglang])
        environment = dict(os.environ) if of_sglang else _ENVIRONMENT
        with mock.patch.dict(os.environ, environment, clear=True):
            forkserver.ensure_running()
    options = _Options(dict(os.environ), str(folder), len(killed), meets, ends_with_parent)
    processes = [
        context.Process(target=_rank_main, args=(options, rank, ep_size, body, args))
        for rank in range(ep_size)
    ]
    try:
        for process in processes:
            process.start()
        expected = [-signal.SIGKILL if rank in killed else 0 for rank in range(ep_size)]
        ended = _join(processes, expected, timeout_s)
        failures = {
            rank: _failure(processes[rank], folder / f"error{rank}", timeout_s)
            for rank in [*ended, *(rank for rank in range(ep_size) if rank not in ended)]
            if processes[rank].exitcode != expected[rank]
        }
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()
    if failures:
        raise RankError(failures)
    files = [folder / f"result{rank}" for rank in range(ep_size)]
    return [
        None if rank in killed else pickle.loads(file.read_bytes())
        for rank, file in enumerate(files)
    ]


class _Options(NamedTuple):
    """What every rank is told."""

    environment: Mapping[str, str]
    folder: str
    num_killed: int
    meets: bool
    ends_with_parent: bool


def _join(
    processes: Sequence[multiprocessing.process.BaseProcess],
    expected: Sequence[int],
    timeout_s: float,
) -> list[int]:
    """Waits for all of them, or GRACE_S once one has failed; the ranks in the order they ended."""
    give_up = time.monotonic() + timeout_s
    running = {process.sentinel: number for number, process in enumerate(processes)}
    order = []
    while running and (left := give_up - time.monotonic()) > 0:
        for ended in connection.wait(list(running), left):
            assert isinstance(ended, int)
            number = running.pop(ended)
            order.append(number)
            processes[number].join()
            if processes[number].exitcode != expected[number]:
                give_up = min(give_up, time.monotonic() + GRACE_S)
    return order


def _failure(
    process: multiprocessing.process.BaseProcess, error: Path, timeout_s: float
) -> Failure:
    if error.exists():
        failure: Failure = pickle.loads(error.read_bytes())
        return failure
    if process.exitcode is None:
        return Failure(
            "", f"still ran {timeout_s:.0f} s after its start or {GRACE_S:.0f} s after a failure"
        )
    return Failure("", f"exit status {process.exitcode}")


def _rank_main(
    options: _Options, ep_rank: int, ep_size: int, body: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    if options.ends_with_parent:
        threading.Thread(target=_end_with_parent, daemon=True).start()
    _live_in(options.environment)
    torch.set_num_threads(1)
    folder = Path(options.folder)
    try:
        if options.meets:
            meeting = f"file://{folder}/store"
            dist.init_process_group("gloo", init_method=meeting, rank=ep_rank, world_size=ep_size)
        result = body(ep_rank, ep_size, *args)
        _leave(folder / f"result{ep_rank}", result)
    except BaseException as error:
        told = Failure(type(error).__name__, str(error), traceback.format_exc())
        _leave(folder / f"error{ep_rank}", told)
        raise
    if not options.meets:
        return
    # Not by a barrier: a test may have left the group's collectives out of step.
    give_up = time.monotonic() + 60
    while (
        len(list(folder.glob("result*"))) < ep_size - options.num_killed
        and time.monotonic() < give_up
    ):
        time.sleep(0.01)
    dist.destroy_process_group()


def _leave(file: Path, value: Any) -> None:
    """A file that is there is whole."""
    unfinished = file.with_name(f"unfinished-{file.name}")
    unfinished.write_bytes(pickle.dumps(value))
    unfinished.rename(file)


def _end_with_parent() -> None:
    """The parent may have had no time to end its ranks, and they are a server's children."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


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


# Threads.


def run_threads(size: int, body: Callable[[int], T], timeout_s: float = 250.0) -> list[T]:
    """`[body(rank) for rank in range(size)]`, all at once, each in a thread of its own.

    A thread cannot be killed. Each is a daemon, so that a rank that hangs does not hold up the end
    of this process.

    Raises:
        Exception: What the first rank in the order of the ranks raised, after all have ended.
        RankError: Ranks have not ended after `timeout_s`.
    """
    futures = {rank: concurrent.futures.Future[T]() for rank in range(size)}

    def rank_main(rank: int) -> None:
        try:
            futures[rank].set_result(body(rank))
        except BaseException as error:
            futures[rank].set_exception(error)

    for rank in futures:
        threading.Thread(target=rank_main, args=(rank,), name=f"rank {rank}", daemon=True).start()
    concurrent.futures.wait(futures.values(), timeout_s)
    late = [rank for rank, future in futures.items() if not future.done()]
    if late:
        message = f"still ran after {timeout_s:.0f} s"
        raise RankError({rank: Failure("", message) for rank in late})
    for rank, future in futures.items():
        error = future.exception()
        if error is not None:
            if sys.version_info >= (3, 11):
                error.add_note(f"on rank {rank}")
            raise error
    return [future.result() for future in futures.values()]
