"""Ranks as processes that meet over gloo; what each returns comes back through a file."""

from __future__ import annotations

import multiprocessing
import pickle
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def run_processes(
    ep_size: int,
    body: Callable[..., Any],
    folder: Path,
    *args: Any,
    killed: tuple[int, ...] = (),
    timeout_s: float = 200.0,
) -> list[Any]:
    """`[body(rank, ep_size, *args) for rank in ...]`, each in its own process, all at once.

    `body` must stand at the top of an importable module. torch.distributed is initialised there.
    Ranks in `killed` are expected to die by SIGKILL; None stands in the place of their result.
    """
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(
            target=_rank_main, args=(rank, ep_size, body, str(folder), args, len(killed))
        )
        for rank in range(ep_size)
    ]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(timeout_s)
        codes = [process.exitcode for process in processes]
        expected = [-signal.SIGKILL if rank in killed else 0 for rank in range(ep_size)]
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


def _rank_main(
    ep_rank: int,
    ep_size: int,
    body: Callable[..., Any],
    folder: str,
    args: tuple[Any, ...],
    num_killed: int,
) -> None:
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
