"""Time the LM head of one draft step, split over a group, beside the whole head on every rank.

    python benchmarks/bench_lm_head.py                    # CPU ranks; DeepSeek-R1's head in fp32
    python benchmarks/bench_lm_head.py --dtype bfloat16 --rows 1 2 4 8
    python benchmarks/bench_lm_head.py --groups 4 --rows 1 32 --output_file results.json
    python benchmarks/bench_lm_head.py --rates            # the lines of CPU_RATES, and nothing else
    python benchmarks/bench_lm_head.py --device cuda      # ranks emulated on one GPU; bf16

    replicated  torch.mm of this rank's rows with the whole head, then torch.argmax
    split       sharded_argmax: rows to all ranks, product with a part of the head, ids back

Both are timed on all ranks of a group at once, in turns, in one run, on one copy of the weights
that all ranks map. Before a time is reported every token id must have the largest of the replicated
logits, within rounding. The crossover found is printed beside the crossover that
moe_nvlink_plugin/lm_head/cost.py expects.

On one GPU, where ranks are emulated, the parts of a step are timed by themselves: the product of
one rank, which has the GPU alone, and the two kernels of all ranks at once. NVLink is not in them.
benchmarks/README.md says how times are taken, and what CPU ranks do not show.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import statistics
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).resolve().parents[1]))

from benchmarks import common, harness
from benchmarks.columns import Columns, print_headings, print_row
from benchmarks.emulated_head import EmulatedHead
from benchmarks.moe_comm import cuda_clock
from moe_nvlink_plugin import HeadConfig, HeadGroup, sharded_argmax
from moe_nvlink_plugin.jit import host
from moe_nvlink_plugin.lm_head import cost as head_cost
from moe_nvlink_plugin.lm_head.kernels import HEAD
from tests.support import emulated

#: Calls without rows, for the fixed cost of both exchanges.
EMPTY_CALLS = 50
#: What --rates measures: dtypes; a head larger than caches, and its rows; a head so small that a
#: step only exchanges, and its rows.
RATE_DTYPES = ("bfloat16", "float32")
RATE_VOCAB, RATE_ROWS = 16384, (1, 4, 8, 16, 32, 64, 128)
LINK_VOCAB, LINK_ROWS = 16, 512
#: Of CPU ranks, of emulated ranks.
SHOWS = (
    "CPU ranks: processes that share the cores and the memory of one host",
    "ranks emulated on one device: weights and kernels, nothing of NVLink",
)


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
        # A first touch of every page, before any time.
        head.view(-1)[:: 4096 // head.itemsize].sum()

    def replicated(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        logits = torch.mm(self.hidden[:rows], self.head.T)
        return logits.argmax(dim=-1), logits

    def split(self, rows: int) -> torch.Tensor:
        return sharded_argmax(self.hidden[:rows], self.head, group=self.group, row_bound=rows)

    def exchange_us(self) -> float:
        """Time both exchanges of a call without rows: the median call's slowest rank."""
        nothing = self.hidden[:0]

        def body(clock: harness.Clock) -> None:
            with clock:
                sharded_argmax(nothing, self.head, group=self.group)

        (samples,) = harness.in_turns({"both": body}, EMPTY_CALLS, 1).values()
        return statistics.median(sample.wall_us for sample in samples)

    def sent_bytes(self) -> int:
        """Return the bytes that this rank has sent to others so far, by the group's counters."""
        stats = self.group.stats()
        return stats.bytes_gathered_remote + stats.bytes_returned_remote


def check(ids: torch.Tensor, logits: torch.Tensor) -> None:
    """Check that every id has the largest logit of its row.

    Within rounding: a product of more rows at once may add up in another order.

    Raises:
        SystemExit: an id has not; no time is reported.
    """
    best = logits.amax(dim=-1).double()
    chosen = logits.gather(1, ids[:, None])[:, 0].double()
    allowed = 4 * torch.finfo(logits.dtype).eps * best.abs()
    if not bool((best - chosen <= allowed).all()):  # of NaN too
        raise SystemExit("an id without the largest logit: no time is reported")


def measure(rank: Rank, rows: int) -> dict[str, Any]:
    """Time both ways with `rows` rows a rank.

    The first turn warms up, and is checked. It is what is reported where one turn takes longer than
    the time a cell is given.
    """
    options, sent = rank.options, rank.sent_bytes()
    results: dict[str, Any] = {}  # of the first turn

    def way(name: str) -> harness.Body:
        def body(clock: harness.Clock) -> None:
            with clock:
                result = getattr(rank, name)(rows)
            results.setdefault(name, result)

        return body

    bodies = {name: way(name) for name in ("replicated", "split")}
    samples = harness.in_turns(bodies, 1)
    check(results["split"], results["replicated"][1])
    results["replicated"] = None  # large
    turns = int(options.seconds * 1e6 / sum(of[0].wall_us for of in samples.values()))
    turns = min(options.iterations, turns)
    if turns:
        samples = harness.in_turns(bodies, turns)
    ratios = [a.wall_us / b.wall_us for a, b in zip(*samples.values(), strict=True)]
    times = {
        f"{name}_{kind}": statistics.median(getattr(each, field) for each in of)
        for name, of in samples.items()
        for kind, field in (("us", "wall_us"), ("work_us", "work_us"))
    }
    return {
        "tp_size": rank.size,
        "rows": rows,
        **times,
        "ratio": times["replicated_us"] / times["split_us"],
        "ratio_least": min(ratios),
        "ratio_most": max(ratios),
        "work_ratio": times["replicated_work_us"] / times["split_work_us"],
        "turns": len(ratios),
        "warm": turns > 0,
        "sent_bytes": (rank.sent_bytes() - sent) // (turns + 1),
        **expected(options, rank.size, rows),
    }


def expected(options: Options, size: int, rows: int) -> dict[str, float]:
    """Return what the rule in moe_nvlink_plugin/lm_head/cost.py says about the same step."""
    alone_s, split_s = (
        head_cost.step_seconds(options.shape, rows, n, options.rates) for n in (1, size)
    )
    return {"expected_ratio": alone_s / split_s}


def rank_rates(rank: int, size: int, options: Options) -> head_cost.Rates:
    """Return a rank's rates, by the time on a core of all ranks; the exchange by the clock."""
    link = dataclasses.replace(options, vocab=LINK_VOCAB, rows=(LINK_ROWS,))
    alone, exchanging = (Rank(of, size, rank, make_head(of)) for of in (options, link))

    def seconds(of: Rank, rows: int, way: str) -> float:
        return float(measure(of, rows)[f"{way}_work_us"]) / size / 1e6

    whole_s = {rows: seconds(alone, rows, "replicated") for rows in options.rows}
    link_s = seconds(exchanging, LINK_ROWS, "split")
    exchange_s = exchanging.exchange_us() / 1e6
    line = statistics.linear_regression(list(whole_s), list(whole_s.values()))
    rates = head_cost.Rates(
        # One row takes no less than reading.
        options.shape.head_bytes / max(line.intercept, whole_s[1]),
        2 * options.vocab * options.hidden / line.slope,
        head_cost.exchanged_bytes(link.shape, LINK_ROWS, size) / link_s,
        exchange_s,
        overlaps=False,
    )
    for each in (alone, exchanging):
        each.group.close()
    return rates


def print_rates(options: Options, record: common.Record) -> None:
    """Measure CPU_RATES, one line for each dtype, as cost.py has them."""
    host.load(HEAD.host_source())
    measured = {}
    print("CPU_RATES = {")
    for dtype in RATE_DTYPES:
        of = dataclasses.replace(options, dtype=dtype, vocab=RATE_VOCAB, rows=RATE_ROWS)
        rates = harness.on_ranks(options.groups[0], rank_rates, of)
        numbers = ", ".join(f"{rate:.2g}" for rate in rates[:-1])
        print(f"    {of.element.itemsize}: Rates({numbers}, overlaps=False),", flush=True)
        measured[dtype] = rates._asdict()
        record.write({"rates": measured})
    print("}")
    record.write({"rates": measured}, complete=True)


class Group(NamedTuple):
    """A group that is to be measured, and the result file, where `done` have their places."""

    options: Options
    size: int
    head: torch.Tensor
    record: common.Record
    done: list[dict[str, Any]]

    def tell(self, columns: Columns, found: dict[str, Any]) -> None:
        """Print the last row that was measured, and record this group after the groups done."""
        print_row(columns, found["rows"][-1])
        found |= crossover(self.options, self.size, found["rows"])
        self.record.write({"groups": [*self.done, found]})


def rank_main(rank: int, _size: int, of: Group) -> dict[str, Any]:
    """Return the group's result, from one of its ranks. Rank 0 also prints and records each row."""
    mine = Rank(of.options, of.size, rank, of.head)
    found: dict[str, Any] = {"exchange_us": mine.exchange_us(), "rows": []}
    for rows in of.options.rows:
        found["rows"].append(measure(mine, rows))
        if rank == 0:
            of.tell(ON_CPU, found)
    mine.group.close()
    return found


def crossover(options: Options, size: int, measured: list[dict[str, Any]]) -> dict[str, Any]:
    """Find where splitting stops being faster, as measured and as the cost rule expects.

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


ON_CPU = {
    "group": "{tp_size}",
    "rows/rank": "{rows}",
    "replicated us": "{replicated_us:.0f}",
    "split us": "{split_us:.0f}",
    "x faster": "{ratio:.2f}",
    "least": "{ratio_least:.2f}",
    "most": "{ratio_most:.2f}",
    "replicated work us": "{replicated_work_us:.0f}",
    "split work us": "{split_work_us:.0f}",
    "x less work": "{work_ratio:.2f}",
    "expected x": "{expected_ratio:.2f}",
    "sent a rank, bytes": "{sent_bytes}",
    "turns": "{turns}",
    "warm": "{warm}",
}
EMULATED = {
    "group": "{tp_size}",
    "rows/rank": "{rows}",
    "replicated us": "{replicated_us:.1f}",
    "product us": "{product_us:.1f}",
    "gather, all ranks us": "{gather_us:.1f}",
    "argmax, all ranks us": "{argmax_us:.1f}",
    "x faster": "{ratio:.2f}",
    "expected x": "{expected_ratio:.2f}",
    "weight bytes, replicated": "{replicated_weight_bytes}",
    "weight bytes, split": "{split_weight_bytes}",
}


def print_crossover(found: dict[str, Any]) -> None:
    texts = [
        "groups of {tp_size}: faster up to {faster_up_to} rows a rank",
        "slower from {slower_from} (of those measured)",
        "expected up to {expected_up_to}",
    ]
    if "by_work" in found:
        texts += ["by work: less up to {by_work[faster_up_to]}, more from {by_work[slower_from]}"]
    if "exchange_us" in found:
        texts += ["both exchanges without rows take {exchange_us:.0f} us"]
    print("; ".join(texts).format_map(found), flush=True)


def on_cpu(of: Group) -> dict[str, Any]:
    """Measure a group of processes."""
    host.load(HEAD.host_source())  # compiled once, rather than by ranks that wait for each other
    found: dict[str, Any] = harness.on_ranks(of.size, rank_main, of)
    return found


def on_device(of: Group) -> dict[str, Any]:
    """Measure a group of ranks on one device."""
    found: dict[str, Any] = {"rows": []}
    with contextlib.closing(make_backend(of.options, of.size)) as backend:
        for rows in of.options.rows:
            found["rows"].append(measure_emulated(of.options, of.size, rows, of.head, backend))
            of.tell(EMULATED, found)
    return found


def make_backend(options: Options, size: int) -> emulated.Backend:
    if options.device != "cuda":
        return emulated.CpuBackend(size, ctas=1)
    config = options.config(size, 0, max(options.rows))
    return emulated.CudaBackend(size, 1, config, as_product=True)


def measure_emulated(
    options: Options, size: int, rows: int, head: torch.Tensor, backend: emulated.Backend
) -> dict[str, Any]:
    """Time a step's parts, each alone with nothing of ours in L2 before it."""
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
    harness.add_options(parser, iterations=10)
    add = parser.add_argument
    add("--vocab", type=int, default=129280)
    add("--hidden", type=int, default=7168)
    add("--rows", type=int, nargs="+", default=[2**n for n in range(10)], help="of each rank")
    add("--groups", type=int, nargs="+", default=[2, 4, 8], help="their sizes")
    add(
        "--dtype",
        choices=["float32", "bfloat16", "float16"],
        help="float32 on CPU ranks, where it is the fastest, else bfloat16",
    )
    add("--seconds", type=float, default=5.0, help="for the turns after the first, per cell")
    add("--rates", action="store_true", help="CPU_RATES of cost.py, by the first of --groups")
    given = parser.parse_args()
    given.dtype = given.dtype or ("float32" if given.device == "cpu" else "bfloat16")
    return given


def main() -> None:
    arguments = parse()
    machine = harness.machine(arguments.device) | {"load_before": os.getloadavg()}
    measure_group, columns, shows = on_cpu, ON_CPU, SHOWS[0]
    if arguments.device != "cpu":
        measure_group, columns, shows = on_device, EMULATED, SHOWS[1]
    arguments.device = arguments.device.replace("rehearsal", "cpu")
    options = common.options_from(Options, arguments)
    known = {"machine": machine, "options": dataclasses.asdict(options)}
    record = common.Record(arguments.output_file, known | {"shows": shows})
    if arguments.rates:
        print_rates(options, record)
        return
    groups: list[dict[str, Any]] = []
    print_headings(columns)
    head = make_head(options)
    for size in options.groups:
        groups.append(measure_group(Group(options, size, head, record, groups)))
        print_crossover(groups[-1])
    machine["load_after"] = os.getloadavg()
    record.write({"groups": groups}, complete=True)


if __name__ == "__main__":
    main()
