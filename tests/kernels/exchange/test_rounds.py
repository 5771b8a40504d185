"""Many rounds: poisoned buffers, delays, layers that alternate and grow, ranks as processes."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_nvlink_plugin import Dispatched, MoeAllToAll
from moe_nvlink_plugin.exchange.calls import Combine, Dispatch
from moe_nvlink_plugin.exchange.kernels import LAYER
from moe_nvlink_plugin.jit import host
from moe_nvlink_plugin.jit.header import structs
from moe_nvlink_plugin.testing import ThreadGroup, run_ranks
from moe_nvlink_plugin.verify import cases, compare
from moe_nvlink_plugin.verify.cases import Case, Inputs, Seen
from tests.support import delays, emulated
from tests.support import ranks as processes
from tests.support.emulated import EmulatedRanks, varying_inputs


def poison_received(received: Dispatched) -> None:
    """Spoils all a round received, the ids of the empty slots included.

    Allowed until this rank's combine: only then may its peers put the next round's rows.
    """
    scales = () if received.scales is None else (received.scales,)
    payloads = (received.hidden_states, received.topk_weights, *scales, *received.extra_payloads)
    for payload in payloads:
        payload.view(torch.uint8).fill_(0xFF)
    received.topk_ids.fill_(1)  # an expert everywhere


def poisoned_round(layer: MoeAllToAll, inputs: Inputs, delay: Callable[[], None]) -> Seen:
    """As cases.run_round, with every buffer spoilt as soon as nobody may read it any more."""
    config = layer.config
    delay()
    received = layer.dispatch(*inputs)
    # All ranks have dispatched, so all have finished reading the round before.
    region = layer.combine_input()
    region.view(torch.uint8).fill_(0xFF)
    delay()
    ids, weights = received.topk_ids, received.topk_weights
    rows = cases.expert_rows(config, config.ep_rank, received.hidden_states, ids, weights)
    slices = range(0, layer.combine_input().shape[0], config.max_tokens_per_rank)
    for first, count in zip(slices, received.recv_counts.tolist(), strict=True):
        region[first : first + count] = rows[first : first + count]
    payloads = (weights, received.hidden_states, *received.extra_payloads)
    copies = tuple(payload.clone() for payload in payloads)
    counts, ids = received.recv_counts.clone(), ids.clone()
    poison_received(received)
    delay()
    combined = layer.combine(region, received.metadata)
    return Seen(counts, ids, copies, received.metadata.send_slots, combined)


def check_rounds(case: Case, inputs: list[list[Inputs]], seen: list[list[Seen]]) -> None:
    """`inputs[round][rank]` against `seen[rank][round]`."""
    for number, of_round in enumerate(inputs):
        in_round = [by_round[number] for by_round in seen]
        try:
            compare.check_slots(case, of_round, in_round)
            compare.check_received(case, of_round, in_round)
            compare.check_combined(case, of_round, in_round)
        except AssertionError as error:
            raise AssertionError(f"round {number}: {error}") from error


def sometimes(rank: int) -> Callable[[], None]:
    """A delay of up to 2 ms in one call of 16."""
    choose = random.Random(rank)

    def delay() -> None:
        if choose.randrange(16) == 0:
            time.sleep(choose.random() * 0.002)

    return delay


@pytest.mark.long
def test_thousand_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    library = delays.randomly_delayed()
    monkeypatch.setattr(host, "load", lambda _text: library)
    case = Case(
        name="thousand",
        tokens=(0, 0, 0, 0),
        num_experts=10,
        top_k=3,
        hidden_size=19,
        capacity=6,
        routing="invalid",
        extras=((torch.uint8, (5,)),),
        num_threads=2,
    )
    inputs = varying_inputs(case, 1000)

    def rank_main(group: ThreadGroup) -> list[Seen]:
        delay = sometimes(group.rank)
        with MoeAllToAll.create(case.config(group.rank), group) as layer:
            return [poisoned_round(layer, of_round[group.rank], delay) for of_round in inputs]

    check_rounds(case, inputs, run_ranks(case.ep_size, rank_main))


SMALL = Case(name="small", tokens=(0, 0, 0), num_experts=7, top_k=2, hidden_size=33, capacity=5)
LARGE = Case(name="large", tokens=(0, 0, 0), num_experts=12, top_k=5, hidden_size=70, capacity=9)


def alternate(
    rounds: int, damage: Callable[[MoeAllToAll, MoeAllToAll], None] | None = None
) -> None:
    """Rounds of two layers in turn on one workspace, verified."""
    inputs = {case: varying_inputs(case, rounds) for case in (SMALL, LARGE)}

    def rank_main(group: ThreadGroup) -> list[list[Seen]]:
        small = MoeAllToAll.create(SMALL.config(group.rank), group)
        large = MoeAllToAll.create(LARGE.config(group.rank), group, share_with=small)
        with small, large:
            assert small.workspace_bytes == large.workspace_bytes
            if damage is not None:
                damage(small, large)
            seen: list[list[Seen]] = [[], []]
            for number in range(rounds):
                for index, (layer, case) in enumerate(((small, SMALL), (large, LARGE))):
                    mine = inputs[case][number][group.rank]
                    seen[index].append(poisoned_round(layer, mine, lambda: None))
            return seen

    by_rank = run_ranks(3, rank_main)
    for index, case in enumerate((SMALL, LARGE)):
        check_rounds(case, inputs[case], [seen[index] for seen in by_rank])


@pytest.fixture
def slow_rank_one(monkeypatch: pytest.MonkeyPatch) -> None:
    library = delays.slow_reader(ep_rank=1, milliseconds=4)
    monkeypatch.setattr(host, "load", lambda _text: library)


@pytest.mark.usefixtures("slow_rank_one")
def test_alternating_geometries_with_a_slow_rank() -> None:
    """While rank 1 still reads combine rows of one layer, the others dispatch for the next."""
    alternate(rounds=30)


@pytest.mark.usefixtures("slow_rank_one")
def test_a_combine_region_that_moves_is_caught() -> None:
    """The bug the fixed layout rules out, put back: one layer receives where the other combines."""

    def overlap(small: MoeAllToAll, large: MoeAllToAll) -> None:
        rows = large._layer.channel(0)
        other = small._layer.channel(0)
        rows._dispatch_args.payloads[2].region = other.regions["combine"].block
        rows._views[2] = rows.combine_region

    with pytest.raises(AssertionError, match=r"round .* small: combined on rank 1"):
        alternate(rounds=10, damage=overlap)


def test_the_workspace_grows_between_rounds() -> None:
    """A third, larger layer comes when two have already run; all three go on, none loses a row."""
    larger = Case(
        name="larger",
        tokens=(0, 0, 0),
        num_experts=30,
        top_k=9,
        hidden_size=301,
        capacity=17,
        extras=((torch.int32, (3,)),),
        num_channels=2,
    )
    order = (SMALL, LARGE, SMALL, larger, SMALL, LARGE, larger)
    inputs = {case: varying_inputs(case, len(order)) for case in order}

    def rank_main(group: ThreadGroup) -> tuple[list[Seen], list[int], int]:
        layers: dict[Case, MoeAllToAll] = {}
        seen, sizes = [], []
        for number, case in enumerate(order):
            if case not in layers:
                first = layers.get(SMALL)
                config = case.config(group.rank)
                layers[case] = MoeAllToAll.create(config, group, share_with=first)
            mine = inputs[case][number][group.rank]
            seen.append(poisoned_round(layers[case], mine, lambda: None))
            sizes.append(layers[SMALL].workspace_bytes)
        rounds = layers[SMALL].stats().rounds
        for layer in layers.values():
            layer.close()
        return seen, sizes, rounds

    by_rank = run_ranks(3, rank_main)
    for number, case in enumerate(order):
        of_round = [inputs[case][number]]
        check_rounds(case, of_round, [[seen[number]] for seen, _sizes, _rounds in by_rank])
    for _seen, sizes, rounds in by_rank:
        assert sizes[0] < sizes[1] == sizes[2] < sizes[3] == sizes[6]
        assert rounds == len(order), "growth must not lose what the old workspace had counted"


# Ranks as processes.


def _process(ep_rank: int, _ep_size: int, case: Case, rounds: int) -> list[Seen]:
    inputs = varying_inputs(case, rounds)
    with MoeAllToAll.create(case.config(ep_rank), dist.group.WORLD) as layer:
        delay = sometimes(ep_rank)
        return [poisoned_round(layer, of_round[ep_rank], delay) for of_round in inputs]


@pytest.mark.parametrize(("ep_size", "rounds"), [(4, 100), (8, 30)])
def test_processes(ep_size: int, rounds: int, tmp_path: Path) -> None:
    case = Case(
        name=f"{ep_size} processes",
        tokens=(0,) * ep_size,
        num_experts=3 * ep_size + 1,
        top_k=6,
        hidden_size=50,
        dtype=torch.bfloat16,
        extras=((torch.uint8, (9,)),),
    )
    host.load(
        LAYER.host_source()
    )  # compiled once, here, rather than by ep_size processes that wait for each other
    seen = processes.run_processes(ep_size, _process, tmp_path, case, rounds)
    check_rounds(case, varying_inputs(case, rounds), seen)


# What is in a stream or a graph runs on after a failure, when nobody calls verbs any more.


def run_on(layer: MoeAllToAll, inputs: Inputs) -> torch.Tensor:
    """A round as a graph replays it: no check of what went before, and nothing is raised."""
    channel = layer._layer.channel(0)
    hidden, ids, weights, _extras = inputs
    call = Dispatch(hidden, None, ids, weights, [], None, layer._layer.handle, 0)
    slots = channel.dispatch(call, layer.config.max_tokens_per_rank, 0, ())
    received_ids, received_weights, rows, _counts = channel.rows_and_counts()
    rank = layer.config.ep_rank
    channel.combine_region.copy_(
        cases.expert_rows(layer.config, rank, rows, received_ids, received_weights)
    )
    output = torch.zeros_like(hidden)
    sums = Combine(channel.combine_region, slots, output, layer._layer.handle, 0)
    channel.combine(sums, output)
    return output


def test_a_failed_rank_that_runs_on_exchanges_nothing_more() -> None:
    """Rank 0 gives rank 1 up and goes on for some rounds. Rank 1, late for the first of them, must
    not meet rows of a later one: it gets NaN and hears that rank 0 is missing.
    """
    case = Case(name="runs on", tokens=(8, 8), num_experts=4, top_k=4)
    inputs = [cases.make_inputs(case, seed=number) for number in range(4)]

    def rank_main(group: ThreadGroup) -> tuple[list[torch.Tensor], str, float]:
        config = dataclasses.replace(case.config(group.rank), timeout_s=1.0)
        with MoeAllToAll.create(config, group) as layer:
            outputs = []
            start = time.monotonic()
            if group.rank == 0:
                outputs = [run_on(layer, inputs[number][0]) for number in range(4)]
            group.all_gather_object(None)
            waited = time.monotonic() - start
            if group.rank == 1:
                outputs = [run_on(layer, inputs[0][1])]
            group.all_gather_object(None)
            return outputs, str(layer.failure()), waited

    (first, error_0, waited), (second, error_1, _) = run_ranks(2, rank_main)
    for output in (*first, *second):
        assert bool(output.isnan().all())
    assert "rank 0 waited 1 s in dispatch of epoch 1 for rank(s) 1" in error_0
    assert "rank 1 waited 1 s in combine of epoch 1 for rank(s) 0" in error_1
    assert waited < 6, "only the first of eight verbs may wait"


# Epochs have 32 bits: rounds behind the last one give the bits of any other round.

EPOCHS = Case(
    name="epochs",
    tokens=(3, 0, 8),
    num_experts=10,
    top_k=3,
    dtype=torch.bfloat16,
    hidden_size=256,
)
OF_EPOCHS = {
    "bulk": EPOCHS,
    "quantised": cases.with_formats(EPOCHS, "fp8_block", "fp8_block"),
    "counts": dataclasses.replace(EPOCHS, num_expert_counts=10),
}
OF_EPOCHS |= {
    f"small {name}": dataclasses.replace(of, small=True) for name, of in OF_EPOCHS.items()
}
EPOCH_ROUNDS = 7


def set_epoch(ranks: EmulatedRanks, epoch: int) -> None:
    """Make every rank's control and cells say that the round `epoch` is over."""
    size = ctypes.sizeof(structs()["LocalControl"])
    for rank in range(ranks.config.ep_size):
        control: Any = ranks.control(rank)
        control.epoch = control.combined_epoch = epoch
        local = ranks._bytes(rank, "local", size, 0, writes=True)
        local.copy_(torch.frombuffer(bytearray(bytes(control)), dtype=torch.uint8))
        for cells in ("dispatch_cells", "combine_cells"):
            found = ranks._bytes(rank, cells, ranks.config.ep_size * 8, 0, writes=True)
            found.view(torch.int64).fill_(epoch)


@pytest.mark.parametrize("kind", OF_EPOCHS)
@pytest.mark.parametrize("start", [2**32 - 3, 2**31 - 3])
def test_rounds_go_on_when_the_epoch_wraps(kind: str, start: int) -> None:
    case = OF_EPOCHS[kind]
    with contextlib.closing(emulated.make_backend("cpu", case, ctas=2)) as backend:
        case = emulated.with_ctas(case, backend.ctas)
        ranks = EmulatedRanks.of_case(case, backend)
        set_epoch(ranks, start)
        for number in range(EPOCH_ROUNDS):
            inputs = cases.make_inputs(case, seed=number)
            emulated.check_round(case, inputs, ranks.run_round(inputs))
        assert ranks.control(0).epoch == (start + EPOCH_ROUNDS) % 2**32
