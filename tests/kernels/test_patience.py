"""How long a kernel waits for its peers, on CPU ranks, which run the GPU's text."""

from __future__ import annotations

import time

import pytest
import torch

from moe_nvlink_plugin import MoeAllToAll
from moe_nvlink_plugin.jit import host
from moe_nvlink_plugin.testing import ThreadGroup, run_ranks
from tests.kernels import cases, compare
from tests.kernels.cases import Case
from tests.support import delays


def test_a_clock_that_goes_back_ends_no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's clock may be set back. Its difference, taken as unsigned, is beyond every timeout."""
    library = delays.clock_that_goes_back()
    monkeypatch.setattr(host, "load", lambda _text: library)
    case = Case(name="clock", tokens=(3, 2))
    inputs = cases.make_inputs(case)

    def rank_main(group: ThreadGroup) -> torch.Tensor:
        config = case.config(group.rank)
        with MoeAllToAll.create(config, group) as exchange:
            if group.rank == 1:
                until_looked(library)
            received = exchange.dispatch(*inputs[group.rank])
            rows = cases.expert_rows(
                config, group.rank, received.hidden_states, received.topk_ids, received.topk_weights
            )
            return exchange.combine(rows, received.metadata)

    for rank, combined in enumerate(run_ranks(case.ep_size, rank_main)):
        expected = compare.expected_combined(case, inputs[rank], rank)
        compare.assert_same_bits(combined, expected, f"rank {rank}")


def until_looked(library: host.HostLibrary) -> None:
    """Returns when the other rank waits in dispatch, and has looked at its clock a few times."""
    deadline = time.monotonic() + 60
    while library._library.test_looks() < 4:
        assert time.monotonic() < deadline, "the other rank does not wait"
        time.sleep(0.001)
