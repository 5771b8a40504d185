"""Rules for every file: free imports, one reader of the environment, no path of one machine."""

from __future__ import annotations

import ast
import io
import json
import re
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

#: Who may touch the environment, and why.
READERS = {
    "moe_nvlink_plugin/env.py": "the one place where our variables are read",
    "integration/demo/server.py": "hands its own environment on to the server it starts",
    "integration/demo/sglang_env/site/": "prepares the interpreter of an environment as it starts",
    "integration/demo/vllm33_env/site/": "prepares the interpreter of an environment as it starts",
    "integration/demo/sglang_server.py": "is told which interpreter has SGLang",
}
MACHINE_PATH = re.compile(r"/(work|tmp|home|root|Users|opt)/[A-Za-z0-9_.-]+")
#: Paths of the operating system that mean the same everywhere.
EVERYWHERE = re.compile(r"/opt/(cuda|nvidia)\b")
#: Measured files are kept as the machine that was lent wrote them.
RECORDED = (".json", ".txt")


def product_files() -> list[Path]:
    folders = ("moe_nvlink_plugin", "integration", "kernels")
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def touches_environment(tree: ast.AST) -> list[int]:
    """Lines that read or change the environment, however the name was imported."""
    names = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    return [
        node.lineno
        for node in ast.walk(tree)
        if (isinstance(node, ast.Attribute) and node.attr in names)
        or (isinstance(node, ast.ImportFrom) and {alias.name for alias in node.names} & names)
    ]


@pytest.mark.parametrize("path", product_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_environment_is_read_in_one_place(path: Path) -> None:
    if not path.relative_to(ROOT).as_posix().startswith(tuple(READERS)):
        lines = touches_environment(ast.parse(path.read_text(encoding="utf-8")))
        assert not lines, f"{path}:{lines[0]}: read variables in moe_nvlink_plugin/env.py"


def test_readers_of_the_environment_are_no_leftovers() -> None:
    for name in READERS:
        files = [path for path in product_files() if path.is_relative_to(ROOT / name)]
        trees = [ast.parse(path.read_text(encoding="utf-8")) for path in files]
        assert any(touches_environment(tree) for tree in trees), name


#: Frameworks that adapters serve, and who outside of integration/ may name them, and why.
FRAMEWORKS = re.compile("vllm|sglang|flashinfer", re.IGNORECASE)
NAMING = {
    "moe_nvlink_plugin/__init__.py": "the tour names the folders of the adapters",
    "moe_nvlink_plugin/recipes/": "docstrings say whose arithmetic a recipe has",
}


def naming_a_framework(text: str, *, in_documentation: bool) -> list[int]:
    """Lines that name a framework; in_documentation: comments and docstrings count too."""
    lines = {n for n, line in enumerate(text.splitlines(), 1) if FRAMEWORKS.search(line)}
    if in_documentation:
        return sorted(lines)
    tree = ast.parse(text)
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for node in ast.walk(tree):
        if isinstance(node, documented) and ast.get_docstring(node) is not None:
            docstring = node.body[0]
            assert docstring.end_lineno is not None
            lines -= set(range(docstring.lineno, docstring.end_lineno + 1))
    comments = tokenize.generate_tokens(io.StringIO(text).readline)
    return sorted(lines - {one.start[0] for one in comments if one.type == tokenize.COMMENT})


def core_files() -> list[Path]:
    """The package without its links to kernels/ and integration/."""
    parts = sorted((ROOT / "moe_nvlink_plugin").iterdir())
    folders = [path for path in parts if path.is_dir() and not path.is_symlink()]
    below = [path for folder in folders for path in folder.rglob("*.py")]
    return sorted([*below, *(path for path in parts if path.suffix == ".py")])


@pytest.mark.parametrize("path", core_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_the_core_names_no_framework(path: Path) -> None:
    may_document = path.relative_to(ROOT).as_posix().startswith(tuple(NAMING))
    lines = naming_a_framework(path.read_text("utf-8"), in_documentation=not may_document)
    assert not lines, f"{path}:{lines[0]}: an adapter says it, by moe_nvlink_plugin/frameworks.py"


def test_whoever_may_name_a_framework_does() -> None:
    for name in NAMING:
        texts = [
            path.read_text("utf-8") for path in core_files() if path.is_relative_to(ROOT / name)
        ]
        assert any(naming_a_framework(text, in_documentation=True) for text in texts), name


def test_names_of_frameworks_are_found() -> None:
    text = '"""As vLLM does."""\nflag = "use SGLang"  # or vLLM\n# FlashInfer\ndef vllm(): ...\n'
    assert naming_a_framework(text, in_documentation=True) == [1, 2, 3, 4]
    assert naming_a_framework(text.replace("  # or vLLM", ""), in_documentation=False) == [2, 4]


def imported_by(statement: str) -> set[str]:
    code = f"import json, sys; {statement}; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=600
    )
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_importing_the_package_is_free() -> None:
    loaded = imported_by("import moe_nvlink_plugin")
    assert not loaded & {"torch", "vllm", "cuda", "numpy", "pluggy"}


def test_using_the_public_names_needs_no_cuda_and_no_vllm() -> None:
    names = "AllToAllConfig, MoeAllToAll, Dispatched, DispatchMetadata, ExchangeStats, errors, env"
    not_started = "import torch; assert not torch.cuda.is_initialized()"
    ours = imported_by(f"from moe_nvlink_plugin import {names}; {not_started}")
    # torch itself imports CUDA's Python bindings where they are installed.
    more = ours - imported_by("import torch, torch.distributed")
    assert "moe_nvlink_plugin.exchange.all_to_all" in more
    assert not {name for name in more if name.split(".")[0] in {"vllm", "cuda"}}


def test_importing_the_vllm_entry_points_needs_no_vllm() -> None:
    """vLLM loads plugins in every process, before it knows its platform."""
    loaded = imported_by("from moe_nvlink_plugin.integration.vllm import platform_plugin, register")
    assert not {name for name in loaded if name.split(".")[0] in {"vllm", "cuda", "torch"}}


def tracked_files() -> list[Path]:
    done = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        pytest.skip("not a git checkout: no list of the repository's files")
    return [ROOT / name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]


def test_no_file_names_a_path_of_one_machine() -> None:
    found = []
    for path in tracked_files():
        is_recorded = path.suffix in RECORDED and path.is_relative_to(ROOT / "benchmarks/results")
        if path == Path(__file__) or is_recorded:
            continue
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(lines, start=1):
            if MACHINE_PATH.search(EVERYWHERE.sub("", line)):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert not found, "\n".join(found)
