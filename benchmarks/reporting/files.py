"""Read result files under benchmarks/results/, and hold them to saying where they come from."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

#: Where result files lie, from the repository's root.
FOLDER = Path("benchmarks") / "results"
#: What the field "machine" of every result file must state: one name of each group.
REQUIRED = (("date",), ("cpu", "gpu"), ("commit",), ("command",))


class ReportError(Exception):
    """The report cannot be made; the message names the file, the reason and the next step."""


class Result(NamedTuple):
    """One result file. `link`: to the file, from the document that shows it."""

    path: Path
    data: dict[str, Any]
    link: str = ""

    @property
    def machine(self) -> dict[str, Any]:
        return dict(self.data.get("machine", {}))

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.data.get("options", {}))


def link(document: Path, path: Path) -> str:
    """Return the way from the document to a file, as Markdown wants it."""
    return Path(os.path.relpath(path, document.parent)).as_posix()


def load(document: Path = Path("README.md")) -> list[Result]:
    """Read every result file, oldest first: each name begins with the date.

    The files of a second set of one day have its number after the machine, as in
    `2026-11-26-h200-2-emulated.json`. Folders hold what is no whole result, and nothing reads them.

    Raises:
        ReportError: a file is not a JSON object, or its run did not end.
    """
    found = []
    for path in sorted(FOLDER.glob("*.json"), key=_age):
        try:
            data = dict(json.loads(path.read_text()))
        except (ValueError, TypeError) as error:
            raise ReportError(f"{path}: not JSON ({error}); measure again or delete it") from error
        if why := data.get("incomplete"):
            raise ReportError(f"{path}: incomplete ({why}); measure again, or keep it elsewhere")
        found.append(Result(path, data, link(document, path)))
    return found


def _age(path: Path) -> tuple[str, int, str]:
    """Return what sorts a file among others: its day, the number of its set, its name."""
    found = re.match(r"\d{4}-\d\d-\d\d-[a-z0-9]+-(\d+)-", path.name)
    return path.name[: len("2026-11-26")], int(found[1]) if found else 1, path.name


def newest(results: Sequence[Result], pattern: str) -> Result | None:
    """Return the last result by name that matches.

    Args:
        pattern: `*` stands for anything, and GPU for what follows the date in a file of any GPU:
            its model, such as h100, and the number of the set if there is one.
    """
    gpu = r"(?<=\d{4}-\d\d-\d\d-)(?!cpu-|rehearsal-)[a-z0-9]+(?:-\d+)?"
    parts = {"*": ".*", "GPU": gpu}
    regex = "".join(parts.get(part, re.escape(part)) for part in re.split(r"(\*|GPU)", pattern))
    matching = (each for each in reversed(results) if re.fullmatch(regex, each.path.name))
    return next(matching, None)


def lacks(result: Result) -> str:
    """Return what a result file does not say about its origin."""
    missing = [
        " or ".join(names)
        for names in REQUIRED
        if all(result.machine.get(name) in (None, "", "unknown") for name in names)
    ]
    lacking = f'{result.path.name}: "machine" lacks {", ".join(missing)}'
    return f"{lacking}; write it with common.describe_run()" if missing else ""
