"""What README calls served because a long test has shown it was shown not long ago.

The records are those of `make test-long` (tests/support/long_tests.py). A claim is a row of a table
with the word "served" that names a test and says "long".
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support import long_tests

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", *(f"integration/{of}README.md" for of in ("", "vllm/", "sglang/")))
#: Changes of the product that a claim may be behind: about two days of ours.
MOST_COMMITS = 120
PRODUCT = ("moe_nvlink_plugin", "kernels", "integration", ":!*.md")

_TEST = re.compile(r"`(?:tests/[\w/]+/)?(test_\w+(?:\.py)?)[^`]*`")


class Claim(NamedTuple):
    page: str
    row: str
    tests: tuple[str, ...]


def claims_of(page: str, text: str) -> list[Claim]:
    """Return the claims of a page, with the tests that the row names before the word "long"."""
    found = []
    for row in text.splitlines():
        if not row.startswith("|") or "served" not in row:
            continue
        tests = []
        for part in re.split(r"[;|]", row):
            if re.search(r"\blong\b", part):
                tests += _TEST.findall(part)
        if tests:
            found.append(Claim(page, row.split("|")[1].strip(), tuple(tests)))
    return found


CLAIMS = [each for page in PAGES for each in claims_of(page, (ROOT / page).read_text())]


def records_of(test: str, records: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the records of a function, or of a file's functions."""
    if test.endswith(".py"):
        return [of for name, of in records.items() if name.split("::")[0].endswith(f"/{test}")]
    return [of for name, of in records.items() if name.endswith(f"::{test}")]


def behind(commit: str) -> int | None:
    """Return how many commits have changed the product since; None: the commit is unknown."""
    told = long_tests.git("rev-list", "--count", f"{commit}..HEAD", "--", *PRODUCT)
    return None if told is None else int(told)


def test_pages_claim_something() -> None:
    assert len(CLAIMS) >= 5


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: re.sub(r"\W+", " ", claim.row)[:40])
def test_a_claim_was_shown_not_long_ago(claim: Claim) -> None:
    if long_tests.git("rev-parse", "HEAD") is None:
        pytest.skip("no repository here, so nothing tells how old a record is")
    records = long_tests.read()
    for test in claim.tests:
        found = [of for of in records_of(test, records) if of["passed"]]
        again = f"make test-long PYTEST_ARGS='-k {test.removesuffix('.py')}'"
        assert found, f"{claim.page}, {claim.row}: {test} has no record of a pass; {again}"
        for of in found:
            count = behind(of["commit"])
            if count is None and long_tests.git("rev-parse", "--is-shallow-repository") == "true":
                pytest.skip("the repository is shallow")
            assert count is not None, f"{test}: {of['commit']} is no commit of this repository"
            assert count <= MOST_COMMITS, (
                f"{claim.page}, {claim.row}: {test} passed {count} commits of the product ago, at "
                f"{of['commit']}, and {MOST_COMMITS} may be; {again}"
            )


def test_a_row_that_names_a_long_test_is_a_claim() -> None:
    row = "| [LoRA](#lora) | served | `tests/servers/test_lora_e2e.py -k x`, long; `test_b.py` |"
    (claim,) = claims_of("page", row)
    assert claim.tests == ("test_lora_e2e.py",)
    assert not claims_of("page", row.replace("served", "refused"))
    assert not claims_of("page", row.replace(", long", ""))


def test_records_are_found_by_function_and_by_file() -> None:
    records = {"tests/a/test_x.py::test_one": {"n": 1}, "tests/a/test_x.py::test_two": {"n": 2}}
    assert records_of("test_two", records) == [{"n": 2}]
    assert len(records_of("test_x.py", records)) == 2
