"""Which room may import which, read off the source.

ARROWS is the picture that a reader of the package needs. A new arrow is a decision, made there.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "moe_nvlink_plugin"
COMMON = "integration.common"
FLASHINFER, SGLANG, VLLM = "integration.flashinfer", "integration.sglang", "integration.vllm"

#: Room -> rooms it may import; every module belongs to one of them. The package's own __init__ is
#: none: it is the tour, and fetches public names when they are first used. The modules right under
#: VLLM are its lowest room; its own __init__, with the entry points, belongs to the highest.
ARROWS: dict[str, set[str]] = {
    "doorway": set(),
    "recipes": {"doorway"},
    "transport": {"doorway"},
    "jit": {"doorway"},
    "memory": {"doorway", "transport", "jit"},
    "plugins": {"doorway", "recipes", "transport"},
    "launch": {"doorway", "jit", "memory"},
    "exchange": {"doorway", "recipes", "jit", "memory", "plugins", "launch"},
    "lm_head": {"doorway", "memory", "plugins", "launch"},
    "verify": {"doorway", "public", "recipes", "plugins", "exchange"},
    "tools": {"doorway", "transport", "jit", "plugins", "launch", "exchange", "lm_head", "verify"},
    "integration.frameworks": {"doorway"},
    COMMON: {"doorway", "public"},
    FLASHINFER: {"doorway", "public", COMMON},
    SGLANG: {"doorway", "public", COMMON},
    VLLM: {"doorway", "public", COMMON},
    f"{VLLM}.moe": {"doorway", "public", COMMON, VLLM},
    f"{VLLM}.balancing": {"doorway", "public", COMMON, VLLM, f"{VLLM}.moe"},
    f"{VLLM}.lora": {"doorway", "public", VLLM, f"{VLLM}.moe"},
    f"{VLLM}.draft": {"doorway", "public", COMMON, VLLM},
    f"{VLLM}.elastic": {"doorway", "public", VLLM, f"{VLLM}.moe"},
    f"{VLLM}.faults": {"doorway", "public", COMMON, VLLM, f"{VLLM}.balancing"},
    f"{VLLM}.scheduler": {"doorway", "public", COMMON, VLLM},
    f"{VLLM}.plugin": {
        *("doorway", "public", COMMON, VLLM),
        *(
            f"{VLLM}.{room}"
            for room in ("moe", "balancing", "lora", "draft", "elastic", "faults", "scheduler")
        ),
    },
}
#: Modules right under the package that are no part of the doorway.
ELSEWHERE = {"__main__": "tools"}
#: Modules right under VLLM; its folders are rooms.
VLLM_LOWEST = {"all2all_manager", "backend", "choices", "compat", "logs", "metrics"}
#: The doorway's modules, and what an adapter, like any other user, may import of other rooms.
DOORWAY = {
    *("errors", "env", "frameworks", "choices", "config", "groups", "driver", "reference"),
    *("testing", "version"),
}
PUBLIC = {PACKAGE, f"{PACKAGE}.integration", f"{PACKAGE}.lm_head.cost"}


class Import(NamedTuple):
    """One module imports another one of ours.

    Attributes:
        target: a module, or PACKAGE for the public names.
    """

    module: str
    target: str
    line: int


class Tree(NamedTuple):
    """Modules below one folder, by dotted name."""

    files: Mapping[str, Path]

    @classmethod
    def below(cls, root: Path, package: str = PACKAGE) -> Tree:
        """The package, and integration/ beside it, which is installed inside of it."""
        files = {}
        for folder in (root / package, root / "integration"):
            for path in sorted(folder.rglob("*.py")):
                parts = list(path.relative_to(root).with_suffix("").parts)
                parts = parts if parts[0] == package else [package, *parts]
                # A checkout has links to integration/ and kernels/ inside of the package.
                if (root / package / parts[1]).is_symlink() and path.is_relative_to(root / package):
                    continue
                files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
        return cls(files)

    def module_of(self, name: str) -> str | None:
        """The module that a dotted name is, or is defined in; None: none of ours."""
        parts = name.split(".")
        for end in range(len(parts), 0, -1):
            if ".".join(parts[:end]) in self.files:
                return ".".join(parts[:end])
        return None

    def imports(self) -> Iterator[Import]:
        """Every import of ours: lazy ones too, and those for the type checker alone."""
        for module, path in self.files.items():
            if module == PACKAGE:
                continue
            for line, name in names_imported(path, module):
                target = self.module_of(name)
                if target is not None and target != module:
                    yield Import(module, target, line)


def names_imported(path: Path, module: str) -> Iterator[tuple[int, str]]:
    """Line and absolute dotted name of everything that a file imports from anywhere."""
    parts = module.split(".")
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            up = node.level - (path.name == "__init__.py")
            base = parts[: len(parts) - up] if node.level else []
            base += node.module.split(".") if node.module else []
            for alias in node.names:
                yield node.lineno, ".".join([*base, alias.name])


def room_of(module: str) -> str:
    """The room of a module; "public" for the package itself."""
    parts = module.split(".")[1:]
    if not parts:
        return "public"
    if parts[:2] == VLLM.split("."):
        if len(parts) == 2:
            return f"{VLLM}.plugin"
        return VLLM if parts[2] in VLLM_LOWEST else ".".join(parts[:3])
    if parts[0] == "integration":
        return ".".join(parts[:2])
    if len(parts) == 1 and parts[0] in DOORWAY:
        return "doorway"
    return ELSEWHERE.get(parts[0], parts[0])


def arrow_of(one: Import) -> tuple[str, str]:
    """The rooms of both ends. Of other rooms an adapter sees what is public."""
    source, target = room_of(one.module), room_of(one.target)
    if source.startswith("integration") and one.target in PUBLIC:
        target = "public"
    return source, target


def new_arrows(imports: Iterable[Import], arrows: Mapping[str, set[str]]) -> list[str]:
    """Imports from room to room that the table does not have."""
    found = []
    for one in imports:
        source, target = arrow_of(one)
        if source != target and target not in arrows.get(source, ()):
            found.append(f"{one.module}:{one.line}: {source} -> {target} ({one.target})")
    return found


def unused_arrows(imports: Iterable[Import], arrows: Mapping[str, set[str]]) -> set[str]:
    """Permissions of the table without an import."""
    used = {arrow_of(one) for one in imports}
    allowed = {(source, target) for source, targets in arrows.items() for target in targets}
    return {f"{source} -> {target}" for source, target in allowed - used}


def needed(room: str, other: str, imports: Iterable[Import]) -> set[str]:
    """Modules of another room that a room and those below it need, directly or through others."""
    edges = [(one.module, one.target) for one in imports]
    found = {target for module, target in edges if f"{module}.".startswith(f"{PACKAGE}.{room}.")}
    while more := {target for module, target in edges if module in found} - found:
        found |= more
    return {name for name in found if name.startswith(f"{PACKAGE}.{other}.")}


OURS = Tree.below(ROOT)
#: The demo uses all of the product and is not part of it.
IMPORTS = [one for one in OURS.imports() if not room_of(one.module).endswith(".demo")]


def test_every_module_is_in_a_room() -> None:
    rooms = {room_of(module) for module in OURS.files} - {"public", "kernels"}
    assert rooms - {"integration", "integration.demo"} == ARROWS.keys(), "new rooms need a row"


def test_no_new_arrow() -> None:
    assert not (found := new_arrows(IMPORTS, ARROWS)), "\n".join(found)


def test_no_arrow_that_nobody_uses() -> None:
    assert not (found := unused_arrows(IMPORTS, ARROWS)), f"take away {found}"


def test_common_holds_what_two_adapters_use() -> None:
    """Directly, or through another module there."""
    used: list[str] = []
    for adapter in (FLASHINFER, SGLANG, VLLM):
        used += needed(adapter, COMMON, IMPORTS)
    here = {name for name in OURS.files if name.startswith(f"{PACKAGE}.{COMMON}.")}
    assert {name for name in here if used.count(name) < 2} == set()


def test_no_circle_of_rooms() -> None:
    TopologicalSorter(ARROWS).prepare()  # raises CycleError, which names a circle


def test_no_circle_of_modules() -> None:
    """Inside a room neither; imports for the type checker and lazy ones count."""
    below: dict[str, set[str]] = {}
    for one in IMPORTS:
        below.setdefault(one.module, set()).add(one.target)
    TopologicalSorter(below).prepare()


# The reader of imports, on a package of its own.

EXAMPLE = {
    "__init__.py": "from .jit import cache\n",
    "env.py": "",
    "config.py": "from . import env\n",
    "jit/__init__.py": "",
    "jit/cache.py": f"import {PACKAGE}.env, os\nfrom ..config import a_name\n",
    "jit/host.py": (
        "from typing import TYPE_CHECKING\n"
        "from . import cache\n"
        "if TYPE_CHECKING:\n    from .nvrtc import A\n"
        f"def late():\n    from {PACKAGE} import config, PublicName\n"
    ),
    "jit/nvrtc.py": f"from {PACKAGE}.jit.host import b\n",
    "memory/__init__.py": "from .layout import C\n",
    "memory/layout.py": f"from {PACKAGE} import memory, jit\n",
}


def test_the_reader_sees_every_spelling(tmp_path: Path) -> None:
    for name, text in EXAMPLE.items():
        path = tmp_path / PACKAGE / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    short, found = len(PACKAGE) + 1, Tree.below(tmp_path).imports()
    assert sorted((one.module[short:], one.target[short:]) for one in found) == [
        ("config", "env"),
        ("jit.cache", "config"),
        ("jit.cache", "env"),
        ("jit.host", ""),  # a public name
        ("jit.host", "config"),
        ("jit.host", "jit.cache"),
        ("jit.host", "jit.nvrtc"),
        ("jit.nvrtc", "jit.host"),
        ("memory", "memory.layout"),
        ("memory.layout", "jit"),
        ("memory.layout", "memory"),
    ]


def test_new_and_unused_arrows_are_found() -> None:
    to_memory = Import(f"{PACKAGE}.jit.host", f"{PACKAGE}.memory.layout", 7)
    to_cost = Import(f"{PACKAGE}.{VLLM}.plugin.flag", f"{PACKAGE}.lm_head.cost", 8)
    to_group = Import(f"{PACKAGE}.{VLLM}.plugin.flag", f"{PACKAGE}.lm_head.group", 9)
    to_sibling = Import(f"{PACKAGE}.{VLLM}.lora.loading", f"{PACKAGE}.{VLLM}.draft", 10)
    arrows = {"jit": {"doorway"}, f"{VLLM}.plugin": {"public"}}
    assert new_arrows([to_memory, to_cost, to_group, to_sibling], arrows) == [
        f"{to_memory.module}:7: jit -> memory ({to_memory.target})",
        f"{to_group.module}:9: {VLLM}.plugin -> lm_head ({to_group.target})",
        f"{to_sibling.module}:10: {VLLM}.lora -> {VLLM}.draft ({to_sibling.target})",
    ]
    assert unused_arrows([to_memory, to_cost], arrows) == {"jit -> doorway"}
