"""Reads a framework's source, of an installed copy or of a downloaded wheel, without importing it.

A name is looked for where the framework's own `import` would find it: in the module, through its
imports from other modules of the framework, under `if TYPE_CHECKING:`, `try:` and the like, and in
base classes.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from moe_nvlink_plugin.integration.common.names import Call, Fields, Signature, Touched, minor
from moe_nvlink_plugin.integration.common.own_source import Function, Reader, signature_of


def differences(compat: Any, source: Source) -> list[str]:
    """What a release does not have as an adapter's list says: names, fields, overridden methods."""
    found = [source.complaints(one) for one in compat.touched()]
    found += [name for fields in compat.FIELDS for name in source.missing_fields(fields)]
    found += [f"{one} has no mark" for one in unmarked(Reader(compat.RULES), source)]
    return [one for one in found if one]


def unmarked(reader: Reader, source: Source) -> set[str]:
    """Methods of ours that the framework has too, in each class that ours extends.

    Without a mark nobody would miss the framework's. A constructor may have other parameters.
    """
    found: dict[str, list[bool]] = {}
    for one in reader.methods():
        if not one.is_marked and not one.name.startswith("__"):
            has = source.has_attribute(one.base.module, one.base.name, one.name)
            found.setdefault(f"{one.where}.{one.name}", []).append(has)
    return {name for name, has in found.items() if all(has)}


class Found(NamedTuple):
    """A definition, and the module it stands in."""

    module: str
    node: ast.AST


class Source:
    """A package under a folder that would be on sys.path, and the version it states."""

    def __init__(self, folder: Path, version: str, package: str = "vllm") -> None:
        self.folder = folder
        self.version = version
        self.package = package
        self._parse = functools.cache(self._parse_uncached)

    # Modules and names.

    def path(self, module: str) -> Path | None:
        base = self.folder.joinpath(*module.split("."))
        for path in (base / "__init__.py", base.with_suffix(".py")):
            if path.is_file():
                return path
        return None

    def _parse_uncached(self, module: str) -> ast.Module | None:
        path = self.path(module)
        return None if path is None else ast.parse(path.read_text(encoding="utf-8"))

    def find(self, module: str, name: str) -> Found | None:
        """A dotted name in a module: a function, class, assignment, or a module itself."""
        first, _, rest = name.partition(".")
        found = self._in_module(module, first)
        if found is None or not rest:
            return found
        if isinstance(found.node, ast.Module):
            return self.find(found.module, rest)
        if isinstance(found.node, ast.Assign | ast.AnnAssign):
            made = self._class_of(found)
            return found if made is None else self._in_class(made, rest)
        return self._in_class(found, rest)

    def _class_of(self, found: Found) -> Found | None:
        """The class of an object of a module, as an annotation or a call says; None: no class."""
        node = found.node
        made = node.annotation if isinstance(node, ast.AnnAssign) else getattr(node, "value", None)
        if isinstance(made, ast.Call):
            made = made.func
        cls = None if made is None else self._resolve(found.module, ast.unparse(made))
        return cls if cls is not None and isinstance(cls.node, ast.ClassDef) else None

    def _in_module(self, module: str, name: str) -> Found | None:
        tree = self._parse(module)
        if tree is None:
            return None
        for node in _statements(tree.body):
            if isinstance(node, ast.ImportFrom):
                found = self._imported(module, node, name)
                if found is not None:
                    return found
            elif name in _names_bound_by(node):
                return Found(module, node)
        inner = self._parse(f"{module}.{name}")
        return None if inner is None else Found(f"{module}.{name}", inner)

    def _imported(self, module: str, node: ast.ImportFrom, name: str) -> Found | None:
        for alias in node.names:
            if alias.name == "*" or (alias.asname or alias.name) == name:
                origin = self._origin(module, node)
                wanted = name if alias.name == "*" else alias.name
                # A package that imports its own submodules by name: those are found as files.
                if origin != module and origin.split(".")[0] == self.package:
                    found = self.find(origin, wanted)
                    if found is not None:
                        return found
        return None

    def _origin(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        path = self.path(module)
        is_package = path is not None and path.name == "__init__.py"
        parts = module.split(".")
        kept = parts[: len(parts) - node.level + is_package]
        return ".".join([*kept, *([node.module] if node.module else [])])

    # Classes.

    def _in_class(self, owner: Found, name: str) -> Found | None:
        """A member of a class or of one of its bases inside the package."""
        for cls in self._line_of(owner):
            assert isinstance(cls.node, ast.ClassDef)
            for node in _statements(cls.node.body):
                if name in _names_bound_by(node):
                    return Found(cls.module, node)
        return None

    def _line_of(self, owner: Found) -> Iterator[Found]:
        if not isinstance(owner.node, ast.ClassDef):
            return
        yield owner
        for base in owner.node.bases:
            found = self._resolve(owner.module, ast.unparse(base).partition("[")[0])
            if found is not None:
                yield from self._line_of(found)

    def _resolve(self, module: str, dotted: str) -> Found | None:
        """A base class as it is written: `Name`, or `mk.Name` behind `import ... as mk`."""
        first, _, rest = dotted.partition(".")
        for node in ast.walk(self._parse(module) or ast.Module([], [])):
            if isinstance(node, ast.Import) and rest:
                for alias in node.names:
                    if alias.asname == first:
                        return self.find(alias.name, rest)
        return self.find(module, dotted)

    def has_attribute(self, module: str, owner: str, name: str) -> bool:
        """Whether a class defines an attribute: in its body, or on self in one of its methods."""
        cls = self.find(module, owner)
        if cls is None:
            return False
        if self._in_class(cls, name) is not None:
            return True
        return any(name in _set_on_self(line.node) for line in self._line_of(cls))

    # What we touch.

    def complaints(self, touched: Touched) -> str:
        """Why this version does not have the name as we touch it; empty where it does."""
        if touched.since and _number(self.version) < _number(touched.since):
            return ""
        where = f"{touched.module}.{touched.name}"
        found = self.find(touched.module, touched.name)
        if found is None:
            return f"{where} is gone"
        function = found
        if isinstance(found.node, ast.ClassDef) and touched.calls:
            function = self._in_class(found, "__init__") or found
        if not isinstance(function.node, Function):
            is_one = touched.parameters is not None
            return f"{where} is no function any more" if is_one else ""
        theirs = signature_of(function.node)
        for call in touched.calls:
            if not _binds(theirs, call):
                return f"{where} takes {list(theirs.names)}, we pass {_told(call)}"
        if touched.signature is not None:
            fits = _overrides(touched.signature, theirs)
        elif touched.parameters is None:
            return ""
        elif touched.kind in ("hook", "subclass"):
            fits = theirs.names == touched.parameters and not all(theirs.takes_more)
        else:
            others = set(theirs.names) - set(touched.parameters)
            known = all(theirs.takes_more) or set(touched.parameters) <= set(theirs.names)
            fits = known and others <= theirs.optional
        ours = list(touched.parameters or ())
        return "" if fits else f"{where} takes {list(theirs.names)}, we know {ours}"

    def missing_fields(self, fields: Fields) -> list[str]:
        """The attributes among `fields` that the class does not have."""
        if fields.since and _number(self.version) < _number(fields.since):
            return []
        return [
            f"{fields.module}.{fields.owner}.{name}"
            for name in fields.names
            if not self.has_attribute(fields.module, fields.owner, name)
        ]

    def registers_op(self, module: str, name: str) -> bool:
        """Whether the module registers a torch op of that name."""
        return any(
            isinstance(node, ast.keyword)
            and node.arg == "op_name"
            and isinstance(node.value, ast.Constant)
            and node.value.value == name
            for node in ast.walk(self._parse(module) or ast.Module([], []))
        )


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in minor(version).split("."))


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a module or class, those inside if, try and with included."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With):
            for field in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(node, field, []))
            for handler in getattr(node, "handlers", []):
                yield from _statements(handler.body)


def _names_bound_by(node: ast.AST) -> set[str]:
    if isinstance(node, Function | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Import):
        return {alias.asname or alias.name.split(".")[0] for alias in node.names}
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign):
        targets = [node.target]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def _set_on_self(cls: ast.AST) -> set[str]:
    """Attributes that methods of a class assign to self."""
    return {
        node.attr
        for node in ast.walk(cls)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


def _binds(theirs: Signature, call: Call) -> bool:
    """Whether a function takes the arguments of a call."""
    by_position = theirs.names[: theirs.positional]
    takes_args, takes_kwargs = theirs.takes_more
    given = {*by_position[: call.positional], *call.keywords}
    fits = takes_args or call.positional <= theirs.positional
    known = takes_kwargs or set(call.keywords) <= set(theirs.names)
    return fits and known and set(theirs.names) - given <= theirs.optional


def _told(call: Call) -> str:
    return f"{call.positional} by position, {list(call.keywords)} by name"


def _overrides(ours: Signature, theirs: Signature) -> bool:
    """Whether a method of ours takes what the framework passes to its own."""
    common = tuple(name for name in ours.names if name in theirs.names)
    more = set(ours.names) - set(theirs.names) <= ours.optional
    if any(ours.takes_more):
        return more and common == theirs.names[: len(common)]
    return more and common == theirs.names and not all(theirs.takes_more)
