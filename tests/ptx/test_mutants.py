"""Every order, scope and barrier of the kernels' PTX is needed: without it, something is reported.

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
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from moe_nvlink_plugin import HeadConfig
from moe_nvlink_plugin.exchange import arguments, launches
from moe_nvlink_plugin.exchange.kernels import LAYER
from moe_nvlink_plugin.jit.header import constants, structs
from moe_nvlink_plugin.launch.arguments import element_code
from moe_nvlink_plugin.launch.kernel import Build, Kernel
from moe_nvlink_plugin.lm_head.kernels import HEAD
from moe_nvlink_plugin.plugins import find_recipe
from tests.support import cases, emulated, head_ranks
from tests.support.cases import Case
from tests.support.emulated import EmulatedRanks
from tests.support.head_ranks import Call, Round
from tests.support.ptx import mutants
from tests.support.ptx.backend import PtxBackend
from tests.support.ptx.head import PtxHeadRanks
from tests.support.ptx.mutants import Finding, Mutant

KERNELS_README = Path(__file__).parents[2] / "kernels" / "README.md"
SEEDS = (1, 2, 3)
CTAS, THREADS = 2, 64  # two warps
ROUNDS = 2

#: Phases of fault words, by the kernel in which a rank waits.
PHASES = {
    "dispatch": "kPhaseDispatch",
    "combine": "kPhaseCombine",
    "head_gather": "kPhaseHeadGather",
    "head_argmax": "kPhaseHeadArgmax",
}


class Group(NamedTuple):
    """Kernels, and what runs them: with a seed of the scheduler."""

    builds: list[Build]
    runs: list[Callable[[int], None]]


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
LAYERS = {
    "as they are": LAYER_CASE,
    "fp8": dataclasses.replace(LAYER_CASE, recipe="fp8_token", combine="fp8_block"),
    "nvfp4": dataclasses.replace(LAYER_CASE, recipe="nvfp4", combine="nvfp4"),
}


class Ranks(EmulatedRanks):
    """Ranks of LAYER_CASE, whose hosts keep a fault word of their own."""

    def __init__(self, case: Case, backend: PtxBackend) -> None:
        super().__init__(emulated.config_of(case, timeout_s=1e-3), backend, hidden_splits=2)
        self.words = (ctypes.c_uint64 * case.ep_size)()
        place = structs()["LocalControl"].host_fault.offset
        for rank in range(case.ep_size):
            address = ctypes.addressof(self.words) + 8 * rank
            backend.grids.machine.allocate(rank, address, 8, "host_fault")
            start = self.regions[0]["local"].offset + place
            self.memory[rank, start : start + 8].view(torch.int64).fill_(address)


@contextlib.contextmanager
def running_layer(case: Case, seed: int) -> Iterator[Ranks]:
    options = {"ctas": CTAS, "threads": THREADS, "pdl": True, "seed": seed, "races": True}
    backend = PtxBackend(case.ep_size, case.config(0), **options)
    try:
        yield Ranks(case, backend)
    finally:
        backend.close()


def layer_rounds(case: Case, seed: int) -> None:
    """Rounds with all ranks, against the reference."""
    inputs = cases.make_inputs(case)
    with running_layer(case, seed) as ranks:
        for _ in range(ROUNDS):
            seen = ranks.run_round(inputs)
            emulated.check_round(emulated.with_ctas(case, CTAS), inputs, seen, near=True)


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


def layer(case: Case) -> Group:
    config = case.config(0)
    quantiser = arguments.quantiser_code(find_recipe(config), config.hidden_size)
    variant = launches.variant(config, quantiser)
    return Group(
        [variant.build(kernel, pdl=True) for kernel in LAYER.kernels],
        [
            functools.partial(layer_rounds, case),
            functools.partial(layer_without, "dispatch", case),
            functools.partial(layer_without, "combine", case),
        ],
    )


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
def running_head(seed: int) -> Iterator[tuple[PtxHeadRanks, list[Call]]]:
    """The ranks, and what they bring to a round."""
    generator = torch.Generator().manual_seed(seed)
    calls = head_ranks.make_calls(HEAD_CONFIG, (4, 1, 3), generator, splits=2)
    options = {"ctas": CTAS, "threads": THREADS, "pdl": True, "seed": seed, "races": True}
    ranks = PtxHeadRanks(HEAD_CONFIG, **options)
    try:
        yield ranks, calls
    finally:
        ranks.close()


def head_rounds(seed: int) -> None:
    """Rounds with all ranks, against torch."""
    with running_head(seed) as (ranks, calls):
        for _ in range(ROUNDS):
            head_ranks.check(calls, HEAD_ROUND, ranks.run(calls, HEAD_ROUND))


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
            head_rounds,
            functools.partial(head_without, "head_gather"),
            functools.partial(head_without, "head_argmax"),
        ],
    )


# ---- the mutants

GROUPS: dict[str, Callable[[], Group]] = {
    **{name: functools.partial(layer, case) for name, case in LAYERS.items()},
    "lm_head": head,
}


class Redundant(NamedTuple):
    """Mutants that nothing reports, by a pattern of their names, and why."""

    mutant: str
    reason: str


REDUNDANT: tuple[Redundant, ...] = ()


def reason_of(mutant: Mutant) -> str | None:
    """Why nothing can report a mutant; None if something must."""
    return next((each.reason for each in REDUNDANT if re.search(each.mutant, str(mutant))), None)


def look_for(group: Group, mutant: Mutant, seeds: Sequence[int] = SEEDS) -> Finding | None:
    """What is reported of a mutant in any schedule and any run."""
    return mutants.find(
        mutant, (functools.partial(run, seed) for seed in seeds for run in group.runs)
    )
