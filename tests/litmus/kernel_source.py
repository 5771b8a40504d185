"""From the kernels' text to the litmus program of one thread.

The order of a thread's ordered accesses, their operation, order and scope are taken from the text
that NVRTC compiles, so that a change there changes the litmus program and with it the verdict:

    thread = Kernels().thread("arrive", {"fetch_add_acq_rel_gpu": "mine=0, arrivals, 1"})
    # "bar.sync; atom.acq_rel.gpu.add mine=0, arrivals, 1; bar.sync"

Functions that call primitives (one PTX instruction or barrier each) are expanded in place. A test
adds what the text does not say: the operands of each access, which branches this thread takes, and
which calls are the plain accesses whose order is in question. An access the test has no operands
for is an error, so a new one in the kernels can not stay unnoticed here.

This reads just enough C++ for that: calls, blocks, if, else, for, while and early returns. A loop's
body is taken once, unless a test asks for more turns; so is that of a lambda, where it stands.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from tests.support import kernel_texts

COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
#: A macro that tells the compiler how to unroll the loop behind it.
LOOP_MACRO = re.compile(r"\b[A-Z_]+(?=\s+(?:for|while)\b)")
DEFINITION = re.compile(r"\bHD\s+[\w:<>,*&\s]+?\b(\w+)\s*\(")
ASSEMBLY = re.compile(r'asm\s+volatile\s*\(\s*"([^"]+)"')
CONTROL = re.compile(r"(if|for|while|switch)\b(?:\s*constexpr\b)?\s*\(")
CONTROL_WITHIN = re.compile(r"\b(if|for|while|switch|do|case)\b")
#: A function handed to another one, which calls it: its body is taken where it stands.
LAMBDA = re.compile(r"\[&\]\s*(?:\([^()]*\)\s*)?\{")
CALL = re.compile(r"\b(\w+)\s*(?:<[\w:,\s]*>)?\s*\(")
#: Ordered accesses. Of other instructions (mov, cvt) there is nothing to say.
ACCESS = re.compile(r"(ld|st|atom)\.(weak|relaxed|acquire|release|acq_rel)\.(cta|gpu|sys)\b")
BARRIERS = {"__syncthreads": "bar.sync", "__syncwarp": "bar.warp.sync"}


class SourceError(ValueError):
    """The kernels' text is not what the litmus programs were written for."""


@dataclass(frozen=True)
class Call:
    """A primitive or a plain access where it stands: in which function, under which conditions."""

    function: str
    name: str
    text: str
    guards: tuple[str, ...]

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
    """The text of all kernels as a GPU gets it, with these edits made first."""

    def __init__(self, *edits: Edit) -> None:
        # What both units share stands there twice, and counts once.
        text = kernel_texts.specialised_source(8, 0) + kernel_texts.head_source(0)
        self.bodies = _definitions(LOOP_MACRO.sub("", COMMENT.sub("", text)))
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
        found: set[str] = set()
        grown = True
        while grown:
            grown = False
            for name, body in self.bodies.items():
                calls = {match[1] for match in CALL.finditer(body)}
                if name not in found | set(self.primitives) and calls & (
                    found | set(self.primitives)
                ):
                    found.add(name)
                    grown = True
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
        for call in self.calls(function, tuple(plain), turns or {}):
            if any(re.search(pattern, guard) for pattern in untaken for guard in call.guards):
                continue
            instruction = "" if call.name in plain else self.primitives[call.name]
            if instruction and not ACCESS.match(instruction):
                lines.append(instruction)
                continue
            key = call.name if call.name in plain else _key_of(call, operands)
            unused.discard(key)
            rest = next(said[key])
            if rest:
                lines.append(f"{instruction} {rest}".strip())
        if unused:
            raise SourceError(f"{function} has nothing like {sorted(unused)} on this path")
        return "; ".join(lines)

    def calls(
        self, function: str, plain: tuple[str, ...], turns: Mapping[str, int]
    ) -> Iterator[Call]:
        """Primitives and plain accesses in the order of the text, with what is called expanded."""
        if function not in self.bodies:
            raise SourceError(f"no function {function} in the kernels")
        for text, guards in _statements(self.bodies[function], (), turns):
            for call in self._calls_in(function, text, plain):
                if call.name in self.expanded and call.name not in plain:
                    for inner in self.calls(call.name, plain, turns):
                        yield replace(inner, guards=guards + inner.guards)
                else:
                    yield replace(call, guards=guards)

    def _calls_in(self, function: str, text: str, plain: tuple[str, ...]) -> Iterator[Call]:
        found = []
        for match in CALL.finditer(text):
            if match[1] in self.primitives or match[1] in self.expanded:
                end = _matching(text, match.end() - 1)
                found.append(
                    (match.start(), Call(function, match[1], text[match.start() : end], ()))
                )
        for pattern in plain:
            matches = re.finditer(pattern, text)
            found += [(match.start(), Call(function, pattern, match[0], ())) for match in matches]
        if found and CONTROL_WITHIN.search(text):
            raise SourceError(f"can not tell what {text!r} in {function} depends on")
        taken = {place for place, call in found if call.name in plain}
        for place, call in sorted(found, key=lambda item: item[0]):
            if call.name in plain or place not in taken:
                yield call


def _turns(value: Operands) -> Iterator[str]:
    """What is said of the first match, the second, ... One text is said of all of them."""
    return itertools.repeat(value) if isinstance(value, str) else iter(value)


def _key_of(call: Call, operands: Mapping[str, Operands]) -> str:
    keys = [key for key in operands if re.search(key, str(call))]
    if len(keys) != 1:
        raise SourceError(f"{len(keys)} operands for the access {call}")
    return keys[0]


def _definitions(text: str) -> dict[str, str]:
    """Name -> body of every HD function; of two the first, which is the GPU's (platform.h)."""
    bodies: dict[str, str] = {}
    for match in DEFINITION.finditer(text):
        after = _matching(text, match.end() - 1)
        start = re.compile(r"\s*(?:const\s*)?\{").match(text, after)
        if start:
            bodies.setdefault(match[1], text[start.end() : _matching(text, start.end() - 1) - 1])
    return bodies


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
        return access[0] + (".add" if access[1] == "atom" else "")
    return match[1].split(";")[0] if match[1].startswith("griddepcontrol.wait") else None


def _matching(text: str, opening: int) -> int:
    """Where what the bracket at `opening` opens has been closed."""
    depth = 0
    for place in range(opening, len(text)):
        depth += (text[place] in "([{") - (text[place] in ")]}")
        if depth == 0:
            return place + 1
    raise SourceError(f"a bracket is never closed: {text[opening : opening + 40]!r}")


def _statements(
    text: str, guards: tuple[str, ...], turns: Mapping[str, int]
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """(text, conditions it stands under) of every simple statement and every condition."""
    place = 0
    while (place := _skip_space(text, place)) < len(text):
        control = CONTROL.match(text, place)
        if not control:
            end, inner = _simple(text, place)
            if inner is None:
                yield text[place:end], guards
            else:
                yield from _statements(inner, guards, turns)
            place = end
            continue
        header_end = _matching(text, control.end() - 1)
        condition = " ".join(text[control.end() : header_end - 1].split())
        body, place = _body(text, header_end)
        times = [n for loop, n in turns.items() if re.search(loop, condition)]
        for _ in range(times[0] if times else 1):
            yield condition, guards
            yield from _statements(body, guards + (condition,), turns)
        otherwise = re.compile(r"\s*else\b").match(text, place)
        if otherwise:
            body_of_else, place = _body(text, otherwise.end())
            yield from _statements(body_of_else, guards + (f"!({condition})",), turns)
        elif control[1] == "if" and re.search(r"\breturn\b[^;]*;\s*$", body):
            guards = guards + (f"!({condition})",)


def _skip_space(text: str, place: int) -> int:
    while place < len(text) and (text[place].isspace() or text[place] == ";"):
        place += 1
    return place


def _simple(text: str, place: int) -> tuple[int, str | None]:
    """End of the statement at `place`, and what is inside if it is a block or has a lambda."""
    if text[place] == "{":
        end = _matching(text, place)
        return end, text[place + 1 : end - 1]
    end = place
    while end < len(text) and text[end] != ";":
        end = _matching(text, end) if text[end] in "([{" else end + 1
    lambda_ = LAMBDA.search(text, place, end)
    if lambda_:
        return end, text[lambda_.end() : _matching(text, lambda_.end() - 1) - 1]
    return min(end + 1, len(text)), None


def _body(text: str, place: int) -> tuple[str, int]:
    """The statement behind a condition or an else, and where it ends."""
    place = _skip_space(text, place)
    control = CONTROL.match(text, place)
    if control:
        _, end = _body(text, _matching(text, control.end() - 1))
        otherwise = re.compile(r"\s*else\b").match(text, end)
        if otherwise:
            _, end = _body(text, otherwise.end())
        return text[place:end], end
    end, inner = _simple(text, place)
    return (text[place:end] if inner is None else inner), end
