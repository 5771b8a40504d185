"""The LM head of one draft step: split over a group of ranks, beside whole on every rank.

    python benchmarks/bench_lm_head.py                    # CPU ranks; DeepSeek-R1's head in fp32
    python benchmarks/bench_lm_head.py --dtype bfloat16 --rows 1 2 4 8
    python benchmarks/bench_lm_head.py --groups 4 --rows 1 32 --output results.json
    python benchmarks/bench_lm_head.py --device cuda      # ranks emulated on one GPU; bf16

    replicated  torch.mm of this rank's rows with the whole head, then torch.argmax
    split       sharded_argmax: rows to all ranks, product with a part of the head, ids back

Both are timed on all ranks of a group at once, in turns, in one run, on one copy of the weights
that all ranks map. Before a time is reported every token id must have the largest of the replicated
logits, within rounding. The crossover found is printed beside the one that head_cost.py expects.

On one GPU, where ranks are emulated, the parts of a step are timed by themselves: the product of
one rank, which has the GPU alone, and the two kernels of all ranks at once. NVLink is not in them.
benchmarks/README.md says how times are taken, and what CPU ranks do not show.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from moe_nvlink_plugin.lm_head.kernels import HEAD

sys.path.append(str(Path(__file__).resolve().parents[1]))

from benchmarks import common
from benchmarks.emulated_head import Backend, CpuBackend, CudaBackend, EmulatedHead
from benchmarks.moe_comm import cuda_clock
from moe_nvlink_plugin import HeadConfig, HeadGroup, driver, sharded_argmax
from moe_nvlink_plugin.jit import host
from moe_nvlink_plugin.lm_head import cost as head_cost

#: Calls without rows, for the fixed cost of both exchanges.
EMPTY_CALLS = 50


@dataclasses.dataclass(frozen=True)
class Options:
    vocab: int
    hidden: int
    rows: tuple[int, ...]
    groups: tuple[int, ...]
    dtype: str
    iterations: int
    seconds: float
    threads: int
    device: str

    def config(self, size: int, rank: int, most_rows: int) -> HeadConfig:
        return HeadConfig(
            tp_size=size,
            tp_rank=rank,
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            max_rows_per_rank=most_rows,
            dtype=self.element,
            num_threads=self.threads,
            timeout_s=300 if self.device == "cpu" else 10,
        )

    @property
    def element(self) -> torch.dtype:
        found = getattr(torch, self.dtype)
        assert isinstance(found, torch.dtype)
        return found

    @property
    def shape(self) -> head_cost.HeadShape:
        return head_cost.HeadShape(self.vocab, self.hidden, self.element.itemsize)

    @property
    def rates(self) -> head_cost.Rates:
        return head_cost.rates_of(torch.device(self.device), self.element.itemsize)


def make_head(options: Options) -> torch.Tensor:
    """`[vocab, hidden]` of random numbers; on the CPU in memory that other processes map."""
    head = torch.empty((options.vocab, options.hidden), dtype=options.element)
    if options.device == "cpu":
        head.share_memory_()  # type: ignore[no-untyped-call]
    head = head.to(options.device)
    generator = torch.Generator(options.device).manual_seed(0)
    for part in torch.split(head, 4096):
        part.copy_(torch.randn(part.shape, generator=generator, device=options.device))
    return head


def make_rows(options: Options, rank: int, rows: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1 + rank)
    hidden = torch.randn((rows, options.hidden), generator=generator)
    return hidden.to(options.element).to(options.device)


class Rank:
    """One rank of one group: the same rows by either way."""

    def __init__(self, options: Options, size: int, rank: int, head: torch.Tensor) -> None:
        self.options, self.size, self.head = options, size, head
        most_rows = max(options.rows)
        self.group = HeadGroup.create(options.config(size, rank, most_rows), dist.group.WORLD)
        self.hidden = make_rows(options, rank, most_rows)
        head.view(-1)[
            :: 4096 // head.itemsize
        ].sum()  # a first touch of every page, before any time

    def replicated(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        logits = torch.mm(self.hidden[:rows], self.head.T)
        return logits.argmax(dim=-1), logits

    def split(self, rows: int) -> torch.Tensor:
        return sharded_argmax(self.hidden[:rows], self.head, group=self.group, row_bound=rows)

    def exchange_us(self) -> float:
        """Both exchanges of a call in which no rank has rows: the median call's slowest rank."""
        nothing = self.hidden[:0]

        def body() -> torch.Tensor:
            return sharded_argmax(nothing, self.head, group=self.group)

        body()
        samples = [of_all_ranks([timed(body)[0]])[0] for _ in range(EMPTY_CALLS)]
        return statistics.median(sample.wall_s for sample in samples) * 1e6

    def sent_bytes(self) -> int:
        """What this rank has sent to others so far, by the group's counters."""
        stats = self.group.stats()
        return stats.bytes_gathered_remote + stats.bytes_returned_remote


class Taken(NamedTuple):
    """Seconds of one body: by the clock, and of the process's threads on a core."""

    wall_s: float
    cpu_s: float


def timed(body: Callable[[], Any]) -> tuple[Taken, Any]:
    """From a barrier on, and what the body returns."""
    dist.barrier()
    start, start_cpu = time.perf_counter(), time.process_time()
    result = body()
    return Taken(time.perf_counter() - start, time.process_time() - start_cpu), result


def of_all_ranks(samples: list[Taken]) -> list[Taken]:
    """The clock of the slowest rank, the work of all ranks together."""
    wall, cpu = torch.tensor(samples, dtype=torch.float64).T.contiguous()
    dist.all_reduce(wall, op=dist.ReduceOp.MAX)
    dist.all_reduce(cpu)
    return [Taken(*pair) for pair in zip(wall.tolist(), cpu.tolist(), strict=True)]


def check(ids: torch.Tensor, logits: torch.Tensor) -> None:
    """Every id has the largest logit of its row.

    Within rounding: a product of more rows at once may add up in another order.

    Raises:
        SystemExit: it has not; no time is reported.
    """
    best = logits.amax(dim=-1).double()
    chosen = logits.gather(1, ids[:, None])[:, 0].double()
    allowed = 4 * torch.finfo(logits.dtype).eps * best.abs()
    if not bool((best - chosen <= allowed).all()):  # of NaN too
        raise SystemExit("an id without the largest logit: no time is reported")


def measure(rank: Rank, rows: int) -> dict[str, Any]:
    """Both ways in turns: microseconds of the slowest rank, and of work on all ranks together.

    The first turn warms up, and is checked. It is what is reported where one turn takes longer than
    the time a cell is given.
    """
    options, sent = rank.options, rank.sent_bytes()
    replicated, (_ids, logits) = timed(lambda: rank.replicated(rows))
    split, ids = timed(lambda: rank.split(rows))
    check(ids, logits)
    del logits
    first = of_all_ranks([replicated, split])
    turns = min(options.iterations, int(options.seconds / sum(way.wall_s for way in first)))
    samples = [
        of_all_ranks([timed(lambda: rank.replicated(rows))[0], timed(lambda: rank.split(rows))[0]])
        for _ in range(turns)
    ] or [first]
    ratios = [pair[0].wall_s / pair[1].wall_s for pair in samples]
    times = {
        f"{name}_{kind}us": statistics.median(pair[way][at] for pair in samples) * 1e6
        for way, name in enumerate(("replicated", "split"))
        for at, kind in enumerate(("", "work_"))
    }
    return {
        "tp_size": rank.size,
        "rows": rows,
        **times,
        "ratio": times["replicated_us"] / times["split_us"],
        "ratio_least": min(ratios),
        "ratio_most": max(ratios),
        "work_ratio": times["replicated_work_us"] / times["split_work_us"],
        "turns": len(samples),
        "warm": turns > 0,
        "sent_bytes": (rank.sent_bytes() - sent) // (turns + 1),
        **expected(options, rank.size, rows),
    }


def expected(options: Options, size: int, rows: int) -> dict[str, float]:
    """What head_cost.py says about the same step."""
    alone_s, split_s = (
        head_cost.step_seconds(options.shape, rows, n, options.rates) for n in (1, size)
    )
    return {"expected_ratio": alone_s / split_s}


def rank_main(
    rank: int, options: Options, size: int, head: torch.Tensor, folder: str, growing: Growing
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous{size}", rank=rank, world_size=size
    )
    mine = Rank(options, size, rank, head)
    exchange_us = mine.exchange_us()
    measured = []
    for rows in options.rows:
        measured.append(measure(mine, rows))
        if rank == 0:
            print_row(ON_CPU, measured[-1])
            made = crossover(options, size, measured)
            found = {"exchange_us": exchange_us, **made, "rows": measured}
            growing.write(found)
    if rank == 0:
        Path(folder, f"group{size}.json").write_text(json.dumps(found))
    dist.barrier()  # gloo ends a process that takes the group down while another still uses it
    mine.group.close()
    dist.destroy_process_group()


def crossover(options: Options, size: int, measured: list[dict[str, Any]]) -> dict[str, Any]:
    """Where splitting stops being faster, of the rows measured, and what head_cost.py expects.

    None: no measured number of rows is on that side. On CPU ranks also by work rather than time,
    which what else the machine does hardly touches.
    """
    most_rows = max(options.rows)
    found: dict[str, Any] = {"tp_size": size, **sides(measured, "ratio")}
    if measured and "work_ratio" in measured[0]:
        found["by_work"] = sides(measured, "work_ratio")
    found["expected_up_to"] = head_cost.crossover_rows(
        options.shape, size, options.rates, most_rows
    )
    return found


def sides(measured: list[dict[str, Any]], ratio: str) -> dict[str, int | None]:
    return {
        "faster_up_to": max((row["rows"] for row in measured if row[ratio] > 1), default=None),
        "slower_from": min((row["rows"] for row in measured if row[ratio] <= 1), default=None),
    }


#: Columns of a table -> the field, and what it is multiplied by.
ON_CPU = {
    "group": ("tp_size", 1),
    "rows/rank": ("rows", 1),
    "replicated ms": ("replicated_us", 1e-3),
    "split ms": ("split_us", 1e-3),
    "x faster": ("ratio", 1.0),
    "least": ("ratio_least", 1.0),
    "most": ("ratio_most", 1.0),
    "replicated work ms": ("replicated_work_us", 1e-3),
    "split work ms": ("split_work_us", 1e-3),
    "x less work": ("work_ratio", 1.0),
    "expected x": ("expected_ratio", 1.0),
    "sent a rank, bytes": ("sent_bytes", 1),
    "turns": ("turns", 1),
    "warm": ("warm", 1),
}
EMULATED = {
    "group": ("tp_size", 1),
    "rows/rank": ("rows", 1),
    "replicated us": ("replicated_us", 1.0),
    "product us": ("product_us", 1.0),
    "gather, all ranks us": ("gather_us", 1.0),
    "argmax, all ranks us": ("argmax_us", 1.0),
    "x faster": ("ratio", 1.0),
    "expected x": ("expected_ratio", 1.0),
    "weights MB, replicated": ("replicated_weight_bytes", 1e-6),
    "weights MB, split": ("split_weight_bytes", 1e-6),
}


def print_head(columns: dict[str, tuple[str, float]]) -> None:
    print("| " + " | ".join(columns) + " |")
    print("|---" * len(columns) + "|", flush=True)


def print_row(columns: dict[str, tuple[str, float]], row: dict[str, Any]) -> None:
    cells = [row[field] * factor for field, factor in columns.values()]
    texts = [f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in cells]
    print("| " + " | ".join(texts) + " |", flush=True)


def print_crossover(found: dict[str, Any]) -> None:
    parts = [
        f"groups of {found['tp_size']}: faster up to {found['faster_up_to']} rows a rank",
        f"slower from {found['slower_from']} (of those measured)",
        f"expected by head_cost.py up to {found['expected_up_to']}",
    ]
    if "by_work" in found:
        by_work = found["by_work"]
        parts.append(
            f"by work: less up to {by_work['faster_up_to']}, more from {by_work['slower_from']}"
        )
    if "exchange_us" in found:
        parts.append(f"both exchanges without rows take {found['exchange_us']:.0f} us")
    print("; ".join(parts), flush=True)


@dataclasses.dataclass
class Growing:
    """The result file, which is written after every number of rows; `groups` are over."""

    record: common.Record
    groups: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def write(self, *unfinished: dict[str, Any]) -> None:
        self.record.write({"groups": [*self.groups, *unfinished]})


def on_cpu(options: Options, growing: Growing) -> None:
    """One result per group size."""
    host.load(
        HEAD.host_source()
    )  # compiled once, here, rather than by ranks that wait for each other
    print_head(ON_CPU)
    head = make_head(options)
    with tempfile.TemporaryDirectory() as folder:
        for size in options.groups:
            mp.spawn(  # type: ignore[attr-defined,no-untyped-call]
                rank_main, (options, size, head, folder, growing), nprocs=size
            )
            growing.groups.append(json.loads(Path(folder, f"group{size}.json").read_text()))
            print_crossover(growing.groups[-1])


def emulated(options: Options, growing: Growing) -> None:
    """One result per group size, of ranks on one device."""
    print_head(EMULATED)
    head = make_head(options)
    for size in options.groups:
        backend = make_backend(options, size)
        measured = []
        for rows in options.rows:
            measured.append(measure_emulated(options, size, rows, head, backend))
            print_row(EMULATED, measured[-1])
            found = {**crossover(options, size, measured), "rows": measured}
            growing.write(found)
        backend.close()
        growing.groups.append(found)
        print_crossover(found)


def make_backend(options: Options, size: int) -> Backend:
    if options.device == "cuda":
        return CudaBackend(size, options.config(size, 0, max(options.rows)))
    return CpuBackend(size)


def measure_emulated(
    options: Options, size: int, rows: int, head: torch.Tensor, backend: Backend
) -> dict[str, Any]:
    """Median microseconds of a step's parts, each alone with nothing of ours in L2 before it."""
    hidden = [make_rows(options, rank, rows) for rank in range(size)]
    ranks = EmulatedHead([options.config(size, n, rows) for n in range(size)], backend, hidden)
    ranks.step(head)
    ranks.check_faults()
    for mine, ids in zip(hidden, ranks.ids, strict=True):
        check(ids, torch.mm(mine, head.T))
    logits = torch.empty((rows, options.vocab), dtype=options.element, device=options.device)
    best = torch.empty(rows, dtype=torch.int64, device=options.device)

    def replicated() -> None:
        torch.mm(hidden[0], head.T, out=logits)
        torch.argmax(logits, dim=-1, out=best)

    bodies = {
        "replicated": replicated,
        "product": lambda: ranks.product(0, head),
        "gather": ranks.gather,
        "argmax": ranks.argmax,
    }
    clock = cuda_clock.Clock(options.device, options.iterations, 2)
    taken = clock.flushed(bodies, in_order=True)  # argmax needs the round of its gather
    times = {f"{name}_us": statistics.median(samples) for name, samples in taken.items()}
    ranks.check_faults()
    first, end = options.config(size, 0, rows).shard(0)
    return {
        "tp_size": size,
        "rows": rows,
        **times,
        "ratio": times["replicated_us"] / (sum(times.values()) - times["replicated_us"]),
        "replicated_weight_bytes": options.shape.head_bytes,
        "split_weight_bytes": (end - first) * options.hidden * options.element.itemsize,
        **expected(options, size, rows),
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument(
        "--device",
        default="cpu",
        choices=["cpu", "cuda", "rehearsal"],
        help="cuda: ranks emulated on one GPU; rehearsal: the same on CPU threads, whose times "
        "mean nothing",
    )
    parser.add_argument("--vocab", type=int, default=129280)
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[2**n for n in range(10)], help="of each rank"
    )
    parser.add_argument("--groups", type=int, nargs="+", default=[2, 4, 8], help="their sizes")
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16", "float16"],
        help="float32 on CPU ranks, where it is the fastest, else bfloat16",
    )
    parser.add_argument("--iterations", type=int, default=10, help="turns at most")
    parser.add_argument(
        "--seconds", type=float, default=5.0, help="for the turns behind the first, per cell"
    )
    parser.add_argument("--threads", type=int, default=1, help="our host threads per rank")
    parser.add_argument(
        "--output", type=Path, help="JSON of rows and machine, written after every number of rows"
    )
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    arguments.dtype = arguments.dtype or ("float32" if arguments.device == "cpu" else "bfloat16")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print(f"not measured: no CUDA device ({driver.unavailable() or 'torch sees none'})")
        return
    on_processes = arguments.device == "cpu"
    arguments.device = arguments.device.replace("rehearsal", "cpu")
    options = common.options_from(Options, arguments)
    machine = common.describe_run() | {"load_before": os.getloadavg()}
    if on_processes:
        measure_all = on_cpu
        shows = "CPU ranks: processes that share the cores and the memory of one host"
    else:
        measure_all = emulated
        machine |= common.describe_gpu() if options.device == "cuda" else {}
        shows = "ranks emulated on one device: weights and kernels, nothing of NVLink"
    head = {"machine": machine, "options": dataclasses.asdict(options), "shows": shows}
    growing = Growing(common.Record(arguments.output, head))
    measure_all(options, growing)
    machine["load_after"] = os.getloadavg()
    growing.record.write({"groups": growing.groups}, complete=True)


if __name__ == "__main__":
    main()
