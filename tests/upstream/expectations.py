"""The expectations files. within/moe_nvlink_upstream_expected.py compares a run with them."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pydantic
import yaml

from moe_nvlink_plugin.errors import ConfigError

from .within.moe_nvlink_upstream_expected import Rule

FOLDER = Path(__file__).resolve().parent / "expectations"
PASSED, FAILED, CANNOT_RUN = "passed", "failed", "cannot run"


class _Block(pydantic.BaseModel, frozen=True, extra="forbid"):
    """Rules that differ in their tests and counts alone."""

    tests: dict[str, pydantic.PositiveInt] = pydantic.Field(min_length=1)
    outcome: Literal["passed", "failed", "cannot run"]
    reason: str = ""
    says: str = ""
    run: bool = True

    @pydantic.model_validator(mode="after")
    def _complete(self) -> _Block:
        if self.outcome != PASSED and not self.reason:
            raise ValueError(f"{[*self.tests]} need a `reason`: one sentence")
        if self.outcome == FAILED and not self.says:
            raise ValueError(f"{[*self.tests]} need `says`: a text of their failure")
        if not self.run and self.outcome != CANNOT_RUN:
            raise ValueError(f"{[*self.tests]}: `run: false` goes with `cannot run` alone")
        return self

    def rules(self) -> list[Rule]:
        return [
            Rule(tests, count, self.outcome, self.reason, self.says, self.run)
            for tests, count in self.tests.items()
        ]


_FILE = pydantic.TypeAdapter(dict[str, tuple[_Block, ...]])


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
        groups = _FILE.validate_python(content)
    except pydantic.ValidationError as error:
        raise ConfigError(f"{path.name}: {error}") from error
    return {
        name: tuple(rule for block in blocks for rule in block.rules())
        for name, blocks in groups.items()
    }
