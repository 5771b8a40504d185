"""compute-sanitizer over a small emulated exchange, and over one with a bug that it must find."""

from __future__ import annotations

import re

import pytest

from tests.gpu import watched

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

#: What a tool prints of the bug that is put in.
FINDING = {"memcheck": r"Invalid __global__ write", "racecheck": r"RACECHECK SUMMARY: [1-9]"}


def watch(tool: str, *, broken: bool = False) -> tuple[int, str]:
    status, said = watched.watch(tool, broken=broken)
    if status == watched.CANNOT_RUN:
        pytest.skip(said.splitlines()[-1])
    return status, said


@pytest.mark.parametrize("tool", watched.TOOLS)
def test_clean(tool: str) -> None:
    status, said = watch(tool)
    assert status == 0, said[-6000:]
    assert "all rounds verified" in said


@pytest.mark.parametrize("tool", FINDING)
def test_the_tool_looks(tool: str) -> None:
    """The exit status is FOUND only where the program itself ends well, and after an access that
    memcheck has refused it does not: its context is gone. So the finding is looked for.
    """
    status, said = watch(tool, broken=True)
    assert status != 0, said[-4000:]
    assert re.search(FINDING[tool], said), said[-4000:]
