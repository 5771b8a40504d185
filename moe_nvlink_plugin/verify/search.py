"""Search for choices that are clearly faster than today's, whatever measures them.

It is coordinate descent: one choice after the other takes the candidate that is clearly better than
the best so far. Times vary, and among many candidates some look better by chance. So a winner is
measured once more before it is taken, and all of them together against today's values at the end.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from moe_nvlink_plugin.choices import TODAY, Choice, Choices, Value

#: A candidate is clearly better if its median time is below this part of the other's, and most of
#: its turns were faster; clearly worse if the same holds the other way round.
CLEARLY = 0.97

#: For each load (a number of tokens), the ratio of the second one's time to the first one's in each
#: turn; equal on all ranks. None: the second one cannot run here.
Ratios: TypeAlias = Sequence[Sequence[float]]
Compare: TypeAlias = Callable[[Choices, Choices], Ratios | None]

_MOST_SWEEPS = 3


class Verdict(NamedTuple):
    """What turns say.

    Attributes:
        medians: of each load's ratios.
        is_better: some load is clearly faster, and none clearly slower.
    """

    medians: tuple[float, ...]
    is_better: bool

    @property
    def score(self) -> float:
        """Geometric mean of the medians."""
        return math.exp(statistics.fmean(map(math.log, self.medians)))


def judge(ratios: Ratios) -> Verdict:
    """Return what the turns of each load say. Local."""
    medians, faster, slower = [], False, False
    for of_load in ratios:
        low, median, high = statistics.quantiles(of_load, n=4)
        medians.append(median)
        faster |= median < CLEARLY and high < 1
        slower |= median > 1 / CLEARLY and low > 1
    return Verdict(tuple(medians), faster and not slower)


class Step(NamedTuple):
    """A choice that was tried: what it had before, what it has now, and the time's part if changed.

    Attributes:
        tried: candidates that ran.
        unfit: candidates that cannot run here.
    """

    name: str
    before: Value
    value: Value
    score: float
    tried: int
    unfit: tuple[Value, ...] = ()


class Found(NamedTuple):
    """The end of a search.

    Attributes:
        choices: the best; today's if there is no gain.
        steps: the choices in the order of the search.
        is_complete: whether the time sufficed for all candidates.
        total: the best ones against today's; None if no choice changed.
    """

    choices: Choices
    steps: tuple[Step, ...]
    is_complete: bool
    total: Verdict | None

    @property
    def gains(self) -> bool:
        """Whether the choices are clearly better than today's."""
        return self.total is not None and self.total.is_better


def search(
    space: Sequence[Choice],
    compare: Compare,
    *,
    goes_on: Callable[[], bool] = lambda: True,
    confirm: Compare | None = None,
    report: Callable[[Step], None] = lambda _step: None,
) -> Found:
    """Return the best choices. Collective as `compare` and `goes_on` are.

    Args:
        space: choices to try, with the candidates that make sense here.
        compare: measures two values against each other.
        goes_on: whether there is time for one more candidate; equal on all ranks.
        confirm: measures the result against today's values; None: compare.
        report: called after each choice.
    """
    best, steps, in_time = TODAY, [], True
    for sweep in range(_MOST_SWEEPS):
        before = best
        for one in space:
            step, best, in_time = _one_choice(one, best, compare, goes_on)
            if not sweep or step.before != step.value:
                steps.append(step)
                report(step)
            if not in_time:
                break
        if best == before or not in_time:
            break
    total = None
    if best != TODAY:
        ratios = (confirm or compare)(TODAY, best)
        total = None if ratios is None else judge(ratios)
    if total is None or not total.is_better:
        best = TODAY
    return Found(best, tuple(steps), in_time, total)


def _one_choice(
    one: Choice, best: Choices, compare: Compare, goes_on: Callable[[], bool]
) -> tuple[Step, Choices, bool]:
    """Return what became of a choice, the best choices, and whether the time sufficed."""
    now: Value = getattr(best, one.name)
    winner, score, tried, unfit, in_time = best, 1.0, 0, [], True
    for value in one.candidates:
        if value == now and type(value) is type(now):
            continue
        if not goes_on():
            in_time = False
            break
        other = best.but(one.name, value)
        ratios = compare(best, other)
        if ratios is None:
            unfit.append(value)
            continue
        tried += 1
        verdict = judge(ratios)
        if verdict.is_better and verdict.score < score:
            winner, score = other, verdict.score
    if winner != best:
        again = compare(best, winner)
        confirmed = None if again is None else judge(again)
        if confirmed is not None and confirmed.is_better:
            score = max(score, confirmed.score)
        else:
            winner, score = best, 1.0
    value = getattr(winner, one.name)
    return Step(one.name, now, value, score, tried, tuple(unfit)), winner, in_time
