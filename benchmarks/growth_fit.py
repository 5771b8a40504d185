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
from scipy import optimize

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


class Knee(NamedTuple):
    """A point off the curve by more than its own spread. `off`: time over the curve's, less 1."""

    point: Point
    fit_us: float
    off: float


class Fit(NamedTuple):
    """A curve through points. `off`: of each point, its time over the curve's, less 1."""

    terms: tuple[Term, ...]
    values: tuple[float, ...]
    points: tuple[Point, ...]
    off: tuple[float, ...]

    def us(self, x: float) -> float:
        """The curve's time."""
        return sum(v * term.value(x) for v, term in zip(self.values, self.terms, strict=True))

    @property
    def formula(self) -> str:
        """With the coefficients' names."""
        return _sum(
            term.coefficient + (f"*{term.written}" if term.written else "") for term in self.terms
        )

    @property
    def printed(self) -> str:
        """With the coefficients' values; terms that take no time are left out."""
        return _sum(
            f"{value:.3g}" + (f"*{term.written}" if term.written else "")
            for value, term in zip(self.values, self.terms, strict=True)
            if value > 0
        )

    def curve(self) -> list[tuple[float, float]]:
        """(x, us) at even steps of log x, between the first point and the last."""
        low, high = self.points[0].x, self.points[-1].x
        steps = np.geomspace(low, high, CURVE_POINTS) if high > low else [low]
        return [(float(x), self.us(float(x))) for x in steps]

    def knees(self, least_off: float = LEAST_OFF) -> list[Knee]:
        """Points whose own quartiles do not reach the curve, and that are off by `least_off`."""
        found = []
        for point, off in zip(self.points, self.off, strict=True):
            fit_us = self.us(point.x)
            if not point.q25_us <= fit_us <= point.q75_us and abs(off) > least_off:
                found.append(Knee(point, fit_us, off))
        return found


def fit(points: Sequence[Point], terms: Sequence[Term]) -> Fit:
    """The curve of these terms that is nearest to the points.

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
    scaled, ones = columns / lengths, np.ones(len(points))
    start, _norm = optimize.nnls(scaled, ones)
    found = optimize.least_squares(
        lambda values: scaled @ values - ones,
        np.maximum(start, 1e-9),
        jac=lambda _values: scaled,
        bounds=(0, np.inf),
        loss="soft_l1",
        f_scale=DAMPED_FROM,
        xtol=1e-12,
        ftol=1e-12,
    )
    values = tuple(_nothing_or(v, v * most) for v, most in _shares(found.x / lengths, columns))
    plain = Fit(tuple(terms), values, tuple(points), ())
    return plain._replace(off=tuple(point.us / plain.us(point.x) - 1 for point in points))


def described(found: Fit, key: str, least_off: float = LEAST_OFF) -> dict[str, Any]:
    """Points, fit and knees as a result of kind "growth" has them; `key`: of the knees' ids."""
    return {
        "points": [list(point) for point in found.points],
        "fit": {
            "formula": found.formula,
            "printed": found.printed,
            "values": {
                term.coefficient: value
                for term, value in zip(found.terms, found.values, strict=True)
            },
            "curve": [list(pair) for pair in found.curve()],
            "off": list(found.off),
        },
        "knees": [
            {
                "id": f"{key}-{knee.point.x:g}",
                "x": knee.point.x,
                "us": knee.point.us,
                "fit_us": knee.fit_us,
                "off": knee.off,
                "explanation": "",  # in NOTES.md, beside the id
            }
            for knee in found.knees(least_off)
        ],
    }


def _sum(parts: Any) -> str:
    return " + ".join(parts) or "0"


def _shares(values: Any, columns: Any) -> list[tuple[float, float]]:
    """Each coefficient, and which part of a point's time its term makes at most."""
    most = columns.max(axis=0)
    return [(float(value), float(part)) for value, part in zip(values, most, strict=True)]


def _nothing_or(value: float, most: float) -> float:
    """The solver stays a hair above its bound: what never makes a thousandth of a time is zero."""
    return value if most > 1e-3 else 0.0
