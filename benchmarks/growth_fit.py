"""Curves through measured times: sums of terms that physics names, and the points they miss.

A curve is a sum of coefficient x term, no coefficient below zero: each term is something that
takes time (a fixed cost, a row that is copied, a peer that is waited for). Residuals are relative,
since a sweep spans decades, and large ones are damped: a knee shows as one and bends no curve.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import curve_fit

#: Relative residuals above this are damped (scipy's soft_l1): about what a quiet machine repeats.
DAMPED_FROM = 0.05
#: A point is no knee where it is off by less than this, however small its own spread.
LEAST_OFF = 0.10
CURVE_POINTS = 61


class Point(NamedTuple):
    """Microseconds at one value of a dimension: median and quartiles."""

    x: float
    us: float
    q25_us: float
    q75_us: float


class Term(NamedTuple):
    """Something that takes time. `value(x)`: how much of it there is; `written`: as a formula."""

    coefficient: str
    written: str
    value: Callable[[float], float]

    def times(self, factor: str) -> str:
        return f"{factor}*{self.written}" if self.written else factor


class Fit(NamedTuple):
    """A curve through points."""

    terms: tuple[Term, ...]
    values: tuple[float, ...]
    points: tuple[Point, ...]

    def us(self, x: float) -> float:
        """Return the curve's time."""
        return sum(v * term.value(x) for v, term in zip(self.values, self.terms, strict=True))

    @property
    def off(self) -> list[float]:
        """Return each point's time over the curve's, less 1."""
        return [point.us / self.us(point.x) - 1 for point in self.points]

    def knees(self, least_off: float = LEAST_OFF) -> list[dict[str, float]]:
        """Return points off by `least_off` whose own quartiles do not reach the curve."""
        found = []
        for point, off in zip(self.points, self.off, strict=True):
            fit_us = self.us(point.x)
            if not point.q25_us <= fit_us <= point.q75_us and abs(off) > least_off:
                found.append({"x": point.x, "us": point.us, "fit_us": fit_us, "off": off})
        return found

    def described(self, key: str) -> dict[str, Any]:
        """Return points, fit and knees for a result of kind "growth"; `key`: of the knees' ids."""
        named = list(zip(self.values, self.terms, strict=True))
        # In the printed curve terms that take no time are left out.
        printed = [term.times(f"{value:.3g}") for value, term in named if value > 0]
        steps = np.geomspace(self.points[0].x, self.points[-1].x, CURVE_POINTS).tolist()
        return {
            "points": [list(point) for point in self.points],
            "fit": {
                "formula": " + ".join(term.times(term.coefficient) for term in self.terms),
                "printed": " + ".join(printed) or "0",
                "values": {term.coefficient: value for value, term in named},
                "curve": [[x, self.us(x)] for x in steps],
                "off": self.off,
            },
            # NOTES.md explains each, beside its id.
            "knees": [{"id": f"{key}-{knee['x']:g}", **knee} for knee in self.knees()],
        }


def fit(points: Sequence[Point], terms: Sequence[Term]) -> Fit:
    """Return the curve of these terms that is nearest to the points.

    Raises:
        ValueError: fewer points than terms, a time that is not positive, or points out of order.
    """
    if len(points) < len(terms):
        raise ValueError(
            f"{len(points)} points cannot give {len(terms)} coefficients; measure more points"
        )
    if any(one.x >= other.x for one, other in itertools.pairwise(points)):
        raise ValueError("points must be in order of x, none twice")
    if any(not (point.us > 0 and math.isfinite(point.us)) for point in points):
        raise ValueError(f"times must be positive: {[point.us for point in points]}")
    # Columns: what a coefficient of 1 adds, relative to the measured time; then to one length.
    columns = np.array([[term.value(p.x) / p.us for term in terms] for p in points])
    lengths = np.linalg.norm(columns, axis=0)
    lengths[lengths == 0] = 1.0
    scaled, exact = columns / lengths, {"xtol": 1e-12, "ftol": 1e-12, "gtol": None}
    found, _covariance = curve_fit(
        lambda rows, *values: rows @ np.array(values),
        scaled,
        np.ones(len(points)),
        p0=np.full(len(terms), 1.0),
        bounds=(0, np.inf),
        loss="soft_l1",
        f_scale=DAMPED_FROM,
        **exact,
    )
    values = found / lengths
    # The solver stays a hair above its bound: what never makes a thousandth of a time is zero.
    values[values * columns.max(axis=0) <= 1e-3] = 0.0
    return Fit(tuple(terms), tuple(values.tolist()), tuple(points))
