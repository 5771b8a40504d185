"""Run the backends of bench_moe_comm on ranks that are processes: CPU ranks, or a GPU for each.

tests/support/ranks.py starts the ranks here; torchrun and srun may have started them. All backends
live in the same processes and take turns (timing.py). If one rank fails, or the user interrupts,
the whole run ends, and no process is left.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import tempfile
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from benchmarks.columns import print_headings
from tests.support.ranks import RankError, run_processes

from . import rows, timing
from .accounting import traffic
from .backends import BACKENDS, Context, Side, WrongResult, unavailable
from .options import OptionError, Options
from .routers import tokens_of
from .rows import PHASES, Row

CEILING_HOW = (
    "torch's copy_ of as many bytes as the rank's put rows, from private to private memory, on all "
    "ranks at once, in turn with the backends"
)
#: Memory of a rank beside its rows, with torch imported.
PROCESS_BYTES = 250 * 2**20
#: After which a run that still goes on is taken for stuck: a week.
LONGEST_RUN_S = 7 * 24 * 3600.0


class RunError(RuntimeError):
    """A run ended without result; the message is for the user."""


class Launch(NamedTuple):
    """Which rank this process is.

    Attributes:
        local_rank: on its machine.
        init_method: torch.distributed's.
        folder: shared by the ranks of a run that was started here, else None.
    """

    rank: int
    size: int
    local_rank: int
    init_method: str
    folder: str | None


def external_launch(environ: Mapping[str, str]) -> Launch | None:
    """Read what torchrun or srun says of this process; None if nobody started it as a rank.

    Raises:
        OptionError: srun started ranks on several machines, and MASTER_ADDR is not set.
    """
    if {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= set(environ):
        rank, size, local_rank = "RANK", "WORLD_SIZE", "LOCAL_RANK"
    elif int(environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        rank, size, local_rank = "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"
    else:
        return None
    if int(environ.get("SLURM_STEP_NUM_NODES", 1)) > 1 and "MASTER_ADDR" not in environ:
        raise OptionError(
            "srun started ranks on several machines, and MASTER_ADDR does not say where rank 0 is; "
            'export MASTER_ADDR=$(scontrol show hostnames "$SLURM_NODELIST" | head -n 1)'
        )
    # A port of the job's, so that two jobs on one machine do not meet.
    port = environ.get("MASTER_PORT") or str(20000 + int(environ.get("SLURM_JOB_ID", 0)) % 10000)
    meeting = f"tcp://{environ.get('MASTER_ADDR', '127.0.0.1')}:{port}"
    on_machine = int(environ.get(local_rank, environ[rank]))
    return Launch(int(environ[rank]), int(environ[size]), on_machine, meeting, None)


def runnable(
    options: Options,
    *,
    explicit: bool,
    not_measured: list[str],
    why_not: Callable[[str, Options], str | None] = unavailable,
) -> tuple[str, ...]:
    """Return the backends that can run; name the others in not_measured.

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
            not_measured.append(f"{name}: {reason}")
    if not found:
        raise OptionError(f"no backend can run here: {'; '.join(not_measured)}")
    return tuple(found)


# One rank.


#: What the process that is rank 0 calls with the rows of each batch, as soon as it has them.
Show = Callable[[list[Row]], None]


def rank_rows(launch: Launch, options: Options, show: Show | None = None) -> list[Row]:
    """Measure all batches on this rank; return the rows on rank 0, none on others. Collective.

    Raises:
        WrongResult: on every rank, if any of them got another result than it must.
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
    # Shown on rank 0, if stderr is a terminal.
    with tqdm(total=steps, leave=False, disable=None if launch.rank == 0 else True) as bar:
        for tokens in options.batches:
            bar.set_description(f"{tokens} tokens")
            made = _batch(launch, options, tokens, device, bar.update)
            found += made
            if made:
                bar.clear()
                rows.show(made)
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
        clock = timing.RankClock(options, group, device, shared)
        copy = timing.PlainCopy(moved, range(rank, rank + 1), device)
        taken = timing.take_turns(sides | {timing.CEILING: copy}, options, clock, step)
        everyone = context.gathered(taken)
        told: dict[str, Row] = {}
        if options.kernel_breakdown:
            told = {name: clock.kernels_of(side, options.iters) for name, side in sides.items()}
        check(sides, context)  # still right after all those rounds
        dist.barrier(group)  # nobody gives up memory that others still read
    if rank != 0:
        return []
    samples = {
        name: {
            phase: torch.tensor([of[name][phase] for of in everyone], dtype=torch.float64).T
            for phase in PHASES
        }
        for name in taken
    }
    ceiling, made = samples.pop(timing.CEILING), list[Row]()
    for name, side in sides.items():
        extra = {"given": side.given, "checked": side.is_checked}
        extra |= {"kernels": told[name]} if told.get(name) else {}
        made.append(rows.make_row(options, name, tokens, samples[name], moved, ceiling, extra))
    rows.add_ratios(made)
    return made


def _shared(launch: Launch, options: Options, tokens: int) -> timing.SharedBarrier | None:
    """Make a barrier in shared memory, if all ranks were started here, on one machine."""
    if launch.folder is None:
        return None
    file = Path(launch.folder, f"barrier-{tokens}-{options.seed}")
    return timing.SharedBarrier(file, launch.rank, launch.size, options.timeout_s)


def check(sides: Mapping[str, Side], context: Context) -> None:
    """Run every backend's own check; raise on all ranks what any of them found. Collective.

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
    """Return the rows; other ranks of torchrun or srun than rank 0 return none.

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
    if launch is not None and options.bind:
        raise OptionError("--bind is for ranks that this program starts; let your launcher bind")
    if launch is None and options.device == "cpu":
        _check_memory(options)
    if launch is None or launch.rank == 0:
        print_headings(rows.COLUMNS)
    return _run_here(options, show) if launch is None else rank_rows(launch, options, show)


def _check_memory(options: Options) -> None:
    """Estimate the memory of CPU ranks: a rank that the system kills says nothing.

    Raises:
        OptionError: the largest batch would take more than there is.
    """
    import psutil

    free, tokens = psutil.virtual_memory().available, max(options.batches)
    row_bytes = options.hidden_size * options.torch_dtype.itemsize
    needed = (2 * len(options.backends) + 4) * options.ep_size**2 * tokens * row_bytes
    needed += options.ep_size * PROCESS_BYTES
    if needed > 0.9 * free:
        raise OptionError(
            f"{tokens} tokens on each of {options.ep_size} ranks take about {needed / 2**30:.0f} "
            f"GiB, and {free / 2**30:.0f} GiB are free; take fewer tokens, ranks or backends"
        )


def _run_here(options: Options, show: Show | None) -> list[Row]:
    # CPU ranks are forked from a process that has imported torch; a GPU's need a fresh process.
    method = "spawn" if options.device == "cuda" else "forkserver"
    with tempfile.TemporaryDirectory(prefix="moe_comm-") as folder:
        try:
            found: list[Row] = run_processes(
                options.ep_size,
                _rank_main,
                Path(folder),
                *(options, folder, show),
                timeout_s=LONGEST_RUN_S,
                method=method,
                meets=False,
                ends_with_parent=True,
            )[0]
        except KeyboardInterrupt:
            raise RunError("interrupted; batches that were done are on file") from None
        except RankError as error:
            raise _explained(error) from error
    return found


def _rank_main(rank: int, size: int, options: Options, folder: str, show: Show | None) -> list[Row]:
    launch = Launch(rank, size, rank, f"file://{folder}/rendezvous", folder)
    if options.bind:  # before gloo starts its threads, which keep to these cores too
        os.sched_setaffinity(0, cores_of(rank, options.threads, os.sched_getaffinity(0)))
    return rank_rows(launch, options, show)


def cores_of(rank: int, threads: int, cores: Collection[int]) -> set[int]:
    """Return the cores of a rank with so many threads: of those there are, the next in turn."""
    in_order = sorted(cores)
    return {in_order[(rank * threads + thread) % len(in_order)] for thread in range(threads)}


def _explained(error: RankError) -> Exception:
    """Find the failure that explains the others, which only complain of a rank that ended."""
    for raised in (WrongResult, OptionError):
        for failure in error.failures.values():
            if failure.kind == raised.__name__:
                return raised(failure.message)
    rank, first = next(iter(error.failures.items()))
    return RunError(str(RankError({rank: first})))
