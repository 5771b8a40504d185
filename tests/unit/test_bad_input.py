"""Calls that must be refused: the error names the value and what is expected, nothing is harmed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_nvlink_plugin import AllToAllConfig, Dispatched, MoeAllToAll
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
from tests.kernels.processes import run_processes

pytestmark = pytest.mark.timeout(120)

HIDDEN, TOP_K, CAPACITY = 8, 2, 4


def config(ep_size: int = 1, ep_rank: int = 0, **values: Any) -> AllToAllConfig:
    usual: dict[str, Any] = {
        "num_experts": 4,
        "top_k": TOP_K,
        "hidden_size": HIDDEN,
        "max_tokens_per_rank": CAPACITY,
        "dtype": torch.float32,
        "timeout_s": 30,
    }
    return AllToAllConfig(ep_size=ep_size, ep_rank=ep_rank, **{**usual, **values})


@pytest.fixture
def layer() -> Iterator[MoeAllToAll]:
    (group,) = ThreadGroup.ranks(1)
    with MoeAllToAll.create(config(extra_payload_bytes=(6,), num_channels=2), group) as exchange:
        yield exchange


def good(num_tokens: int = 3) -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(num_tokens, HIDDEN),
        "topk_ids": torch.zeros(num_tokens, TOP_K, dtype=torch.int32),
        "topk_weights": torch.rand(num_tokens, TOP_K),
        "extra_payloads": [torch.zeros(num_tokens, 3, dtype=torch.int16)],
    }


def assert_still_works(layer: MoeAllToAll) -> None:
    inputs = good()
    received = layer.dispatch(**inputs)
    combined = layer.combine(received.hidden_states.clone(), received.metadata)
    assert torch.equal(combined, inputs["hidden_states"])


BAD_DISPATCHES: dict[str, tuple[dict[str, Any], str]] = {
    "hidden width": (
        {"hidden_states": torch.randn(3, HIDDEN + 1)},
        r"hidden_states has shape \[3, 9\], expected \[3, 8\]",
    ),
    "hidden rank": ({"hidden_states": torch.randn(3)}, r"hidden_states has shape \[3\]"),
    "hidden scalar": ({"hidden_states": torch.tensor(1.0)}, r"hidden_states has shape \[\]"),
    "hidden dtype": (
        {"hidden_states": torch.randn(3, HIDDEN).bfloat16()},
        "hidden_states has dtype torch.bfloat16, expected torch.float32",
    ),
    "hidden strides": (
        {"hidden_states": torch.randn(HIDDEN, 3).T},
        r"hidden_states is not contiguous \(strides \[1, 3\]\); call .contiguous",
    ),
    "hidden device": (
        {"hidden_states": torch.empty(3, HIDDEN, device="meta")},
        "is on meta, this exchange works on cpu",
    ),
    "ids device": (
        {"topk_ids": torch.empty(3, TOP_K, dtype=torch.int32, device="meta")},
        "is on meta, this exchange works on cpu",
    ),
    "too many tokens": (good(CAPACITY + 1), "5 tokens exceed max_tokens_per_rank=4"),
    "ids of fewer tokens": (
        {"topk_ids": torch.zeros(2, TOP_K, dtype=torch.int32)},
        r"topk_ids has shape \[2, 2\], expected \[3, 2\]",
    ),
    "ids top_k": ({"topk_ids": torch.zeros(3, 1, dtype=torch.int32)}, r"expected \[3, 2\]"),
    "ids dtype": (
        {"topk_ids": torch.zeros(3, TOP_K)},
        "topk_ids has dtype torch.float32, expected torch.int32 or torch.int64",
    ),
    "ids strides": (
        {"topk_ids": torch.zeros(3, 2 * TOP_K, dtype=torch.int32)[:, ::2]},
        "topk_ids is not contiguous",
    ),
    "weights dtype": (
        {"topk_weights": torch.rand(3, TOP_K).half()},
        "topk_weights has dtype torch.float16",
    ),
    "weights shape": ({"topk_weights": torch.rand(3, 3)}, r"topk_weights has shape \[3, 3\]"),
    "no extra payload": ({"extra_payloads": []}, "0 extra payloads given"),
    "two extra payloads": (
        {"extra_payloads": [torch.zeros(3, 6, dtype=torch.uint8)] * 2},
        r"2 extra payloads given, the configuration names 1 \(extra_payload_bytes=\(6,\)\)",
    ),
    "extra row bytes": (
        {"extra_payloads": [torch.zeros(3, 5, dtype=torch.uint8)]},
        r"extra_payloads\[0\] has rows of 5 bytes, configured are 6",
    ),
    "extra tokens": (
        {"extra_payloads": [torch.zeros(2, 6, dtype=torch.uint8)]},
        r"extra_payloads\[0\] has shape \[2, 6\], expected \[3, 6\]",
    ),
    "unexpected scales": ({"scales": torch.ones(3, 1)}, "has no scales"),
    "channel": ({"channel": 2}, "channel=2 is not below num_channels=2"),
    "negative channel": ({"channel": -1}, "channel=-1"),
}


@pytest.mark.parametrize("name", BAD_DISPATCHES)
def test_dispatch_refuses(name: str, layer: MoeAllToAll) -> None:
    changes, message = BAD_DISPATCHES[name]
    with pytest.raises(InputError, match=message):
        layer.dispatch(**{**good(), **changes})
    assert_still_works(layer)


def other_metadata(received: Dispatched, **changes: Any) -> Any:
    return received.metadata._replace(**changes)


SLOTS = CAPACITY
BAD_COMBINES: dict[str, tuple[Callable[[Dispatched], tuple[Any, ...]], str]] = {
    "rows": (
        lambda r: (torch.randn(SLOTS - 1, HIDDEN), r.metadata),
        r"expert_output has shape \[3, 8\], expected \[4, 8\]",
    ),
    "dtype": (
        lambda r: (torch.randn(SLOTS, HIDDEN).half(), r.metadata),
        "expert_output has dtype torch.float16",
    ),
    "strides": (
        lambda r: (torch.randn(HIDDEN, SLOTS).T, r.metadata),
        "expert_output is not contiguous",
    ),
    "device": (
        lambda r: (torch.empty(SLOTS, HIDDEN, device="meta"), r.metadata),
        "is on meta, this exchange works on cpu",
    ),
    "output shape": (
        lambda r: (r.hidden_states, r.metadata, torch.empty(2, HIDDEN)),
        r"output has shape \[2, 8\], expected \[3, 8\]",
    ),
    "output dtype": (
        lambda r: (r.hidden_states, r.metadata, torch.empty(3, HIDDEN).double()),
        "output has dtype torch.float64",
    ),
    "output strides": (
        lambda r: (r.hidden_states, r.metadata, torch.empty(HIDDEN, 3).T),
        "output is not contiguous",
    ),
    "another layer's metadata": (
        lambda r: (r.hidden_states, other_metadata(r, handle=10**6)),
        "metadata belongs to exchange 1000000",
    ),
    "metadata without top_k": (
        lambda r: (r.hidden_states, other_metadata(r, send_slots=r.metadata.send_slots[:, :1])),
        r"metadata.send_slots has shape \[3, 1\]",
    ),
    "metadata of too many tokens": (
        lambda r: (
            r.hidden_states,
            other_metadata(r, send_slots=torch.zeros(9, TOP_K, dtype=torch.int32)),
        ),
        "metadata of 9 tokens exceeds max_tokens_per_rank=4",
    ),
    "metadata channel": (
        lambda r: (r.hidden_states, other_metadata(r, channel=7)),
        "channel=7 is not below num_channels=2",
    ),
}


@pytest.mark.parametrize("name", BAD_COMBINES)
def test_combine_refuses(name: str, layer: MoeAllToAll) -> None:
    """The dispatch before stays to be combined."""
    arguments, message = BAD_COMBINES[name]
    inputs = good()
    received = layer.dispatch(**inputs)
    rows, metadata, *output = arguments(received)
    with pytest.raises(InputError, match=message):
        layer.combine(rows, metadata, output=output[0] if output else None)
    combined = layer.combine(received.hidden_states.clone(), received.metadata)
    assert torch.equal(combined, inputs["hidden_states"])


def test_slots_outside_the_buffers_are_no_rows(layer: MoeAllToAll) -> None:
    received = layer.dispatch(**good())
    slots = torch.tensor([[-5, 10**6], [2**31 - 1, -(2**31)], [SLOTS, -1]], dtype=torch.int32)
    combined = layer.combine(received.hidden_states, other_metadata(received, send_slots=slots))
    assert not bool(combined.any())


def test_combine_input_of_another_type(layer: MoeAllToAll) -> None:
    with pytest.raises(InputError, match=r"torch.float16 was asked for, combine reduces torch.fl"):
        layer.combine_input(torch.float16)
    assert layer.combine_input(torch.float32).dtype is torch.float32
    with pytest.raises(InputError, match="channel=2"):
        layer.combine_input(channel=2)


# Out of order.


def test_combine_without_dispatch(layer: MoeAllToAll) -> None:
    received = layer.dispatch(**good())
    layer.combine(received.hidden_states, received.metadata)
    with pytest.raises(ExchangeStateError, match="combine without dispatch on channel 0"):
        layer.combine(received.hidden_states, received.metadata)
    with pytest.raises(ExchangeStateError, match="on channel 1"):
        layer.combine(received.hidden_states, other_metadata(received, channel=1))
    assert_still_works(layer)


def test_dispatch_twice(layer: MoeAllToAll) -> None:
    received = layer.dispatch(**good())
    with pytest.raises(ExchangeStateError, match="dispatch twice on channel 0.*another channel"):
        layer.dispatch(**good())
    other = layer.dispatch(**good(), channel=1)
    for each in (received, other):
        layer.combine(each.hidden_states.clone(), each.metadata)
    assert_still_works(layer)


def test_a_second_layer_may_not_come_between() -> None:
    (group,) = ThreadGroup.ranks(1)
    with (
        MoeAllToAll.create(config(), group) as first,
        MoeAllToAll.create(config(), group, share_with=first) as second,
    ):
        inputs = {**good(), "extra_payloads": ()}
        received = first.dispatch(**inputs)
        with pytest.raises(ExchangeStateError, match="dispatch twice"):
            second.dispatch(**inputs)
        with pytest.raises(InputError, match="metadata belongs to exchange"):
            second.combine(received.hidden_states, received.metadata)
        larger = config(hidden_size=1000)
        with pytest.raises(ExchangeStateError, match="cannot grow between a dispatch and its"):
            MoeAllToAll.create(larger, group, share_with=first)
        first.combine(received.hidden_states, received.metadata)
        MoeAllToAll.create(larger, group, share_with=first).close()
        second.combine(received.hidden_states, second.dispatch(**inputs).metadata)


def test_after_close(layer: MoeAllToAll) -> None:
    inputs = good()
    received = layer.dispatch(**inputs)
    before = received.hidden_states.clone(), received.topk_ids.clone()
    stats = layer.stats()
    layer.close()
    layer.close()
    for call in (
        lambda: layer.dispatch(**inputs),
        lambda: layer.combine(before[0], received.metadata),
        layer.combine_input,
    ):
        with pytest.raises(ExchangeStateError, match="closed; create a new MoeAllToAll"):
            call()
    # What was handed out stays readable, and the totals stay told.
    assert torch.equal(received.hidden_states, before[0])
    assert torch.equal(received.topk_ids, before[1])
    assert layer.stats() == stats
    assert stats.rounds == 1


def test_a_layer_outlives_the_one_it_shares_with() -> None:
    (group,) = ThreadGroup.ranks(1)
    first = MoeAllToAll.create(config(), group)
    second = MoeAllToAll.create(config(extra_payload_bytes=(6,)), group, share_with=first)
    first.close()
    with second:
        assert_still_works(second)
    with pytest.raises(ExchangeStateError, match="closed"):
        MoeAllToAll.create(config(), group, share_with=first)


# Ranks that do not agree.


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
        assert "share_with given: rank 0 has False, rank 1 has True" in str(outcome)


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
    with pytest.raises(ConfigError, match="transport='rdma' is unknown; installed are host"):
        MoeAllToAll.create(config(transport="rdma"), group)
    with pytest.raises(UnsupportedError, match="no installed transport serves cuda ranks"):
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

    def rank_main(group: ThreadGroup) -> tuple[float, BaseException | None, BaseException | None]:
        inputs = {**good(), "extra_payloads": ()}
        with MoeAllToAll.create(config(4, group.rank, timeout_s=0.6), group) as layer:
            for _round in range(2):
                received = layer.dispatch(**inputs)
                layer.combine(received.hidden_states.clone(), received.metadata)
            absent = group.rank in (1, 3)
            if phase == "combine":
                received = layer.dispatch(**inputs)
            started = time.monotonic()
            first = second = None
            if not absent:
                try:
                    if phase == "dispatch":
                        layer.dispatch(**inputs)
                    else:
                        layer.combine(received.hidden_states.clone(), received.metadata)
                except ExchangeTimeoutError as error:
                    first = error
                waited = time.monotonic() - started
                try:
                    layer.dispatch(**inputs)
                except ExchangeStateError as error:
                    second = error
            else:
                waited = 0.0
            group.all_gather_object(None)  # the absent ranks' memory stays until the end
            return waited, first, second

    for rank, (waited, first, second) in enumerate(run_ranks(4, rank_main)):
        if rank in (1, 3):
            continue
        check_timeout(first, phase, 3, (1, 3))
        assert 0.5 < waited < 5
        assert second is not None, "the exchange went on as if nothing had happened"
        assert "unusable since" in str(second)


def test_a_combined_row_after_a_fault_is_no_number() -> None:
    """The output of a combine that failed must not look like a result."""
    outputs = [torch.zeros(3, HIDDEN) for _ in range(2)]

    def rank_main(group: ThreadGroup) -> None:
        inputs = {**good(), "extra_payloads": ()}
        with MoeAllToAll.create(config(2, group.rank, timeout_s=0.4), group) as layer:
            received = layer.dispatch(**inputs)
            rows = received.hidden_states.clone()
            if group.rank == 0:
                with pytest.raises(ExchangeTimeoutError):
                    layer.combine(rows, received.metadata, output=outputs[0])
            group.all_gather_object(None)

    run_ranks(2, rank_main)
    assert bool(outputs[0].isnan().all())


def _absent_from_create(ep_rank: int, ep_size: int, folder: str) -> tuple[str, str, float]:
    """Rank 1 never calls create; rank 0 is to hear which rank is missing."""
    done = Path(folder, "rank 0 is done")
    if ep_rank == 1:
        while not done.exists():
            time.sleep(0.02)
        return "", "", 0.0
    started = time.monotonic()
    try:
        MoeAllToAll.create(config(ep_size, ep_rank, timeout_s=2), dist.group.WORLD)
    except Exception as error:  # carried to the test
        return type(error).__name__, str(error), time.monotonic() - started
    finally:
        done.touch()
    return "nothing raised", "", 0.0


def test_a_rank_that_never_creates(tmp_path: Path) -> None:
    (name, message, waited), _ = run_processes(2, _absent_from_create, tmp_path, str(tmp_path))
    assert name == "PeerError", (name, message)
    assert "1" in message.split("arrived", 1)[1]
    assert 1.5 < waited < 15


def _killed_between_rounds(ep_rank: int, ep_size: int) -> tuple[str, tuple[int, ...], list[str]]:
    """Rank 1 dies by SIGKILL after a round; rank 0 is to say who is missing."""
    inputs = {**good(), "extra_payloads": ()}
    layer = MoeAllToAll.create(config(ep_size, ep_rank, timeout_s=1.5), dist.group.WORLD)
    received = layer.dispatch(**inputs)
    layer.combine(received.hidden_states.clone(), received.metadata)
    if ep_rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        layer.dispatch(**inputs)
    except ExchangeTimeoutError as error:
        left = [path.name for path in Path("/dev/shm").glob(f"moe_nvlink-{os.getuid()}-*")]
        return error.phase, error.ranks, left
    return "nothing raised", (), []


def test_a_rank_that_is_killed(tmp_path: Path) -> None:
    before = {path.name for path in Path("/dev/shm").glob(f"moe_nvlink-{os.getuid()}-*")}
    (phase, ranks, left), _ = run_processes(2, _killed_between_rounds, tmp_path, killed=(1,))
    assert (phase, ranks) == ("dispatch", (1,))
    assert set(left) <= before, "shared memory outlived its rank"
