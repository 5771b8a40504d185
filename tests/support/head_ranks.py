"""Ranks of one shared LM head as threads in ordinary memory, launching the kernels themselves.

Beside what the product does on CPU ranks: parts of a row (row_splits), other ones on each rank;
logits by slots, as on a GPU; libraries made from other texts; ranks that come late or not at all.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import itertools
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from moe_nvlink_plugin import HeadConfig
from moe_nvlink_plugin.jit import host
from moe_nvlink_plugin.jit.header import constants, structs
from moe_nvlink_plugin.lm_head.kernels import HEAD
from moe_nvlink_plugin.lm_head.launches import head_arguments, head_layout
from moe_nvlink_plugin.memory.layout import Region
from tests.kernels import test_specialised
from tests.support import kernel_texts, sanitizers
from tests.support.delays import replace_once, with_delays
from tests.support.ranks import run_threads
from tests.support.sanitizers import Bugs

_GRID = """
extern "C" moe_nvlink::host::Grid* moe_nvlink_grid_create(int num_blocks) {
  return new moe_nvlink::host::Grid(num_blocks);
}
extern "C" void moe_nvlink_grid_destroy(moe_nvlink::host::Grid* grid) { delete grid; }
"""

NO_BUGS: Bugs = {}


def _numbers(bugs: Bugs) -> dict[str, int]:
    return {name: number for number, name in enumerate(bugs, 1)}


@contextlib.contextmanager
def awake(library: Path, bugs: Bugs, name: str) -> Iterator[None]:
    """One of the bugs that `build` has seeded, for as long as the block lasts."""
    wake = ctypes.CDLL(str(library)).moe_nvlink_wake
    wake(_numbers(bugs)[name])
    try:
        yield
    finally:
        wake(0)


def build(
    cta_threads: int = 1,
    *,
    as_on_the_gpu: bool = False,
    sleeps: bool = False,
    bugs: Bugs = NO_BUGS,
) -> Path:
    """A library of the head's kernels alone, with CTAs of so many threads.

    as_on_the_gpu: vectors of 16 bytes that must be aligned, two loads in flight, and warps whose
        threads exchange values; `cta_threads` is then test_specialised.LANE_THREADS.
    sleeps: sown into the text.
    bugs: seeded, and asleep until `awake`.
    """
    text = kernel_texts.host_unit(*kernel_texts.HEAD_FILES)
    changes = test_specialised.AS_ON_THE_GPU | test_specialised.LANES_OF_THE_GPU
    for old, new in changes.items() if as_on_the_gpu else ():
        text = replace_once(text, old, new)
    if bugs:
        text = sanitizers.seed(text, bugs, _numbers(bugs)) + sanitizers.WAKE
    if sleeps:
        text = with_delays(text, on_host=True)
    flags = (*host.FLAGS, "-O1", f"-DMOE_NVLINK_CTA_THREADS={cta_threads}")
    return host.build(text + _GRID, flags)


class Call(NamedTuple):
    """What one rank brings to a round.

    Attributes:
        hidden: `[rows, hidden_size]`.
        logits: `[rows, vocab_size]`: what the product will give for them.
        splits: parts of a row in this rank's argmax.
    """

    hidden: torch.Tensor
    logits: torch.Tensor
    splits: int = 1


class Round(NamedTuple):
    """What all ranks of a round agree on."""

    row_bound: int
    soft_cap: float = 0.0
    scale: float = 1.0
    compact: bool = True


#: Kernels with their arguments, one after another; at last ids and logits.
Steps = Generator[tuple[str, Any], None, tuple[torch.Tensor, torch.Tensor]]


class HeadRanks:
    """Ranks of one group.

    Args:
        config: of rank 0.
        library: path of the shared object; None: a subclass launches.
        ctas: of every launch.
    """

    def __init__(self, config: HeadConfig, library: Path | None, ctas: int = 1) -> None:
        self.configs = [dataclasses.replace(config, tp_rank=rank) for rank in range(config.tp_size)]
        self.config = config
        self.regions = head_layout(config).channel_regions(0)
        end = max(region.offset + region.size_bytes for region in self.regions.values())
        # From here on every rank's workspace begins at a multiple of 256 bytes.
        room = torch.zeros(config.tp_size * -(-end // 256) * 256 + 256, dtype=torch.uint8)
        start = -room.data_ptr() % 256
        self.memory = room[start : start + room.numel() - 256].view(config.tp_size, -1)
        self._grids: list[ctypes.c_void_p] = []
        if library is not None:
            self._library = ctypes.CDLL(str(library))
            self._library.moe_nvlink_grid_create.restype = ctypes.c_void_p
            self._grids = [
                ctypes.c_void_p(self._library.moe_nvlink_grid_create(ctas)) for _ in self.configs
            ]

    def close(self) -> None:
        for grid in self._grids:
            self._library.moe_nvlink_grid_destroy(grid)
        self._grids = []

    def view(self, rank: int, name: str, dtype: torch.dtype) -> torch.Tensor:
        """A region of a rank, flat."""
        region: Region = self.regions[name]
        return self.memory[rank, region.offset : region.offset + region.size_bytes].view(dtype)

    def control(self, rank: int) -> Any:
        """The rank's LocalControl, in place."""
        return structs()["LocalControl"].from_address(
            self.view(rank, "local", torch.uint8).data_ptr()
        )

    def fault(self, rank: int) -> tuple[str, str, int, int] | None:
        """(code, phase, peer, epoch) of a rank's fault word; names of config.h."""
        word = int(self.control(rank).fault)
        if not word:
            return None
        names = {
            kind: {value: name for name, value in constants().items() if name.startswith(kind)}
            for kind in ("kFault", "kPhase")
        }
        return (
            names["kFault"][word >> 56],
            names["kPhase"][word >> 48 & 0xFF],
            word >> 32 & 0xFFFF,
            word & 0xFFFFFFFF,
        )

    def arguments(self, rank: int, call: Call, of_round: Round) -> Any:
        base, stride = self.memory.data_ptr(), self.memory.stride(0)
        args = head_arguments(self.configs[rank], self.regions, base, stride)
        args.geometry.num_rows, args.geometry.row_bound = len(call.hidden), of_round.row_bound
        args.hidden = call.hidden.data_ptr()
        args.soft_cap, args.scale = of_round.soft_cap, of_round.scale
        args.is_compact, args.row_splits = int(of_round.compact), call.splits
        args.logits = self.view(rank, "head_logits", torch.uint8).data_ptr()
        return args

    def launch(self, kernel: str, rank: int, args: Any) -> None:
        getattr(self._library, f"moe_nvlink_{kernel}")(ctypes.byref(args), self._grids[rank])

    def run_rank(
        self, rank: int, calls: Sequence[Call], of_round: Round
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One rank's three kernels and the product between them: ids and logits."""
        steps = self.steps(rank, calls, of_round)
        while True:
            try:
                kernel, args = next(steps)
            except StopIteration as end:
                results: tuple[torch.Tensor, torch.Tensor] = end.value
                return results
            self.launch(kernel, rank, args)

    def steps(self, rank: int, calls: Sequence[Call], of_round: Round) -> Steps:
        """The same, of which the caller launches the kernels: one before it asks for the next."""
        call = calls[rank]
        args = self.arguments(rank, call, of_round)
        yield "head_gather", args
        if self.fault(rank) is None:
            self.multiply(rank, calls, of_round)
        ids = torch.full((len(call.hidden),), -1)
        args.output = ids.data_ptr()
        yield "head_argmax", args
        # Ids have been taken, so peers put no words before this rank's next gather: what would win.
        self.view(rank, "head_pairs", torch.uint8).fill_(0xFF)
        logits = torch.zeros_like(call.logits)
        args.output = logits.data_ptr()
        yield "head_collect", args
        return ids, logits

    def multiply(self, rank: int, calls: Sequence[Call], of_round: Round) -> None:
        """Checks the gathered rows; in the product's place come the logits that were said."""
        config = self.configs[rank]
        slots = self.view(rank, "head_rows", config.dtype).view(-1, config.hidden_size)
        for peer, call in enumerate(calls):
            slot = peer * of_round.row_bound
            there = slots[slot : slot + len(call.hidden)]
            assert torch.equal(there, call.hidden), f"rows of rank {peer}"
        self.put_logits(rank, calls, of_round, self.view(rank, "head_logits", config.dtype))
        slots.view(torch.uint8).fill_(0xFF)  # the product has read them

    def put_logits(
        self, rank: int, calls: Sequence[Call], of_round: Round, logits: torch.Tensor
    ) -> None:
        """What the product would write to `logits`, which is as long as its region."""
        first, end = self.configs[rank].shard(rank)
        logits.view(torch.uint8).fill_(0xFF)  # NaN, which would win
        place = 0
        for peer, call in enumerate(calls):
            if not of_round.compact:
                place = peer * of_round.row_bound * (end - first)
            there = logits[place : place + len(call.hidden) * (end - first)]
            there.copy_(call.logits[:, first:end].reshape(-1))
            place += len(there)

    def run(
        self, calls: Sequence[Call], of_round: Round, ranks: Sequence[int] | None = None
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The round of these ranks, all by default, each in a thread of its own."""
        here = list(range(len(calls)) if ranks is None else ranks)
        return run_threads(len(here), lambda place: self.run_rank(here[place], calls, of_round))


class HeadRanksInStep(HeadRanks):
    """One kernel of all ranks after another, for what launches those of all ranks at once."""

    def launch_all(self, kernel: str, ranks: Sequence[int], arguments: Sequence[Any]) -> None:
        """One kernel of these ranks."""
        raise NotImplementedError

    def run(
        self, calls: Sequence[Call], of_round: Round, ranks: Sequence[int] | None = None
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        here = list(range(len(calls)) if ranks is None else ranks)
        steps = [self.steps(rank, calls, of_round) for rank in here]
        for name in (kernel.name for kernel in HEAD.kernels):
            launched = [next(of_rank) for of_rank in steps]
            assert {kernel for kernel, _args in launched} == {name}
            self.launch_all(name, here, [args for _name, args in launched])
        return [_result(of_rank) for of_rank in steps]


def _result(steps: Steps) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and logits of a rank whose kernels have all ended."""
    try:
        kernel, _args = next(steps)
    except StopIteration as end:
        results: tuple[torch.Tensor, torch.Tensor] = end.value
        return results
    raise AssertionError(f"{kernel} has not been launched")


@contextlib.contextmanager
def head_ranks(config: HeadConfig, library: Path, ctas: int = 1) -> Iterator[HeadRanks]:
    """HeadRanks, closed at the end."""
    ranks = HeadRanks(config, library, ctas)
    try:
        yield ranks
    finally:
        ranks.close()


def make_calls(
    config: HeadConfig, rows: Sequence[int], generator: torch.Generator, splits: int = 1
) -> list[Call]:
    """Random rows, and logits with many equal ones, both zeros, infinities and NaN of both signs.

    Ranks have `splits`, splits + 1, ... parts of a row, up to kMaxHeadSplits and again from 1.
    """
    most = constants()["kMaxHeadSplits"]
    special = torch.tensor([float("nan"), float("inf"), float("-inf"), -0.0, 0.0, float("nan")])
    special[-1:].neg_()
    calls = []
    for count, number in zip(rows, itertools.count(splits - 1)):
        hidden = torch.randn((count, config.hidden_size), generator=generator).to(config.dtype)
        logits = torch.randint(-9, 9, (count, config.vocab_size), generator=generator).float()
        for row in logits:
            # A kind of row each: all equal, no number above zero, only numbers, a few of the
            # special values among them.
            kind = int(torch.randint(0, 6, (), generator=generator))
            if kind == 0:
                row.fill_(float("-inf"))
            elif kind == 1:
                row.clamp_(max=0)[: len(row) // 2] *= -0.0  # zeros of both signs are the largest
            elif kind >= 3:
                picks = torch.randint(0, len(row), (kind,), generator=generator)
                row[picks] = special[torch.randint(0, 6, (kind,), generator=generator)]
        calls.append(Call(hidden, logits.to(config.dtype), number % most + 1))
    return calls


def check(
    calls: Sequence[Call], of_round: Round, results: Sequence[tuple[torch.Tensor, torch.Tensor]]
) -> None:
    """Ids against torch's argmax; logits bit for bit."""
    for rank, (call, (ids, logits)) in enumerate(zip(calls, results, strict=True)):
        as_bits = torch.int32 if logits.dtype == torch.float32 else torch.int16
        assert torch.equal(logits.view(as_bits), call.logits.view(as_bits)), f"rank {rank}"
        values = call.logits.float()
        if of_round.soft_cap:
            values = of_round.soft_cap * torch.tanh(values / of_round.soft_cap)
        values = values * of_round.scale
        expected = values.argmax(1)
        if of_round.soft_cap:
            # Two tanh may differ in the last place, and so between two logits that are not equal.
            mine, best = (values.gather(1, i[:, None]) for i in (ids, expected))
            torch.testing.assert_close(mine, best, rtol=1e-6, atol=0.0, equal_nan=True)
        else:
            assert torch.equal(ids, expected), f"rank {rank}: {ids} instead of {expected}"
