"""Time dispatch and combine of an MoE layer, ours beside what a user would take instead.

    python benchmarks/bench_moe_comm.py                           # 4 CPU ranks, beside gloo
    python benchmarks/bench_moe_comm.py --ep_size 8 --profile gpt_oss -b 1 -e 1024 -f 2 \\
        --perfect_router --iter_stats --output_file out.json --plot .
    python benchmarks/bench_moe_comm.py --device cuda             # one GPU for each rank
    python benchmarks/bench_moe_comm.py --device cuda --emulate_ranks 8      # 8 ranks on one GPU
    torchrun --nproc-per-node 8 benchmarks/bench_moe_comm.py --device cuda --ep_size 8
    python benchmarks/bench_moe_comm.py --list                    # what can run here

Every backend's result is checked, row by row, before and after it is timed; a wrong one is an
error. The output file is written after every batch, and says that it is incomplete until the last.
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
    "rehearsal": "speed: this is a rehearsal on CPU threads",
}


#: What ends a run -> what is said before its message, and the exit status.
ENDS: dict[type[Exception], tuple[str, int]] = {
    OptionError: ("error", 2),
    backends.WrongResult: ("wrong result, nothing of its batch is reported", 1),
    processes.RunError: ("failed", 1),
}


def main() -> None:
    """End with status 2 for options that cannot be, 1 for a run that failed."""
    assert __doc__ is not None
    request = parse(__doc__)
    try:
        if request.list_only:
            print("\n".join(listed(request.options)))
        else:
            measure(request)
    except tuple(ENDS) as error:
        said, status = ENDS[type(error)]
        print(f"bench_moe_comm: {said}: {error}", file=sys.stderr)
        raise SystemExit(status) from error


def measure(request: Request) -> None:
    """Run what is asked for, print and write the result.

    Raises:
        RunError: something that was asked for failed; the rest has been written.
    """
    options, machine = request.options, dict[str, Any]()
    if options.device == "cuda":
        if not torch.cuda.is_available():
            print(f"not measured: no CUDA device ({driver.unavailable() or 'torch sees none'})")
            return
        machine = common.describe_gpu()
    not_measured, failed = [CANNOT_SHOW[options.device]], list[str]()

    def growing(ceiling: str) -> rows.Growing:
        head = rows.head(options, ceiling=ceiling, machine=machine)
        return rows.Growing(common.Record(request.output_file, head), not_measured)

    lists: Any = {"explicit": request.explicit, "not_measured": not_measured}
    if options.emulate_ranks or options.device == "rehearsal":
        from benchmarks.moe_comm import emulated

        not_measured.append(emulated.SHOWS)
        result = growing(emulated.CEILING)
        found = emulated.run(options, **lists, failed=failed, show=result)
    else:
        options = dataclasses.replace(options, backends=processes.runnable(options, **lists))
        result = growing(processes.CEILING_HOW)
        found = processes.run(options, result)
    if not found:  # another rank than 0 of torchrun or srun
        return
    for line in [*rows.footnotes(found), *(f"not measured: {what}" for what in not_measured)]:
        print(line)
    write(request, result.finish(found))
    if failed:
        raise processes.RunError(f"all but this was measured: {'; '.join(failed)}")


def write(request: Request, result: rows.Row) -> None:
    """Say where the result file is; draw the plots if they were asked for."""
    if request.output_file is not None:
        print(f"written: {request.output_file}")
    if request.plot is not None:
        from benchmarks.moe_comm import plots

        source = plots.source_of(request.output_file) if request.output_file else "not written"
        for file in plots.plot(result, request.plot, source):
            print(f"written: {file}")


def listed(options: Options) -> list[str]:
    """Say what could run here with these options, and why the rest cannot."""
    found = []
    for name in BACKENDS:
        reason = backends.unavailable(name, options)
        found.append(f"{name:18} {'can run' if reason is None else f'cannot: {reason}'}")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [*found, f"{'GPUs':18} {gpus}" + ("" if gpus else f" ({driver.unavailable()})")]


if __name__ == "__main__":
    main()
