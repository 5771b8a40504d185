"""What ranks do whose exchange is wrong when a server starts: all stop, or all fall back."""

from __future__ import annotations

import functools
import logging

import pytest
import torch

from moe_nvlink_plugin import AllToAllConfig
from moe_nvlink_plugin.errors import UnsupportedError
from moe_nvlink_plugin.exchange.kernels import LAYER
from moe_nvlink_plugin.integration.common import start
from moe_nvlink_plugin.integration.common.agreement import Ranks
from moe_nvlink_plugin.integration.common.options import Options, Wording
from moe_nvlink_plugin.jit import host
from moe_nvlink_plugin.testing import ThreadGroup, run_ranks, try_ranks
from tests.support.delays import replace_once

CPU = torch.device("cpu")
WORDING = Wording("Toy", "--toy-backend moe_nvlink", "toy.yaml", "", own_backend="its_own")


def config(rank: int) -> AllToAllConfig:
    return AllToAllConfig(
        ep_size=2,
        ep_rank=rank,
        num_experts=6,
        top_k=2,
        hidden_size=128,
        max_tokens_per_rank=16,
        timeout_s=60.0,
    )


def decision(
    group: ThreadGroup,
    fallbacks: tuple[str | None, str | None] = ("its_own", "its_own"),
) -> tuple[bool, str]:
    """Whether the ranks exchange, and what is wrong."""
    ranks = Ranks(group, group.rank, group.size, WORDING)
    options = Options(fallback=fallbacks[group.rank])
    wrong = start.why_wrong(ranks, CPU, options, config(group.rank))
    goes = start.can_exchange(ranks, options, apart="", wrong=wrong, advice="fallback: its_own")
    return goes, wrong


@pytest.fixture
def no_rows_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that tell their peers of no row."""
    cell = "pack_cell(shared.epoch, {}, tag)"
    text = replace_once(LAYER.host_source(), cell.format("count"), cell.format(0))
    library = host.HostLibrary(host.build(text, (*host.FLAGS, "-O0")))
    monkeypatch.setattr(host, "load", lambda _text: library)


def test_right_ranks_exchange(caplog: pytest.LogCaptureFixture) -> None:
    assert run_ranks(2, decision) == [(True, ""), (True, "")]
    assert not any(record.levelno >= logging.WARNING for record in caplog.records)


@pytest.mark.usefixtures("no_rows_arrive")
def test_all_ranks_fall_back_and_one_says_so(caplog: pytest.LogCaptureFixture) -> None:
    outcomes, told = run_ranks(2, decision), "0 rows instead of"
    assert [goes for goes, _wrong in outcomes] == [False, False]
    (wrong,) = {wrong for _goes, wrong in outcomes}
    assert told in wrong
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert warning.startswith(
        "All ranks go on with Toy's own exchange (its_own), as toy.yaml allows, because the "
        "self-check (large batches) failed: "
    )
    assert told in warning


@pytest.mark.usefixtures("no_rows_arrive")
@pytest.mark.parametrize(
    ("fallbacks", "some"),
    [((None, None), ""), (("its_own", None), " Ranks [1] are without `fallback`.")],
)
def test_all_ranks_stop_unless_all_may_fall_back(
    fallbacks: tuple[str | None, str | None], some: str
) -> None:
    outcomes = try_ranks(2, functools.partial(decision, fallbacks=fallbacks))
    assert all(isinstance(outcome, UnsupportedError) for outcome in outcomes)
    (told,) = {str(outcome) for outcome in outcomes}
    assert told.startswith("--toy-backend moe_nvlink: the self-check (large batches) failed: ")
    assert "Drop the flag, or add fallback: its_own on all ranks. `moe-nvlink verify` shows" in told
    assert told.endswith(f"please report what it writes.{some}")


def test_ranks_with_different_levels_are_wrong_before_any_round() -> None:
    def body(group: ThreadGroup) -> str:
        options = Options(self_check=("quick", "off")[group.rank])
        ranks = Ranks(group, group.rank, group.size, WORDING)
        return start.why_wrong(ranks, CPU, options, config(group.rank))

    (told,) = set(run_ranks(2, body))
    assert told == "toy.yaml: the ranks have different values of self_check: ['quick', 'off']"


def test_without_a_geometry_no_round_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "self_check", None)

    def body(group: ThreadGroup) -> str:
        ranks = Ranks(group, group.rank, group.size, WORDING)
        return start.why_wrong(ranks, CPU, Options(), None)

    assert run_ranks(2, body) == ["", ""]
