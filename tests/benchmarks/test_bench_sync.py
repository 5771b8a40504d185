"""benchmarks/bench_sync.py: what it leaves out of the kernels, and what it writes."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import bench_sync
from benchmarks.moe_comm import no_sync
from moe_nvlink_plugin import MoeAllToAll
from moe_nvlink_plugin.testing import ThreadGroup, run_ranks
from tests.core.exchange import small_exchange
from tests.support import kernel_texts
from tests.support.ptx import build

pytestmark = pytest.mark.long


def lonely(group: ThreadGroup, small_tokens: int) -> int:
    """Rounds that rank 0 ends although rank 1 never calls."""
    sizes = {"num_experts": 8, "top_k": 4, "hidden_size": 128, "max_tokens_per_rank": 8}
    more: dict[str, Any] = {"small_tokens": small_tokens, "dtype": torch.bfloat16}
    config = small_exchange.config(2, group.rank, timeout_s=100, **sizes, **more)
    layer, ended = MoeAllToAll.create(config, group), 0
    if group.rank == 0:
        for number in range(3):
            hidden = torch.full((3, 128), float(number), dtype=torch.bfloat16)
            ids = torch.arange(12, dtype=torch.int32).view(3, 4) % 8
            received = layer.dispatch(hidden, ids, torch.ones(3, 4))
            layer.combine(layer.combine_input(), received.metadata)
            ended += 1
    return ended


@pytest.mark.parametrize("small_tokens", [0, 8])
def test_nobody_waits(small_tokens: int) -> None:
    with no_sync._host_library():
        ended = run_ranks(2, functools.partial(lonely, small_tokens=small_tokens))
    assert ended == [3, 0]


def test_nothing_is_ordered_on_a_gpu() -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC is not installed")
    text = kernel_texts.specialised_source(8, 0, small=True)
    ordered = ("ld.acquire.sys", "st.release.sys")
    product, without = (build.ptx_of(one, "sm_90a") for one in (text, no_sync.without_sync(text)))
    for instruction in ordered:
        assert instruction in product
        assert instruction not in without


def test_a_run_leaves_both_times(tmp_path: Path) -> None:
    file = tmp_path / "sync.json"
    bench_sync.main(
        [*("--only", "cpu", "--tokens", "1", "--iters", "2", "--hidden_size", "128"),
         *("--output_file", str(file))]
    )  # fmt: skip
    rows = json.loads(file.read_text())["rows"]
    of_ranks = {(row["verb"], row["has_sync"]) for row in rows if row["where"] == "CPU ranks"}
    assert of_ranks == {(v, s) for v in ("dispatch", "combine") for s in (True, False)}
    assert {row["where"] for row in rows} == {"CPU ranks", "published"}
