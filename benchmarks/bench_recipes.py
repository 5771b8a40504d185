"""Time dispatch in every recipe and combine in every format, beside the unquantised formats.

    python benchmarks/bench_recipes.py                    # CPU ranks; the tables of README.md
    python benchmarks/bench_recipes.py --device cuda      # ranks emulated on one GPU
    python benchmarks/bench_recipes.py --tokens 64 --recipes mxfp8 --output_file results.json

Each recipe's dispatch is timed two ways on the same activations:
    fused       MoeAllToAll.dispatch takes the activations; the kernel quantises on the way
    two steps   the kernel's own row quantiser over all rows first, then dispatch of its rows
Both, and all formats of combine, take turns within one run, so that a ratio compares one machine in
one state. benchmarks/README.md says how times are taken.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import functools
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).resolve().parents[1]))

from benchmarks import common, harness
from benchmarks.columns import print_headings, print_row
from benchmarks.moe_comm import accounting, cuda_clock
from benchmarks.moe_comm import emulated as one_gpu
from benchmarks.moe_comm.expected import WrongResult
from benchmarks.moe_comm.options import OURS, Options
from benchmarks.moe_comm.routers import RankTokens
from moe_nvlink_plugin import AllToAllConfig, Dispatched, MoeAllToAll
from moe_nvlink_plugin.config import COMBINE_FORMATS
from moe_nvlink_plugin.exchange import shapes
from moe_nvlink_plugin.exchange.arguments import quantiser_code
from moe_nvlink_plugin.exchange.kernels import LAYER
from moe_nvlink_plugin.jit import host
from moe_nvlink_plugin.launch import shape
from moe_nvlink_plugin.launch.arguments import element_code
from moe_nvlink_plugin.plugins import find_recipe
from moe_nvlink_plugin.recipes import QuantisingRecipe
from moe_nvlink_plugin.testing import random_inputs
from moe_nvlink_plugin.verify import cases, compare
from moe_nvlink_plugin.verify.cases import Inputs
from tests.support import emulated, kernel_texts, vllm_quantisers

RECIPES = ("fp8_block", "fp8_token", "fp8_tensor", "mxfp8", "nvfp4")
#: Largest representable over the largest activation, which random ones seldom pass.
GLOBAL_SCALES = {"fp8_tensor": 6.0 / 448.0, "nvfp4": 448.0 * 6.0 / 6.0}
#: What the others are compared with: a dispatch, a combine.
PLAIN, PLAIN_COMBINE = "bf16", "combine bf16"
#: What travels if nothing is quantised.
UNQUANTISED = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}

Row = dict[str, Any]
#: Rows, their scales, and a scale for the kernel that quantises: what dispatch is given.
Given = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]


def recipe_of(config: AllToAllConfig) -> QuantisingRecipe:
    recipe = find_recipe(config)
    assert isinstance(recipe, QuantisingRecipe), recipe
    return recipe


def global_scale(name: str, device: torch.device | str = "cpu") -> torch.Tensor | None:
    """Return the one scale of a recipe that takes its scale from the caller."""
    value = GLOBAL_SCALES.get(name)
    return None if value is None else torch.tensor([value], device=device)


# CPU ranks.


class Rank:
    """One rank's layers for one number of tokens: all on one workspace, one after the other.

    Attributes:
        bodies: what is timed -> a call of it.
    """

    def __init__(self, arguments: argparse.Namespace, tokens: int, rank: int) -> None:
        self.tokens = tokens
        config = dataclasses.replace(options_of(arguments).config(rank, tokens), timeout_s=120)
        generator = torch.Generator().manual_seed(rank)
        self.hidden, self.ids, self.weights = random_inputs(config, tokens, generator)
        self.plain = MoeAllToAll.create(config, dist.group.WORLD)
        self.output = torch.empty_like(self.hidden)
        self.layers = [self.plain]
        unquantised = functools.partial(
            self._dispatch, self.plain, lambda: (self.hidden, None, None)
        )
        self.bodies: dict[str, harness.Body] = {PLAIN: unquantised}
        for name in arguments.recipes:
            self.bodies |= self._ways(self._create(recipe=name))
        for name in arguments.combines:
            layer = self._create(combine=name)
            rows = layer.combine_input().normal_()
            self.bodies[f"combine {name}"] = functools.partial(self._combine, layer, rows)

    def _create(self, **changes: Any) -> MoeAllToAll:
        config = dataclasses.replace(self.plain.config, **changes)
        layer = MoeAllToAll.create(config, dist.group.WORLD, share_with=self.plain)
        self.layers.append(layer)
        return layer

    def close(self) -> None:
        for layer in reversed(self.layers):
            layer.close()

    def _ways(self, layer: MoeAllToAll) -> dict[str, harness.Body]:
        """Return both ways of one recipe.

        Raises:
            SystemExit: they do not send the recipe's bits; no time is reported.
        """
        recipe = recipe_of(layer.config)
        scale = global_scale(recipe.name)
        ways: dict[str, Callable[[], Given]] = {
            "fused": lambda: (self.hidden, None, scale),
            "two steps": kernel_quantiser(layer.config, self.hidden),
        }
        expected = self._arrived(layer, (*recipe.quantise(self.hidden, scale), None))
        if not all(torch.equal(self._arrived(layer, make()), expected) for make in ways.values()):
            raise SystemExit(f"{recipe.name}: other rows than the recipe's; nothing timed")
        return {
            f"{recipe.name} {way}": functools.partial(self._dispatch, layer, make)
            for way, make in ways.items()
        }

    def _arrived(self, layer: MoeAllToAll, given: Given) -> torch.Tensor:
        """Return the bytes of the rows and scales that this rank receives."""
        got = self._send(layer, given)
        filled = (torch.arange(self.tokens) < got.recv_counts[:, None]).flatten()
        parts = [part for part in (got.hidden_states, got.scales) if part is not None]
        rows = torch.cat([part.view(torch.uint8)[filled] for part in parts], dim=1)
        layer.combine(layer.combine_input(), got.metadata, output=self.output)
        return rows

    def _send(self, layer: MoeAllToAll, given: Given) -> Dispatched:
        rows, scales, scale = given
        return layer.dispatch(rows, self.ids, self.weights, scales=scales, global_scale=scale)

    def _dispatch(
        self, layer: MoeAllToAll, make: Callable[[], Given], clock: harness.Clock
    ) -> None:
        """Make the rows and dispatch them; the combine after it is not timed."""
        with clock:
            received = self._send(layer, make())
        # Of the plain layer's format and hidden size: whatever lies there is added up.
        layer.combine(layer.combine_input(), received.metadata, output=self.output)

    def _combine(self, layer: MoeAllToAll, rows: torch.Tensor, clock: harness.Clock) -> None:
        """Combine; the dispatch before it is not timed."""
        received = self._send(layer, (self.hidden, None, None))
        with clock:
            layer.combine(rows, received.metadata, output=self.output)

    def wire_bytes(self, name: str) -> float:
        """Return the bytes that one such call moves to or from other ranks, per token."""
        field = f"bytes_{'combined' if name.startswith('combine') else 'dispatched'}_remote"
        before = getattr(self.plain.stats(), field)
        self.bodies[name](harness.Clock())
        return float(getattr(self.plain.stats(), field) - before) / self.tokens


def kernel_quantiser(config: AllToAllConfig, hidden: torch.Tensor) -> Callable[[], Given]:
    """Return the host library's row quantiser over all rows, into buffers made before."""
    recipe = recipe_of(config)
    scale = global_scale(recipe.name)
    rows, scales = recipe.quantise(hidden, scale)
    rows, scales = torch.empty_like(rows), None if scales is None else torch.empty_like(scales)
    function = host.load(kernel_texts.host_source())._library.moe_nvlink_quantise_rows
    function.restype = None
    function.argtypes = [ctypes.c_int] * 2 + [ctypes.c_void_p] * 4 + [ctypes.c_int64, ctypes.c_int]
    tensors = (hidden, scale, rows, scales)
    addresses = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
    codes = quantiser_code(recipe, config.hidden_size), element_code(config.dtype)

    def quantise(_keep: Any = tensors) -> Given:
        function(*codes, *addresses, *hidden.shape)
        return rows, scales, None

    return quantise


def rank_main(rank: int, ep_size: int, arguments: argparse.Namespace, tokens: int) -> list[Row]:
    """Return one row per body: times of the slowest rank, and their ratios."""
    mine = Rank(arguments, tokens, rank)
    names = list(mine.bodies)
    wire = torch.tensor([mine.wire_bytes(name) for name in names], dtype=torch.float64)
    taken = harness.in_turns(mine.bodies, arguments.iterations, arguments.warmup)
    mine.close()
    dist.all_reduce(wire)
    samples = {name: [each.wall_us for each in of] for name, of in taken.items()}
    return result_rows(tokens, samples, dict(zip(names, (wire / ep_size).tolist(), strict=True)))


def on_cpu(arguments: argparse.Namespace) -> Iterator[list[Row]]:
    """Yield the rows of each number of tokens, from ranks that are processes."""
    # Compiled once, here, rather than by ranks that wait for each other.
    host.load(LAYER.host_source())
    host.load(kernel_texts.host_source())
    for tokens in arguments.tokens:
        yield harness.on_ranks(arguments.ep_size, rank_main, arguments, tokens)


# What times say.


def result_rows(
    tokens: int, taken: Mapping[str, Sequence[float]], wire: Mapping[str, float]
) -> list[Row]:
    """Return one row for each name: "bf16", "RECIPE WAY" or "combine FORMAT".

    Args:
        taken: name -> microseconds of each iteration.
        wire: name -> bytes to other ranks, per token.
    """
    return [
        {
            "tokens": tokens,
            "verb": "combine" if name.startswith("combine ") else "dispatch",
            "name": name.removeprefix("combine "),
            **common.summary(samples),
            "wire_bytes_per_token": wire[name],
            **ratios(taken, name),
        }
        for name, samples in taken.items()
    ]


def ratios(taken: Mapping[str, Sequence[float]], name: str) -> Row:
    """Return `times_bf16`: the unquantised verb's time over this one's, so that larger is faster.

    `over_two_steps`: that way's time over the fused dispatch's; `over_quantiser`: the fused
    dispatch's time over the quantiser's alone. What was not timed is left out.
    """
    pairs = {"times_bf16": (PLAIN_COMBINE if name.startswith("combine ") else PLAIN, name)}
    if name.endswith(" fused"):
        recipe = name.removesuffix(" fused")
        pairs["over_two_steps"] = (f"{recipe} two steps", name)
        pairs["over_quantiser"] = (name, f"{recipe} quantiser alone")
    return {
        field: ratio(taken[of], taken[over])
        for field, (of, over) in pairs.items()
        if of in taken and over in taken
    }


def ratio(of: Sequence[float], over: Sequence[float]) -> dict[str, float]:
    """Return the ratio of the medians, and the quartiles of the ratios of single iterations."""
    low, _middle, high = statistics.quantiles(map(float.__truediv__, of, over), n=4)
    return {"ratio": statistics.median(of) / statistics.median(over), "q25": low, "q75": high}


COLUMNS = {
    "tokens/rank": "{tokens}",
    "verb": "{verb}",
    "format": "{name}",
    "us": "{median_us:.0f}",
    "us, quartiles": "{q25_us:.0f}..{q75_us:.0f}",
    "to others per token": "{wire_bytes_per_token:.0f}",
    "x bf16": "{times_bf16[ratio]:.2f}",
    "x bf16, quartiles": "{times_bf16[q25]:.2f}..{times_bf16[q75]:.2f}",
    "two steps / fused": "{over_two_steps[ratio]:.2f}",
    "fused / quantiser": "{over_quantiser[ratio]:.2f}",
}


# Ranks emulated on one device.


def quantiser_alone(
    options: Options, tokens: int, backend: emulated.Backend, inputs: list[RankTokens]
) -> cuda_clock.Body:
    """Return the kernel's quantiser alone, over all ranks' activations; it has run once.

    Raises:
        AssertionError: it made something else than the recipe.
    """
    ranks = emulated.EmulatedRanks(lambda rank: one_gpu.config_of(options, rank, tokens), backend)
    ids = torch.zeros((tokens, options.top_k), dtype=torch.int32, device=backend.device)
    launched = []
    for rank, mine in enumerate(inputs):
        args = ranks.dispatch_arguments(rank)
        args.geometry.num_tokens = tokens
        sources = ranks.sources(Inputs(mine.hidden, ids, mine.topk_weights, ()))
        emulated.set_sources(args, sources)
        launched.append(args)
    launch_shape = None
    if isinstance(backend, emulated.CudaBackend):
        lanes_bytes = shapes.quantising_lanes(options.hidden_size) * shape.VECTOR_BYTES
        limits = backend.limits("quantise", options.ep_size)
        launch_shape = shapes.dispatch_shape(tokens, lanes_bytes, 0, limits)
    launch = backend.prepare("quantise", launched, launch_shape)
    launch()
    near = options.recipe == "nvfp4" and backend.device.type == "cuda"
    check = compare.assert_next_code if near else compare.assert_same_bits
    for rank, mine in enumerate(inputs):
        expected = cases.quantised(ranks.config, mine.hidden).rows
        rows = ranks.view(rank, "recv_hidden_states")[:tokens]
        check(rows.cpu(), expected.cpu(), f"{options.recipe} alone on rank {rank}")

    def body(_keep: Any = (ranks, ids)) -> None:
        launch()

    return body


def check_faults(layers: Mapping[str, one_gpu.Layer]) -> None:
    """Demand that what was timed did its work. The rows themselves are checked before.

    Raises:
        WrongResult: a rank has left a fault word.
    """
    for name, layer in layers.items():
        try:
            layer.ranks.check_faults()
        except AssertionError as error:
            what = f"{name}, {layer.tokens} tokens: {error} while it was timed; nothing is reported"
            raise WrongResult(what) from error


def vllm_body(recipe: str, hidden: torch.Tensor) -> dict[str, cuda_clock.Body]:
    """vLLM's own CUDA quantiser over all rows, if it is installed and runs here."""
    if hidden.device.type != "cuda" or not common.is_installed("vllm"):
        return {}
    os.environ["VLLM_USE_DEEP_GEMM"] = "0"
    scale = global_scale(recipe, hidden.device)

    def body() -> None:
        vllm_quantisers.quantise(recipe, hidden, scale)

    try:
        body()
    except Exception as error:  # whatever it lacks, ours is to be measured
        print(f"vLLM's quantiser for {recipe} does not run here: {error}", file=sys.stderr)
        return {}
    return {f"{recipe} vLLM's quantiser": body}


class Device:
    """Everything that is measured with one number of tokens."""

    def __init__(self, options: Options, tokens: int, timer: cuda_clock.Clock) -> None:
        self.options, self.tokens, self._timer = options, tokens, timer
        self._inputs = one_gpu.make_inputs(options, tokens)

    def recipe(self, recipe: str) -> list[Row]:
        """Time dispatch of bf16, fused, and of rows quantised before; and the quantiser alone."""
        options = dataclasses.replace(self.options, recipe=recipe)
        one_expert = dataclasses.replace(options, top_k=1)
        with contextlib.ExitStack() as stack:
            backend = self._backend(stack, one_expert, alone=True)
            alone = quantiser_alone(one_expert, self.tokens, backend, self._inputs)
            hidden = torch.cat([mine.hidden for mine in self._inputs])
            layers = {
                PLAIN: self._layer(stack, self.options),
                f"{recipe} fused": self._layer(stack, options),
                f"{recipe} given rows": self._layer(stack, options, post_quant=True),
            }
            bodies = {name: layer.dispatch for name, layer in layers.items()}
            bodies |= {f"{recipe} quantiser alone": alone} | vllm_body(recipe, hidden)
            # Without its combine a dispatch is refused: nothing would travel, and the first one
            # of a small batch would wait until its timeout.
            before = {name: layer.before["dispatch"] for name, layer in layers.items()}
            taken = self._timer.flushed(bodies, before)
            check_faults(layers)
        moved = {True: self._wire(self.options), False: self._wire(options)}
        return result_rows(self.tokens, taken, {name: moved[name == PLAIN] for name in taken})

    def formats(self, formats: Sequence[str]) -> list[Row]:
        """Time combine in each format, after a dispatch of bf16 rows that is not timed."""
        with contextlib.ExitStack() as stack:
            layers = {
                f"combine {name}": self._layer(
                    stack, dataclasses.replace(self.options, combine=name)
                )
                for name in dict.fromkeys((PLAIN, *formats))
            }
            # A combine may be launched again: its peers' signals of this round are still there.
            taken = self._timer.flushed({name: layer.combine for name, layer in layers.items()})
            check_faults(layers)
        moved = {name: self._wire(layer.options, "combine") for name, layer in layers.items()}
        return result_rows(self.tokens, taken, moved)

    def _wire(self, options: Options, verb: str = "dispatch") -> float:
        """Return the bytes per token to other ranks, of the mean rank."""
        return accounting.traffic(options, self.tokens).mean_wire_bytes(verb) / self.tokens

    def _backend(
        self, stack: contextlib.ExitStack, options: Options, **kind: bool
    ) -> emulated.Backend:
        return stack.enter_context(contextlib.closing(one_gpu.make_backend(options, **kind)))

    def _layer(self, stack: contextlib.ExitStack, options: Options, **kind: bool) -> one_gpu.Layer:
        backend = self._backend(stack, options, **kind)
        made = one_gpu.Layer(options, self.tokens, backend, inputs=self._inputs, **kind)
        made.check()
        return made


def options_of(arguments: argparse.Namespace) -> Options:
    """Return the unquantised layer's options, for CPU ranks or for ranks emulated on one device."""
    return Options(
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
        threads=arguments.threads,
        device=arguments.device,
        emulate_ranks=arguments.device != "cpu",
    )


def on_device(arguments: argparse.Namespace) -> Iterator[list[Row]]:
    """Yield the rows of all recipes and formats on ranks emulated on one device."""
    options = options_of(arguments)
    timer = cuda_clock.Clock(one_gpu.device_of(options), options.iters, options.warmup)
    for tokens in options.batches:
        device = Device(options, tokens, timer)
        yield from (device.recipe(name) for name in arguments.recipes)
        if arguments.combines:
            yield device.formats(arguments.combines)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    harness.add_options(parser, iterations=30)
    common.add_geometry(parser, ep_size=4, tokens=[16, 128, 1024, 2048])
    parser.add_argument("--recipes", nargs="*", default=list(RECIPES), choices=RECIPES)
    parser.add_argument(
        "--combines", nargs="*", default=list(COMBINE_FORMATS), choices=COMBINE_FORMATS
    )
    parser.add_argument("--warmup", type=int, default=3)
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    given = {name: value for name, value in vars(arguments).items() if name != "output_file"}
    head = {"machine": harness.machine(arguments.device), "options": given}
    measure, shows = on_device, one_gpu.SHOWS
    if arguments.device == "cpu":
        measure, shows = on_cpu, "CPU ranks: processes of one host"
    record = common.Record(arguments.output_file, head | {"shows": shows})
    found: list[Row] = []
    print_headings(COLUMNS)
    for rows in measure(arguments):
        for row in rows:
            print_row(COLUMNS, row)
        found += rows
        record.write({"rows": found})
    record.write({"rows": found}, complete=True)


if __name__ == "__main__":
    main()
