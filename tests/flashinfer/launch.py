"""Runs every case on ranks that share one import of FlashInfer, which takes seconds."""

from __future__ import annotations

import os
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch

from tests.support import flashinfer_wheel
from tests.support.ranks import RankError, run_processes

Outcomes = dict[str, str]


def run_everywhere(_rank: int, _size: int, sizes: tuple[int, ...], folder: Path) -> list[Outcomes]:
    """Return for each number of ranks: name of the case -> what went wrong; "" if nothing did.

    A process without threads calls this, so its children can be forked.
    """
    os.environ["MOE_NVLINK_TIMEOUT_S"] = "120"
    with flashinfer_wheel.importable():
        from . import cases

        found = []
        for size in sizes:
            place = folder / str(size)
            place.mkdir()
            try:
                told = run_processes(size, cases_of_rank, place, method="fork")
            except RankError as error:
                found.append(dict.fromkeys(cases.CASES, str(error)))
                continue
            found.append(
                {name: "\n".join(one[name] for one in told if one[name]) for name in cases.CASES}
            )
        return found


def cases_of_rank(
    rank: int, ep_size: int, names: Sequence[str] = (), device: str = "cpu"
) -> Outcomes:
    """Run the cases in their order up to one that fails; the ranks are then out of step.

    FlashInfer can be imported here. `names`: of some cases; (): all.
    """
    from . import cases, wires

    wires.DEVICE = torch.device(device)
    names = names or list(cases.CASES)
    found: Outcomes = {}
    for name in names:
        try:
            cases.CASES[name](rank, ep_size)
            found[name] = ""
        except BaseException:
            found[name] = f"rank {rank}: {traceback.format_exc()}"
            break
    return {name: found.get(name, f"rank {rank} did not come here") for name in names}
