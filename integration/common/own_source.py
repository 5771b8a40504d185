"""Reads an adapter's own source: which names of its framework it imports, calls and overrides.

So a name that our code spells out stands in no list beside the code. What no reader sees stays in
the adapter's `compat`: methods and fields of objects, and what is patched.
"""

from __future__ import annotations

import ast
import functools
import logging
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from importlib.resources import files
from typing import Any, NamedTuple

from moe_nvlink_plugin.integration import overrides

from .names import Call, Signature, Touched

logger = logging.getLogger(__name__)

Function = ast.FunctionDef | ast.AsyncFunctionDef
#: Module of ours or of the framework, and a dotted name in it; "" for the module itself.
_Place = tuple[str, str]


class Base(NamedTuple):
    """A class of the framework that one of our classes stands before."""

    module: str
    name: str
    device: str = ""
    needed_for: str = ""


class Rules(NamedTuple):
    """What the reader cannot see in one adapter's source.

    Attributes:
        package: the adapter's package.
        framework: the framework's package.
        features: folder or module of ours, such as "lora" or "moe.cpu" -> what it is needed for, as
            in `Touched.needed_for`.
        devices: the same -> the only device that needs it. Without an entry, a module whose name
            begins with "cpu_" or "cuda_" is needed on that device.
        bases: class of ours -> bases that it gets at run time, or whose place it takes.
        by_hand: module of ours -> other names that it touches.
    """

    package: str
    framework: str
    by_hand: Mapping[str, Sequence[Touched]] = {}
    features: Mapping[str, str] = {}
    devices: Mapping[str, str] = {}
    bases: Mapping[str, Sequence[Base]] = {}


class Method(NamedTuple):
    """A method in a class of ours, and a class of the framework whose method it may override."""

    where: str
    base: Base
    name: str
    is_marked: bool


def modules_of(package: str) -> dict[str, str]:
    """Return the source of an adapter's modules by dotted name below it. Local.

    It reads a zip file too. Files that no import finds are no modules, such as an editor's lock
    `.#ops.py`. Without sources, it logs a warning.
    """
    found = dict(_below(files(package), ""))
    if not found:
        logger.warning(
            "%s is installed without its source, so the names in it were not looked for. If an "
            "ImportError follows, install a version of the framework that the README.md lists.",
            package,
        )
    return found


def _below(folder: Any, prefix: str) -> Iterator[tuple[str, str]]:
    for entry in sorted(folder.iterdir(), key=lambda entry: str(entry.name)):
        stem = entry.name.removesuffix(".py")
        if not stem.isidentifier():
            continue
        if entry.is_dir():
            yield from _below(entry, f"{prefix}{entry.name}.")
        elif entry.name.endswith(".py"):
            name = prefix + stem
            yield name.removesuffix("__init__").rstrip("."), entry.read_text(encoding="utf-8")


class Reader:
    """Reads an adapter's modules, each when it is first asked for.

    Args:
        rules: what no module says.
        modules: the modules, as `modules_of` returns them; None: those of the package.
    """

    def __init__(self, rules: Rules, modules: Mapping[str, str] | None = None) -> None:
        self._rules = rules
        self._texts = modules_of(rules.package) if modules is None else modules
        # Other modules have nothing to tell, and a worker that starts need not parse them.
        spells = re.compile(rf"^\s*(from|import) {rules.framework}\b|@overrides$", re.MULTILINE)
        self._telling = [name for name, text in self._texts.items() if spells.search(text)]
        self._module = functools.cache(self._read)

    def touched(
        self, device: str | None = None, features: Container[str] | None = None
    ) -> list[Touched]:
        """Return the names that the adapter's modules spell out. Local.

        Args:
            device: only what ranks on this device need; None: on any.
            features: only what is needed for one of these; None: for any.
        """
        found: list[Touched] = []
        for name in dict.fromkeys([*self._rules.by_hand, *self._telling]):
            needed_for, on = _of(self._rules.features, name), self._device(name)
            if features is not None and needed_for not in features:
                continue
            if device is not None and on not in ("", device):
                continue
            told = self._texts.get(name, "").partition("\n")[0].strip('"\\.')
            found += (
                one._replace(
                    device=one.device or on,
                    needed_for=one.needed_for or needed_for,
                    why=f"{name or '__init__'}: {one.why or told}",
                )
                for one in (*self._rules.by_hand.get(name, ()), *self._spelled(name))
            )
        return [
            one
            for one in dict.fromkeys(found)
            if (device is None or one.device in ("", device))
            and (features is None or one.needed_for in features)
        ]

    def _spelled(self, name: str) -> Iterator[Touched]:
        """Yield the names in the source of one module."""
        if name not in self._telling:
            return
        module = self._module(name)
        for base, attribute, ours, calls in (*module.used(), *self._overridden(module)):
            yield Touched(
                base.module,
                f"{base.name}.{attribute}".strip("."),
                "use" if ours is None else "subclass",
                None if ours is None else ours.names,
                base.device,
                needed_for=base.needed_for,
                signature=ours,
                calls=calls,
            )

    def methods(self) -> Iterator[Method]:
        """Yield every method of ours that could override one of the framework's. Local."""
        for module in map(self._module, self._telling):
            for cls in module.classes:
                for base in self._line_of(module, cls):
                    for method in _methods_of(cls):
                        yield Method(
                            f"{module.name}.{cls.name}", base, method.name, _is_marked(method)
                        )

    def _read(self, name: str) -> _Module:
        return _Module(name, self._texts[name], self._rules)

    def _device(self, name: str) -> str:
        stem = name.rpartition(".")[2]
        by_name = next((on for on in ("cpu", "cuda") if stem.startswith(f"{on}_")), "")
        return _of(self._rules.devices, name) or by_name

    def _behind(self, module: _Module, cls: ast.ClassDef) -> Iterator[tuple[_Module, ast.ClassDef]]:
        """Yield the classes of ours that one of ours extends directly."""
        for node in cls.bases:
            place, is_ours = module.resolve(node)
            if place is not None and is_ours and place[0] in self._texts:
                theirs = self._module(place[0])
                yield from ((theirs, other) for other in theirs.classes if other.name == place[1])

    def _line_of(self, module: _Module, cls: ast.ClassDef) -> list[Base]:
        """Return the framework's classes behind one of ours. Bases at run time go first."""
        if cls.name in self._rules.bases:
            return list(self._rules.bases[cls.name])
        places = [module.resolve(node) for node in cls.bases]
        found = [Base(*place) for place, is_ours in places if place is not None and not is_ours]
        for theirs, other in self._behind(module, cls):
            found += self._line_of(theirs, other)
        return found

    def _ours_behind(self, module: _Module, cls: ast.ClassDef) -> set[str]:
        """Return the methods that super() finds in a class of ours."""
        found = set()
        for theirs, other in self._behind(module, cls):
            found |= {method.name for method in _methods_of(other)}
            found |= self._ours_behind(theirs, other)
        return found

    def _overridden(self, module: _Module) -> Iterator[_Found]:
        for cls in module.classes:
            bases = self._line_of(module, cls)
            if not bases:
                continue
            marked = [method for method in _methods_of(cls) if _is_marked(method)]
            ours = self._ours_behind(module, cls)
            called = [one for one in _calls_of_super(cls).items() if one[0] not in ours]
            for base in bases:
                yield _Found(base)
                yield from (_Found(base, one.name, signature_of(one)) for one in marked)
                for name, calls in called:
                    if (name, calls) != ("__init__", (Call(0),)):  # perhaps that of `object`
                        yield _Found(base, name, None, calls)


class _Found(NamedTuple):
    """A name, before it is known when it is needed."""

    base: Base
    attribute: str = ""
    signature: Signature | None = None
    calls: tuple[Call, ...] = ()


class _Module:
    """One of our modules, parsed."""

    def __init__(self, name: str, text: str, rules: Rules) -> None:
        self.name = name
        tree = ast.parse(text)
        self._rules = rules
        nodes = _nodes(tree)
        self.classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
        self._own_classes = {cls.name for cls in self.classes}
        self._read_here = [node for node in nodes if isinstance(node, ast.Attribute | ast.Call)]
        #: Local name -> what it is of the framework, or of ours.
        self._theirs: dict[str, _Place] = {}
        self._ours: dict[str, _Place] = {}
        #: Modules of the framework that are imported by their whole name; the longest first.
        self._whole: list[str] = []
        self._imported: list[_Place] = []
        unread = _for_the_type_checker(tree)
        for node in nodes:
            if isinstance(node, ast.ImportFrom | ast.Import):
                for local, place in self._bound_by(node):
                    if place[0].split(".")[0] != rules.framework:
                        self._ours[local] = place
                        continue
                    if "." in local:
                        self._whole = sorted({*self._whole, local}, key=len, reverse=True)
                    else:
                        self._theirs[local] = place
                    if id(node) not in unread and place[1]:
                        self._imported.append(place)

    def _bound_by(self, node: ast.ImportFrom | ast.Import) -> Iterator[tuple[str, _Place]]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.asname or alias.name, (alias.name, "")
            return
        base = node.module or ""
        if node.level:
            # A package's own __init__ imports from itself, which no class of ours needs.
            parts = self.name.split(".")[: -node.level]
            base = ".".join([*parts, *([node.module] if node.module else [])])
        elif base == self._rules.package or base.startswith(f"{self._rules.package}."):
            base = base[len(self._rules.package) + 1 :]
        for alias in node.names:
            yield alias.asname or alias.name, (base, alias.name)

    def resolve(self, node: ast.expr) -> tuple[_Place | None, bool]:
        """Return what an expression names, and whether that is ours; None: neither, or a value."""
        dotted = _dotted(node)
        if dotted is None:
            return None, False
        root, _, rest = dotted.partition(".")
        if root in self._own_classes:
            return (self.name, dotted), True
        if root in self._theirs:
            module, found = self._theirs[root]
            return (module, f"{found}.{rest}".strip(".")), False
        if root in self._ours:
            module, found = self._ours[root]
            if rest and found:  # `from . import features`
                return (f"{module}.{found}".strip("."), rest), True
            return (module, found or rest), True
        for whole in self._whole:
            if dotted.startswith(f"{whole}."):
                return (whole, dotted[len(whole) + 1 :]), False
        return None, False

    def used(self) -> Iterator[_Found]:
        """Yield what the module imports of the framework, and what it reads and calls of that."""
        for module, name in self._imported:
            yield _Found(Base(module, name))
        seen: dict[_Place, list[Call]] = {}
        for node in self._read_here:
            called = node.func if isinstance(node, ast.Call) else node
            if isinstance(called, ast.Attribute) and not isinstance(called.ctx, ast.Load):
                continue
            place, is_ours = self.resolve(called)
            if place is None or is_ours or not place[1] or "__" in place[1]:
                continue
            calls = seen.setdefault(place, [])
            if isinstance(node, ast.Call) and (call := _call(node)) is not None:
                calls.append(call)
        for (module, name), calls in seen.items():
            # Beyond an attribute of what was imported, objects begin.
            if name.count(".") <= 1:
                yield _Found(Base(module, name), calls=tuple(dict.fromkeys(calls)))


def _of(table: Mapping[str, str], module: str) -> str:
    """Return the entry for a module, or for a folder that it is in."""
    for name, entry in table.items():
        if module == name or module.startswith(f"{name}."):
            return entry
    return ""


def _nodes(tree: ast.Module) -> list[ast.AST]:
    """Return what `ast.walk` yields, but for names and constants, in half the time."""
    found: list[ast.AST] = []
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Name | ast.Constant):
            continue
        found.append(node)
        for field in node._fields:
            value = getattr(node, field, None)
            if isinstance(value, list):
                waiting.extend(one for one in value if isinstance(one, ast.AST))
            elif isinstance(value, ast.AST):
                waiting.append(value)
    return found


def _dotted(node: ast.AST) -> str | None:
    """Return the text of a name behind names; None: the expression is another."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else None


def _for_the_type_checker(tree: ast.Module) -> set[int]:
    """Return the ids of the nodes that run in no process."""
    return {
        id(inner)
        for node in tree.body
        if isinstance(node, ast.If) and _dotted(node.test) == "TYPE_CHECKING"
        for statement in node.body
        for inner in ast.walk(statement)
    }


def _methods_of(cls: ast.ClassDef) -> Iterator[Function]:
    return (node for node in cls.body if isinstance(node, Function))


def _is_marked(method: Function) -> bool:
    return any(_dotted(node) == overrides.__name__ for node in method.decorator_list)


def signature_of(function: Function) -> Signature:
    """Return the parameters of a function. Local."""
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    with_default = positional[len(positional) - len(arguments.defaults) :]
    pairs = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    optional = {one.arg for one in (*with_default, *(one for one, value in pairs if value))}
    if positional and positional[0].arg in ("self", "cls"):
        del positional[0]
    return Signature(
        tuple(one.arg for one in (*positional, *arguments.kwonlyargs)),
        len(positional),
        frozenset(optional),
        (arguments.vararg is not None, arguments.kwarg is not None),
    )


def _call(node: ast.Call) -> Call | None:
    """Return the arguments of a call; None: only a running program knows them."""
    starred = any(isinstance(argument, ast.Starred) for argument in node.args)
    if starred or any(keyword.arg is None for keyword in node.keywords):
        return None
    return Call(len(node.args), tuple(str(keyword.arg) for keyword in node.keywords))


def _calls_of_super(cls: ast.ClassDef) -> dict[str, tuple[Call, ...]]:
    """Return the methods of the base that a class reaches through super(), each with its calls."""
    found: dict[str, list[Call]] = {}
    for node in ast.walk(cls):
        called = node.func if isinstance(node, ast.Call) else node
        if isinstance(called, ast.Attribute) and isinstance(called.value, ast.Call):
            of, name = _dotted(called.value.func), called.attr
            if of == "super" and (name == "__init__" or not name.startswith("__")):
                calls = found.setdefault(name, [])
                if isinstance(node, ast.Call) and (call := _call(node)) is not None:
                    calls.append(call)
    return {name: tuple(dict.fromkeys(calls)) for name, calls in found.items()}
