"""What is printed while a run goes on: the table, and a bar for its iterations."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from .rows import PHASES

COLUMNS = (
    "tokens/rank",
    "backend",
    "phase",
    "median us",
    "quartiles",
    "p95 us",
    "ranks' medians us",
    "logical GB/s",
    "wire GB/s",
    "of copy",
    "x ours (quartiles)",
)


def header() -> str:
    """Two lines of Markdown."""
    return "| " + " | ".join(COLUMNS) + " |\n" + "|---" * len(COLUMNS) + "|"


def lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """One for each phase of each row, and of what stands in it as `one_launch`."""
    found = []
    for row in rows:
        found += [_line(row, phase) for phase in PHASES]
        if "one_launch" in row:
            apart = {"tokens": row["tokens"], "backend": f"{row['backend']}, one launch"}
            found += [_line(row["one_launch"] | apart, phase) for phase in PHASES]
    return found


def _line(row: dict[str, Any], phase: str) -> str:
    of = row[phase]
    cells = [
        f"{row['tokens']}",
        row["backend"],
        phase,
        number(of["median_us"]),
        f"{number(of['q25_us'])}..{number(of['q75_us'])}",
        number(of["p95_us"]),
        f"{number(of['min_rank_us'])}..{number(of['max_rank_us'])}",
        number(of["logical_gb_s"]),
        number(of["wire_gb_s"]),
        f"{of['of_ceiling']:.0%}" if "of_ceiling" in of else "",
        _ratio(row, phase),
    ]
    return "| " + " | ".join(cells) + " |"


def _ratio(row: dict[str, Any], phase: str) -> str:
    if "ratio_to_ours" not in row:
        return "not comparable" if "not_comparable" in row else ""
    ratio = row["ratio_to_ours"][phase]
    return f"{ratio['median']:.1f} ({ratio['q25']:.1f}..{ratio['q75']:.1f})"


def number(value: float) -> str:
    """Three figures, and all of those before the point."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def footnotes(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What each backend was given, once; what forbids a ratio; and what kernels took."""
    given = {row["backend"]: row["given"] for row in rows}
    notes = [f"{backend} is given: {what}" for backend, what in given.items()]
    for row in rows:
        what = f"{row['backend']}, {row['tokens']} tokens"
        if "not_comparable" in row:
            notes.append(f"{what}: no ratio, because it is launched as {row['not_comparable']}")
        if "not_profiled" in row:
            notes.append(f"{what}: no kernels: {row['not_profiled']}")
        for phase, parts in row.get("kernels", {}).items():
            told = ", ".join(f"{name} {_value(part)}" for name, part in parts.items())
            notes.append(f"{what}, {phase}: {told}")
    return notes


def _value(part: Any) -> str:
    if isinstance(part, dict):
        return ", ".join(f"{name} {number(value)}" for name, value in part.items())
    return number(part)


def per_rank(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Of --iter_stats: a table of every rank's own times."""
    names = ("mean", "median", "stdev", "min", "max")
    found = [
        "| tokens/rank | backend | phase | rank | " + " | ".join(names) + " |",
        "|---" * 9 + "|",
    ]
    for row in rows:
        for phase in PHASES:
            for rank, stats in row[phase].get("per_rank", {}).items():
                cells = [f"{row['tokens']}", row["backend"], phase, rank]
                cells += [number(stats[name]) for name in names]
                found.append("| " + " | ".join(cells) + " |")
    return found if len(found) > 2 else []


class Progress:
    """A bar on stderr where that is a terminal, and lines of the table above it."""

    def __init__(self, iterations: int, *, shown: bool) -> None:
        self._bar: Any = None
        if shown and sys.stderr.isatty():
            self._bar = _bar(iterations)

    def step(self, what: str) -> None:
        """One iteration more."""
        if self._bar is not None:
            self._bar.set_description(what, refresh=False)
            self._bar.update()

    def say(self, line: str) -> None:
        """A line on stdout."""
        if self._bar is not None:
            self._bar.write(line, file=sys.stdout)
            return
        print(line, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def _bar(iterations: int) -> Any:
    try:
        from tqdm import tqdm
    except ImportError:  # of the extra `bench`; nothing is lost but the bar
        return None
    return tqdm(total=iterations, unit="iteration", leave=False)
