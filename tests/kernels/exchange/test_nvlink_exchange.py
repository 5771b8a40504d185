"""Dispatch and combine between processes over the nvlink transport, launched through unmodified
cuda-python, on the tests' own driver: the product's whole GPU path but the GPU.
"""

from __future__ import annotations

import dataclasses
import gc
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from moe_nvlink_plugin import MoeAllToAll
from moe_nvlink_plugin.errors import ExchangeTimeoutError
from moe_nvlink_plugin.transport import nvlink
from moe_nvlink_plugin.verify import cases, compare
from moe_nvlink_plugin.verify.cases import Case, Seen
from tests.support import fake_cuda
from tests.support.fake_cuda import ptx
from tests.support.fake_cuda.processes import stand_in
from tests.support.fake_cuda.transport import install
from tests.support.ranks import run_processes

pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")

RANKS = 3
SMALL = Case(name="small", tokens=(5, 0, 8), num_experts=7, top_k=3, routing="invalid")
LARGE = Case(
    name="large",
    tokens=(40, 64, 1),
    capacity=64,
    hidden_size=1031,
    top_k=8,
    dtype=torch.bfloat16,
    extras=((torch.uint8, (3, 5)),),
    num_channels=2,
)


@pytest.fixture(params=["one host", "fabric", ptx.LONG])
def stand_in_driver(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> str:
    """Processes started meanwhile have it; with "fabric" they take themselves for other hosts, with
    "ptx" the driver runs the kernels' PTX and not their host build.
    """
    if request.param == "ptx":
        units = ptx.of_configs(*(case.config(0) for case in (SMALL, LARGE)))
        stand_in(tmp_path, monkeypatch, units)
    else:
        stand_in(tmp_path, monkeypatch, fabric=int(request.param == "fabric"), most_ctas=2)
    return str(request.param)


class Outcome(NamedTuple):
    """What a rank saw."""

    small: list[Seen]
    large: list[Seen]
    addresses_kept: bool
    live: dict[str, int]


def create(case: Case, rank: int, first: MoeAllToAll | None, **changes: Any) -> MoeAllToAll:
    config = dataclasses.replace(case.config(rank), transport="on_fake_driver", **changes)
    return MoeAllToAll.create(config, dist.group.WORLD, share_with=first)


def join(rank: int, hosts: str) -> None:
    install()
    if hosts == "fabric":
        pretend_other_host(rank)


def pretend_other_host(rank: int) -> None:
    from moe_nvlink_plugin.transport import topology

    look = topology.look

    def elsewhere(*arguments: Any) -> topology.Facts:
        return dataclasses.replace(look(*arguments), host=f"host {rank}")

    setattr(topology, "look", elsewhere)  # noqa: B010 - to the type checker it is no variable


def rounds(rank: int, _size: int, hosts: str) -> Outcome:
    """Rounds of one layer, then of two in turn: the second one makes the workspace grow."""
    join(rank, hosts)
    seen: dict[Case, list[Seen]] = {SMALL: [], LARGE: []}
    with create(SMALL, rank, None) as small:
        inputs = {case: cases.make_inputs(case)[rank] for case in (SMALL, LARGE)}
        seen[SMALL].append(cases.run_round(small, inputs[SMALL]))
        before = small.combine_input().data_ptr()
        with create(LARGE, rank, small) as large:
            for number in range(4):
                for layer, case in ((small, SMALL), (large, LARGE)):
                    channel = number % case.num_channels
                    seen[case].append(
                        cases.run_round(
                            layer, inputs[case], channel=channel, zero_copy=number % 2 == 0
                        )
                    )
        kept = small.combine_input().data_ptr() == before
    # What died in a cycle behind the last close is unmapped by the next call of its kind.
    gc.collect()
    nvlink.unmap_unused()
    return Outcome(seen[SMALL], seen[LARGE], kept, fake_cuda.control().live())


def test_rounds_between_processes(stand_in_driver: str, tmp_path: Path) -> None:
    outcomes: list[Outcome] = run_processes(RANKS, rounds, tmp_path, stand_in_driver)
    for case, name in ((SMALL, "small"), (LARGE, "large")):
        several_ctas = dataclasses.replace(case, num_threads=4)  # slots in any order
        by_round = zip(*(getattr(outcome, name) for outcome in outcomes), strict=True)
        for seen in by_round:
            compare.check_received(several_ctas, cases.make_inputs(case), list(seen))
            compare.check_combined(several_ctas, cases.make_inputs(case), list(seen))
    for outcome in outcomes:
        assert outcome.addresses_kept
        assert not any(outcome.live.values()), "something was not given back"


def missing(rank: int, _size: int, hosts: str) -> tuple[str, tuple[int, ...]] | None:
    """Rank 2 leaves after the first round; the others hear of it and their driver lives on."""
    join(rank, hosts)
    layer = create(SMALL, rank, None, timeout_s=6.0)
    mine = cases.make_inputs(SMALL)[rank]
    cases.run_round(layer, mine)
    found = None
    if rank != 2:
        try:
            cases.run_round(layer, mine)
            layer.synchronize()
        except ExchangeTimeoutError as error:
            found = (error.phase, error.ranks)
    dist.barrier()
    layer.close()
    with create(SMALL, rank, None) as again:
        cases.run_round(again, mine)
    return found


@pytest.mark.parametrize("stand_in_driver", ["one host", ptx.LONG], indirect=True)
def test_a_rank_that_leaves(stand_in_driver: str, tmp_path: Path) -> None:
    outcomes = run_processes(RANKS, missing, tmp_path, stand_in_driver)
    assert outcomes == [("dispatch", (2,)), ("dispatch", (2,)), None]
