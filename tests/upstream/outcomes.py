"""What became of every test of a run, read from pytest-reportlog's file."""

from __future__ import annotations

import enum
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: pytest's exit codes of a run that came to its end: all passed, some failed, nothing collected.
ENDED = frozenset({0, 1, 5})


class Outcome(enum.Enum):
    """Of one test."""

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
        """For one line of a terminal."""
        first = next((line for line in self.message.splitlines() if line.strip()), "")
        return self.outcome.value + (f" ({first.strip()[:160]})" if first else "")


def read_run(report_log: Path, chosen: Path, ending: str = "") -> dict[str, Result]:
    """Node id -> result, of one pytest process that has ended.

    A file that cannot be collected is a failed "test" with the file's name. `ending` says how the
    process ended if that was not by itself; it is the message of the tests that were not run.
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
    selection = _selection(chosen)
    for node in selection["left_out"]:
        results[node] = Result(Outcome.LEFT_OUT)
    why = ending or ("" if ended else "the process ended before it")
    for node in selection["chosen"]:
        if node not in finished:
            results[node] = Result(Outcome.NOT_RUN, why or "pytest stopped before it")
    return results


def _lines(report_log: Path) -> Iterator[Mapping[str, Any]]:
    """Whole lines: the last one of a process that was killed may be cut."""
    if not report_log.exists():
        return
    for text in report_log.read_text(encoding="utf-8", errors="replace").split("\n"):
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict):
            yield line


def platform_taken(chosen: Path) -> bool | None:
    """Whether vLLM took our platform in that process; None if the process did not say."""
    taken: bool | None = _selection(chosen).get("platform")
    return taken


def platform_asked(chosen: Path) -> bool | None:
    """Whether vLLM asked our plugin for one, which may have stayed out; None as above."""
    asked: bool | None = _selection(chosen).get("asked")
    return asked


def _selection(chosen: Path) -> dict[str, Any]:
    if not chosen.exists():
        return {"chosen": [], "left_out": []}
    selection: dict[str, Any] = json.loads(chosen.read_text(encoding="utf-8"))
    return selection


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
    """The text of the exception and of those it comes from, last first, without source lines."""
    if longrepr is None:
        return ""
    if isinstance(longrepr, list):  # of a skip: file, line, text
        return str(longrepr[-1])
    if not isinstance(longrepr, dict):
        return str(longrepr)
    crashes = [longrepr.get("reprcrash")]
    crashes += [crash for _, crash, _ in reversed(longrepr.get("chain") or [])]
    texts = [str(crash["message"]) for crash in crashes if crash]
    return "\n".join(dict.fromkeys(texts))
