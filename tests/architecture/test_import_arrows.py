"""Who may import whom inside the package, read off the source.

The table is the picture that a reader of the package needs; a new arrow is a decision, made here.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "moe_nvlink_plugin"

# A unit is a module or a subpackage right under the package. `None`: may import anything of ours.
ALLOWED: dict[str, set[str] | None] = {
    "errors": set(),
    "env": {"errors"},
    "config": {"errors", "env"},
    "driver": {"errors"},
    "groups": {"errors"},
    "recipes": {"errors", "env", "config"},
    "combine_formats": {"errors", "config", "recipes"},
    "layout": {"errors", "env", "config", "recipes", "combine_formats", "transport", "head_config"},
    "transport": {"errors", "env", "groups", "driver"},
    "kernels": set(),
    "jit": {"errors", "env", "config", "recipes", "layout", "kernels"},
    "head_cost": {"errors", "config", "driver", "head_config"},
    "faults": {"errors", "jit"},
    "startup": set(),
    "head_config": {"errors", "config"},
    "head_exchange": {"errors", "arguments", "checks", "faults", "head_config", "startup"}
    | {"workspace"},
    "head_ops": {"head_exchange"},
    "lm_head": {"errors", "executors", "groups", "head_config", "head_exchange", "head_ops"}
    | {"layout", "plugins", "workspace"},
    "workspace": {"errors", "env", "config", "recipes", "layout", "transport", "groups"}
    | {"executors", "startup"},
    "checks": {"errors", "config", "recipes"},
    "arguments": {"errors", "config", "recipes", "layout", "jit", "head_config"},
    # How a kernel is launched: on CPU threads, or by the CUDA driver.
    "executors": {"errors", "env", "config", "jit", "driver", "arguments", "head_config"},
    "channel": {"errors", "arguments", "faults", "startup"},
    "exchange": {"errors", "env", "config", "recipes", "layout", "workspace", "checks", "channel"}
    | {"arguments"},
    "inductor": set(),
    "ops": {"errors", "exchange", "inductor"},
    "hookspecs": {"errors", "config", "recipes", "transport"},
    "builtin_plugins": {"errors", "config", "recipes", "transport", "hookspecs"},
    "plugins": {"errors", "config", "recipes", "transport", "hookspecs", "builtin_plugins"},
    "all_to_all": {"errors", "env", "config", "groups", "recipes", "layout", "transport", "jit"}
    | {"workspace", "executors", "exchange", "ops", "hookspecs", "plugins"},
    "reference": {"errors", "config", "recipes"},
    "testing": {"errors", "config", "recipes"},
    "precompile": {"errors", "env", "driver", "jit"},
    "doctor": None,
    "cli": {"errors", "precompile", "doctor", "jit"},
    "__main__": {"cli"},
}
#: Arrows that exist for the type checker alone, under `if TYPE_CHECKING:`.
ALLOWED_FOR_TYPES = {
    ("checks", "exchange"),
    ("channel", "exchange"),
    ("checks", "head_exchange"),
    ("faults", "startup"),
    ("faults", "workspace"),
}
#: Public names: what an adapter, like any other user, may import. `""` is the package itself.
PUBLIC = {"", "errors", "env", "config", "head_cost"}


def python_files(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def our_imports(path: Path, module: str) -> Iterator[tuple[int, str]]:
    """Every import of ours in a file, lazy ones too: line and absolute dotted name."""
    is_package = path.name == "__init__.py"
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == PACKAGE:
                    yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(node, module, is_package)
            if base.split(".")[0] == PACKAGE:
                for alias in node.names:
                    yield node.lineno, f"{base}.{alias.name}"


def lines_for_types(path: Path) -> set[int]:
    """The lines of a file that only a type checker runs."""
    return {
        line
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for statement in node.body
        for line in range(statement.lineno, (statement.end_lineno or 0) + 1)
    }


def _absolute(node: ast.ImportFrom, module: str, is_package: bool) -> str:
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    up = node.level - 1 if is_package else node.level
    return ".".join(parts[: len(parts) - up] + ([node.module] if node.module else []))


def unit_of(name: str) -> str:
    """The unit a dotted name belongs to: the second part if it names a file of ours, else ""."""
    parts = name.split(".")
    if len(parts) < 2:
        return ""
    unit = parts[1]
    if unit in {"kernels", "integration"}:
        return unit
    is_ours = (ROOT / PACKAGE / unit).is_dir() or (ROOT / PACKAGE / f"{unit}.py").exists()
    return unit if is_ours else ""


def module_name(path: Path) -> str:
    relative = path.relative_to(ROOT)
    parts = list(relative.with_suffix("").parts)
    if parts[-1] == "__init__":
        parts.pop()
    return ".".join(parts if parts[0] == PACKAGE else [PACKAGE, *parts])


def package_files() -> list[Path]:
    return [path for path in python_files(PACKAGE) if path != ROOT / PACKAGE / "__init__.py"]


def test_every_unit_is_in_the_table() -> None:
    units = {unit_of(module_name(path)) for path in package_files()}
    assert units <= ALLOWED.keys(), "new modules need a row in ALLOWED"


@pytest.mark.parametrize("path", package_files(), ids=lambda path: module_name(path))
def test_import_arrows_of_the_package(path: Path) -> None:
    unit = unit_of(module_name(path))
    allowed = ALLOWED[unit]
    for line, name in our_imports(path, module_name(path)):
        target = unit_of(name)
        assert target != "integration", f"{path}:{line}: the package imports no adapter ({name})"
        assert target != "testing" or unit == "testing", f"{path}:{line}: imports {name}"
        arrow = target == unit or allowed is None or target in allowed
        if not arrow and (unit, target) in ALLOWED_FOR_TYPES:
            arrow = line in lines_for_types(path)
        assert arrow, f"{path}:{line}: {unit} -> {target or PACKAGE} is a new arrow ({name})"


@pytest.mark.parametrize("path", python_files("integration"), ids=lambda path: module_name(path))
def test_adapters_use_public_names_only(path: Path) -> None:
    for line, name in our_imports(path, module_name(path)):
        target = unit_of(name)
        assert target in PUBLIC | {"integration"}, f"{path}:{line}: {name} is not public"


def test_the_reader_of_imports_sees_every_spelling(tmp_path: Path) -> None:
    path = tmp_path / "example.py"
    path.write_text(
        f"import {PACKAGE}.jit, os\n"
        "from . import env\n"
        "from .transport import host\n"
        f"def late():\n    from {PACKAGE} import config\n"
        f"from {PACKAGE} import AllToAllConfig\n"
    )
    names = [name for _line, name in our_imports(path, f"{PACKAGE}.example")]
    assert sorted(unit_of(name) for name in names) == ["", "config", "env", "jit", "transport"]
    # One level deeper a single dot means the subpackage.
    path.write_text("from . import cache\nfrom .. import env\nfrom ..errors import CompileError\n")
    names = [name for _line, name in our_imports(path, f"{PACKAGE}.jit.host")]
    assert [unit_of(name) for name in names] == ["jit", "env", "errors"]
