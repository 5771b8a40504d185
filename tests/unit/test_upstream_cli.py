"""The command line: what it runs, what it finds, and what it exits with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from moe_nvlink_plugin.errors import ConfigError
from tests.unit.upstream_toys import toy_group, toy_tree
from tests.upstream import cli, expectations, fetch, models
from tests.upstream.expectations import Rule
from tests.upstream.groups import Device, Group, Plugin
from tests.upstream.outcomes import Outcome, Result
from tests.upstream.run import Part, Ran
from tests.upstream.selection import all_groups

VERSION = "0.32.0"
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
  - tests: "*test_bad*"
    count: 2
    outcome: failed
    reason: The toy is so.
    says: of the toy
  - tests: "*::test_*"
    count: {count}
    outcome: passed
"""


class Toys:
    """Groups of a toy tree, and a command line that knows no others."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.where = toy_tree(folder, {"test_a.py": TESTS, "test_b.py": "def test_b(): pass\n"})
        information = f"Name: vllm\nVersion: {VERSION}\n"
        (self.where.tree / "PKG-INFO").write_text(information)
        self.file = folder / f"{VERSION}-cpu.yaml"
        self.groups: tuple[Group, ...] = (toy_group("tests/test_a.py"),)
        self.logs = folder / "logs"
        monkeypatch.setattr(cli, "all_groups", lambda: self.groups)
        monkeypatch.setattr(fetch, "installed_version", lambda: VERSION)
        monkeypatch.setattr(models, "redirect_file", lambda _: folder / "none")
        monkeypatch.setattr(expectations, "file_of", lambda *_: self.file)

    def expect(self, count: int = 2) -> None:
        self.file.write_text(FILE.format(count=count))

    def run(self, *arguments: str) -> int:
        return cli.main(["--tree", str(self.where.tree), "--logs", str(self.logs), *arguments])


@pytest.fixture
def toys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Toys:
    return Toys(tmp_path, monkeypatch)


def test_all_as_expected(toys: Toys, capsys: pytest.CaptureFixture[str]) -> None:
    toys.expect()
    assert toys.run() == 0
    printed = capsys.readouterr().out
    assert "toy: 2 failed, 2 passed; as expected" in printed
    assert (toys.logs / "toy.log").read_text().count("of the toy") >= 2


def test_a_difference_is_printed_and_the_exit_code_is_one(
    toys: Toys, capsys: pytest.CaptureFixture[str]
) -> None:
    toys.expect(count=3)
    assert toys.run() == 1
    printed = capsys.readouterr().out
    assert "1 DIFFERENCES, output in" in printed
    assert "rule '*::test_*': 2 tests, expected 3" in printed


def test_a_part_is_compared_without_counts(toys: Toys, capsys: pytest.CaptureFixture[str]) -> None:
    toys.expect(count=77)
    assert toys.run("--", "-k", "good") == 0
    assert "toy: 1 passed; as expected" in capsys.readouterr().out


def test_a_part_of_nothing_is_a_difference(toys: Toys, capsys: pytest.CaptureFixture[str]) -> None:
    toys.expect()
    assert toys.run("--", "-k", "nothing_of_the_sort") == 1
    assert "no test was run" in capsys.readouterr().out


def test_a_compared_group_runs_twice_and_differs_where_the_plugin_matters(
    toys: Toys, capsys: pytest.CaptureFixture[str]
) -> None:
    toys.expect()
    toys.groups = (toy_group("tests/test_a.py", plugin=Plugin.COMPARED),)
    assert toys.run("--jobs", "2") == 1
    printed = capsys.readouterr().out
    node = "tests/test_a.py::test_compared"
    assert f"{node}: with the plugin passed, without it failed (" in printed
    assert f"without the plugin: {node}: expected: passed; it is: failed" in printed
    assert "toy: 2 failed, 2 passed; 2 DIFFERENCES" in printed
    assert toys.run("--", "-k", "not compared") == 0


def test_the_fast_subset_needs_a_test_of_each_place(
    toys: Toys, capsys: pytest.CaptureFixture[str]
) -> None:
    toys.expect()
    group = toy_group("tests")
    toys.groups = (
        replace(group, name="slow"),
        replace(group, fast=("tests/test_a.py::test_good", "tests/test_b.py")),
    )
    assert toys.run("--fast") == 0
    assert capsys.readouterr().out.startswith("toy: 2 passed; as expected")
    toys.file.write_text(
        FILE.format(count=2).replace(
            "toy:\n",
            'toy:\n  - {tests: "*test_b", count: 1, outcome: cannot run, run: false, '
            'reason: "It hangs."}\n',
        )
    )
    assert toys.run("--fast") == 1
    assert "tests/test_b.py: no test of it was run" in capsys.readouterr().out


def test_no_fast_subset_at_all_is_an_error(toys: Toys, capsys: pytest.CaptureFixture[str]) -> None:
    toys.expect()
    assert toys.run("--fast") == 2
    assert "none of these groups has a fast subset" in capsys.readouterr().err


def test_an_update_after_a_crash_keeps_the_rules(toys: Toys) -> None:
    toys.expect()
    before = toys.file.read_text()
    (toys.where.tree / "tests" / "conftest.py").write_text("import os\nos._exit(7)\n")
    assert toys.run("--update") == 1
    assert toys.file.read_text() == before


def test_an_update_writes_what_a_person_must_explain(
    toys: Toys, capsys: pytest.CaptureFixture[str]
) -> None:
    toys.file.write_text("")
    assert toys.run("--update") == 1
    assert "its reason is still TODO" in capsys.readouterr().out
    toys.file.write_text(toys.file.read_text().replace("TODO", "The toy is so."))
    assert toys.run() == 0
    rules = expectations.read(toys.file)["toy"]
    assert sum(rule.count for rule in rules) == 4


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--group", "toys"], "there is no group toys; there are: toy"),
        (["--break", "everything"], "there is no break 'everything'; there are: "),
        (["--jobs", "0"], "--jobs 0: at least one process"),
        (["--update", "--fast"], "--update needs whole groups"),
        (["--update", "--", "-k", "x"], "--update needs whole groups"),
        (["--gpu", "-1"], "--gpu -1: "),
        ([], "there is no expectations file"),
    ],
)
def test_what_cannot_be_run_is_an_error(
    toys: Toys, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert toys.run(*arguments) == 2
    assert words in capsys.readouterr().err


def test_groups_are_listed_with_the_breaks(toys: Toys, capsys: pytest.CaptureFixture[str]) -> None:
    assert toys.run("--list") == 0
    printed = capsys.readouterr().out
    assert "toy " in printed
    assert "the group toy" in printed
    assert "wrong-owner" in printed


def test_groups_that_need_more_gpus_are_left_out() -> None:
    one, two = toy_group(name="one"), replace(toy_group(name="two"), gpus=2)
    cpu = replace(toy_group(name="cpu"), devices=frozenset({Device.CPU}))
    groups = (one, two, cpu)
    assert cli.chosen(groups, [], Device.CPU, 0) == [one, two, cpu]
    assert cli.chosen(groups, [], Device.GPU, 1) == [one]
    assert cli.chosen(groups, [], Device.GPU, 2) == [one, two]
    assert cli.chosen(groups, ["two", "one"], Device.GPU, 2) == [one, two]
    # What was asked for by name is never left out in silence.
    with pytest.raises(ConfigError, match="cpu, two: none runs on 1 GPUs"):
        cli.chosen(groups, ["cpu", "one", "two"], Device.GPU, 1)


def test_how_a_process_ended_is_a_difference(tmp_path: Path) -> None:
    part = Part(toy_group(), ("tests",))
    ran = Ran({"t::a": Result(Outcome.PASSED)}, 1.0, tmp_path, "the process was ended by SIGKILL")
    rules = [Rule("t::a", 1, "passed")]
    found = cli.differences_of(part, rules, {True: ran}, whole=True, places=False)
    assert found == ["toy: the process was ended by SIGKILL"]
    assert (
        cli.differences_of(part, rules, {True: replace(ran, ending="")}, whole=True, places=False)
        == []
    )


def test_a_test_that_only_one_side_collects_is_a_difference() -> None:
    one = {"t::a": Result(Outcome.PASSED), "t::b": Result(Outcome.FAILED, "x")}
    assert cli.compared(one, dict(one)) == []
    assert cli.compared(one, {"t::a": Result(Outcome.PASSED)}) == [
        "t::b: with the plugin failed (x), without it not run (not collected)"
    ]


def test_a_compared_group_has_no_adapters_of_ours() -> None:
    with pytest.raises(ValueError, match="it can have no adapters of ours: cpu_device"):
        replace(toy_group(plugin=Plugin.COMPARED), adapters=("cpu_device",))


def test_names_and_titles_of_the_selection_are_unique_and_every_adapter_exists() -> None:
    groups = all_groups()
    assert len({group.name for group in groups}) == len(groups)
    assert len({group.title for group in groups}) == len(groups)
    folder = Path(cli.__file__).parent / "adapt"
    for group in groups:
        for name in group.adapters:
            assert (folder / f"{name}.py").is_file(), f"{group.name}: {name}"
        for word in (*group.arguments, *group.fast):
            assert not Path(word).is_absolute(), f"{group.name}: {word}"
