"""Every order, scope, barrier and wait of the kernels' PTX is needed: without it, something is
reported.

Each kernel runs by itself, as a GPU gets it: dispatch then combine, gather then argmax then
collect, two rounds, with whatever the host does between them. A mutant (tests/support/ptx/
mutants.py) is found if a run reports a race, a wrong result, threads that do not meet, or a
deadlock. REDUNDANT has those that are not, and why; none of them may be found.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from moe_nvlink_plugin import HeadConfig, rank_mask
from moe_nvlink_plugin.choices import TODAY
from moe_nvlink_plugin.exchange import arguments, launches
from moe_nvlink_plugin.exchange.kernels import (
    COMBINE,
    DISPATCH,
    MEET,
    SMALL_COMBINE,
    SMALL_DISPATCH,
)
from moe_nvlink_plugin.jit.header import constants, structs
from moe_nvlink_plugin.launch.arguments import element_code
from moe_nvlink_plugin.launch.kernel import Build, Kernel
from moe_nvlink_plugin.lm_head.kernels import HEAD
from moe_nvlink_plugin.plugins import find_recipe
from moe_nvlink_plugin.verify import cases
from moe_nvlink_plugin.verify.cases import Case
from tests.support import emulated, head_ranks, users_form
from tests.support.emulated import EmulatedRanks
from tests.support.head_ranks import Call, Round
from tests.support.ptx import mutants, survivors
from tests.support.ptx.backend import PtxBackend, unchanged
from tests.support.ptx.head import PtxHeadRanks
from tests.support.ptx.mutants import Mutant

pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC is not installed")

PROTOCOL_PAGE = Path(__file__).parents[2] / "kernels" / "PROTOCOL.md"
ARCHITECTURE = "sm_90a"
HAS_ASYNC_RELEASE = "sm_100a"
SEEDS = (1, 2, 3, 4, 5, 6)
CTAS = 2
OPTIONS: dict[str, Any] = {
    "architecture": ARCHITECTURE,
    "ctas": CTAS,
    "threads": 64,  # two warps
    "pdl": True,
    "races": True,
}
ROUNDS = 2

#: Phases of fault words, by the kernel in which a rank waits.
PHASES = {
    "dispatch": "kPhaseDispatch",
    "combine": "kPhaseCombine",
    "head_gather": "kPhaseHeadGather",
    "head_argmax": "kPhaseHeadArgmax",
}


class Group(NamedTuple):
    """Kernels, and what runs them: with a seed of the scheduler.

    Attributes:
        mutants: a pattern of those that are this group's; others meet them, or never run here.
        around: what holds while the runs are made.
        architecture: that the kernels are compiled for.
    """

    builds: list[Build]
    runs: list[Callable[[int], None]]
    mutants: str = ""
    around: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    architecture: str = ARCHITECTURE


# ---- dispatch and combine

#: Several tokens for each CTA, whose buffers take turns; another count on each rank.
LAYER_CASE = Case(
    name="mutants",
    tokens=(9, 4, 7),
    capacity=9,
    hidden_size=128,
    dtype=torch.bfloat16,
    top_k=4,
    num_experts=8,
)
SMALL_CASE = dataclasses.replace(LAYER_CASE, small=True)
#: Rows of two parts, the second one shorter, and more items for each CTA than it has stages.
TMA_CASE = dataclasses.replace(LAYER_CASE, max_sms=1, hidden_size=576)
#: Two that send, whose second one's first part goes to a peer, and two that receive.
SMALL_CTAS = 4
#: Rows with more units than a CTA has threads.
LONG_CASE = dataclasses.replace(SMALL_CASE, tokens=(3, 2, 1), capacity=3, hidden_size=480)
#: Rows of several parts, one rank that gets none, and one that brings none.
WIDE_CASE = dataclasses.replace(
    SMALL_CASE,
    tokens=(3, 1, 0),
    capacity=3,
    hidden_size=1856,
    routing="none to rank 1",
)
#: An odd number of rows: the last one of a part and the first of the next are staged in one place.
ODD_CASE = dataclasses.replace(WIDE_CASE, tokens=(2, 1, 0))
#: The last rank gets no rows, so no combine but its own waits for it.
UNMISSED_CASE = dataclasses.replace(SMALL_CASE, tokens=(1, 2), routing="none to rank 1")
LAYERS = {
    "as they are": LAYER_CASE,
    "fp8": dataclasses.replace(LAYER_CASE, recipe="fp8_token", combine="fp8_block"),
    "nvfp4": dataclasses.replace(
        LAYER_CASE,
        recipe="nvfp4",
        combine="nvfp4",
        scales_layout="interleaved",
    ),
    "small": SMALL_CASE,
}


#: Rounds of a layer that has small batches: its third is the second of a parity, its fifth comes
#: after a combine that pulled.
SMALL, BULK = "small", "bulk"
MIXED = (SMALL, SMALL, SMALL, BULK, SMALL)


class Ranks(EmulatedRanks):
    """Ranks of LAYER_CASE, whose hosts keep a fault word of their own."""

    kind = SMALL

    def verb(self, name: str) -> str:
        return name if self.kind == BULK else super().verb(name)

    def __init__(self, case: Case, backend: PtxBackend) -> None:
        super().__init__(emulated.config_of(case, timeout_s=1e-3), backend, hidden_splits=2)
        self.grids = backend.grids
        self.words = (ctypes.c_uint64 * case.ep_size)()
        place = structs()["LocalControl"].host_fault.offset
        for rank in range(case.ep_size):
            address = ctypes.addressof(self.words) + 8 * rank
            backend.grids.machine.allocate(rank, address, 8, "host_fault")
            start = self.regions[0]["local"].offset + place
            self.memory[rank, start : start + 8].view(torch.int64).fill_(address)


@contextlib.contextmanager
def running_layer(
    case: Case, seed: int, small_ctas: int = SMALL_CTAS, threads: int = 64
) -> Iterator[Ranks]:
    options = OPTIONS | {"ctas": small_ctas if case.small else CTAS, "threads": threads}
    if case.choices.async_release:
        options["architecture"] = HAS_ASYNC_RELEASE
    backend = PtxBackend(case.ep_size, case.config(0), seed=seed, **options)
    try:
        yield Ranks(case, backend)
    finally:
        backend.close()


def layer_rounds(case: Case, seed: int) -> None:
    """Rounds with all ranks, against the reference."""
    inputs = cases.make_inputs(case)
    with running_layer(case, seed) as ranks:
        for ranks.kind in MIXED if case.small else (BULK,) * ROUNDS:
            seen = ranks.run_round(inputs)
            # The region that is read here holds scales as they travel.
            of_kind = dataclasses.replace(case, small=ranks.kind == SMALL, scales_layout="linear")
            emulated.check_round(emulated.with_ctas(of_kind, CTAS), inputs, seen, near=True)


def counted_rounds(case: Case, seed: int) -> None:
    """Rounds with counts per expert, against the reference."""
    inputs = cases.make_inputs(case)
    with running_layer(case, seed) as ranks:
        for ranks.kind in MIXED if case.small else (BULK,) * ROUNDS:
            ranks.run_round(inputs)
            users_form.check_counts_of_round(case, inputs, ranks)


def layer_without(verb: str, case: Case, seed: int) -> None:
    """The last rank never comes to the verb; the others report it, and go on as graphs do."""
    inputs = cases.make_inputs(case)
    missing = case.ep_size - 1
    with running_layer(case, seed) as ranks:
        here = inputs[: missing if verb == "dispatch" else None]
        for _ in range(ROUNDS):
            received = ranks.dispatch(here)
            outputs = [torch.zeros_like(mine.hidden_states) for mine in inputs[:missing]]
            ranks.combine([each.send_slots for each in received[:missing]], outputs)
            here = here[:missing]
            assert all(bool(output.isnan().all()) for output in outputs)
        for rank in range(missing):
            word = int(ranks.control(rank).fault)
            assert (word >> 48 & 0xFF, word >> 32 & 0xFFFF) == (constants()[PHASES[verb]], missing)
            assert ranks.words[rank] == word


@contextlib.contextmanager
def clearing_weakly(
    builds: Sequence[Build],
    change: Callable[[str], str] = unchanged,
    architecture: str = ARCHITECTURE,
) -> Iterator[None]:
    """Units are cleared by weak stores for as long as the block lasts.

    Whoever has read a word by a strong load comes after its writer, so weak zeros race with units
    of later rounds only, which P12 keeps apart from them. Strong zeros race with no unit: nothing
    but a lost unit could tell that P12 is missing.
    """
    every = [each for made in builds for each in mutants.mutants_of(made, architecture, change)]
    sites = [each.site for each in every if "clear_unit" in str(each)]
    assert sites, "no unit is cleared"
    try:
        for site in sites:
            site.order = "weak"
        yield
    finally:
        for site in sites:
            site.reset()


def rounds_apart(case: Case, ctas: int, late: bool, seed: int, *, threads: int = 64) -> None:
    """All launches are in the streams at once, and ranks run apart as far as they are let. No host
    comes between two kernels: what the second one may know of the first it has waited for.

    Experts write nothing: the same rows come back in every round.

    Args:
        late: the CTA of rank 0 that signals its combine runs when the others have nothing left to
            do but to look for the signal. So they look again (P12).
    """
    inputs = cases.make_inputs(case)
    with running_layer(case, seed, ctas, threads) as ranks:
        if late:
            ranks.grids.machine.make_late(0, ctas // 2)
        outputs = [torch.full_like(mine.hidden_states, -7) for mine in inputs]
        slots = []  # of all rounds: the kernels run at the end of the block
        with ranks.grids.queued():
            for ranks.kind in MIXED if case.small else (BULK,) * ROUNDS:
                slots.append([each.send_slots for each in ranks.dispatch(inputs)])
                ranks.combine(slots[-1], outputs)
        ranks.check_faults()


def bulk_after_an_unmissed_rank(case: Case, seed: int) -> None:
    """The last rank does not come to a small combine, and the bulk dispatch after it reports that.

    Rank 0 has one token, so it waits in a CTA with a token and in one without.
    """
    inputs = cases.make_inputs(case)
    with running_layer(case, seed) as ranks:
        received = ranks.dispatch(inputs)
        ranks.combine([received[0].send_slots], [torch.zeros_like(inputs[0].hidden_states)])
        assert ranks.control(0).fault == 0
        ranks.kind = BULK
        ranks.dispatch(inputs[:1])
        word = int(ranks.control(0).fault)
        assert (word >> 48 & 0xFF, word >> 32 & 0xFFFF) == (constants()[PHASES["combine"]], 1)


def last_rank_leaves(case: Case, late: bool, seed: int) -> None:
    """After a combine that pulls. Then the others write over what it reads.

    Args:
        late: a CTA of it runs when the others have nothing left to do but to look whether it has
            read. So they look again (P14).
    """
    inputs, last = cases.make_inputs(case), case.ep_size - 1
    with running_layer(case, seed) as ranks:
        outputs = [torch.full_like(mine.hidden_states, -7) for mine in inputs]
        ranks._masks = [rank_mask(range(case.ep_size), case.ep_size)] * case.ep_size
        ranks.kind = BULK
        slots = [each.send_slots for each in ranks.dispatch(inputs)]
        if late:
            ranks.grids.machine.make_late(last, 1)
        with ranks.grids.queued() if late else contextlib.nullcontext():
            ranks.combine(slots, outputs)
            ranks._masks = [rank_mask(range(last), case.ep_size)] * case.ep_size
            ranks.kind = SMALL if case.small else BULK
            # Kept until the kernels have run.
            slots += [each.send_slots for each in ranks.dispatch(inputs[:-1])]
        ranks.check_faults()
        for rank in range(last):
            ranks.poison_combine(rank)


#: A bulk dispatch waits for the combine before it only in mixed rounds.
_SMALL_ROUNDS = r"^moe_nvlink_small_(?!.*clear_unit)|await_small_combine"
_BULK_ROUNDS = r"^(?!.*await_small_combine)"


def runs_of_small_rounds() -> list[Callable[[int], None]]:
    """What only rounds of small batches have to be looked at for."""
    return [
        functools.partial(rounds_apart, LONG_CASE, SMALL_CTAS, True),
        # Two CTAs: CTA F is the only receiver. A rank without tokens has no sender that waits.
        functools.partial(rounds_apart, WIDE_CASE, 2, True),
        # As many warps as a part has chunks: each has one chunk of each part.
        functools.partial(rounds_apart, ODD_CASE, 2, False, threads=256),
        functools.partial(bulk_after_an_unmissed_rank, UNMISSED_CASE),
    ]


def layer(case: Case) -> Group:
    config = case.config(0)
    quantiser = arguments.quantiser_code(find_recipe(config), config.hidden_size)
    variant = launches.variant(config, quantiser)
    kernels = (SMALL_DISPATCH, SMALL_COMBINE, DISPATCH) if case.small else (DISPATCH, COMBINE)
    builds = [variant.build(kernel, pdl=True) for kernel in kernels]
    return Group(
        builds,
        [
            functools.partial(rounds_apart, case, SMALL_CTAS if case.small else CTAS, False),
            functools.partial(last_rank_leaves, case, True),
            functools.partial(last_rank_leaves, case, False),
            *(runs_of_small_rounds() if case.small else []),
            functools.partial(layer_rounds, case),
            functools.partial(layer_without, "dispatch", case),
            functools.partial(layer_without, "combine", case),
        ],
        _SMALL_ROUNDS if case.small else _BULK_ROUNDS,
        functools.partial(clearing_weakly, builds) if case.small else contextlib.nullcontext,
    )


def signalling() -> Group:
    """Signals by st.async.release, in rounds of both kinds."""
    choices = TODAY.but("async_release", True)
    both = [dataclasses.replace(case, choices=choices) for case in (LAYER_CASE, SMALL_CASE)]
    variant = launches.variant(both[0].config(0), 0)
    runs: list[Callable[[int], None]] = []
    for case in both:
        ctas = SMALL_CTAS if case.small else CTAS
        runs.append(functools.partial(rounds_apart, case, ctas, False))
        runs.append(functools.partial(layer_rounds, case))
    kernels = (DISPATCH, COMBINE, SMALL_DISPATCH, SMALL_COMBINE)
    builds = [variant.build(kernel, pdl=True) for kernel in kernels]
    clearing = functools.partial(clearing_weakly, builds, architecture=HAS_ASYNC_RELEASE)
    return Group(builds, runs, "signal_peer", clearing, HAS_ASYNC_RELEASE)


def counting() -> Group:
    """What counts per expert have of their own, in rounds of both kinds."""
    both = [
        dataclasses.replace(case, num_expert_counts=case.num_experts)
        for case in (LAYER_CASE, SMALL_CASE)
    ]
    variant = launches.variant(both[0].config(0), 0)
    runs: list[Callable[[int], None]] = []
    for case in both:
        ctas = SMALL_CTAS if case.small else CTAS
        runs.append(functools.partial(rounds_apart, case, ctas, False))
        runs.append(functools.partial(counted_rounds, case))
    builds = [variant.build(kernel, pdl=True) for kernel in (DISPATCH, SMALL_DISPATCH)]
    pattern = r"^(?!.*clear_unit).*(expert_counts|count_choice|take_count)"
    return Group(builds, runs, pattern, functools.partial(clearing_weakly, builds))


def ordered_rounds(case: Case, seed: int) -> None:
    """With more CTAs than a warp has threads."""
    emulated.check_case("ptx", case, seed=seed, **OPTIONS | {"ctas": 36})


def ordering() -> Group:
    """What slots in the order of the tokens have of their own, with and without a quantiser."""
    runs: list[Callable[[int], None]] = []
    builds = []
    for name in ("as they are", "fp8"):
        # Before a CTA's second token it counts more tokens than a warp has threads.
        case = dataclasses.replace(
            LAYERS[name], tokens=(38, 2, 0), capacity=38, ordered_slots=True, hidden_size=128
        )
        config = case.config(0)
        quantiser = arguments.quantiser_code(find_recipe(config), config.hidden_size)
        builds.append(launches.variant(config, quantiser).build(DISPATCH, pdl=True))
        runs.append(functools.partial(ordered_rounds, case))
    return Group(builds, runs, r"count_to|TokensBefore|count_tokens_before")


def tma_rounds(stages: int, seed: int) -> None:
    emulated.check_case("ptx", TMA_CASE, seed=seed, stages=stages, **OPTIONS)


def by_tma() -> Group:
    """What a combine by TMA has of its own: copies and their barriers.

    With one stage, whose copies no CTA barrier keeps apart from the sums, and with two.
    """
    made = launches.variant(TMA_CASE.config(0), 0).build(COMBINE, pdl=True)
    runs: list[Callable[[int], None]] = [
        functools.partial(rounds_apart, TMA_CASE, CTAS, False),
        *(functools.partial(tma_rounds, stages) for stages in (1, 2)),
    ]
    return Group([made], runs, r"by_tma(:| > start_item:)|by_tma > combine_barrier: cta\.sync")


# ---- going on without a rank


def go_on(case: Case, begun: int, seed: int) -> None:
    """The last rank never comes to a round; the others meet, clear their memory, and do a round.

    No host comes between the broken round and the first meeting.

    Args:
        begun: the ranks that begin the broken round. The others come to the meeting from the round
            before: they have read nothing of what they clear.
    """
    inputs = cases.make_inputs(case, (*case.tokens[:-1], 0))
    last = case.ep_size - 1
    without = dataclasses.replace(case, left_out=(last,))
    with running_layer(case, seed) as ranks:
        ranks.kind = SMALL if case.small else BULK
        outputs = [torch.zeros_like(mine.hidden_states) for mine in inputs[:begun]]
        with ranks.grids.queued():
            received = ranks.dispatch(inputs[:begun])
            ranks.combine([each.send_slots for each in received], outputs)
            survivors.come_to_meeting(ranks, range(last), 1)
        survivors.check_all_came(ranks, range(last))
        assert all(ranks.control(rank).fault for rank in range(begun))
        survivors.go_on_without(ranks, last, have_met=True)
        survivors.check_round(emulated.with_ctas(without, CTAS), inputs, ranks)


def meeting() -> Group:
    """Meet alone: what it orders are other kernels' stores and the host's zeros."""
    made = launches.variant(LAYER_CASE.config(0), 0).build(MEET, pdl=True)
    runs = itertools.product((LAYER_CASE, SMALL_CASE), (2, 1))
    return Group([made], [functools.partial(go_on, *run) for run in runs])


# ---- the LM head

HEAD_CONFIG = HeadConfig(
    tp_size=3,
    tp_rank=0,
    vocab_size=333,
    hidden_size=64,
    max_rows_per_rank=4,
    dtype=torch.bfloat16,
    full_logits=True,
    timeout_s=1e-3,
)
HEAD_ROUND = Round(row_bound=4)


def head_build(kernel: Kernel[Any]) -> Build:
    return HEAD.variant(dtype=element_code(HEAD_CONFIG.dtype)).build(kernel, pdl=True)


@contextlib.contextmanager
def running_head(
    seed: int, rewrite: Callable[[str], str] = unchanged
) -> Iterator[tuple[PtxHeadRanks, list[Call]]]:
    """The ranks, and what they bring to a round."""
    generator = torch.Generator().manual_seed(seed)
    calls = head_ranks.make_calls(HEAD_CONFIG, (4, 1, 3), generator, splits=2)
    ranks = PtxHeadRanks(HEAD_CONFIG, seed=seed, rewrite=rewrite, **OPTIONS)
    try:
        yield ranks, calls
    finally:
        ranks.close()


def head_rounds(seed: int, rewrite: Callable[[str], str] = unchanged) -> None:
    """Rounds with all ranks, against torch."""
    with running_head(seed, rewrite) as (ranks, calls):
        for _ in range(ROUNDS):
            head_ranks.check(calls, HEAD_ROUND, ranks.run(calls, HEAD_ROUND))


def head_rounds_apart(seed: int) -> None:
    """All launches are in the streams at once: no host comes between two kernels, nor a product."""
    with running_head(seed) as (ranks, calls):
        arguments = [ranks.arguments(rank, call, HEAD_ROUND) for rank, call in enumerate(calls)]
        outputs = {
            "head_argmax": [torch.zeros(len(call.hidden), dtype=torch.int64) for call in calls],
            "head_collect": [torch.zeros_like(call.logits) for call in calls],
        }
        with ranks.grids.queued():
            for kernel in HEAD.kernels * ROUNDS:
                for args, output in zip(arguments, outputs.get(kernel.name, ()), strict=False):
                    args.output = output.data_ptr()
                ranks.grids.launch([head_build(kernel)] * len(calls), arguments, None)
        assert all(ranks.fault(rank) is None for rank in range(len(calls)))


def head_without(verb: str, seed: int) -> None:
    """The last rank never comes to the kernel; the others report it, and go on as graphs do."""
    missing = HEAD_CONFIG.tp_size - 1
    with running_head(seed) as (ranks, calls):
        here = list(range(missing + (verb == "head_argmax")))
        for _ in range(ROUNDS):
            steps = [ranks.steps(rank, calls, HEAD_ROUND) for rank in here]
            for kernel in HEAD.kernels:
                here = here[:missing] if kernel.name == verb else here
                launched = [next(steps[rank])[1] for rank in here]
                ranks.grids.launch([head_build(kernel)] * len(here), launched, None, ranks=here)
            for rank in here:
                with pytest.raises(StopIteration) as end:
                    next(steps[rank])
                ids, logits = end.value.value
                assert not ids.any()
                assert bool(logits.isnan().all())
        for rank in here:
            fault = ranks.fault(rank)
            assert fault is not None
            assert fault[1:3] == (PHASES[verb], missing)


def head() -> Group:
    return Group(
        [head_build(kernel) for kernel in HEAD.kernels],
        [
            head_rounds_apart,
            head_rounds,
            functools.partial(head_without, "head_gather"),
            functools.partial(head_without, "head_argmax"),
        ],
    )


# ---- the mutants

GROUPS: dict[str, Callable[[], Group]] = {
    **{name: functools.partial(layer, case) for name, case in LAYERS.items()},
    "signals": signalling,
    "counts": counting,
    "ordered": ordering,
    "tma": by_tma,
    "meet": meeting,
    "lm_head": head,
}
#: Those that `make test` does not look at: what they have beside "fp8" has a seeded bug in
#: tests/kernels/test_sanitizers.py.
LONG = {"nvfp4"}


class Redundant(NamedTuple):
    """Mutants that nothing reports, by a pattern of their names, and why.

    `sometimes`: some schedules report it all the same, so it is no fault of the list if one does.
    """

    mutant: str
    reason: str
    sometimes: bool = False


OWN_RANK = "only kernels of this rank use the word while they run; .gpu holds them"
CALLED_ONCE = (
    "no rank calls again here, so the number orders its entry; test_axioms.py has a second call"
)
BY_MASK = (
    "the words of the mask, released and acquired too, order the same: here a load finds the "
    "latest store, where the model lets it find that of an earlier call (test_axioms.py)"
)
#: The looks of P12 without their acquire. A poll comes before the second one and observes the cell,
#: so there a narrow scope is no race, and acquires nothing.
AWAITED = (
    r"await_combine > for_each_peer > wait_until_reached: "
    r".*(order relaxed|\(2 of 2\): scope gpu)$"
)
REDUNDANT = (
    Redundant(r"load_fault: .*: scope gpu$", OWN_RANK),
    Redundant(r"leave_fault: store_relaxed_sys\(&local->fault, .*: scope gpu$", OWN_RANK),
    Redundant(r"report_fault > is_reached_in_time: .*: scope gpu$", OWN_RANK),
    Redundant(
        r"leave_fault: .*host_fault\), fault\);: scope gpu$",
        "the host polls this word while the kernel runs, and needs .sys; the machine's hosts wait",
    ),
    Redundant(
        r"publish_counts > for_each_peer: .*_relaxed_gpu\(&send_counters\[peer\].*: scope cta$",
        "P2 has ordered it after the other CTAs' atomics, so a weak access would do as well",
    ),
    Redundant(
        r"await_pulled > .*is_reached_in_time: .*\(2 of 2\): scope gpu$",
        "a peer stores this word right behind the cell that the CTA has waited for, so no thread "
        "here comes to a second look; the same mutant of the first look is reported",
    ),
    Redundant(
        r"take_count: .*_relaxed_gpu\(counter.*: scope cta$",
        "P2, or the barrier of the only CTA that counts, has ordered it after the others' atomics",
    ),
    Redundant(r"publish_expert_counts > count_choice: .*: scope cta$", "CTA F counts alone"),
    Redundant(
        r"end_taking: .*store_relaxed_gpu.*: scope cta$",
        "this thread's atomic has observed all the others, which come before the store therefore",
    ),
    Redundant(
        r"receive_round > await_previous_round > await_combine .*\(2 of 2\): scope gpu$",
        "as below; but where a peer's next signal comes while a thread looks a second time, its "
        "store races with the look",
        sometimes=True,
    ),
    Redundant(
        rf"receive_round > await_previous_round > {AWAITED}",
        "a receiver stores to its own rank only, and CTA F of its launch acquires the same signals "
        "for the kernels after it; it waits to name a rank that is missing since its combine",
    ),
    Redundant(
        rf"dispatch_body > await_small_combine > {AWAITED}",
        "a CTA without tokens puts nothing, the cells (P1) order their looks and stores by "
        "themselves, and the combine after it acquires newer signals (P3); it waits to name a rank",
    ),
    Redundant(r"leave_entry: store_release_sys\(entry \+ kRankMaskWords.*order relaxed$", BY_MASK),
    Redundant(
        r"take_entry > wait_until_reached: .*(order relaxed|\(2 of 2\): scope gpu)$", BY_MASK
    ),
    Redundant(r"leave_entry: store_release_sys\(entry \+ word", CALLED_ONCE),
    Redundant(r"take_entry: .*load_acquire_sys\(entry \+ word", CALLED_ONCE),
    Redundant(r"take_entry: .*load_relaxed_sys\(cell\)", CALLED_ONCE),
)

#: Mutants of each numbered pair of kernels/PROTOCOL.md: its release and its acquire.
PAIRS = {
    "P1": (r"dispatch: .*signal_peer: .*order relaxed", r"dispatch: .*wait_for_epoch: .*relaxed"),
    "P2": (r"dispatch: .*arrive: .*order acquire", r"dispatch: .*arrive: .*order release"),
    "P3": (
        r"combine: .*signal_peer: .*order relaxed",
        r"combine: .*wait_for_epoch: .*relaxed",
        r"combine: .*fence_copies_global.*: removed",
    ),
    "P4": (r"combine_barrier: cta\.sync\(\); \(2 of 2\): removed",),
    "P5": (r"completes_rows: .*order acquire", r"completes_rows: .*order release"),
    "P6": (r"gather: .*signal_peer: .*order relaxed", r"gather: .*wait_for_epoch: .*relaxed"),
    "P7": (r"gather: .*arrive_last: .*order acquire", r"gather: .*arrive_last: .*order release"),
    "P8": (r"argmax: .*signal_peer: .*order relaxed", r"argmax: .*wait_for_epoch: .*relaxed"),
    "P9": (r"argmax: .*arrive_last: .*order acquire", r"argmax: .*arrive_last: .*order release"),
    "P10": (
        r"small_dispatch: .*put_unit > store: .*\(1 of 4\): scope gpu",
        r"small_dispatch: .*look_at_unit > load: .*scope",
    ),
    "P11": (
        r"tell_pulled .*signal_peer: .*order relaxed",
        r"await_pulled .*wait_for_epoch: .*order relaxed",
    ),
    "P12": (
        r"small_combine: .*signal_peer: .*order relaxed",
        r"send_parts_of_tokens > await_previous_round .*wait_until_reached: .*\(1 of 2\): order",
        r"publish_small_round > await_previous_round .*wait_until_reached: .*\(2 of 2\): order",
        r"put_tokens > await_small_combine .*wait_until_reached: .*\(2 of 2\): order relaxed",
    ),
    "P13": (
        r"meet: .*store_release_sys\(entry \+ kRankMaskWords.*scope gpu",
        r"meet: .*wait_until_reached: .*\(1 of 2\): scope gpu",
    ),
    "P14": (
        r"combine: .*tell_end: .*store_release_sys.*order relaxed",
        r"publish_round > await_leavers .*wait_until_reached: .*\(2 of 2\): order relaxed",
    ),
    "P15": (
        r"start_item: expect_copies.*order relaxed",
        r"by_tma: while .*have_landed.*order relaxed",
    ),
}


def redundant_of(mutant: Mutant) -> Redundant | None:
    """The entry of a mutant that nothing need report; None if something must."""
    return next((each for each in REDUNDANT if re.search(each.mutant, str(mutant))), None)


def reason_of(mutant: Mutant) -> str | None:
    """Why nothing need report a mutant; None if something must."""
    listed = redundant_of(mutant)
    return None if listed is None else listed.reason


def all_mutants(group: Group) -> list[Mutant]:
    every = [each for made in group.builds for each in mutants.mutants_of(made, group.architecture)]
    return [each for each in every if re.search(group.mutants, str(each))]


def check(group: Group, seeds: Sequence[int]) -> None:
    """Every mutant of the group is reported in a schedule of a run, or REDUNDANT and in none.

    seeds: of the runs as they are and of redundant mutants. What must be found may take another
        schedule; it ends with the first report.
    """
    wrong = []
    with group.around():
        for seed, run in itertools.product(seeds or SEEDS[:1], group.runs):
            run(seed)
        for mutant in all_mutants(group):
            listed = redundant_of(mutant)
            if listed is not None and listed.sometimes:
                continue
            finding = mutants.find(mutant, runs_of(group, SEEDS if listed is None else seeds))
            if (finding is None) == (listed is None):
                reason = "not listed" if listed is None else listed.reason
                wrong.append(f"{mutant}\n  {finding or 'not reported'}\n  {reason}")
    assert not wrong, "\n".join(wrong)


def runs_of(group: Group, seeds: Sequence[int]) -> list[Callable[[], None]]:
    return [functools.partial(run, seed) for seed in seeds for run in group.runs]


@pytest.mark.parametrize("name", sorted(GROUPS.keys() - LONG))
def test_mutants_are_reported(name: str) -> None:
    check(GROUPS[name](), ())


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", GROUPS)
def test_all_mutants_are_reported(name: str) -> None:
    """Those that are listed as redundant, in many schedules."""
    check(GROUPS[name](), SEEDS)


def test_what_the_choice_asks_for_are_asynchronous_signals() -> None:
    """Each kernel of a layer has one."""
    every = all_mutants(signalling())
    assert {each.site.kind for each in every} == {"async_store"}
    assert len({each.kernel.name for each in every}) == 4


def test_pairs_are_those_of_the_protocol_page() -> None:
    numbered = re.findall(r"^\| (P\d+) \|", PROTOCOL_PAGE.read_text(), re.MULTILINE)
    assert sorted(PAIRS) == sorted(numbered)


def test_tables_name_mutants() -> None:
    """Each redundant mutant exists; each half of a pair has one that must be found."""
    groups = [make() for name, make in GROUPS.items() if name not in LONG]
    every = [mutant for group in groups for mutant in all_mutants(group)]
    for redundant in REDUNDANT:
        assert any(re.search(redundant.mutant, str(mutant)) for mutant in every), redundant
    needed = [str(mutant) for mutant in every if redundant_of(mutant) is None]
    for pattern in itertools.chain(*PAIRS.values()):
        assert any(re.search(pattern, name) for name in needed), pattern


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        (r"head_gather_body: cta\.sync\(\);.*: removed", "bar.sync \t0;", ""),
        (r"arrive_last: .*order relaxed", ".acq_rel.", ".relaxed."),
        (r"signal_peer: .*scope gpu", ".sys.", ".gpu."),
    ],
    ids=["removed", "order", "scope"],
)
def test_a_changed_site_is_as_good_as_changed_text(name: str, old: str, new: str) -> None:
    """The same report, but for the instruction, as of PTX in which it has been changed."""
    every = mutants.mutants_of(head_build(HEAD.kernels[0]), ARCHITECTURE)
    (mutant,) = (each for each in every if re.search(name, str(each)))

    def edited(ptx: str) -> str:
        if f".entry {mutant.kernel.name}(" not in ptx:
            return ptx
        lines = ptx.split("\n")
        line = lines[mutant.site.line - 1]
        assert line.count(old) == 1
        lines[mutant.site.line - 1] = line.replace(old, new)
        return "\n".join(lines)

    by_table = mutants.find(mutant, [functools.partial(head_rounds, SEEDS[0])])
    by_text = mutants.report_of([functools.partial(head_rounds, SEEDS[0], edited)])
    assert by_table is not None
    message = by_table.message.replace(mutant.site.text, mutant.site.text.replace(old, new))
    assert by_text == by_table._replace(message=message)
