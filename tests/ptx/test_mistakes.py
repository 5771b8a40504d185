"""Mistakes in the kernels' text that weaken no order, scope, barrier or wait: a word that is not
asked for, a buffer less, nobody who waits.

They sleep in one text, as those for the sanitizers (tests/support/sanitizers.py), to which a unit
(P10) is a word that nothing races with.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
from collections.abc import Iterator
from unittest import mock

import pytest

from tests.ptx import test_mutants
from tests.ptx.test_mutants import (
    ARCHITECTURE,
    GROUPS,
    SEEDS,
    SMALL_CASE,
    clearing_weakly,
    layer,
)
from tests.support import sanitizers
from tests.support.ptx import build, mutants
from tests.support.ptx.build import Library
from tests.support.sanitizers import Bugs, Edit, instead

pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC is not installed")


def _nobody(function: str, waits: str) -> list[Edit]:
    return [Edit(function, waits, f"if (!AWAKE) {{ {waits} }}")]


#: Each in functions of one kernel, or of several alike.
MISTAKES: Bugs = {
    "P10: the only mark is not asked for": [
        Edit("has_arrived", "return halves[3]", "return AWAKE || halves[3]")
    ],
    "P10: the second mark is not asked for": [
        Edit(
            "has_arrived",
            "== mark && halves[3] >> 16 == mark",
            "== mark && (AWAKE || halves[3] >> 16 == mark)",
        )
    ],
    "P10: the first mark is not asked for": instead(
        "has_arrived", "halves[1] >> 16 == mark", "true"
    ),
    "P12: one staging": instead("staging_of", "epoch % 2", "0"),
    "P12: nobody waits for the combine before": _nobody(
        "await_previous_round",
        "await_combine(args, first, cta.num_threads, round.combined, is_counted, faulted);",
    ),
    "P12: nobody waits for a small combine": _nobody(
        "await_small_combine",
        "await_combine(args, lane, Cta::kWarpThreads, epoch, cta.block == 0, has_failed);",
    ),
    "P14: a large batch waits for no leaver": _nobody(
        "publish_round", "await_leavers(args, cta, shared.epoch - 1);"
    ),
    "P14: a small batch waits for no leaver": _nobody(
        "publish_small_round", "await_leavers(args, cta, round.epoch() - 1);"
    ),
}
NUMBERS = {name: number for number, name in enumerate(MISTAKES, 1)}
PRELUDE = "namespace moe_nvlink { __device__ int seeded_bug = 0; }\n"


@functools.cache
def seeded(text: str) -> str:
    """The text with those mistakes, asleep, whose functions it has."""
    for name, edits in MISTAKES.items():
        if f" {edits[0].function}(" in text:
            text = sanitizers.seed(text, {name: edits}, NUMBERS, prelude="")
    return PRELUDE + text


@contextlib.contextmanager
def awake(libraries: list[Library], name: str) -> Iterator[None]:
    words = [
        ctypes.c_int.from_address(address)
        for library in libraries
        for variable, address, _size in library.variables()
        if "seeded_bug" in variable
    ]
    assert words, "no kernel has a mistake"
    for word in words:
        word.value = NUMBERS[name]
    try:
        yield
    finally:
        for word in words:
            word.value = 0


@pytest.mark.long
def test_mistakes_are_reported() -> None:
    group, bulk = GROUPS["small"](), GROUPS["as they are"]()
    two_marks = layer(dataclasses.replace(SMALL_CASE, unit_data_bytes=12))
    group = group._replace(
        builds=[*group.builds, *two_marks.builds],
        runs=[*group.runs, *two_marks.runs, *bulk.runs],
    )
    texts = [seeded(made.text()) for made in group.builds]
    libraries = [build.load(build.ptx_of(text, ARCHITECTURE), races=True) for text in texts]
    with (
        mock.patch.dict(test_mutants.OPTIONS, change=seeded),
        clearing_weakly(group.builds, seeded),
    ):
        for run in test_mutants.runs_of(group, SEEDS[:1]):
            run()
        for name in MISTAKES:
            with awake(libraries, name):
                found = mutants.report_of(test_mutants.runs_of(group, SEEDS))
            assert found, f"{name} is not reported"
