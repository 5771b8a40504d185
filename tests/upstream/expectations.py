"""What is known of every outcome: the expectations files, and how a run is held against them."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from moe_nvlink_plugin.errors import ConfigError

from .groups import Device
from .outcomes import Outcome, Result

FOLDER = Path(__file__).resolve().parent / "expectations"
#: A rule that `--update` has added and nobody has explained; it makes a run fail.
TODO = "TODO"
PASSED, FAILED, CANNOT_RUN = "passed", "failed", "cannot run"
KEYS = ("tests", "count", "outcome", "reason", "says", "run")


@dataclass(frozen=True)
class Rule:
    """What becomes of the tests whose node ids fit `tests`, where only * is wild."""

    tests: str
    count: int
    outcome: str
    reason: str = ""
    says: str = ""
    run: bool = True

    def fits(self, node: str) -> bool:
        """Whether the rule speaks of this test."""
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


def file_of(version: str, device: Device, folder: Path = FOLDER) -> Path:
    """Where the expectations of a version of vLLM on a device are."""
    return folder / f"{version}-{device.value}.yaml"


def read(path: Path) -> dict[str, tuple[Rule, ...]]:
    """Group name -> rules."""
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in path.parent.glob("*.yaml"))) or "none"
        raise ConfigError(f"there is no expectations file {path.name}; there are: {known}")
    content = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path.name} must map group names to lists of rules")
    for group, entries in content.items():
        if not isinstance(entries, list):
            raise ConfigError(f"{path.name}, {group}: must be a list of rules, not {entries!r}")
    return {
        str(group): tuple(
            _rule(entry, f"{path.name}, {group}, rule {number}")
            for number, entry in enumerate(entries, start=1)
        )
        for group, entries in content.items()
    }


def _rule(entry: Any, where: str) -> Rule:
    if not isinstance(entry, dict) or not set(entry) <= set(KEYS):
        raise ConfigError(f"{where}: a rule has the keys {', '.join(KEYS)}, not {entry}")
    for key, kind in (("tests", str), ("count", int), ("outcome", str)):
        if not isinstance(entry.get(key), kind):
            raise ConfigError(f"{where}: {key!r} must be of type {kind.__name__}: {entry}")
    rule = Rule(**entry)
    if rule.outcome not in (PASSED, FAILED, CANNOT_RUN):
        raise ConfigError(
            f"{where}: the outcome is {rule.outcome!r}; it must be passed, failed or cannot run"
        )
    if rule.count < 1:
        raise ConfigError(f"{where}: count is {rule.count}; remove a rule of no test")
    if rule.outcome != PASSED and not rule.reason:
        raise ConfigError(f"{where}: {rule.tests!r} needs a reason: one sentence")
    if rule.outcome == FAILED and not rule.says:
        raise ConfigError(f"{where}: {rule.tests!r} needs `says`: a text of its failure")
    if not rule.run and rule.outcome != CANNOT_RUN:
        raise ConfigError(f"{where}: run: false goes with `cannot run`, not {rule.outcome}")
    return rule


def left_out(rules: Sequence[Rule]) -> list[str]:
    """Patterns of the tests that the runner must not start."""
    return [rule.tests for rule in rules if not rule.run]


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
    """The rules with the counts of these results, and new ones for tests that fell to none.

    An outcome that differs from its rule stays a difference: a person decides about it.
    """
    counts: Counter[int] = Counter()
    fell_to_none: dict[str, Result] = {}
    for node, result in results.items():
        number = rule_of(rules, node)
        if number is None and result.outcome is not Outcome.NOT_RUN:
            fell_to_none[node] = result
        elif number is None:
            continue
        else:
            counts[number] += 1
    kept = [
        replace(rule, count=counts[number]) for number, rule in enumerate(rules) if counts[number]
    ]
    return kept + _new_rules(fell_to_none)


def _new_rules(results: Mapping[str, Result]) -> list[Rule]:
    """One rule for the tests of a function that all ended alike, else one for each test."""
    functions: dict[str, dict[str, Result]] = {}
    for node, result in results.items():
        functions.setdefault(node.split("[")[0], {})[node] = result
    rules = []
    for function, tests in functions.items():
        new = {node: (_expected(result), _says(result)) for node, result in tests.items()}
        count = 1
        if len(new) > 1 and len(set(new.values())) == 1:
            new, count = {f"{function}[*": next(iter(new.values()))}, len(new)
        for pattern, (outcome, says) in new.items():
            reason = "" if outcome == PASSED else TODO
            rules.append(Rule(pattern, count, outcome, reason, says))
    return rules


def _expected(result: Result) -> str:
    known = {Outcome.PASSED: PASSED, Outcome.FAILED: FAILED}
    return known.get(result.outcome, CANNOT_RUN)


def _says(result: Result) -> str:
    if result.outcome is Outcome.PASSED:
        return ""
    return next((line.strip()[:120] for line in result.message.splitlines() if line.strip()), "")


def write(path: Path, rules: Mapping[str, Sequence[Rule]]) -> None:
    """Writes the rules of all groups after the comments that the file begins with."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    head = "".join(itertools.takewhile(lambda line: line.startswith("#"), lines))
    sections = [
        f"\n{group}:\n" + "".join(map(_as_yaml, of_group)) for group, of_group in rules.items()
    ]
    path.write_text(head + "".join(sections), encoding="utf-8")


def _as_yaml(rule: Rule) -> str:
    entry: dict[str, Any] = {"tests": rule.tests, "count": rule.count, "outcome": rule.outcome}
    entry |= {"reason": rule.reason} if rule.reason else {}
    entry |= {"says": rule.says} if rule.says else {}
    entry |= {} if rule.run else {"run": False}
    text: str = yaml.safe_dump([entry], sort_keys=False, allow_unicode=True, width=10_000)
    return "".join(f"  {line}\n" for line in text.splitlines())
