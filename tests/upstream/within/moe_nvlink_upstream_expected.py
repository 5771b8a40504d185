"""A pytest plugin of every upstream run: leaves tests out, compares every outcome with its rule.

It writes down what differs, a line each, and the exit code says whether something does. It also
looks whether vLLM has asked our plugin for a platform, or has taken ours: without that a run shows
nothing. It imports nothing of our package, because runs without our plugin load it too.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest

#: Imported by vLLM alone, when it follows our entry point; it may then stay out.
PLATFORM = "moe_nvlink_plugin.integration.vllm.plugin.platform"
LEFT_OUT, NOT_RUN = "left out", "not run"
#: What counts more comes later: a failure in any phase, of any subtest, is the test's.
RANKS = ("passed", "skipped", "failed")


def pytest_addoption(parser: pytest.Parser) -> None:
    """One option: a JSON file with the fields of `_Expected`."""
    parser.addoption("--upstream-expected", type=Path, required=True, help="see run.py")


def pytest_configure(config: pytest.Config) -> None:
    """Starts what does the work."""
    order = json.loads(config.getoption("--upstream-expected").read_text(encoding="utf-8"))
    expected = _Expected(**order)
    config.pluginmanager.register(expected)
    # pytest asks no hook about a file that is named on its command line.
    config.args[:] = [one for one in config.args if not one.endswith(".py") or expected.keeps(one)]


class Seen(NamedTuple):
    """An outcome, and what vLLM's test or pytest said about it."""

    outcome: str
    message: str = ""

    def __str__(self) -> str:
        first = next((line for line in self.message.splitlines() if line.strip()), "")
        return self.outcome + (f" ({first.strip()[:160]})" if first else "")


@dataclass(frozen=True)
class Rule:
    """The expected outcome of the tests whose node ids fit `tests`, where only * is wild."""

    tests: str
    count: int
    outcome: str
    reason: str = ""
    says: str = ""
    run: bool = True

    def fits(self, node: str) -> bool:
        """Whether the rule is about this test: only * is wild."""
        pattern = ".*".join(map(re.escape, self.tests.split("*")))
        return re.fullmatch(pattern, node, re.DOTALL) is not None

    def complaint(self, seen: Seen) -> str:
        """What is wrong with this outcome of a test of the rule; "" if nothing."""
        cannot_run = ("skipped", "failed") if self.run else (LEFT_OUT,)
        if seen.outcome not in (cannot_run if self.outcome == "cannot run" else (self.outcome,)):
            return f"expected: {self.outcome}; it is: {seen}"
        if seen.outcome == "failed" and not self.says:
            return f"it failed, and its rule {self.tests!r} has no `says`: {seen}"
        return "" if self.says in seen.message else f"expected to say {self.says!r}; it is: {seen}"


class _Expected:
    """The plugin.

    Args:
        rules: of the group.
        whole: all tests of the group run, so that the rules' counts must fit.
        used: what vLLM must have done with our platform, "asked" or "taken", and whether.
        differences: where to write what differs.
    """

    def __init__(
        self,
        rules: list[dict[str, Any]],
        whole: bool,
        used: tuple[str, bool],
        differences: str,
    ) -> None:
        self._rules = [Rule(**rule) for rule in rules]
        self._whole, self._used, self._path = whole, used, Path(differences)
        self._seen: dict[str, Seen] = {}
        self._names: list[str] = []
        self._ended: set[str] = set()
        self._taken = False

    def keeps(self, node: str) -> bool:
        """Whether a file or test is to run; remembers those that are not."""
        if not any(not rule.run and rule.fits(node) for rule in self._rules):
            return True
        self._seen[node] = Seen(LEFT_OUT)
        return False

    def pytest_ignore_collect(self, collection_path: Path, config: pytest.Config) -> bool | None:
        """A file that is named as a whole is not even imported."""
        if collection_path.suffix != ".py" or not collection_path.is_relative_to(config.rootpath):
            return None
        name = collection_path.relative_to(config.rootpath).as_posix()
        return None if self.keeps(name) else True

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> Generator[None]:
        """After `-k` and its like, so that what they take away is not counted as left out."""
        yield
        kept = [item for item in items if self.keeps(item.nodeid)]
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Before the first test, which may leave another platform behind."""
        self._names = [item.nodeid for item in session.items]
        self._taken = is_taken()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that cannot be collected is a "test" with the file's name."""
        if report.outcome != "passed":
            self._seen[report.nodeid] = seen_in(report)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A skip is more than a pass."""
        new, old = seen_in(report), self._seen.get(report.nodeid, Seen("passed"))
        if new.outcome == old.outcome:
            new = Seen(new.outcome, "\n".join(filter(None, (old.message, new.message))))
        if RANKS.index(new.outcome) >= RANKS.index(old.outcome):
            self._seen[report.nodeid] = new
        if report.when == "teardown":
            self._ended.add(report.nodeid)

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Once vLLM has had every reason to load its plugins."""
        found = [*self._differences()]
        if exitstatus not in (0, 1, 5):
            found.append(f"pytest ended with code {int(exitstatus)}")
        self._path.write_text("".join(f"{line}\n" for line in found), encoding="utf-8")
        session.exitstatus = int(bool(found))

    def _differences(self) -> Iterator[str]:
        verb, wanted = self._used
        was = self._taken or is_taken() if verb == "taken" else PLATFORM in sys.modules
        if was is not wanted:
            done = f"{'has' if was else 'has not'} {verb}"
            yield f"vLLM {done} our platform plugin in this run"
        if not self._names and not (self._whole and self._seen):
            yield "no test was run"
        stopped = Seen(NOT_RUN, "pytest stopped before it")
        self._seen |= {node: stopped for node in self._names if node not in self._ended}
        yield from differences(self._rules, self._seen, whole=self._whole)


def differences(rules: Sequence[Rule], seen: Mapping[str, Seen], *, whole: bool) -> Iterator[str]:
    """A line for each outcome that is not as expected, and for each rule with another count."""
    counts: Counter[Rule] = Counter()
    for node, one in seen.items():
        rule = next((rule for rule in rules if rule.fits(node)), None)
        if rule is None:
            yield f"{node}: no rule fits; it is: {one}"
            continue
        counts[rule] += 1
        if complaint := rule.complaint(one):
            yield f"{node}: {complaint}"
    for rule in rules:
        if whole and counts[rule] != rule.count:
            yield f"rule {rule.tests!r}: {counts[rule]} tests, expected {rule.count}"


def is_taken() -> bool:
    """Whether the platform that vLLM works with is ours. Never makes vLLM choose one."""
    platforms = sys.modules.get("vllm.platforms")
    chosen = None if platforms is None else vars(platforms).get("_current_platform")
    return type(chosen).__module__ == PLATFORM


def seen_in(report: pytest.CollectReport | pytest.TestReport) -> Seen:
    """The outcome of one phase of a test, or of a file's collection."""
    message, why = _message(report.longrepr), getattr(report, "wasxfail", None)
    if why is not None and report.outcome == "skipped":
        return Seen("failed", f"vLLM expects this failure: {why}\n{message}")
    if why is not None and report.outcome == "passed":
        return Seen("passed", f"vLLM expected a failure: {why}")
    if report.outcome == "failed" and report.when in ("setup", "teardown"):
        message = f"{report.when}: {message}"
    return Seen(report.outcome, message)


def _message(longrepr: Any) -> str:
    """The text of the exception and of those that caused it, last first, without source lines."""
    if isinstance(longrepr, tuple):  # of a skip: file, line, text
        return str(longrepr[-1])
    crashes = [getattr(longrepr, "reprcrash", None)]
    crashes += [crash for _, crash, _ in reversed(getattr(longrepr, "chain", []))]
    texts = [str(crash.message) for crash in crashes if crash]
    return "\n".join(dict.fromkeys(texts)) or str(longrepr or "")
