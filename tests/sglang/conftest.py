"""Tests inside SGLang's own environment, `make sglang-env`; elsewhere they are skipped.

`tests/integration/sglang/test_sglang_environment.py` runs them there, so `make test` has them too.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.sglang import arguments


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """SGLang's resolution edits os.environ; other tests must not see it."""
    before = dict(os.environ)
    arguments.cpu_environment(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="session")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> None:
    """SGLang in this process has loaded our plugin, by the entry point in pyproject.toml."""
    sys.path.insert(0, str(arguments.write_entry_points(tmp_path_factory.mktemp("entry_points"))))
    from sglang.srt.plugins import load_plugins

    load_plugins()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The configuration of a tiny Qwen3-MoE-like model, without weights."""
    return arguments.write_model(tmp_path_factory.mktemp("qwen3_moe"))


@pytest.fixture
def resolved(plugin: None, checkpoint: Path) -> Callable[..., Any]:
    """Builds ServerArgs of some fields and resolves them; ours is the backend if none is named."""

    def resolve(**values: Any) -> Any:
        server_args = arguments.server_args(**{"model_path": str(checkpoint), **values})
        server_args.resolve_once()
        return server_args

    return resolve
