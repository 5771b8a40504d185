"""Result files under benchmarks/results/: read, named, and held to saying where they come from."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

#: What every result file says in "machine", as moe_nvlink's benchmarks write it: one of each group.
REQUIRED = (("date",), ("cpu", "gpu"), ("commit",), ("command",))


class ReportError(Exception):
    """The report cannot be made; the message says of which file, why, and what to do."""


class Result(NamedTuple):
    """One result file."""

    path: Path
    data: dict[str, Any]

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def machine(self) -> dict[str, Any]:
        found = self.data.get("machine")
        return found if isinstance(found, dict) else {}

    @property
    def options(self) -> dict[str, Any]:
        found = self.data.get("options")
        return found if isinstance(found, dict) else {}

    @property
    def kind(self) -> str:
        """What the file says it is; of files older than that word, what they look like."""
        return str(self.data.get("kind") or _old_kind(self.data))


def load(folder: Path) -> list[Result]:
    """Every result file of a folder, by name: the date comes first, so the oldest does.

    Raises:
        ReportError: a file is not JSON, no object, or of a run that did not end.
    """
    found = []
    for path in sorted(folder.glob("*.json")):
        try:
            data = json.loads(path.read_text())
        except ValueError as error:
            raise ReportError(f"{path}: not JSON ({error}); measure again or delete it") from error
        if not isinstance(data, dict):
            raise ReportError(f"{path}: holds a {type(data).__name__}, a result is an object")
        if "incomplete" in data:
            raise ReportError(
                f"{path}: incomplete ({data['incomplete']}); measure again, or keep it elsewhere"
            )
        found.append(Result(path, data))
    return found


def newest(results: Sequence[Result], patterns: Iterable[str]) -> Result | None:
    """The last by name of those that match the first pattern that any matches."""
    for pattern in patterns:
        matching = [result for result in results if fnmatch.fnmatch(result.name, pattern)]
        if matching:
            return matching[-1]
    return None


def complaints(result: Result) -> list[str]:
    """What a result file does not say about its origin."""
    missing = [
        " or ".join(names)
        for names in REQUIRED
        if all(result.machine.get(name) in (None, "", "unknown") for name in names)
    ]
    if not missing:
        return []
    return [
        f'{result.name}: "machine" lacks {", ".join(missing)}; write it with common.describe_run()'
    ]


def _old_kind(data: dict[str, Any]) -> str:
    if "groups" in data:
        return "lm_head"
    rows = data.get("rows")
    if isinstance(rows, dict):
        return "launch"
    first = rows[0] if isinstance(rows, list) and rows else {}
    if "verb" in first:
        return "recipes"
    return "exchange" if "both_us" in first else "unknown"
