"""Many rounds in which small combines and pull combines alternate on one workspace, ranks apart.

Each rank is a thread that goes on as soon as its own verb has ended.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import pytest
import torch

from moe_nvlink_plugin import MoeAllToAll
from moe_nvlink_plugin.exchange.kernels import LAYER
from moe_nvlink_plugin.jit import host
from moe_nvlink_plugin.testing import ThreadGroup, run_ranks
from moe_nvlink_plugin.verify import cases
from moe_nvlink_plugin.verify.cases import Case, Seen
from tests.kernels.exchange.test_rounds import check_rounds, poisoned_round
from tests.support import delays, emulated
from tests.support.emulated import varying_inputs

pytestmark = pytest.mark.timeout(240)

RANKS = 3
ROUNDS = 24
SMALL = Case(
    name="small",
    tokens=(0,) * RANKS,
    num_experts=7,
    top_k=2,
    hidden_size=34,
    capacity=5,
    small=True,
)
PULLED = dataclasses.replace(SMALL, name="pulled", small=False)
OTHER = Case(
    name="other",
    tokens=(0,) * RANKS,
    num_experts=12,
    top_k=5,
    hidden_size=70,
    capacity=9,
    dtype=torch.bfloat16,
    small=True,
)
#: Dispatched as a small batch, and pulled.
QUANTISED = dataclasses.replace(
    cases.with_formats(SMALL, None, "fp8_block"), name="quantised", small=True
)


def run_in_order(order: Sequence[Case]) -> list[list[Seen]]:
    """`seen[rank][round]` of one layer per case; all on one workspace."""
    inputs = inputs_of(order)

    def rank_main(group: ThreadGroup) -> list[Seen]:
        layers: dict[Case, MoeAllToAll] = {}
        for case in dict.fromkeys(order):
            first = next(iter(layers.values()), None)
            config = case.config(group.rank)
            layers[case] = MoeAllToAll.create(config, group, share_with=first)
        seen = [
            poisoned_round(layers[case], inputs[number][group.rank], lambda: None)
            for number, case in enumerate(order)
        ]
        for layer in layers.values():
            layer.close()
        return seen

    return run_ranks(RANKS, rank_main)


def inputs_of(order: Sequence[Case]) -> list[list[cases.Inputs]]:
    """`inputs[round][rank]`, other ones in every round."""
    drawn = {case: varying_inputs(case, len(order)) for case in set(order)}
    return [drawn[case][number] for number, case in enumerate(order)]


def check_order(order: Sequence[Case]) -> None:
    seen = run_in_order(order)
    for number, (case, inputs) in enumerate(zip(order, inputs_of(order), strict=True)):
        of_round = [[by_round[number]] for by_round in seen]
        try:
            check_rounds(case, [inputs], of_round)
        except AssertionError as error:
            raise AssertionError(f"of round {number}: {error}") from error


ORDERS = {
    "small only": [SMALL] * ROUNDS,
    "in turn": [SMALL, PULLED] * (ROUNDS // 2),
    "two in turn": [SMALL, SMALL, PULLED, PULLED] * (ROUNDS // 4),
    "two layers": [SMALL, OTHER, PULLED] * (ROUNDS // 3),
    "quantised back": [SMALL, QUANTISED, OTHER] * (ROUNDS // 3),
}


def slow_at(line: str) -> host.HostLibrary:
    """Rank 1 sleeps before it comes to this line of the small combine."""
    sleep = (
        "  if (args.geometry.ep_rank == 1) {\n"
        "    timespec time{0, 2000000};\n    nanosleep(&time, nullptr);\n  }\n"
    )
    text = delays.replace_once(LAYER.host_source(), line, sleep + line)
    return host.HostLibrary(host.build(text, emulated.FLAGS_OF_DELAYED))


SLOW = {
    "random": delays.randomly_delayed,
    "before it sends": lambda: slow_at("  if (role.sends()) send_rows<"),
    "before it signals": lambda: slow_at(
        "  if (role.publishes() && !round.has_failed) publish_combined("
    ),
    "before it receives": lambda: slow_at("  int token = share / plan.parts;\n"),
}


@pytest.mark.parametrize("order", ORDERS.values(), ids=[name.replace(" ", "-") for name in ORDERS])
@pytest.mark.parametrize("slow", SLOW.values(), ids=[name.replace(" ", "-") for name in SLOW])
def test_rounds_with_a_slow_rank(
    slow: Callable[[], host.HostLibrary],
    order: Sequence[Case],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library = slow()
    monkeypatch.setattr(host, "load", lambda _text: library)
    check_order(order)


def staging(layer: MoeAllToAll, parity: str) -> torch.Tensor:
    """This rank's staging of one parity, of channel 0."""
    workspace = layer._layer.workspace
    region = workspace.layout.channel_regions(0)[f"{parity}_combine_staging"]
    return workspace.region_bytes(region, region.size_bytes)


def test_stagings_are_zero_two_rounds_later() -> None:
    """Between dispatch n + 2 and its combine nobody writes; what round n brought has been read."""
    case = dataclasses.replace(OTHER, tokens=(9, 0, 4))
    inputs = varying_inputs(case, 6)

    def rank_main(group: ThreadGroup) -> list[bool]:
        with MoeAllToAll.create(case.config(group.rank), group) as layer:
            used = []
            for number, of_round in enumerate(inputs):
                received = layer.dispatch(*of_round[group.rank])
                group.all_gather_object(None)
                parity = "odd" if number % 2 == 0 else "even"  # of epoch number + 1
                used.append(bool(staging(layer, parity).any()))
                group.all_gather_object(None)
                layer.combine(layer.combine_input(), received.metadata)
            return used

    assert run_ranks(RANKS, rank_main) == [[False] * len(inputs)] * RANKS
