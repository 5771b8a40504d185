"""Verbs out of order; what layers, channels and threads that share a workspace may and may not do
to each other; what remains after close.
"""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from moe_nvlink_plugin import HeadGroup, MoeAllToAll, sharded_argmax
from moe_nvlink_plugin.errors import (
    CompileError,
    ConfigError,
    DisagreementError,
    ExchangeStateError,
    ExchangeTimeoutError,
    InputError,
    PeerError,
    TransportError,
)
from moe_nvlink_plugin.jit.host import HostLibrary
from moe_nvlink_plugin.memory.workspace import Workspace
from moe_nvlink_plugin.testing import ThreadGroup, run_ranks, try_ranks
from moe_nvlink_plugin.transport.host import HostMemory
from tests.core.exchange.small_exchange import (
    HIDDEN,
    alone,
    assert_still_works,
    config,
    good,
    plain,
    round_of,
)
from tests.support import small_head
from tests.support.ranks import run_threads


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


# Layers on one workspace.


def test_a_workspace_of_another_group_is_refused() -> None:
    """Its window has no place for the second rank: the kernel would write beyond it."""
    with alone() as single:

        def rank_main(group: ThreadGroup) -> None:
            MoeAllToAll.create(config(2, group.rank), group, share_with=single)

        outcomes = try_ranks(2, rank_main)
    assert [type(outcome) for outcome in outcomes] == [ConfigError] * 2
    assert "share_with belongs to" in str(outcomes[0])


def test_a_layer_that_grows_within_what_is_mapped() -> None:
    """Regions come in whole pages, so a row of a few bytes more may need no more memory."""

    def rank_main(group: ThreadGroup) -> tuple[int, int]:
        small, wide = (config(2, group.rank, hidden_size=HIDDEN + more) for more in (0, 1))
        with MoeAllToAll.create(small, group) as first:
            before = first.workspace_bytes
            with MoeAllToAll.create(wide, group, share_with=first) as second:
                rows = {**plain(), "hidden_states": torch.ones(3, HIDDEN + 1)}
                for layer, inputs in ((second, rows), (first, plain())):
                    assert_still_works(layer, inputs)
                return before, second.workspace_bytes

    for before, after in run_ranks(2, rank_main):
        assert before == after, "the case this test is about"


@pytest.mark.parametrize("small_tokens", [0, 8], ids=["bulk", "small"])
def test_layers_of_equal_geometry_in_different_order(small_tokens: int) -> None:
    """They have numbers, which count those that have been closed too."""

    def rank_main(group: ThreadGroup) -> None:
        mine = config(2, group.rank, small_tokens=small_tokens)
        with (
            MoeAllToAll.create(mine, group) as first,
            MoeAllToAll.create(mine, group, share_with=first) as second,
            MoeAllToAll.create(mine, group, share_with=first) as third,
        ):
            second.close()
            for layer in (first, third):
                round_of(layer, **plain())
            try:
                (first, third)[group.rank].dispatch(**plain())
            finally:
                group.all_gather_object(None)

    for rank, outcome in enumerate(try_ranks(2, rank_main)):
        assert isinstance(outcome, DisagreementError), repr(outcome)
        said = f"used another layer, maybe of another geometry, than rank {rank} (layer number "
        assert f"{said}{2 * rank} of its workspace, " in str(outcome)
        assert "must call the same layers in the same order" in str(outcome)


def test_ranks_that_mean_different_workspaces_are_told() -> None:
    """Rank 0's would have to grow, rank 1's would not: one of them would wait for the other."""

    def rank_main(group: ThreadGroup) -> None:
        mine = config(2, group.rank)
        wide = config(2, group.rank, hidden_size=999)
        with MoeAllToAll.create(mine, group) as small, MoeAllToAll.create(wide, group) as large:
            mixed = small if group.rank == 0 else large
            with pytest.raises(DisagreementError, match="share_with: rank 0 has a layer of"):
                MoeAllToAll.create(wide, group, share_with=mixed)
            MoeAllToAll.create(wide, group, share_with=small).close()

    run_ranks(2, rank_main)


def test_counters_that_cannot_be_read_do_not_keep_a_workspace_open(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a GPU after an illegal access: every copy from it fails."""
    layer = alone()
    workspace = layer._layer.workspace

    def broken(_self: Workspace[Any]) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with monkeypatch.context() as patch:
        patch.setattr(Workspace, "stats", broken)
        layer.close()
    assert "illegal memory access" in caplog.text
    with pytest.raises(ExchangeStateError, match="closed"):
        _ = workspace.memory


def test_after_a_timeout_no_layer_of_the_workspace_goes_on() -> None:
    """Another layer's rows would arrive in the round that the late rank still waits to join."""

    def rank_main(group: ThreadGroup) -> None:
        mine = config(2, group.rank, timeout_s=0.4)
        with (
            MoeAllToAll.create(mine, group) as first,
            MoeAllToAll.create(mine, group, share_with=first) as second,
        ):
            if group.rank == 0:
                with pytest.raises(ExchangeTimeoutError):
                    first.dispatch(**plain())
                with pytest.raises(ExchangeStateError, match="unusable since.*close all layers"):
                    second.dispatch(**plain())
            group.all_gather_object(None)
            error = ExchangeStateError if group.rank == 0 else PeerError
            with pytest.raises(error, match="unusable since"):
                MoeAllToAll.create(mine, group, share_with=first)

    run_ranks(2, rank_main)


def test_closing_between_dispatch_and_combine_ends_the_workspace() -> None:
    (group,) = ThreadGroup.ranks(1)
    first = MoeAllToAll.create(config(), group)
    with MoeAllToAll.create(config(), group, share_with=first) as second:
        first.dispatch(**plain())
        first.close()
        with pytest.raises(ExchangeStateError, match="closed between its dispatch and its combine"):
            second.dispatch(**plain())


def test_growth_in_the_middle_of_a_round_disturbs_nobody() -> None:
    """Another layer joins between a dispatch and its combine: rows and addresses stay."""

    def rank_main(group: ThreadGroup) -> bool:
        with MoeAllToAll.create(config(2, group.rank), group) as small:
            inputs = plain()
            received = small.dispatch(**inputs)
            copies = [tensor.clone() for tensor in received[:1]]
            before, bytes_before = received.hidden_states.data_ptr(), small.workspace_bytes
            large = MoeAllToAll.create(
                config(2, group.rank, hidden_size=5000, num_channels=2), group, share_with=small
            )
            with large:
                assert small.workspace_bytes > bytes_before
                assert torch.equal(received.hidden_states, copies[0])
                rows = received.hidden_states.clone()
                # Both ranks' first expert: the token's row comes back from one rank.
                same = torch.equal(small.combine(rows, received.metadata), inputs["hidden_states"])
                again = small.dispatch(**inputs)
                same = same and again.hidden_states.data_ptr() == before
                small.combine(again.hidden_states.clone(), again.metadata)
                for channel in range(2):
                    wide = {"hidden_states": torch.randn(3, 5000), "channel": channel}
                    assert_still_works(large, inputs | wide)
            return same

    assert run_ranks(2, rank_main) == [True, True]


def test_growth_that_fails_on_one_rank_leaves_both_ranks_working(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 1 cannot map what the second layer needs."""
    inner = HostMemory._map_all

    def failing(memory: HostMemory, *arguments: Any) -> None:
        if memory._group.rank == 1 and armed.is_set():
            raise TransportError("no room")
        inner(memory, *arguments)

    armed = threading.Event()
    monkeypatch.setattr(HostMemory, "_map_all", failing)

    def rank_main(group: ThreadGroup) -> None:
        with MoeAllToAll.create(config(2, group.rank), group) as small:
            group.all_gather_object(None)
            armed.set()
            error = TransportError if group.rank == 1 else PeerError
            wide = config(2, group.rank, hidden_size=999)
            with pytest.raises(error, match="no room"):
                MoeAllToAll.create(wide, group, share_with=small)
            group.all_gather_object(None)
            armed.clear()
            group.all_gather_object(None)
            for _ in range(3):
                assert_still_works(small, plain())
            MoeAllToAll.create(wide, group, share_with=small).close()

    run_ranks(2, rank_main)


def test_channels_of_two_threads_do_not_wait_for_each_other() -> None:
    """Each rank's threads use the channels in the opposite order of the other rank's."""

    def rank_main(group: ThreadGroup) -> None:
        mine = config(2, group.rank, num_channels=2, timeout_s=20)
        both = threading.Barrier(2, timeout=60)
        order = (0, 1) if group.rank == 0 else (1, 0)
        with MoeAllToAll.create(mine, group) as layer:

            def use(thread: int) -> None:
                both.wait()
                for _ in range(20):
                    assert_still_works(layer, plain() | {"channel": order[thread]})

            run_threads(2, use)

    run_ranks(2, rank_main)


def test_made_in_inference_mode_used_outside_and_the_other_way_round() -> None:
    inputs = plain()

    def use(layer: MoeAllToAll) -> None:
        received = layer.dispatch(**inputs)
        rows = layer.combine_input()
        rows.copy_(received.hidden_states)
        assert torch.equal(layer.combine(rows, received.metadata), inputs["hidden_states"])

    with torch.inference_mode():
        inside = alone()
        use(inside)
    use(inside)
    inside.close()
    with alone(extra_payload_bytes=(6,)) as outside:
        with torch.inference_mode():
            assert_still_works(outside)
        assert_still_works(outside)


@pytest.mark.parametrize("mode", ["inference", "fake", "exported"])
def test_a_bound_that_comes_first_in_a_mode(mode: str, environment: None) -> None:
    """combine copies the experts' rows, later in the memory of what was made there."""

    def rows_back(hidden: torch.Tensor) -> torch.Tensor:
        given = {**plain(2), "hidden_states": hidden, "max_tokens": 3}
        received = layer.dispatch(**given)
        rows = layer.combine_input(metadata=received.metadata).copy_(received.hidden_states)
        return layer.combine(rows.clone(), received.metadata)

    class Layer(torch.nn.Module):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return rows_back(hidden)

    ones = torch.ones(2, HIDDEN)
    with alone() as layer:
        if mode == "inference":
            with torch.inference_mode():
                rows_back(ones)
        elif mode == "fake":
            with FakeTensorMode(allow_non_fake_inputs=True):
                rows_back(ones)
        else:
            torch.export.export(Layer(), (ones,), strict=False)
        for number in (7.0, 9.0):
            with torch.no_grad():
                assert torch.equal(rows_back(number * ones), number * ones)


def test_threads_that_cannot_be_had_are_an_error_of_create_on_every_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Found at the first dispatch instead, one rank would raise and the others wait for it."""

    def refuse(_library: HostLibrary, num_threads: int) -> int:
        raise CompileError(f"cannot start {num_threads} threads; lower num_threads")

    monkeypatch.setattr(HostLibrary, "create_grid", refuse)
    for outcome in try_ranks(
        2, lambda group: MoeAllToAll.create(config(2, group.rank, num_threads=5), group)
    ):
        assert isinstance(outcome, CompileError)
        assert "cannot start 5 threads" in str(outcome)


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
