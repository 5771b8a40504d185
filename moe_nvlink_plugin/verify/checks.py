"""Rounds of one configuration, held to the reference bit for bit on every rank.

As many rounds as memory holds run first, out of step as the protocol allows, and are compared
afterwards: all rounds of a check, unless they have gigabytes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
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


#: Bytes of rows that a rank keeps until they are compared, beside those of one round.
_KEPT_BYTES = 2**30


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
    batches: Iterator[_Ran],
    compared: Callable[[_Ran, list[list[_Shared]]], None],
) -> list[str]:
    """Run rounds, exchange what comparing takes, compare, batch by batch. Collective.

    Args:
        group: the ranks.
        batches: runs this rank's part of a batch whenever it is asked for the next; equally many on
            every rank.
        compared: gets this rank's rounds of a batch, and of each rank what it shares of each.

    Returns:
        For each rank what is wrong there, or "".
    """
    with contextlib.closing(_closable(batches)) as parts:
        while True:
            ran, wrong = None, ""
            try:
                ran = next(parts, None)
            except Exception as error:  # of any kind: the others wait for this rank's word below
                wrong = _said(error)
            everyones = group.all_gather_object((wrong, None if ran is None else ran.shared))
            if ran is None or any(error for error, _shared in everyones):
                return [error for error, _shared in everyones]
            try:
                compared(ran, [shared for _error, shared in everyones])
            except Exception as error:
                wrong = _said(error)
            told = group.all_gather_object(wrong)
            if any(told):
                return told


def _closable(batches: Iterator[_Ran]) -> Generator[_Ran, None, None]:
    yield from batches


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def is_mismatch(wrong: str) -> bool:
    """Return whether what is wrong on a rank is a bit, and not that its rounds did not end."""
    return wrong.startswith(f"{MismatchError.__name__}:")


def _is_near(case: Case, device: torch.device) -> bool:
    """Return whether codes may be one away, as compare.py says of nvfp4 on a GPU."""
    return device.type == "cuda" and case.recipe == "nvfp4"


class _Shared(NamedTuple):
    """What other ranks need of a rank's round: its slots, and rows if codes may differ.

    Attributes:
        slots: where its tokens went.
        packed: what it saw, with payloads as bytes, because torch pickles no FP8 tensor.
        dtypes: of the payloads.
    """

    slots: torch.Tensor
    packed: Seen | None = None
    dtypes: tuple[torch.dtype, ...] = ()

    @classmethod
    def of(cls, seen: Seen | None, *, near: bool) -> _Shared:
        """Return what others need; of a rank that has left, nothing."""
        if seen is None:
            return cls(torch.empty((0, 1), dtype=torch.int32))
        if not near:
            return cls(seen.send_slots)
        packed = tuple(payload.contiguous().view(torch.uint8) for payload in seen.payloads)
        dtypes = tuple(payload.dtype for payload in seen.payloads)
        return cls(seen.send_slots, seen._replace(payloads=packed), dtypes)

    def seen(self) -> Seen | None:
        """Return what the rank saw, if others need it."""
        if self.packed is None:
            return None
        typed = zip(self.packed.payloads, self.dtypes, strict=True)
        return self.packed._replace(payloads=tuple(rows.view(dtype) for rows, dtype in typed))


class _Ran(NamedTuple):
    """What one rank saw in a batch of rounds, and what it shares of that, round by round."""

    seen: list[Seen | None]  # None: this rank has left
    shared: list[_Shared]
    drawn: list[_Drawn]
    first: int = 0  # number of the batch's first round


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
        near = _is_near(self.case, device)

        def compared(ran: _Ran, everyones: list[list[_Shared]]) -> None:
            for place, (drawn, mine) in enumerate(zip(ran.drawn, ran.seen, strict=True)):
                shared = [of_rank[place] for of_rank in everyones]
                if mine is None:
                    continue
                try:
                    _compare(drawn, group.rank, mine, shared, near=near)
                except MismatchError as error:
                    raise MismatchError(f"round {ran.first + place}: {error}") from error

        return run_together(group, self._batches(group, device, near=near), compared)

    def _batches(self, group: Group, device: torch.device, *, near: bool) -> Iterator[_Ran]:
        """Run as many rounds at a time as memory holds. Each batch is collective."""
        config = self.case.config(group.rank)
        if self.small_tokens is not None:
            config = dataclasses.replace(config, small_tokens=self.small_tokens)
        launch = contextlib.nullcontext() if self.pdl else env.without_pdl()
        load = _load(device) if self.loaded else contextlib.nullcontext()
        replay = None
        with launch, load, MoeAllToAll.create(config, group, device) as exchange:
            for first in range(0, self.rounds, self._at_a_time()):
                end = min(first + self._at_a_time(), self.rounds)
                drawn = [self._drawn(number) for number in range(first, end)]
                seen: list[Seen | None]
                if self.captured:
                    own = [one.inputs[group.rank] for one in drawn]
                    replay = replay or _captured(exchange, own[0].to(device))
                    seen = [replay(mine) for mine in own]
                    exchange.synchronize()
                else:
                    seen = self._in_flight(exchange, first, drawn, device)
                shared = [_Shared.of(one, near=near) for one in seen]
                yield _Ran(seen, shared, drawn, first)

    def _at_a_time(self) -> int:
        """Return how many rounds run before they are compared; each channel has one of them."""
        case = self.case
        row_bytes = case.hidden_size * case.dtype.itemsize
        # Rows that all ranks send, and rows that this rank receives.
        round_bytes = 2 * case.ep_size * case.capacity * row_bytes
        turns = _KEPT_BYTES // (round_bytes * case.num_channels)
        return max(1, turns) * case.num_channels

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

    def _in_flight(
        self, exchange: MoeAllToAll, start: int, drawn: list[_Drawn], device: torch.device
    ) -> list[Seen | None]:
        """Run the rounds; one of each channel is in flight at once, the first ends last."""
        seen: dict[int, Seen | None] = {}
        is_leaver = exchange.config.ep_rank in self.case.left_out

        def run(place: int, end: int) -> None:
            def others() -> None:
                if place + 1 < end:
                    run(place + 1, end)

            number = start + place
            if is_leaver and 0 < self.leaves_at <= number:
                seen[place] = None  # ranks that are left out must not call
                others()
            else:
                seen[place] = self._round(exchange, number, drawn[place], device, others)

        for first in range(0, len(drawn), self.case.num_channels):
            run(first, min(first + self.case.num_channels, len(drawn)))
        return [seen[place] for place in range(len(drawn))]

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
        everyones = [told for one in shared if (told := one.seen()) is not None]
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


def _captured(exchange: MoeAllToAll, static: Inputs) -> Callable[[Inputs], Seen]:
    """Capture one round; return what replays it with other inputs."""
    cases.run_round(exchange, static)  # loads torch's own kernels, which a capture may not
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        seen = cases.launch_round(exchange, static)

    def replay(inputs: Inputs) -> Seen:
        for target, source in zip(_tensors(static), _tensors(inputs), strict=True):
            target.copy_(source)
        graph.replay()
        return cases.on_cpu(seen)

    return replay


def _tensors(inputs: Inputs) -> list[torch.Tensor]:
    hidden, ids, weights, extras = inputs
    return [hidden, ids, weights, *extras]


@contextlib.contextmanager
def _load(device: torch.device) -> Iterator[None]:
    """Multiply matrices beside what the block does: on another stream, or another thread."""
    ends = threading.Event()
    failed: list[Exception] = []

    def multiply() -> None:
        try:
            run_until_the_end()
        except Exception as error:  # of any kind: the device was not busy
            failed.append(error)

    def run_until_the_end() -> None:
        size = 4096 if device.type == "cuda" else 256
        matrix = torch.ones((size, size), dtype=torch.float32, device=device)
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
    if failed:
        raise failed[0]


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

        def batches() -> Iterator[_Ran]:
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
            yield _Ran([], [], [])

        return run_together(group, batches(), lambda _ran, _shared: None)

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
