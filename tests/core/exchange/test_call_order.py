"""Verbs out of order, layers that share a workspace, and what remains after close."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from moe_nvlink_plugin import HeadGroup, MoeAllToAll, sharded_argmax
from moe_nvlink_plugin.errors import ExchangeStateError, InputError
from moe_nvlink_plugin.testing import ThreadGroup
from tests.core.exchange.small_exchange import alone, assert_still_works, config, good, plain
from tests.support import small_head


def test_combine_without_dispatch(layer: MoeAllToAll) -> None:
    received = layer.dispatch(**good())
    layer.combine(received.hidden_states, received.metadata)
    with pytest.raises(ExchangeStateError, match="combine without dispatch on channel 0"):
        layer.combine(received.hidden_states, received.metadata)
    with pytest.raises(ExchangeStateError, match="on channel 1"):
        layer.combine(received.hidden_states, received.metadata._replace(channel=1))
    assert_still_works(layer)


def test_metadata_of_an_earlier_dispatch(layer: MoeAllToAll) -> None:
    earlier = layer.dispatch(**good())
    layer.combine(earlier.hidden_states, earlier.metadata)
    received = layer.dispatch(**good())
    with pytest.raises(ExchangeStateError, match="of dispatch 1 on channel 0.* last one was 2"):
        layer.combine(received.hidden_states, earlier.metadata)
    layer.combine(received.hidden_states, received.metadata)
    assert_still_works(layer)


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, pickle.dumps])
def test_nobody_copies_an_exchange(layer: MoeAllToAll, how: Callable[[object], object]) -> None:
    with pytest.raises(TypeError, match="a MoeAllToAll cannot be copied or pickled"):
        how(layer)
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
    (group,), inputs = ThreadGroup.ranks(1), plain()
    with (
        MoeAllToAll.create(config(), group) as first,
        MoeAllToAll.create(config(), group, share_with=first) as second,
    ):
        received = first.dispatch(**inputs)
        with pytest.raises(ExchangeStateError, match="dispatch twice"):
            second.dispatch(**inputs)
        with pytest.raises(InputError, match="metadata belongs to exchange"):
            second.combine(received.hidden_states, received.metadata)
        first.combine(received.hidden_states, received.metadata)
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


# Layers and head groups that nobody closes, and where they are made. No reference cycle may hold
# them: the garbage collector comes late, sees nothing of a GPU's memory behind the window, and
# would unmap it in whichever thread it runs.


def _layer() -> tuple[Any, Any]:
    layer = alone()
    return layer, layer._layer.workspace


def _head() -> tuple[Any, Any]:
    (group,) = ThreadGroup.ranks(1)
    head = HeadGroup.create(small_head.config(full_logits=True), group)
    return head, head._head.workspace


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("make", [_layer, _head])
def test_no_cycle_holds_what_is_dropped(
    make: Callable[[], tuple[Any, Any]], no_collector: None
) -> None:
    made, workspace = make()
    gone = weakref.ref(workspace)
    del made, workspace
    assert gone() is None


def test_a_default_device_does_not_reach_the_exchange() -> None:
    """vLLM builds models with the GPU as default device, and drafts make their group then."""
    with torch.device("meta"):
        (head, workspace), (_layer_made, other) = _head(), _layer()
    assert workspace.pending.device.type == other.pending.device.type == "cpu"
    weight = torch.zeros(small_head.VOCAB, small_head.HIDDEN)
    weight[7] = 1.0
    found = sharded_argmax(torch.ones(2, small_head.HIDDEN), weight, group=head)
    assert found.tolist() == [7, 7]
