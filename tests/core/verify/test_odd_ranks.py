"""Ranks of which one fails or was told something else: the others do not wait for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from moe_nvlink_plugin import AllToAllConfig, self_check
from moe_nvlink_plugin.errors import DisagreementError
from moe_nvlink_plugin.testing import ThreadGroup, run_ranks, try_ranks
from moe_nvlink_plugin.verify.checks import _Ran, run_together


@pytest.mark.parametrize("error", [ValueError, TypeError, MemoryError, OSError, IndexError])
def test_an_error_of_any_kind_is_told(error: type[Exception]) -> None:
    def in_rounds(group: ThreadGroup) -> list[str]:
        def batches() -> Iterator[_Ran]:
            yield _Ran([], [], [])
            if group.rank == 1:
                raise error("planted")
            yield _Ran([], [], [])

        return run_together(group, batches(), lambda _ran, _shared: None)

    def when_comparing(group: ThreadGroup) -> list[str]:
        def compared(_ran: Any, _shared: Any) -> None:
            if group.rank == 1:
                raise error("planted")

        return run_together(group, iter([_Ran([], [], [])]), compared)

    for body in (in_rounds, when_comparing):
        assert run_ranks(2, body) == [["", f"{error.__name__}: planted"]] * 2


@pytest.mark.parametrize(
    ("own", "said"),
    [
        (({}, {"level": "off"}), "level: rank 0 has quick, rank 1 has off"),
        (({}, {"level": "thorough"}), "level: rank 0 has quick, rank 1 has thorough"),
        (({}, {"recipe": "fp8_block"}), "recipe: rank 0 has None, rank 1 has fp8_block"),
        (({}, {"small_tokens": 8}), "small_tokens: rank 0 has None, rank 1 has 8"),
    ],
    ids=["off", "unknown", "recipe", "small"],
)
def test_ranks_of_which_one_was_told_something_else(
    own: tuple[dict[str, Any], ...], said: str
) -> None:
    def body(group: ThreadGroup) -> None:
        given = dict(own[group.rank])
        level = given.pop("level", "quick")
        config = AllToAllConfig(
            ep_size=2,
            ep_rank=group.rank,
            num_experts=4,
            top_k=2,
            hidden_size=128,
            max_tokens_per_rank=8,
            **given,
        )
        self_check(config, group, level=level)

    for outcome in try_ranks(2, body):
        assert isinstance(outcome, DisagreementError)
        assert said in str(outcome)
