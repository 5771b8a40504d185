"""Rounds in the form in which frameworks ask for them, device by name.

vLLM's adapter passes a mask of ranks and padding in every call and takes ids "elsewhere"; others
take counts per expert, laid-out scales, or verbs beside the caller. tests/gpu/test_users_form.py
runs these on "cuda"; tests/kernels/exchange/test_users_form.py and tests/ptx on the CPU, so that
they themselves have been run before a GPU is there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import signal
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_nvlink_plugin import MoeAllToAll, rank_mask, reference
from moe_nvlink_plugin.errors import ExchangeStateError, ExchangeTimeoutError
from moe_nvlink_plugin.exchange import scales_layout
from moe_nvlink_plugin.verify import cases, compare
from moe_nvlink_plugin.verify.cases import Case, Inputs, Seen
from tests.kernels.exchange.test_received import filled_places, laid_out
from tests.support import emulated, real_path
from tests.support.emulated import EmulatedRanks, StaticRounds

#: One rank through the product's own path, as vLLM's adapter asks, and with counts.
ONE_RANK = dataclasses.replace(
    real_path.ONE_RANK, name="users' form", received_ids="elsewhere", num_expert_counts=12
)
SMALL = dataclasses.replace(ONE_RANK, name="users' form, small", small=True)
LAID_OUT = dataclasses.replace(
    cases.with_formats(ONE_RANK, "fp8_block"), scales_layout="column_major"
)

# Many ranks in one launch.


def check_counts(name: str, case: Case, **options: Any) -> None:
    """The counts per expert of two rounds; staging and counters are clean at the end.

    Before, the host's look at them would race with the peers' next round.
    """
    inputs = [cases.make_inputs(case, seed=seed) for seed in range(2)]
    with contextlib.closing(emulated.make_backend(name, case, **options)) as backend:
        ranks = EmulatedRanks.of_case(case, backend)
        for of_round in inputs:
            ranks.run_round(of_round)
            check_counts_of_round(case, of_round, ranks)
        for rank, region in itertools.product(
            range(case.ep_size), ("expert_counts_staging", "expert_counters")
        ):
            size = ranks.regions[0][region].size_bytes
            assert not ranks._bytes(rank, region, size, 0).any(), region


def check_counts_of_round(case: Case, inputs: Sequence[Inputs], ranks: EmulatedRanks) -> None:
    """What each rank has received of a round's counts."""
    everyones = [mine.topk_ids for mine in inputs]
    for rank in range(case.ep_size):
        active = case.active_ranks(rank)
        wanted = reference.expert_counts(case.config(0), everyones, None, active)
        raw = ranks._bytes(rank, "expert_counts", wanted.nbytes, 0)
        found = raw.view(torch.int32).view(wanted.shape).cpu()
        compare.assert_same_bits(found, wanted, f"rank {rank}")


def check_laid_out_scales(name: str, case: Case, **options: Any) -> None:
    """The region that dispatch lays out holds the linear scales that travelled, bit for bit."""
    with contextlib.closing(emulated.make_backend(name, case, **options)) as backend:
        ranks = EmulatedRanks.of_case(case, backend)
        row = ranks.rows["recv_scales"]
        inputs = [mine.to(backend.device) for mine in cases.make_inputs(case)]
        for rank, mine in enumerate(ranks.dispatch(inputs)):
            config = ranks.configs[rank]
            num_slots = config.ep_size * case.capacity
            size = scales_layout.laid_out_bytes(config, row, num_slots)
            raw = ranks._bytes(rank, scales_layout.LAID_OUT, size, 0).cpu()
            typed = raw.view(scales_layout.dtype_of(config, row))
            found = typed.as_strided(*scales_layout.strides(config, row, num_slots))
            assert mine.scales is not None
            linear, counts = mine.scales.cpu(), mine.recv_counts.cpu()
            slot = torch.arange(len(linear))
            filled = slot % case.capacity < counts[slot // case.capacity]
            assert bool(filled.any())
            here = filled_places(case.scales_layout, filled, row.elements)
            expected = laid_out(case.scales_layout, linear)
            compare.assert_same_bits(
                found[here], expected[here], f"{case.scales_layout}, rank {rank}"
            )
        ranks.check_faults()


def check_leaving(
    name: str, case: Case, rounds: int, *, pdl: bool = False, ctas: int = 2, **options: Any
) -> None:
    """Replays of one graph; in the middle the masks, which it reads, leave out case.left_out.

    Those go on in a round of their own.
    """
    inputs = emulated.varying_inputs(case, 2 * rounds)
    with contextlib.closing(
        emulated.make_backend(name, case, ctas=ctas, pdl=pdl, **options)
    ) as backend:
        ranks = EmulatedRanks.of_case(case, backend)
        everybody = rank_mask(range(case.ep_size), case.ep_size, backend.device)
        ranks._masks = [everybody.clone() for _ in range(case.ep_size)]
        static = StaticRounds(ranks)
        static.warm_up()
        on_gpu = backend.device.type == "cuda"
        run = emulated.captured(static.run) if on_gpu else static.run
        for number, of_round in enumerate(inputs):
            if number == rounds:
                for rank, mask in enumerate(ranks._masks):
                    left = case.mask(rank, backend.device)
                    assert mask is not None
                    assert left is not None
                    mask.copy_(left)
            static.fill([mine.to(backend.device) for mine in of_round])
            run()
            outputs = [output.cpu() for output in static.outputs]
            seen_by = of_round if number < rounds else cases.among_active(case, of_round)
            with emulated.naming(f"round {number}"):
                static.check(case, seen_by, outputs)
        ranks.check_faults()


# One rank, the product's own path.


class UsersLayer(real_path.StaticLayer):
    """A round on fixed addresses with padding and a mask of ranks.

    Attributes:
        is_padding: tokens that go nowhere in spite of their ids.
        seen: what the round has received, copied on the device.
        counts: rows per expert, copied too; None if the layer has none.
    """

    def __init__(self, layer: MoeAllToAll, device: str) -> None:
        super().__init__(layer, device)
        self.is_padding = torch.zeros(len(self.ids), dtype=torch.bool, device=device)
        self.seen: Seen | None = None
        self.counts: torch.Tensor | None = None

    def fill(self, inputs: Inputs) -> None:
        """This round's tokens; which are padding depends on their weights alone."""
        super().fill(inputs)
        self.is_padding.copy_((self.weights[:, 0] * 1e4).long() % 3 == 0)

    def warm_up(self) -> None:
        """One round before the capture, as frameworks have it: torch's kernels are loaded then."""
        self.run()

    def run(self) -> None:
        """Dispatch, experts, combine: no host value changes from run to run."""
        layer = self._layer
        received = layer.dispatch(
            self.hidden,
            self.ids,
            self.weights,
            global_scale=cases.global_scale(layer.config, self.hidden.device),
            is_padding=self.is_padding,
            active_ranks=layer.active_ranks,
        )
        copies = [payload.clone() for payload in cases.received_payloads(received)]
        counts, ids = received.recv_counts.clone(), received.topk_ids.clone()
        if received.expert_counts is not None:
            self.counts = received.expert_counts.clone()
        region = layer.combine_input()
        region.view(torch.uint8).fill_(0xFF)
        rows = region.copy_(real_path.expert_rows(layer, received))
        received.hidden_states.view(torch.uint8).fill_(0xFF)
        received.topk_ids.fill_(1)
        layer.combine(rows, received.metadata, output=self.output)
        slots = received.metadata.send_slots
        self.seen = Seen(counts, ids, tuple(copies), slots, self.output)

    def filled(self) -> Inputs:
        """What the fixed buffers hold, on the CPU, with padding by its ids."""
        ids = torch.where(self.is_padding[:, None], -1, self.ids)
        hidden, weights = (each.to("cpu", copy=True) for each in (self.hidden, self.weights))
        return Inputs(hidden, ids.cpu(), weights, ())


def check_users_rounds(device: str, rounds: int, case: Case, *, capture: bool) -> None:
    """Rounds with a mask and padding, one after the other or as replays of one graph."""
    compared = emulated.with_ctas(case, 1 if device == "cpu" else 2)
    with real_path.create(case, device) as layer:
        static = UsersLayer(layer, device)
        run = real_path.replayable(static, device) if capture else static.run
        for number, (inputs,) in enumerate(emulated.varying_inputs(case, rounds)):
            static.fill(inputs.to(device))
            run()
            given = static.filled()
            with emulated.naming(f"round {number}"):
                check_seen(compared, static, given, near=device == "cuda")
        assert layer.stats().rounds == rounds + int(capture)


def check_seen(case: Case, static: UsersLayer, given: Inputs, *, near: bool) -> None:
    """A round of one rank against the oracle, counts included."""
    assert static.seen is not None
    counts, ids, payloads, slots, output = static.seen[:5]
    copies = tuple(payload.cpu() for payload in payloads)
    seen = Seen(counts.cpu(), ids.cpu(), copies, slots.cpu(), output.cpu())
    emulated.check_round(case, [given], [seen], near=near)
    if case.num_expert_counts:
        assert static.counts is not None
        wanted = reference.expert_counts(case.config(0), [given.topk_ids])
        compare.assert_same_bits(static.counts.cpu(), wanted, "counts per expert")


class DirectRound(real_path.StaticLayer):
    """A dispatch beside the caller and, right after its wait, the combine: no kernel between.

    The experts' rows are there before: nobody else reads the memory of one rank alone.

    Attributes:
        rows: what combine takes, by slot.
        slots: where dispatch has put the tokens.
    """

    def __init__(self, layer: MoeAllToAll, device: str, *, combines_beside: bool) -> None:
        super().__init__(layer, device)
        self._combines_beside = combines_beside
        self.rows = torch.zeros_like(layer.combine_input())
        self.slots = torch.empty(0, dtype=torch.int32)

    def number(self, turn: int) -> None:
        """Gives the rows of every slot and round other values, exact in bf16."""
        slots, columns = torch.arange(len(self.rows)), torch.arange(self.rows.shape[1])
        self.rows.copy_((37 * slots[:, None] + columns + 101 * turn) % 251 + 1)

    def warm_up(self) -> None:
        """One round before the capture."""
        self.run()

    def run(self) -> None:
        layer = self._layer
        region = layer.combine_input().copy_(self.rows)
        if self.rows.is_cuda:
            cuda: Any = torch.cuda  # torch ships no types for what is used here
            # The host is ahead by this: both verbs are in their streams before the first runs.
            cuda._sleep(300_000)
        sent = layer.dispatch_async(self.hidden, self.ids, self.weights)
        metadata = sent.wait().metadata
        if self._combines_beside:
            layer.combine_async(region, metadata, output=self.output).wait()
        else:
            layer.combine(region, metadata, output=self.output)
        self.slots = metadata.send_slots

    def check(self, case: Case) -> None:
        """Combine has taken the slots of this round's dispatch, and the rows in them."""
        place = self.slots.cpu().long().amax(1)
        ids, rows = self.ids.cpu(), self.rows.cpu()
        has_expert = ((ids >= 0) & (ids < case.num_experts)).any(1)
        assert torch.equal(place >= 0, has_expert), "slots of other tokens"
        expected = torch.where(has_expert[:, None], rows[place.clamp_min(0)], 0)
        found = self.output.cpu()
        differs = (found != expected).any(1).nonzero().flatten().tolist()
        assert not differs, f"tokens {differs} have rows of other slots or rounds"


def check_direct_rounds(
    device: str, rounds: int, case: Case, *, combines_beside: bool, capture: bool
) -> None:
    """Rounds of DirectRound, one after the other or as replays of one graph."""
    with real_path.create(case, device) as layer:
        direct = DirectRound(layer, device, combines_beside=combines_beside)
        run = real_path.replayable(direct, device) if capture else direct.run
        for turn, (inputs,) in enumerate(emulated.varying_inputs(case, rounds)):
            direct.fill(inputs.to(device))
            direct.number(turn)
            run()
            with emulated.naming(f"round {turn}"):
                direct.check(case)
        layer.synchronize()


def check_replayed_dispatch(
    device: str, case: Case, capture: Callable[[Callable[[], None]], Callable[[], None]] | None
) -> None:
    """A graph that holds a dispatch without its combine: the second replay is a fault.

    Args:
        device: of the layer.
        case: of one rank.
        capture: makes a graph and returns its replay. None, on CPU ranks, which have no graphs: the
            exchange forgets that it has dispatched.
    """
    with real_path.create(case, device) as layer:
        static = real_path.StaticLayer(layer, device)
        (inputs,) = cases.make_inputs(case, (5,))
        static.fill(inputs.to(device))
        static.warm_up()
        static.run()

        kept = []  # a replay writes there; a stand-in's captures keep no memory

        def dispatch() -> None:
            given = Inputs(static.hidden, static.ids, static.weights, ())
            kept.append(cases.dispatch(layer, given))

        def forgetful() -> None:
            layer._layer.channel(0).state.value = 0
            dispatch()

        replay = forgetful if capture is None else capture(dispatch)
        replay()
        layer.synchronize()
        assert layer.failure() is None
        with pytest.raises(ExchangeStateError, match="dispatch of epoch 2 again without its comb"):
            _replay_and_look(replay, layer)
        assert isinstance(layer.failure(), ExchangeStateError)


def _replay_and_look(replay: Callable[[], None], layer: MoeAllToAll) -> None:
    replay()  # on CPU ranks it raises
    layer.synchronize()


# Ranks as processes.

#: How long a survivor waits for the rank that has died, and each replay for a survivor. On one GPU
#: a survivor has once been late by more than 4 s.
DEATH_S = {"cuda": 4.0, "cpu": 6.0}
ROUNDS_BEFORE_DEATH, ROUNDS_AFTER = 3, 3
#: How often a survivor calls mask() at most. Each call lasts up to twice DEATH_S.
MOST_CALLS = 3


def of_processes(ep_size: int, *, small: bool) -> Case:
    """real_path.of_processes in the users' form."""
    case = real_path.of_processes(ep_size, small=small)
    counts = case.num_experts
    return dataclasses.replace(case, received_ids="elsewhere", num_expert_counts=counts)


@dataclasses.dataclass
class Survived:
    """What a survivor returns: the error's ranks and its replays.

    Attributes:
        given: what it filled in, per replay.
        outputs: what it got out.
    """

    named: tuple[int, ...] = ()
    works: float = 0.0
    given: list[Inputs] = dataclasses.field(default_factory=list)
    outputs: list[torch.Tensor] = dataclasses.field(default_factory=list)


def process_dies(ep_rank: int, ep_size: int, device: str, small: bool) -> Survived:
    """Replays; the last rank is killed while its dispatch runs; the others mask it and replay."""
    case = of_processes(ep_size, small=small)
    limits = {"timeout_s": DEATH_S[device], "first_timeout_s": real_path.WAIT_S[device]}
    layer = real_path.create(case, device, dist.group.WORLD, **limits)
    survived = Survived()
    rounds = emulated.varying_inputs(case, ROUNDS_BEFORE_DEATH + ROUNDS_AFTER)
    dead = ep_size - 1
    with layer:
        static = UsersLayer(layer, device)
        replay = real_path.replayable(static, device)
        dist.barrier()  # a capture ends start-up, and ranks load torch's kernels when they can

        def one_round(of_round: list[Inputs]) -> None:
            static.fill(of_round[ep_rank].to(device))
            replay()
            survived.given.append(static.filled())
            survived.outputs.append(static.output.cpu().clone())
            layer.synchronize()

        for of_round in rounds[:ROUNDS_BEFORE_DEATH]:
            one_round(of_round)
        inputs = rounds[0][ep_rank].to(device)
        with pytest.raises(ExchangeTimeoutError) as caught:
            _rounds_until_an_error(layer, inputs, dies=ep_rank == dead)
        survived.named = caught.value.ranks
        survived.works = float(torch.ones(8, device=device).sum())
        _mask(layer, dead)
        for of_round in rounds[ROUNDS_BEFORE_DEATH:]:
            one_round(of_round)
    return survived


def _rounds_until_an_error(layer: MoeAllToAll, inputs: Inputs, *, dies: bool) -> None:
    """On a GPU the rank dies while its kernel waits, or before it has begun: both are deaths."""
    for _round in range(3):
        received = layer.dispatch(*inputs[:3], active_ranks=layer.active_ranks)
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        layer.combine(layer.combine_input().zero_(), received.metadata)
        layer.synchronize()


def _mask(layer: MoeAllToAll, dead: int) -> None:
    """Calls mask() until the survivors have met, as its documentation asks.

    One survivor may be later than another by more than mask() waits: a test has no bound for how
    long the machine holds up one of them while it clears away the process that was killed.
    """
    for calls in range(1, MOST_CALLS + 1):
        try:
            layer.mask(dead)
        except ExchangeTimeoutError as error:
            # Nobody waits in mask() for the dead rank.
            if calls == MOST_CALLS or error.phase != "mask" or dead in error.ranks:
                raise
        else:
            return


def check_process_dies(lives: list[Survived | None], *, small: bool) -> None:
    """`lives[rank]` of process_dies; the last is None."""
    case = of_processes(len(lives), small=small)
    dead = case.ep_size - 1
    masked = dataclasses.replace(case, left_out=(dead,))
    for rank, life in enumerate(lives[:dead]):
        assert life is not None
        assert dead in life.named, life.named
        assert life.works == 8.0
        assert len(life.outputs) == ROUNDS_BEFORE_DEATH + ROUNDS_AFTER
        for number, (given, output) in enumerate(zip(life.given, life.outputs, strict=True)):
            if number >= ROUNDS_BEFORE_DEATH:
                everyones = [given if other == rank else _none(given) for other in range(dead + 1)]
                given = cases.among_active(masked, everyones)[rank]
            expected = compare.expected_combined(case, given, rank)
            what = f"rank {rank}, replay {number}"
            compare.assert_same_bits(compare.one_nan(output), compare.one_nan(expected), what)


def _none(like: Inputs) -> Inputs:
    """A rank's inputs without an expert."""
    return like._replace(topk_ids=torch.full_like(like.topk_ids, -1))
