"""The expectations files, and how a run is compared with them."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pydantic
import yaml
from pydantic.dataclasses import dataclass

from moe_nvlink_plugin.errors import ConfigError

from .outcomes import Outcome, Result

FOLDER = Path(__file__).resolve().parent / "expectations"
#: The reason of a rule that `--update` has added. The run fails until somebody writes another one.
TODO = "TODO"
PASSED, FAILED, CANNOT_RUN = "passed", "failed", "cannot run"


@dataclass(frozen=True, config=pydantic.ConfigDict(extra="forbid"))
class Rule:
    """The expected outcome of the tests whose node ids fit `tests`, where only * is wild."""

    tests: str
    count: pydantic.PositiveInt
    outcome: Literal["passed", "failed", "cannot run"]
    reason: str = ""
    says: str = ""
    run: bool = True

    def __post_init__(self) -> None:
        if self.outcome != PASSED and not self.reason:
            raise ValueError(f"{self.tests!r} needs a `reason`: one sentence")
        if self.outcome == FAILED and not self.says:
            raise ValueError(f"{self.tests!r} needs `says`: a text of its failure")
        if not self.run and self.outcome != CANNOT_RUN:
            raise ValueError(f"{self.tests!r}: `run: false` goes with `cannot run` alone")

    def fits(self, node: str) -> bool:
        """Whether the rule is about this test."""
        pattern = ".*".join(map(re.escape, self.tests.split("*")))
        return re.fullmatch(pattern, node, re.DOTALL) is not None

    def complaint(self, result: Result) -> str:
        """What is wrong with this result of a test of the rule; "" if nothing."""
        allowed = {
            PASSED: {Outcome.PASSED},
            FAILED: {Outcome.FAILED},
            CANNOT_RUN: {Outcome.SKIPPED, Outcome.FAILED} if self.run else {Outcome.LEFT_OUT},
        }[self.outcome]
        if result.outcome not in allowed:
            return f"expected: {self.outcome}; it is: {result.line()}"
        if result.outcome is Outcome.FAILED and not self.says:
            return f"it failed, and its rule {self.tests!r} has no `says`: {result.line()}"
        if self.says not in result.message:
            return f"expected to say {self.says!r}; it is: {result.line()}"
        return ""


_FILE = pydantic.TypeAdapter(dict[str, tuple[Rule, ...]])


def file_of(version: str, gpus: int, folder: Path = FOLDER) -> Path:
    """Where the expectations of a version of vLLM lie, on GPUs or (gpus 0) on CPUs."""
    return folder / f"{version}-{'gpu' if gpus else 'cpu'}.yaml"


def read(path: Path) -> dict[str, tuple[Rule, ...]]:
    """Group name -> rules. Raises ConfigError if the file is not there or says nothing sensible."""
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in path.parent.glob("*.yaml"))) or "none"
        raise ConfigError(f"there is no expectations file {path.name}; there are: {known}")
    content = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    try:
        return _FILE.validate_python(content)
    except pydantic.ValidationError as error:
        raise ConfigError(f"{path.name}: {error}") from error


def write(path: Path, rules: Mapping[str, Sequence[Rule]]) -> None:
    """Writes the rules of all groups after the comments that the file begins with."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    text = "".join(itertools.takewhile(lambda line: line.startswith("#"), lines))
    dumped = _FILE.dump_python({k: tuple(v) for k, v in rules.items()}, exclude_defaults=True)
    for group, entries in dumped.items():
        body = yaml.safe_dump(list(entries), sort_keys=False, allow_unicode=True, width=10_000)
        text += f"\n{group}:\n" + "".join(f"  {line}\n" for line in body.splitlines())
    path.write_text(text, encoding="utf-8")


def rule_of(rules: Sequence[Rule], node: str) -> int | None:
    """The number of the first rule that fits."""
    return next((number for number, rule in enumerate(rules) if rule.fits(node)), None)


def differences(
    rules: Sequence[Rule], results: Mapping[str, Result], *, whole: bool = True
) -> list[str]:
    """What differs, one line each; `whole`: all tests of the group were run, so counts must fit."""
    found = []
    counts: Counter[int] = Counter()
    for node, result in results.items():
        number = rule_of(rules, node)
        if number is None:
            found.append(f"{node}: no rule fits; it is: {result.line()}")
            continue
        counts[number] += 1
        complaint = rules[number].complaint(result)
        if complaint:
            found.append(f"{node}: {complaint}")
    for number, rule in enumerate(rules):
        if whole and counts[number] != rule.count:
            found.append(f"rule {rule.tests!r}: {counts[number]} tests, expected {rule.count}")
        if rule.reason.startswith(TODO):
            found.append(f"rule {rule.tests!r}: its reason is still {TODO}")
    return found


def failures(results: Mapping[str, Result]) -> list[str]:
    """What is wrong where nothing is expected yet, a line each: tests that failed or never ran."""
    wrong = (Outcome.FAILED, Outcome.NOT_RUN)
    return [f"{node}: {one.line()}" for node, one in results.items() if one.outcome in wrong]


def updated(rules: Sequence[Rule], results: Mapping[str, Result]) -> list[Rule]:
    """The rules with the counts of these results, and new rules for tests that fit none.

    An outcome that differs from its rule stays a difference: a person decides about it.
    """
    counts = Counter(rule_of(rules, node) for node in results)
    kept = [replace(rule, count=counts[i]) for i, rule in enumerate(rules) if counts[i]]
    functions: dict[str, dict[str, Result]] = {}
    for node, result in results.items():
        if rule_of(rules, node) is None and result.outcome is not Outcome.NOT_RUN:
            functions.setdefault(node.split("[")[0], {})[node] = result
    return kept + [rule for name, tests in functions.items() for rule in _new(name, tests)]


def _new(function: str, tests: Mapping[str, Result]) -> list[Rule]:
    """One rule for the tests of a function if all ended alike, else one rule for each test."""
    rules = [_exact(node, result) for node, result in tests.items()]
    alike = {replace(rule, tests="") for rule in rules}
    if len(rules) > 1 and len(alike) == 1:
        return [replace(rules[0], tests=f"{function}[*", count=len(rules))]
    return rules


def _exact(node: str, result: Result) -> Rule:
    if result.outcome is Outcome.PASSED:
        return Rule(node, 1, "passed")
    lines = (line.strip()[:120] for line in result.message.splitlines())
    says = next(filter(None, lines), "")
    if result.outcome is Outcome.FAILED:
        return Rule(node, 1, "failed", TODO, says or TODO)
    return Rule(node, 1, "cannot run", TODO, says, run=result.outcome is not Outcome.LEFT_OUT)
