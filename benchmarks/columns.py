"""Print the rows of a Markdown table as they are measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Heading -> format string over a row's fields, such as "{times_bf16[ratio]:.2f}".
Columns = Mapping[str, str]


def print_headings(columns: Columns) -> None:
    print("| " + " | ".join(columns) + " |")
    print("|---" * len(columns) + "|", flush=True)


def print_row(columns: Columns, row: Mapping[str, Any]) -> None:
    """Print a row's cells; leave a cell empty if the row has no such field."""
    cells = []
    for text in columns.values():
        try:
            cells.append(text.format_map(row))
        except KeyError:
            cells.append("")
    print("| " + " | ".join(cells) + " |", flush=True)
