"""Ranks that disagree, stay away or die: the others are told who, and within the time."""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from moe_nvlink_plugin import HeadGroup, MoeAllToAll
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
from tests.core.exchange.small_exchange import alone, assert_still_works, config, plain, round_of
from tests.support import small_head
from tests.support.ranks import run_processes


class Kind(NamedTuple):
    """What ranks create together: how, with which configuration, and a round of it."""

    create: Callable[..., Any]
    config: Callable[..., Any]
    use: Callable[[Any], None]


KINDS = {
    "exchange": Kind(MoeAllToAll.create, config, lambda made: assert_still_works(made, plain())),
    "head": Kind(
        HeadGroup.create,
        small_head.config,
        lambda made: small_head.check_argmax(made, small_head.problem(made.config, [3, 2])),
    ),
}
each_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)

#: Fields that must be equal on all ranks, and two values of each.
SHARED: dict[str, dict[str, tuple[Any, Any]]] = {
    "exchange": {
        "max_tokens_per_rank": (4, 5),
        "num_experts": (4, 6),
        "top_k": (2, 1),
        "hidden_size": (128, 256),
        "dtype": (torch.float32, torch.bfloat16),
        "recipe": ("mxfp8", "fp8_block"),
        "combine": ("bf16", "fp8_block"),
        "combine_scale": (1.0, 2.0),  # it does not travel
        "num_channels": (1, 2),
        "extra_payload_bytes": ((), (4,)),
        "timeout_s": (30, 31),
    },
    "head": {
        "vocab_size": (50, 51),
        "hidden_size": (8, 16),
        "max_rows_per_rank": (4, 5),
        "dtype": (torch.float32, torch.bfloat16),
        "full_logits": (False, True),
        "timeout_s": (30, 31),
    },
}
#: With these, the exchange may have any of them.
USUAL = {"hidden_size": 128, "dtype": torch.bfloat16, "combine": "fp8_tensor"}


@pytest.mark.parametrize(
    ("kind", "field"), [(kind, name) for kind in KINDS for name in SHARED[kind]]
)
def test_different_configurations(kind: str, field: str) -> None:
    """Every rank is told, with both values."""
    values, usual = SHARED[kind][field], USUAL if kind == "exchange" else {}

    def rank_main(group: ThreadGroup) -> None:
        mine = usual | {field: values[group.rank == 1]}
        KINDS[kind].create(KINDS[kind].config(3, group.rank, **mine), group)

    for outcome in try_ranks(3, rank_main):
        assert isinstance(outcome, DisagreementError), repr(outcome)
        told = f"{field}: rank 0 has {values[0]}, rank 1 has {values[1]}, rank 2 has {values[0]}"
        assert told in str(outcome)


@each_kind
def test_threads_and_sms_may_differ(kind: Kind) -> None:
    def rank_main(group: ThreadGroup) -> int:
        own = {"num_threads": 1 + group.rank, "max_sms": 5 + group.rank}
        with kind.create(kind.config(2, group.rank, **own), group) as made:
            kind.use(made)
            return int(made.workspace_bytes)

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


@each_kind
def test_a_configuration_that_does_not_fit_the_group(kind: Kind) -> None:
    outcomes = try_ranks(2, lambda group: kind.create(kind.config(2, 0), group))
    assert isinstance(outcomes[0], PeerError)
    assert "rank 1: ConfigError" in str(outcomes[0])
    assert isinstance(outcomes[1], ConfigError)
    said = "2 ranks and this is rank 1, but [et]p_size=2 and [et]p_rank=0; pass the"
    assert re.search(said, str(outcomes[1]))


@each_kind
def test_what_is_not_there(kind: Kind) -> None:
    (group,) = ThreadGroup.ranks(1)
    refused: list[tuple[type[Exception], str, tuple[Any, ...]]] = [
        (ConfigError, "has 1 ranks and this is rank 0, but .p_size=3", (kind.config(3), group)),
        (ConfigError, "'rdma' is unknown; .* .*host", (kind.config(transport="rdma"), group)),
        (UnsupportedError, "no installed transport serves meta", (kind.config(), group, "meta")),
        (InputError, "group object lacks rank, size, all_gather_ob", (kind.config(), object())),
        (ConfigError, "a dict, not of class .*Config; pass .*Config", ({"size": 1}, group)),
    ]
    if not torch.cuda.is_available():
        no_gpu = "device cuda: torch .* sees no GPU"
        refused.append((UnsupportedError, no_gpu, (kind.config(), group, "cuda")))
    for error, message, arguments in refused:
        with pytest.raises(error, match=message):
            kind.create(*arguments)


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        ("fp3", "recipe='fp3' is unknown; installed are bf16, fp16, fp3"),
        ("bf16", "recipe 'bf16' takes activations of torch.bfloat16"),
    ],
)
def test_recipes_that_are_not_there(recipe: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        alone(recipe=recipe)


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
