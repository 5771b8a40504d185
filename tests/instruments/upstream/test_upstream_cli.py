"""The command line: what it runs, what it finds, and what it exits with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.instruments.upstream.upstream_toys import toy_group, toy_tree
from tests.upstream import cli, expectations, fetch, models
from tests.upstream.groups import Group, Plugin, all_groups
from tests.upstream.run import Ran

VERSION = "0.32.0"
pytestmark = pytest.mark.long

TESTS = """
import importlib.metadata, pytest

def test_good(): pass

@pytest.mark.parametrize("value", [1, 2])
def test_bad(value): assert value == 3, "of the toy"

def test_compared():
    assert importlib.metadata.entry_points(group="vllm.platform_plugins", name="moe_nvlink")
"""
FILE = """\
toy:
  - outcome: failed
    reason: The toy is so.
    says: of the toy
    tests:
      "*test_bad*": 2
  - outcome: passed
    tests:
      "*::test_*": {count}
"""


class Toys:
    """Groups of a toy tree, and a command line that knows no others."""

    def __init__(
        self,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        self.where = toy_tree(folder, {"test_a.py": TESTS, "test_b.py": "def test_b(): pass\n"})
        self.file = folder / f"{VERSION}-cpu.yaml"
        self.groups: tuple[Group, ...] = (toy_group("tests/test_a.py"),)
        self.logs = folder / "logs"
        self._capsys = capsys
        monkeypatch.setattr(cli, "all_groups", lambda: self.groups)
        monkeypatch.setattr(fetch, "installed_version", lambda: VERSION)
        monkeypatch.setattr(fetch, "tree", lambda _: self.where.tree)
        monkeypatch.setattr(models, "redirect_file", lambda _: folder / "none")
        monkeypatch.setattr(expectations, "file_of", lambda *_: self.file)

    def expect(self, count: int = 2) -> None:
        self.file.write_text(FILE.format(count=count))

    def run(self, *arguments: str) -> tuple[int, str]:
        """Its exit code, and what it printed."""
        code = cli.main(["--logs", str(self.logs), *arguments])
        printed = self._capsys.readouterr()
        return code, printed.out + printed.err


@pytest.fixture
def toys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Toys:
    return Toys(tmp_path, monkeypatch, capsys)


def test_outcomes_are_compared_in_the_whole_and_in_part(toys: Toys) -> None:
    toys.expect()
    code, printed = toys.run()
    assert (code, "toy: 2 failed, 2 passed; as expected" in printed) == (0, True)
    assert (toys.logs / "toy.log").read_text().count("of the toy") >= 2
    toys.expect(count=3)
    code, printed = toys.run()
    assert code == 1
    assert "1 DIFFERENCES, output in" in printed
    assert "rule '*::test_*': 2 tests, expected 3" in printed
    code, printed = toys.run("--", "-k", "good")
    assert (code, "toy: 1 passed; as expected" in printed) == (0, True)
    code, printed = toys.run("--", "-k", "nothing_of_the_sort")
    assert (code, "no test was run" in printed) == (1, True)


def test_a_compared_group_runs_twice_and_differs_where_the_plugin_matters(toys: Toys) -> None:
    toys.expect()
    toys.groups = (toy_group("tests/test_a.py", plugin=Plugin.COMPARED),)
    code, printed = toys.run("--jobs", "2")
    assert code == 1
    node = "tests/test_a.py::test_compared"
    assert "tests.test_a::test_compared: with the plugin passed, without it failed" in printed
    assert f"without the plugin: {node}: expected: passed; it is: failed" in printed
    assert "toy: 2 failed, 2 passed; 2 DIFFERENCES" in printed
    assert toys.run("--", "-k", "not compared")[0] == 0


def test_a_test_that_only_one_side_collects_is_a_difference(tmp_path: Path) -> None:
    both = Ran((), {"t::a": "passed", "t::b": "failed"}, 1.0, tmp_path)
    assert cli.differences_of({True: both, False: both}) == []
    assert cli.differences_of({True: both, False: replace(both, outcomes={"t::a": "passed"})}) == [
        "t::b: with the plugin failed, without it not run"
    ]


def test_titles_of_the_selection_are_unique_and_every_adapter_exists() -> None:
    groups = all_groups()
    assert len({group.title for group in groups}) == len(groups) > 20
    folder = Path(cli.__file__).parent / "adapt"
    for group in groups:
        for name in group.adapters:
            assert (folder / f"{name}.py").is_file(), f"{group.name}: {name}"
        for word in (*group.arguments, *group.fast):
            assert not Path(word).is_absolute(), f"{group.name}: {word}"
