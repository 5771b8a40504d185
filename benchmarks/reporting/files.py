"""Result files under benchmarks/results/: read, named, and held to saying where they come from."""

from __future__ import annotations

import fnmatch
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

#: What the field "machine" of every result file must state: one name of each group.
REQUIRED = (("date",), ("cpu", "gpu"), ("commit",), ("command",))


class ReportError(Exception):
    """The report cannot be made; the message names the file, the reason and the next step."""


class Result(NamedTuple):
    """One result file."""

    path: Path
    data: dict[str, Any]

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def machine(self) -> dict[str, Any]:
        return dict(self.data.get("machine", {}))

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.data.get("options", {}))

    @property
    def kind(self) -> str:
        return str(self.data.get("kind", ""))


class Page(NamedTuple):
    """A document, named from the repository's root."""

    document: str
    root: Path

    def link(self, path: Path) -> str:
        """From the document to a file, as Markdown wants it."""
        return Path(os.path.relpath(path, (self.root / self.document).parent)).as_posix()


def load(folder: Path) -> list[Result]:
    """Read every result file of a folder, oldest first: each name begins with the date.

    Raises:
        ReportError: a file is not a JSON object, or its run did not end.
    """
    found = []
    for path in sorted(folder.glob("*.json")):
        try:
            result = Result(path, dict(json.loads(path.read_text())))
        except (ValueError, TypeError) as error:
            raise ReportError(f"{path}: not JSON ({error}); measure again or delete it") from error
        if "incomplete" in result.data:
            why = result.data["incomplete"]
            raise ReportError(f"{path}: incomplete ({why}); measure again, or keep it elsewhere")
        found.append(result)
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
    lacking = f'{result.name}: "machine" lacks {", ".join(missing)}'
    return [f"{lacking}; write it with common.describe_run()"] if missing else []
