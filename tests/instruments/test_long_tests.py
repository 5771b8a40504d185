"""The plugin that shares out the long tests and records when they passed."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from tests.support import long_tests

pytest_plugins = "pytester"

TESTS = """
import pytest

@pytest.mark.parametrize("case", range(5))
@pytest.mark.long
def test_whole(case):
    pass

@pytest.mark.parametrize("case", range(4))
@pytest.mark.long
def test_fails(case):
    assert case != 2

@pytest.mark.long
def test_is_skipped():
    pytest.skip("no GPU")

def test_short():
    pass
"""
CONFTEST = """
from tests.support.long_tests import LongTests

def pytest_addoption(parser):
    parser.addoption("--shard")
    parser.addoption("--record", action="store_true")

def pytest_configure(config):
    config.addinivalue_line("markers", "long: takes long")
    config.pluginmanager.register(LongTests(config))
"""


@pytest.fixture
def suite(
    pytester: pytest.Pytester, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> pytest.Pytester:
    """A suite of four tests; its records are in `tmp_path`."""
    monkeypatch.setattr(long_tests, "EVIDENCE", tmp_path / "evidence.json")
    monkeypatch.setattr(long_tests, "is_changed", lambda: False)
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(test_these=TESTS)
    return pytester


def run(suite: pytest.Pytester, *options: str, expression: str = "not long") -> set[str]:
    """Run the suite; return the names of the cases that were run."""
    result = suite.inline_run("-m", expression, "-p", "no:cacheprovider", *options)
    calls = result.getreports("pytest_runtest_logreport")
    return {call.nodeid.split("::")[1] for call in calls if call.when == "setup"}


def test_each_long_test_is_in_one_shard_and_the_others_in_all(suite: pytest.Pytester) -> None:
    shards = [run(suite, "--shard", f"{number}/3") for number in (1, 2, 3)]
    everything = run(suite, expression="")
    assert len(everything) == 11
    assert set.union(*shards) == everything
    for one, other in itertools.combinations(shards, 2):
        assert one & other == {"test_short"}
    # Cases of one test are spread.
    assert all(sum("whole" in name for name in shard) in (1, 2) for shard in shards)


def test_a_file_that_is_long_as_a_whole_is_in_one_shard(suite: pytest.Pytester) -> None:
    text = "import pytest; pytestmark = [pytest.mark.long]\ndef test_a(): ...\ndef test_b(): ...\n"
    suite.makepyfile(test_whole_file=text)
    shards = [run(suite, "--shard", f"{number}/3") for number in (1, 2, 3)]
    assert sorted(len(shard & {"test_a", "test_b"}) for shard in shards) == [0, 0, 2]


def test_a_shard_of_the_long_tests_alone(suite: pytest.Pytester) -> None:
    found = run(suite, "--shard", "1/3", expression="long")
    assert "test_short" not in found
    assert len(found) in (3, 4)


def test_a_whole_run_renews_what_passed_and_drops_what_failed(suite: pytest.Pytester) -> None:
    before = {"test_these.py::test_fails": {"date": "before"}, "other.py::test": {"date": "before"}}
    long_tests.write(before)
    run(suite, "--record", expression="long")
    records = json.loads(long_tests.EVIDENCE.read_text())
    whole = records["test_these.py::test_whole"]
    assert (whole["passed"], whole["skipped"]) == (5, 0)
    assert "test_these.py::test_is_skipped" not in records, "nothing has passed"
    assert "test_these.py::test_fails" not in records
    assert records["other.py::test"] == {"date": "before"}


def test_a_part_of_the_cases_renews_nothing(suite: pytest.Pytester) -> None:
    run(suite, "--record", "-k", "whole and not 4", expression="long")
    assert long_tests.read() == {}


def test_two_processes_make_one_record(suite: pytest.Pytester) -> None:
    run(suite, "--record", "-n", "2", expression="long")
    assert long_tests.read()["test_these.py::test_whole"]["passed"] == 5
