"""A shared LM head on a GPU, one rank: what `moe-nvlink verify --ranks 1` does not show.

test_real_processes.py has several ranks.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_nvlink_plugin import sharded_argmax
from tests.support import real_head
from tests.support.small_head import ids_of, problem

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(60)]

with_and_without_pdl = pytest.mark.parametrize("pdl", ["0", "1"], ids=["plain", "pdl"])


@with_and_without_pdl
@pytest.mark.parametrize("dtype", real_head.DTYPES)
def test_rounds(dtype: torch.dtype, pdl: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_NVLINK_PDL", pdl)
    real_head.check_rounds("cuda", 30, dtype=dtype)


@pytest.mark.parametrize("dtype", real_head.DTYPES)
def test_special_values(dtype: torch.dtype) -> None:
    real_head.check_special_values("cuda", dtype)


@pytest.mark.parametrize("max_sms", [1, 5, None])
def test_more_rows_than_fit(max_sms: int | None) -> None:
    real_head.check_sm_budget("cuda", rows=3000, max_sms=max_sms)


def test_bad_input() -> None:
    real_head.check_bad_input("cuda", elsewhere="cpu")


@with_and_without_pdl
def test_graphs_of_several_sizes(pdl: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_NVLINK_PDL", pdl)
    real_head.check_replays("cuda", 300)


def test_a_graph_outlives_its_group() -> None:
    head = real_head.create("cuda", vocab_size=500)
    one = problem(head.config, [real_head.CAPACITY])
    static = real_head.StaticHead(head, "cuda", one.weight)
    replays = static.replays("cuda")
    head.close()
    static.fill(one.rows[0])
    replays[real_head.CAPACITY, False]()
    assert torch.equal(static.ids.cpu(), ids_of(head.config, one, 0))


def test_another_stream() -> None:
    """A launch goes to torch's current stream: behind work of that stream, not beside it."""
    cuda: Any = torch.cuda  # torch ships no types for what is used here
    stream = cuda.Stream()
    with real_head.create("cuda", vocab_size=500) as head:
        one = problem(head.config, [4])
        weight, hidden = one.weight.to("cuda"), torch.zeros_like(one.rows[0], device="cuda")
        torch.mm(hidden, weight.t())
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            cuda._sleep(20_000_000)  # about 10 ms of the GPU's clock
            hidden.copy_(one.rows[0])
            ids = sharded_argmax(hidden, weight, group=head)
        stream.synchronize()
        assert torch.equal(ids.cpu(), ids_of(head.config, one, 0))


@pytest.mark.parametrize("dtype", real_head.DTYPES)
def test_kernels_on_memory_of_torchs(dtype: torch.dtype) -> None:
    """What test_sanitizers.py watches, unwatched."""
    rank = real_head.LoneRank("cuda", dtype)
    for one in real_head.problems(rank.config, 4):
        rank.check(one)
