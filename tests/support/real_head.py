"""What the tests of a shared LM head on a GPU do, device by name: HeadGroup on its own transport.

tests/gpu runs these on "cuda", tests/kernels/lm_head/test_real_head.py on "cpu", so that they
themselves have been run before a GPU is there. Products are of small whole numbers: torch's own on
a GPU has the same bits as on a CPU then, also where it takes another type for the sums.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_nvlink_plugin import HeadConfig, HeadGroup, sharded_argmax, sharded_logits
from moe_nvlink_plugin.errors import ExchangeTimeoutError, InputError
from moe_nvlink_plugin.jit.header import structs
from moe_nvlink_plugin.launch.executors import executor_for, with_index
from moe_nvlink_plugin.lm_head.launches import HeadLaunches, head_arguments, head_layout
from moe_nvlink_plugin.memory.layout import REGION_ALIGNMENT
from moe_nvlink_plugin.testing import ThreadGroup
from tests.support import emulated, small_head
from tests.support.real_path import WAIT_S
from tests.support.small_head import Problem, check_argmax, check_logits, ids_of, logits_of, problem

CAPACITY = 8
#: Rows of the calls that are captured, each into a graph of its own.
SIZES = (1, 3, CAPACITY)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def config(tp_size: int = 1, tp_rank: int = 0, **values: Any) -> HeadConfig:
    """Rows of logits that several CTAs share; the last rank's part of the vocabulary is short."""
    usual: dict[str, Any] = {
        "vocab_size": 20_005,
        "hidden_size": 24,
        "max_rows_per_rank": CAPACITY,
        "dtype": torch.bfloat16,
        "full_logits": True,
    }
    return small_head.config(tp_size, tp_rank, **usual | values)


def create(device: str, **values: Any) -> HeadGroup:
    """A group of one rank."""
    return create_of(config(**values), ThreadGroup.ranks(1)[0], device)


def create_of(mine: HeadConfig, group: Any, device: str) -> HeadGroup:
    """This rank's."""
    patience_s = min(mine.timeout_s or WAIT_S[device], WAIT_S[device])
    return HeadGroup.create(dataclasses.replace(mine, timeout_s=patience_s), group, device)


def problems(mine: HeadConfig, rounds: int) -> list[Problem]:
    """Ragged rows, none and all among them; with bias every other time, soft cap and scale too."""
    made = []
    for number in range(rounds):
        step = mine.max_rows_per_rank + 1
        counts = [(number * (rank + 2) + 3 * rank) % step for rank in range(mine.tp_size)]
        made.append(problem(mine, counts, number, padding=9, bias=number % 2 == 1))
    return made


# One rank.


def check_rounds(device: str, rounds: int, **values: Any) -> None:
    """Ids and all logits of ragged rows; soft cap and scale for the ids."""
    with create(device, **values) as head:
        for number, one in enumerate(problems(head.config, rounds)):
            with emulated.naming(f"round {number}"):
                check_argmax(head, one)
                check_argmax(head, one._replace(function={"soft_cap": 30.0, "scale": -0.5}))
                check_logits(head, one, row_bound=max(1, len(one.rows[0])))


def check_special_values(device: str, dtype: torch.dtype) -> None:
    """NaN, infinities, zeros, ties: what the CPU tests hold to torch is the same here."""
    inf, nan = float("inf"), float("nan")
    most = torch.finfo(dtype).max
    for values, expected in (
        ({7: nan, 90: -nan, 3: inf}, 7),
        ({90: inf, 4000: inf}, 90),
        ({4999: 1.0, 300: 1.0, 301: 1.0}, 300),
        ({1: -0.0, 2: -0.0}, 0),
        ({4998: most, 4997: most / 2}, 4998),
        (dict.fromkeys(range(5000), -inf), 0),
    ):
        weight = torch.zeros((5000, 1), dtype=dtype)
        for place, value in values.items():
            weight[place] = value
        one = Problem([torch.ones((2, 1), dtype=dtype)], weight)
        with create(device, vocab_size=5000, hidden_size=1, dtype=dtype) as head:
            check_argmax(head, one)
            assert ids_of(head.config, one, 0).tolist() == [expected] * 2


def check_sm_budget(device: str, rows: int, max_sms: int | None) -> None:
    """Many more rows than CTAs fit."""
    with create(device, max_rows_per_rank=rows, max_sms=max_sms, vocab_size=500) as head:
        check_argmax(head, problem(head.config, [rows]))
        check_logits(head, problem(head.config, [rows - 1], 1))


def check_bad_input(device: str, elsewhere: str) -> None:
    """Refused before anything is launched; the group goes on."""
    with create(device, vocab_size=100) as head:
        one = problem(head.config, [3], bias=True).to(device)
        rows, options = one.rows[0], {"group": head}
        assert one.bias is not None
        for changes in (
            {"hidden": rows.to(elsewhere)},
            {"head_weight": one.weight.to(elsewhere)},
            {"bias": one.bias.to(elsewhere)},
        ):
            usual = {"hidden": rows, "head_weight": one.weight, "bias": one.bias}
            with pytest.raises(InputError, match=f"is on {elsewhere}"):
                sharded_argmax(**usual | changes, **options)  # type: ignore[arg-type]
        check_argmax(head, problem(head.config, [2]))
        assert head.stats().rounds == 1


class StaticHead:
    """Calls on fixed addresses, one for each of SIZES, as CUDA graphs can hold them."""

    def __init__(self, head: HeadGroup, device: str, weight: torch.Tensor) -> None:
        self._head, self._weight = head, weight.to(device)
        mine = head.config
        self._hidden = torch.zeros((CAPACITY, mine.hidden_size), dtype=mine.dtype, device=device)
        self.ids = torch.zeros(CAPACITY, dtype=torch.int64, device=device)
        self.logits = torch.zeros((CAPACITY, mine.vocab_size), dtype=mine.dtype, device=device)

    def warm_up(self) -> None:
        """torch's product once, so that its library is not loaded during a capture; ours not."""
        first, end = self._head.config.shard(self._head.config.tp_rank)
        torch.mm(self._hidden, self._weight[first:end].t())
        if self._hidden.is_cuda:
            torch.cuda.synchronize()

    def fill(self, rows: torch.Tensor) -> None:
        self._hidden[: len(rows)].copy_(rows)

    def call(self, size: int, *, all_logits: bool) -> Callable[[], None]:
        """Of so many rows: no host value changes from run to run."""

        def run() -> None:
            hidden = self._hidden[:size]
            if all_logits:
                found = sharded_logits(hidden, self._weight, group=self._head)
                self.logits[:size].copy_(found)
            else:
                self.ids[:size].copy_(sharded_argmax(hidden, self._weight, group=self._head))

        return run

    def replays(self, device: str) -> dict[tuple[int, bool], Callable[[], None]]:
        """By size and verb; on a GPU each is captured before it has ever run."""
        self.warm_up()
        calls = {
            (size, each): self.call(size, all_logits=each)
            for size in SIZES
            for each in (False, True)
        }
        if device == "cpu":
            return calls
        return {key: emulated.captured(call) for key, call in calls.items()}


def replay_rounds(head: HeadGroup, device: str, rounds: int, delay_s: float = 0.0) -> None:
    """Graphs of all sizes and both verbs in turns; other ranks replay other sizes and verbs."""
    mine = head.config
    rank, weight = mine.tp_rank, problem(mine, [], 99).weight
    static = StaticHead(head, device, weight)
    time.sleep(delay_s)
    replays = static.replays(device)
    for number in range(rounds):
        size = SIZES[(number + rank) % len(SIZES)]
        all_logits = (number >> rank & 1) == 1
        one = problem(mine, [size] * mine.tp_size, number)._replace(weight=weight)
        static.fill(one.rows[rank])
        replays[size, all_logits]()
        with emulated.naming(f"replay {number} of {size} rows on rank {rank}"):
            if all_logits:
                assert torch.equal(static.logits[:size].cpu(), logits_of(mine, one, rank))
            else:
                assert torch.equal(static.ids[:size].cpu(), ids_of(mine, one, rank))
    head.synchronize()
    assert head.stats().rounds == rounds


def check_replays(device: str, rounds: int, **values: Any) -> None:
    """Of one rank; captured from the first call on."""
    with create(device, **values) as head:
        replay_rounds(head, device, rounds)


class LoneRank:
    """One rank's kernels on memory of torch's, where compute-sanitizer knows every allocation."""

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        self.config = config(dtype=dtype)
        self.device = with_index(torch.device(device))
        layout = head_layout(self.config)
        self._memory = torch.zeros(
            layout.total_bytes + REGION_ALIGNMENT, dtype=torch.uint8, device=self.device
        )
        base = -(-self._memory.data_ptr() // REGION_ALIGNMENT) * REGION_ALIGNMENT
        self._regions = layout.channel_regions(0)
        self._offset = base - self._memory.data_ptr()
        executor = executor_for("cuda" if device == "cuda" else "host", self.device)
        self._launcher = HeadLaunches(executor, self.config)
        self._args: Any = head_arguments(self.config, self._regions, base, 0)
        self._args.is_compact, self._args.scale = 1, 1.0

    def _region(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        region = self._regions[name]
        start = self._offset + region.offset
        return self._memory[start : start + region.size_bytes].view(dtype)

    def check(self, one: Problem) -> None:
        """Gather, product, argmax, collect."""
        there, mine, args = one.to(self.device), self.config, self._args
        (rows,) = there.rows
        args.geometry.num_rows, args.geometry.row_bound = len(rows), CAPACITY
        args.hidden = rows.data_ptr()
        self._launcher.gather(args)
        shape = (len(rows), mine.hidden_size)
        gathered = self._region("head_rows", mine.dtype)[: rows.numel()].view(shape)
        shape = (len(rows), mine.vocab_size)
        logits = self._region("head_logits", mine.dtype)[: shape[0] * shape[1]].view(shape)
        # Not by cuBLAS, whose kernels a sanitizer would watch, for minutes, as it does ours.
        logits.copy_(torch.mm(gathered.cpu(), one.weight[: mine.vocab_size].t()))
        if there.bias is not None:
            logits += there.bias[: mine.vocab_size]
        ids = torch.full((len(rows),), -1, dtype=torch.int64, device=self.device)
        args.logits, args.output = logits.data_ptr(), ids.data_ptr()
        self._launcher.argmax(args)
        assert torch.equal(ids.cpu(), ids_of(mine, one, 0))
        output = torch.empty(shape, dtype=mine.dtype, device=self.device)
        args.output = output.data_ptr()
        self._launcher.collect(args)
        assert torch.equal(output.cpu(), logits_of(mine, one, 0))
        control: Any = structs()["LocalControl"]
        raw = self._region("local", torch.uint8).cpu().numpy().tobytes()
        assert control.from_buffer_copy(raw).fault == 0


# Ranks as processes; every function below is one rank's.


def process_replays(rank: int, size: int, device: str, rounds: int) -> int:
    """Each rank captures when it gets there, before any call has run; then replays."""
    with create_of(config(size, rank), dist.group.WORLD, device) as head:
        replay_rounds(head, device, rounds, 0.3 * rank)
        return head.stats().rounds


def process_missing(rank: int, size: int, device: str) -> tuple[Any, ...]:
    """The last rank never calls."""
    mine = config(size, rank, timeout_s=1.5)
    head = create_of(mine, dist.group.WORLD, device)
    if rank == size - 1:
        return ()
    one = problem(mine, [2] * size).to(device)
    try:
        sharded_argmax(one.rows[rank], one.weight, group=head)
        head.synchronize()
    except ExchangeTimeoutError as error:
        works = float(torch.ones(8, device=device).sum())
        return error.phase, error.ranks, works
    return ("no error",)
