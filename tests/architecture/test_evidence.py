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


def is_their_history(records: dict[str, Any]) -> bool:
    """Whether this repository has the commits of the records at all: one of them is enough.

    A squashed or vendored copy has none, and nothing tells it how old a record is.
    """
    commits = {of["commit"] for of in records.values()}
    return any(
        long_tests.git("rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}") is not None
        for commit in commits
    )


def test_pages_claim_something() -> None:
    assert len(CLAIMS) >= 5


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: re.sub(r"\W+", " ", claim.row)[:40])
def test_a_claim_was_shown_not_long_ago(claim: Claim) -> None:
    check(claim, long_tests.read())


def check(claim: Claim, records: dict[str, Any]) -> None:
    if long_tests.git("rev-parse", "HEAD") is None:
        pytest.skip("no repository here, so nothing tells how old a record is")
    for test in claim.tests:
        found = [of for of in records_of(test, records) if of["passed"]]
        again = f"make test-long PYTEST_ARGS='-k {test.removesuffix('.py')}'"
        assert found, f"{claim.page}, {claim.row}: {test} has no record of a pass; {again}"
        for of in found:
            count = behind(of["commit"])
            if count is None and long_tests.git("rev-parse", "--is-shallow-repository") == "true":
                pytest.skip("the repository is shallow")
            if count is None and not is_their_history(records):
                pytest.skip("this repository has none of the commits that the records name")
            assert count is not None, f"{test}: {of['commit']} is no commit of this repository"
            assert count <= MOST_COMMITS, (
                f"{claim.page}, {claim.row}: {test} passed {count} commits of the product ago, at "
                f"{of['commit']}, and {MOST_COMMITS} may be; {again}"
            )


@pytest.mark.parametrize("history", ["whole", "squashed", "shallow"])
def test_records_of_commits_that_are_not_here(
    history: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure in a clone that has the others' commits; where nothing can tell, a skip."""
    clone = tmp_path / "clone"

    def commit(text: str) -> str | None:
        who = ("-c", "user.name=A", "-c", "user.email=a@example.org")
        assert long_tests.git(*who, "commit", "-q", "--allow-empty", "-m", text) is not None
        return long_tests.git("rev-parse", "HEAD")

    monkeypatch.setattr(long_tests, "ROOT", tmp_path)
    assert long_tests.git("init", "-q", ".") is not None
    known, last = commit("one"), commit("two")
    depth = ("--depth", "1") if history == "shallow" else ()
    assert long_tests.git("clone", "-q", *depth, f"file://{tmp_path}", str(clone)) is not None
    monkeypatch.setattr(long_tests, "ROOT", clone)
    gone = {"passed": 1, "commit": "0123456789"}
    records = {"tests/test_a.py::test_gone": gone}
    if history == "whole":
        records["tests/test_a.py::test_known"] = {"passed": 1, "commit": known}
    claim = Claim("README.md", "it", ("test_gone",))
    said = {"squashed": "none of the commits", "shallow": "is shallow"}.get(history)
    if said is None:
        with pytest.raises(AssertionError, match="0123456789 is no commit of this repository"):
            check(claim, records)
    else:
        with pytest.raises(pytest.skip.Exception, match=said):
            check(claim, records)
    check(claim, {"tests/test_a.py::test_gone": {**gone, "commit": last}})


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
