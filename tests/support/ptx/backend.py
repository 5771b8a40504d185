"""The product's own kernels for GPUs, executed as PTX: the back end of the emulated ranks.

A rank's launches take the build that the rank's GPU would get, one launch a rank, each rank on a
stream of its own. Kernels may touch what the arguments' structs say and nothing else: the bounds of
every tensor are computed from the arguments, not taken from torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from moe_nvlink_plugin.config import AllToAllConfig
from moe_nvlink_plugin.exchange import launches
from moe_nvlink_plugin.exchange.kernels import LAYER
from moe_nvlink_plugin.exchange.sizes import loads_tma
from moe_nvlink_plugin.launch.arguments import element_code
from moe_nvlink_plugin.launch.kernel import Build, Kernel
from moe_nvlink_plugin.launch.shape import VECTOR_BYTES, Shape
from tests.support.ptx import build
from tests.support.ptx.machine import Machine

#: Threads of a CTA where a test does not say otherwise: two warps, so that a warp's exchange of
#: values and the CTA's barriers are both needed.
THREADS = 64

_ELEMENT_BYTES = {
    element_code(dtype): dtype.itemsize for dtype in (torch.bfloat16, torch.float16, torch.float32)
}


def unchanged(ptx: str) -> str:
    """The text as NVRTC made it."""
    return ptx


class Span(NamedTuple):
    """Memory that a kernel may touch: one tensor of one rank."""

    rank: int
    address: int
    size_bytes: int
    name: str


class Grids:
    """Ranks that launch on one software GPU each.

    Args:
        ranks: how many.
        architecture: whose PTX is executed.
        ctas, threads: of every launch that does not say its own shape.
        pdl: builds and launches have programmatic dependent launch.
        seed: of the scheduler.
        races: checks races, also with what the host reads and writes.
        rewrite: changes the PTX before it is translated.
        change: changes the kernels' text before it is compiled.
    """

    def __init__(
        self,
        ranks: int,
        *,
        architecture: str = "sm_90a",
        ctas: int = 1,
        threads: int = THREADS,
        pdl: bool = False,
        seed: int = 1,
        races: bool = False,
        rewrite: Callable[[str], str] = unchanged,
        change: Callable[[str], str] = unchanged,
    ) -> None:
        self.ctas, self.threads, self.pdl = ctas, threads, pdl
        self.machine = Machine(ranks=ranks, seed=seed, races=races)
        self._races, self._architecture = races, architecture
        self._rewrite, self._change = rewrite, change
        self._functions: dict[Build, Any] = {}
        self._owned: dict[int, Span] = {}
        self._queued = False

    def function(self, made: Build) -> Any:
        """The translated entry of one build."""
        if made not in self._functions:
            text = self._change(made.text())
            library = build.load(
                self._rewrite(build.ptx_of(text, self._architecture)), races=self._races
            )
            self.machine.use(library)
            self._functions[made] = library[made.kernel.entry]
        return self._functions[made]

    @contextlib.contextmanager
    def queued(self) -> Iterator[None]:
        """Launches of the block wait until its end, so that a stream holds several at once."""
        self._queued = True
        try:
            yield
        finally:
            self._queued = False
        self.machine.run()

    def launch(
        self,
        made: Sequence[Build],
        arguments: Sequence[Any],
        shape: Shape | None,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """One launch a rank; returns when all have ended, unless they are queued.

        Args:
            made, arguments: of each rank.
            ranks: which ranks launch; by default the first ones.
        """
        here = range(len(made)) if ranks is None else ranks
        calls = list(zip(here, made, arguments, strict=True))
        self._own(
            windows_of(arguments[0]),
            [span for rank, of_rank, args in calls for span in tensors_of(of_rank, rank, args)],
        )
        shape = Shape(self.ctas, self.threads) if shape is None else shape
        for rank, of_rank, args in calls:
            self.machine.launch(
                rank,
                self.function(of_rank),
                shape.blocks,
                shape.threads,
                bytes(args),
                shared_bytes=shape.shared_bytes,
                pdl=self.pdl,
            )
        if not self._queued:
            self.machine.run()

    def host_access(self, rank: int, tensor: torch.Tensor, *, writes: bool) -> None:
        """The host of a rank reads or writes a tensor, after all that the rank has launched. While
        launches are queued it only makes views.
        """
        if not self._races or self._queued or tensor.numel() == 0:
            return
        access = self.machine.host_write if writes else self.machine.host_read
        access(rank, tensor.data_ptr(), tensor.nbytes)

    def _own(self, windows: Iterable[Span], tensors: Iterable[Span]) -> None:
        """Lets kernels touch the workspaces and these launches' tensors, and nothing else.

        What dispatch wrote and combine reads keeps its history.
        """
        wanted: dict[int, Span] = {}
        for span in [*windows, *tensors]:
            # A scale of all ranks is one tensor.
            wanted.setdefault(span.address, span)
        if self._queued:
            wanted = self._owned | wanted
        for address, span in self._owned.items():
            if wanted.get(address) != span:
                self.machine.release(address)
        for address, span in wanted.items():
            if self._owned.get(address) != span:
                self.machine.allocate(*span)
        self._owned = wanted

    def close(self) -> None:
        self.machine.close()


def windows_of(args: Any) -> tuple[Span, ...]:
    """All ranks' workspaces."""
    geometry = args.geometry
    ranks = getattr(geometry, "ep_size", 0) or geometry.tp_size
    base, stride = args.window_base, args.rank_stride
    return tuple(
        Span(rank, base + rank * stride, stride, f"workspace of rank {rank}")
        for rank in range(ranks)
    )


def tensors_of(made: Build, rank: int, args: Any) -> list[Span]:
    """What one rank's launch touches outside of the workspaces, as args.h says."""
    return [Span(rank, *each) for each in tensors_of_kernel(made.kernel.name, args)]


def tensors_of_kernel(name: str, args: Any) -> list[tuple[int, int, str]]:
    """The same of a kernel by its name: address, bytes, and what it is."""
    return [each for each in _TENSORS[name](args) if each[0] and each[1]]


_Tensors = Iterator[tuple[int, int, str]]


def _of_dispatch(args: Any) -> _Tensors:
    geometry = args.geometry
    tokens = geometry.num_tokens
    yield args.send_slots, tokens * geometry.top_k * 4, "send_slots"
    yield args.global_scale, 4, "global_scale"
    yield args.is_padding, tokens, "is_padding"
    yield args.active_ranks, -(-geometry.ep_size // 64) * 8, "active_ranks"
    yield args.expert_counts, args.num_expert_counts * 4, "expert_counts"
    for index, payload in enumerate(args.payloads[: args.num_payloads]):
        row_bytes = payload.row_bytes
        if args.quantiser and index == 2:  # activations
            row_bytes = geometry.hidden_size * _ELEMENT_BYTES[geometry.element]
        yield payload.source, tokens * row_bytes, f"source of payload {index}"


def _of_combine(args: Any) -> _Tensors:
    geometry = args.geometry
    tokens = geometry.num_tokens
    yield args.send_slots, tokens * geometry.top_k * 4, "send_slots"
    row_bytes = geometry.hidden_size * _ELEMENT_BYTES[geometry.element]
    yield args.output, tokens * row_bytes, "output"
    yield args.add, tokens * row_bytes, "added rows"


def _of_meet(_args: Any) -> _Tensors:
    """It touches the workspaces only."""
    yield from ()


def _of_gather(args: Any) -> _Tensors:
    geometry = args.geometry
    row_bytes = geometry.hidden_size * _ELEMENT_BYTES[geometry.element]
    yield args.hidden, geometry.num_rows * row_bytes, "hidden"


def _of_argmax(args: Any) -> _Tensors:
    """Logits lie in the workspace: these tests need no second place for them."""
    yield args.output, args.geometry.num_rows * 8, "ids"


def _of_collect(args: Any) -> _Tensors:
    geometry = args.geometry
    row_bytes = geometry.vocab_size * _ELEMENT_BYTES[geometry.element]
    yield args.output, geometry.num_rows * row_bytes, "all logits"


_TENSORS: dict[str, Callable[[Any], _Tensors]] = {
    "dispatch": _of_dispatch,
    "combine": _of_combine,
    "small_dispatch": _of_dispatch,
    "small_combine": _of_combine,
    "meet": _of_meet,
    "head_gather": _of_gather,
    "head_argmax": _of_argmax,
    "head_collect": _of_collect,
}


class PtxBackend:
    """Dispatch and combine of one layer; a Backend of tests/support/emulated.py.

    Args:
        config: of the layer.
        stages: of a CTA of a combine by TMA.
        options: of Grids.
    """

    device = torch.device("cpu")
    approximates = True

    def __init__(
        self, ranks: int, config: AllToAllConfig, *, stages: int = 2, **options: Any
    ) -> None:
        self._stages = stages
        self.grids = Grids(ranks, **options)
        self.ctas = self.grids.ctas
        self._config = config

    def prepare(
        self, verb: str, rank_arguments: Sequence[Any], shape: Shape | None = None
    ) -> Callable[[], None]:
        kernels = {kernel.name: kernel for kernel in LAYER.kernels}
        copies = [type(args).from_buffer_copy(args) for args in rank_arguments]
        if verb == "combine" and loads_tma(self._config):
            shape = self._staged_shape(copies)
        builds = [self.build_of(kernels[verb], args) for args in copies]
        return lambda: self.grids.launch(builds, copies, shape)

    def _staged_shape(self, rank_arguments: Sequence[Any]) -> Shape:
        """Of a combine by TMA."""
        threads, top_k = self.grids.threads, rank_arguments[0].geometry.top_k
        shared_bytes = self._stages * top_k * threads * VECTOR_BYTES
        return Shape(self.grids.ctas, threads, shared_bytes=shared_bytes)

    def build_of(self, kernel: Kernel[Any], args: Any) -> Build:
        """What the product loads for these arguments; only dispatch's name a quantiser."""
        variant = launches.variant(self._config, getattr(args, "quantiser", 0))
        return variant.build(kernel, pdl=self.grids.pdl)

    def host_access(self, rank: int, tensor: torch.Tensor, *, writes: bool) -> None:
        self.grids.host_access(rank, tensor, writes=writes)

    def close(self) -> None:
        self.grids.close()
