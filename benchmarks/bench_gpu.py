"""Dispatch and combine of many ranks emulated on ONE GPU, beside a device copy of the same bytes.

    python benchmarks/bench_gpu.py                     # needs a GPU; says so where there is none
    python benchmarks/bench_gpu.py --device cpu --tokens 2 --hidden-size 64    # a rehearsal

All ranks' kernels are one cooperative launch (tests/kernels/emulated.py), each with its share of
the SMs, and "remote" memory is the same GPU's. So this shows the cost of launch, routing, copy and
reduction, and how near they come to the memory's speed. It shows nothing of NVLink: no remote
latency, no remote bandwidth, no ordering between GPUs. benchmarks/README.md says how times are
taken.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))

from benchmarks.common import (
    add_geometry,
    describe_gpu,
    describe_run,
    is_installed,
    options_from,
    write_json,
)
from moe_nvlink_plugin import AllToAllConfig, driver
from moe_nvlink_plugin.config import local_expert_range
from moe_nvlink_plugin.executors import shape
from moe_nvlink_plugin.layout import quantised_combine_rows
from moe_nvlink_plugin.testing import generators, random_inputs
from tests.kernels import cases, emulated
from tests.kernels.cases import Inputs

#: Larger than any L2, so that writing it leaves nothing of ours there.
FLUSH_BYTES = 256 * 2**20
#: Rounds in one graph of the second method.
ROUNDS_PER_GRAPH = 20

Body = Callable[[], None]


@dataclasses.dataclass(frozen=True)
class Options:
    device: str
    ep_size: int
    hidden_size: int
    top_k: int
    num_experts: int
    dtype: str
    iterations: int
    warmup: int

    def config(self, ep_rank: int, tokens: int, **changes: Any) -> AllToAllConfig:
        return AllToAllConfig(
            ep_size=self.ep_size,
            ep_rank=ep_rank,
            num_experts=self.num_experts,
            top_k=self.top_k,
            hidden_size=self.hidden_size,
            max_tokens_per_rank=tokens,
            dtype=getattr(torch, self.dtype),
            timeout_s=10,
            **changes,
        )


class Timer:
    """Microseconds of work on the device (of wall clock on the CPU)."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._on_gpu = options.device == "cuda"
        size = FLUSH_BYTES if self._on_gpu else 1
        self._flush = torch.empty(size, dtype=torch.uint8, device=options.device)

    def flushed(self, bodies: dict[str, Body]) -> dict[str, list[float]]:
        """Each body, one after the other, with nothing of ours in L2 before it.

        The write that flushes keeps the GPU busy for longer than the host needs to enqueue the
        body, so that between the two events there is the body alone.
        """
        samples: dict[str, list[Any]] = {name: [] for name in bodies}
        for iteration in range(self._options.warmup + self._options.iterations):
            for name, body in bodies.items():
                self._flush.fill_(iteration % 256)
                pair = self._time_once(body)
                if iteration >= self._options.warmup:
                    samples[name].append(pair)
        if self._on_gpu:
            torch.cuda.synchronize()
            return {
                name: [start.elapsed_time(end) * 1e3 for start, end in pairs]
                for name, pairs in samples.items()
            }
        return {name: [(end - start) * 1e6 for start, end in p] for name, p in samples.items()}

    def _time_once(self, body: Body) -> tuple[Any, Any]:
        if not self._on_gpu:
            start_s = time.perf_counter()
            body()
            return start_s, time.perf_counter()
        event: Any = torch.cuda.Event  # torch ships no types for it
        start, end = event(enable_timing=True), event(enable_timing=True)
        start.record()
        body()
        end.record()
        return start, end

    def replayed(self, body: Body) -> float | None:
        """One body's share of a graph of many, L2 as they leave it; a GPU's alone."""
        if not self._on_gpu:
            return None

        def rounds() -> None:
            for _ in range(ROUNDS_PER_GRAPH):
                body()

        replay = emulated.captured(rounds)
        replay()
        samples: list[float] = []
        for _ in range(max(self._options.iterations // ROUNDS_PER_GRAPH, 5)):
            start, end = self._time_once(replay)
            torch.cuda.synchronize()
            samples.append(start.elapsed_time(end) * 1e3 / ROUNDS_PER_GRAPH)
        return statistics.median(samples)


class Layer:
    """One geometry on emulated ranks: prepared launches, and what they move.

    Args:
        inputs: of each rank, as make_inputs makes them; None makes them.
        changes: fields of AllToAllConfig, such as recipe and combine.
        post_quant: dispatch takes rows that have been quantised before.
    """

    def __init__(
        self,
        options: Options,
        tokens: int,
        backend: emulated.Backend,
        *,
        inputs: list[list[torch.Tensor]] | None = None,
        post_quant: bool = False,
        **changes: Any,
    ) -> None:
        self.options, self.tokens = options, tokens
        ranks = emulated.EmulatedRanks(
            lambda rank: options.config(rank, tokens, **changes), backend, post_quant=post_quant
        )
        self.ranks = ranks
        self.inputs = make_inputs(options, tokens) if inputs is None else inputs
        self.slots = [torch.empty_like(ids) for _hidden, ids, _weights in self.inputs]
        self.outputs = [torch.empty_like(hidden) for hidden, _ids, _weights in self.inputs]
        # Some are made of the inputs, and live as long as the launches that read them.
        self._sources = [
            ranks.sources(Inputs(hidden, ids, weights, ())) for hidden, ids, weights in self.inputs
        ]
        self.shapes = self._shapes(backend)
        self.dispatch = backend.prepare("dispatch", self._dispatch(), self.shapes.get("dispatch"))
        self.combine = backend.prepare("combine", self._combine(), self.shapes.get("combine"))
        self.copies = [unique_targets(ids, options) for _hidden, ids, _weights in self.inputs]

    def _shapes(self, backend: emulated.Backend) -> dict[str, shape.Shape]:
        """What the product would launch on a GPU with this rank's share of the SMs."""
        if not isinstance(backend, emulated.CudaBackend):
            return {}
        options, config = self.options, self.ranks.config
        row_bytes = {name: row.row_bytes for name, row in self.ranks.rows.items()}
        slots = options.ep_size * self.tokens
        lanes_bytes = max(row_bytes.values())
        if self.ranks.quantiser:
            lanes_bytes = shape.quantising_lanes(options.hidden_size) * shape.VECTOR_BYTES
        return {
            "dispatch": shape.dispatch_shape(
                self.tokens,
                lanes_bytes,
                slots * row_bytes["recv_topk_ids"],
                backend.limits("dispatch", options.ep_size),
            ),
            "combine": shape.combine_shape(
                self.tokens,
                options.hidden_size,
                config.dtype.itemsize,
                backend.limits("combine", options.ep_size),
                0 if config.combine == "bf16" else slots,
            ),
        }

    def _dispatch(self) -> list[Any]:
        launched = []
        for rank, sources in enumerate(self._sources):
            args = self.ranks.dispatch_arguments(rank)
            args.geometry.num_tokens = self.tokens
            args.send_slots = self.slots[rank].data_ptr()
            emulated.set_sources(args, sources)
            launched.append(args)
        return launched

    def _combine(self) -> list[Any]:
        launched = []
        for rank, output in enumerate(self.outputs):
            args = self.ranks.combine_arguments(rank)
            args.geometry.num_tokens = self.tokens
            args.send_slots, args.output = self.slots[rank].data_ptr(), output.data_ptr()
            if "combine" in self.shapes:
                args.hidden_splits = self.shapes["combine"].hidden_splits
            launched.append(args)
        return launched

    def round(self) -> None:
        """Dispatch and combine, no experts."""
        self.dispatch()
        self.combine()

    def check(self) -> None:
        """Experts that return their input: every token comes back once per rank it went to.

        Up to 32 equal 16-bit terms add up exactly in fp32, so the comparison is bit for bit where
        rows travel as they are; else it tells rows from other rows (the tests compare the bits).

        Raises:
            SystemExit: a wrong row; no time is reported.
        """
        for output in self.outputs:
            output.fill_(float("nan"))
        self.dispatch()
        for rank in range(self.options.ep_size):
            mine = self.ranks.received(rank, (), self.slots[rank])
            rows = cases.activations(self.ranks.config, mine.hidden_states, mine.scales)
            self.ranks.view(rank, "combine").copy_(rows)
        self.combine()
        self.ranks.check_faults()
        for rank, (hidden, _ids, _weights) in enumerate(self.inputs):
            times = self.copies[rank].to(hidden.device)[:, None]
            expected = (hidden.float() * times).to(hidden.dtype)
            if not self._is_right(self.outputs[rank], expected):
                raise SystemExit(f"{self.tokens} tokens: wrong rows on rank {rank}; nothing timed")

    def _is_right(self, output: torch.Tensor, expected: torch.Tensor) -> bool:
        config = self.ranks.config
        if config.recipe is None and config.combine == "bf16":
            return torch.equal(output, expected)
        error = (output.float() - expected.float()).norm() / expected.float().norm()
        return bool(error < 0.2)

    def bytes_moved(self) -> dict[str, float]:
        """Per rank, mean over the ranks, and of all ranks together."""
        options, config = self.options, self.ranks.config
        rows = {
            "dispatch": sum(row.row_bytes for row in self.ranks.rows.values()),
            "combine": sum(row.row_bytes for row in quantised_combine_rows(config).values())
            or options.hidden_size * config.dtype.itemsize,
        }
        logical = self.tokens * min(options.ep_size, options.top_k)
        unique = sum(int(copies.sum()) for copies in self.copies)
        remote = unique - sum(int(own.sum()) for own in self._own())
        found: dict[str, float] = {}
        for verb, row_bytes in rows.items():
            found[f"{verb}_logical_bytes"] = logical * row_bytes
            found[f"{verb}_wire_bytes"] = remote * row_bytes / options.ep_size
            found[f"{verb}_all_ranks_bytes"] = unique * row_bytes
        return found

    def _own(self) -> list[torch.Tensor]:
        return [
            target_table(ids, self.options)[:, rank]
            for rank, (_hidden, ids, _weights) in enumerate(self.inputs)
        ]


def make_inputs(options: Options, tokens: int) -> list[list[torch.Tensor]]:
    """Activations, ids and weights of each rank, on the device."""
    inputs = []
    for rank, generator in enumerate(generators(options.ep_size, 1)):
        mine = random_inputs(options.config(rank, tokens), tokens, generator)
        inputs.append([tensor.to(options.device) for tensor in mine])
    return inputs


def target_table(ids: torch.Tensor, options: Options) -> torch.Tensor:
    """`[tokens, ep_size] bool`: which ranks own an expert of the token."""
    ranges = [
        local_expert_range(options.num_experts, options.ep_size, rank)
        for rank in range(options.ep_size)
    ]
    first, end = torch.tensor(ranges, device=ids.device).T
    inside: torch.Tensor = (ids[:, :, None] >= first) & (ids[:, :, None] < end)
    return inside.any(dim=1)


def unique_targets(ids: torch.Tensor, options: Options) -> torch.Tensor:
    """`[tokens]`: ranks each token goes to."""
    return target_table(ids, options).sum(dim=1)


def copy_body(num_bytes: int, device: str) -> Body:
    """A device-to-device copy: num_bytes read, num_bytes written."""
    source = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def body() -> None:
        target.copy_(source)

    return body


def measure(
    options: Options, tokens: int, timer: Timer, backend: emulated.Backend
) -> dict[str, Any]:
    """One row of the result."""
    layer = Layer(options, tokens, backend)
    layer.check()
    moved = layer.bytes_moved()
    bodies = {
        "dispatch": layer.dispatch,
        "combine": layer.combine,
        "dispatch_copy": copy_body(int(moved["dispatch_all_ranks_bytes"]), options.device),
        "combine_copy": copy_body(int(moved["combine_all_ranks_bytes"]), options.device),
    }
    row: dict[str, Any] = {"tokens": tokens, **moved}
    for name, samples in timer.flushed(bodies).items():
        ordered = sorted(samples)
        row[f"{name}_us"] = statistics.median(ordered)
        row[f"{name}_p95_us"] = ordered[int(0.95 * (len(ordered) - 1))]
    row["round_replayed_us"] = timer.replayed(layer.round)
    row["shapes"] = {verb: of_verb._asdict() for verb, of_verb in layer.shapes.items()}
    for verb in ("dispatch", "combine"):
        row[f"{verb}_logical_gb_s"] = moved[f"{verb}_logical_bytes"] / row[f"{verb}_us"] / 1e3
        row[f"{verb}_of_copy"] = row[f"{verb}_copy_us"] / row[f"{verb}_us"]
    layer.check()  # still right after all those rounds
    return row


COLUMNS = {
    "tokens": "tokens/rank",
    "dispatch_us": "dispatch us",
    "dispatch_copy_us": "copy us",
    "dispatch_of_copy": "of copy speed",
    "combine_us": "combine us",
    "combine_copy_us": "copy us",
    "combine_of_copy": "of copy speed",
    "round_replayed_us": "both, graph us",
    "dispatch_logical_gb_s": "dispatch logical GB/s a rank",
    "combine_logical_gb_s": "combine logical GB/s a rank",
}


def print_row(row: dict[str, Any]) -> None:
    cells = [row[name] for name in COLUMNS]
    texts = [f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in cells]
    print("| " + " | ".join(texts) + " |", flush=True)


def peers() -> dict[str, str]:
    """Other implementations of the same step, to be timed in the same run by the same Timer.

    A peer is a pair of bodies like Layer.dispatch and Layer.combine, checked like Layer.check.
    """
    found = is_installed("flashinfer")
    state = "installed, but there is no adapter for it yet" if found else "not installed"
    return {"flashinfer moe_a2a": state}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    tokens = [1, 4, 16, 64, 128, 256, 512, 1024, 2048]
    add_geometry(parser, ep_size=8, tokens=tokens, dtypes=("bfloat16", "float16"))
    parser.add_argument("--iterations", type=int, default=200)
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--output", type=Path, help="write rows and machine as JSON")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    options = options_from(Options, arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print(f"not measured: no CUDA device ({driver.unavailable() or 'torch sees none'})")
        return
    print("| " + " | ".join(COLUMNS.values()) + " |")
    print("|---" * len(COLUMNS) + "|", flush=True)
    timer = Timer(options)
    with contextlib.closing(make_backend(options)) as backend:
        rows = []
        for tokens in arguments.tokens:
            rows.append(measure(options, tokens, timer, backend))
            print_row(rows[-1])
    if arguments.output:
        gpu = describe_gpu() if options.device == "cuda" else {}
        result = {
            "machine": describe_run() | gpu,
            "options": dataclasses.asdict(options),
            "shows": "ranks emulated on one GPU: no NVLink latency, bandwidth or ordering",
            "peers": peers(),
            "rows": rows,
        }
        write_json(arguments.output, result)


def make_backend(
    options: Options, *, post_quant: bool = False, alone: bool = False, **changes: Any
) -> emulated.Backend:
    """For a Layer of the same changes; `alone`: with its quantiser as a verb of its own."""
    if options.device == "cpu":
        return emulated.CpuBackend(options.ep_size, ctas=1)
    return emulated.CudaBackend(
        options.ep_size,
        1,
        options.config(0, 1, **changes),
        post_quant=post_quant,
        alone=alone,
        as_product=True,
    )


def stand_in_backend(options: Options) -> emulated.Backend:
    """What a GPU would be given, on the driver of tests/fake_cuda: for the tests."""
    config = options.config(0, 1)
    return emulated.CudaBackend(options.ep_size, 1, config, device="cpu", as_product=True)


if __name__ == "__main__":
    main()
