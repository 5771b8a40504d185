"""Combine of small batches, whose rows travel as units, against the oracle and the pull combine.

Dispatch is the one for large batches, and the ranks go from verb to verb together, until the rounds
of ranks that run apart.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from moe_nvlink_plugin import MoeAllToAll
from moe_nvlink_plugin.exchange.kernels import COMBINE, DISPATCH, LAYER, SMALL_COMBINE
from moe_nvlink_plugin.jit import host
from moe_nvlink_plugin.jit.header import constants
from moe_nvlink_plugin.launch.kernel import Family
from moe_nvlink_plugin.testing import ThreadGroup, run_ranks
from moe_nvlink_plugin.verify import cases, compare
from moe_nvlink_plugin.verify.cases import Case, Inputs, Seen
from tests.kernels.exchange import test_rounds
from tests.support import delays, emulated
from tests.support.delays import replace_once

KERNELS = Family("", (DISPATCH, COMBINE, SMALL_COMBINE))
#: A CTA of several threads, as the thread sanitizer runs it.
FOUR_THREADS = (*emulated.FLAGS, "-DMOE_NVLINK_CTA_THREADS=4")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
#: Of more ranks the oracle computes the rows of every 16th: it takes long. All are compared with
#: the pull combine's.
MOST_COMPUTED = 16
TIMEOUT, COMBINE_PHASE = constants()["kFaultTimeout"], constants()["kPhaseCombine"]


class Cpu(emulated.CpuBackend):
    """A thread per rank, each with a grid of host CTAs that run this text."""

    def __init__(self, text: str, ranks: int, ctas: int, flags: tuple[str, ...]) -> None:
        self.ctas = ctas
        self._library = host.HostLibrary(host.build(text, flags))
        self._of_tests = {}
        self._grids = [self._library.create_grid(ctas) for _ in range(ranks)]


class Ranks(emulated.EmulatedRanks):
    """All ranks.

    Attributes:
        senders: CTAs that send; 0: all CTAs have both roles.
        gives_up_soon: whether combine waits for a second only, as is fit if nobody will come.
    """

    senders = 0
    gives_up_soon = False
    combines = "small_combine"

    def verb(self, name: str) -> str:
        return self.combines if name == "combine" else name

    def combine_arguments(self, rank: int, channel: int = 0) -> Any:
        args = super().combine_arguments(rank, channel)
        args.senders = self.senders
        if self.gives_up_soon:
            args.timeout_ns = 10**9
        return args

    def staging(self, rank: int, parity: str) -> torch.Tensor:
        region = self.regions[0][f"{parity}_combine_staging"]
        return self.memory[rank, region.offset : region.offset + region.size_bytes]


@contextlib.contextmanager
def ranks_of(
    case: Case,
    *,
    ctas: int = 1,
    senders: int = 0,
    flags: tuple[str, ...] = emulated.FLAGS,
    text: str | None = None,
    timeout_s: float = 10.0,
) -> Iterator[Ranks]:
    """The case's ranks on the CPU, with a staging for small batches."""
    text = KERNELS.host_source() if text is None else text
    with contextlib.closing(Cpu(text, case.ep_size, ctas, flags)) as backend:
        small = dataclasses.replace(case, small=True)
        ranks = Ranks(emulated.config_of(small, timeout_s), backend)
        ranks.senders = senders
        yield ranks


def dispatched(ranks: Ranks, inputs: Sequence[Inputs]) -> list[torch.Tensor]:
    """A dispatch and the experts; returns send_slots of each rank."""
    received = ranks.dispatch(inputs)
    for rank, mine in enumerate(received):
        ranks.poison_combine(rank)
        ranks.experts(rank, mine)
        ranks.poison(rank)
    return [mine.send_slots for mine in received]


def combined(
    ranks: Ranks, combines: str, slots: Sequence[torch.Tensor], inputs: Sequence[Inputs]
) -> list[torch.Tensor]:
    outputs = [torch.full_like(mine.hidden_states, 77.0) for mine in inputs]
    ranks.combines = combines
    ranks.combine(slots, outputs)
    return outputs


def check(ranks: Ranks, case: Case, inputs: Sequence[Inputs]) -> None:
    """A round: the small combine's rows are the oracle's, and the pull combine's of its rows."""
    slots = dispatched(ranks, inputs)
    small = combined(ranks, "small_combine", slots, inputs)
    pulled = combined(ranks, "combine", slots, inputs)
    ranks.check_faults()
    for rank, mine in enumerate(inputs):
        if len(inputs) <= MOST_COMPUTED or rank % 16 == 3:
            expected = compare.expected_combined(case, mine, rank)
            compare.assert_same_bits(
                compare.one_nan(small[rank]), compare.one_nan(expected), f"{case.name}: rank {rank}"
            )
        compare.assert_same_bits(
            compare.one_nan(small[rank]), compare.one_nan(pulled[rank]), f"{case.name}: as pulled"
        )


def check_rounds(case: Case, rounds: int = 2, **options: Any) -> None:
    """Rounds of both parities with other tokens and counts; the first with the case's."""
    with ranks_of(case, **options) as ranks:
        drawn = emulated.varying_inputs(case, rounds)
        for number, inputs in enumerate([cases.make_inputs(case), *drawn]):
            with emulated.naming(f"round {number}"):
                check(ranks, case, inputs)


@pytest.mark.parametrize(
    ("hidden_size", "dtype"),
    [
        *((size, FP32) for size in (1, 2, 3, 4, 101, 767, 768, 769, 1031)),
        *((size, BF16) for size in (2, 4, 6, 8, 10, 12, 14, 100, 1790, 1792, 1794, 3592)),
    ],
)
def test_rows_that_end_within_a_unit(hidden_size: int, dtype: torch.dtype) -> None:
    """And rows of several parts, the last of which has few units."""
    check_rounds(Case(tokens=(4, 0, 8), hidden_size=hidden_size, dtype=dtype))


@pytest.mark.parametrize(
    "flags",
    [emulated.FLAGS, pytest.param(FOUR_THREADS, marks=pytest.mark.long)],
    ids=["one", "four threads"],
)
@pytest.mark.parametrize(("ctas", "senders"), [(2, 0), (2, 1), (5, 3), (7, 1), (3, 3)])
def test_every_share_of_the_work(ctas: int, senders: int, flags: tuple[str, ...]) -> None:
    """Roles apart and together; more CTAs than parts, and many more parts than CTAs."""
    for case in (
        Case(tokens=(1, 0), top_k=2, hidden_size=6, dtype=BF16),
        Case(tokens=(8, 1, 5), top_k=3, hidden_size=3592, dtype=BF16),
        Case(tokens=(8, 8, 8), routing="to one rank", hidden_size=800),
    ):
        check_rounds(case, ctas=ctas, senders=senders, flags=flags)


def test_many_ranks() -> None:
    case = Case(tokens=(1, 0, 2, 1) * 32, num_experts=256, top_k=8, hidden_size=20, dtype=BF16)
    check_rounds(dataclasses.replace(case, capacity=2), rounds=0)


def test_output_at_an_odd_address() -> None:
    """A caller's rows of 2-byte elements that begin between two words."""
    case = Case(tokens=(8, 3), hidden_size=26, dtype=BF16)
    inputs = cases.make_inputs(case)
    with ranks_of(case) as ranks:
        slots = dispatched(ranks, inputs)
        outputs = [torch.zeros(mine.hidden_states.numel() + 1, dtype=BF16) for mine in inputs]
        views = [output[1:].view(-1, case.hidden_size) for output in outputs]
        assert all(view.data_ptr() % 4 == 2 for view in views)
        ranks.combine(slots, views)
    for rank, mine in enumerate(inputs):
        expected = compare.expected_combined(case, mine, rank)
        compare.assert_same_bits(
            compare.one_nan(views[rank]), compare.one_nan(expected), f"rank {rank}"
        )


def test_what_the_next_dispatch_reads() -> None:
    """Both combines leave their epoch, and which of them it was."""
    case = Case(tokens=(2, 3))
    with ranks_of(case) as ranks:
        for epoch, combines in enumerate(("small_combine", "combine", "combine", "small_combine")):
            inputs = cases.make_inputs(case, seed=epoch)
            slots = dispatched(ranks, inputs)
            combined(ranks, combines, slots, inputs)
            for rank in range(case.ep_size):
                control = ranks.control(rank)
                assert control.combined_epoch == control.epoch == epoch + 1
                assert control.has_pulled == (combines == "combine")


def test_combine_with_a_format_leaves_its_words() -> None:
    case = cases.with_formats(Case(tokens=(2, 3)), None, "fp8_block")
    inputs = cases.make_inputs(case)
    with ranks_of(case) as ranks:
        combined(ranks, "combine", dispatched(ranks, inputs), inputs)
        for rank in range(case.ep_size):
            control = ranks.control(rank)
            assert (control.combined_epoch, control.has_pulled) == (1, 1)


def check_stagings(**options: Any) -> None:
    case = Case(tokens=(8, 5, 0), hidden_size=101, top_k=5)
    with ranks_of(case, ctas=3, **options) as ranks:
        for number, inputs in enumerate(emulated.varying_inputs(case, 4)):
            mine, other = ("odd", "even") if number % 2 == 0 else ("even", "odd")
            slots = dispatched(ranks, inputs)
            for rank in range(case.ep_size):
                ranks.staging(rank, other).fill_(0x55)
            combined(ranks, "small_combine", slots, inputs)
            ranks.check_faults()
            for rank in range(case.ep_size):
                assert not ranks.staging(rank, mine).any(), f"round {number}: rank {rank}"
                assert bool((ranks.staging(rank, other) == 0x55).all())
                ranks.staging(rank, other).zero_()


def test_stagings_are_zero_after_their_round() -> None:
    """Each unit is cleared by its reader; a round uses the staging of its epoch's parity only."""
    check_stagings()


def test_totals_are_those_of_the_pull_combine() -> None:
    case = Case(tokens=(8, 5, 2), top_k=3, hidden_size=10)
    inputs = cases.make_inputs(case)
    seen = []
    for combines in ("small_combine", "combine"):
        with ranks_of(case) as ranks:
            combined(ranks, combines, dispatched(ranks, inputs), inputs)
            size = 10 * 8
            seen.append([bytes(ranks._bytes(rank, "counters", size, 0)) for rank in range(3)])
    assert seen[0] == seen[1]


def faults(ranks: Ranks) -> list[tuple[int, int, int, int]]:
    """{code, phase, peer, epoch} of each rank."""
    words = [int(ranks.control(rank).fault) for rank in range(ranks.config.ep_size)]
    return [(w >> 56, w >> 48 & 0xFF, w >> 32 & 0xFFFF, w & 0xFFFFFFFF) for w in words]


def check_missing_rank(**options: Any) -> None:
    case = Case(tokens=(8, 5, 8), top_k=3, hidden_size=800)
    inputs = cases.make_inputs(case)
    with ranks_of(case, timeout_s=60.0, **options) as ranks:
        slots = dispatched(ranks, inputs)
        ranks.gives_up_soon = True
        outputs = combined(ranks, "small_combine", slots[:2], inputs[:2])
        wanted = (TIMEOUT, COMBINE_PHASE, 2, 1)
        assert faults(ranks) == [wanted, wanted, (0, 0, 0, 0)]
        for rank, output in enumerate(outputs):
            waits = (slots[rank] // case.capacity == 2).any(1)
            assert bool(waits.any())
            assert bool(output[waits].isnan().all())
        # The late rank: the others had sent it their rows before they gave it up.
        ranks.gives_up_soon = False
        late = combined(ranks, "small_combine", slots, inputs)
        assert all(bool(output.isnan().all()) for output in late[:2])
        expected = compare.expected_combined(case, inputs[2], 2)
        compare.assert_same_bits(compare.one_nan(late[2]), compare.one_nan(expected), "late rank")


@pytest.mark.parametrize(("ctas", "senders"), [(1, 0), (3, 1)])
def test_a_rank_that_does_not_combine(ctas: int, senders: int) -> None:
    """The others name it, store NaN where its rows are missing, and send nothing from then on."""
    check_missing_rank(ctas=ctas, senders=senders)


MISTAKES = {
    "one staging for both parities": (
        "args.even_staging_region + epoch % 2 * step",
        "args.even_staging_region + 0 * step",
        check_stagings,
    ),
    "rank 0 is named": (
        "peer_of(args, plan, rows, missing), receiving.epoch",
        "0, receiving.epoch",
        check_missing_rank,
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_noticed(mistake: str) -> None:
    line, instead, check_it = MISTAKES[mistake]
    text = replace_once(KERNELS.host_source(), line, instead)
    with pytest.raises(AssertionError):
        check_it(text=text)


def test_after_a_fault_nothing_is_sent() -> None:
    """A failed rank's rows are NaN at once; its peers wait for it in vain, and the first fault of
    each stays.
    """
    case = Case(tokens=(4, 4), top_k=4)
    inputs = cases.make_inputs(case)
    with ranks_of(case, ctas=4, timeout_s=60.0) as ranks:  # some CTA's first part is for rank 1
        slots = dispatched(ranks, inputs)
        ranks.gives_up_soon = True
        region = ranks.regions[0]["local"]
        first = TIMEOUT << 56 | COMBINE_PHASE << 48 | 1 << 32 | 7
        ranks.memory[0, region.offset : region.offset + 8].view(torch.int64).fill_(first)
        outputs = combined(ranks, "small_combine", slots, inputs)
        assert faults(ranks) == [(TIMEOUT, COMBINE_PHASE, 1, 7), (TIMEOUT, COMBINE_PHASE, 0, 1)]
        assert bool(outputs[0].isnan().all())
        assert bool(outputs[1][(slots[1] // case.capacity == 0).any(1)].isnan().all())
        assert not ranks.staging(1, "odd")[: ranks.staging(1, "odd").numel() // 2].any()
        assert int(ranks.control(0).combined_epoch) == 0


# Many rounds in which small combines and pull combines alternate on one workspace. Each rank is a
# thread that goes on as soon as its own verb has ended.

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
            test_rounds.poisoned_round(layers[case], inputs[number][group.rank], lambda: None)
            for number, case in enumerate(order)
        ]
        for layer in layers.values():
            layer.close()
        return seen

    return run_ranks(RANKS, rank_main)


def inputs_of(order: Sequence[Case]) -> list[list[cases.Inputs]]:
    """`inputs[round][rank]`, other ones in every round."""
    drawn = {case: emulated.varying_inputs(case, len(order)) for case in set(order)}
    return [drawn[case][number] for number, case in enumerate(order)]


def check_order(order: Sequence[Case]) -> None:
    seen = run_in_order(order)
    for number, (case, inputs) in enumerate(zip(order, inputs_of(order), strict=True)):
        of_round = [[by_round[number]] for by_round in seen]
        try:
            test_rounds.check_rounds(case, [inputs], of_round)
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
    text = replace_once(LAYER.host_source(), line, sleep + line)
    return host.HostLibrary(host.build(text, emulated.FLAGS_OF_DELAYED))


SLOW = {
    "random": delays.randomly_delayed,
    "before it sends": lambda: slow_at("  if (role.sends()) send_rows<"),
    "before it signals": lambda: slow_at("    publish_combined<"),
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
    inputs = emulated.varying_inputs(case, 6)

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
