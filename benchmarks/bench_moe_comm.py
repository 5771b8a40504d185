"""Dispatch and combine of a mixture-of-experts layer, ours beside what a user would take instead.

    python benchmarks/bench_moe_comm.py                           # 4 CPU ranks, beside gloo
    python benchmarks/bench_moe_comm.py --ep_size 8 --profile gpt_oss -b 1 -e 1024 -f 2 \\
        --perfect_router --iter_stats --output_file out.json --plot .
    python benchmarks/bench_moe_comm.py --device cuda             # one GPU for each rank
    python benchmarks/bench_moe_comm.py --device cuda --emulate_ranks 8      # 8 ranks on one GPU
    torchrun --nproc-per-node 8 benchmarks/bench_moe_comm.py --device cuda --ep_size 8
    python benchmarks/bench_moe_comm.py --list                    # what can run here

Every result is checked, row by row, before and after it is timed; a wrong one is an error. The
output file is written after every batch, and says that it is incomplete until the last.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))

from benchmarks import common
from benchmarks.moe_comm import backends, processes, rows
from benchmarks.moe_comm.options import BACKENDS, OptionError, Options, Request, parse
from moe_nvlink_plugin import driver

CANNOT_SHOW = {
    "cpu": "GPUs and NVLink: a wire is a copy in memory here; the experts; the framework around",
    "cuda": "the experts; the framework around the layer",
}


def main() -> None:
    """Ends with status 2 for options that cannot be, 1 for a run that failed."""
    assert __doc__ is not None
    request = parse(__doc__)
    try:
        if request.list_only:
            print("\n".join(listed(request.options)))
            return
        measured(request)
    except OptionError as error:
        raise SystemExit(_said(error, 2)) from None
    except (backends.WrongResult, processes.RunError) as error:
        raise SystemExit(_said(error, 1)) from None


def _said(error: Exception, status: int) -> int:
    what = "wrong result, nothing of its batch is reported" if status == 1 else "error"
    if isinstance(error, processes.RunError):
        what = "failed"
    print(f"bench_moe_comm: {what}: {error}", file=sys.stderr)
    return status


def measured(request: Request) -> None:
    """Runs, prints, writes.

    Raises:
        RunError: something that was asked for failed; the rest has been written.
    """
    options, machine = request.options, _gpu(request.options)
    if machine is None:
        print(f"not measured: no CUDA device ({driver.unavailable() or 'torch sees none'})")
        return
    cannot_show = CANNOT_SHOW.get(options.device, "speed: this is a rehearsal on CPU threads")
    not_measured, failed = [cannot_show], list[str]()
    if options.emulate_ranks or options.device == "rehearsal":
        from benchmarks.moe_comm import emulated

        not_measured.append(emulated.SHOWS)
        growing = growing_result(request, options, emulated.CEILING, not_measured, machine)
        found = emulated_rows(request, growing, failed)
    else:
        names = processes.runnable(options, explicit=request.explicit, left_out=not_measured)
        options = dataclasses.replace(options, backends=names)
        how = processes.CEILING_HOW
        growing = growing_result(request, options, how, not_measured, machine)
        found = processes.run(options, growing)
    if not found:  # another rank than 0 of torchrun or srun
        return
    processes.print_notes(found)
    for what in not_measured:
        print(f"not measured: {what}")
    written(request, growing.finish(found))
    if failed:
        raise processes.RunError(f"all but this was measured: {'; '.join(failed)}")


def growing_result(
    request: Request,
    options: Options,
    ceiling: str,
    not_measured: list[str],
    machine: dict[str, Any],
) -> rows.Growing:
    """The result file, as it is before the first batch."""
    head = rows.head(options, ceiling=ceiling, machine=machine)
    return rows.Growing(common.Record(request.output_file, head), not_measured)


def emulated_rows(
    request: Request, growing: rows.Growing, failed: list[str]
) -> list[dict[str, Any]]:
    """All ranks on one GPU, or, as a rehearsal, on CPU threads."""
    from benchmarks.moe_comm import emulated, table

    def show(made: list[dict[str, Any]]) -> None:
        print("\n".join(table.lines(made)), flush=True)
        growing(made)

    print(table.header(), flush=True)
    return emulated.run(
        request.options,
        explicit=request.explicit,
        not_measured=growing.not_measured,
        failed=failed,
        show=show,
    )


def written(request: Request, result: dict[str, Any]) -> None:
    """Says where the result file is; draws the plots where they were asked for."""
    if request.output_file is not None:
        print(f"written: {request.output_file}")
    if request.plot is not None:
        from benchmarks.moe_comm import plots

        source = plots.source_of(request.output_file) if request.output_file else "not written"
        for file in plots.plot_result(result, request.plot, source):
            print(f"written: {file}")


def listed(options: Options) -> list[str]:
    """What could run here with these options, and why the rest cannot."""
    found = []
    for name in BACKENDS:
        reason = backends.unavailable(name, options)
        found.append(f"{name:18} {'can run' if reason is None else f'cannot: {reason}'}")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [*found, f"{'GPUs':18} {gpus}" + ("" if gpus else f" ({driver.unavailable()})")]


def _gpu(options: Options) -> dict[str, Any] | None:
    """What a result says of the GPU; None: one is needed and there is none."""
    if options.device != "cuda":
        return {}
    return common.describe_gpu() if torch.cuda.is_available() else None


if __name__ == "__main__":
    main()
