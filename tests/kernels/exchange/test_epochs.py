"""Epochs have 32 bits: rounds behind the last one give the bits of any other round."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
from typing import Any

import pytest
import torch

from moe_nvlink_plugin.jit.header import structs
from tests.support import cases, emulated
from tests.support.cases import Case
from tests.support.emulated import EmulatedRanks

BULK = Case(
    name="epochs",
    tokens=(3, 0, 8),
    num_experts=10,
    top_k=3,
    dtype=torch.bfloat16,
    hidden_size=256,
)
KINDS = {
    "bulk": BULK,
    "quantised": cases.with_formats(BULK, "fp8_block", "fp8_block"),
    "counts": dataclasses.replace(BULK, num_expert_counts=10),
}
KINDS |= {f"small {name}": dataclasses.replace(of, small=True) for name, of in KINDS.items()}
ROUNDS = 7


def set_epoch(ranks: EmulatedRanks, epoch: int) -> None:
    """Make every rank's control and cells say that the round `epoch` is over."""
    size = ctypes.sizeof(structs()["LocalControl"])
    for rank in range(ranks.config.ep_size):
        control: Any = ranks.control(rank)
        control.epoch = control.combined_epoch = epoch
        local = ranks._bytes(rank, "local", size, 0, writes=True)
        local.copy_(torch.frombuffer(bytearray(bytes(control)), dtype=torch.uint8))
        for cells in ("dispatch_cells", "combine_cells"):
            found = ranks._bytes(rank, cells, ranks.config.ep_size * 8, 0, writes=True)
            found.view(torch.int64).fill_(epoch)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("start", [2**32 - 3, 2**31 - 3])
def test_rounds_go_on_when_the_epoch_wraps(kind: str, start: int) -> None:
    case = KINDS[kind]
    with contextlib.closing(emulated.make_backend("cpu", case, ctas=2)) as backend:
        case = emulated.with_ctas(case, backend.ctas)
        ranks = EmulatedRanks.of_case(case, backend)
        set_epoch(ranks, start)
        for number in range(ROUNDS):
            inputs = cases.make_inputs(case, seed=number)
            emulated.check_round(case, inputs, ranks.run_round(inputs))
        assert ranks.control(0).epoch == (start + ROUNDS) % 2**32
