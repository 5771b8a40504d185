"""CPU ranks for the sanitizers to watch: python -m tests.support.watched_ranks LIBRARY ROOM BUG

LIBRARY is of sanitizers.build, ROOM "layer" or "head", BUG the number of the one to wake, or 0.

Between the ranks nothing orders anything but the protocol: each makes the calls of all its rounds
in one call of the library, because Python's lock would order them too. For the same reason the
library has experts and a product of its own (watched_ranks.h).
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import itertools
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from moe_nvlink_plugin import HeadConfig, reference
from moe_nvlink_plugin.launch.shape import Shape
from moe_nvlink_plugin.memory.layout import Region
from moe_nvlink_plugin.verify import cases
from moe_nvlink_plugin.verify.cases import Case, Inputs
from tests.support.emulated import CpuBackend, EmulatedRanks
from tests.support.head_ranks import Call, HeadRanks, Round, check, make_calls
from tests.support.ranks import run_threads

CTAS = 3
ROUNDS = 12


class _ExpertsArgs(ctypes.Structure):
    _fields_ = (
        ("read", ctypes.c_uint64 * 16),
        ("read_bytes", ctypes.c_uint64 * 16),
        ("rows", ctypes.c_uint64),
        ("count", ctypes.c_uint64),
        ("source", ctypes.c_uint64),
        ("value", ctypes.c_float),
    )


class _Step(ctypes.Structure):
    _fields_ = (("kernel", ctypes.c_void_p), ("args", ctypes.c_void_p))


class Library:
    """The shared object; where the process has no address sanitizer, `forbid` does nothing."""

    def __init__(self, path: Path, bug: int) -> None:
        self._loaded: Any = ctypes.CDLL(str(path))
        self._loaded.moe_nvlink_grid_create.restype = ctypes.c_void_p
        self._loaded.moe_nvlink_wake(bug)
        self._poison = getattr(ctypes.CDLL(None), "__asan_poison_memory_region", None)

    def kernel(self, name: str) -> Any:
        return getattr(self._loaded, f"moe_nvlink_{name}")

    def forbid(self, address: int, size_bytes: int) -> None:
        if self._poison is not None:
            self._poison(ctypes.c_void_p(address), ctypes.c_size_t(size_bytes))

    def forbid_gaps(self, memory: torch.Tensor, regions: Sequence[Region]) -> None:
        """What lies between the regions of each rank's workspace."""
        ends = [region.offset + region.size_bytes for region in regions]
        starts = [*(region.offset for region in regions[1:]), memory.shape[1]]
        for rank, (end, start) in itertools.product(
            range(len(memory)), zip(ends, starts, strict=True)
        ):
            self.forbid(memory[rank].data_ptr() + end, start - end)

    def run(self, steps: Sequence[tuple[str, Any]]) -> None:
        """Kernels with their arguments, one after another, in one call."""
        of_rank = (_Step * len(steps))()
        for step, (name, args) in zip(of_rank, steps, strict=True):
            step.kernel = ctypes.cast(self.kernel(name), ctypes.c_void_p)
            step.args = ctypes.addressof(args)
        grid = ctypes.c_void_p(self._loaded.moe_nvlink_grid_create(CTAS))
        self._loaded.moe_nvlink_run_steps(of_rank, len(steps), grid)
        self._loaded.moe_nvlink_grid_destroy(grid)


class Recorder(CpuBackend):
    """Launches nothing: it keeps each rank's steps."""

    def __init__(self, ranks: int) -> None:
        self.ctas = CTAS
        self.steps: list[list[tuple[str, Any]]] = [[] for _ in range(ranks)]

    def prepare(
        self, verb: str, rank_arguments: Sequence[Any], shape: Shape | None = None
    ) -> Callable[[], None]:
        for steps, args in zip(self.steps, rank_arguments, strict=True):
            steps.append((verb, type(args).from_buffer_copy(args)))
        return lambda: None

    def close(self) -> None:
        """There are no grids."""


CASE = Case(
    name="watched",
    tokens=(0, 0, 0),
    num_experts=7,
    top_k=4,
    hidden_size=36,  # fp32: one wide vector and a rest
    capacity=12,
    routing="invalid",
    extras=((torch.uint8, (132,)),),
    small=True,
    num_threads=CTAS,
    scale=-0.5,
)


LAYOUTS = {"fp8_block": "column_major", "mxfp8": "interleaved", "nvfp4": "interleaved"}


def layer_cases() -> list[Case]:
    """Each recipe and format; ids and additions in turns, and at last a rank that is left out."""
    formats, adds = itertools.cycle(cases.COMBINE_FORMATS), itertools.cycle(cases.ADDS)
    ids: Iterator[str | int] = itertools.cycle(("global", "local", "elsewhere", 9))
    next(adds)  # so that each meets another format
    sizes = itertools.cycle((128, 160))
    made = [dataclasses.replace(CASE, received_ids=next(ids)) for _ in range(2)]
    for recipe in cases.RECIPES:
        case = dataclasses.replace(
            CASE,
            hidden_size=next(sizes),
            add=next(adds),
            received_ids=next(ids),
            scales_layout=LAYOUTS.get(recipe, "linear"),
        )
        made.append(cases.with_formats(case, recipe, next(formats)))
    return [*made, dataclasses.replace(CASE, num_expert_counts=7, left_out=(1,))]


def inputs_of(case: Case, choose: random.Random, number: int) -> list[Inputs]:
    """Other counts in each round; some tokens have no expert at all."""
    tokens = tuple(choose.randint(0, case.capacity) for _ in case.tokens)
    inputs = cases.make_inputs(case, tokens, seed=number)
    for mine in inputs:
        for token in range(len(mine.topk_ids)):
            if choose.random() < 0.25:
                mine.topk_ids[token] = -1
    return inputs


def forbid_rows(library: Library, inputs: Inputs, tokens: torch.Tensor) -> None:
    """Of tokens that go nowhere; they may not even be read."""
    for token in tokens.nonzero().flatten().tolist():
        for rows in (inputs.topk_weights, inputs.hidden_states, *inputs.extras):
            row = rows[token]
            library.forbid(row.data_ptr(), row.nbytes)


class LayerRanks:
    """Rounds of one case, of any size and small ones in turns."""

    def __init__(self, library: Library, case: Case) -> None:
        self.library, self.case = library, case
        self.backend = Recorder(case.ep_size)
        self.ranks = EmulatedRanks.of_case(case, self.backend)
        self.verb = self.ranks.verb
        self.kept: list[Any] = []
        self.expected: list[
            tuple[torch.Tensor, torch.Tensor]
        ] = []  # what combine wrote, and should
        (regions,) = self.ranks.regions
        library.forbid_gaps(self.ranks.memory, list(regions.values()))

    def experts_of(self, rank: int) -> _ExpertsArgs:
        args, views = _ExpertsArgs(), [self.ranks.recv_counts(rank)]
        views += [self.ranks.view(rank, name) for name in self.ranks.rows]
        for index, view in enumerate(views):
            args.read[index], args.read_bytes[index] = view.data_ptr(), view.nbytes
        rows = self.ranks.view(rank, "combine")
        args.rows, args.count, args.value = rows.data_ptr(), rows.numel(), 2.0**rank
        return args

    def record(self, number: int, inputs: list[Inputs]) -> None:
        ranks, case = self.ranks, self.case
        # Two small rounds, two of any size, and so on: each kind follows each.
        is_small, has_masks = number // 2 % 2 == 0, number % 2 == 1
        setattr(ranks, "verb", self.verb if is_small else str)  # noqa: B010 - no variable to mypy
        ranks.hidden_splits = 1 + number % 3
        masks = [torch.rand(len(mine.topk_ids)) < 0.25 * has_masks for mine in inputs]
        among = [
            mine._replace(topk_ids=mine.topk_ids.masked_fill(mask[:, None], -1))
            for mine, mask in zip(cases.among_active(case, inputs), masks, strict=True)
        ]
        if not is_small:  # a small dispatch loads a row while it looks for the row's targets
            for mine, travelling in zip(inputs, among, strict=True):
                forbid_rows(self.library, mine, (travelling.topk_ids < 0).all(1))
        received = ranks.dispatch(inputs)
        for steps, mask in zip(self.backend.steps, masks, strict=True):
            steps[-1][1].is_padding = mask.data_ptr() if has_masks else 0
        self.backend.prepare("experts", [self.experts_of(rank) for rank in range(len(inputs))])
        added = [cases.added_rows(mine.hidden_states, case.add) for mine in inputs]
        outputs = [
            rows if rows is not None and case.add == "in place" else torch.empty_like(of_rank[0])
            for rows, of_rank in zip(added, inputs, strict=True)
        ]
        ranks.combine([mine.send_slots for mine in received], outputs, added=added)
        self.kept += [inputs, masks, received, added]
        self.expected += [
            (output, self.combined(travelling))
            for output, travelling in zip(outputs, among, strict=True)
        ]

    def combined(self, mine: Inputs) -> torch.Tensor:
        """What combine must return: numbers of the ranks that a row went to, and what it adds."""
        case = self.case
        targets = reference.target_ranks(mine.topk_ids, case.num_experts, case.ep_size)
        numbers = [sum(2.0**rank for rank in row if rank is not None) for row in targets]
        sums = torch.tensor(numbers, dtype=torch.float32)[:, None] * case.scale
        added = cases.added_rows(mine.hidden_states, case.add)
        return sums.expand_as(mine.hidden_states) if added is None else sums + added

    def run(self) -> None:
        choose = random.Random(self.case.name)
        for number in range(ROUNDS):
            self.record(number, inputs_of(self.case, choose, number))
        run_threads(self.case.ep_size, lambda rank: self.library.run(self.backend.steps[rank]))
        for rank in range(self.case.ep_size):
            check_end(self.ranks.control(rank))
        # Formats of combine are as exact as they are; test_combine_formats.py has the bits.
        near = 0.0 if self.case.combine == "bf16" else 0.1
        for output, wanted in self.expected:
            torch.testing.assert_close(output, wanted, rtol=near, atol=near, equal_nan=True)


def check_end(control: Any) -> None:
    """Of a rank after all rounds."""
    assert (control.fault, control.epoch) == (0, ROUNDS)
    assert control.arrivals == control.combine_arrivals == control.rows_taken == 0


HEAD = HeadConfig(
    tp_size=3,
    tp_rank=0,
    vocab_size=40,
    hidden_size=37,  # fp32: one wide vector and a rest
    max_rows_per_rank=6,
    dtype=torch.float32,
    full_logits=True,
    timeout_s=100.0,
)


class WatchedHead(HeadRanks):
    """Ranks of a head whose rounds are recorded, and run at last."""

    def __init__(self, config: HeadConfig, library: Library) -> None:
        super().__init__(config, None)
        self.library = library
        self.recorded: list[list[tuple[str, Any]]] = [[] for _ in self.configs]
        self.kept: list[torch.Tensor] = []
        library.forbid_gaps(self.memory, list(self.regions.values()))

    def record(
        self, rank: int, calls: Sequence[Call], of_round: Round
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Where ids and logits will be."""
        ids = torch.full((len(calls[rank].hidden),), -1)
        logits = torch.zeros_like(calls[rank].logits)
        for kernel, output in (("gather", ids), ("argmax", ids), ("collect", logits)):
            args = self.arguments(rank, calls[rank], of_round)
            args.output = output.data_ptr()
            self.recorded[rank].append((f"head_{kernel}", args))
        self.recorded[rank].insert(-2, ("experts", self.product(rank, calls, of_round)))
        return ids, logits

    def product(self, rank: int, calls: Sequence[Call], of_round: Round) -> _ExpertsArgs:
        rows, logits = (
            self.view(rank, name, torch.float32) for name in ("head_rows", "head_logits")
        )
        source = torch.empty_like(logits)
        self.put_logits(rank, calls, of_round, source)
        self.kept.append(source)
        args = _ExpertsArgs(rows=logits.data_ptr(), count=len(logits), source=source.data_ptr())
        args.read[0], args.read_bytes[0] = rows.data_ptr(), rows.nbytes
        return args


def _run_recorded(ranks: WatchedHead, rank: int) -> None:
    ranks.library.run(ranks.recorded[rank])


def run_head(library: Library) -> None:
    generator, choose = torch.Generator().manual_seed(1), random.Random(1)
    # Of 20 tokens the last rank has none.
    for vocab_size in (40, 20):
        ranks = WatchedHead(dataclasses.replace(HEAD, vocab_size=vocab_size), library)
        recorded = []
        for number in range(ROUNDS):
            bound = choose.randint(1, 6)
            rows = [choose.randint(0, bound) for _ in range(3)]
            calls = make_calls(ranks.config, rows, generator, number % 4 + 1)
            cap = 3.0 if number % 5 == 2 else 0.0
            of_round = Round(bound, soft_cap=cap, compact=number % 2 == 0)
            results = [ranks.record(rank, calls, of_round) for rank in range(3)]
            recorded.append((calls, of_round, results))
        run_threads(3, functools.partial(_run_recorded, ranks))
        for calls, of_round, results in recorded:
            check(calls, of_round, results)
        for rank in range(3):
            check_end(ranks.control(rank))


def main() -> None:
    path, room, bug = sys.argv[1:]
    library = Library(Path(path), int(bug))
    if room == "head":
        run_head(library)
    else:
        for case in layer_cases():
            LayerRanks(library, case).run()
    print("all rounds verified")


if __name__ == "__main__":
    main()
