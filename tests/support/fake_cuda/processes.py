"""Processes that have the stand-in for the driver; `driven` is for conftest.py of their tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from moe_nvlink_plugin.jit import host
from tests.support import kernel_texts
from tests.support.ranks import run_processes

from . import build, environment, ptx
from .transport import install

Driven = Callable[..., Any]


def stand_in(
    folder: Path, patch: pytest.MonkeyPatch, units: Sequence[ptx.Unit] = (), **options: Any
) -> None:
    """Processes that are started from now on have the fake driver; options of `environment`.

    units: what the driver runs PTX of, instead of the host build of the product's kernels.
    """
    if units:
        options["ptx"] = ptx.prepare(folder / "ptx", units)
    elif "kernels" not in options:
        options["kernels"] = host.build(kernel_texts.host_source())
    for name, value in environment(build(folder), **options).items():
        patch.setenv(name, value)


@pytest.fixture
def driven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Driven:
    """`driven(body, *args, **options)` is `body(*args)` in such a process; options of stand_in.

    With `ranks=2` it is a list of `body(rank, 2, *args)`, None for each of those in `killed`.
    """

    def run(
        body: Any, *args: Any, ranks: int = 0, killed: tuple[int, ...] = (), **options: Any
    ) -> Any:
        stand_in(tmp_path, monkeypatch, **options)
        given = (body, args, ranks > 0)
        results = run_processes(max(ranks, 1), _process_main, tmp_path, *given, killed=killed)
        return results if ranks else results[0]

    return run


def _process_main(rank: int, size: int, body: Any, args: tuple[Any, ...], told: bool) -> Any:
    install()
    return body(rank, size, *args) if told else body(*args)
