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
CELL = "pack_cell(shared.epoch, count, tag)"
#: What is planted -> what stands in the place of CELL, seconds that a rank waits, and what is told.
FAULTS = {
    "no rows arrive": ("pack_cell(shared.epoch, 0, tag)", 60.0, "0 rows instead of"),
    "a wait that ends": ("pack_cell(shared.epoch - 1, count, tag)", 1.0, "ExchangeTimeoutError"),
}


def config(rank: int, timeout_s: float) -> AllToAllConfig:
    return AllToAllConfig(
        ep_size=2,
        ep_rank=rank,
        num_experts=6,
        top_k=2,
        hidden_size=128,
        max_tokens_per_rank=16,
        timeout_s=timeout_s,
    )


def decision(
    group: ThreadGroup,
    fallbacks: tuple[str | None, str | None] = ("its_own", "its_own"),
    timeout_s: float = 60.0,
) -> tuple[bool, str]:
    """Whether the ranks exchange, and what is wrong."""
    ranks = Ranks(group, group.rank, group.size, WORDING)
    options = Options(fallback=fallbacks[group.rank])
    wrong = start.why_wrong(ranks, CPU, options, config(group.rank, timeout_s))
    goes = start.can_exchange(ranks, options, apart="", wrong=wrong, advice="fallback: its_own")
    return goes, wrong


def plant(fault: str, monkeypatch: pytest.MonkeyPatch) -> tuple[float, str]:
    instead, timeout_s, told = FAULTS[fault]
    text = replace_once(LAYER.host_source(), CELL, instead)
    library = host.HostLibrary(host.build(text, (*host.FLAGS, "-O0")))
    monkeypatch.setattr(host, "load", lambda _text: library)
    return timeout_s, told


def test_right_ranks_exchange(caplog: pytest.LogCaptureFixture) -> None:
    assert run_ranks(2, decision) == [(True, ""), (True, "")]
    assert not any(record.levelno >= logging.WARNING for record in caplog.records)


@pytest.mark.parametrize("fault", FAULTS)
def test_all_ranks_fall_back_and_one_says_so(
    fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    timeout_s, told = plant(fault, monkeypatch)
    outcomes = run_ranks(2, functools.partial(decision, timeout_s=timeout_s))
    assert [goes for goes, _wrong in outcomes] == [False, False]
    (wrong,) = {wrong for _goes, wrong in outcomes}
    assert told in wrong
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert warning.startswith(
        "All ranks go on with Toy's own exchange (its_own), as toy.yaml allows, because the "
        "self-check (large batches) failed: "
    )
    assert told in warning


@pytest.mark.parametrize(
    ("fallbacks", "some"),
    [((None, None), ""), (("its_own", None), " Ranks [1] are without `fallback`.")],
)
def test_all_ranks_stop_unless_all_may_fall_back(
    fallbacks: tuple[str | None, str | None], some: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant("no rows arrive", monkeypatch)
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
        return start.why_wrong(ranks, CPU, options, config(group.rank, 60.0))

    (told,) = set(run_ranks(2, body))
    assert told == "toy.yaml: the ranks have different values of self_check: ['quick', 'off']"


def test_without_a_geometry_no_round_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "self_check", None)

    def body(group: ThreadGroup) -> str:
        ranks = Ranks(group, group.rank, group.size, WORDING)
        return start.why_wrong(ranks, CPU, Options(), None)

    assert run_ranks(2, body) == ["", ""]
