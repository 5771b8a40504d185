"""A difference in either direction is found and named. The table of it all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from moe_nvlink_plugin.errors import ConfigError
from tests.upstream import expectations, table
from tests.upstream.groups import all_groups
from tests.upstream.within import moe_nvlink_upstream_expected as within
from tests.upstream.within.moe_nvlink_upstream_expected import Rule, Seen

PASSED = Seen("passed")
FAILED = Seen("failed", "ValueError: no such kernel\nand more")
SKIPPED = Seen("skipped", "Skipped: needs a GPU")
LEFT_OUT = Seen(within.LEFT_OUT)
NOT_RUN = Seen(within.NOT_RUN, "pytest stopped before it")

GOOD = Rule("t.py::test_good*", 2, "passed")
BAD = Rule("t.py::test_bad", 1, "failed", "It has no kernel.", "no such kernel")
LACKS = Rule("t.py::test_gpu", 1, "cannot run", "It needs a GPU.")
HANGS = Rule("t.py::test_hang*", 1, "cannot run", "It hangs.", run=False)
RULES = (GOOD, BAD, LACKS, HANGS)
RESULTS = {
    "t.py::test_good[a]": PASSED,
    "t.py::test_good[b]": PASSED,
    "t.py::test_bad": FAILED,
    "t.py::test_gpu": SKIPPED,
    "t.py::test_hangs": LEFT_OUT,
}


def differences(
    rules: Sequence[Rule], seen: Mapping[str, Seen], *, whole: bool = True
) -> list[str]:
    return [*within.differences(rules, seen, whole=whole)]


def test_what_is_known_is_no_difference() -> None:
    assert differences(RULES, RESULTS) == []


@pytest.mark.parametrize(
    ("test", "result", "words"),
    [
        ("test_good[a]", FAILED, "expected: passed; it is: failed (ValueError: no such kernel)"),
        ("test_good[a]", SKIPPED, "expected: passed; it is: skipped"),
        ("test_good[a]", NOT_RUN, "expected: passed; it is: not run (pytest stopped before it)"),
        ("test_bad", PASSED, "expected: failed; it is: passed"),
        ("test_bad", SKIPPED, "expected: failed; it is: skipped"),
        ("test_bad", Seen("failed", "OSError"), "expected to say 'no such kernel'"),
        ("test_gpu", PASSED, "expected: cannot run; it is: passed"),
        ("test_gpu", FAILED, "has no `says`"),
        ("test_gpu", NOT_RUN, "expected: cannot run; it is: not run"),
        ("test_hangs", PASSED, "expected: cannot run; it is: passed"),
        ("test_hangs", SKIPPED, "expected: cannot run; it is: skipped"),
        ("test_new", PASSED, "no rule fits; it is: passed"),
    ],
)
def test_any_other_outcome_is_a_difference(test: str, result: Seen, words: str) -> None:
    found = differences(RULES, {**RESULTS, f"t.py::{test}": result})
    assert len(found) == 1
    assert found[0].startswith(f"t.py::{test}: ")
    assert words in found[0]


def test_a_test_that_is_gone_and_one_that_is_more_are_differences() -> None:
    fewer = {node: result for node, result in RESULTS.items() if node != "t.py::test_good[b]"}
    assert differences(RULES, fewer) == ["rule 't.py::test_good*': 1 tests, expected 2"]
    assert differences(RULES, fewer, whole=False) == []
    more = {**RESULTS, "t.py::test_good[c]": PASSED}
    assert differences(RULES, more) == ["rule 't.py::test_good*': 3 tests, expected 2"]


def test_a_failure_for_lack_of_something_says_what_lacks() -> None:
    lacks = replace(LACKS, says="no such kernel")
    assert differences([lacks], {"t.py::test_gpu": FAILED}) == []
    (found,) = differences([lacks], {"t.py::test_gpu": SKIPPED})
    assert "expected to say 'no such kernel'" in found


@pytest.mark.parametrize(
    ("pattern", "node", "fits"),
    [
        ("t.py::test[*-fp8-*]", "t.py::test[a-fp8-b]", True),
        ("t.py::test[*-fp8-*]", "t.py::test[a-fp80-b]", False),
        ("t.py::test[a]", "t.py::testa", False),
        ("t.py::test[a?]", "t.py::test[ab]", False),
        ("t.py::test[a?]", "t.py::test[a?]", True),
        ("t.py::te", "t.py::test", False),
        ("*", "anything\nat all", True),
    ],
)
def test_only_the_star_is_wild(pattern: str, node: str, fits: bool) -> None:
    assert Rule(pattern, 1, "passed").fits(node) is fits


def test_the_first_rule_that_fits_counts() -> None:
    rules = [Rule("t.py::test_bad", 1, "failed", "So.", "no such"), Rule("t.py::*", 1, "passed")]
    assert differences(rules, {"t.py::test_bad": FAILED, "t.py::test_good": PASSED}) == []
    assert len(differences(rules[::-1], {"t.py::test_bad": FAILED})) == 2


# The file.


def entry(**changes: object) -> str:
    """A block's YAML: a valid failure with changed or removed keys."""
    keys: dict[str, object] = {
        "tests": "{t.py::a: 1}",
        "outcome": "failed",
        "reason": "So.",
        "says": "x",
    }
    keys |= changes
    return "group:\n  - " + "\n    ".join(f"{k}: {v}" for k, v in keys.items() if v is not None)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (entry(outcome="skipped"), "outcome"),
        (entry(tests="{t.py::a: 0}"), "t.py::a"),
        (entry(tests="{t.py::a: two}"), "t.py::a"),
        (entry(tests="{}"), "tests"),
        (entry(tests=None), "tests"),
        (entry(reason=None), "need a `reason`"),
        (entry(says=None), "need `says`"),
        (entry(run="false"), "`run: false` goes with `cannot run`"),
        (entry(because="x"), "because"),
        ("- words", "dict"),
        ("group: words", "tuple"),
    ],
)
def test_a_file_that_says_nothing_sensible_is_refused(
    tmp_path: Path, text: str, words: str
) -> None:
    path = tmp_path / "1.0-cpu.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        expectations.read(path)
    assert words in str(caught.value)
    assert path.name in str(caught.value)


def test_every_group_has_expectations() -> None:
    rules = expectations.read(expectations.file_of("0.32.0"))
    assert set(rules) == {group.name for group in all_groups()}
    assert all(rules.values())


# The table.


def test_the_readme_has_the_table_of_the_expectations_files() -> None:
    """`make upstream-tests UPSTREAM_ARGS=--write-table` renews it."""
    document = table.README.read_text(encoding="utf-8")
    assert table.replaced(document, table.text()) == document
