"""Our dispatch and combine on the software GPU's clock: **modelled** times, none of them measured.

    with Layer(Work(ep_size=8, tokens=1), "gb200") as layer:
        dispatch = layer.run("dispatch"); combine = layer.run("combine")

The kernels are the PTX that NVRTC makes for users, launched with the product's shapes for that
machine. A verb begins with its launch on every rank at the same time, without PDL before it, and
ends when the slowest rank's launch has ended.

Either every rank is simulated, or rank 0 stands for all (`is_whole=False`): the perfect router
gives every rank the same work, so what rank 0 stores to the words of a peer (its cell), the peer is
taken to store to rank 0's at the same time. Rows that peers would send to rank 0 are then not
simulated: a rank's links carry in each direction what it sends itself, or fetches itself, and
nothing waits because several ranks send to one at once.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from benchmarks.moe_comm import options, routers
from benchmarks.moe_comm.terms import Work
from moe_nvlink_plugin.config import AllToAllConfig
from moe_nvlink_plugin.exchange import arguments, shapes
from moe_nvlink_plugin.exchange.sizes import layer_layout, payload_rows
from moe_nvlink_plugin.jit.header import constants
from moe_nvlink_plugin.launch.shape import MOST_THREADS, Limits, Shape
from moe_nvlink_plugin.plugins import find_recipe
from tests.support import kernel_texts
from tests.support.ptx import build, costs
from tests.support.ptx.critical_path import Clock, Step
from tests.support.ptx.machine import Machine

ARCHITECTURES = {"h200": "sm_90a", "gb200": "sm_100a"}
#: More steps than that are not kept: they would fill the memory.
MOST_TOKENS_WITH_PATHS = 64


class Clocked(NamedTuple):
    """One verb. us: modelled, launch to the end of the slowest rank; path: what it waited for."""

    us: float
    path: list[Step]


class Memory:
    """Zeros, as many as asked for; only pages that are touched take memory."""

    def __init__(self, size_bytes: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
        self._map = mmap.mmap(-1, size_bytes, flags=flags)
        self._bytes = (ctypes.c_uint8 * size_bytes).from_buffer(self._map)
        self.address = ctypes.addressof(self._bytes)

    def close(self) -> None:
        del self._bytes
        self._map.close()


class Layer:
    """One layer on every rank, or on the rank that stands for all.

    Args:
        work: bf16, the perfect router.
        machine: "h200" or "gb200".
        changes: of costs, in the table's units.
        is_whole: simulate every rank.
    """

    def __init__(
        self,
        work: Work,
        machine: str,
        changes: Mapping[str, float] | None = None,
        *,
        is_whole: bool = False,
        seed: int = 0,
    ) -> None:
        self.work, self._machine, self._seed = work, machine, seed
        self._costs = costs.costs(machine, changes)
        self._ranks = range(work.ep_size if is_whole else 1)
        self._configs = [self._config(rank) for rank in range(work.ep_size)]
        recipe = find_recipe(self._configs[0])
        self._rows = payload_rows(self._configs[0], recipe)
        layout = layer_layout(self._configs[0], recipe)
        self._regions = layout.channel_regions(0)
        end = max(region.offset + region.size_bytes for region in self._regions.values())
        self._stride = -(-end // mmap.PAGESIZE) * mmap.PAGESIZE
        self._memory = Memory(self._stride * work.ep_size)
        element = constants()["kElementBf16"]
        text = kernel_texts.specialised_source(work.top_k, element, pdl=True)
        self._library = build.load(build.ptx_of(text, ARCHITECTURES[machine]), clock=True)
        self._tensors = [self._inputs(rank) for rank in self._ranks]

    def _config(self, rank: int) -> AllToAllConfig:
        work = self.work
        return AllToAllConfig(
            ep_size=work.ep_size,
            ep_rank=rank,
            num_experts=work.num_experts,
            top_k=work.top_k,
            hidden_size=work.hidden_size,
            max_tokens_per_rank=work.tokens,
            dtype=torch.bfloat16,
        )

    def _inputs(self, rank: int) -> dict[str, torch.Tensor]:
        work = self.work
        shape = (work.tokens, work.top_k)
        given = options.Options(
            ep_size=work.ep_size,
            hidden_size=work.hidden_size,
            top_k=work.top_k,
            num_experts=work.num_experts,
            router="perfect",
        )
        return {
            "ids": routers.ids_of(given, work.tokens, rank).contiguous(),
            "weights": torch.ones(shape),
            "hidden": torch.ones((work.tokens, work.hidden_size), dtype=torch.bfloat16),
            "slots": torch.empty(shape, dtype=torch.int32),
            "output": torch.empty((work.tokens, work.hidden_size), dtype=torch.bfloat16),
        }

    def shape(self, verb: str) -> Shape:
        """Return the product's launch shape on this machine."""
        work, places = self.work, int(self._costs["threads_per_sm"])
        limits = Limits(
            int(self._costs["num_sms"]), MOST_THREADS, lambda threads: places // threads
        )
        if verb == "dispatch":
            empty = work.ep_size * work.tokens * work.top_k * 4
            return shapes.dispatch_shape(work.tokens, int(work.recipe_bytes), empty, limits)
        return shapes.combine_shape(work.tokens, work.hidden_size, 2, limits)

    def _arguments(self, verb: str, rank: int) -> Any:
        config, tensors = self._configs[rank], self._tensors[rank]
        if verb == "dispatch":
            args = arguments.dispatch_arguments(
                config, self._rows, self._regions, self._memory.address, self._stride
            )
            for payload, name in zip(args.payloads, ("ids", "weights", "hidden"), strict=False):
                payload.source = tensors[name].data_ptr()
        else:
            args = arguments.combine_arguments(
                config, self._regions, self._memory.address, self._stride
            )
            args.output = tensors["output"].data_ptr()
            args.hidden_splits = self.shape(verb).splits
        args.send_slots = tensors["slots"].data_ptr()
        args.geometry.num_tokens = self.work.tokens
        return args

    def run(self, verb: str) -> Clocked:
        """Run a verb on all ranks; a combine comes after its dispatch."""
        shape = self.shape(verb)
        resident = int(self._costs["num_sms"]) * (
            int(self._costs["threads_per_sm"]) // shape.threads
        )
        with Machine(
            self.work.ep_size, clock=True, seed=self._seed, most_resident_ctas=resident
        ) as machine:
            keeps_steps = self.work.tokens <= MOST_TOKENS_WITH_PATHS
            clock = Clock(machine, self._costs, keeps_steps=keeps_steps)
            self._allocate(machine)
            if len(self._ranks) < self.work.ep_size:
                self._mirror(clock, f"{verb}_cells")
            kernel = self._library[f"moe_nvlink_{verb}"]
            for rank in self._ranks:
                args = bytes(self._arguments(verb, rank))
                machine.launch(rank, kernel, shape.blocks, shape.threads, args, pdl=False)
            machine.run()
            last = max(clock.launches(), key=lambda launch: launch.end_ns)
            return Clocked(last.end_ns / 1e3, clock.path(last))

    def _allocate(self, machine: Machine) -> None:
        for rank in range(self.work.ep_size):
            address = self._memory.address + rank * self._stride
            machine.allocate(rank, address, self._stride, f"workspace of rank {rank}")
        for rank, tensors in zip(self._ranks, self._tensors, strict=True):
            for name, tensor in tensors.items():
                machine.allocate(rank, tensor.data_ptr(), tensor.nbytes, name)

    def _mirror(self, clock: Clock, cells: str) -> None:
        offset = self._regions[cells].offset
        for peer in range(1, self.work.ep_size):
            theirs = self._memory.address + peer * self._stride + offset
            clock.mirror(theirs, self._memory.address + offset + 8 * peer)

    def close(self) -> None:
        self._memory.close()

    def __enter__(self) -> Layer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
