"""The groups of vLLM's tests that `groups.yaml` selects, and what must become of them."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import field
from pathlib import Path
from typing import Annotated, NamedTuple

import pydantic
import yaml
from pydantic.dataclasses import dataclass

FILE = Path(__file__).with_name("groups.yaml")
#: Of vLLM, whose tests these are.
VERSION = "0.32.0"
_STRICT = pydantic.ConfigDict(extra="forbid")


class Outcome(NamedTuple):
    """Of one test: "passed", "failed" or "skipped", and what was said about it."""

    kind: str
    message: str = ""

    def __str__(self) -> str:
        first = next((line for line in self.message.splitlines() if line.strip()), "")
        return self.kind + (f" ({first.strip()[:160]})" if first else "")


@dataclass(frozen=True, config=_STRICT)
class Failures:
    """Functions of a group with tests that fail, and a part of the messages of these."""

    reason: str
    tests: Mapping[str, Annotated[str, pydantic.Field(min_length=1)]]


@dataclass(frozen=True, config=_STRICT)
class Group:
    """Tests that one pytest process runs, or two (`compared`). Keys as in `groups.yaml`."""

    name: str
    arguments: tuple[str, ...]
    passed: pydantic.PositiveInt
    failed: tuple[Failures, ...] = ()
    compared: bool = False
    adapters: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    test_timeout_s: int = 300

    def __post_init__(self) -> None:
        if self.compared and (self.adapters or self.failed):
            raise ValueError(
                f"group {self.name!r} is compared with a run in which our package is hidden, "
                "so it has neither adapters of ours nor failures to list"
            )
        functions = [name for each in self.failed for name in each.tests]
        if len(functions) > len(set(functions)):
            raise ValueError(f"group {self.name!r}: two entries for one of {functions}")

    def differences(self, outcomes: Mapping[str, Outcome]) -> Iterator[str]:
        """A line for each thing that is not as in this entry."""
        passed = sum(one.kind == "passed" for one in outcomes.values())
        if passed != self.passed:
            yield f"{passed} tests passed, expected {self.passed}"
        if self.compared:
            return
        says = {name: part for each in self.failed for name, part in each.tests.items()}
        failed = {test: one for test, one in outcomes.items() if one.kind == "failed"}
        functions = {test: test.partition("[")[0].rpartition("::")[2] for test in failed}
        for test, one in failed.items():
            if functions[test] not in says:
                yield f"{test}: {one}"
            elif says[functions[test]] not in one.message:
                yield f"{test}: expected to say {says[functions[test]]!r}; it is: {one}"
        for name in says.keys() - set(functions.values()):
            yield f"{name}: no test failed"


def between(with_it: Mapping[str, Outcome], without: Mapping[str, Outcome]) -> Iterator[str]:
    """A line for each test whose outcome depends on whether our plugin is there."""
    absent = Outcome("not run")
    for test in dict.fromkeys([*with_it, *without]):
        one, other = with_it.get(test, absent), without.get(test, absent)
        if one.kind != other.kind:
            yield f"{test}: with the plugin {one}, without it {other}"


@functools.cache
def all_groups() -> dict[str, Group]:
    """Every group by its name."""
    entries = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    return {name: Group(name=name, **entry) for name, entry in entries.items()}
