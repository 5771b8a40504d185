"""Static activation scales become one for all ranks, before vLLM looks at them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("vllm", reason="vLLM is not installed")

from moe_nvlink_plugin.integration.vllm.moe.method import share_scales
from tests.support.ranks import run_processes


def layer_of(rank: int) -> Any:
    return SimpleNamespace(
        w13_input_scale=torch.nn.Parameter(torch.tensor([0.25, 0.5]) * (rank + 1), False),
        w13_input_global_scale=torch.nn.Parameter(torch.tensor([[8.0, 6.0]]) / (rank + 1), False),
        w2_input_scale=torch.nn.Parameter(torch.tensor([1.0 + rank]), False),
    )


def rank_main(rank: int, ep_size: int) -> None:
    layer = layer_of(rank)
    share_scales(layer, lambda: dist.group.WORLD)
    assert layer.w13_input_scale.tolist() == [1.0, 1.0]  # the largest divisor
    assert layer.w13_input_global_scale.tolist() == [[3.0, 3.0]]  # the smallest factor
    assert layer.w2_input_scale.tolist() == [1.0 + rank]  # of what never leaves its rank
    share_scales(SimpleNamespace(w13_input_scale=None), pytest.fail)


def test_two_ranks(tmp_path: Path) -> None:
    run_processes(2, rank_main, tmp_path)
