"""`moe-nvlink verify` on GPUs' own kernels: its rounds between processes, through the nvlink
transport and the driver's launches, on the stand-in driver that executes PTX.

What it says of planted faults is what it says on CPU ranks (`core/verify/test_checks.py`).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")

from moe_nvlink_plugin import AllToAllConfig
from moe_nvlink_plugin.groups import as_group
from moe_nvlink_plugin.launch.kernel import Build
from moe_nvlink_plugin.verify.cases import Case
from moe_nvlink_plugin.verify.checks import Rounds
from moe_nvlink_plugin.verify.plan import Geometry, plan
from tests.core.verify.test_checks import FAULTS
from tests.support import fake_cuda
from tests.support.fake_cuda import ptx
from tests.support.fake_cuda.transport import install
from tests.support.ranks import run_processes

pytestmark = pytest.mark.long

RANKS = 2
CPU = torch.device("cpu")
LARGE, SMALL = "large batches", "small batches, fp8_block"
#: What is planted, in the form of FAULTS. The last one here, because scales that are stored in each
#: other's place leave words of shared memory unwritten, which the software GPU itself reports.
PLANTED = {
    fault: FAULTS[fault]
    for fault in ("a dropped row", "rows in each other's slots", "a cell of the epoch before")
} | {
    "a scale that is one bit off": (
        SMALL,
        "put(scales + offset, vector);",
        "Vector<Bytes> wrong = vector;\n    wrong.bytes[0] ^= 1;\n    put(scales + offset, wrong);",
        r"rank \d to rank \d: payload 2: first difference",
    )
}


def named(name: str, timeout_s: float = 60.0) -> Rounds:
    """A check of the plan, small."""
    geometry = Geometry(
        ep_size=RANKS,
        num_experts=5,
        top_k=4,
        hidden_size=384,
        max_tokens=6,
        timeout_s=timeout_s,
    )
    (check,) = (check for check in plan(geometry, CPU, quick=False) if check.name == name)
    assert isinstance(check, Rounds)
    # Several CTAs, whose slots are in any order: a plan for the CPU has one.
    return dataclasses.replace(check, case=dataclasses.replace(check.case, num_threads=2), rounds=3)


def planted(text: str, line: str, instead: str) -> str:
    """A unit's text with the fault in it, if it has the line; nothing for ""."""
    return text.replace(line, instead) if line else text


def body(
    rank: int, _size: int, name: str, line: str, instead: str, timeout_s: float
) -> tuple[list[str], str]:
    """What is wrong on each rank, and the last kernel that the driver was given."""
    install()
    config, text = Case.config, Build.text

    def on_driver(case: Case, ep_rank: int) -> AllToAllConfig:
        return dataclasses.replace(config(case, ep_rank), transport="on_fake_driver")

    group = dist.group.WORLD
    assert group is not None
    with (
        mock.patch.object(Case, "config", on_driver),
        mock.patch.object(Build, "text", lambda build: planted(text(build), line, instead)),
    ):
        wrong = named(name, timeout_s).run(as_group(group, 60.0), CPU)
    return wrong, fake_cuda.control().last_launch().name.decode()


Verify = Callable[..., list[str]]


@pytest.fixture
def verify(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Verify:
    """Runs a check on PTX, with something in the place of a line of the kernels."""

    def run(name: str, line: str = "", instead: str = "", timeout_s: float = 60.0) -> list[str]:
        units = ptx.of_configs(named(name).case.config(0))
        changed = [unit._replace(text=planted(unit.text, line, instead)) for unit in units]
        assert (changed != units) == bool(line), "no kernel has this line"
        folder = ptx.prepare(tmp_path / "ptx", changed)
        for variable, value in fake_cuda.environment(fake_cuda.build(tmp_path), ptx=folder).items():
            monkeypatch.setenv(variable, value)
        outcomes = run_processes(RANKS, body, tmp_path, name, line, instead, timeout_s)
        assert all("moe_nvlink_" in launched for _wrong, launched in outcomes)
        told: list[str] = outcomes[0][0]
        assert all(wrong == told for wrong, _launched in outcomes), "every rank says the same"
        return told

    return run


@pytest.mark.parametrize("name", [LARGE, SMALL])
def test_right_kernels_pass(name: str, verify: Verify) -> None:
    assert verify(name) == [""] * RANKS


@pytest.mark.parametrize("fault", PLANTED)
def test_a_fault_is_named(fault: str, verify: Verify) -> None:
    name, line, instead, said = PLANTED[fault]
    wrong = verify(name, line, instead, 2.0 if "Timeout" in said else 60.0)
    assert any(re.search(said, message) for message in wrong), wrong
