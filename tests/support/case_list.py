"""The one list of cases for every device, and how a case runs on ranks that are threads."""

from __future__ import annotations

import dataclasses

import torch

from moe_nvlink_plugin import MoeAllToAll
from moe_nvlink_plugin.testing import ThreadGroup, run_ranks
from moe_nvlink_plugin.verify.cases import (
    COMBINE_FORMATS,
    RECIPES,
    Case,
    Extra,
    Seen,
    make_inputs,
    run_round,
    with_formats,
)
from moe_nvlink_plugin.verify.compare import (
    assert_same_bits,
    check_combined,
    check_received,
    check_slots,
)

_SEVEN_EXTRAS: tuple[Extra, ...] = (
    (torch.uint8, (1,)),
    (torch.uint8, (3, 5)),
    (torch.int64, (2,)),
    (torch.bfloat16, (7,)),
    (torch.float64, (1,)),
    (torch.bool, (11,)),
    (torch.uint8, (259,)),
)

CASES: tuple[Case, ...] = (
    Case(name="one rank", tokens=(5,)),
    Case(name="two ranks, full", tokens=(8, 8)),
    Case(name="three ranks, all counts different", tokens=(0, 3, 8), num_experts=10, top_k=3),
    Case(name="five ranks, top_k 1", tokens=(1, 2, 3, 4, 5), top_k=1),
    Case(name="eight ranks, top_k 22", tokens=(0, 1, 2, 3, 5, 6, 7, 8), num_experts=64, top_k=22),
    Case(name="top_k 32 of 33 experts", tokens=(4, 2, 7), num_experts=33, top_k=32),
    Case(name="nobody has a token", tokens=(0, 0, 0, 0)),
    Case(name="one token in all", tokens=(0, 1, 0, 0)),
    Case(name="experts not divisible", tokens=(8, 4, 2, 6), num_experts=11, top_k=5),
    Case(name="fewer experts than ranks", tokens=(3, 1, 4, 1, 5), num_experts=3, top_k=3),
    Case(name="one expert", tokens=(2, 4, 8), num_experts=1, top_k=1),
    Case(name="all to one rank", tokens=(8, 8, 8, 8), routing="to one rank"),
    Case(name="none to a rank", tokens=(8, 7, 6, 5), routing="none to rank 1"),
    Case(name="duplicate experts", tokens=(6, 8, 3), top_k=6, routing="duplicates"),
    Case(name="invalid ids", tokens=(8, 5, 8), top_k=6, routing="invalid"),
    Case(name="no id is an expert", tokens=(8, 5), routing="all invalid"),
    Case(name="int64 ids", tokens=(8, 5, 2), ids_dtype=torch.int64),
    Case(name="int64 invalid", tokens=(8, 5), routing="invalid", ids_dtype=torch.int64),
    Case(name="ids that would wrap", tokens=(8, 8), routing="wrapping", ids_dtype=torch.int64),
    Case(name="rows of one element", tokens=(3, 8), hidden_size=1),
    Case(name="rows of odd bytes", tokens=(7, 8, 1), hidden_size=101, dtype=torch.bfloat16),
    Case(name="rows beyond one vector", tokens=(4, 4), hidden_size=1031),
    Case(name="eight payloads", tokens=(4, 8, 0), extras=_SEVEN_EXTRAS),
    Case(name="large extra payload", tokens=(8, 2), extras=((torch.uint8, (4099,)),)),
    Case(name="three channels", tokens=(5, 8), num_channels=3),
    Case(name="few SMs", tokens=(8, 3, 0), hidden_size=1032, max_sms=1, routing="invalid"),
    Case(name="few SMs, top_k 32", tokens=(8, 2), num_experts=33, top_k=32, max_sms=2),
    Case(name="capacity 1", tokens=(1, 0, 1), capacity=1),
    Case(name="capacity 37", tokens=(37, 36, 1), capacity=37, num_experts=7, top_k=2),
    Case(name="three threads", tokens=(37, 20, 0), capacity=37, num_threads=3),
    Case(
        name="three threads, eight payloads",
        tokens=(8, 5, 7),
        num_threads=3,
        extras=_SEVEN_EXTRAS,
        routing="invalid",
        top_k=7,
    ),
    *(
        Case(
            name=f"{dtype} {hidden_size}",
            tokens=(8, 3, 5, 0),
            dtype=dtype,
            hidden_size=hidden_size,
            top_k=8,
            num_threads=num_threads,
        )
        for dtype in (torch.bfloat16, torch.float16)
        for hidden_size, num_threads in ((64, 1), (77, 3))
    ),
)

#: Every case with every recipe; the formats of combine take turns.
RECIPE_CASES: tuple[Case, ...] = tuple(
    with_formats(case, recipe, list(COMBINE_FORMATS)[(number + turn) % len(COMBINE_FORMATS)])
    for number, case in enumerate(CASES)
    for turn, recipe in enumerate(RECIPES)
)

#: Few of them, of one element type and top_k, so that a GPU's compiler has little to do: each
#: recipe with one format of combine.
CORE_RECIPE_CASES: tuple[Case, ...] = tuple(
    with_formats(
        dataclasses.replace(case, dtype=torch.bfloat16, top_k=8, num_channels=1),
        recipe,
        list(COMBINE_FORMATS)[turn % len(COMBINE_FORMATS)],
    )
    for case in CASES
    if case.name
    in {
        "one rank",
        "three ranks, all counts different",
        "experts not divisible",
        "duplicate experts",
        "invalid ids",
        "rows beyond one vector",
        "eight payloads",
        "capacity 37",
    }
    for turn, recipe in enumerate(RECIPES)
)


def run_case(
    case: Case, rounds: int = 2, device: str = "host", transport: str | None = None
) -> list[list[Seen]]:
    """`result[round][rank]`: the same inputs in every round, quantised by turns by the dispatch and
    by the caller.
    """
    torch_device = {"host": "cpu", "cuda": "cuda"}[device]
    inputs = make_inputs(case)

    def rank_main(group: ThreadGroup) -> list[Seen]:
        config = dataclasses.replace(case.config(group.rank), transport=transport)
        with MoeAllToAll.create(config, group, torch_device) as exchange:
            return [
                run_round(
                    exchange,
                    inputs[group.rank],
                    channel=number % case.num_channels,
                    zero_copy=number % 2 == 0,
                    post_quant=number % 2 == 1,
                    add=case.add,
                    scale=case.scale,
                    active_ranks=case.mask(group.rank, torch_device),
                )
                for number in range(rounds)
            ]

    by_rank = run_ranks(case.ep_size, rank_main)
    return [[seen[number] for seen in by_rank] for number in range(rounds)]


def check_case(case: Case, rounds: int = 2) -> None:
    inputs = make_inputs(case)
    results = run_case(case, rounds)
    for seen in results:
        check_slots(case, inputs, seen)
        check_received(case, inputs, seen)
        check_combined(case, inputs, seen)
    for rank, first in enumerate(results[0]):
        for later in results[1:]:
            assert_same_bits(later[rank].combined, first.combined, f"{case.name}: a second run")
