"""Our backend of flashinfer.moe_ep and our drop-in for MoeAlltoAll, on 2 and 4 gloo processes.

FlashInfer's own tests are in no wheel; these follow the contract in its sources. All cases of a
number of ranks share one process group, and all ranks one import of FlashInfer.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.flashinfer.launch import Outcomes, run_everywhere
from tests.integration.common.framework_wheels import left_out
from tests.support import flashinfer_wheel
from tests.support.ranks import run_processes
from tests.support.wheels import FetchError

SIZES = (2, 4)
#: It cannot be imported here.
CASES = re.findall(
    r"^@case\ndef (\w+)\(", Path(__file__).with_name("cases.py").read_text("utf-8"), re.MULTILINE
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
    assert list(outcomes[2]) == CASES
    assert len(CASES) == 20
