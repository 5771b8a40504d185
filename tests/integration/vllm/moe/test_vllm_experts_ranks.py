"""The ranks of tests/gpu/test_vllm_experts.py, here on CPU tensors by Triton's interpreter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm.triton_utils import HAS_TRITON

if not HAS_TRITON:
    pytest.skip(
        "Triton does not run here: make vllm33-env, TRITON_INTERPRET=1", allow_module_level=True
    )

from tests.integration.vllm.moe.vllm_triton import moe_align_block_size
from tests.support import ranks as processes
from tests.support import vllm_experts_ranks
from tests.support.vllm_sizes import GPU_SCHEMES


def test_rounds_and_replays(tmp_path: Path) -> None:
    body: Any = vllm_experts_ranks.run_schemes
    given: Any = ("cpu", str(tmp_path / "meeting"), ["unquantised"], ["fp8 by tensor"])
    of_ranks = processes.run_processes(2, body, tmp_path, *given, meets=False)
    for each in of_ranks:
        assert list(each) == ["unquantised", "replayed fp8 by tensor"]
        for name, found in each.items():
            assert not found.trace, found.trace
            assert found.errors
            assert all(error < 1e-5 for error in found.errors), found.errors
            assert found.recipe == GPU_SCHEMES[name.removeprefix("replayed ")]
            assert found.is_in_place


def test_a_scheme_that_fails_leaves_the_others_their_turn(tmp_path: Path) -> None:
    body: Any = vllm_experts_ranks.run_schemes
    given: Any = ("cpu", str(tmp_path / "meeting"), ["no such scheme", "fp8 by token"], [])
    for each in processes.run_processes(2, body, tmp_path, *given, meets=False):
        assert "KeyError" in each["no such scheme"].trace
        assert not each["fp8 by token"].trace


@pytest.mark.parametrize("is_mapped", [False, True])
@pytest.mark.parametrize("count", [0, 1, 50])
def test_places_by_expert(count: int, is_mapped: bool) -> None:
    """The stand-in without a look at any value, against one place after the other."""
    num_experts, block = 7, 4
    random = torch.Generator().manual_seed(count)
    ids = torch.randint(-1, num_experts, (count, 3), generator=random, dtype=torch.int32)
    expert_map = torch.tensor([-1, -1, 0, 1, 2, -1, -1], dtype=torch.int32) if is_mapped else None
    most = ids.numel() + num_experts * (block - 1)
    places = torch.empty(most, dtype=torch.int32)
    experts, padded = torch.empty(-(-most // block), dtype=torch.int32), torch.empty(1)
    moe_align_block_size(ids, num_experts, block, places, experts, padded, expert_map)
    order: list[int] = []
    owners: list[int] = []
    for expert in range(num_experts):
        local = expert if expert_map is None else int(expert_map[expert])
        mine = (ids.flatten() == expert).nonzero().flatten().tolist() if local >= 0 else []
        blocks = -(-len(mine) // block)
        order += mine + [ids.numel()] * (blocks * block - len(mine))
        owners += [local] * blocks
    assert int(padded) == len(order)
    assert places.tolist() == order + [ids.numel()] * (most - len(order))
    assert experts.tolist() == owners + [-1] * (len(experts) - len(owners))
