"""Our backend of flashinfer.moe_ep and our drop-in for MoeAlltoAll, on 2 and 4 gloo processes.

FlashInfer's own tests are in no wheel; these follow the contract in its sources. All cases of a
number of ranks share one process group, and all ranks one import of FlashInfer.
"""

from __future__ import annotations

import pytest

from tests.flashinfer.launch import Outcomes, run_everywhere
from tests.integration.common.framework_wheels import left_out
from tests.support import flashinfer_wheel
from tests.support.ranks import run_processes
from tests.support.wheels import FetchError

SIZES = (2, 4)
#: tests/flashinfer/cases.py has them; it cannot be imported here.
CASES = (
    "every_format",
    "the_bound_of_each_call",
    "communications_of_a_geometry_share_a_workspace",
    "what_the_backend_refuses",
    "flashinfers_layer_with_its_identity",
    "flashinfers_layer_with_experts_in_torch",
    "the_drop_in_has_flashinfers_signatures",
    "the_drop_in_carries_every_format",
    "the_least_workspace_is_enough",
    "ids_without_an_invalid_id_arrive_as_sent",
    "the_ranks_of_a_communicator_split_it_together",
    "a_reset_leaves_the_next_workspace_alone",
    "a_checkpoint_keeps_what_objects_of_these_sizes_are",
    "what_the_drop_in_refuses",
    "ranks_that_may_leave_cost_extra",
    "rounds_without_the_last_rank",
    "low_precision_of_the_drop_in",
    "flashinfers_own_backend_on_the_drop_in",
    "statistics_of_experts",
    "the_newcomers_page",
)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Outcomes]:
    try:
        flashinfer_wheel.folder()
    except FetchError as error:
        left_out(error)
    own, ranks = tmp_path_factory.mktemp("launcher"), tmp_path_factory.mktemp("ranks")
    (found,) = run_processes(1, run_everywhere, own, SIZES, ranks, meets=False)
    return dict(zip(SIZES, found, strict=True))


@pytest.mark.parametrize("ep_size", SIZES)
@pytest.mark.parametrize("name", CASES)
def test_on_ranks(outcomes: dict[int, Outcomes], name: str, ep_size: int) -> None:
    assert outcomes[ep_size][name] == ""


def test_every_case_is_listed(outcomes: dict[int, Outcomes]) -> None:
    assert tuple(outcomes[2]) == CASES
