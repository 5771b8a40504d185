"""The expectations files. within/moe_nvlink_upstream_expected.py compares a run with them."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pydantic
import yaml
from pydantic.dataclasses import dataclass

from moe_nvlink_plugin.errors import ConfigError

FOLDER = Path(__file__).resolve().parent / "expectations"
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


_FILE = pydantic.TypeAdapter(dict[str, tuple[Rule, ...]])


def file_of(version: str) -> Path:
    """Where the expectations of a version of vLLM lie."""
    return FOLDER / f"{version}-cpu.yaml"


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
