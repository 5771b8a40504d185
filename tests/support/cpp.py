"""The kernels' C++ as functions and statements, read by tree-sitter.

Tests that look into a kernel's text, or change it, name a function and a statement of it; files,
comments and the breaking of lines do not matter to them.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import NamedTuple

import tree_sitter
import tree_sitter_cpp

COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
#: Macros without parameters that are no values: HD, and those that unroll a loop.
ATTRIBUTE = re.compile(r"^#define (\w+) (?=_Pragma|__device__)", re.MULTILINE)
DEVICE_ONLY, HOST_ONLY = "MOE_NVLINK_DEVICE_ONLY", "MOE_NVLINK_HOST_ONLY"

_OF_ARGUMENTS = ("template_argument_list", "argument_list", "parameter_list")


class Function(NamedTuple):
    """A function that is defined in a text.

    Attributes:
        name: without class; a class's operator() has the class's name.
        start, end: what stands between the braces of its body.
    """

    name: str
    start: int
    end: int


@functools.cache
def _parser() -> tree_sitter.Parser:
    return tree_sitter.Parser(tree_sitter.Language(tree_sitter_cpp.language()))


def parse(text: str) -> tree_sitter.Node:
    """The root of a text's tree. Offsets in it are those of `text`, which is ASCII."""
    return _parser().parse(text.encode("ascii")).root_node


def text_of(node: tree_sitter.Node) -> str:
    """A node's text on one line."""
    return " ".join((node.text or b"").decode().split())


def plain(text: str) -> str:
    """As a GPU's preprocessor leaves it, every character in its place: spaces for comments,
    attributes and what is for the host only.
    """
    text = COMMENT.sub(_blank, text)
    macros = "|".join({"HD", *ATTRIBUTE.findall(text)})
    lines = re.split(r"(^#(?:.*\\\n)*.*)", text, flags=re.MULTILINE)
    code = [re.sub(rf"\b(?:{macros})\b", _blank, line) for line in lines[::2]]
    lines[::2] = code
    text = "".join(lines)
    for macro in re.finditer(rf"^(?!#).*?\b({DEVICE_ONLY}|{HOST_ONLY})\(", text, re.MULTILINE):
        text = _unwrapped(text, macro)
    return text


def _unwrapped(text: str, macro: re.Match[str]) -> str:
    start, first = macro.start(1), macro.end()
    last = closing(text, first - 1)
    kept = text[first:last] if macro[1] == DEVICE_ONLY else re.sub(r"\S", " ", text[first:last])
    return text[:start] + " " * (first - start) + kept + " " + text[last + 1 :]


def _blank(match: re.Match[str]) -> str:
    return re.sub(r"\S", " ", match[0])


def closing(text: str, opening: int) -> int:
    """Where the bracket at `opening` is closed."""
    depth = 0
    for place in range(opening, len(text)):
        depth += (text[place] in "([{") - (text[place] in ")]}")
        if depth == 0:
            return place
    raise ValueError(f"a bracket is never closed: {text[opening : opening + 40]!r}")


def functions(text: str) -> Iterator[Function]:
    """All definitions in what plain() gives, in their order."""
    for node in _definitions(parse(text)):
        body, declarator = node.child_by_field_name("body"), _declarator(node)
        if body is None or declarator is None:
            continue
        name = declarator.child_by_field_name("declarator")
        if name is not None and body.type == "compound_statement":
            is_operator = name.type == "operator_name"
            called = _name_of_class(node) if is_operator else last_name(name)
            inner = body.start_byte + 1, body.end_byte - 1
            yield Function(called, *inner)


def _definitions(node: tree_sitter.Node) -> Iterator[tree_sitter.Node]:
    if node.type == "function_definition":
        yield node
    else:
        for child in node.named_children:
            yield from _definitions(child)


def _declarator(node: tree_sitter.Node | None) -> tree_sitter.Node | None:
    """The function_declarator, behind * and & of what is returned."""
    while node is not None and node.type != "function_declarator":
        node = node.child_by_field_name("declarator") or next(
            (child for child in node.children if child.type == "function_declarator"), None
        )
    return node


def _name_of_class(node: tree_sitter.Node) -> str:
    above = node.parent
    while above is not None and above.type not in ("struct_specifier", "class_specifier"):
        above = above.parent
    name = above and above.child_by_field_name("name")
    return text_of(name) if name else ""


def name_node(node: tree_sitter.Node) -> tree_sitter.Node | None:
    """The node of `f` in `f`, `a.f`, `a->f<8>`, `&f` and `name::f`."""
    if node.type in ("identifier", "field_identifier", "type_identifier"):
        return node
    parts = [child for child in node.named_children if child.type not in _OF_ARGUMENTS]
    return name_node(parts[-1]) if parts else None


def last_name(node: tree_sitter.Node) -> str:
    found = name_node(node)
    return text_of(found) if found else ""


def replace(text: str, function: str, old: str, new: str) -> str:
    """Puts `new` for what stands once in the body of a function; any space stands for any other.

    Comments count as spaces, and those within what is found go with it.
    """
    read = plain(text)
    pattern = r"\s*".join(map(re.escape, re.findall(r"\w+|[^\w\s]", old)))
    found = [
        place
        for body in functions(read)
        if body.name == function
        for place in re.compile(pattern).finditer(read, body.start, body.end)
    ]
    if len(found) != 1:
        raise ValueError(f"{function} has {old!r} {len(found)} times, and should have it once")
    return text[: found[0].start()] + new + text[found[0].end() :]
