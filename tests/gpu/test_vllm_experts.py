"""vLLM's modular MoE kernel with our prepare and finalize, and vLLM's Triton experts, on a GPU.

Ranks are processes that share the GPU and exchange rows by our own transport. Triton compiles the
experts' kernels; vLLM's Python files are enough, because plain torch stands in for the operators of
its compiled libraries (tests/integration/vllm/moe/vllm_triton.py). What a rank of several computes
must be what one rank with all experts computes of the same tokens, on the same GPU.

The two add the rows of a token's experts in bf16 at different places: each rank rounds the sum of
its own rows, and combine the sum of the ranks. Three experts are three roundings of 2**-9 at most,
of partial sums up to a few times the result: 2**-6 of the largest number is twice what that gives.
With quantised experts a row of another block size of the kernel may fall on the other side of a
rounding of bf16 between the products, and its quantised number be the next one, which for e4m3 is
2**-3 away, of one term in 128: 2**-5. A wrong row, scale, weight or expert is of the order of 1.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests.support import ranks as processes
from tests.support import vllm_experts_ranks, vllm_files
from tests.support.vllm_experts_ranks import Outcome
from tests.support.vllm_sizes import GPU_SCHEMES

JOIN_S = 75.0
REPLAYED = ("unquantised", "fp8 by blocks", "fp8 by tensor")
MOST_ERROR = dict.fromkeys(GPU_SCHEMES, 2 ** (-5)) | {"unquantised": 2**-6}

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(JOIN_S + 10),
    pytest.mark.skipif(bool(vllm_files.why_not()), reason=vllm_files.why_not()),
]

#: Size -> what each rank returned, or why there is nothing.
_run: dict[int, list[dict[str, Outcome]] | str] = {}


def outcomes(ep_size: int, folder: Path) -> list[dict[str, Outcome]]:
    """Of all schemes; the processes run once for each size."""
    if ep_size not in _run:
        began = time.monotonic()
        body: Any = vllm_experts_ranks.run_schemes
        given = (list(GPU_SCHEMES), list(REPLAYED)) if ep_size == 2 else (["fp8 by blocks"], [])
        try:
            _run[ep_size] = processes.run_processes(
                ep_size,
                body,
                folder,
                *("cuda", str(folder / "meeting"), *given),
                timeout_s=JOIN_S,
                meets=False,
            )
        except processes.RankError as error:
            _run[ep_size] = str(error)
        print(f"{ep_size} ranks: {time.monotonic() - began:.1f} s")
    of_ranks = _run[ep_size]
    if isinstance(of_ranks, str):
        pytest.fail(of_ranks)
    return of_ranks


def check(of_ranks: list[dict[str, Outcome]], name: str) -> None:
    scheme = name.removeprefix("replayed ")
    traces = [f"rank {rank}: {each[name].trace}" for rank, each in enumerate(of_ranks)]
    if any(each[name].trace for each in of_ranks):
        pytest.fail("\n".join(traces))
    for rank, each in enumerate(of_ranks):
        found = each[name]
        print(f"{name}: rank {rank}: errors {found.errors}, {found.seconds:.1f} s")
        assert found.errors
        assert all(error < MOST_ERROR[scheme] for error in found.errors), found.errors
        assert found.recipe == GPU_SCHEMES[scheme]
        assert found.is_in_place


@pytest.mark.parametrize("scheme", GPU_SCHEMES)
def test_two_ranks(scheme: str, tmp_path: Path) -> None:
    """Ragged rounds, of no token and of many, with padding among the ids."""
    check(outcomes(2, tmp_path), scheme)


@pytest.mark.parametrize("scheme", REPLAYED)
def test_a_cuda_graph_of_the_layer(scheme: str, tmp_path: Path) -> None:
    check(outcomes(2, tmp_path), f"replayed {scheme}")


def test_three_ranks(tmp_path: Path) -> None:
    check(outcomes(3, tmp_path), "fp8 by blocks")
