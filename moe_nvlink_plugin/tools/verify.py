"""moe-nvlink verify: ranks run every kernel against the reference, and time it beside others.

A launcher starts the ranks (torchrun, or whatever sets RANK, WORLD_SIZE and MASTER_ADDR), or this
command starts them on this machine.
"""

from __future__ import annotations

import dataclasses
import datetime
import faulthandler
import io
import json
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from multiprocessing import connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from moe_nvlink_plugin import env
from moe_nvlink_plugin.errors import ConfigError, MoeNvlinkError, PeerError
from moe_nvlink_plugin.groups import Group, as_group, refuse_differences
from moe_nvlink_plugin.verify import table
from moe_nvlink_plugin.verify.checks import Check
from moe_nvlink_plugin.verify.plan import Geometry, plan, unsuited
from moe_nvlink_plugin.version import own_version

#: A process that still runs after so many seconds prints where it is, and ends.
_LIMIT_S = 1200.0

#: The ranks end within so many seconds beside their waits; rank 0 writes the report meanwhile.
_AFTER_FIRST_S = 180.0

#: Tokens of a rank in the table's rows.
_TOKENS = (1, 8, 32, 128, 512, 1024, 4096)

#: The table's time in seconds.
_TABLE_S = 20.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What a user asks for; equal on every rank, `output` apart.

    Attributes:
        device: "cpu" or "cuda"; "" for GPUs if torch sees any.
        ranks: to start if no launcher has; 0: one for each GPU, 2 on a CPU or one GPU.
        num_experts, top_k, hidden_size, max_tokens: of the layer; 0: as the device suggests.
        timeout_s: seconds that a rank waits for another one.
        quick: the shortest list of checks, and no table.
        output: file for the report as JSON.
    """

    device: str = ""
    ranks: int = 0
    num_experts: int = 0
    top_k: int = 8
    hidden_size: int = 0
    max_tokens: int = 0
    timeout_s: float = 20.0
    quick: bool = False
    output: Path | None = None


class Outcome(NamedTuple):
    """How a check ended: for each rank what is wrong there, or ""."""

    name: str
    rounds: int
    seconds: float
    wrong: list[str]


def main(options: Options) -> int:
    """Check and print. Collective among the ranks of a launcher.

    Returns:
        0 if every round was right, else 1; equal on every rank that meets the others.

    Raises:
        ConfigError: an option cannot be.
    """
    kind = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch sees no GPU; ask moe-nvlink doctor why")
    options = dataclasses.replace(options, device=kind)
    if options.output is not None:
        _check_writable(options.output)
    launched = env.launched()
    if launched is None:
        return _start_ranks(options)
    device = torch.device(kind, launched.local_rank or 0) if kind == "cuda" else torch.device(kind)
    return _rank(options, launched.rank, launched.world_size, device, "env://")


def _check_writable(file: Path) -> None:
    try:
        # Not touch(), which takes directories, and files that only their owner may date.
        file.open("a").close()
    except OSError as error:
        raise _unwritable(file, error) from error


def _unwritable(file: Path, error: OSError) -> ConfigError:
    return ConfigError(f"--output {file} cannot be written: {error.strerror}")


def _start_ranks(options: Options) -> int:
    """Start the ranks as processes of this machine and wait for them."""
    gpus = torch.cuda.device_count() if options.device == "cuda" else 0
    ranks = options.ranks or (gpus if gpus > 1 else 2)
    if 0 < gpus < ranks:
        env.share_gpu()
        print(f"{ranks} ranks share {gpus} GPU{'s' * (gpus > 1)}; times mean nothing", flush=True)
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        meeting = f"file://{folder}/store"
        processes = [
            context.Process(target=_child, args=(options, rank, ranks, gpus, meeting))
            for rank in range(ranks)
        ]
        try:
            for process in processes:
                process.start()
            _join(processes, _AFTER_FIRST_S + 2 * options.timeout_s)
        except KeyboardInterrupt:
            print("verify: interrupted", flush=True)
            return 130
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
    codes = [process.exitcode for process in processes]
    died = [f"rank {rank}: {code}" for rank, code in enumerate(codes) if code not in (0, 1)]
    if died:
        print(f"verify: FAILED: processes ended early, exit status of {', '.join(died)}")
    return 0 if not any(codes) else 1


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


def _child(options: Options, rank: int, ranks: int, gpus: int, meeting: str) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    device = torch.device("cuda", rank % gpus) if gpus else torch.device("cpu")
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    try:
        code = _rank(options, rank, ranks, device, meeting)
    except MoeNvlinkError as error:
        print(f"rank {rank}: {error}", file=sys.stderr, flush=True)
        code = 1
    except KeyboardInterrupt:  # the terminal tells every rank; the first process says so
        code = 130
    sys.exit(code)


def _end_with_parent() -> None:
    """End this process when the command that started it has ended, by whatever signal."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _rank(options: Options, rank: int, ranks: int, device: torch.device, meeting: str) -> int:
    """Be one rank. Collective."""
    faulthandler.dump_traceback_later(_LIMIT_S, exit=True)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    limit = datetime.timedelta(seconds=max(60.0, 2 * options.timeout_s))
    try:
        dist.init_process_group(
            "gloo", init_method=meeting, rank=rank, world_size=ranks, timeout=limit
        )
    except (RuntimeError, ValueError) as error:  # torch raises these for every failure
        raise PeerError(f"the ranks did not meet; start all {ranks}: {error}") from error
    try:
        return _verified(options, as_group(dist.group.WORLD, limit.total_seconds()), device)
    finally:
        faulthandler.cancel_dump_traceback_later()
        dist.destroy_process_group()


def _verified(options: Options, group: Group, device: torch.device) -> int:
    """Run the checks and the table; rank 0 prints and writes."""
    own = dataclasses.replace(options, output=None)
    told = {name: str(value) for name, value in dataclasses.asdict(own).items()}
    refuse_differences(group.all_gather_object(told | {"version": own_version()}))
    geometry = _geometry(options, group.size, device)
    say = _say if group.rank == 0 else _say_nothing
    say(_title(geometry, device))
    outcomes: list[Outcome] = []
    lines: list[table.Line] = []
    lost = ""
    try:
        for check in plan(geometry, device, quick=options.quick):
            outcomes.append(_outcome(check, group, device))
            say(_as_text(outcomes[-1]))
        if not options.quick and not any(any(outcome.wrong) for outcome in outcomes):
            lines = _table(geometry, device)
            say(table.render(lines, device))
    except (MoeNvlinkError, RuntimeError) as error:  # torch raises RuntimeError
        lost = f"{type(error).__name__}: {error}"
    verdict, code = _verdict(outcomes, lost, geometry, device)
    say(verdict)
    if lost and group.rank:  # rank 0 may be the lost one
        print(f"rank {group.rank}: {lost}", file=sys.stderr, flush=True)
    if options.output is not None and group.rank == 0:
        report = _report(geometry, outcomes, lines, verdict, code)
        try:
            options.output.write_text(json.dumps(report, indent=1) + "\n")
        except OSError as error:  # such as a full disk
            raise _unwritable(options.output, error) from error
    return code


def _geometry(options: Options, ranks: int, device: torch.device) -> Geometry:
    """Return the user's geometry; what is missing is DeepSeek-V3's on GPUs, a smaller on CPUs."""
    on_gpus = device.type == "cuda"
    return Geometry(
        ep_size=ranks,
        num_experts=options.num_experts or (256 if on_gpus else 64),
        top_k=options.top_k,
        hidden_size=options.hidden_size or (7168 if on_gpus else 1024),
        max_tokens=options.max_tokens or (128 if on_gpus else 64),
        timeout_s=options.timeout_s,
    )


def _outcome(check: Check, group: Group, device: torch.device) -> Outcome:
    start = time.monotonic()
    wrong = check.run(group, device)
    return Outcome(check.name, check.rounds, time.monotonic() - start, wrong)


def _table(geometry: Geometry, device: torch.device) -> list[table.Line]:
    group = dist.group.WORLD
    assert group is not None
    config = geometry.case("table", _TOKENS[-1], device).config(dist.get_rank())
    config = dataclasses.replace(config, small_tokens=None, small_combine_tokens=None)
    return table.measure(group, device, config, _TOKENS, seconds=_TABLE_S)


def _title(geometry: Geometry, device: torch.device) -> str:
    kind = "CPU ranks" if device.type == "cpu" else f"ranks on {torch.cuda.get_device_name(device)}"
    title = (
        f"moe-nvlink {own_version()}, {geometry.ep_size} {kind}: {geometry.num_experts} experts, "
        f"top {geometry.top_k}, rows of {geometry.hidden_size}"
    )
    out = ", ".join(unsuited(geometry))
    return (
        f"{title}\n  left out, because rows are no multiple of their blocks: {out}"
        if out
        else title
    )


def _as_text(outcome: Outcome) -> str:
    is_right = not any(outcome.wrong)
    line = (
        f"  {'ok' if is_right else 'WRONG':5}  {outcome.name:56} {outcome.rounds:3} rounds"
        f" {outcome.seconds:6.1f} s"
    )
    wrong = [f"         rank {rank}: {error}" for rank, error in enumerate(outcome.wrong) if error]
    return "\n".join([line, *wrong])


def _verdict(
    outcomes: list[Outcome], lost: str, geometry: Geometry, device: torch.device
) -> tuple[str, int]:
    """Return the last line, and the exit code."""
    wrong = [outcome.name for outcome in outcomes if any(outcome.wrong)]
    where = f"{geometry.ep_size} {'CPU' if device.type == 'cpu' else 'GPU'} ranks"
    if lost:
        return f"verify: FAILED after {len(outcomes)} checks on {where}: {lost}", 1
    if wrong:
        return f"verify: WRONG on {where}, {len(wrong)} of {len(outcomes)}: {'; '.join(wrong)}", 1
    rounds = sum(outcome.rounds for outcome in outcomes)
    return (
        f"verify: right: {len(outcomes)} checks, {rounds} rounds on {where}, every bit as the "
        "reference has it",
        0,
    )


def _report(
    geometry: Geometry,
    outcomes: list[Outcome],
    lines: list[table.Line],
    verdict: str,
    code: int,
) -> dict[str, Any]:
    """Return what a user can attach to an issue."""
    from .doctor import inquiry  # takes a moment: it compiles a kernel of each kind

    return {
        "verdict": verdict,
        "right": code == 0,
        "geometry": dataclasses.asdict(geometry) | {"dtype": str(geometry.dtype)},
        "checks": [outcome._asdict() for outcome in outcomes],
        "table": [line._asdict() for line in lines],
        "machine": json.loads(inquiry.to_json(inquiry.facts())),
    }


def _say(text: str) -> None:
    try:
        print(text, flush=True)
    except BrokenPipeError:  # the reader has seen enough; the other ranks have not, nor the report
        sys.stdout = io.StringIO()


def _say_nothing(_text: str) -> None:
    """Leave it to rank 0."""
