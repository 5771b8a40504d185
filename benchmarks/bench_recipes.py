"""Dispatch in every recipe and combine in every format, beside the unquantised ones.

    python benchmarks/bench_recipes.py                    # CPU ranks; the tables of README.md
    python benchmarks/bench_recipes.py --device cuda      # ranks emulated on one GPU
    python benchmarks/bench_recipes.py --tokens 64 --recipes mxfp8 --output results.json

Each recipe's dispatch is timed three ways on the same activations:
    fused       MoeAllToAll.dispatch takes the activations; the kernel quantises on the way
    two steps   the kernel's own row quantiser over all rows first, then dispatch of its rows
    torch       recipe.quantise first, then dispatch of its rows
All of them, and all formats of combine, take turns within one run, so that a ratio compares one
machine in one state. benchmarks/README.md says how times are taken.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import json
import os
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

from moe_nvlink_plugin.exchange import shapes
from moe_nvlink_plugin.exchange.kernels import LAYER
from tests.support import kernel_texts

sys.path.append(str(Path(__file__).resolve().parents[1]))

from benchmarks import common
from benchmarks.moe_comm import accounting, cuda_clock
from benchmarks.moe_comm import emulated as one_gpu
from benchmarks.moe_comm.options import OURS
from benchmarks.moe_comm.options import Options as GpuOptions
from benchmarks.moe_comm.routers import RankTokens
from moe_nvlink_plugin import AllToAllConfig, Dispatched, MoeAllToAll, driver
from moe_nvlink_plugin.config import COMBINE_FORMATS
from moe_nvlink_plugin.exchange.arguments import quantiser_code
from moe_nvlink_plugin.jit import host
from moe_nvlink_plugin.launch import shape
from moe_nvlink_plugin.launch.arguments import element_code
from moe_nvlink_plugin.memory.layout import combine_row, quantised_combine_rows
from moe_nvlink_plugin.plugins import find_recipe
from moe_nvlink_plugin.recipes import QuantisingRecipe
from moe_nvlink_plugin.testing import random_inputs
from tests.gpu import vllm_quantisers
from tests.kernels import cases, compare
from tests.kernels.cases import Inputs
from tests.support import emulated

RECIPES = ("fp8_block", "fp8_token", "fp8_tensor", "mxfp8", "nvfp4")
#: Largest representable over the largest activation, which random ones seldom pass.
GLOBAL_SCALES = {"fp8_tensor": 6.0 / 448.0, "nvfp4": 448.0 * 6.0 / 6.0}
#: What the others are compared with.
PLAIN = "bf16"
#: What travels where nothing is quantised.
UNQUANTISED = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


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
    recipes: tuple[str, ...]
    combines: tuple[str, ...]
    skip_torch: bool

    def config(self, ep_rank: int, tokens: int, **changes: Any) -> AllToAllConfig:
        return AllToAllConfig(
            ep_size=self.ep_size,
            ep_rank=ep_rank,
            num_experts=self.num_experts,
            top_k=self.top_k,
            hidden_size=self.hidden_size,
            max_tokens_per_rank=tokens,
            dtype=getattr(torch, self.dtype),
            num_threads=self.threads,
            timeout_s=120,
            **changes,
        )


def recipe_of(config: AllToAllConfig) -> QuantisingRecipe:
    recipe = find_recipe(config)
    assert isinstance(recipe, QuantisingRecipe), recipe
    return recipe


def global_scale(name: str, device: torch.device | str = "cpu") -> torch.Tensor | None:
    """The one scale of recipes that are given theirs."""
    value = GLOBAL_SCALES.get(name)
    return None if value is None else torch.tensor([value], device=device)


class Rank:
    """One rank's layers for one number of tokens: all on one workspace, one after the other."""

    def __init__(self, options: Options, tokens: int, rank: int) -> None:
        self.options, self.tokens = options, tokens
        config = options.config(rank, tokens)
        generator = torch.Generator().manual_seed(rank)
        self.hidden, self.ids, self.weights = random_inputs(config, tokens, generator)
        self.plain = MoeAllToAll.create(config, dist.group.WORLD)
        self.output = torch.empty_like(self.hidden)
        self.layers = [self.plain]
        self.bodies: dict[str, Callable[[], float]] = {
            PLAIN: lambda: self._dispatch(self.plain, lambda: (self.hidden, None), None)
        }
        self.wire: dict[str, float] = {}
        for name in options.recipes:
            self._add_recipe(self._create(recipe=name))
        for name in options.combines:
            self._add_combine(self._create(combine=name))

    def _create(self, **changes: Any) -> MoeAllToAll:
        config = dataclasses.replace(self.plain.config, **changes)
        layer = MoeAllToAll.create(config, dist.group.WORLD, share_with=self.plain)
        self.layers.append(layer)
        return layer

    def close(self) -> None:
        for layer in reversed(self.layers):
            layer.close()

    def _add_recipe(self, layer: MoeAllToAll) -> None:
        recipe = recipe_of(layer.config)
        scale = global_scale(recipe.name)
        by_kernel = kernel_quantiser(layer.config, self.hidden)
        self.bodies |= {
            f"{recipe.name} fused": lambda: self._dispatch(
                layer, lambda: (self.hidden, None), scale
            ),
            f"{recipe.name} two steps": lambda: self._dispatch(layer, by_kernel, None),
        }
        if not self.options.skip_torch:
            self.bodies[f"{recipe.name} torch"] = lambda: self._dispatch(
                layer, lambda: recipe.quantise(self.hidden, scale), None
            )
        self._check(layer, recipe, by_kernel)

    def _dispatch(
        self,
        layer: MoeAllToAll,
        rows: Callable[[], tuple[torch.Tensor, torch.Tensor | None]],
        scale: torch.Tensor | None,
    ) -> float:
        """Seconds of making the rows and dispatching them; the combine behind it is not timed."""
        dist.barrier()
        start = time.perf_counter()
        received = self._send(layer, *rows(), scale)
        seconds = time.perf_counter() - start
        # Of the plain layer's format and hidden size: whatever lies there is added up.
        layer.combine(layer.combine_input(), received.metadata, output=self.output)
        return seconds

    def _send(
        self,
        layer: MoeAllToAll,
        hidden: torch.Tensor,
        scales: torch.Tensor | None,
        scale: torch.Tensor | None,
    ) -> Dispatched:
        ids, weights = self.ids, self.weights
        return layer.dispatch(hidden, ids, weights, scales=scales, global_scale=scale)

    def _add_combine(self, layer: MoeAllToAll) -> None:
        rows = layer.combine_input().normal_()

        def body() -> float:
            received = self._send(layer, self.hidden, None, None)
            dist.barrier()
            start = time.perf_counter()
            layer.combine(rows, received.metadata, output=self.output)
            return time.perf_counter() - start

        self.bodies[f"combine {layer.config.combine}"] = body

    def _check(
        self,
        layer: MoeAllToAll,
        recipe: QuantisingRecipe,
        by_kernel: Callable[[], tuple[torch.Tensor, torch.Tensor | None]],
    ) -> None:
        """All three ways send the same bits.

        Raises:
            SystemExit: they do not; no time is reported.
        """
        scale = global_scale(recipe.name)
        seen = []
        for rows, given in (
            ((self.hidden, None), scale),
            (by_kernel(), None),
            (recipe.quantise(self.hidden, scale), None),
        ):
            got = self._send(layer, *rows, given)
            seen.append([got.hidden_states.view(torch.uint8).clone()])
            if got.scales is not None:
                seen[-1].append(got.scales.view(torch.uint8).clone())
            layer.combine(layer.combine_input(), got.metadata, output=self.output)
            counts = got.recv_counts.tolist()
        filled = torch.cat(
            [torch.arange(n) + source * self.tokens for source, n in enumerate(counts)]
        )
        for other in seen[1:]:
            for mine, theirs in zip(seen[0], other, strict=True):
                if not torch.equal(mine[filled], theirs[filled]):
                    raise SystemExit(f"{recipe.name}: other rows than the recipe's; nothing timed")

    def count_bytes(self) -> None:
        """Bytes that one dispatch or combine moves to or from other ranks, per token."""
        for name, body in self.bodies.items():
            before = self.plain.stats()
            body()
            after = self.plain.stats()
            field = f"bytes_{'combined' if name.startswith('combine') else 'dispatched'}_remote"
            moved = getattr(after, field) - getattr(before, field)
            self.wire[name] = moved / self.tokens


def kernel_quantiser(
    config: AllToAllConfig, hidden: torch.Tensor
) -> Callable[[], tuple[torch.Tensor, torch.Tensor | None]]:
    """The host library's row quantiser, over all rows at once, into buffers made before."""
    recipe = recipe_of(config)
    rows, scales = recipe.quantise(hidden, global_scale(recipe.name))
    rows, scales = torch.empty_like(rows), None if scales is None else torch.empty_like(scales)
    scale = global_scale(recipe.name)
    function = host.load(kernel_texts.host_source())._library.moe_nvlink_quantise_rows
    function.restype = None
    function.argtypes = [ctypes.c_int] * 2 + [ctypes.c_void_p] * 4 + [ctypes.c_int64, ctypes.c_int]
    given = (
        *(
            quantiser_code(recipe, config.hidden_size),
            element_code(config.dtype),
            hidden.data_ptr(),
        ),
        *(None if tensor is None else tensor.data_ptr() for tensor in (scale, rows, scales)),
        *hidden.shape,
    )

    def quantise(_keep: Any = (hidden, scale)) -> tuple[torch.Tensor, torch.Tensor | None]:
        function(*given)
        return rows, scales

    return quantise


def measure(rank: Rank, options: Options) -> list[dict[str, Any]]:
    """One row per body: times of the slowest rank, and their ratios to the first body's."""
    rank.count_bytes()
    names = list(rank.bodies)
    samples: list[list[float]] = []
    for iteration in range(options.warmup + options.iterations):
        taken = [0.0] * len(names)
        for turn in range(len(names)):  # each body comes first in some iterations
            index = (turn + iteration) % len(names)
            taken[index] = rank.bodies[names[index]]()
        if iteration >= options.warmup:
            samples.append(taken)
    times = torch.tensor(samples, dtype=torch.float64).T * 1e6
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    wire = torch.tensor([rank.wire[name] for name in names], dtype=torch.float64)
    dist.all_reduce(wire)
    rows = []
    for index, name in enumerate(names):
        kind = "combine" if name.startswith("combine") else "dispatch"
        rows.append(
            {
                "tokens": rank.tokens,
                "verb": kind,
                "name": name.removeprefix("combine "),
                **common.summary(times[index].tolist()),
                "wire_bytes_per_token": float(wire[index]) / options.ep_size,
                "row_bytes": row_bytes(rank.plain.config, kind, name),
            }
        )
    add_ratios(rows, times, names)
    return rows


def row_bytes(config: AllToAllConfig, verb: str, name: str) -> int:
    """Bytes of one token's activations (or partial row) and their scales."""
    plain = combine_row(config).row_bytes
    if verb == "combine":
        changed = dataclasses.replace(config, combine=name.removeprefix("combine "))
        quantised = quantised_combine_rows(changed).values()
        return sum(row.row_bytes for row in quantised) or plain
    recipe = name.split()[0]
    if recipe == PLAIN:
        return plain
    made = find_recipe(dataclasses.replace(config, recipe=recipe))
    scales = made.scales_row(config.hidden_size)
    row = made.hidden_row(config.hidden_size).row_bytes
    return row + (0 if scales is None else scales.row_bytes)


def add_ratios(rows: list[dict[str, Any]], times: torch.Tensor, names: list[str]) -> None:
    """`times_bf16`: the unquantised verb's time over this one's, so that larger is faster.

    `over_two_steps`, `over_torch`: that way's time over the fused one's. With quartiles of the
    ratios of single iterations.
    """

    for row, name in zip(rows, names, strict=True):
        plain = f"combine {PLAIN}" if row["verb"] == "combine" else PLAIN
        if plain in names:
            row["times_bf16"] = ratio(times, names, plain, name)
        if name.endswith(" fused"):
            recipe = name.removesuffix(" fused")
            row["over_two_steps"] = ratio(times, names, f"{recipe} two steps", name)
            if f"{recipe} torch" in names:
                row["over_torch"] = ratio(times, names, f"{recipe} torch", name)


def ratio(times: torch.Tensor, names: list[str], of: str, over: str) -> dict[str, float]:
    """Of the medians; quartiles of the ratios of single iterations."""
    one, other = times[names.index(of)], times[names.index(over)]
    low, _middle, high = statistics.quantiles((one / other).tolist(), n=4)
    value = statistics.median(one.tolist()) / statistics.median(other.tolist())
    return {"ratio": value, "q25": low, "q75": high}


def rank_main(
    rank: int, options: Options, tokens: list[int], folder: str, record: common.Record
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=options.ep_size
    )
    rows: list[dict[str, Any]] = []
    for number in tokens:
        mine = Rank(options, number, rank)
        measured = measure(mine, options)
        mine.close()
        rows += measured
        if rank == 0:
            print_rows(measured)
            record.write({"rows": rows})
    if rank == 0:
        Path(folder, "rows.json").write_text(json.dumps(rows))
    dist.barrier()  # gloo ends a process that takes the group down while another still uses it
    dist.destroy_process_group()


COLUMNS = (
    "tokens/rank|verb|format|us|quartiles|bytes a row|to others per token|"
    "x bf16|quartiles|two steps / fused|torch / fused|fused / quantiser"
)


def print_rows(rows: list[dict[str, Any]]) -> None:
    def cell(row: dict[str, Any], name: str) -> str:
        found = row.get(name)
        return "" if found is None else f"{found['ratio']:.2f}"

    for row in rows:
        spread = row.get("times_bf16")
        cells = [
            f"{row['tokens']}",
            row["verb"],
            row["name"],
            f"{row['median_us']:.0f}",
            f"{row['q25_us']:.0f}..{row['q75_us']:.0f}",
            f"{row.get('row_bytes', '')}",
            f"{row['wire_bytes_per_token']:.0f}",
            cell(row, "times_bf16"),
            "" if spread is None else f"{spread['q25']:.2f}..{spread['q75']:.2f}",
            cell(row, "over_two_steps"),
            cell(row, "over_torch"),
            cell(row, "over_quantiser"),
        ]
        print("| " + " | ".join(cells) + " |", flush=True)


def on_cpu(options: Options, tokens: list[int], record: common.Record) -> list[dict[str, Any]]:
    host.load(
        LAYER.host_source()
    )  # compiled once, here, rather than by ranks that wait for each other
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(  # type: ignore[attr-defined,no-untyped-call]
            rank_main, (options, tokens, folder, record), nprocs=options.ep_size
        )
        found: list[dict[str, Any]] = json.loads(Path(folder, "rows.json").read_text())
    return found


class Alone:
    """The kernel's quantiser by itself, over the activations of all ranks at once."""

    def __init__(
        self,
        options: GpuOptions,
        tokens: int,
        backend: emulated.Backend,
        inputs: list[RankTokens],
    ) -> None:
        self._inputs = inputs
        self.ranks = emulated.EmulatedRanks(
            lambda rank: one_gpu.config_of(options, rank, tokens), backend
        )
        device = one_gpu.device_of(options)
        ids = torch.zeros((tokens, options.top_k), dtype=torch.int32, device=device)
        launched = []
        for rank, mine in enumerate(inputs):
            args = self.ranks.dispatch_arguments(rank)
            args.geometry.num_tokens = tokens
            emulated.set_sources(
                args, self.ranks.sources(Inputs(mine.hidden, ids, mine.topk_weights, ()))
            )
            launched.append(args)
        launch_shape = None
        if isinstance(backend, emulated.CudaBackend):
            lanes_bytes = shapes.quantising_lanes(options.hidden_size) * shape.VECTOR_BYTES
            limits = backend.limits("quantise", options.ep_size)
            launch_shape = shapes.dispatch_shape(tokens, lanes_bytes, 0, limits)
        self._keep = (ids, launched)
        self.run = backend.prepare("quantise", launched, launch_shape)

    def check(self) -> None:
        """Raises AssertionError where it made something else than the recipe."""
        self.run()
        config = self.ranks.config
        for rank, (hidden, _ids, _weights) in enumerate(self._inputs):
            expected = cases.quantised(config, hidden)
            rows = self.ranks.view(rank, "recv_hidden_states")[: len(hidden)]
            near = config.recipe == "nvfp4" and hidden.device.type == "cuda"
            check = compare.assert_next_code if near else compare.assert_same_bits
            check(rows.cpu(), expected.rows.cpu(), f"{config.recipe} alone on rank {rank}")


def vllm_body(recipe: str, hidden: torch.Tensor) -> cuda_clock.Body | None:
    """vLLM's own CUDA quantiser over all rows, where it is installed and runs here."""
    if hidden.device.type != "cuda" or not common.is_installed("vllm"):
        return None
    os.environ["VLLM_USE_DEEP_GEMM"] = "0"
    scale = global_scale(recipe, hidden.device)

    def body() -> None:
        vllm_quantisers.quantise(recipe, hidden, scale)

    try:
        body()
    except Exception as error:  # whatever it lacks, ours is to be measured
        print(f"vLLM's quantiser for {recipe} does not run here: {error}", file=sys.stderr)
        return None
    return body


def measure_emulated(
    plain_options: GpuOptions,
    tokens: int,
    timer: cuda_clock.Clock,
    inputs: list[RankTokens],
    recipe: str,
) -> list[dict[str, Any]]:
    """Dispatch of bf16, of the recipe fused, of rows quantised before; the quantiser alone."""
    options = dataclasses.replace(plain_options, recipe=recipe)
    one_expert = dataclasses.replace(options, top_k=1)
    layers: list[one_gpu.Layer] = []  # what a launch reads lives as long as its layer
    with contextlib.ExitStack() as stack:

        def layer(of: GpuOptions, post_quant: bool = False) -> one_gpu.Layer:
            backend = one_gpu.make_backend(of, post_quant=post_quant)
            stack.enter_context(contextlib.closing(backend))
            made = one_gpu.Layer(of, tokens, backend, inputs=inputs, post_quant=post_quant)
            made.check()
            layers.append(made)
            return made

        backend = one_gpu.make_backend(one_expert, alone=True)
        stack.enter_context(contextlib.closing(backend))
        alone = Alone(one_expert, tokens, backend, inputs)
        alone.check()
        bodies = {
            PLAIN: layer(plain_options).dispatch,
            f"{recipe} fused": layer(options).dispatch,
            f"{recipe} given rows": layer(options, post_quant=True).dispatch,
            f"{recipe} quantiser alone": alone.run,
        }
        theirs = vllm_body(recipe, torch.cat([mine.hidden for mine in inputs]))
        if theirs is not None:
            bodies[f"{recipe} vLLM's quantiser"] = theirs
        taken = timer.flushed(bodies)
    moved = {PLAIN: wire_bytes(plain_options, tokens), recipe: wire_bytes(options, tokens)}
    return emulated_rows(tokens, "dispatch", taken, moved, f"{recipe} fused")


def wire_bytes(options: GpuOptions, tokens: int, verb: str = "dispatch") -> float:
    """To other ranks, of the mean rank."""
    return accounting.traffic(options, tokens).mean_wire_bytes(verb)


def measure_formats(
    plain_options: GpuOptions,
    tokens: int,
    timer: cuda_clock.Clock,
    inputs: list[RankTokens],
    formats: tuple[str, ...],
) -> list[dict[str, Any]]:
    """Combine in each format, behind a dispatch of bf16 rows that is not timed."""
    layers: dict[str, one_gpu.Layer] = {}
    with contextlib.ExitStack() as stack:
        for name in dict.fromkeys((PLAIN, *formats)):
            options = dataclasses.replace(plain_options, combine=name)
            backend = one_gpu.make_backend(options)
            stack.enter_context(contextlib.closing(backend))
            layers[name] = one_gpu.Layer(options, tokens, backend, inputs=inputs)
            layers[name].check()
        # A combine may be launched again: its peers' signals of this round are still there.
        taken = timer.flushed({name: layer.combine for name, layer in layers.items()})
    moved = {name: wire_bytes(of.options, tokens, "combine") for name, of in layers.items()}
    return emulated_rows(tokens, "combine", taken, moved, "")


def emulated_rows(
    tokens: int,
    verb: str,
    taken: dict[str, list[float]],
    moved: dict[str, float],
    fused: str,
) -> list[dict[str, Any]]:
    """As measure's rows; `over_quantiser`: the fused dispatch's time over the quantiser's alone.

    moved: format -> bytes to other ranks, of the mean rank.
    """
    names = list(taken)
    times = torch.tensor([taken[name] for name in names], dtype=torch.float64)
    rows = []
    for name, of_name in zip(names, times, strict=True):
        rows.append(
            {
                "tokens": tokens,
                "verb": verb,
                "name": name,
                **common.summary(of_name.tolist()),
                "wire_bytes_per_token": moved[name.split()[0]] / tokens,
                "times_bf16": ratio(times, names, PLAIN, name),
            }
        )
        if name == fused:
            alone = name.replace("fused", "quantiser alone")
            rows[-1]["over_quantiser"] = ratio(times, names, name, alone)
    return rows


def gpu_options(arguments: argparse.Namespace) -> GpuOptions:
    """Of ranks emulated on one GPU, or rehearsed."""
    return GpuOptions(
        backends=(OURS,),
        profile="custom",
        hidden_size=arguments.hidden_size,
        top_k=arguments.top_k,
        num_experts=arguments.num_experts,
        recipe=UNQUANTISED[arguments.dtype],
        dtype=arguments.dtype,
        ep_size=arguments.ep_size,
        batches=tuple(arguments.tokens),
        iters=arguments.iterations,
        warmup=arguments.warmup,
        device=arguments.device,
        emulate_ranks=True,
    )


def on_gpu(
    options: GpuOptions, arguments: argparse.Namespace, record: common.Record
) -> list[dict[str, Any]]:
    """All recipes and formats on ranks emulated on one device."""
    timer = cuda_clock.Clock(one_gpu.device_of(options), options.iters, options.warmup)
    found = []
    for tokens in options.batches:
        inputs = one_gpu.make_inputs(options, tokens)
        for recipe in arguments.recipes:
            measured = measure_emulated(options, tokens, timer, inputs, recipe)
            print_rows(measured)
            found += measured
            record.write({"rows": found})
        if arguments.combines:
            formats = tuple(arguments.combines)
            measured = measure_formats(options, tokens, timer, inputs, formats)
            print_rows(measured)
            found += measured
            record.write({"rows": found})
    return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument(
        "--device",
        default="cpu",
        choices=["cpu", "cuda", "rehearsal"],
        help="rehearsal: what cuda does, on CPU threads, whose times mean nothing",
    )
    common.add_geometry(parser, ep_size=4, tokens=[16, 128, 1024, 2048])
    parser.add_argument("--recipes", nargs="*", default=list(RECIPES), choices=RECIPES)
    parser.add_argument(
        "--combines", nargs="*", default=list(COMBINE_FORMATS), choices=COMBINE_FORMATS
    )
    parser.add_argument(
        "--skip-torch", action="store_true", help="CPU: not the slow third way, for many tokens"
    )
    parser.add_argument("--iterations", type=int, default=30)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="CPU: our host threads per rank")
    parser.add_argument(
        "--output", type=Path, help="JSON of rows and machine, written after every batch"
    )
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print(f"not measured: no CUDA device ({driver.unavailable() or 'torch sees none'})")
        return
    print("| " + COLUMNS.replace("|", " | ") + " |")
    print("|---" * (COLUMNS.count("|") + 1) + "|", flush=True)
    machine = common.describe_run()

    def record(options: Options | GpuOptions, shows: str) -> common.Record:
        head = {"machine": machine, "options": dataclasses.asdict(options), "shows": shows}
        return common.Record(arguments.output, head)

    if arguments.device == "cpu":
        options = common.options_from(Options, arguments)
        result = record(options, "CPU ranks: processes of one host")
        rows = on_cpu(options, arguments.tokens, result)
    else:
        emulated_options = gpu_options(arguments)
        machine |= common.describe_gpu() if emulated_options.device == "cuda" else {}
        shows = "ranks emulated on one device: no NVLink latency, bandwidth or ordering"
        result = record(emulated_options, shows)
        rows = on_gpu(emulated_options, arguments, result)
    result.write({"rows": rows}, complete=True)


if __name__ == "__main__":
    main()
