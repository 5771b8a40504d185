"""Packets of the dispatch of large batches on NVLink, counted from the addresses that its PTX
stores to.

A packet carries at most one line of 128 bytes, of what one instruction of a warp stores. The link
of the software GPU's clock is made so slow here that a dispatch takes as long as its bytes, headers
included.
"""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.moe_comm import clocked
from benchmarks.moe_comm.terms import Work
from tests.support import kernel_texts
from tests.support.delays import replace_once
from tests.support.ptx import costs

pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC is not installed")
pytestmark = pytest.mark.long

LINE_BYTES = 128
LINK_BYTES_PER_NS = 0.01
#: More tokens than SMs: CTAs of 256 threads, over which a row goes several times.
FEW_SMS = {"num_sms": 1.0}

TABLE = costs.costs("h200")
HEADER_BYTES, LEAST_BYTES = TABLE["header_bytes"], TABLE["granule_bytes"]


def bytes_on_link(work: Work, changes: dict[str, float]) -> float:
    changes = changes | {"link_bytes_per_ns": LINK_BYTES_PER_NS}
    with clocked.Bulk(work, "h200", changes) as layer:
        return 1e3 * layer.run("dispatch").us * LINK_BYTES_PER_NS


def bytes_of_whole_lines(work: Work) -> float:
    """As few packets as there can be: the perfect router sends each token to every rank."""
    rows = [4 * work.top_k, 4 * work.top_k, 2 * work.hidden_size]
    lines = [-(-row // LINE_BYTES) for row in rows]
    token = sum(rows) + HEADER_BYTES * sum(lines)
    cell = LEAST_BYTES + HEADER_BYTES
    return (work.ep_size - 1) * (work.tokens * token + cell)


@pytest.mark.parametrize(
    ("tokens", "hidden_size", "changes"), [(1, 7168, {}), (1, 2880, {}), (3, 7168, FEW_SMS)]
)
def test_a_line_is_one_packet(tokens: int, hidden_size: int, changes: dict[str, float]) -> None:
    work = Work(8, tokens, hidden_size=hidden_size)
    assert bytes_on_link(work, changes) == pytest.approx(bytes_of_whole_lines(work), rel=0.01)


@pytest.mark.parametrize("changes", [{}, FEW_SMS])
def test_a_row_that_begins_within_a_warp_is_noticed(
    changes: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of the 28 warps that move the row then stores parts of one line more."""
    source = kernel_texts.specialised_source

    def packed(top_k: int, element: int, **options: Any) -> str:
        text = source(top_k, element, **options)
        return replace_once(
            text,
            "before += whole_warps(plan_row(args, j).num_lanes)",
            "before += plan_row(args, j).num_lanes",
        )

    monkeypatch.setattr(kernel_texts, "specialised_source", packed)
    work = Work(8, 3)
    more = 7 * 3 * 28 * HEADER_BYTES
    assert bytes_on_link(work, changes) == pytest.approx(
        bytes_of_whole_lines(work) + more, rel=0.005
    )
