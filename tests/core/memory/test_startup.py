"""Ranks wait longer for one another while they start: which launch gets which limit, and what the
errors say of it.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import pytest
import torch

from moe_nvlink_plugin import AllToAllConfig, HeadConfig, HeadGroup, MoeAllToAll
from moe_nvlink_plugin.errors import ConfigError, ExchangeTimeoutError
from moe_nvlink_plugin.exchange import all_to_all
from moe_nvlink_plugin.lm_head import group as lm_head_group
from moe_nvlink_plugin.memory.startup import Startup, Timeouts
from moe_nvlink_plugin.testing import ThreadGroup, run_ranks, try_ranks
from tests.core.exchange.small_exchange import config, plain

TIMEOUTS = Timeouts(first=60.0, later=0.3)


def round_of(startup: Startup) -> tuple[float, float]:
    """Seconds that dispatch and combine of one round get."""
    dispatch = startup.begin_round(0, TIMEOUTS)
    combine = startup.timeout_ns(TIMEOUTS)
    startup.complete_round()
    return dispatch / 1e9, combine / 1e9


def test_two_rounds_have_the_first_limit() -> None:
    startup = Startup(lambda: False)
    assert [round_of(startup) for _ in range(2)] == [(60.0, 60.0)] * 2
    assert round_of(startup) == (0.3, 0.3)
    epochs = (1, 2, 3, 2**32 - 1)
    assert [startup.waited_s(0, epoch, TIMEOUTS) for epoch in epochs] == [60, 60, 0.3, 0.3]
    assert startup.waited_s(1, 1, TIMEOUTS) == 0.3, "another channel, which began later"


def test_a_held_startup_lasts_until_its_end() -> None:
    startup = Startup(lambda: False)
    startup.hold()
    assert {round_of(startup) for _ in range(3)} == {(60.0, 60.0)}
    startup.end()
    assert round_of(startup) == (0.3, 0.3)
    assert [startup.waited_s(0, epoch, TIMEOUTS) for epoch in (3, 4)] == [60, 0.3]


def test_what_a_graph_captures_has_the_later_limit() -> None:
    """It is replayed when start-up is over, and what comes after the capture is served, too."""
    capturing = False
    startup = Startup(lambda: capturing)
    startup.hold()
    assert round_of(startup) == (60.0, 60.0)
    capturing = True
    assert round_of(startup) == (0.3, 0.3)
    capturing = False
    assert round_of(startup) == (0.3, 0.3)


def late_by(seconds: float, group: ThreadGroup, *, held: bool = False, rounds: int = 1) -> Any:
    """Rank 1 comes late to the last of `rounds` rounds, after what it does in its experts."""
    mine = config(2, group.rank, timeout_s=TIMEOUTS.later, first_timeout_s=TIMEOUTS.first)
    with MoeAllToAll.create(mine, group) as layer:
        if held:
            layer.hold_startup()
        for number in range(rounds):
            received = layer.dispatch(**plain())
            if group.rank == 1 and number == rounds - 1:
                time.sleep(seconds)
            layer.combine(layer.combine_input().zero_(), received.metadata)
        return layer.stats().rounds


@pytest.mark.parametrize(("held", "rounds"), [(False, 2), (True, 3)], ids=["first", "held"])
def test_a_rank_that_tunes_its_experts_at_first_ends_nobody(held: bool, rounds: int) -> None:
    """It takes five times what a rank waits later."""
    seconds = 5 * TIMEOUTS.later
    found = run_ranks(2, lambda group: late_by(seconds, group, held=held, rounds=rounds))
    assert found == [rounds] * 2


def test_later_the_same_is_a_timeout() -> None:
    outcome, _ = try_ranks(2, lambda group: late_by(5 * TIMEOUTS.later, group, rounds=3))
    assert isinstance(outcome, ExchangeTimeoutError)
    assert "waited 0.3 s in combine of epoch 3 for rank(s) 1" in str(outcome)
    assert "raise timeout_s (MOE_NVLINK_TIMEOUT_S)" in str(outcome)


def test_the_error_names_the_first_limit() -> None:
    def rank_main(group: ThreadGroup) -> None:
        mine = config(2, group.rank, timeout_s=0.2, first_timeout_s=0.6)
        with MoeAllToAll.create(mine, group) as layer:
            try:
                if group.rank == 0:
                    layer.dispatch(**plain())
            finally:
                group.all_gather_object(None)

    outcome, _ = try_ranks(2, rank_main)
    assert isinstance(outcome, ExchangeTimeoutError)
    assert "waited 0.6 s in dispatch of epoch 1" in str(outcome)
    assert "raise first_timeout_s (MOE_NVLINK_FIRST_TIMEOUT_S)" in str(outcome)


@pytest.mark.parametrize("kind", ["all_to_all", "head"])
def test_create_waits_for_the_first_limit(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks load models before they create, some much longer than others."""
    limits: list[float] = []

    def as_group(group: Any, timeout_s: float) -> Any:
        limits.append(timeout_s)
        return group

    home = {"all_to_all": all_to_all, "head": lm_head_group}[kind]
    monkeypatch.setattr(home, "as_group", as_group)
    (group,) = ThreadGroup.ranks(1)
    times: dict[str, Any] = {"timeout_s": 2, "first_timeout_s": 60}
    if kind == "all_to_all":
        MoeAllToAll.create(config(**times), group).close()
    else:
        sizes: dict[str, Any] = {"tp_size": 1, "tp_rank": 0, "vocab_size": 8, "hidden_size": 8}
        HeadGroup.create(HeadConfig(**sizes, **times, max_rows_per_rank=1), group).close()
    assert limits == [60]


@pytest.mark.parametrize("kind", [AllToAllConfig, HeadConfig])
def test_where_the_limits_come_from(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {
        AllToAllConfig: {"ep_size": 1, "ep_rank": 0, "num_experts": 1, "top_k": 1}
        | {"hidden_size": 8, "max_tokens_per_rank": 1},
        HeadConfig: {"tp_size": 1, "tp_rank": 0, "vocab_size": 8, "hidden_size": 8}
        | {"max_rows_per_rank": 1},
    }[kind]

    def limits(**given: float) -> tuple[float, float]:
        return Timeouts.of(kind(**sizes, dtype=torch.float32, **given))

    for name in ("MOE_NVLINK_TIMEOUT_S", "MOE_NVLINK_FIRST_TIMEOUT_S"):
        monkeypatch.delenv(name, raising=False)
    assert limits() == (1800, 300)
    assert limits(timeout_s=5) == (5, 5), "one number given in code is meant for every wait"
    assert limits(timeout_s=5, first_timeout_s=9) == (9, 5)
    made = kind(**sizes, dtype=torch.float32, timeout_s=5)
    assert Timeouts.of(dataclasses.replace(made, timeout_s=6)) == (6, 6)
    assert limits(first_timeout_s=9) == (9, 300)
    monkeypatch.setenv("MOE_NVLINK_TIMEOUT_S", "7200")
    assert limits() == (7200, 7200), "start-up is not shorter than what comes after it"
    monkeypatch.setenv("MOE_NVLINK_FIRST_TIMEOUT_S", "9000")
    assert limits() == (9000, 7200)
    with pytest.raises(ConfigError, match="first_timeout_s=0 must be between 0 and 1e6 seconds"):
        limits(first_timeout_s=0)
