"""The search of moe-nvlink tune on machines whose costs are planted."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from moe_nvlink_plugin.choices import TODAY, Choice, Choices, table
from moe_nvlink_plugin.verify import search
from moe_nvlink_plugin.verify.search import Ratios, judge

LOADS, TURNS = 4, 9
SPACE = [one for one in table() if one.is_tuned]
SMALL = [one for one in SPACE if one.name in ("small_tokens", "dispatch_threads", "pdl")]


class Machine:
    """A machine on which each candidate of each choice has a cost, at each load.

    Attributes:
        optimum: the choices with the least costs.
        compared: how often it was asked.
    """

    def __init__(self, seed: int, noise: float, space: list[Choice]) -> None:
        self._random, self._noise = random.Random(seed), noise
        self._costs: dict[tuple[str, str], list[float]] = {}
        self.optimum, self.compared = TODAY, 0
        for one in space:
            best = self._random.choice(one.candidates)
            self.optimum = self.optimum.but(one.name, best)
            for value in one.candidates:
                # The farther from the best, the dearer, and clearly so at one load at least.
                steps = abs(one.candidates.index(value) - one.candidates.index(best))
                costs = [steps * self._random.uniform(0, 0.05) for _ in range(LOADS)]
                costs[self._random.randrange(LOADS)] = steps * 0.08
                self._costs[one.name, repr(value)] = costs

    def time(self, choices: Choices, load: int) -> float:
        costs = (
            of_load[load]
            for (name, value), of_load in self._costs.items()
            if repr(getattr(choices, name)) == value
        )
        return math.exp(sum(costs) + self._random.gauss(0, self._noise))

    def compare(self, first: Choices, second: Choices) -> Ratios | None:
        self.compared += 1
        return [
            [self.time(second, load) / self.time(first, load) for _ in range(TURNS)]
            for load in range(LOADS)
        ]


@pytest.mark.parametrize("noise", [0.0, 0.01], ids=["exact", "noisy"])
@pytest.mark.parametrize("seed", range(12))
def test_the_planted_optimum_is_found(seed: int, noise: float) -> None:
    machine = Machine(seed, noise, SPACE)
    found = search.search(SPACE, machine.compare)
    assert found.is_complete
    if machine.optimum == TODAY:
        return
    assert found.gains
    assert found.total is not None
    assert found.total.score < search.CLEARLY
    assert found.choices == machine.optimum


def test_a_gain_where_there_is_none_is_seldom_found() -> None:
    """All candidates cost the same, and times vary by a tenth: that fools a search in 25."""
    every = [search.search(SPACE, Machine(seed, 0.1, []).compare) for seed in range(100)]
    assert sum(bool(found.gains) for found in every) <= 10
    assert all(found.choices == TODAY for found in every if not found.gains)


def planted(costs: Callable[[Choices, int], float]) -> search.Compare:
    def compare(first: Choices, second: Choices) -> Ratios:
        return [[costs(second, load) / costs(first, load)] * TURNS for load in range(LOADS)]

    return compare


def test_what_is_faster_here_and_slower_there_is_no_gain() -> None:
    def costs(choices: Choices, load: int) -> float:
        if choices.dispatch_threads == 512:
            return 1.1 if load == 0 else 0.5
        return 1.0

    assert not search.search(SMALL, planted(costs)).gains


def test_what_costs_the_same_elsewhere_is_a_gain() -> None:
    found = search.search(SMALL, planted(lambda one, load: 1.0 if one.pdl or load else 0.9))
    assert found.choices == Choices(pdl=False)
    assert found.total is not None
    assert found.total.medians == (0.9, 1.0, 1.0, 1.0)
    assert [step.name for step in found.steps if step.value != step.before] == ["pdl"]


def test_a_choice_that_pays_only_with_another_is_found_in_the_next_sweep() -> None:
    def costs(choices: Choices, _load: int) -> float:
        if choices.pdl:
            return 1.0
        return 0.7 if choices.small_tokens == 8 else 0.9

    assert search.search(SMALL, planted(costs)).choices == Choices(pdl=False, small_tokens=8)


def test_luck_is_no_gain() -> None:
    """The first time each candidate looks faster, and never again."""
    seen: set[Choices] = set()

    def compare(_first: Choices, second: Choices) -> Ratios:
        ratio = 1.0 if second in seen else 0.5
        seen.add(second)
        return [[ratio] * TURNS] * LOADS

    found = search.search(SMALL, compare)
    assert (found.choices, found.total) == (TODAY, None)


def test_a_gain_that_does_not_last_is_none() -> None:
    found = search.search(
        SMALL,
        planted(lambda one, _load: 1.0 if one.pdl else 0.5),
        confirm=lambda _first, _second: [[1.0] * TURNS] * LOADS,
    )
    assert not found.gains
    assert found.choices == TODAY


def test_what_cannot_run_is_left_out() -> None:
    def compare(first: Choices, second: Choices) -> Ratios | None:
        if second.dispatch_threads == 512:
            return None
        return planted(lambda one, _load: 1.0 if one.dispatch_threads == 256 else 0.5)(
            first, second
        )

    found = search.search(SMALL, compare)
    assert found.choices == Choices(dispatch_threads=128)
    (step,) = [one for one in found.steps if one.name == "dispatch_threads"]
    assert step.unfit == (512,)


@pytest.mark.parametrize("most", [0, 1, 5, 12])
def test_the_time_bounds_the_search(most: int) -> None:
    machine = Machine(0, 0.0, SPACE)
    found = search.search(SPACE, machine.compare, goes_on=lambda: machine.compared < most)
    assert not found.is_complete
    assert machine.compared <= most + 2, "a winner is measured again, and against today's"


def test_what_is_clear() -> None:
    def is_better(*ratios: float) -> bool:
        return judge([ratios]).is_better

    assert is_better(0.9, 0.9, 0.9, 0.9, 0.9)
    assert not is_better(0.98, 0.98, 0.98, 0.98, 0.98), "too little"
    assert not is_better(0.9, 0.9, 0.9, 1.2, 1.2), "too often slower"
    assert not is_better(1.0, 1.0, 1.0, 1.0, 1.0)
    assert not judge([[0.5] * 5, [1.2] * 5]).is_better, "slower at another load"
    assert judge([[0.5] * 5, [2.0] * 5]).score == 1.0
