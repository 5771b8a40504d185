"""Our backend of flashinfer.moe_ep and our drop-in for MoeAlltoAll, between two processes of a GPU.

tests/flashinfer runs the same cases, and more, on CPU ranks.
"""

from __future__ import annotations

import importlib.util

import pytest

from tests.flashinfer import launch
from tests.support import ranks as processes

JOIN_S = 100.0
CASES = (
    "every_format",
    "the_bound_of_each_call",
    "communications_of_a_geometry_share_a_workspace",
    "the_drop_in_carries_every_format",
    "the_least_workspace_is_enough",
    "ids_without_an_invalid_id_arrive_as_sent",
    "a_reset_leaves_the_next_workspace_alone",
    "a_checkpoint_keeps_what_objects_of_these_sizes_are",
    "rounds_without_the_last_rank",
    "flashinfers_own_backend_on_the_drop_in",
    "statistics_of_experts",
    "flashinfers_layer_with_experts_in_torch",
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(JOIN_S + 20),
    pytest.mark.skipif(
        importlib.util.find_spec("flashinfer") is None, reason="FlashInfer is not installed"
    ),
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> launch.Outcomes:
    folder = tmp_path_factory.mktemp("ranks")
    with pytest.MonkeyPatch.context() as variables:
        variables.setenv("MOE_NVLINK_ALLOW_SHARED_GPU", "1")
        variables.setenv("MOE_NVLINK_TIMEOUT_S", "20")
        variables.setenv("LOCAL_RANK", "0")  # FlashInfer's layer binds the device of this number
        told = processes.run_processes(
            2, launch.cases_of_rank, folder, CASES, "cuda", timeout_s=JOIN_S
        )
    return {name: "\n".join(one[name] for one in told if one[name]) for name in CASES}


@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu(outcomes: launch.Outcomes, name: str) -> None:
    if outcomes[name]:
        pytest.fail(outcomes[name], pytrace=False)
