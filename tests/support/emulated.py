"""Many ranks of one exchange on ONE device, in ordinary memory `[ranks, bytes]`: no VMM, no fabric.

The same rounds on several back ends. "cpu": every rank is a thread with a grid of its own, running
the host build. "cuda": all ranks are one cooperative launch with blockIdx.y = rank, so that they
are resident together or the launch is refused. "stand-in": the latter's code on tests/support/
fake_cuda, with tensors of the CPU. "ptx": the product's own kernels for GPUs, which
tests/support/ptx executes on a CPU. Cases, inputs and comparison are cases.py's and compare.py's.

One device shows neither NVLink ordering nor remote latency nor bandwidth.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from moe_nvlink_plugin import HeadConfig, driver, env, rank_mask, reference
from moe_nvlink_plugin.config import AllToAllConfig
from moe_nvlink_plugin.errors import UnsupportedError
from moe_nvlink_plugin.exchange import arguments, checks
from moe_nvlink_plugin.exchange.sizes import layer_layout, payload_rows, row_data_bytes
from moe_nvlink_plugin.jit import cache, host, nvrtc
from moe_nvlink_plugin.jit.header import constants, structs
from moe_nvlink_plugin.launch.arguments import element_code
from moe_nvlink_plugin.launch.shape import Limits, Shape
from moe_nvlink_plugin.memory.layout import Region, WorkspaceLayout
from moe_nvlink_plugin.plugins import find_recipe
from moe_nvlink_plugin.verify import cases, compare
from moe_nvlink_plugin.verify.cases import Case, Inputs, Seen, is_small
from tests.support import emulated_text
from tests.support.delays import replace_once
from tests.support.ptx.backend import PtxBackend
from tests.support.ranks import run_threads

#: What combine makes for the peers where rows travel back in a format.
COMBINE_REGIONS = ("combine_rows", "combine_scales", "combine_row_scales")

#: verb -> kernel for small batches.
_SMALL = {"dispatch": "small_dispatch", "combine": "small_combine"}

#: Of the "cpu" back end: its texts are many, its rows few.
FLAGS = tuple("-O1" if flag == "-O3" else flag for flag in host.FLAGS)
#: Of texts that sleep most of the time: half the time to compile.
FLAGS_OF_DELAYED = (*host.FLAGS, "-O0")

THREADS = emulated_text.THREADS  # of a CTA on the GPU, where a test does not say otherwise


class Backend(Protocol):
    """What runs a verb of all ranks at once."""

    device: torch.device
    ctas: int  # per rank
    approximates: bool  # nvfp4's reciprocals, by an instruction that is not fixed to the bit

    def prepare(
        self, verb: str, rank_arguments: Sequence[Any], shape: Shape | None = None
    ) -> Callable[[], None]:
        """A launch of `verb` on as many ranks as there are arguments, which it copies.

        On a GPU the launch returns before the kernel has ended; `shape` is one rank's.
        """
        ...

    def host_access(self, rank: int, tensor: torch.Tensor, *, writes: bool) -> None:
        """The host of a rank reads or writes a part of its workspace; for checks of races."""
        ...

    def close(self) -> None:
        """Gives threads or modules back."""
        ...


class CpuBackend:
    """A thread per rank, each with a grid of `ctas` host CTAs."""

    device = torch.device("cpu")
    approximates = False

    def __init__(self, ranks: int, ctas: int, *, delays: bool = False) -> None:
        self.ctas = ctas
        flags = FLAGS_OF_DELAYED if delays else FLAGS
        path = host.build(emulated_text.host_source(delays=delays), flags)
        self._library = host.HostLibrary(path)
        self._of_tests = {
            verb: getattr(ctypes.CDLL(str(path)), f"emulated_{verb}")
            for verb in ("rounds", "quantise")
        }
        for function in self._of_tests.values():
            function.restype = None
            function.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        self._grids = [self._library.create_grid(ctas) for _ in range(ranks)]

    def prepare(
        self, verb: str, rank_arguments: Sequence[Any], shape: Shape | None = None
    ) -> Callable[[], None]:
        copies = [type(args).from_buffer_copy(args) for args in rank_arguments]

        def launch() -> None:
            run_threads(len(copies), lambda rank: self._run(verb, copies[rank], self._grids[rank]))

        return launch

    def _run(self, verb: str, args: Any, grid: int) -> None:
        if verb in self._of_tests:
            self._of_tests[verb](ctypes.addressof(args), grid)
        else:
            self._library.kernel(verb, type(args))(args, grid)

    def host_access(self, rank: int, tensor: torch.Tensor, *, writes: bool) -> None:
        """Nothing checks it here."""

    def close(self) -> None:
        for grid in self._grids:
            self._library.destroy_grid(grid)
        self._grids = []


def ctas_per_rank(ranks: int, num_sms: int, ctas_per_sm: int, wanted: int) -> int:
    """CTAs each rank can have when all CTAs of all ranks must be resident at the same time.

    Raises:
        UnsupportedError: not even one.
    """
    available = num_sms * ctas_per_sm // ranks
    if available < 1:
        raise UnsupportedError(
            f"{ranks} emulated ranks need {ranks} resident CTAs, this GPU holds "
            f"{num_sms} SMs x {ctas_per_sm}; emulate fewer ranks"
        )
    return min(wanted, available)


@functools.cache
def cubin(top_k: int, element: int, count: int, architecture: str, **options: Any) -> bytes:
    """Machine code of the emulated kernels; options of emulated_text.device_source."""
    text = emulated_text.device_source(top_k, element, count, **options)
    return load_or_compile(text, architecture)


def load_or_compile(text: str, architecture: str) -> bytes:
    """Machine code of one text, through the product's cache on disk.

    So benchmarks/carry.sh can compile it ahead of a GPU's minutes. With sleeps and whole rounds in
    them the kernels may spill registers, which is no mistake here. With MOE_NVLINK_LINEINFO=1 as
    nvrtc.load_or_compile.
    """

    options = (*nvrtc.OPTIONS, *(nvrtc.LINEINFO if env.lineinfo() else ()))
    key = "\0".join(("emulated", architecture, *options, text))

    def build(target: Path) -> None:
        source = cache.write_beside(key, ".cu", text) if env.lineinfo() else None
        target.write_bytes(nvrtc.compile_cubin(text, architecture, strict=False, source=source))

    return cache.load_or_build(key, ".cubin", build, lambda entry: entry.content)


def broken_cubin(line: str, instead: str) -> Callable[..., bytes]:
    """As cubin, of a text in which something stands in the place of one line."""

    def compile_broken(
        top_k: int, element: int, count: int, architecture: str, **options: Any
    ) -> bytes:
        text = emulated_text.device_source(top_k, element, count, **options)
        return load_or_compile(replace_once(text, line, instead), architecture)

    return compile_broken


class CudaBackend:
    """All ranks in one launch on torch's current stream.

    Without PDL the launch is cooperative. With PDL, which nothing says a cooperative launch may
    have, residency is what `ctas_per_rank` counted; it holds while this process has the GPU alone.

    Args:
        config: of a layer, or of a shared LM head, whose verbs are head_gather and head_argmax.
        post_quant: dispatch takes rows that the caller has quantised.
    """

    def __init__(
        self,
        ranks: int,
        ctas: int,
        config: AllToAllConfig | HeadConfig,
        *,
        pdl: bool = False,
        post_quant: bool = False,
        device: str = "cuda:0",
        **options: bool,
    ) -> None:
        self.device = torch.device(device)
        self.approximates = self.device.type == "cuda"
        self._index = index = self.device.index or 0
        self._pdl = pdl
        top_k, formats = 0, dict[str, Any](head=True)
        if isinstance(config, AllToAllConfig):
            top_k, formats = config.top_k, {"combine": arguments.combine_code(config)}
            without = options.get("fused", False) or options.get("alone", False)
            has_small = is_small(config) or is_small(config, "combine")
            formats["small"] = has_small and not without
            formats["expert_counts"] = 1 if config.num_expert_counts else 0
            formats["ordered_slots"] = int(config.ordered_slots)
            formats["units"] = row_data_bytes(config)
            formats["async_release"] = int(config.choices.async_release)
            if not post_quant:
                recipe = find_recipe(config)
                formats["quantiser"] = arguments.quantiser_code(recipe, config.hidden_size)
        made = options | formats
        verbs = emulated_text.verbs(**made)
        self._count = most_ranks_for(ranks, verbs)
        gpu = driver.device(index)
        element = element_code(config.dtype)
        code = cubin(top_k, element, self._count, gpu.architecture, pdl=pdl, **made)
        self._num_sms = gpu.num_sms
        with driver.on_device(index):
            self._module = driver.call("cuModuleLoadData", code)
            self._kernels = {
                verb: _Kernel(index, self._module, f"moe_nvlink_emulated_{verb}") for verb in verbs
            }
        self.ctas = min(
            ctas_per_rank(ranks, gpu.num_sms, kernel.blocks_per_sm(THREADS), ctas)
            for kernel in self._kernels.values()
        )

    def limits(self, verb: str, ranks: int) -> Limits:
        """What one of so many ranks may fill: its share of the SMs."""
        kernel = self._kernels[verb]
        return Limits(self._num_sms // ranks, kernel.max_threads, kernel.blocks_per_sm)

    def prepare(
        self, verb: str, rank_arguments: Sequence[Any], shape: Shape | None = None
    ) -> Callable[[], None]:
        packed = (emulated_text.struct_of(verb) * self._count)(*rank_arguments)
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(packed))
        ranks = len(rank_arguments)
        blocks, threads = (self.ctas, THREADS) if shape is None else shape[:2]
        pdl = self._pdl and verb != "rounds"

        @functools.cache
        def config_on(stream: int) -> Any:
            return launch_config((blocks, ranks), threads, stream, pdl=pdl)

        def launch(keep: Any = packed) -> None:
            config = config_on(self._stream())
            function, pointers = self._kernels[verb].function, ctypes.addressof(parameters)
            with driver.on_device(self._index):
                # The driver copies the parameters before it returns.
                driver.call("cuLaunchKernelEx", config, function, pointers, 0)

        return launch

    def _stream(self) -> int:
        if self.device.type != "cuda":
            return 0
        return int(torch.cuda.current_stream(self.device).cuda_stream)

    def host_access(self, rank: int, tensor: torch.Tensor, *, writes: bool) -> None:
        """Nothing checks it here."""

    def close(self) -> None:
        if self._module is None:
            return
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        with driver.on_device(self._index):
            driver.call("cuModuleUnload", self._module)
        self._module = None


def most_ranks_for(ranks: int, verbs: Sequence[str] = ("dispatch", "combine")) -> int:
    """Ranks the kernels are compiled for: few values, so that cases share their machine code."""
    limit = min(emulated_text.most_ranks(emulated_text.struct_of(verb)) for verb in verbs)
    found = next((count for count in (8, min(64, limit), limit) if ranks <= count), None)
    if found is None:
        raise UnsupportedError(f"{ranks} emulated ranks; one launch takes {limit} ranks' arguments")
    return found


class _Kernel:
    """A function, loaded now rather than while a rank spins."""

    def __init__(self, index: int, module: Any, name: str) -> None:
        self._index = index
        self.function = driver.call("cuModuleGetFunction", module, name.encode())
        driver.call("cuFuncLoad", self.function)
        attribute = driver.api().CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK
        self.max_threads = int(driver.call("cuFuncGetAttribute", attribute, self.function))

    def blocks_per_sm(self, threads: int) -> int:
        """CTAs of so many threads that one SM holds."""
        query = "cuOccupancyMaxActiveBlocksPerMultiprocessor"
        with driver.on_device(self._index):
            return int(driver.call(query, self.function, threads, 0))


def launch_config(grid: tuple[int, int], threads: int, stream: int, *, pdl: bool) -> Any:
    """CUlaunchConfig of one launch: cooperative, or with programmatic dependent launch."""
    api = driver.api()
    attribute = api.CUlaunchAttribute()
    ids = api.CUlaunchAttributeID
    if pdl:
        attribute.id = ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
    else:
        attribute.id = ids.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
        attribute.value.cooperative = 1
    config = api.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = *grid, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes = 0
    config.hStream = api.CUstream(stream)
    config.attrs, config.numAttrs = [attribute], 1
    return config


def make_backend(
    name: str,
    case: Case,
    *,
    ctas: int = 1,
    delays: bool = False,
    post_quant: bool = False,
    **options: Any,
) -> Backend:
    """A back end for a case's ranks. On the GPU each rank gets `ctas` CTAs, or what fits.

    `fused`, `pdl`: as in emulated_text.device_source; `post_quant`: as CudaBackend's. The CPU's has
    all of it, whatever they say. Of PTX, whose scheduler needs no sleeps: options of ptx.backend.
    """
    if name == "cpu":
        return CpuBackend(case.ep_size, ctas, delays=delays)
    if name == "ptx":
        return PtxBackend(case.ep_size, case.config(0), ctas=ctas, **options)
    device = {"cuda": "cuda:0", "stand-in": "cpu"}[name]
    options |= {"delays": delays, "post_quant": post_quant}
    return CudaBackend(case.ep_size, ctas, case.config(0), device=device, **options)


class Received(NamedTuple):
    """One rank's views of what arrived; as MoeAllToAll's Dispatched."""

    hidden_states: torch.Tensor
    scales: torch.Tensor | None
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    extras: tuple[torch.Tensor, ...]
    recv_counts: torch.Tensor
    send_slots: torch.Tensor


def config_of(case: Case, timeout_s: float = 10.0) -> Callable[[int], AllToAllConfig]:
    """rank -> configuration. A wait that hangs must not use up the minutes of a lent GPU."""
    return lambda rank: dataclasses.replace(case.config(rank), timeout_s=timeout_s)


class EmulatedRanks:
    """All ranks of one exchange: their workspaces, arguments and views.

    What a launch reads must live until it has been enqueued, and may be freed then: torch gives a
    GPU's memory out again in the stream's order.

    Args:
        config_by_rank: rank -> its configuration.
        hidden_splits: CTAs that share one token's row in combine.
        post_quant: activations are quantised by the recipe in torch, not by dispatch.
        masks: rank -> its mask of active ranks; None: it has none.
    """

    def __init__(
        self,
        config_by_rank: Callable[[int], AllToAllConfig],
        backend: Backend,
        *,
        hidden_splits: int = 1,
        post_quant: bool = False,
        masks: Sequence[torch.Tensor | None] | None = None,
    ) -> None:
        self.backend = backend
        self.config = config_by_rank(0)
        self.configs = [config_by_rank(rank) for rank in range(self.config.ep_size)]
        self._masks = masks or [None] * self.config.ep_size
        self.recipe = find_recipe(self.config)
        self.rows = payload_rows(self.config, self.recipe)
        self.regions = _packed_regions(layer_layout(self.config, self.recipe))
        self.hidden_splits = hidden_splits
        self.add, self.scale = "", 1.0
        self._senders = 0 if isinstance(backend, CpuBackend) else max(backend.ctas // 2, 1)
        self.quantiser = (
            0 if post_quant else arguments.quantiser_code(self.recipe, self.config.hidden_size)
        )
        self.global_scale = cases.global_scale(self.config, backend.device)
        last = max(
            region.offset + region.size_bytes for of in self.regions for region in of.values()
        )
        shape = (self.config.ep_size, -(-last // 4096) * 4096)
        self.memory = torch.zeros(shape, dtype=torch.uint8, device=backend.device)

    @classmethod
    def of_case(
        cls, case: Case, backend: Backend, *, hidden_splits: int = 1, post_quant: bool = False
    ) -> EmulatedRanks:
        masks = [case.mask(rank, backend.device) for rank in range(case.ep_size)]
        ranks = cls(
            config_of(case),
            backend,
            hidden_splits=hidden_splits,
            post_quant=post_quant,
            masks=masks,
        )
        ranks.add, ranks.scale = case.add, case.scale
        return ranks

    def view(self, rank: int, name: str, channel: int = 0, *, writes: bool = False) -> torch.Tensor:
        """A payload's or the combine region's rows, `[slots, elements]`, in its dtype."""
        row = self.rows.get(name)
        dtype = self.config.dtype if row is None else row.dtype
        elements = self.config.hidden_size if row is None else row.elements
        slots = self.config.ep_size * self.config.max_tokens_per_rank
        return (
            self._bytes(rank, name, slots * elements * dtype.itemsize, channel, writes=writes)
            .view(dtype)
            .view(slots, elements)
        )

    def _bytes(
        self, rank: int, name: str, size: int, channel: int, *, writes: bool = False
    ) -> torch.Tensor:
        region = self.regions[channel][name]
        found = self.memory[rank, region.offset : region.offset + size]
        self.backend.host_access(rank, found, writes=writes)
        return found

    def recv_counts(self, rank: int, channel: int = 0) -> torch.Tensor:
        return self._bytes(rank, "recv_counts", self.config.ep_size * 4, channel).view(torch.int32)

    def control(self, rank: int, channel: int = 0) -> Any:
        """A copy of the rank's LocalControl; waits for the device."""
        kind = structs()["LocalControl"]
        words = self._bytes(rank, "local", ctypes.sizeof(kind), channel).cpu()
        return kind.from_buffer_copy(bytes(words.tolist()))

    def dispatch_arguments(self, rank: int, channel: int = 0) -> Any:
        args = arguments.dispatch_arguments(
            self.configs[rank],
            self.rows,
            self.regions[channel],
            self.memory.data_ptr(),
            self.memory.stride(0),
        )
        args.quantiser, args.senders = self.quantiser, self._senders
        if self.quantiser and self.global_scale is not None:
            args.global_scale = self.global_scale.data_ptr()
        mask = self._masks[rank]
        args.active_ranks = 0 if mask is None else mask.data_ptr()
        return args

    def sources(self, inputs: Inputs) -> list[torch.Tensor | None]:
        """What dispatch reads, in the order of its payloads; None for what it makes itself."""
        hidden, topk_ids, weights, extras = inputs
        ids = checks.ids_as_int32(topk_ids, self.config.num_experts)
        scales = None
        if not self.quantiser:
            hidden, scales = cases.quantised(self.config, hidden)
        return [ids, weights, hidden, *([scales] if "recv_scales" in self.rows else []), *extras]

    def combine_arguments(self, rank: int, channel: int = 0) -> Any:
        args = arguments.combine_arguments(
            self.configs[rank],
            self.regions[channel],
            self.memory.data_ptr(),
            self.memory.stride(0),
        )
        args.hidden_splits, args.senders = self.hidden_splits, self._senders
        args.scale = self.scale
        args.is_masked = 0 if self._masks[rank] is None else 1
        return args

    def verb(self, name: str) -> str:
        """The kernel that the product would launch for a verb."""
        return _SMALL[name] if is_small(self.config, name) else name

    def dispatch(self, inputs: Sequence[Inputs], channel: int = 0) -> list[Received]:
        """Dispatch of the first `len(inputs)` ranks; their tensors are on the back end's device."""
        launched, slots, sources = [], [], []
        for rank, mine in enumerate(inputs):
            args = self.dispatch_arguments(rank, channel)
            args.geometry.num_tokens = mine.topk_ids.shape[0]
            shape = mine.topk_ids.shape
            slots.append(torch.empty(shape, dtype=torch.int32, device=self.backend.device))
            args.send_slots = slots[-1].data_ptr()
            sources.append(self.sources(mine))  # some may be ours alone: keep them
            set_sources(args, sources[-1])
            launched.append(args)
        self.backend.prepare(self.verb("dispatch"), launched)()
        return [
            self.received(rank, mine.extras, slots[rank], channel)
            for rank, mine in enumerate(inputs)
        ]

    def received(
        self, rank: int, extras: Sequence[torch.Tensor], slots: torch.Tensor, channel: int = 0
    ) -> Received:
        """Views of what lies in the rank's receive buffers; `extras` give dtype and row shape."""
        arrived = []
        for index, like in enumerate(extras):
            rows = self.view(rank, f"recv_extra_{index}", channel).reshape(-1).view(like.dtype)
            arrived.append(rows.view(-1, *like.shape[1:]))
        has_scales = "recv_scales" in self.rows
        return Received(
            self.view(rank, "recv_hidden_states", channel),
            self.view(rank, "recv_scales", channel) if has_scales else None,
            self.view(rank, "recv_topk_ids", channel),
            self.view(rank, "recv_topk_weights", channel),
            tuple(arrived),
            self.recv_counts(rank, channel),
            slots,
        )

    def combine(
        self,
        send_slots: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        channel: int = 0,
        added: Sequence[torch.Tensor | None] | None = None,
    ) -> None:
        """Combine of the first `len(outputs)` ranks into `outputs[rank]`; adds `added[rank]`."""
        launched = []
        for rank, (slots, output) in enumerate(zip(send_slots, outputs, strict=True)):
            args = self.combine_arguments(rank, channel)
            args.geometry.num_tokens = output.shape[0]
            args.send_slots, args.output = slots.data_ptr(), output.data_ptr()
            rows = None if added is None else added[rank]
            args.add = 0 if rows is None else rows.data_ptr()
            launched.append(args)
        self.backend.prepare(self.verb("combine"), launched)()

    def experts(self, rank: int, received: Received, channel: int = 0) -> None:
        """cases.expert_rows of all slots, into the combine region; nothing is read on the host."""
        config = self.configs[rank]
        hidden = cases.activations(config, received.hidden_states, received.scales)
        rows = cases.expert_rows(config, rank, hidden, received.topk_ids, received.topk_weights)
        self.view(rank, "combine", channel, writes=True).copy_(rows)

    def poison_combine(self, rank: int, channel: int = 0) -> None:
        """Spoils what the peers read in combine; between dispatch and the experts."""
        for name, region in self.regions[channel].items():
            if name == "combine" or name in COMBINE_REGIONS:
                self._bytes(rank, name, region.size_bytes, channel, writes=True).fill_(0xFF)

    def poison(self, rank: int, channel: int = 0) -> None:
        """Spoils what the rank received, with an expert id in every slot; until its combine."""
        for name in self.rows:
            if name != "recv_topk_ids":
                self.view(rank, name, channel, writes=True).view(torch.uint8).fill_(0xFF)
        self.view(rank, "recv_topk_ids", channel, writes=True).fill_(1)

    def run_round(self, inputs: Sequence[Inputs], channel: int = 0) -> list[Seen]:
        """One poisoned round of all ranks, copied to the CPU."""
        device = self.backend.device
        here = [mine.to(device) for mine in inputs]
        received = self.dispatch(here, channel)
        seen = []
        outputs, added = [], [cases.added_rows(mine.hidden_states, self.add) for mine in here]
        for rank, mine in enumerate(received):
            self.poison_combine(rank, channel)
            self.experts(rank, mine, channel)
            rows, in_place = added[rank], self.add == "in place"
            if rows is None or not in_place:
                rows = torch.full_like(here[rank].hidden_states, float("nan"))
            outputs.append(rows)
            scales = () if mine.scales is None else (mine.scales,)
            payloads = (mine.topk_weights, mine.hidden_states, *scales, *mine.extras)
            copies = tuple(_copied(payload) for payload in payloads)
            seen.append((_copied(mine.recv_counts), _copied(mine.topk_ids), copies))
            self.poison(rank, channel)
        slots = [mine.send_slots for mine in received]
        self.combine(slots, outputs, channel, added)
        combined = [_copied(output) for output in outputs]  # waits for the device
        self.check_faults(channel)
        return [Seen(*mine, _copied(slots[rank]), combined[rank]) for rank, mine in enumerate(seen)]

    def check_faults(self, channel: int = 0) -> None:
        """AssertionError where a rank has a fault word."""
        for rank in range(self.config.ep_size):
            word = int(self.control(rank, channel).fault)
            assert word == 0, f"rank {rank} has fault word {word:#018x}"

    def run_fused(
        self, rounds: Sequence[Sequence[Inputs]]
    ) -> tuple[list[list[torch.Tensor]], torch.Tensor]:
        """All rounds in one launch, experts and poison included: emulated_rounds.

        Returns:
            `combined[round][rank]`, and recv_counts `[ranks, rounds, ep_size]`, on the CPU.
        """
        arrays = [FusedArrays(self, rank, rounds) for rank in range(self.config.ep_size)]
        self.backend.prepare("rounds", [of_rank.arguments() for of_rank in arrays])()
        counts = torch.stack([of_rank.recv_counts.cpu() for of_rank in arrays])
        self.check_faults()
        outputs = [of_rank.outputs.cpu() for of_rank in arrays]
        combined = [
            [outputs[rank][number, : len(mine.topk_ids)] for rank, mine in enumerate(of_round)]
            for number, of_round in enumerate(rounds)
        ]
        return combined, counts


class FusedArrays:
    """What one rank's emulated_rounds reads and writes; the round is the first index."""

    def __init__(self, ranks: EmulatedRanks, rank: int, rounds: Sequence[Sequence[Inputs]]) -> None:
        config, device = ranks.config, ranks.backend.device
        assert not config.extra_payload_bytes, "emulated_rounds carries no extra payloads"
        carried = (None, "fp8_block")
        assert config.recipe in carried, f"emulated_rounds has experts for {carried}"
        tokens = (len(rounds), config.max_tokens_per_rank)
        mine = [of_round[rank] for of_round in rounds]
        self._ranks, self._rank, self._rounds = ranks, rank, len(rounds)
        self._tensors = {
            "num_tokens": torch.tensor([len(inputs.topk_ids) for inputs in mine]).int(),
            "topk_ids": torch.full((*tokens, config.top_k), 1, dtype=torch.int32),
            "topk_weights": torch.full((*tokens, config.top_k), float("nan")),
            "hidden_states": torch.full((*tokens, config.hidden_size), float("nan")).to(
                config.dtype
            ),
            "outputs": torch.full((*tokens, config.hidden_size), float("nan")).to(config.dtype),
            "recv_counts": torch.full((len(rounds), config.ep_size), -1, dtype=torch.int32),
            "barrier": torch.zeros(1, dtype=torch.int32),
        }
        for number, inputs in enumerate(mine):
            count = len(inputs.topk_ids)
            ids = checks.ids_as_int32(inputs.topk_ids, config.num_experts)
            self._tensors["topk_ids"][number, :count] = ids
            self._tensors["topk_weights"][number, :count] = inputs.topk_weights
            self._tensors["hidden_states"][number, :count] = inputs.hidden_states
        self._tensors = {name: tensor.to(device) for name, tensor in self._tensors.items()}
        self._slots = torch.empty(tokens[1:] + (config.top_k,), dtype=torch.int32, device=device)

    @property
    def outputs(self) -> torch.Tensor:
        return self._tensors["outputs"]

    @property
    def recv_counts(self) -> torch.Tensor:
        return self._tensors["recv_counts"]

    def arguments(self) -> emulated_text.RoundsArgs:
        dispatch = self._ranks.dispatch_arguments(self._rank)
        combine = self._ranks.combine_arguments(self._rank)
        dispatch.send_slots = combine.send_slots = self._slots.data_ptr()
        args = emulated_text.RoundsArgs(dispatch=dispatch, combine=combine, rounds=self._rounds)
        for name, tensor in self._tensors.items():
            setattr(args, name, tensor.data_ptr())
        return args


def set_sources(args: Any, tensors: Sequence[torch.Tensor | None]) -> None:
    """Points dispatch's arguments to what it reads."""
    for entry, tensor in zip(args.payloads, tensors, strict=False):
        entry.source = 0 if tensor is None else tensor.data_ptr()


def _packed_regions(layout: WorkspaceLayout) -> list[dict[str, Region]]:
    """The layout's regions, by channel, one behind the other, with bytes between that nobody uses.

    A real layout leaves address space to grow into, which ordinary memory would have to fill.
    """
    packed, offset = [], 0
    for channel in range(layout.num_channels):
        regions = {}
        for name, region in layout.channel_regions(channel).items():
            regions[name] = Region(name, offset, region.size_bytes)
            offset += (region.size_bytes // 256 + 1) * 256
        packed.append(regions)
    return packed


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("cpu", copy=True)


# What tests do with it.


def check_case(
    name: str,
    case: Case,
    *,
    rounds: int = 2,
    ctas: int = 1,
    pdl: bool = False,
    hidden_splits: int = 1,
    post_quant: bool = False,
    **options: Any,
) -> None:
    """A case of case_list.CASES or RECIPE_CASES against the oracle, bit for bit.

    On a GPU what goes through approximate reciprocals is compared as compare.py says. `options`:
    more of make_backend.
    """
    inputs = cases.make_inputs(case)
    with contextlib.closing(
        make_backend(name, case, ctas=ctas, pdl=pdl, post_quant=post_quant, **options)
    ) as backend:
        # compare.py expects the source's order of slots where one CTA hands them out.
        case = with_ctas(case, backend.ctas)
        ranks = EmulatedRanks.of_case(
            case, backend, hidden_splits=hidden_splits, post_quant=post_quant
        )
        results = [ranks.run_round(inputs, n % case.num_channels) for n in range(rounds)]
    near = backend.approximates
    # Whoever calls a layer on a GPU quantises there.
    any_nan = post_quant and backend.device.type == "cuda"
    for seen in results:
        check_round(case, inputs, seen, near=near, any_nan=any_nan)
        for mine, first in zip(seen, results[0], strict=True):
            compare.assert_same_bits(mine.combined, first.combined, f"{case.name}: a later run")


def with_ctas(case: Case, ctas: int) -> Case:
    """The case as compare.py must see it when `ctas` CTAs hand out a rank's slots."""
    return dataclasses.replace(case, num_threads=ctas)


def check_round(
    case: Case,
    inputs: list[Inputs],
    seen: list[Seen],
    *,
    near: bool = False,
    any_nan: bool = False,
) -> None:
    compare.check_slots(case, inputs, seen)
    compare.check_received(case, inputs, seen, near=near, any_nan=any_nan)
    compare.check_combined(case, inputs, seen, near=near)


def varying_inputs(case: Case, rounds: int) -> list[list[Inputs]]:
    """Other tokens and other counts, 0 and capacity among them, in every round."""
    choose = random.Random(case.seed)
    return [
        cases.make_inputs(
            case, tuple(choose.randint(0, case.capacity) for _ in case.tokens), seed=number
        )
        for number in range(rounds)
    ]


def check_rounds(
    name: str,
    case: Case,
    rounds: int,
    *,
    ctas: int = 1,
    pdl: bool = False,
    delays: bool = False,
    **options: Any,
) -> None:
    """Many poisoned rounds of varying counts; `delays` sows sleeps into the kernels."""
    inputs = varying_inputs(case, rounds)
    with contextlib.closing(
        make_backend(name, case, ctas=ctas, pdl=pdl, delays=delays, **options)
    ) as backend:
        case = with_ctas(case, backend.ctas)
        ranks = EmulatedRanks.of_case(case, backend)
        near = backend.approximates
        for number, of_round in enumerate(inputs):
            with naming(f"round {number}"):
                check_round(case, of_round, ranks.run_round(of_round), near=near)


def check_fused(
    name: str, case: Case, rounds: int, *, ctas: int = 1, timeout_s: float = 20.0
) -> None:
    """Many rounds in one launch, ranks running apart, sleeps in the kernels."""
    inputs = varying_inputs(case, rounds)
    with contextlib.closing(
        make_backend(name, case, ctas=ctas, delays=True, fused=True)
    ) as backend:
        ranks = EmulatedRanks(config_of(case, timeout_s), backend, hidden_splits=2)
        combined, counts = ranks.run_fused(inputs)
    for number, of_round in enumerate(inputs):
        for rank, mine in enumerate(of_round):
            what = f"round {number} rank {rank}"
            expected = compare.expected_combined(case, mine, rank)
            actual = combined[number][rank]
            compare.assert_same_bits(compare.one_nan(actual), compare.one_nan(expected), what)
            table = reference.target_ranks(mine.topk_ids, case.num_experts, case.ep_size)
            for target in range(case.ep_size):
                sent = sum(target in row for row in table)
                assert int(counts[target, number, rank]) == sent, f"{what}: rows to {target}"


class FixedInputs:
    """One rank's inputs on fixed addresses with a fixed token count, as a CUDA graph can hold them.

    What changes between two runs is device memory alone: the rows behind a round's tokens get the
    id -1 and go nowhere.
    """

    def __init__(self, config: AllToAllConfig, device: torch.device | str) -> None:
        tokens = config.max_tokens_per_rank
        self.hidden = torch.zeros((tokens, config.hidden_size), dtype=config.dtype, device=device)
        self.ids = torch.full((tokens, config.top_k), -1, dtype=torch.int32, device=device)
        self.weights = torch.zeros((tokens, config.top_k), device=device)

    def fill(self, inputs: Inputs) -> None:
        """This round's tokens, of any number; the host waits for nothing."""
        count = len(inputs.topk_ids)
        self.ids.fill_(-1)
        self.hidden[:count].copy_(inputs.hidden_states)
        self.ids[:count].copy_(inputs.topk_ids)
        self.weights[:count].copy_(inputs.topk_weights)


def check_output(case: Case, inputs: Inputs, ep_rank: int, output: torch.Tensor) -> None:
    """The tokens' rows against the oracle; the padding's are zero."""
    count = len(inputs.topk_ids)
    expected = torch.zeros_like(output)
    expected[:count] = compare.expected_combined(case, inputs, ep_rank)
    what = f"{case.name}: rank {ep_rank}, {count} tokens"
    compare.assert_same_bits(compare.one_nan(output), compare.one_nan(expected), what)


class StaticRounds:
    """Rounds of all ranks on FixedInputs."""

    def __init__(self, ranks: EmulatedRanks) -> None:
        self._ranks = ranks
        self._fixed = [FixedInputs(ranks.config, ranks.backend.device) for _ in ranks.configs]
        self.outputs = [torch.empty_like(each.hidden) for each in self._fixed]

    def fill(self, of_round: Sequence[Inputs]) -> None:
        for fixed, mine in zip(self._fixed, of_round, strict=True):
            fixed.fill(mine)

    def warm_up(self) -> None:
        """torch's own kernels once, so that none is loaded during a capture; ours not."""
        for rank, output in enumerate(self.outputs):
            self._ranks.experts(rank, self._ranks.received(rank, (), output))
            self._ranks.poison(rank)

    def run(self) -> None:
        """Dispatch, experts, poison, combine."""
        inputs = [Inputs(each.hidden, each.ids, each.weights, ()) for each in self._fixed]
        received = self._ranks.dispatch(inputs)
        for rank, mine in enumerate(received):
            self._ranks.poison_combine(rank)
            self._ranks.experts(rank, mine)
            self._ranks.poison(rank)
        self._ranks.combine([mine.send_slots for mine in received], self.outputs)

    def check(self, case: Case, of_round: Sequence[Inputs], outputs: list[torch.Tensor]) -> None:
        for rank, mine in enumerate(of_round):
            check_output(case, mine, rank, outputs[rank])


def check_static_rounds(
    name: str, case: Case, rounds: int, *, pdl: bool = False, **options: Any
) -> None:
    """On a GPU the round is captured once, before anything has run, and replayed."""
    inputs = varying_inputs(case, rounds)
    with contextlib.closing(make_backend(name, case, ctas=2, pdl=pdl, **options)) as backend:
        ranks = EmulatedRanks.of_case(case, backend)
        static = StaticRounds(ranks)
        static.warm_up()
        run = captured(static.run) if backend.device.type == "cuda" else static.run
        for number, of_round in enumerate(inputs):
            static.fill([mine.to(backend.device) for mine in of_round])
            run()
            with naming(f"round {number}"):
                static.check(case, of_round, [output.cpu() for output in static.outputs])
        ranks.check_faults()
        assert int(ranks.control(0).epoch) == rounds, "rounds that the device has counted"


def captured(body: Callable[[], None]) -> Callable[[], None]:
    """`body` as a CUDA graph's replay."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    return graph.replay


def check_missing_rank(name: str, *, small: bool = False, **options: Any) -> None:
    """Rank 2 of 3 never comes: the others' fault words name it, and the device goes on."""
    case = Case(name="missing", tokens=(3, 2, 1), small=small)
    inputs = cases.make_inputs(case)
    with contextlib.closing(make_backend(name, case, ctas=2, **options)) as backend:
        ranks = EmulatedRanks(config_of(case, timeout_s=0.3), backend)
        ranks.dispatch([mine.to(backend.device) for mine in inputs[:2]])
        words = [int(ranks.control(rank).fault) for rank in range(3)]
        codes = constants()
        expected = codes["kFaultTimeout"] << 56 | codes["kPhaseDispatch"] << 48 | 2 << 32 | 1
        assert words == [expected, expected, 0], [f"{word:#018x}" for word in words]
        # The context has not been poisoned: a fresh exchange on the same back end works.
        fresh = EmulatedRanks.of_case(case, backend)
        check_round(with_ctas(case, backend.ctas), inputs, fresh.run_round(inputs))


def check_repeated_dispatch(name: str, *, small: bool = True, **options: Any) -> None:
    """A dispatch again without its combine, as a graph replays it: a fault on every rank.

    Rank 0 has rows for other ranks the second time. A receiver that takes the first dispatch's
    cells for the second's does not look for them. Nobody's rows are overwritten.
    """
    case = Case(name="repeated", tokens=(3, 2), num_experts=8, top_k=2, hidden_size=64, small=small)
    inputs = cases.make_inputs(case)
    ids = inputs[0].topk_ids.clone()
    ids[0] = (ids[0] + 4) % 8
    again = [inputs[0]._replace(topk_ids=ids), *inputs[1:]]
    with contextlib.closing(make_backend(name, case, **options)) as backend:
        ranks = EmulatedRanks(config_of(case, timeout_s=60.0), backend)
        ranks.dispatch([mine.to(backend.device) for mine in inputs])
        ranks.check_faults()
        # Of a round that is refused, some CTAs wait until they give up.
        ranks.configs = [dataclasses.replace(each, timeout_s=5.0) for each in ranks.configs]
        for rank in range(2):
            ranks.view(rank, "recv_hidden_states", writes=True).fill_(7.0)
        ranks.dispatch([mine.to(backend.device) for mine in again])
        codes = constants()
        code = codes["kFaultRepeated"] << 56 | codes["kPhaseDispatch"] << 48
        words = [int(ranks.control(rank).fault) for rank in range(2)]
        expected = [code | rank << 32 | 1 for rank in range(2)]
        assert words == expected, [f"{word:#018x}" for word in words]
        # The first fault stays, whatever the graph replays then.
        ranks.dispatch([mine.to(backend.device) for mine in inputs])
        assert [int(ranks.control(rank).fault) for rank in range(2)] == expected
        assert [int(ranks.control(rank).epoch) for rank in range(2)] == [1, 1]
        if not small:  # receivers of a small one may already take what the staging holds
            for rank in range(2):
                assert bool((ranks.view(rank, "recv_hidden_states") == 7.0).all())


def go_on_from(ranks: EmulatedRanks, epoch: int, **fields: int) -> None:
    """Makes round `epoch` the last one of all ranks; `fields` are further words of LocalControl."""
    words = {"epoch": epoch, "combined_epoch": epoch, **fields}
    for rank in range(ranks.config.ep_size):
        for cells in ("dispatch_cells", "combine_cells"):
            size = ranks.config.ep_size * 8
            ranks._bytes(rank, cells, size, 0, writes=True).view(torch.int64).fill_(epoch)
        set_local(ranks, rank, **words)


def set_local(ranks: EmulatedRanks, rank: int, **fields: int) -> None:
    """Writes words of the rank's LocalControl."""
    control = ranks.control(rank)
    for name, value in fields.items():
        setattr(control, name, value)
    words = torch.tensor(list(bytes(control)), dtype=torch.uint8)
    ranks._bytes(rank, "local", len(words), 0, writes=True).copy_(words)


#: Seen from here, a word that is 0 seems to be of a later round.
FAR_EPOCH = 2**31 + 5


def patience_s(name: str) -> float:
    """Of ranks of which some wait in vain, and others not for long."""
    # CPU ranks share the cores with other tests; the software GPU has a clock of its own.
    return 5.0 if name == "cpu" else 0.3


def check_stale_pulled_cell(name: str, **options: Any) -> None:
    """A cell of P11 that is older than 2^31 rounds is waited for; it does not seem to be ahead.

    Only rank 0 believes that the combine before has read rows. So rank 1 leaves no such cell, and
    what rank 0 says of it in the end does not depend on time.
    """
    case = Case(name="stale", tokens=(3, 2), num_experts=8, top_k=2, hidden_size=64, small=True)
    inputs = cases.make_inputs(case)
    with contextlib.closing(make_backend(name, case, **options)) as backend:
        ranks = EmulatedRanks(config_of(case, timeout_s=patience_s(name)), backend)
        go_on_from(ranks, FAR_EPOCH)
        set_local(ranks, 0, has_pulled=1)
        ranks.dispatch([mine.to(backend.device) for mine in inputs])
        codes = constants()
        expected = codes["kFaultTimeout"] << 56 | codes["kPhaseDispatch"] << 48 | 1 << 32
        words = [int(ranks.control(rank).fault) for rank in range(2)]
        assert words == [expected | FAR_EPOCH + 1, 0], [f"{word:#018x}" for word in words]


def check_stale_end_of_reading(name: str, *, small: bool, ahead: int, **options: Any) -> None:
    """A leaver's word of P14 that is older than 2^31 rounds is waited for.

    ahead: rounds by which the word is before the last one; 0 and 1 are no reason to wait.
    """
    case = Case(name="stale", tokens=(3, 2, 1), num_experts=6, top_k=2, hidden_size=64, small=small)
    inputs = cases.make_inputs(case)
    with contextlib.closing(make_backend(name, case, **options)) as backend:
        ranks = EmulatedRanks(config_of(case, timeout_s=patience_s(name)), backend)
        ranks._masks = [rank_mask((0, 1), 3).to(backend.device)] * 3
        go_on_from(ranks, FAR_EPOCH, has_pulled=1)
        set_local(ranks, 2, read_epoch=(FAR_EPOCH + ahead) % 2**32)
        ranks.dispatch([mine.to(backend.device) for mine in inputs[:2]])
        codes = constants()
        expected = codes["kFaultTimeout"] << 56 | codes["kPhaseCombine"] << 48 | 2 << 32
        fault = 0 if ahead in (0, 1) else expected | FAR_EPOCH
        words = [int(ranks.control(rank).fault) for rank in range(2)]
        assert words == [fault, fault], [f"{word:#018x}" for word in words]


@contextlib.contextmanager
def naming(what: str) -> Iterator[None]:
    """Puts the number of a round in front of what failed in it."""
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"{what}: {error}") from error
