"""vLLM's own Triton experts behind our dispatch, executed on CPU tensors by Triton's interpreter.

What they compute on a rank of several, with expert_map, ids of experts elsewhere, padding, and
empty slots that hold NaN, must be what they compute of the same tokens on one rank that has all
experts and no exchange. The kernels, the quantisers in Triton, and the classes around them are
vLLM's; stand-ins in plain torch are here for the operators that only vLLM's CUDA build has.

Triton is in the environment of `make vllm33-env`, with TRITON_INTERPRET=1.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm.triton_utils import HAS_TRITON

if not HAS_TRITON:
    pytest.skip(
        "Triton does not run here: make vllm33-env, TRITON_INTERPRET=1", allow_module_level=True
    )

from vllm.config import VllmConfig, set_current_vllm_config

from moe_nvlink_plugin.testing import ThreadGroup, run_ranks
from tests.integration.vllm.moe import vllm_triton
from tests.integration.vllm.moe.vllm_layer import ragged, way_of
from tests.integration.vllm.moe.vllm_triton import SCHEMES, TritonLayer
from tests.support import ranks as processes
from tests.support import vllm_experts_ranks
from tests.support.vllm_experts_ranks import error_of
from tests.support.vllm_sizes import GPU_SCHEMES


@pytest.fixture(autouse=True)
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm_triton.stand_in(monkeypatch.setattr)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("ep_size", [2, pytest.param(3, marks=pytest.mark.long)])
def test_the_layer_is_that_of_one_rank(scheme: str, ep_size: int) -> None:
    """Ragged rounds, of no token and of many."""

    def rank_main(group: ThreadGroup) -> tuple[list[float], str | None, bool]:
        with set_current_vllm_config(VllmConfig()), TritonLayer(group, scheme) as layer:
            errors = []
            for work in ragged(group.rank, 4):
                errors += error_of(scheme, layer(*work), work)
                layer.poison()
            return errors, *way_of(layer)

    for errors, recipe, is_in_place in run_ranks(ep_size, rank_main):
        assert errors
        assert all(error < 1e-5 for error in errors), errors
        assert recipe == SCHEMES[scheme][2]
        assert is_in_place


def test_rounds_and_replays_of_processes(tmp_path: Path) -> None:
    """The ranks of tests/gpu/test_vllm_experts.py."""
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
