"""The ranks of a command: started on this machine, or by a launcher.

A launcher is torchrun, or whatever sets RANK, WORLD_SIZE and MASTER_ADDR.
"""

from __future__ import annotations

import datetime
import faulthandler
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import connection
from multiprocessing.context import SpawnProcess
from typing import NamedTuple, TypeAlias

import torch
import torch.distributed as dist

from moe_nvlink_plugin import env
from moe_nvlink_plugin.config import MAX_RANKS
from moe_nvlink_plugin.errors import ConfigError, MoeNvlinkError, PeerError
from moe_nvlink_plugin.groups import Group, as_group

from . import terminal

#: The ranks end within so many seconds beside their waits; rank 0 writes the report meanwhile.
_AFTER_FIRST_S = 180.0

#: What a rank does: gets its group and device, returns the exit code. It can be pickled.
Body: TypeAlias = Callable[[Group, torch.device], int]


class Wanted(NamedTuple):
    """What a command asks for.

    Attributes:
        command: its name, for messages.
        device: "cpu" or "cuda".
        ranks: to start if no launcher has; 0: one for each GPU, 2 on a CPU or one GPU.
        timeout_s: seconds that a rank waits for another one.
        limit_s: a process that takes so many seconds beside two waits, from its start or from
            `begin_anew` on, prints where it is, and ends.
    """

    command: str
    device: str
    ranks: int
    timeout_s: float
    limit_s: float


def device_kind(asked: str) -> str:
    """Return "cpu" or "cuda"; "" asks for GPUs if torch sees any.

    Raises:
        ConfigError: there are no GPUs.
    """
    kind = asked or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch sees no GPU; ask moe-nvlink doctor why")
    return kind


def run(wanted: Wanted, body: Body) -> int:
    """Run the body as every rank, or as the one that a launcher has started. Collective.

    Returns:
        The exit code: the body's; 1 if it failed on a rank.
    """
    launched = env.launched()
    if launched is None:
        return _start_ranks(wanted, body)
    return _start_own_rank(wanted, body, launched)


def begin_anew(limit_s: float, timeout_s: float) -> None:
    """Begin the time anew after which this process prints where it is, and ends."""
    faulthandler.dump_traceback_later(limit_s + 2 * timeout_s, exit=True)


def voice(rank: int) -> Callable[[str], None]:
    """Return what prints on rank 0, and nothing on the others."""
    return _say_nothing if rank else _say


def to_start(wanted: Wanted) -> int:
    """Return how many ranks are started if no launcher has.

    Raises:
        ConfigError: more ranks are asked for than an exchange has.
    """
    if wanted.ranks > MAX_RANKS:
        raise ConfigError(f"--ranks {wanted.ranks} is more than the {MAX_RANKS} of an exchange")
    gpus = _gpus(wanted)
    return wanted.ranks or (gpus if gpus > 1 else 2)


def _gpus(wanted: Wanted) -> int:
    return torch.cuda.device_count() if wanted.device == "cuda" else 0


def _start_ranks(wanted: Wanted, body: Body) -> int:
    """Start the ranks as processes of this machine and wait for them. Raises as `to_start`."""
    ranks, gpus = to_start(wanted), _gpus(wanted)
    if 0 < gpus < ranks:
        env.share_gpu()
        print(f"{ranks} ranks share {gpus} GPU{'s' * (gpus > 1)}; times mean nothing", flush=True)
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        meeting = f"file://{folder}/store"
        processes = [
            context.Process(
                target=_child,
                args=(wanted, body, rank, ranks, rank % gpus if gpus else None, meeting),
            )
            for rank in range(ranks)
        ]
        try:
            with terminal.interrupts_are_ours():
                for process in processes:
                    process.start()
            _join(processes, _AFTER_FIRST_S + 2 * wanted.timeout_s)
        except KeyboardInterrupt:
            print(f"{wanted.command}: interrupted", flush=True)
            return 130
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
    codes = [process.exitcode for process in processes]
    died = [f"rank {rank}: {code}" for rank, code in enumerate(codes) if code not in (0, 1)]
    if died:
        told = ", ".join(died)
        print(f"{wanted.command}: FAILED: processes ended early, exit status of {told}")
    return 0 if not any(codes) else 1


def _start_own_rank(wanted: Wanted, body: Body, launched: env.Launched) -> int:
    """Run a launcher's rank in a process of its own, whose death this one tells."""
    rank = launched.rank
    gpu = (launched.local_rank or 0) if wanted.device == "cuda" else None
    process = multiprocessing.get_context("spawn").Process(
        target=_child, args=(wanted, body, rank, launched.world_size, gpu, "env://")
    )

    def tell(what: str) -> None:
        # Rank 0 has the verdict; others write where a launcher's own words go.
        output = sys.stderr if rank else sys.stdout
        print(f"{wanted.command}: {what}", file=output, flush=True)

    def ended(signal_number: int, _frame: object) -> None:
        # A launcher ends all ranks when the first has ended in error.
        process.kill()
        tell(f"FAILED: {signal.Signals(signal_number).name} has ended rank {rank}")
        os._exit(1)

    with terminal.interrupts_are_ours():
        process.start()
    signal.signal(signal.SIGTERM, ended)
    try:
        process.join()
    except KeyboardInterrupt:
        process.kill()
        tell("interrupted")
        return 130
    code = process.exitcode
    if code not in (0, 1):
        tell(f"FAILED: processes ended early, exit status of rank {rank}: {code}")
    return 0 if code == 0 else 1


def _join(processes: Sequence[SpawnProcess], after_first_s: float) -> None:
    """Wait until all have ended. Kill what still runs so many seconds after the first end.

    A process that is stopped, or waits in the kernel, prints nothing and never ends.
    """
    connection.wait([process.sentinel for process in processes])
    end = time.monotonic() + after_first_s
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))
    for process in processes:
        if process.is_alive():
            process.kill()
        process.join()


def _child(
    wanted: Wanted, body: Body, rank: int, ranks: int, gpu: int | None, meeting: str
) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    terminal.take_any_text()
    faulthandler.enable()  # a crash says in which call
    device = torch.device("cpu") if gpu is None else torch.device("cuda", gpu)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    try:
        code = _rank(wanted, body, rank, ranks, device, meeting)
    except Exception as error:  # of any kind: the last line is always a verdict
        if not isinstance(error, MoeNvlinkError):
            traceback.print_exc()
        print(f"rank {rank}: {error}", file=sys.stderr, flush=True)
        if rank == 0:
            _say(f"{wanted.command}: FAILED: {type(error).__name__}: {error}")
        code = 1
    sys.exit(code)


def _end_with_parent() -> None:
    """End this process when the command that started it has ended, by whatever signal."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _rank(
    wanted: Wanted, body: Body, rank: int, ranks: int, device: torch.device, meeting: str
) -> int:
    """Be one rank. Collective."""
    begin_anew(wanted.limit_s, wanted.timeout_s)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    limit = datetime.timedelta(seconds=max(60.0, 2 * wanted.timeout_s))
    try:
        dist.init_process_group(
            "gloo", init_method=meeting, rank=rank, world_size=ranks, timeout=limit
        )
    except (RuntimeError, ValueError) as error:  # torch raises these for every failure
        raise PeerError(f"the ranks did not meet; start all {ranks}: {error}") from error
    try:
        return body(as_group(dist.group.WORLD, limit.total_seconds()), device)
    finally:
        faulthandler.cancel_dump_traceback_later()
        dist.destroy_process_group()


def _say(text: str) -> None:
    try:
        print(text, flush=True)
    except OSError as error:  # the other ranks go on all the same, and so does the report
        terminal.leave_output(error)


def _say_nothing(_text: str) -> None:
    """Leave it to rank 0."""
