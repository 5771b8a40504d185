"""Our dispatch and combine on the software GPU's clock: **modelled** times, none of them measured.

    with Ours(Work(ep_size=8, tokens=1), "gb200") as layer:
        dispatch = layer.run("dispatch"); combine = layer.run("combine")

The kernels are the PTX that NVRTC makes for users, launched with the product's shapes for that
machine. A verb begins with its launch on every rank at the same time, without PDL before it, and
ends when the slowest rank's launch has ended.

Either every rank is simulated, or rank 0 stands for all (`is_whole=False`): the perfect router
gives every rank the same work, so what rank 0 stores to the words of a peer (its cell), the peer is
taken to store to rank 0's at the same time; so are the units of a small batch's rows. Other rows
that peers would send to rank 0 are then not simulated: a rank's links carry in each direction what
it sends itself, or fetches itself, and nothing waits because several ranks send to one at once.
"""

from __future__ import annotations

import abc
import ctypes
import mmap
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any, NamedTuple

import torch
from typing_extensions import Self

from benchmarks.moe_comm import options, peer_cake, peer_launches, peer_source, routers
from benchmarks.moe_comm.terms import VERBS, Work, row_bytes
from moe_nvlink_plugin.choices import TODAY
from moe_nvlink_plugin.config import MAX_SMALL_TOKENS, AllToAllConfig
from moe_nvlink_plugin.exchange import arguments, shapes
from moe_nvlink_plugin.exchange.sizes import (
    gets_by_tma,
    layer_layout,
    payload_rows,
    small_combine_tokens,
)
from moe_nvlink_plugin.exchange.small_batches import (
    small_combine_sizes,
    small_dispatch_sizes,
    with_small_tokens,
)
from moe_nvlink_plugin.jit.header import constants, structs
from moe_nvlink_plugin.launch.shape import MOST_THREADS, VECTOR_BYTES, Limits, Shape
from moe_nvlink_plugin.plugins import find_recipe
from tests.support import kernel_texts
from tests.support.ptx import build, costs
from tests.support.ptx.critical_path import Clock, Mirror, Step
from tests.support.ptx.machine import Machine

ARCHITECTURES = {"h200": "sm_90a", "gb200": "sm_100a"}


class Clocked(NamedTuple):
    """One verb, modelled.

    Attributes:
        us: from the launch to the end of the slowest rank.
        path: what that end waited for.
        ends_us: when the kernels of rank 0 ended, in the order of their launches.
    """

    us: float
    path: list[Step]
    ends_us: tuple[float, ...]


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


class Launch(NamedTuple):
    """One launch into a rank's stream."""

    kernel: build.Kernel
    blocks: int
    threads: int
    params: bytes
    shared_bytes: int = 0


class Layer(abc.ABC):
    """One layer on every rank, or on the rank that stands for all: Ours or Peer.

    Args:
        work: tokens go as by the perfect router. If its recipe quantises, our dispatch does it,
            and FlashInfer's gets rows that its caller has quantised, for which no time is counted.
        machine: "h200" or "gb200".
        changes: of costs, in the table's units.
        is_whole: simulate every rank.
        pdl: launches after a verb's first begin early.
    """

    def __init__(
        self,
        work: Work,
        machine: str,
        changes: Mapping[str, float] | None = None,
        *,
        is_whole: bool = False,
        pdl: bool = False,
    ) -> None:
        self.work, self._gpu, self._pdl = work, machine, pdl
        self._costs = costs.costs(machine, changes)
        self._ranks = range(work.ep_size if is_whole else 1)
        self._tensors = [_inputs(work, rank) for rank in self._ranks]
        self._library = self._load()
        self._stride = -(-self._workspace_bytes() // mmap.PAGESIZE) * mmap.PAGESIZE
        self._memory = Memory(self._stride * work.ep_size)
        self._bases = [self._memory.address + rank * self._stride for rank in range(work.ep_size)]
        self._machine = Machine(work.ep_size, clock=True)
        self._machine.use(self._library)
        for rank, base in enumerate(self._bases):
            self._machine.allocate(rank, base, self._stride, f"workspace of rank {rank}")
        for rank, tensors in zip(self._ranks, self._tensors, strict=True):
            for name, tensor in tensors.items():
                self._machine.allocate(rank, tensor.data_ptr(), tensor.nbytes, name)
        self._mirrored = [] if is_whole else list(self._mirrors())

    @abc.abstractmethod
    def _load(self) -> build.Library:
        """Return the kernels; the first of these methods to be called."""

    @abc.abstractmethod
    def _workspace_bytes(self) -> int: ...

    @abc.abstractmethod
    def _mirrors(self) -> Iterator[Mirror]:
        """Return where rank 0 stores in peers' workspaces, and where those do in its own."""

    def _slices(self, start: int, size_bytes: int) -> Iterator[Mirror]:
        """Slice 0 of a region at each peer, and the slice of that peer at rank 0."""
        for peer in range(1, self.work.ep_size):
            at_rank_0 = self._bases[0] + start + peer * size_bytes
            yield Mirror(self._bases[peer] + start, at_rank_0, size_bytes)

    @abc.abstractmethod
    def _launches(self, verb: str, rank: int) -> list[Launch]: ...

    def _threads_per_sm(self, verb: str) -> float:
        """Return how many threads of a verb's kernel an SM holds."""
        return self._costs["threads_per_sm"]

    def run(self, verb: str) -> Clocked:
        """Run a verb on all ranks, which begin it together; a combine comes after its dispatch."""
        table = self._costs | {"threads_per_sm": self._threads_per_sm(verb)}
        clock = Clock(self._machine, table, self._mirrored)
        of_rank = {rank: self._launches(verb, rank) for rank in self._ranks}
        widest = max(launch.threads for launch in of_rank[0])
        places = max(1, int(self._threads_per_sm(verb)) // widest)
        self._machine.limit_ctas(int(self._costs["num_sms"]) * places)
        for rank, of_verb in of_rank.items():
            for number, launch in enumerate(of_verb):
                self._machine.launch(
                    rank,
                    launch.kernel,
                    launch.blocks,
                    launch.threads,
                    launch.params,
                    shared_bytes=launch.shared_bytes,
                    pdl=self._pdl and number > 0,
                )
        self._machine.run()
        ended = clock.launches()
        last = max(ended, key=lambda launch: launch.end_ns)
        ends = tuple(launch.end_ns / 1e3 for launch in ended if launch.rank == 0)
        return Clocked(last.end_ns / 1e3, last.path, ends)

    def _places(self, threads: int) -> int:
        """Return how many CTAs an SM holds."""
        return int(self._costs["threads_per_sm"]) // threads

    def close(self) -> None:
        self._machine.close()
        self._memory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _inputs(work: Work, rank: int) -> dict[str, torch.Tensor]:
    shape = (work.tokens, work.top_k)
    quantised = row_bytes(work.recipe, work.hidden_size)
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
        "quantised": torch.zeros((work.tokens, quantised[0]), dtype=torch.uint8),
        "scales": torch.zeros((work.tokens, sum(quantised[1:])), dtype=torch.uint8),
        "global_scale": torch.ones(1),
        "slots": torch.empty(shape, dtype=torch.int32),
        "output": torch.empty((work.tokens, work.hidden_size), dtype=torch.bfloat16),
    }


class Ours(Layer):
    """Our kernels with the product's launch shapes.

    Attributes:
        small_tokens: as AllToAllConfig.small_tokens; None: the product's choice for the machine.
        ordered_slots: as AllToAllConfig.ordered_slots.
        choices: of the layer.
    """

    small_tokens: int | None = None
    ordered_slots = False
    choices = TODAY

    def _config(self, rank: int) -> AllToAllConfig:
        """Return a rank's configuration, with the limits of small batches that hold."""
        work = self.work
        config = AllToAllConfig(
            ep_size=work.ep_size,
            ep_rank=rank,
            num_experts=work.num_experts,
            top_k=work.top_k,
            hidden_size=work.hidden_size,
            max_tokens_per_rank=work.tokens,
            small_tokens=self.small_tokens,
            dtype=torch.bfloat16,
            recipe=None if work.recipe == "bf16" else work.recipe,
            combine=work.combine,
            ordered_slots=self.ordered_slots,
            max_sms=int(self._costs["num_sms"]),
            tuning=self.choices,
            ranks_may_leave=False,  # as for vLLM and SGLang; peers have no masks
        )
        return with_small_tokens(config, find_recipe(config), int(self._costs["num_sms"]))

    def _load(self) -> build.Library:
        self._configs = [self._config(rank) for rank in self._ranks]
        most = {
            "dispatch": self._configs[0].small_tokens or 0,
            "combine": small_combine_tokens(self._configs[0]),
        }
        self._small = {verb: self.work.tokens <= most[verb] for verb in VERBS}
        recipe = find_recipe(self._configs[0])
        self._quantiser = arguments.quantiser_code(recipe, self.work.hidden_size)
        self._rows = payload_rows(self._configs[0], recipe)
        self._regions = layer_layout(self._configs[0], recipe).channel_regions(0)
        return build.load(build.ptx_of(self._text(), ARCHITECTURES[self._gpu]), clock=True)

    def _text(self) -> str:
        return kernel_texts.specialised_source(
            self.work.top_k,
            constants()["kElementBf16"],
            pdl=True,
            small=True,
            quantiser=self._quantiser,
            ordered_slots=int(self.ordered_slots),
            combine=arguments.combine_code(self._configs[0]),
            tma=int(gets_by_tma(self._configs[0])),
            async_release=int(self.choices.async_release),
        )

    def _workspace_bytes(self) -> int:
        return max(region.offset + region.size_bytes for region in self._regions.values())

    def _mirrors(self) -> Iterator[Mirror]:
        for name, region in self._regions.items():
            if name.endswith("_cells"):
                yield from self._slices(region.offset, 8)
            if name.endswith("_staging"):
                yield from self._slices(region.offset, region.size_bytes // self.work.ep_size)

    def run(self, verb: str) -> Clocked:
        """Run a verb as every layer does.

        Raises:
            RuntimeError: a rank waited in vain.
        """
        for rank in self._ranks:
            # The round before was of the same kind.
            self._local(rank).has_pulled = 0 if self._small["combine"] else 1
        clocked = super().run(verb)
        for rank in self._ranks:
            fault = self._local(rank).fault
            if fault:
                raise RuntimeError(
                    f"{verb} of rank {rank} left fault word {fault:#018x}: its time is of a "
                    "round that failed"
                )
        return clocked

    def _local(self, rank: int) -> Any:
        return structs()["LocalControl"].from_address(
            self._bases[rank] + self._regions["local"].offset
        )

    def shape(self, verb: str) -> Shape:
        """Return the product's launch shape on this machine."""
        work = self.work
        num_sms = int(self._costs["num_sms"])
        limits = Limits(num_sms, MOST_THREADS, self._places, _SHARED_BYTES)
        if self._small[verb]:
            return shapes.small_shape(work.tokens, self._small_sizes(verb), limits)
        slots = work.ep_size * work.tokens
        if verb == "dispatch":
            widest = max(row.row_bytes for row in self._rows.values())
            if self._quantiser:
                widest = shapes.quantising_lanes(work.hidden_size) * VECTOR_BYTES
            return shapes.dispatch_shape(work.tokens, widest, slots * work.top_k * 4, limits)
        quantised = slots if arguments.combine_code(self._configs[0]) else 0
        if gets_by_tma(self._configs[0]):
            sizes = shapes.CombineSizes(work.hidden_size, 2, 0, staged_rows=work.top_k)
            return shapes.tma_combine_shape(work.tokens, sizes, limits)
        return shapes.combine_shape(work.tokens, work.hidden_size, 2, limits, quantised)

    def _small_sizes(self, verb: str) -> shapes.SmallSizes:
        config = self._configs[0]
        if verb == "combine":
            return small_combine_sizes(config, config.dtype.itemsize)
        row_bytes = {name: row.row_bytes for name, row in self._rows.items()}
        return small_dispatch_sizes(config, row_bytes, self._quantiser)

    def _launches(self, verb: str, rank: int) -> list[Launch]:
        name = f"small_{verb}" if self._small[verb] else verb
        kernel, shape = self._library[f"moe_nvlink_{name}"], self.shape(verb)
        args = bytes(self._arguments(verb, rank))
        return [Launch(kernel, shape.blocks, shape.threads, args, shape.shared_bytes)]

    def _arguments(self, verb: str, rank: int) -> Any:
        config, tensors = self._configs[rank], self._tensors[rank]
        window = (self._memory.address, self._stride)
        if verb == "dispatch":
            args = arguments.dispatch_arguments(config, self._rows, self._regions, *window)
            for payload, name in zip(args.payloads, ("ids", "weights", "hidden"), strict=False):
                payload.source = tensors[name].data_ptr()
            args.quantiser = self._quantiser
            args.global_scale = tensors["global_scale"].data_ptr()
        else:
            args = arguments.combine_arguments(config, self._regions, *window)
            args.output = tensors["output"].data_ptr()
        if self._small[verb]:
            args.senders = self.shape(verb).splits
        elif verb == "combine":
            args.hidden_splits = self.shape(verb).splits
        args.send_slots = tensors["slots"].data_ptr()
        args.geometry.num_tokens = self.work.tokens
        return args


class Small(Ours):
    """The kernels for small batches wherever they can run."""

    small_tokens = MAX_SMALL_TOKENS


class Bulk(Ours):
    """The kernels for batches of any size, also for small ones."""

    small_tokens = 0


class Loads(Ours):
    """A combine that loads rows to registers, however few the SMs."""

    choices = TODAY.but("tma_sms", 0)


class Signals(Ours):
    """Signals that hold no thread, which GPUs from sm_100 on have."""

    choices = TODAY.but("async_release", True)


class Ordered(Bulk):
    """The same with slots in the order of the tokens."""

    ordered_slots = True


#: Shared memory of a CTA beside what our kernels declare; an SM of 9.0 and 10.x has 227 KiB for it.
_SHARED_BYTES = 227 * 1024 - 4096 - 1024
#: Registers a thread of dispatch and of combine for top_k 8, by `ptxas -v` of CUDA 13.0.88.
_REGISTERS = {
    ("trtllm", "h200"): {"dispatch": 88, "combine": 104},
    ("trtllm", "gb200"): {"dispatch": 32, "combine": 96},
    ("cake", "gb200"): {"dispatch": 28, "combine": 80},
}
_SM_REGISTERS, _SM_THREADS, _REGISTERS_AT_A_TIME = 65536, 2048, 8


class Peer(Layer):
    """FlashInfer's kernels, launched as its host code does it.

    Attributes:
        has_sync: with flags and waits; of a class of its own, see PeerWithoutSync.
        verbs: what says which kernels a verb launches.
        backend: FlashInfer's name; of the two, this is its default.
    """

    has_sync = True
    verbs: ModuleType = peer_launches
    backend = "trtllm"

    def _load(self) -> build.Library:
        work = self.work
        self._of = peer_launches.Geometry(
            *(work.ep_size, work.num_experts, work.top_k, work.hidden_size, work.tokens),
            work.recipe,
        )
        made = self._compiled()
        self._names = made.names
        return build.load(made.ptx, clock=True)

    def _compiled(self) -> peer_source.Compiled:
        kernels = tuple(self._of.kernels().values())
        return peer_source.compiled(ARCHITECTURES[self._gpu], kernels, has_sync=self.has_sync)

    def _workspace_bytes(self) -> int:
        return self._of.offsets().size

    def _mirrors(self) -> Iterator[Mirror]:
        at = self._of.offsets()
        for start in (at.recv_counters, at.dispatch_flags, at.combine_flags):
            yield from self._slices(start, 4)

    def _launches(self, verb: str, rank: int) -> list[Launch]:
        hidden = "hidden" if self.work.recipe == "bf16" else "quantised"
        names = (hidden, "ids", "weights", "scales")[: len(self._of.payload_bytes)]
        sources = tuple(self._tensors[rank][name].data_ptr() for name in names)
        output = self._tensors[rank]["output"].data_ptr()
        given = peer_launches.RankMemory(self.work.tokens, sources, output)
        of_peer = getattr(self.verbs, verb)
        return [
            Launch(self._library[self._names[each.kernel]], *each[1:])
            for each in of_peer(self._of, rank, self._bases, given)
        ]

    def _threads_per_sm(self, verb: str) -> float:
        registers = _REGISTERS[self.backend, self._gpu][verb]
        taken = -(-registers // _REGISTERS_AT_A_TIME) * _REGISTERS_AT_A_TIME
        ctas = _SM_REGISTERS // (taken * peer_launches.THREADS)
        return min(ctas * peer_launches.THREADS, _SM_THREADS)


class Cake(Peer):
    """FlashInfer's back end for Blackwell, on request. GB200 alone."""

    backend = "cake"
    verbs = peer_cake

    def _compiled(self) -> peer_source.Compiled:
        return peer_source.compiled_cake(tuple(peer_cake.KERNELS.values()))


class PeerWithoutSync(Peer):
    """The same without flags and waits, as the published ablation."""

    has_sync = False
