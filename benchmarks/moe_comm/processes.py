"""Ranks as processes: started here, or by torchrun or srun; CPU ranks, or one GPU for each.

All backends live in the same processes and take turns (timing.py). A run ends as a whole: where one
rank fails, or the user interrupts, no process is left.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import multiprocessing
import os
import signal
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

from . import timing
from .accounting import traffic
from .backends import BACKENDS, Context, Side, WrongResult, unavailable
from .options import OptionError, Options
from .routers import tokens_of
from .rows import HEADER, Row, add_ratios, lines, make_row

CEILING_HOW = (
    "torch's copy_ of as many bytes as the rank's put rows, from private to private memory, on all "
    "ranks at once, in turn with the backends"
)

#: What a failed rank leaves for whoever started it.
_FAILURE = "failure-{rank}.json"


class RunError(RuntimeError):
    """A run ended without result; the message is for the user."""


class Launch(NamedTuple):
    """Which rank this process is.

    local_rank: on its machine; init_method: torch.distributed's; folder: shared by the ranks of a
    run that was started here, else None.
    """

    rank: int
    size: int
    local_rank: int
    init_method: str
    folder: str | None


def external_launch(environ: Mapping[str, str]) -> Launch | None:
    """What torchrun or srun says of this process; None: nobody started it as a rank.

    Raises:
        OptionError: srun, and nobody says where rank 0 is.
    """
    if {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= set(environ):
        rank, size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
        local_rank = int(environ.get("LOCAL_RANK", rank))
        return Launch(rank, size, local_rank, _meeting_point(environ), None)
    size = int(environ.get("SLURM_STEP_NUM_TASKS", 1))
    if size == 1:
        return None
    if int(environ.get("SLURM_STEP_NUM_NODES", 1)) > 1 and "MASTER_ADDR" not in environ:
        raise OptionError(
            "srun started ranks on several machines, and MASTER_ADDR does not say where rank 0 is; "
            'export MASTER_ADDR=$(scontrol show hostnames "$SLURM_NODELIST" | head -n 1)'
        )
    rank, local_rank = int(environ["SLURM_PROCID"]), int(environ["SLURM_LOCALID"])
    return Launch(rank, size, local_rank, _meeting_point(environ), None)


def _meeting_point(environ: Mapping[str, str]) -> str:
    # A port of the job's, so that two jobs on one machine do not meet.
    port = environ.get("MASTER_PORT") or str(20000 + int(environ.get("SLURM_JOB_ID", 0)) % 10000)
    return f"tcp://{environ.get('MASTER_ADDR', '127.0.0.1')}:{port}"


def runnable(
    options: Options,
    *,
    explicit: bool,
    left_out: list[str],
    why_not: Callable[[str, Options], str | None] = unavailable,
) -> tuple[str, ...]:
    """The backends that can run, others named in left_out.

    Args:
        why_not: backend, options -> why it cannot run here, or None.

    Raises:
        OptionError: none can, or one cannot and was asked for by name.
    """
    found = []
    for name in options.backends:
        reason = why_not(name, options)
        if reason is None:
            found.append(name)
        elif explicit:
            raise OptionError(f"backend {name} cannot run here: {reason}")
        else:
            left_out.append(f"{name}: {reason}")
    if not found:
        raise OptionError(f"no backend can run here: {'; '.join(left_out)}")
    return tuple(found)


# One rank.


#: Is given the rows of each batch when they are there, in whichever process is rank 0.
Show = Callable[[list[Row]], None]


def rank_rows(launch: Launch, options: Options, show: Show | None = None) -> list[Row]:
    """All batches on this rank; rows on rank 0, nothing on others. Collective.

    Raises:
        WrongResult: on every rank, where any of them got another result than it must.
    """
    from tqdm import tqdm

    torch.set_num_threads(options.threads)
    device = _device(launch, options)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        init_method=launch.init_method,
        rank=launch.rank,
        world_size=launch.size,
        timeout=datetime.timedelta(seconds=options.timeout_s + 60),  # that of our verbs, and some
    )
    steps, found = (options.iters + options.warmup) * len(options.batches), list[Row]()
    # On rank 0 where stderr is a terminal.
    with tqdm(total=steps, leave=False, disable=None if launch.rank == 0 else True) as bar:
        for tokens in options.batches:
            bar.set_description(f"{tokens} tokens")
            made = _batch(launch, options, tokens, device, bar.update)
            found += made
            if made:
                bar.clear()
                print("\n".join(lines(made)), flush=True)
            if made and show is not None:
                show(made)
    dist.barrier()  # gloo ends a process that takes the group down while another still uses it
    dist.destroy_process_group()
    return found


def _device(launch: Launch, options: Options) -> torch.device:
    if options.device != "cuda":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if launch.local_rank >= count:
        raise OptionError(
            f"rank {launch.rank} is number {launch.local_rank} on its machine, which has {count} "
            "GPUs; start fewer ranks, or take --emulate_ranks on one GPU"
        )
    device = torch.device("cuda", launch.local_rank)
    torch.cuda.set_device(device)
    return device


def _batch(
    launch: Launch, options: Options, tokens: int, device: torch.device, step: Callable[[], Any]
) -> list[Row]:
    group, rank = dist.group.WORLD, launch.rank
    moved, mine = traffic(options, tokens), tokens_of(options, tokens, rank).to(device)
    context = Context(options, rank, mine, group, device)
    with contextlib.ExitStack() as stack:
        sides = {
            name: stack.enter_context(contextlib.closing(BACKENDS[name](context)))
            for name in options.backends
        }
        check(sides, context)
        shared = _shared(launch, options, tokens)
        clock = timing.CpuClock(group, shared)
        if device.type == "cuda":
            clock = timing.GpuClock(options, group, device)
        copy = timing.PlainCopy(moved, range(rank, rank + 1), device)
        taken = timing.take_turns(sides | {timing.CEILING: copy}, options, clock, step)
        samples = {name: timing.all_ranks(of, options.ep_size, group) for name, of in taken.items()}
        told: dict[str, Row] = {}
        if options.kernel_breakdown:
            told = {name: clock.kernels(side, options.iters) for name, side in sides.items()}
        check(sides, context)  # still right after all those rounds
        dist.barrier(group)  # nobody gives up memory that others still read
    if rank != 0:
        return []
    ceiling, made = samples.pop(timing.CEILING), list[Row]()
    for name, side in sides.items():
        extra = {"given": side.given} | ({"kernels": told[name]} if told.get(name) else {})
        made.append(make_row(options, name, tokens, samples[name], moved, ceiling, extra))
    add_ratios(made)
    return made


def _shared(launch: Launch, options: Options, tokens: int) -> timing.SharedBarrier | None:
    """Where all ranks were started here, they share a machine, and so memory."""
    if launch.folder is None:
        return None
    file = Path(launch.folder, f"barrier-{tokens}-{options.seed}")
    return timing.SharedBarrier(file, launch.rank, launch.size, options.timeout_s)


def check(sides: Mapping[str, Side], context: Context) -> None:
    """Every backend's own check; raises on all ranks what any of them found. Collective.

    Raises:
        WrongResult: with the findings of all ranks.
    """
    for side in sides.values():
        finding = None
        try:
            side.check()
        except WrongResult as error:
            finding = str(error)
        findings = [found for found in context.gathered(finding) if found is not None]
        if findings:
            raise WrongResult("; ".join(findings[:3]))


# All ranks.


def run(options: Options, show: Show | None = None) -> list[Row]:
    """The rows, on whoever is rank 0; on other ranks of torchrun or srun, none.

    Args:
        show: can be pickled, because rank 0 may be another process.

    Raises:
        OptionError: the ranks there are do not fit the options.
        WrongResult: no number comes of such a run.
        RunError: a rank failed otherwise, or the user interrupted.
    """
    launch = external_launch(os.environ)
    if launch is not None and launch.size != options.ep_size:
        raise OptionError(
            f"{launch.size} ranks were started, and ep_size={options.ep_size}; add "
            f"--ep_size {launch.size}"
        )
    if launch is None and options.device == "cpu":
        _check_memory(options)
    if launch is None or launch.rank == 0:
        print(HEADER, flush=True)
    return _run_here(options, show) if launch is None else rank_rows(launch, options, show)


def _check_memory(options: Options) -> None:
    """Rough, and for CPU ranks only: a rank that the system kills says nothing.

    Raises:
        OptionError: the largest batch would take more than there is.
    """
    import psutil

    free, tokens = psutil.virtual_memory().available, max(options.batches)
    row_bytes = options.hidden_size * options.torch_dtype.itemsize
    needed = (2 * len(options.backends) + 4) * options.ep_size**2 * tokens * row_bytes
    if needed > 0.9 * free:
        raise OptionError(
            f"{tokens} tokens on each of {options.ep_size} ranks take about {needed / 2**30:.0f} "
            f"GiB, and {free / 2**30:.0f} GiB are free; take fewer tokens, ranks or backends"
        )


def _run_here(options: Options, show: Show | None) -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="moe_comm-") as folder, _terminations_raise():
        # A server that has imported everything once forks CPU ranks; a GPU's need a fresh process.
        method = "spawn" if options.device == "cuda" else "forkserver"
        if method == "forkserver":
            mp.set_forkserver_preload([__name__])
        ranks = mp.start_processes(  # type: ignore[attr-defined,no-untyped-call]
            _rank_main, (options, folder, show), options.ep_size, join=False, start_method=method
        )
        try:
            while not ranks.join(timeout=1.0):
                pass
        except KeyboardInterrupt:
            raise RunError("interrupted; batches that were done are on file") from None
        except (ProcessRaisedException, ProcessExitedException) as error:
            raise _failure(Path(folder), error) from error
        finally:
            for process in ranks.processes:
                process.kill()
                process.join()
        found: list[Row] = json.loads(Path(folder, "rows.json").read_text())
        return found


def _rank_main(rank: int, options: Options, folder: str, show: Show | None) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    launch = Launch(rank, options.ep_size, rank, f"file://{folder}/rendezvous", folder)
    try:
        made = rank_rows(launch, options, show)
    except Exception as error:
        told = (type(error).__name__, str(error), traceback.format_exc())
        unfinished = Path(folder, f"unfinished-{rank}")
        unfinished.write_text(json.dumps(told))
        unfinished.rename(Path(folder, _FAILURE.format(rank=rank)))
        raise
    if rank == 0:
        Path(folder, "rows.json").write_text(json.dumps(made))


def _end_with_parent() -> None:
    """Waits, at no cost, for the end of whoever started the run, which may have had no time to end
    its ranks; those are the children of a server of it, and would go on.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


@contextlib.contextmanager
def _terminations_raise() -> Iterator[None]:
    """SIGTERM ends a run as Ctrl-C does, ranks first."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _failure(folder: Path, error: Exception) -> Exception:
    """The failure that explains the others: peers of a rank that ended complain of that."""
    told = {
        rank: json.loads(file.read_text())
        for rank in range(1024)
        if (file := folder / _FAILURE.format(rank=rank)).exists()
    }
    for raised in (WrongResult, OptionError):
        for kind, message, _trace in told.values():
            if kind == raised.__name__:
                return raised(message)
    first = getattr(error, "error_index", min(told, default=0))
    if first not in told:
        return RunError(f"a rank ended without a word: {error}")
    kind, message, trace = told[first]
    return RunError(f"rank {first}: {kind}: {message}\n{trace}")
