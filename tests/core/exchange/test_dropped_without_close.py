"""Layers and head groups that nobody closes, and where they are made.

No reference cycle may hold them: the garbage collector comes late, sees nothing of a GPU's memory
behind the window, and would unmap it in whichever thread it runs.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from moe_nvlink_plugin import HeadGroup, MoeAllToAll, sharded_argmax
from moe_nvlink_plugin.testing import ThreadGroup
from tests.core.exchange import small_exchange
from tests.support import small_head


def _layer() -> tuple[Any, Any]:
    (group,) = ThreadGroup.ranks(1)
    layer = MoeAllToAll.create(small_exchange.config(), group)
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
