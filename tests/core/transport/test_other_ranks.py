"""Ranks that disagree, stay away or die: the others are told who, and within the time."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_nvlink_plugin import MoeAllToAll
from moe_nvlink_plugin.errors import (
    ConfigError,
    DisagreementError,
    ExchangeStateError,
    ExchangeTimeoutError,
    InputError,
    PeerError,
    UnsupportedError,
)
from moe_nvlink_plugin.testing import ThreadGroup, run_ranks, try_ranks
from tests.core.exchange.small_exchange import config, plain, round_of
from tests.support.ranks import run_processes


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("max_tokens_per_rank", (4, 5)),
        ("num_experts", (4, 6)),
        ("top_k", (2, 1)),
        ("hidden_size", (8, 16)),
        ("dtype", (torch.float32, torch.bfloat16)),
        ("num_channels", (1, 2)),
        ("extra_payload_bytes", ((), (4,))),
        ("timeout_s", (30, 31)),
    ],
)
def test_different_configurations(field: str, values: tuple[Any, Any]) -> None:
    """Every rank is told, with both values."""

    def rank_main(group: ThreadGroup) -> None:
        MoeAllToAll.create(config(3, group.rank, **{field: values[group.rank == 1]}), group)

    for outcome in try_ranks(3, rank_main):
        assert isinstance(outcome, DisagreementError), repr(outcome)
        told = f"{field}: rank 0 has {values[0]}, rank 1 has {values[1]}, rank 2 has {values[0]}"
        assert told in str(outcome)


def test_threads_may_differ() -> None:
    def rank_main(group: ThreadGroup) -> int:
        with MoeAllToAll.create(config(2, group.rank, num_threads=1 + group.rank), group) as each:
            return each.workspace_bytes

    first, second = run_ranks(2, rank_main)
    assert first == second > 0


def test_sharing_on_one_rank_only() -> None:
    def rank_main(group: ThreadGroup) -> None:
        mine = config(2, group.rank)
        with MoeAllToAll.create(mine, group) as first:
            MoeAllToAll.create(mine, group, share_with=first if group.rank else None)

    for outcome in try_ranks(2, rank_main):
        assert isinstance(outcome, DisagreementError)
        assert "share_with: rank 0 has None, rank 1 has a layer of workspace" in str(outcome)


def test_a_configuration_that_does_not_fit_the_group() -> None:
    def rank_main(group: ThreadGroup) -> None:
        MoeAllToAll.create(config(2, 0), group)

    outcomes = try_ranks(2, rank_main)
    assert isinstance(outcomes[0], PeerError)
    assert "rank 1: ConfigError" in str(outcomes[0])
    assert isinstance(outcomes[1], ConfigError)
    assert "this is rank 1" in str(outcomes[1])
    assert "ep_rank=0" in str(outcomes[1])


def test_what_is_not_there() -> None:
    (group,) = ThreadGroup.ranks(1)
    with pytest.raises(ConfigError, match="recipe='fp3' is unknown; installed are bf16, fp16, fp3"):
        MoeAllToAll.create(config(recipe="fp3"), group)
    with pytest.raises(ConfigError, match="recipe 'bf16' takes activations of torch.bfloat16"):
        MoeAllToAll.create(config(recipe="bf16"), group)
    with pytest.raises(ConfigError, match="transport='rdma' is unknown; installed are .*host"):
        MoeAllToAll.create(config(transport="rdma"), group)
    with pytest.raises(UnsupportedError, match="no installed transport serves meta ranks"):
        MoeAllToAll.create(config(), group, "meta")
    if not torch.cuda.is_available():
        with pytest.raises(UnsupportedError, match="device cuda: torch .* sees no GPU"):
            MoeAllToAll.create(config(), group, "cuda")
    with pytest.raises(InputError, match="group object lacks rank, size, all_gather_object"):
        MoeAllToAll.create(config(), object())


# Ranks that do not come.


def check_timeout(error: object, phase: str, epoch: int, late: tuple[int, ...]) -> None:
    assert isinstance(error, ExchangeTimeoutError), repr(error)
    assert isinstance(error, TimeoutError)
    assert (error.phase, error.epoch, error.ranks) == (phase, epoch, late)
    for words in (f"in {phase} of epoch {epoch}", f"rank(s) {', '.join(map(str, late))}"):
        assert words in str(error)


@pytest.mark.parametrize("phase", ["dispatch", "combine"])
def test_a_rank_that_never_arrives_is_named(phase: str) -> None:
    """In the third round ranks 1 and 3 stay away; the others say so, within the time."""

    def rank_main(group: ThreadGroup) -> tuple[float, ExchangeTimeoutError] | None:
        with MoeAllToAll.create(config(4, group.rank, timeout_s=0.6), group) as layer:
            for _round in range(2):
                round_of(layer, **plain())
            verb: Callable[[], Any] = functools.partial(layer.dispatch, **plain())
            if phase == "combine":
                received = verb()
                rows = received.hidden_states.clone()
                verb = functools.partial(layer.combine, rows, received.metadata)
            found = None
            if group.rank in (0, 2):
                started = time.monotonic()
                with pytest.raises(ExchangeTimeoutError) as caught:
                    verb()
                found = time.monotonic() - started, caught.value
                with pytest.raises(ExchangeStateError, match="unusable since"):
                    layer.dispatch(**plain())
            group.all_gather_object(None)  # the absent ranks' memory stays until the end
            return found

    for found in run_ranks(4, rank_main)[::2]:
        assert found is not None
        waited, error = found
        check_timeout(error, phase, 3, (1, 3))
        assert 0.5 < waited < 1.1, "one timeout for all the late ranks, not one for each"


def _absent_from_create(ep_rank: int, ep_size: int, folder: str) -> tuple[str, float]:
    """Rank 1 never calls create; rank 0 is to hear which rank is missing."""
    done = Path(folder, "rank 0 is done")
    if ep_rank == 1:
        while not done.exists():
            time.sleep(0.02)
        return "", 0.0
    started = time.monotonic()
    try:
        with pytest.raises(PeerError) as caught:
            MoeAllToAll.create(config(ep_size, ep_rank, timeout_s=2), dist.group.WORLD)
        return str(caught.value), time.monotonic() - started
    finally:
        done.touch()


def test_a_rank_that_never_creates(tmp_path: Path) -> None:
    (message, waited), _ = run_processes(2, _absent_from_create, tmp_path, str(tmp_path))
    assert "1" in message.split("arrived", 1)[1]
    assert 1.5 < waited < 15


# Ranks that do different things.


@pytest.mark.parametrize("num_threads", [1, 3])
def test_ranks_that_take_different_layers_for_a_round(num_threads: int) -> None:
    """Both layers lie in one workspace, so the rows arrive, and not where they are looked for."""

    def rank_main(group: ThreadGroup) -> str:
        small = config(2, group.rank, timeout_s=20, num_threads=num_threads)
        large = dataclasses.replace(small, max_tokens_per_rank=8)
        with (
            MoeAllToAll.create(large, group) as first,
            MoeAllToAll.create(small, group, share_with=first) as second,
        ):
            layer = first if group.rank == 0 else second
            with pytest.raises(DisagreementError) as caught:
                layer.dispatch(**plain())
            with pytest.raises(ExchangeStateError, match="unusable since"):
                first.dispatch(**plain())
            group.all_gather_object(None)
        return str(caught.value)

    first, second = run_ranks(2, rank_main)
    said = (
        "passed another max_tokens or active_ranks or other extra payloads, or used another layer, "
        "maybe of another geometry"
    )
    mine = "of its workspace, max_tokens"
    assert f"epoch 1 rank 1 {said}, than rank 0 (layer number 0 {mine}=8, max_tokens_per_r" in first
    assert f"rank 0 {said}, than rank 1 (layer number 1 {mine}=4, max_tokens_per_rank=4" in second
