"""A tree that looks like vLLM's tests to the runner, and is small."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.upstream.groups import Group
from tests.upstream.run import Where

#: Does what vLLM does when our package is installed: it takes our entry point's platform.
CONFTEST = """
import importlib.metadata, sys, types

platforms = sys.modules["vllm.platforms"] = types.ModuleType("vllm.platforms")
platforms._current_platform = None
ours = "moe_nvlink_plugin.integration.vllm.plugin.platform"
if importlib.metadata.entry_points(group="vllm.platform_plugins", name="moe_nvlink"):
    platforms._current_platform = type("Platform", (), {"__module__": ours})()
"""


def toy_tree(folder: Path, files: Mapping[str, str]) -> Where:
    """`files` below `tests/`; logs go beside it."""
    tree = folder / "tree"
    for name, text in {"conftest.py": CONFTEST, "__init__.py": "", **files}.items():
        path = tree / "tests" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tree / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    return Where(tree, folder / "logs", folder / "redirects.json", folder / "hub")


def toy_group(passed: int, *arguments: str, **more: Any) -> Group:
    """A group of a few seconds."""
    more = {"test_timeout_s": 20, **more}
    return Group("toy", arguments or ("tests",), passed, **more)
