"""Dispatch + combine between CPU ranks, beside what gloo offers, in one run.

    python benchmarks/bench_exchange.py                   # the table of README.md
    python benchmarks/bench_exchange.py --ep-size 2 --tokens 1 16 128 --output results.json

Peers, each given the most favourable reading:
    allgather   gloo all_gather of all tokens, then reduce_scatter of the partial rows of all
                tokens: what vLLM's allgather_reducescatter does
    all_to_all  gloo all_to_all_single of exactly the rows our dispatch puts, both ways; split
                sizes are known and the rows picked before the clock starts
A token's hidden state, ids and weights are one packed row for the peers, so that each needs one
collective a way; packing and unpacking are not timed.
Ours is timed whole, through MoeAllToAll.dispatch and .combine, experts writing to combine_input().
benchmarks/README.md says how times are taken and what is not measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

sys.path.append(str(Path(__file__).resolve().parents[1]))

from benchmarks import common
from moe_nvlink_plugin import AllToAllConfig, MoeAllToAll, reference
from moe_nvlink_plugin.testing import random_inputs


@dataclasses.dataclass(frozen=True)
class Options:
    ep_size: int
    hidden_size: int
    top_k: int
    num_experts: int
    dtype: str
    iterations: int
    warmup: int
    threads: int
    backends: tuple[str, ...]


class Layer:
    """One rank's tokens of one configuration, and what the peers' transfers of them need."""

    def __init__(self, options: Options, num_tokens: int, rank: int) -> None:
        self.config = AllToAllConfig(
            ep_size=options.ep_size,
            ep_rank=rank,
            num_experts=options.num_experts,
            top_k=options.top_k,
            hidden_size=options.hidden_size,
            max_tokens_per_rank=num_tokens,
            dtype=getattr(torch, options.dtype),
            num_threads=options.threads,
            timeout_s=120,
        )
        generator = torch.Generator().manual_seed(rank)
        self.hidden, self.ids, self.weights = random_inputs(self.config, num_tokens, generator)
        table = reference.target_ranks(self.ids, options.num_experts, options.ep_size)
        parts = (self.hidden, self.ids, self.weights)
        self.packed = torch.cat([part.view(torch.uint8) for part in parts], dim=1)
        self.sent = [
            [t for t, row in enumerate(table) if peer in row] for peer in range(options.ep_size)
        ]


def ours(layer: Layer) -> tuple[Callable[[], None], Callable[[], None], Callable[[], None]]:
    exchange = MoeAllToAll.create(layer.config, dist.group.WORLD)
    state: dict[str, Any] = {"output": torch.empty_like(layer.hidden)}

    def dispatch() -> None:
        state["received"] = exchange.dispatch(layer.hidden, layer.ids, layer.weights)

    def combine() -> None:
        received = state["received"]
        exchange.combine(exchange.combine_input(), received.metadata, output=state["output"])

    def check() -> None:
        # Experts that return their input: each token comes back once per rank it went to.
        dispatch()
        exchange.combine_input().copy_(state["received"].hidden_states)
        combine()
        table = reference.target_ranks(layer.ids, layer.config.num_experts, layer.config.ep_size)
        times = torch.tensor([[sum(t is not None for t in row)] for row in table])
        expected = (layer.hidden.float() * times).to(layer.config.dtype)
        if not torch.allclose(state["output"].float(), expected.float(), rtol=1e-2):
            raise SystemExit("wrong result: no time is reported")

    return dispatch, combine, check


def allgather(layer: Layer) -> tuple[Callable[[], None], Callable[[], None], Callable[[], None]]:
    ep_size = layer.config.ep_size
    gathered = [torch.empty_like(layer.packed) for _ in range(ep_size)]
    partial = [torch.randn_like(layer.hidden) for _ in range(ep_size)]
    reduced = torch.empty_like(layer.hidden)

    def dispatch() -> None:
        dist.all_gather(gathered, layer.packed)

    def combine() -> None:
        dist.reduce_scatter(reduced, partial)

    def check() -> None:
        dispatch()
        if not torch.equal(gathered[layer.config.ep_rank], layer.packed):
            raise SystemExit("gloo's all_gather returned something else")

    return dispatch, combine, check


def all_to_all(layer: Layer) -> tuple[Callable[[], None], Callable[[], None], Callable[[], None]]:
    ep_size, rank = layer.config.ep_size, layer.config.ep_rank
    counts: list[Any] = [None] * ep_size
    dist.all_gather_object(counts, [len(tokens) for tokens in layer.sent])
    send = [len(tokens) for tokens in layer.sent]
    receive = [counts[source][rank] for source in range(ep_size)]
    order = [token for tokens in layer.sent for token in tokens]
    picked = layer.packed[order].contiguous()
    arrived = picked.new_empty((sum(receive), picked.shape[1]))
    partial = layer.hidden[order].contiguous()
    computed = partial.new_empty((sum(receive), partial.shape[1]))
    returned = torch.empty_like(partial)

    def dispatch() -> None:
        dist.all_to_all_single(arrived, picked, receive, send)

    def combine() -> None:
        dist.all_to_all_single(returned, computed, send, receive)

    def check() -> None:
        dispatch()
        hidden_bytes = partial.shape[1] * partial.element_size()
        computed.copy_(arrived[:, :hidden_bytes].contiguous().view(partial.dtype))
        combine()
        if not torch.equal(returned, partial):
            raise SystemExit("gloo's all_to_all_single returned something else")

    return dispatch, combine, check


BACKENDS = {"moe_nvlink": ours, "allgather": allgather, "all_to_all": all_to_all}


def measure(layer: Layer, name: str, options: Options) -> dict[str, float]:
    """Microseconds of the slowest rank, median over the iterations; both phases and their sum."""
    dispatch, combine, check = BACKENDS[name](layer)
    check()
    samples = []
    for iteration in range(options.warmup + options.iterations):
        dist.barrier()
        start = time.perf_counter()
        dispatch()
        middle = time.perf_counter()
        combine()
        end = time.perf_counter()
        if iteration >= options.warmup:
            samples.append([middle - start, end - middle, end - start])
    times = torch.tensor(samples, dtype=torch.float64)
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    dispatch_us, combine_us, both_us = (times * 1e6).T.tolist()
    return {
        "dispatch_us": statistics.median(dispatch_us),
        "combine_us": statistics.median(combine_us),
        "both_us": statistics.median(both_us),
        "both_min_us": min(both_us),
        "both_p95_us": sorted(both_us)[int(0.95 * (len(both_us) - 1))],
    }


def rank_main(rank: int, options: Options, tokens: list[int], folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=options.ep_size
    )
    rows = []
    for num_tokens in tokens:
        layer = Layer(options, num_tokens, rank)
        for name in options.backends:
            rows.append({"tokens": num_tokens, "backend": name, **measure(layer, name, options)})
            if rank == 0:
                print_row(rows[-1], rows)
    if rank == 0:
        Path(folder, "rows.json").write_text(json.dumps(rows))
    dist.destroy_process_group()


def print_row(row: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    first_us = next(r["both_us"] for r in rows if r["tokens"] == row["tokens"])
    times = " | ".join(
        f"{row[name]:.0f}"
        for name in ("dispatch_us", "combine_us", "both_us", "both_min_us", "both_p95_us")
    )
    ratio = row["both_us"] / first_us
    print(f"| {row['tokens']} | {row['backend']} | {times} | {ratio:.1f}x |", flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    common.add_geometry(parser, ep_size=4, tokens=[1, 16, 128])
    parser.add_argument("--iterations", type=int, default=50)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="our host threads per rank")
    parser.add_argument(
        "--backends", nargs="+", default=list(BACKENDS), choices=list(BACKENDS), metavar="NAME"
    )
    parser.add_argument("--output", type=Path, help="write rows and machine as JSON")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    options = common.options_from(Options, arguments)
    columns = "tokens/rank|backend|dispatch us|combine us|both us|min us|p95 us|times ours"
    print("| " + columns.replace("|", " | ") + " |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(  # type: ignore[attr-defined,no-untyped-call]
            rank_main, (options, arguments.tokens, folder), nprocs=options.ep_size
        )
        rows = json.loads(Path(folder, "rows.json").read_text())
    if arguments.output:
        result = {
            "machine": common.describe_run(),
            "options": dataclasses.asdict(options),
            "rows": rows,
        }
        common.write_json(arguments.output, result)


if __name__ == "__main__":
    main()
