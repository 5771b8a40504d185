"""From the kernels' text to the litmus program of one thread.

The order of a thread's ordered accesses, their operation, order and scope are taken from the text
that NVRTC compiles, so that a change there changes the litmus program and with it the verdict:

    thread = Kernels().thread("arrive", {"fetch_add_acq_rel_gpu": "mine=0, arrivals, 1"})
    # "bar.sync; atom.acq_rel.gpu.add mine=0, arrivals, 1; bar.sync"

Functions that call primitives (one PTX instruction or barrier each) are expanded in place. A test
adds what the text does not say: the operands of each access, which branches this thread takes, and
which calls are the plain accesses whose order is in question. An access the test has no operands
for is an error, so a new one in the kernels can not stay unnoticed here.

tree-sitter reads the C++. A loop's body is taken once, unless a test asks for more turns. What a
function is handed to call, a lambda or an object of a class with operator(), is taken where the
function calls it.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from tree_sitter import Node

from tests.support import cpp, kernel_texts

ASSEMBLY = re.compile(r'asm\s+volatile\s*\(\s*"([^"]+)"')
#: Ordered accesses. Of other instructions (mov, cvt) there is nothing to say.
ACCESS = re.compile(r"(ld|st|atom)\.(weak|relaxed|acquire|release|acq_rel)\.(cta|gpu|sys)\b")
BARRIERS = {"__syncthreads": "bar.sync", "__syncwarp": "bar.warp.sync"}
LOOPS = ("for_statement", "for_range_loop", "while_statement", "do_statement")
BLOCKS = ("compound_statement", "case_statement", "else_clause")
CALLS = ("call_expression", "compound_literal_expression")
LEAVES = ("return_statement", "continue_statement", "break_statement")


class SourceError(ValueError):
    """The kernels' text is not what the litmus programs were written for."""


class Call(NamedTuple):
    """A primitive or a plain access where it stands: in which function."""

    function: str
    name: str
    text: str

    def __str__(self) -> str:
        return f"{self.function}: {self.text}"


#: Said of every access that matches, or of each in turn.
Operands = str | tuple[str, ...]


class Edit(NamedTuple):
    """In the body of a function of the kernels: what is found (a pattern), what shall be there."""

    function: str
    old: str
    new: str = ""
    turn: int = 0  # which of several


class Kernels:
    """The text of all kernels as a GPU gets it, or another one, with these edits made first."""

    def __init__(self, *edits: Edit, text: str | None = None) -> None:
        definitions = _definitions(_kernels() if text is None else text)
        self.parameters = {name: parameters for name, (parameters, _) in definitions.items()}
        self.bodies = {name: body for name, (_, body) in definitions.items()}
        for edit in edits:
            self._make(edit)
        self.primitives = {
            name: instruction
            for name, body in self.bodies.items()
            if (instruction := _instruction(body)) is not None
        }

    def _make(self, edit: Edit) -> None:
        body = self.bodies.get(edit.function, "")
        found = list(re.finditer(edit.old, body))
        if len(found) <= edit.turn:
            raise SourceError(f"{edit.function} has no {edit.old!r} number {edit.turn}")
        place = found[edit.turn]
        self.bodies[edit.function] = body[: place.start()] + edit.new + body[place.end() :]

    @functools.cached_property
    def expanded(self) -> frozenset[str]:
        """Functions a primitive is called in, directly or not."""
        calls = {name: _called(body) for name, body in self.bodies.items()}
        found: set[str] = set()
        grown = set(self.primitives)
        while grown:
            reaches = found | set(self.primitives)
            names = {name.partition("/")[0] for name in reaches}
            grown = {name for name in calls.keys() - reaches if calls[name] & names}
            found |= grown
        return frozenset(found)

    def thread(
        self,
        function: str,
        operands: Mapping[str, Operands],
        plain: Mapping[str, Operands] | None = None,
        untaken: Sequence[str] = (),
        turns: Mapping[str, int] | None = None,
    ) -> str:
        """Instructions of one thread that runs `function`, joined by semicolons.

        operands: for each access, a pattern of "function: call(arguments)" and its operands; a
        tuple gives those of several that match, in their order. "" leaves the access out. plain: a
        pattern of a statement's text and the whole instruction. untaken: patterns of conditions
        that are false for this thread. turns: a pattern of a loop's head and how often it runs.
        """
        plain = plain or {}
        said = {key: _turns(value) for key, value in (*operands.items(), *plain.items())}
        unused = set(said)
        lines = []
        for call in self.calls(function, tuple(plain), untaken, turns or {}):
            instruction = "" if call.name in plain else self.primitives[call.name]
            if instruction and not ACCESS.match(instruction):
                lines.append(instruction)
                continue
            key = call.name if call.name in plain else _key_of(call, operands)
            unused.discard(key)
            rest = next(said[key])
            if rest:
                lines.append(_with_operands(instruction, rest))
        if unused:
            raise SourceError(f"{function} has nothing like {sorted(unused)} on this path")
        return "; ".join(lines)

    def calls(
        self,
        function: str,
        plain: tuple[str, ...],
        untaken: Sequence[str],
        turns: Mapping[str, int],
    ) -> Iterator[Call]:
        """Primitives and plain accesses in the order of the text, with what is called expanded."""
        if function not in self.bodies:
            raise SourceError(f"no function {function} in the kernels")
        yield from _Reader(self, plain, untaken, turns).function(function, {})


class _Scope(NamedTuple):
    """The function whose text is read, and what its names stand for that can be called."""

    function: str
    names: dict[str, _Callable]


class _Callable(NamedTuple):
    """A lambda's body, or that of an operator(), and where it was written."""

    body: Node
    scope: _Scope


class _Reader(NamedTuple):
    """Goes through the branches that a thread takes."""

    kernels: Kernels
    plain: tuple[str, ...]
    untaken: Sequence[str]
    turns: Mapping[str, int]

    def function(self, name: str, names: dict[str, _Callable]) -> Iterator[Call]:
        yield from self._statement(self._body(name), _Scope(name, names))

    def _body(self, name: str) -> Node:
        body = _tree(self.kernels.bodies[name])
        if body.has_error:
            wrong = next(node for node in cpp.inside(body) if node.is_error or node.is_missing)
            raise SourceError(
                f"can not tell what {cpp.text_of(wrong.parent or wrong)!r} in {name} does"
            )
        return body

    def _takes(self, *guards: str) -> bool:
        return not any(re.search(no, guard) for no in self.untaken for guard in guards)

    def _statement(self, node: Node, scope: _Scope) -> Iterator[Call]:
        if node.type in ("if_statement", "switch_statement"):
            yield from self._branches(node, scope)
        elif node.type in LOOPS:
            yield from self._loop(node, scope)
        elif node.type in BLOCKS:
            yield from self._block(node, scope)
        else:
            yield from self._simple(node, (node,), scope)

    def _block(self, node: Node, scope: _Scope) -> Iterator[Call]:
        """What stands behind `if (condition) return;` runs where the condition is false."""
        value = node.child_by_field_name("value")  # of a case
        for child in node.named_children:
            if child != value:
                yield from self._statement(child, scope)
            ends = child.type == "if_statement" and _leaves(child)
            if ends and not self._takes(f"!({_head(child)})"):
                return

    def _branches(self, node: Node, scope: _Scope) -> Iterator[Call]:
        head, condition = _head(node), _part(node, "condition")
        yield from self._simple(condition, (condition,), scope)
        if node.type == "switch_statement":
            for case in _part(node, "body").named_children:
                value = case.child_by_field_name("value")
                if self._takes(f"{head} == {cpp.text_of(value)}" if value else f"{head}: default"):
                    yield from self._statement(case, scope)
            return
        if self._takes(head):
            yield from self._statement(_part(node, "consequence"), scope)
        otherwise = node.child_by_field_name("alternative")
        if otherwise is not None and self._takes(f"!({head})"):
            yield from self._statement(otherwise, scope)

    def _loop(self, node: Node, scope: _Scope) -> Iterator[Call]:
        head, body = _head(node), _part(node, "body")
        parts = tuple(child for child in node.named_children if child != body)
        times = [n for loop, n in self.turns.items() if re.search(loop, head)]
        for _ in range(times[0] if times else 1):
            of_head = self._simple(node, parts, scope)
            of_body = self._statement(body, scope) if self._takes(head) else ()
            yield from (*of_body, *of_head) if node.type == "do_statement" else (*of_head, *of_body)

    def _simple(self, node: Node, parts: tuple[Node, ...], scope: _Scope) -> Iterator[Call]:
        """Parts of a node that hold no statements but those of lambdas."""
        for part in parts:
            self._name_callable(part, scope)
        first, text = _masked(node, parts)
        found = [
            (first + match.start(), Call(scope.function, pattern, match[0]))
            for pattern in self.plain
            for match in re.finditer(pattern, text)
        ]
        hidden, place = {start for start, _ in found}, 0
        for call, name, guards in _evaluated(parts):
            place = max(place, name.start_byte)
            if name.start_byte not in hidden and self._takes(*guards):
                found += [(place, one) for one in self._called(call, name, scope)]
        yield from (call for _, call in sorted(found, key=lambda item: item[0]))

    def _called(self, node: Node, of: Node, scope: _Scope) -> Iterator[Call]:
        name, arguments = cpp.text_of(of), _part(node, "arguments").named_children
        if f"{name}/{len(arguments)}" in self.kernels.bodies:
            name = f"{name}/{len(arguments)}"
        given = [self._callable(argument, scope) for argument in arguments]
        if name in scope.names:
            body, of_author = scope.names[name]
            yield from self._statement(body, of_author)
        elif name in self.kernels.primitives:
            text = (node.text or b"").decode()[of.start_byte - node.start_byte :]
            yield Call(scope.function, name, text)
        elif name in self.kernels.expanded or (any(given) and name in self.kernels.bodies):
            parameters = self.kernels.parameters[name]
            pairs = zip(parameters, given, strict=False)
            yield from self.function(name, {of: body for of, body in pairs if body is not None})
        else:  # whatever it is, it calls what it is given
            for one in filter(None, given):
                yield from self._statement(one.body, one.scope)

    def _name_callable(self, node: Node, scope: _Scope) -> None:
        """After `auto name = [&] { ... };` the name stands for the lambda."""
        for made in node.named_children if node.type == "declaration" else ():
            value = made.child_by_field_name("value")
            callable_ = self._callable(value, scope) if value is not None else None
            if callable_ is not None:
                scope.names[cpp.last_name(_part(made, "declarator"))] = callable_

    def _callable(self, node: Node, scope: _Scope) -> _Callable | None:
        if node.type == "lambda_expression":
            return _Callable(_part(node, "body"), scope)
        if node.type == "identifier":
            return scope.names.get(cpp.text_of(node))
        if node.type == "compound_literal_expression":
            name = cpp.last_name(_part(node, "type"))
            if name in self.kernels.bodies:
                return _Callable(self._body(name), _Scope(name, {}))
        return None


@functools.cache
def _evaluated(parts: tuple[Node, ...]) -> tuple[tuple[Node, Node, tuple[str, ...]], ...]:
    """Calls, the name in each and its conditions, as they are evaluated: arguments come first."""
    found: list[tuple[Node, Node, tuple[str, ...]]] = []
    for node in parts:
        if node.type == "lambda_expression":
            continue
        for child, guards in _operands(node):
            inner = _evaluated((child,))
            found += [(call, name, guards + others) for call, name, others in inner]
        called = node.type == "call_expression"
        named = cpp.name_node(_part(node, "function")) if called else None
        if named is not None:
            found.append((node, named, ()))
    return tuple(found)


def _operands(node: Node) -> Iterator[tuple[Node, tuple[str, ...]]]:
    """What is evaluated for a node, and under which conditions."""
    condition = node.child_by_field_name("condition")
    if node.type == "conditional_expression" and condition is not None:
        head = cpp.text_of(condition)
        yield condition, ()
        yield _part(node, "consequence"), (head,)
        yield _part(node, "alternative"), (f"!({head})",)
        return
    left, operator = node.child_by_field_name("left"), node.child_by_field_name("operator")
    short = {"&&": "{}", "||": "!({})"}.get(cpp.text_of(operator) if operator else "")
    for child in node.named_children:
        guarded = short is not None and left is not None and child != left
        yield child, (short.format(cpp.text_of(left)),) if guarded and short and left else ()


def _part(node: Node, name: str) -> Node:
    part = node.child_by_field_name(name)
    if part is None:
        raise SourceError(f"{cpp.text_of(node)!r} has no {name}")
    return part


@functools.cache
def _head(node: Node) -> str:
    """What stands between the parentheses of an if, a switch or a loop."""
    condition = node.child_by_field_name("condition")
    if condition is not None and node.type not in ("for_statement", "for_range_loop"):
        return cpp.text_of(condition)[1:-1].strip()
    text, (opening, closing) = (node.text or b"").decode(), _parentheses(node)
    return text[opening + 1 : closing].strip()


def _parentheses(node: Node) -> tuple[int, int]:
    """Where those of a for stand in its text."""
    places = [child.start_byte - node.start_byte for child in node.children if child.type in "()"]
    return places[0], places[-1]


@functools.cache
def _leaves(node: Node) -> bool:
    """Whether an if's last statement ends the function, the loop or its turn."""
    last: Node | None = _part(node, "consequence")
    while last is not None and last.type == "compound_statement":
        last = last.named_children[-1] if last.named_children else None
    return last is not None and last.type in LEAVES


@functools.cache
def _masked(node: Node, parts: tuple[Node, ...]) -> tuple[int, str]:
    """Where parts of a node begin, and their text without the bodies of lambdas."""
    if not parts:
        return 0, ""
    first, last = parts[0].start_byte, parts[-1].end_byte
    text = (node.text or b"").decode()[first - node.start_byte : last - node.start_byte]
    lambdas = [n for part in parts for n in cpp.inside(part) if n.type == "lambda_expression"]
    for body in (_part(one, "body") for one in lambdas):
        start, end = body.start_byte - first, body.end_byte - first
        text = text[:start] + " " * (end - start) + text[end:]
    return first, text


def _with_operands(instruction: str, operands: str) -> str:
    """An access; one of two words, `a, 1 & b, 2`, is two accesses."""
    access = instruction.removesuffix(".v2")
    parts = operands.split(" & ") if access != instruction else [operands]
    return "; ".join(f"{access} {part}".strip() for part in parts)


def _turns(value: Operands) -> Iterator[str]:
    """What is said of the first match, the second, ... One text is said of all of them."""
    return itertools.repeat(value) if isinstance(value, str) else iter(value)


def _key_of(call: Call, operands: Mapping[str, Operands]) -> str:
    keys = [key for key in operands if re.search(key, str(call))]
    if len(keys) != 1:
        raise SourceError(f"{len(keys)} operands for the access {call}")
    return keys[0]


@functools.cache
def _kernels() -> str:
    return kernel_texts.specialised_source(8, 0, small=True) + kernel_texts.head_source(0)


@functools.cache
def _definitions(text: str) -> dict[str, tuple[tuple[str, ...], str]]:
    """Name -> parameters and body, on one line, of every function; "name/3" -> those of a later one
    with another number of parameters.

    Of two that are alike the first: the GPU's (platform.h), and what both units share stands there
    twice.
    """
    text = cpp.plain(text)
    found: dict[str, tuple[tuple[str, ...], str]] = {}
    for name, parameters, start, end in cpp.functions(text):
        key = name
        if name in found and len(found[name][0]) != len(parameters):
            key = f"{name}/{len(parameters)}"
        found.setdefault(key, (parameters, " ".join(text[start:end].split())))
    return found


@functools.cache
def _tree(body: str) -> Node:
    """The compound statement of a function with this body."""
    [function] = cpp.parse(f"void read() {{ {' '.join(body.split())} }}").named_children[:1]
    return _part(function, "body")


@functools.cache
def _called(body: str) -> frozenset[str]:
    """Names of what is called in it; of objects with operator(), that of their class."""
    calls = [node for node in cpp.inside(_tree(body)) if node.type in CALLS]
    return frozenset(cpp.last_name(node.children[0]) for node in calls)


def _instruction(body: str) -> str | None:
    """What a primitive does, without state space and type; None for what is none."""
    for name, instruction in BARRIERS.items():
        if name in body:
            return instruction
    match = ASSEMBLY.search(body)
    if not match:
        return None
    access = ACCESS.match(match[1])
    if access:
        words = ".v2" if ".v2." in match[1] else ""
        return access[0] + (".add" if access[1] == "atom" else words)
    return match[1].split(";")[0] if match[1].startswith("griddepcontrol.wait") else None
