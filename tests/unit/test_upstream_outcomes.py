"""Reports of pytest-reportlog, also of runs that did not come to their end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.upstream.outcomes import Outcome, Result, read_run

START: dict[str, Any] = {"$report_type": "SessionStart", "pytest_version": "9"}
FINISH: dict[str, Any] = {"$report_type": "SessionFinish", "exitstatus": 0}


def phases(node: str, **outcomes: str) -> list[dict[str, Any]]:
    return [
        {"$report_type": "TestReport", "nodeid": node, "when": when, "outcome": outcome}
        for when, outcome in outcomes.items()
    ]


def read(
    folder: Path, lines: list[dict[str, Any]], chosen: list[str], *, cut: str = "", ending: str = ""
) -> dict[str, Result]:
    report, selection = folder / "reports", folder / "chosen"
    report.write_text("".join(json.dumps(line) + "\n" for line in lines) + cut)
    selection.write_text(json.dumps({"chosen": chosen, "left_out": [], "platform": None}))
    return read_run(report, selection, ending)


GOOD = phases("t.py::good", setup="passed", call="passed", teardown="passed")


def test_a_test_whose_report_has_no_end_was_not_run(tmp_path: Path) -> None:
    """It crashed while it ran, or afterwards, before its fixtures were gone."""
    lines = [START, *GOOD, *phases("t.py::crash", setup="passed", call="passed")]
    found = read(tmp_path, lines, ["t.py::good", "t.py::crash", "t.py::after"])
    assert found["t.py::good"].outcome is Outcome.PASSED
    for node in ("t.py::crash", "t.py::after"):
        assert found[node] == Result(Outcome.NOT_RUN, "the process ended before it")


def test_a_failure_that_the_process_did_not_survive_is_no_outcome(tmp_path: Path) -> None:
    lines = [START, *phases("t.py::crash", setup="passed", call="failed")]
    assert read(tmp_path, lines, ["t.py::crash"])["t.py::crash"].outcome is Outcome.NOT_RUN


def test_a_line_that_was_cut_is_no_report(tmp_path: Path) -> None:
    cut = json.dumps(phases("t.py::cut", teardown="passed")[0])[:-5]
    found = read(tmp_path, [START, *GOOD], ["t.py::good", "t.py::cut"], cut=cut, ending="killed")
    assert found["t.py::cut"] == Result(Outcome.NOT_RUN, "killed")


def test_a_run_that_stopped_by_itself_says_so(tmp_path: Path) -> None:
    found = read(tmp_path, [START, *GOOD, FINISH], ["t.py::good", "t.py::later"])
    assert found["t.py::later"] == Result(Outcome.NOT_RUN, "pytest stopped before it")


def test_no_report_at_all_is_no_outcome(tmp_path: Path) -> None:
    assert read_run(tmp_path / "none", tmp_path / "nothing", "crashed") == {}


def test_a_skipped_file_is_an_outcome_of_the_file(tmp_path: Path) -> None:
    report = {
        "$report_type": "CollectReport",
        "nodeid": "t.py",
        "outcome": "skipped",
        "longrepr": ["t.py", 3, "Skipped: no triton"],
    }
    found = read(tmp_path, [START, report, FINISH], [])
    assert found == {"t.py": Result(Outcome.SKIPPED, "Skipped: no triton")}
