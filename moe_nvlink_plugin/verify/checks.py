"""Rounds of one configuration, held to the reference bit for bit on every rank.

All rounds of a check run first, out of step as the protocol allows, and are compared afterwards.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch

from moe_nvlink_plugin import HeadConfig, HeadGroup, MoeAllToAll, env, reference
from moe_nvlink_plugin import sharded_argmax as shared_argmax
from moe_nvlink_plugin import sharded_logits as shared_logits
from moe_nvlink_plugin.errors import MismatchError
from moe_nvlink_plugin.groups import Group

from . import cases, compare
from .cases import Case, Inputs, Seen

#: The longest that a late rank sleeps at one place, in seconds: longer than a round, far below any
#: limit of a wait.
_LATEST_S = 0.003


class Check(Protocol):
    """A number of rounds that either all hold, or show what is wrong."""

    @property
    def name(self) -> str:
        """What it checks, as the report says it."""
        ...

    @property
    def rounds(self) -> int:
        """How many rounds."""
        ...

    def run(self, group: Group, device: torch.device) -> list[str]:
        """Run the rounds and compare. Collective.

        Returns:
            For each rank what is wrong there, or ""; equal on every rank.
        """
        ...


def run_together(
    group: Group,
    rounds: Callable[[], _Ran],
    compared: Callable[[list[Seen], list[list[_Shared]]], None],
) -> list[str]:
    """Run rounds, exchange what comparing takes, compare. Collective.

    Args:
        group: the ranks.
        rounds: runs this rank's part and returns what it saw.
        compared: gets this rank's rounds, and of each rank what it shares of each round.

    Returns:
        For each rank what is wrong there, or "".
    """
    ran = _Ran([], [])
    wrong = ""
    try:
        ran = rounds()
    except Exception as error:  # of any kind: the others wait for this rank's word below
        wrong = f"{type(error).__name__}: {error}"
    everyones = group.all_gather_object((wrong, ran.shared))
    if any(error for error, _shared in everyones):
        return [error for error, _shared in everyones]
    try:
        compared(ran.seen, [shared for _error, shared in everyones])
    except Exception as error:
        wrong = f"{type(error).__name__}: {error}"
    return group.all_gather_object(wrong)


class _Shared(NamedTuple):
    """What other ranks need of a rank's round: its slots, and rows if codes may differ."""

    slots: torch.Tensor
    near: Seen | None


class _Ran(NamedTuple):
    """What one rank saw, and what it shares of that, round by round."""

    seen: list[Seen]
    shared: list[_Shared]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rounds:
    """Rounds of one exchange.

    Attributes:
        name: what it checks.
        case: geometry and options. Its tokens are the most of each rank; all rounds but the first
            with each bound draw fewer.
        rounds: how many.
        small_tokens: of the configuration; None: all rounds or none, as the case says.
        bounds: of the rounds in turn (max_tokens of dispatch); (): the capacity.
        beside: by the verbs that run beside their caller.
        late: each rank sleeps before some of its verbs, and before it reads what has arrived. One
            rank, which has no tokens and so nobody's rows to wait for, goes ahead.
        loaded: something else keeps the device busy.
        captured: the rounds are replays of one CUDA graph.
        pdl: False: without programmatic dependent launch.
        padded: some tokens are padding.
        quantised: the caller quantises the rows of odd rounds.
        adds: of the rounds in turn (names of ADDS); (): as the case says.
        leaves_at: the first round without the ranks that the case leaves out; 0: all rounds are.
            In the round before only they have tokens, which they still fetch when the others go on.
    """

    name: str
    case: Case
    rounds: int
    small_tokens: int | None = None
    bounds: tuple[int, ...] = ()
    beside: bool = False
    late: bool = False
    loaded: bool = False
    captured: bool = False
    pdl: bool = True
    padded: bool = False
    quantised: bool = False
    adds: tuple[str, ...] = ()
    leaves_at: int = 0

    def run(self, group: Group, device: torch.device) -> list[str]:
        """Run the rounds and compare. Collective; as Check.run."""
        drawn = [self._drawn(number) for number in range(self.rounds)]
        near = device.type == "cuda" and self.case.recipe == "nvfp4"

        def rounds() -> _Ran:
            seen = self._seen(drawn, group, device)
            return _Ran(seen, [_Shared(one.send_slots, one if near else None) for one in seen])

        def compared(seen: list[Seen], everyones: list[list[_Shared]]) -> None:
            for number, (drawn_round, mine) in enumerate(zip(drawn, seen, strict=True)):
                shared = [of_rank[number] for of_rank in everyones]
                try:
                    _compare(drawn_round, group.rank, mine, shared, near=near)
                except MismatchError as error:
                    raise MismatchError(f"round {number}: {error}") from error

        return run_together(group, rounds, compared)

    def _drawn(self, number: int) -> _Drawn:
        """Return the inputs of all ranks in a round; every rank draws the same."""
        draw = random.Random(f"{self.name} {number}")
        bound = self.bounds[number % len(self.bounds)] if self.bounds else self.case.capacity
        # Once with each bound all tokens go to one rank, whose every slot is then taken.
        is_full = number < max(len(self.bounds), 1)
        routing = "to one rank" if is_full else self.case.routing
        case = dataclasses.replace(self.case, capacity=bound, name=self.name, routing=routing)
        most = [min(tokens, bound) for tokens in case.tokens]
        tokens = most if is_full else [draw.randint(0, limit) for limit in most]
        if self.late and not is_full and case.ep_size > 1:
            # Where rank 0's slice begins, each bound has slots of ranks that still read.
            tokens[0 if number % 2 else draw.randrange(case.ep_size)] = 0
        if self.adds:
            case = dataclasses.replace(case, add=self.adds[number % len(self.adds)])
        if number < self.leaves_at:
            case = dataclasses.replace(case, left_out=())
        if number == self.leaves_at - 1:
            leavers = self.case.left_out
            tokens = [most[rank] if rank in leavers else 0 for rank in range(case.ep_size)]
        inputs = cases.make_inputs(case, tuple(tokens), seed=draw.randrange(2**16))
        if self.captured:
            inputs = [_filled_up(mine, bound) for mine in inputs]
        padding = None
        if self.padded:
            generator = torch.Generator().manual_seed(number)
            padding = [torch.rand(len(mine.topk_ids), generator=generator) < 0.3 for mine in inputs]
        by_caller = self.quantised and number % 2 == 1
        return _Drawn(case, inputs, padding, _counted(case, number), by_caller)

    def _seen(self, drawn: list[_Drawn], group: Group, device: torch.device) -> list[Seen]:
        config = self.case.config(group.rank)
        if self.small_tokens is not None:
            config = dataclasses.replace(config, small_tokens=self.small_tokens)
        launch = contextlib.nullcontext() if self.pdl else env.without_pdl()
        load = _load(device) if self.loaded else contextlib.nullcontext()
        with launch, load, MoeAllToAll.create(config, group, device) as exchange:
            if self.captured:
                return _replayed(exchange, drawn, device)
            return self._in_flight(exchange, drawn, device)

    def _in_flight(
        self, exchange: MoeAllToAll, drawn: list[_Drawn], device: torch.device
    ) -> list[Seen]:
        """Run the rounds; one of each channel is in flight at once, the first ends last."""
        seen: dict[int, Seen] = {}

        def run(number: int, end: int) -> None:
            def others() -> None:
                if number + 1 < end:
                    run(number + 1, end)

            seen[number] = self._round(exchange, number, drawn[number], device, others)

        for first in range(0, len(drawn), self.case.num_channels):
            run(first, min(first + self.case.num_channels, len(drawn)))
        return [seen[number] for number in range(len(drawn))]

    def _round(
        self,
        exchange: MoeAllToAll,
        number: int,
        drawn: _Drawn,
        device: torch.device,
        between: Callable[[], None],
    ) -> Seen:
        rank = exchange.config.ep_rank
        padding = None if drawn.padding is None else drawn.padding[rank].to(device)
        before, arrived = (lambda: None), between
        if self.late:
            before = sleep = _sleeper(rank, number)

            def arrived() -> None:
                between()
                sleep()

        return cases.run_round(
            exchange,
            drawn.inputs[rank].to(device),
            zero_copy=number % 2 == 0,
            add=drawn.case.add,
            scale=self.case.scale,
            beside=self.beside,
            post_quant=drawn.by_caller,
            before=before,
            between=arrived,
            channel=number % self.case.num_channels,
            max_tokens=drawn.case.capacity,
            active_ranks=drawn.case.mask(rank, device),
            is_padding=padding,
            expert_counts=None if drawn.counts is None else drawn.counts[rank].to(device),
        )


class _Drawn(NamedTuple):
    """One round's case, with its bound as capacity, and what all ranks give dispatch.

    Attributes:
        case: with its bound as capacity.
        inputs: of each rank.
        padding: of each rank; None: no token is padding.
        counts: what each rank's caller has counted; None: dispatch counts, if anyone.
        by_caller: the caller quantises the rows.
    """

    case: Case
    inputs: list[Inputs]
    padding: list[torch.Tensor] | None
    counts: list[torch.Tensor] | None
    by_caller: bool

    def as_they_travel(self) -> list[Inputs]:
        """Return the inputs with the ids by which tokens travel: padding has none."""
        if self.padding is None:
            return self.inputs
        everyones = [mine.topk_ids for mine in self.inputs]
        ids = reference.without_padding(everyones, self.padding)
        return [mine._replace(topk_ids=own) for mine, own in zip(self.inputs, ids, strict=True)]


def _compare(
    drawn: _Drawn, rank: int, seen: Seen, shared: Sequence[_Shared], *, near: bool
) -> None:
    """Hold what one rank saw in a round to the reference."""
    case, inputs = drawn.case, drawn.as_they_travel()
    expected = compare.expected_received(case, inputs)
    slots = [one.slots for one in shared]
    # On a GPU torch makes other NaN of the caller's rows than here.
    compare.check_received_by(case, expected, rank, seen, slots, near=near, any_nan=drawn.by_caller)
    hidden = None
    if near:
        everyones = [one.near for one in shared if one.near is not None]
        hidden = compare.received_activations(case, everyones, rank)
    mine = cases.among_active(case, inputs)[rank]
    compare.check_combined_by(case, mine, rank, seen, hidden)
    if case.num_expert_counts:
        compare.check_counts_by(case, inputs, rank, seen, drawn.counts)


def _counted(case: Case, number: int) -> list[torch.Tensor] | None:
    """Return words that the callers of odd rounds give as their counts."""
    if not case.num_expert_counts or number % 2 == 0:
        return None
    generator = torch.Generator().manual_seed(number)
    shape = (case.ep_size, case.num_expert_counts)
    words = torch.randint(-(2**31), 2**31, shape, generator=generator)
    return list(words.to(torch.int32))


def _filled_up(inputs: Inputs, count: int) -> Inputs:
    """Return inputs of `count` tokens; those behind the given ones go nowhere."""

    def longer(tensor: torch.Tensor, value: int) -> torch.Tensor:
        filled = tensor.new_full((count, *tensor.shape[1:]), value)
        filled[: len(tensor)] = tensor
        return filled

    hidden, ids, weights, extras = inputs
    extras = tuple(longer(extra, 0) for extra in extras)
    return Inputs(longer(hidden, 0), longer(ids, -1), longer(weights, 0), extras)


def _sleeper(rank: int, number: int) -> Callable[[], None]:
    """Return what makes this rank late at some places."""
    draw = random.Random(1000 * number + rank)

    def sleep() -> None:
        if draw.random() < 0.5:
            time.sleep(draw.uniform(0, _LATEST_S))

    return sleep


def _replayed(exchange: MoeAllToAll, drawn: Sequence[_Drawn], device: torch.device) -> list[Seen]:
    """Capture one round, and replay it with each round's inputs."""
    rank = exchange.config.ep_rank
    static = drawn[0].inputs[rank].to(device)
    cases.run_round(exchange, static)  # loads torch's own kernels, which a capture may not
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        seen = cases.launch_round(exchange, static)
    found = []
    for one in drawn:
        for target, source in zip(_tensors(static), _tensors(one.inputs[rank]), strict=True):
            target.copy_(source)
        graph.replay()
        found.append(cases.on_cpu(seen))
    exchange.synchronize()
    return found


def _tensors(inputs: Inputs) -> list[torch.Tensor]:
    hidden, ids, weights, extras = inputs
    return [hidden, ids, weights, *extras]


@contextlib.contextmanager
def _load(device: torch.device) -> Iterator[None]:
    """Multiply matrices beside what the block does: on another stream, or another thread."""
    ends = threading.Event()

    def multiply() -> None:
        size = 4096 if device.type == "cuda" else 256
        matrix = torch.ones((size, size), device=device)
        stream = None
        if device.type == "cuda":
            stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        while not ends.is_set():
            with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
                torch.mm(matrix, matrix)
            if stream is not None:
                stream.synchronize()

    thread = threading.Thread(target=multiply, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Head:
    """Calls of a shared LM head, ids and logits in turn.

    Rows and head hold small integers, so every order of additions gives the same logits, the signs
    of zeros apart.
    """

    name: str
    config: HeadConfig
    rounds: int

    def run(self, group: Group, device: torch.device) -> list[str]:
        """Run the calls and compare. Collective; as Check.run."""

        def rounds() -> _Ran:
            config = dataclasses.replace(self.config, tp_rank=group.rank)
            weight = self._integers((config.vocab_size, config.hidden_size), "head").to(device)
            wrong = None
            with HeadGroup.create(config, group, device) as head:
                for number in range(self.rounds):
                    try:
                        self._call(head, weight, number)
                    except MismatchError as error:  # after the others, who would wait in vain
                        wrong = wrong or error
                head.synchronize()
            if wrong is not None:
                raise wrong
            return _Ran([], [])

        return run_together(group, rounds, lambda _seen, _shared: None)

    def _call(self, head: HeadGroup, weight: torch.Tensor, number: int) -> None:
        rank, most = head.config.tp_rank, head.config.max_rows_per_rank
        rows = random.Random(f"{number} {rank}").randint(0, most)
        hidden = self._integers((rows, head.config.hidden_size), f"{number} {rank} rows")
        hidden = hidden.to(weight.device)
        expected = hidden.float() @ weight.float().T
        what = f"{self.name}, call {number}, rank {rank}"
        if number % 2:
            logits = shared_logits(hidden, weight, group=head)
            # The order of additions decides the sign of a sum of zeros; + 0.0 drops it.
            rounded = expected.to(logits.dtype).cpu()
            compare.assert_same_bits(logits.cpu() + 0.0, rounded + 0.0, what)
        else:
            ids = shared_argmax(hidden, weight, group=head)
            rounded = expected.to(weight.dtype).cpu()
            largest = rounded == rounded.amax(-1, keepdim=True)
            places = torch.arange(rounded.shape[1])
            first = torch.where(largest, places, len(places)).amin(-1)
            compare.assert_same_bits(ids.cpu(), first, what)

    def _integers(self, shape: tuple[int, int], seed: str) -> torch.Tensor:
        generator = torch.Generator().manual_seed(random.Random(seed).randrange(2**31))
        # Few of a row's elements differ from 0: sums stay below 256, which bfloat16 holds exactly.
        # Bytes, because a head of 72 ranks has half a billion elements.
        values = torch.randint(-2, 3, shape, generator=generator, dtype=torch.int8)
        kept = torch.randint(0, 10, shape, generator=generator, dtype=torch.int8) == 0
        return (values * kept).to(self.config.dtype)
