"""Every example of the READMEs for users runs as it stands; commands, names, sizes are ours."""

from __future__ import annotations

import argparse
import re
import textwrap
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist

from moe_nvlink_plugin import MoeAllToAll, QuantisingRecipe, StoreGroup
from moe_nvlink_plugin.recipes import BUILT_IN
from moe_nvlink_plugin.recipes.combine_formats import FORMATS, combine_rows
from moe_nvlink_plugin.testing import ThreadGroup, run_ranks
from moe_nvlink_plugin.tools import cli
from tests.core.exchange.small_exchange import config
from tests.support.ranks import run_processes

ROOT = Path(__file__).parents[2]
README, GUIDE, FLASHINFER = (
    (ROOT / folder / "README.md").read_text(encoding="utf-8")
    for folder in (".", "moe_nvlink_plugin", "integration/flashinfer")
)
HERE = "tests/core/test_readme_examples.py"


class Place(NamedTuple):
    """Where an example stands: below which heading, and after how many others there."""

    heading: str
    number: int = 0


#: Each example in Python of the two READMEs, and the test that executes it.
EXECUTED_BY = {
    Place("PyTorch alone"): (
        "tests/core/test_packaging.py::test_the_first_example_beside_nothing_but_torch"
    ),
    Place("Verbs beside other work"): f"{HERE}::test_shared_experts_beside_combine",
    Place("When a rank dies"): f"{HERE}::test_ranks_go_on_without_a_dead_one",
    Place("When ranks return or join"): f"{HERE}::test_a_rank_joins",
    Place("When ranks return or join", 1): f"{HERE}::test_a_rank_joins",
    Place(
        "Share an LM head among draft ranks"
    ): "tests/core/lm_head/test_head.py::test_the_readmes_example",
}
#: The same of integration/flashinfer/README.md, whose other blocks are no whole programs.
WHOLE_PROGRAMS = {
    Place("A backend of flashinfer.moe_ep"): "tests/flashinfer/cases.py::the_newcomers_page"
}


def examples(text: str) -> dict[Place, str]:
    """The blocks of code that are not a shell's."""
    found: dict[Place, str] = {}
    heading = ""
    pieces = re.finditer(r"^#+ ([^\n]*)$|^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    for piece in pieces:
        if piece[1] is not None:
            heading = piece[1]
        elif piece[2]:
            number = sum(place.heading == heading for place in found)
            found[Place(heading, number)] = piece[3]
    return found


def example(heading: str, number: int = 0) -> str:
    return textwrap.dedent((examples(README) | examples(GUIDE))[Place(heading, number)])


def test_a_test_executes_each_example() -> None:
    assert examples(README).keys() | examples(GUIDE).keys() == EXECUTED_BY.keys()
    assert not examples(README).keys() & examples(GUIDE).keys()
    assert examples(FLASHINFER).keys() >= WHOLE_PROGRAMS.keys()
    for test in (EXECUTED_BY | WHOLE_PROGRAMS).values():
        file, _, name = test.partition("::")
        assert f"\ndef {name}(" in (ROOT / file).read_text(encoding="utf-8"), test


def test_an_example_that_nobody_executes_is_found() -> None:
    text = "# A\n```\nmake\n```\n## B\n```python\nx = 1  # one\n```\n```py\ny\n```\n"
    assert examples(text) == {Place("B"): "x = 1  # one\n", Place("B", 1): "y\n"}


# What the examples below need beside their own lines.


def of_a_process(_rank: int, _size: int) -> bool:
    """The program whose call of combine runs beside shared experts; the ranks have met before."""
    program = example("PyTorch alone").partition("\nassert ")[0]
    combines = "    output = exchange.combine(rows, received.metadata)"
    lines = [line for line in program.splitlines() if line.startswith(combines)]
    assert len(lines) == 1
    beside = textwrap.indent(example("Verbs beside other work"), "    ")
    names: dict[str, Any] = {"my_shared_experts": lambda hidden_states: 3 * hidden_states}
    with mock.patch.object(dist, "init_process_group"):
        exec(compile(program.replace(lines[0], beside), "README.md", "exec"), names)
    return torch.allclose(names["output"], 4 * names["hidden_states"], rtol=0.02)


def test_shared_experts_beside_combine(tmp_path: Path) -> None:
    assert run_processes(2, of_a_process, tmp_path) == [True, True]


def test_ranks_go_on_without_a_dead_one() -> None:
    """The last of three ranks never calls."""
    lines = example("When a rank dies")
    ids = torch.tensor([[0, 2], [1, 0]])  # a rank has one expert
    weights = torch.tensor([[0.25, 0.75], [0.5, 0.5]])

    def rank_main(group: ThreadGroup) -> torch.Tensor | None:
        geometry = config(3, group.rank, num_experts=3, timeout_s=5, small_tokens=0)
        with MoeAllToAll.create(geometry, group) as exchange:
            rows = torch.full((2, geometry.hidden_size), 1.0 + group.rank)
            names: dict[str, Any] = {"exchange": exchange, "hidden_states": rows}
            names |= {"topk_ids": ids, "topk_weights": weights}
            names["ranks_that_have_died"] = mock.Mock(return_value=[2])
            output = None
            if group.rank < 2:
                exec(lines, names)
                names["ranks_that_have_died"].assert_called_once_with()
                got = exchange.dispatch(rows, ids, weights)
                is_mine = got.topk_ids == group.rank
                shares = (got.topk_weights * is_mine).nan_to_num().sum(1, keepdim=True)
                output = exchange.combine(got.hidden_states * shares, got.metadata) / rows
            group.all_gather_object(None)  # the dead rank's memory stays
            return output

    expected = torch.tensor([[0.25], [1.0]])  # expert 2 has died
    for rank, output in enumerate(run_ranks(3, rank_main)):
        assert (output is None) == (rank == 2)
        assert output is None or torch.equal(output, expected.expand_as(output))


def test_a_rank_joins() -> None:
    """Each of three ranks then sends a token to every rank, and gets three times what it sent."""
    stays, joins = (example("When ranks return or join", number) for number in range(2))
    store = dist.HashStore()  # type: ignore[attr-defined]

    def rank_main(group: ThreadGroup) -> bool:
        places = (0, 1) if group.rank < 2 else (0, 1, 2)
        geometry = config(4, group.rank, places=places, top_k=3)
        names: dict[str, Any] = {"config": geometry, "store": store, "rank": group.rank}
        names |= {"MoeAllToAll": MoeAllToAll, "StoreGroup": StoreGroup}
        exec(stays if group.rank < 2 else joins, names)
        with names["exchange"] as exchange:
            assert exchange.places == (0, 1, 2)
            rows = torch.full((1, geometry.hidden_size), 1.0 + group.rank)
            ids = torch.tensor([[0, 1, 2]])
            got = exchange.dispatch(rows, ids, torch.ones(1, 3))
            output = exchange.combine(got.hidden_states, got.metadata)
            group.all_gather_object(None)
        return torch.equal(output, 3 * rows)

    assert run_ranks(3, rank_main) == [True] * 3


# Commands, and the tables of formats.


def test_its_commands_are_ours() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([\w-]+):", makefile, re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z][\w-]*)(?= |`|$)", code(), re.MULTILINE))
    assert {"demo", "test", "lint"} <= named <= targets
    extras = re.findall(r"^([\w-]+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert set(re.findall(r"pip install '\.\[(\w+)\]'", README)) <= set(extras)
    commands = next(
        action.choices
        for action in cli._parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    assert {"doctor", "top"} <= set(re.findall(r"moe-nvlink ([a-z]+)", README)) <= set(commands)


def code() -> str:
    """What stands in backticks or in a block."""
    return "\n".join(re.findall(r"```.*?```|`[^`\n]+`", README, re.DOTALL))


def table(text: str, column: str) -> dict[str, list[str]]:
    """Rows of the table whose first column has this title, by each name of their first cell."""
    found: dict[str, list[str]] = {}
    lines = iter(text.partition(f"\n| {column} |")[2].splitlines()[2:])
    for line in lines:
        if not line.startswith("|"):
            break
        first, *rest = (cell.strip() for cell in line.strip("|").split("|"))
        found |= dict.fromkeys(re.findall(r"`(\w+)`", first), rest)
    assert found, column
    return found


def test_tables_of_formats_have_every_format() -> None:
    details = (ROOT / "moe_nvlink_plugin/recipes/README.md").read_text(encoding="utf-8")
    recipes, formats = table(details, "`recipe=`"), table(details, "`combine=`")
    names = {recipe.name for recipe in BUILT_IN} | {"bytes_N"}
    assert recipes.keys() == names
    in_short = README.partition("\n## Formats\n")[2].partition("\n## ")[0]
    assert set(re.findall(r"`(\w+)`", in_short)) == names
    assert formats.keys() == {"bf16", *FORMATS}
    for recipe in BUILT_IN:
        if isinstance(recipe, QuantisingRecipe):
            rows = [recipe.hidden_row(7168), recipe.scales_row(7168)]
            assert recipes[recipe.name][1] == " + ".join(str(row.row_bytes) for row in rows if row)
    for name in FORMATS:
        sizes = [str(row.row_bytes) for row in combine_rows(name, 7168).values()]
        assert formats[name][1] == " + ".join(sizes)
