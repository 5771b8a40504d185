"""The outcome of every test of a run, read from pytest-reportlog's file."""

from __future__ import annotations

import contextlib
import enum
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: pytest's exit codes of a complete run: all passed, some failed, nothing collected.
ENDED = frozenset({0, 1, 5})


class Outcome(enum.Enum):
    """The outcome of one test."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"
    LEFT_OUT = "left out"  #: by a rule with `run: false`
    NOT_RUN = "not run"  #: chosen, and no report of it: the process crashed or was ended


@dataclass(frozen=True)
class Result:
    """An outcome, and what vLLM's test or pytest said about it."""

    outcome: Outcome
    message: str = ""

    def line(self) -> str:
        """Returns one line for a terminal."""
        first = next((line for line in self.message.splitlines() if line.strip()), "")
        return self.outcome.value + (f" ({first.strip()[:160]})" if first else "")


def read_run(report_log: Path, said: Mapping[str, Any], ending: str = "") -> dict[str, Result]:
    """Node id -> result, of one pytest process that has ended.

    A file that cannot be collected is a failed "test" with the file's name.

    Args:
        said: what `within/moe_nvlink_upstream_selection.py` has written.
        ending: how the process ended if not by itself; the message of tests that were not run.
    """
    results: dict[str, Result] = {}
    finished: set[str] = set()
    ended = False
    for line in _lines(report_log):
        kind = line.get("$report_type")
        if kind == "SessionFinish":
            ended = True
        elif kind == "CollectReport":
            if line["outcome"] != "passed":
                results[line["nodeid"]] = _result(line)
                finished.add(line["nodeid"])
        elif "nodeid" in line and "outcome" in line:
            _add(results, line)
            if line.get("when") == "teardown":
                finished.add(line["nodeid"])
    for node in said.get("left_out", ()):
        results[node] = Result(Outcome.LEFT_OUT)
    why = ending or ("pytest stopped before it" if ended else "the process ended before it")
    for node in said.get("chosen", ()):
        if node not in finished:
            results[node] = Result(Outcome.NOT_RUN, why)
    return results


def _lines(report_log: Path) -> Iterator[Mapping[str, Any]]:
    """Whole lines: a process that is killed may leave half of its last one."""
    if report_log.exists():
        for text in report_log.read_text(encoding="utf-8", errors="replace").split("\n"):
            with contextlib.suppress(json.JSONDecodeError):
                yield json.loads(text)


def _add(results: dict[str, Result], report: Mapping[str, Any]) -> None:
    """A failure in any phase, of any subtest, is the test's; a skip is more than a pass."""
    rank = [Outcome.PASSED, Outcome.SKIPPED, Outcome.FAILED]
    new, old = _result(report), results.get(report["nodeid"])
    if old is None or rank.index(new.outcome) > rank.index(old.outcome):
        results[report["nodeid"]] = new
    elif new.outcome is old.outcome:
        messages = filter(None, (old.message, new.message))
        results[report["nodeid"]] = Result(old.outcome, "\n".join(messages))


def _result(report: Mapping[str, Any]) -> Result:
    outcome, message = Outcome(report["outcome"]), _message(report.get("longrepr"))
    expected = report.get("wasxfail")
    if expected is not None and outcome is Outcome.SKIPPED:
        return Result(Outcome.FAILED, f"vLLM expects this failure: {expected}\n{message}")
    if expected is not None and outcome is Outcome.PASSED:
        return Result(outcome, f"vLLM expected a failure: {expected}")
    if outcome is Outcome.FAILED and report.get("when") in ("setup", "teardown"):
        message = f"{report['when']}: {message}"
    return Result(outcome, message)


def _message(longrepr: Any) -> str:
    """The text of the exception and of those that caused it, last first, without source lines."""
    if isinstance(longrepr, list):  # of a skip: file, line, text
        return str(longrepr[-1])
    if not isinstance(longrepr, dict):
        return str(longrepr or "")
    crashes = [longrepr.get("reprcrash")]
    crashes += [crash for _, crash, _ in reversed(longrepr.get("chain") or [])]
    texts = [str(crash["message"]) for crash in crashes if crash]
    return "\n".join(dict.fromkeys(texts))
