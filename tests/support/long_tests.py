"""A pytest plugin: which long tests a run takes, and when each of them last passed.

`--shard 3/10` adds to the other tests every tenth long test, from the third on: neighbours are
usually cases of one test and take as long as each other. `--record` writes tests/evidence.json:
for each long test of which all cases ran, the commit, the date and the outcome. A failure takes the
record away. tests/architecture/test_evidence.py reads the file.
"""

from __future__ import annotations

import json
import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
EVIDENCE = ROOT / "tests" / "evidence.json"
#: The property of a report: how many cases its test has.
_CASES = "cases of this long test"


class Shard(NamedTuple):
    """Every `of`-th long test, from the one with this number on; numbers begin at 1.

    A file that is marked as a whole counts as one test.
    """

    number: int
    of: int

    @classmethod
    def read(cls, text: str) -> Shard:
        """Read NUMBER/COUNT.

        Raises:
            pytest.UsageError: it is something else.
        """
        try:
            number, count = map(int, text.split("/"))
        except ValueError:
            number = count = 0
        if not 1 <= number <= count:
            raise pytest.UsageError(
                f"--shard {text}: pass NUMBER/COUNT with 1 <= NUMBER <= COUNT, such as 3/10"
            )
        return cls(number, count)

    def split(self, items: list[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
        """Return the items of this run, and the long ones of other shards."""
        units = defaultdict(list)
        for item in items:
            if item.get_closest_marker("long"):
                units[_unit(item)].append(item)
        others = {
            item
            for place, unit in enumerate(sorted(units))
            if place % self.of != self.number - 1
            for item in units[unit]
        }
        return [item for item in items if item not in others], [*others]


def _unit(item: pytest.Item) -> str:
    """What is in one shard: a test, or a file that is marked as a whole, with what it compiles."""
    module = item.getparent(pytest.Module)
    is_whole = module and any(mark.name == "long" for mark in module.own_markers)
    return item.nodeid.split("::")[0] if is_whole else item.nodeid


def first_of(values: Iterable[Any], count: int = 1) -> list[Any]:
    """Return the values of a parametrized test, of which only the first `count` are in each run."""
    every = list(values)
    long = (
        pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.long)
        for value in every[count:]
    )
    return [*every[:count], *long]


def test_of(nodeid: str) -> str:
    """Return `file::function` of a test's id."""
    file, *_classes, function = nodeid.split("::")
    return f"{file}::{function.split('[')[0]}"


def git(*arguments: str) -> str | None:
    """Return what git says; None if there is no git, no repository or no such commit."""
    try:
        told = subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return told.stdout.strip()


def is_changed() -> bool:
    """Return whether tracked files differ from HEAD, the records apart."""
    return bool(git("status", "--porcelain", "-uno", "--", ".", ":!tests/evidence.json"))


class LongTests:
    """The plugin. `outcomes` counts the cases that this run has seen end, by test and outcome."""

    def __init__(self, config: pytest.Config) -> None:
        self._records = config.getoption("record") and not hasattr(config, "workerinput")
        if self._records and is_changed():
            raise pytest.UsageError(
                "--record: tracked files differ from the commit that the records would name; "
                "commit first"
            )
        if self._records and any("[" in one for one in config.args):
            raise pytest.UsageError(
                "--record: a case by its name hides the test's other cases; name the test"
            )
        text = config.getoption("shard")
        self._shard = Shard.read(text) if text else None
        if self._shard and config.option.markexpr == "not long":
            config.option.markexpr = ""
        self.outcomes: dict[str, Counter[str]] = defaultdict(Counter)
        self._seconds: dict[str, float] = defaultdict(float)
        self._cases: dict[str, int] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Count the cases before anything is deselected; drop other shards."""
        long = [item for item in items if item.get_closest_marker("long")]
        cases = Counter(test_of(item.nodeid) for item in long)
        for item in long:
            item.user_properties.append((_CASES, cases[test_of(item.nodeid)]))
        if self._shard:
            items[:], others = self._shard.split(items)
            config.hook.pytest_deselected(items=others)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note how a case of a long test ended. With xdist, the process that writes sees all."""
        cases = dict(report.user_properties).get(_CASES)
        if not isinstance(cases, int):
            return
        test = test_of(report.nodeid)
        self._cases[test] = cases
        self._seconds[test] += report.duration
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[test][report.outcome] += 1

    def pytest_sessionfinish(self) -> None:
        """Write the records."""
        if self._records and self.outcomes:
            write(self.renewed(read()))

    def renewed(self, records: dict[str, Any]) -> dict[str, Any]:
        """Return the records with what this run has seen."""
        now = datetime.now(timezone.utc).date().isoformat()
        renewed = dict(records)
        for test, outcomes in self.outcomes.items():
            if outcomes["failed"]:
                renewed.pop(test, None)
            elif outcomes["passed"] and outcomes.total() >= self._cases[test]:
                renewed[test] = {
                    "commit": git("rev-parse", "--short=10", "HEAD"),
                    "date": now,
                    "passed": outcomes["passed"],
                    "skipped": outcomes["skipped"],
                    "seconds": round(self._seconds[test]),
                }
        return renewed


def read() -> dict[str, Any]:
    """Return the records: `file::function` -> commit, date, passed, skipped, seconds."""
    found: dict[str, Any] = json.loads(EVIDENCE.read_text()) if EVIDENCE.exists() else {}
    return found


def write(records: dict[str, Any]) -> None:
    """Write the records, a line each, so that two sessions' runs merge."""
    lines = [f"  {json.dumps(test)}: {json.dumps(records[test])}" for test in sorted(records)]
    EVIDENCE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
