"""What the documents say about files, modules, headings and variables is there."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from moe_nvlink_plugin import frameworks

ROOT = Path(__file__).parents[2]
ROOMS = ("benchmarks", "include", "integration", "kernels", "moe_nvlink_plugin", "tests")
#: Every document of the repository. The package's links lead to folders that are rooms themselves.
DOCUMENTS = sorted(
    {
        path.resolve().relative_to(ROOT.resolve()).as_posix()
        for pattern in ("*.md", *(f"{room}/**/*.md" for room in ROOMS))
        for path in ROOT.glob(pattern)
    }
)
#: Documents about third-party files.
FOREIGN = ("integration/vllm/FOUND.md",)

each_document = pytest.mark.parametrize("document", DOCUMENTS)


def ours(document: str) -> str:
    """The document's text; nothing of a document about third-party files."""
    return "" if document in FOREIGN else (ROOT / document).read_text(encoding="utf-8")


def named_paths(text: str) -> set[str]:
    """Words in backticks, and arguments of commands, that are paths into a room of ours."""
    in_code = re.findall(r"`([^`\n]+)`", text) + re.findall(r"```\w*\n(.*?)```", text, re.S)
    words = {word.strip("\"'(),;:") for code in in_code for word in code.split()}
    path = re.compile(rf"(?:{'|'.join(ROOMS)})/[\w./-]+")
    return {word for word in words if path.fullmatch(word) and "DATE" not in word}


def places(document: str, path: str) -> Iterator[Path]:
    """Where a path may be: below the checkout, below the package, or beside the document."""
    yield ROOT / path
    yield ROOT / "moe_nvlink_plugin" / path
    yield (ROOT / document).parent / path


def missing_paths(document: str, text: str) -> list[str]:
    return sorted(
        path
        for path in named_paths(text)
        if not any(place.exists() for place in places(document, path))
    )


def anchors(text: str) -> set[str]:
    """As GitHub names a document's headings."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def dead_links(document: str, text: str) -> list[str]:
    dead = []
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text):
        name, _, anchor = target.partition("#")
        path = (ROOT / document).parent / name if name else ROOT / document
        if not path.exists() or (
            anchor and anchor not in anchors(path.read_text(encoding="utf-8"))
        ):
            dead.append(target)
    return dead


@each_document
def test_every_path_is_there(document: str) -> None:
    assert missing_paths(document, ours(document)) == []


@each_document
def test_every_link_leads_somewhere(document: str) -> None:
    assert dead_links(document, (ROOT / document).read_text(encoding="utf-8")) == []


@each_document
def test_every_module_that_is_run_is_there(document: str) -> None:
    modules = re.findall(
        r"python -m ((?:moe_nvlink_plugin|tests|benchmarks)[\w.]*)", ours(document)
    )
    assert [name for name in modules if importlib.util.find_spec(name) is None] == []


def test_the_table_of_variables_is_that_of_env() -> None:
    text = "".join((ROOT / document).read_text(encoding="utf-8") for document in DOCUMENTS)
    (table,) = re.findall(
        r"<!-- environment variables: .*? -->\n(.*?)\n<!-- end of environment variables -->",
        text,
        re.DOTALL,
    )
    rows = [
        f"| `{name}` | {default} | {use} |"
        for name, (default, use) in frameworks.variables().items()
    ]
    assert table.splitlines() == ["| variable | default | meaning |", "|---|---|---|", *rows]


def test_the_checks_notice_what_is_missing() -> None:
    text = (
        "# A heading: two\n"
        "`tests/core/test_documents.py` `kernels/no_such_file.cu` `vllm/envs.py`\n"
        "[here](#a-heading-two) [gone](#a-heading) [file](README.md) [none](none.md)\n"
        "```\npython benchmarks/no_such_script.py --output benchmarks/results/DATE.json\n```\n"
    )
    assert missing_paths("README.md", text) == [
        "benchmarks/no_such_script.py",
        "kernels/no_such_file.cu",
    ]
    assert dead_links("README.md", text) == ["#a-heading-two", "#a-heading", "none.md"]
    assert "a-heading-two" in anchors(text)
