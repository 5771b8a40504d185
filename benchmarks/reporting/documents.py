"""Documents with generated blocks, and measurements that stand outside of them.

A block is everything between two lines of its own:

    <!-- report: exchange -->
    ...
    <!-- end report -->
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from benchmarks.reporting.files import ReportError

BEGIN = re.compile(r"^<!-- report: (?P<name>[a-z0-9-]+) -->$")
END = "<!-- end report -->"
#: A measured number with its unit, in prose. Sizes and counts of a method are none.
MEASURED = re.compile(
    r"\b\d[\d.,]*\s?(?:us|ms|microseconds|milliseconds|GB/s|tokens/s|tokens per second)\b"
    r"|\b\d[\d.,]*x\b"
    r"|\b\d[\d.,]*\s?times (?:as |faster|slower|more|less)"
)
#: A table's cell that is a number, bold or not, with a unit or not.
NUMBER = re.compile(r"^\W*\d[\d.,]*\s?(?:x|%|us|ms|GB/s)?(?:\s?\(.*\))?\W*$")
#: Sections that begin so reason about a model's constants, assumed and fitted: no measurements.
PREDICTED = "Analytical model"
CODE = re.compile(r"`[^`]*`")


class Line(NamedTuple):
    """A line of a document: its number from 1, its text, the block it is in, the section."""

    number: int
    text: str
    block: str | None
    section: str


def lines(text: str, document: str) -> Iterator[Line]:
    """Every line but the marks of blocks and what is fenced as code.

    Raises:
        ReportError: a block is not closed, closed without being open, or inside another.
    """
    block: str | None = None
    section, fenced = "", False
    for number, line in enumerate(text.splitlines(), 1):
        begin = BEGIN.match(line)
        if begin or line == END:
            if bool(begin) == (block is not None):
                raise ReportError(f"{document}:{number}: {line} where block {block!r} is open")
            block = begin["name"] if begin else None
            continue
        if line.startswith("```"):
            fenced = not fenced
        elif line.startswith("## ") and not fenced:
            section = line[3:].strip()
        if not fenced and not line.startswith("    "):
            yield Line(number, line, block, section)
    if block is not None:
        raise ReportError(f"{document}: block {block!r} has no {END}")


def blocks_of(text: str, document: str) -> list[str]:
    """Names of a document's blocks, in order.

    Raises:
        ReportError: as `lines`; or a name stands twice.
    """
    for _ in lines(text, document):
        pass
    names = [found["name"] for line in text.splitlines() if (found := BEGIN.match(line))]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ReportError(f"{document}: block {', '.join(sorted(twice))} stands twice")
    return names


def rewrite(text: str, document: str, render: Callable[[str], str]) -> str:
    """The document with every block's contents made anew by `render(name)`.

    Raises:
        ReportError: as `blocks_of`.
    """
    blocks_of(text, document)
    result: list[str] = []
    inside = False
    for line in text.splitlines():
        begin = BEGIN.match(line)
        if begin:
            result += [line, *render(begin["name"]).strip("\n").splitlines(), END]
        elif not inside and line != END:
            result.append(line)
        inside = bool(begin) or (inside and line != END)
    return "\n".join(result) + "\n"


def strays(text: str, document: str, section: str | None = None) -> list[str]:
    """Measurements outside any block: rows of tables with numbers, prose with measured units.

    `section`: the heading whose text is looked at; None: all of the document.
    """
    found = []
    for line in lines(text, document):
        if line.block is not None or section not in (None, line.section):
            continue
        bare = CODE.sub("", line.text)
        if bare.startswith("|"):
            if any(NUMBER.match(cell) for cell in bare.strip("|").split("|")):
                found.append(f"{document}:{line.number}: a table's row of numbers: {line.text}")
        elif line.section.startswith(PREDICTED):
            continue
        elif measured := MEASURED.search(bare):
            found.append(f"{document}:{line.number}: {measured[0]!r} in prose: {line.text}")
    return found
