"""Audits of rows (`audit_every`) on a GPU: the recipes in torch there, and replays of a graph.

One rank. tests/integration/common/test_audit.py has what several find, on CPU ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from moe_nvlink_plugin.integration.common.audit import Audited
from moe_nvlink_plugin.testing import ThreadGroup
from moe_nvlink_plugin.verify.cases import RECIPES
from tests.support.audited import CAPACITY, Rank

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(60)]
REPLAYS = 50


def audited(body: Callable[[Rank], object], **values: Any) -> Audited:
    rank = Rank(ThreadGroup.ranks(1)[0], device="cuda", ep_size=1, **values)
    with rank.exchange:
        body(rank)
        torch.cuda.synchronize()
        return rank.audit.found()


def replayed(rank: Rank, spoil: Callable[[Any], object] = lambda received: None) -> None:
    """The same round again and again, with other tokens in the same memory."""
    hidden, *routing = rank.inputs(CAPACITY)
    rank.round(CAPACITY)  # torch's kernels are loaded
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rank.run(rank.sent(hidden), routing, spoil)
    for _ in range(REPLAYS):
        for tensor, new in zip((hidden, *routing), rank.inputs(CAPACITY), strict=True):
            tensor.copy_(new)
        graph.replay()


@pytest.mark.parametrize("small", [0, CAPACITY])
@pytest.mark.parametrize("recipe", [None, *RECIPES])
def test_rounds_without_a_fault(recipe: str | None, small: int) -> None:
    def body(rank: Rank) -> None:
        for number in range(24):
            rank.round((5 * number) % (CAPACITY + 1))
        replayed(rank)

    found = audited(body, recipe=recipe, small_tokens=small)
    assert found.wrong == found.stale == [0]
    # Rows of NaN, and nvfp4's that the kernels quantise, are not compared.
    assert found.rows[0] > REPLAYS // 2


def test_a_wrong_byte_in_a_replay_is_found() -> None:
    def spoil(received: Any) -> None:
        received.hidden_states.view(torch.uint8)[:, 3] ^= 1

    found = audited(lambda rank: replayed(rank, spoil), recipe="fp8_block")
    assert REPLAYS // 2 < found.wrong[0] < found.rows[0] <= REPLAYS + 1
    assert found.stale == [0]
