"""Ranks as processes: started here, or by torchrun or srun; CPU ranks, or one GPU for each.

All backends live in the same processes and take turns (timing.py). A run ends as a whole: where one
rank fails, or the user interrupts, no process is left.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
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
from .rows import Samples, add_ratios, make_row
from .table import Progress, footnotes, header, lines, per_rank
from .timing import CEILING, Clock, RankError, SharedBarrier

Row = dict[str, Any]

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
    torch.set_num_threads(options.threads)
    device = _device(launch, options)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend,
        init_method=launch.init_method,
        rank=launch.rank,
        world_size=launch.size,
        timeout=timing.group_timeout(options),
    )
    steps = (options.iters + options.warmup) * len(options.batches)
    progress = Progress(steps, shown=launch.rank == 0)
    found: list[Row] = []
    with contextlib.closing(progress):
        for tokens in options.batches:
            made = _batch(launch, options, tokens, device, progress)
            found += made
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
    launch: Launch, options: Options, tokens: int, device: torch.device, progress: Progress
) -> list[Row]:
    group = dist.group.WORLD
    moved = traffic(options, tokens)
    mine = tokens_of(options, tokens, launch.rank).to(device)
    context = Context(options, launch.rank, mine, group, device, moved)
    with contextlib.ExitStack() as stack:
        sides = {
            name: stack.enter_context(contextlib.closing(BACKENDS[name](context)))
            for name in options.backends
        }
        check(sides, context)
        clock = timing.make_clock(options, group, device, _shared(launch, options, tokens))
        copy = timing.PlainCopy(moved, launch.rank, device)
        everyone = sides | {CEILING: copy}
        taken = timing.take_turns(
            everyone, options, clock, lambda: progress.step(f"{tokens} tokens")
        )
        samples = {name: timing.all_ranks(of, options.ep_size, group) for name, of in taken.items()}
        kernels = _kernels(sides, options, clock)
        check(sides, context)  # still right after all those rounds
        dist.barrier(group)  # nobody gives up memory that others still read
    if launch.rank != 0:
        return []
    ceiling = samples.pop(CEILING)
    made = [
        make_row(
            options,
            name,
            tokens,
            samples[name],
            moved,
            ceiling,
            {"given": side.given} | kernels[name],
        )
        for name, side in sides.items()
    ]
    add_ratios(made)
    for line in lines(made):
        progress.say(line)
    return made


def _kernels(sides: Mapping[str, Side], options: Options, clock: Clock) -> dict[str, Row]:
    if not options.kernel_breakdown:
        return {name: {} for name in sides}
    told = {name: clock.kernels(side, options.iters) for name, side in sides.items()}
    return {name: {"kernels": parts} if parts else {} for name, parts in told.items()}


def _shared(launch: Launch, options: Options, tokens: int) -> SharedBarrier | None:
    """Where all ranks were started here, they share a machine, and so memory."""
    if launch.folder is None:
        return None
    file = Path(launch.folder, f"barrier-{tokens}-{options.seed}")
    return SharedBarrier(file, launch.rank, launch.size, options.timeout_s)


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
    if launch is None:
        _check_memory(options)
        print(header(), flush=True)
        return _run_here(options, show)
    if launch.size != options.ep_size:
        raise OptionError(
            f"{launch.size} ranks were started, and ep_size={options.ep_size}; add "
            f"--ep_size {launch.size}"
        )
    if launch.rank == 0:
        print(header(), flush=True)
    return rank_rows(launch, options, show)


def _check_memory(options: Options) -> None:
    """Rough, and for CPU ranks only: a rank that the system kills says nothing.

    Raises:
        OptionError: the largest batch would take more than there is.
    """
    if options.device != "cpu":
        return
    try:
        pages = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        told = Path("/proc/meminfo").read_text().split("MemAvailable:")
        pages = int(told[1].split()[0]) * 1024 if len(told) > 1 else pages
    except (OSError, ValueError):
        return
    row_bytes = options.hidden_size * options.torch_dtype.itemsize
    tokens = max(options.batches)
    slots = options.ep_size**2 * max(options.max_tokens, tokens)  # a capacity is not all touched
    needed = (2 * len(options.backends) + 4) * options.ep_size**2 * tokens * row_bytes
    if needed > 0.9 * pages:
        raise OptionError(
            f"{tokens} tokens on each of {options.ep_size} ranks take about {needed / 2**30:.0f} "
            f"GiB ({slots} slots), and {pages / 2**30:.0f} GiB are free; take fewer tokens, ranks "
            "or backends"
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
            _end(ranks.processes)
        found: list[Row] = json.loads(Path(folder, "rows.json").read_text())
        return found


def _rank_main(rank: int, options: Options, folder: str, show: Show | None) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    launch = Launch(rank, options.ep_size, rank, f"file://{folder}/rendezvous", folder)
    try:
        made = rank_rows(launch, options, show)
    except Exception as error:
        told = {
            "kind": type(error).__name__,
            "message": str(error),
            "trace": traceback.format_exc(),
        }
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

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _end(processes: Sequence[Any]) -> None:
    for process in processes:
        if process.is_alive():
            process.kill()
    for process in processes:
        process.join()


def _failure(folder: Path, error: Exception) -> Exception:
    """The failure that explains the others: peers of a rank that ended complain of that."""
    told = {
        rank: json.loads(file.read_text())
        for rank in range(1024)
        if (file := folder / _FAILURE.format(rank=rank)).exists()
    }
    for kind, raised in (("WrongResult", WrongResult), ("OptionError", OptionError)):
        for failure in told.values():
            if failure["kind"] == kind:
                return raised(failure["message"])
    first = getattr(error, "error_index", min(told, default=0))
    if first in told:
        failure = told[first]
        return RunError(
            f"rank {first}: {failure['kind']}: {failure['message']}\n{failure['trace']}"
        )
    return RunError(f"a rank ended without a word: {error}")


def print_notes(found: Sequence[Row]) -> None:
    """Behind the table: what backends are given, kernels, ranks' statistics."""
    for line in [*footnotes(found), *per_rank(found)]:
        print(line, flush=True)


__all__ = [
    "CEILING_HOW",
    "Launch",
    "RankError",
    "RunError",
    "Samples",
    "external_launch",
    "print_notes",
    "rank_rows",
    "run",
    "runnable",
]
