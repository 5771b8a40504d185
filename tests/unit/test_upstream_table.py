"""The generated table: its numbers are those of the expectations files, and it is up to date."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moe_nvlink_plugin.errors import ConfigError
from tests.unit.upstream_toys import toy_group
from tests.upstream import table
from tests.upstream.expectations import Rule
from tests.upstream.groups import Plugin

RULES = {
    "two": [Rule("*", 7, "passed")],
    "one": [
        Rule("a", 4, "failed", "It has a bug.", "bug"),
        Rule("b", 30, "cannot run", "It needs a GPU."),
        Rule("c", 5, "cannot run", "It needs the hub.", run=False),
        Rule("d", 2, "cannot run", "It needs a GPU."),
        Rule("*", 100, "passed"),
    ],
}


def test_a_row_for_each_group_in_their_order_and_every_reason() -> None:
    groups = [toy_group(name=name) for name in ("one", "two", "unknown")]
    groups[1] = replace(groups[1], plugin=Plugin.COMPARED)
    assert table.section("1.0", groups, RULES) == (
        "vLLM 1.0 on CPU processes:\n\n"
        "| vLLM's tests | our backend | passed | failed for vLLM's reasons | cannot run here |\n"
        "|---|---|---|---|---|\n"
        "| the group one | chosen | 100 | 4 | 37 |\n"
        "| the group two | not chosen; as without the plugin | 7 | 0 | 0 |\n"
        "| all |  | 107 | 4 | 37 |\n"
        "\nFailed:\n\n- 4: It has a bug.\n"
        "\nCannot run here:\n\n- 32: It needs a GPU.\n- 5: It needs the hub.\n"
    )


def test_only_what_is_between_the_markers_is_replaced() -> None:
    document = f"before\n{table.BEGIN}\nold\n{table.END}\nafter\n"
    new = table.replaced(document, "new\n")
    assert new == f"before\n{table.BEGIN}\nnew\n{table.END}\nafter\n"
    assert table.replaced(new, "new\n") == new


@pytest.mark.parametrize(
    "document",
    ["", table.BEGIN, f"{table.END}\n{table.BEGIN}", f"{table.BEGIN}\n{table.BEGIN}\n{table.END}"],
)
def test_a_document_without_its_markers_is_not_written(document: str) -> None:
    with pytest.raises(ConfigError, match="must have the lines"):
        table.replaced(document, "new\n")


def test_the_readme_has_the_table_of_the_expectations_files() -> None:
    """`make upstream-tests UPSTREAM_ARGS=--write-table` renews it."""
    document = table.README.read_text(encoding="utf-8")
    assert table.replaced(document, table.text()) == document
